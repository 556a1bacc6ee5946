"""Options that several verbs share, and the loading of a model with them.

Knows nothing of what a verb does with the model. What needs torch is imported when a model is loaded, not before.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfolio.errors import OptionError

if TYPE_CHECKING:
    from kvfolio.engine.llm import LLM

Model = Annotated[
    str | None, typer.Argument(help="Hugging Face folder or GGUF file. Left out: the embedded SmolLM2-135M-Instruct.")
]
KvMemory = Annotated[
    str | None,
    typer.Option(help="Memory for the cache: 512MiB, 1GiB, 2GB. Left out: 1GiB, or less on a small machine."),
]
KvFormat = Annotated[
    str,
    typer.Option(
        help="How the cache is stored: auto (as computed), f32, bf16, f16, fp8, fp8-scaled, fp8-e5m2, int8, "
        "int8-channel, int6 … int2, K/V, or short k8v4. kvfolio check measures what each costs."
    ),
]
KvLayers = Annotated[
    str, typer.Option(help="Layers stored otherwise, counted from 0: 0-1=bf16,29=int8. exact: as computed.")
]
SinkBlocks = Annotated[
    int, typer.Option(help="First blocks of every sequence that full-attention layers keep exact in lossy formats.")
]
BlockTokens = Annotated[
    int | None,
    typer.Option(
        help="Tokens a block: 4, 8, 16, 32, 64, 128 or 256. "
        "Left out: 16, or 64 where keys are int6 … int2 or int8-channel: these share scales along a block."
    ),
]
Dtype = Annotated[str, typer.Option(help="What is computed in: auto (as published), f32, bf16 or f16.")]
Device = Annotated[str, typer.Option(help="cpu, or a torch device such as cuda (torch kernels).")]
Threads = Annotated[int | None, typer.Option(help="Threads of the kernels. Left out: torch's choice.")]
PrefixCache = Annotated[
    bool, typer.Option("--prefix-cache/--no-prefix-cache", help="Requests share the blocks of equal beginnings.")
]
Eviction = Annotated[str, typer.Option(help="Which cached block goes first: lru, lfu, slru, s3fifo or gdsf.")]
Preemption = Annotated[
    str, typer.Option(help="When memory runs short: recompute, swap to the host pool, or auto, the cheaper one.")
]
MaxPreemptions = Annotated[
    int, typer.Option(help="How often a request may be preempted; 0: it starts when all it may need is free.")
]
SwapMemory = Annotated[str, typer.Option(help="Host pool for swapping: 512MiB, 1GiB, 2GB. 0: none.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def printable(text: str) -> str:
    """``text`` on one line, with escapes for what would steer a terminal; names come from files."""
    return "".join(letter if letter.isprintable() else ascii(letter)[1:-1] for letter in text)


@contextmanager
def needs_torch() -> Iterator[None]:
    """Around imports of the engine: says how to install what they lack."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise OptionError(
            f"running a model needs {error.name}, which is not installed: pip install 'kvfolio[run]'"
        ) from error


def load(model: str | None, **options: Any) -> "LLM":
    with needs_torch():
        from kvfolio.engine.llm import LLM

    with byte_bar("reading weights") as on_progress:
        return LLM(model, on_progress=on_progress, **options)


@contextmanager
def byte_bar(words: str) -> Iterator[Any]:
    """A bar on standard error while bytes are read or written; nothing where that is not a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn

    columns = (TextColumn(words), BarColumn(), DownloadColumn(binary_units=True))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("weights")
        yield lambda done, total: bar.update(task, completed=done, total=total)
