"""kvfolio models: what the catalogue knows by name, and what each model remembers of a token.

Knows nothing of how a layer is priced.
"""

import json
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfolio.cli.options import Json
from kvfolio.errors import UnknownModelError
from kvfolio.planner import sizes
from kvfolio.planner.report import plain
from kvfolio.planner.words import KIND_WORDS
from kvfolio.spec.catalogue import CatalogueEntry, catalogue, nearest_names, spec_of_entry
from kvfolio.spec.formats import parse_cache_format
from kvfolio.spec.layers import (
    ChunkedAttention,
    CompressedSparse,
    LayerKind,
    RecurrentState,
    SingleKind,
    SlidingWindow,
    parts_of,
)
from kvfolio.spec.model import ModelSpec
from kvfolio.units import format_bytes, format_params

if TYPE_CHECKING:
    from rich.table import Table

_WIDE = 100  # letters from which every column has room
_FORMAT = parse_cache_format("bf16")  # the 16 bits that every size of the list is counted at


def models(
    text: Annotated[
        str | None, typer.Argument(help="Show only models with this text in their name or hub id.", metavar="TEXT")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the models that are known by name, without files or network."""
    entries = _matching(text)
    specs = [spec_of_entry(entry) for entry in entries]
    if as_json:
        print(json.dumps({"models": [_fields(*pair) for pair in zip(entries, specs, strict=True)]}))
    else:
        _print_table(specs)


def attention_words(spec: ModelSpec) -> str:
    """The layers of ``spec`` by kind: ``10 full · 52 window 1,024``, ``61 MLA``, ``48 gated delta net · 16 full``."""
    counts: Counter[str] = Counter()
    for layer in spec.layers:
        counts[_words(layer)] += 1
    return " · ".join(f"{count} {words}" for words, count in counts.most_common())


def _words(layer: LayerKind) -> str:
    return "+".join(_part_words(part) for part in parts_of(layer))


def _part_words(part: SingleKind) -> str:
    """The kind's word, with the number that tells one such layer from another."""
    words = KIND_WORDS[part.kind].short
    if isinstance(part, RecurrentState):
        return part.mechanism.replace("_", " ")
    if isinstance(part, CompressedSparse):
        # A layer of that model that compresses nothing within any text has its window alone.
        return f"{words} 1/{part.ratio}" if part.ratio else f"{KIND_WORDS['sliding_window'].short} {part.window:,}"
    return f"{words} {part.window:,}" if isinstance(part, SlidingWindow | ChunkedAttention) else words


def _matching(text: str | None) -> list[CatalogueEntry]:
    wanted = (text or "").casefold()
    found = [
        entry
        for entry in catalogue().values()
        if any(wanted in name.casefold() for name in (entry.name, entry.repo or "", *entry.aliases))
    ]
    if not found:
        names = nearest_names(wanted)
        nearest = f"; nearest: {', '.join(names)}" if names else ""
        raise UnknownModelError(f"no model of the catalogue has {text!r} in its name{nearest}; see: kvfolio models")
    return found


def _fields(entry: CatalogueEntry, spec: ModelSpec) -> dict[str, Any]:
    """One model of ``--json``: what ``kvfolio plan --json`` says too is called as it is there."""
    return {
        "name": entry.name,
        "repo": entry.repo,
        "aliases": list(entry.aliases),
        "num_parameters": entry.num_params,
        "num_active_parameters": entry.num_active_params,
        "weights_bytes": spec.weights.num_bytes,
        "num_layers": len(spec.layers),
        "attention": attention_words(spec),
        "bytes_per_token": plain(sizes.growth(spec, _FORMAT)),
        "bytes_fixed": sizes.fixed_bytes(spec, _FORMAT),
        "max_context": spec.max_context,
        "source": entry.source,
        "assumptions": list(spec.assumptions),
    }


def model_table(specs: Sequence[ModelSpec], width: int) -> "Table":
    """A row a model; where ``width`` letters are few, with the four columns that matter most."""
    from rich.table import Table

    is_wide = width >= _WIDE
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("name", no_wrap=True)
    for heading in ("params", "active", "layers") if is_wide else ("params",):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("attention")
    for heading in ("a token", "fixed", "context") if is_wide else ("a token", "context"):
        table.add_column(heading, justify="right", no_wrap=True)
    for spec in specs:
        fixed_bytes, weights = sizes.fixed_bytes(spec, _FORMAT), spec.weights
        size = [format_params(weights.num_params), format_params(weights.num_active_params), str(len(spec.layers))]
        fixed = [format_bytes(fixed_bytes) if fixed_bytes else ""]
        table.add_row(
            spec.name,
            *(size if is_wide else size[:1]),
            attention_words(spec),
            format_bytes(round(sizes.growth(spec, _FORMAT))),
            *(fixed if is_wide else []),
            f"{spec.max_context:,}" if spec.max_context else "",
        )
    return table


def _print_table(specs: Sequence[ModelSpec]) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:  # a file or a pipe has room
        console = Console(highlight=False, width=max(console.width, _WIDE + 40))
    console.print(model_table(specs, console.width))
    print("a token: bytes of cache at 16 bits that one more token adds; fixed: full windows and states of one sequence")
