"""Options that the planning verbs share.

Knows nothing of what they mean: ``planner.options`` reads them.
"""

from typing import Annotated

import typer

Models = Annotated[
    list[str],
    typer.Argument(help="A known name (kvfolio models), folder, config.json, GGUF, or hub id.", metavar="MODEL…"),
]
Context = Annotated[str | None, typer.Option(help="Tokens of a sequence, several with commas: 4096,128k.")]
DeviceName = Annotated[
    str | None,
    typer.Option("--device", help="A known device (kvfolio devices), or this: the present machine, measured."),
]
DeviceMemory = Annotated[
    str | None, typer.Option(help="Memory of one device instead of the table's: 80GB (decimal) or 80GiB (binary).")
]
Bandwidth = Annotated[str | None, typer.Option(help="Bytes a second instead of the table's: 3.35TB.")]
Flops = Annotated[float | None, typer.Option(help="FLOP a second instead of the table's: 989e12.")]
Utilisation = Annotated[
    float,
    typer.Option(
        "--utilisation", "--utilization", help="Share of a device's memory that may be used, above 0 up to 1."
    ),
]
Reserve = Annotated[str, typer.Option(help="Memory of each device kept free beside that: 2GiB.")]
Devices = Annotated[int, typer.Option(help="Devices that share the model, tensor parallel.")]
Pipeline = Annotated[int, typer.Option(help="Pipeline stages, each on --devices devices.")]
PlannedFormat = Annotated[
    str,
    typer.Option(
        help="auto (16 bits), f32, bf16, f16, fp8, fp8-scaled, fp8-mla, int8, int6 … int2, int4-g64, k8v4, K/V."
    ),
]
WeightsBytes = Annotated[str | None, typer.Option(help="Bytes of all weights instead of the published: 16.06GB.")]
MeanTokens = Annotated[str | None, typer.Option(help="Mean tokens of a sequence, for paged memory.")]
PrefixTokens = Annotated[str, typer.Option(help="Tokens of a prefix that all sequences share.")]
EncoderTokens = Annotated[str, typer.Option(help="Tokens of the encoder (image, speech) where the input decides.")]
