"""kvfolio models: what the catalogue knows by name, and what each model remembers of a token.

Knows nothing of how a layer is priced.
"""

import json
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfolio.cli.options import Json
from kvfolio.errors import UnknownModelError
from kvfolio.spec.catalogue import CatalogueEntry, catalogue, nearest_names, spec_of_entry
from kvfolio.spec.formats import parse_cache_format
from kvfolio.spec.layers import CombinedLayer, CompressedSparse, LayerKind, RecurrentState
from kvfolio.spec.model import ModelSpec
from kvfolio.units import format_bytes

if TYPE_CHECKING:
    from rich.table import Table

_WIDE = 100  # letters from which every column has room
_SHORT_WORDS = {
    "full": "full",
    "block_sparse": "block sparse",
    "latent": "MLA",
    "latent_indexed": "MLA sparse",
    "cross_attention": "cross",
    "shared": "shared",
    "none": "without",
}


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
    if isinstance(layer, CombinedLayer):
        return "+".join(_words(part) for part in layer.parts)
    if isinstance(layer, RecurrentState):
        return layer.mechanism.replace("_", " ")
    if layer.kind == "sliding_window":
        return f"window {layer.window:,}"
    if layer.kind == "chunked":
        return f"chunk {layer.window:,}"
    if isinstance(layer, CompressedSparse):
        # A layer of that model that compresses nothing within any text has its window alone.
        return f"compressed 1/{layer.ratio}" if layer.ratio else f"window {layer.window:,}"
    return _SHORT_WORDS[layer.kind]


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


def _growth(spec: ModelSpec) -> Fraction:
    """Bytes at 16 bits that one more token adds when every window is full."""
    fmt = parse_cache_format("bf16")
    return sum((layer.growth(fmt) for layer in spec.layers), Fraction(0))


def _fixed_bytes(spec: ModelSpec) -> int:
    """Bytes at 16 bits of full windows and of states, for one sequence."""
    fmt = parse_cache_format("bf16")
    return sum(layer.fixed_bytes(fmt) for layer in spec.layers)


def _fields(entry: CatalogueEntry, spec: ModelSpec) -> dict[str, Any]:
    growth = _growth(spec)
    return {
        "name": entry.name,
        "repo": entry.repo,
        "aliases": list(entry.aliases),
        "num_params": entry.num_params,
        "num_active_params": entry.num_active_params,
        "weight_bytes": spec.weights.num_bytes,
        "layers": len(spec.layers),
        "attention": attention_words(spec),
        "kv_bytes_per_token": int(growth) if growth.denominator == 1 else float(growth),
        "kv_fixed_bytes": _fixed_bytes(spec),
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
        fixed_bytes = _fixed_bytes(spec)
        size = [_count(spec.weights.num_params), _count(spec.weights.num_active_params), str(len(spec.layers))]
        fixed = [format_bytes(fixed_bytes) if fixed_bytes else ""]
        table.add_row(
            spec.name,
            *(size if is_wide else size[:1]),
            attention_words(spec),
            format_bytes(round(_growth(spec))),
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


def _count(num_params: int) -> str:
    """``135 M``, ``8.03 B``, ``1.03 T``: the words in which model sizes are spoken of."""
    for size, letter in ((10**12, "T"), (10**9, "B")):
        if num_params >= 0.9995 * size:
            return f"{num_params / size:.3g} {letter}"
    return f"{num_params / 10**6:.3g} M"
