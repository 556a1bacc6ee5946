"""kvfolio convert: a Hugging Face folder once more, with another number of key/value heads.

Knows nothing of tensors or of how files are written.
"""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvfolio.cli.options import Json, byte_bar, needs_torch, printable
from kvfolio.units import format_bytes

if TYPE_CHECKING:
    from kvfolio.models.convert import Conversion

_PAPER = "GQA, arXiv 2305.13245"


def convert(
    model: Annotated[
        Path,
        typer.Argument(help="Hugging Face folder of type llama, mistral, mixtral, qwen2, qwen3, gemma3_text, gpt_oss."),
    ],
    out: Annotated[Path, typer.Argument(help="Folder to write; it must not exist, or be empty.")],
    kv_heads: Annotated[
        int,
        typer.Option(
            help="Key/value heads of every layer. Fewer must divide the number that is there, and are means; more, "
            "up to one for each query head, are copies."
        ),
    ],
    as_json: Json = False,
) -> None:
    """Write a model with fewer or more key/value heads (MHA, GQA, MQA), hence a smaller or larger cache.

    Fewer heads are the means of those they replace. Expect no useful answers of such a model before it is trained
    further: the paper (GQA, arXiv 2305.13245) does so for 5 % of the pre-training steps. More heads are copies and
    change no answer.
    """
    with needs_torch():
        from kvfolio.models.convert import convert as convert_model

    with byte_bar("writing") as on_progress:
        result = convert_model(model, out, kv_heads, on_progress)
    if as_json:
        print(json.dumps({**dataclasses.asdict(result), "needs_training": result.needs_training}))
    else:
        for line in _lines(result):
            print(line)


def _lines(result: "Conversion") -> list[str]:
    before, after = result.before, result.after
    sizes = [(format_bytes(one.cache_bytes_per_token), format_bytes(one.weights_bytes)) for one in (before, after)]
    rows = [
        ("", "before", "after"),
        ("key/value heads", str(before.num_kv_heads), str(after.num_kv_heads)),
        (f"{result.dtype} cache a token", sizes[0][0], sizes[1][0]),
        ("weights", sizes[0][1], sizes[1][1]),
    ]
    return [
        f"{printable(result.model)}: {result.num_q_heads} query heads",
        *(f"{name:<18}{old:>12}{new:>12}" for name, old, new in rows),
        f"wrote {printable(result.out)}",
        _meaning(result),
    ]


def _meaning(result: "Conversion") -> str:
    if result.needs_training:
        return (
            "heads were joined to their means: expect no useful answers before the model is trained further "
            f"({_PAPER}: for 5 % of the pre-training steps)"
        )
    if result.after.num_kv_heads > result.before.num_kv_heads:
        return "heads are copies: answers as before, from a larger cache"
    return "as many heads as before: the weights are the same bytes"
