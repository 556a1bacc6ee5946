"""How much memory a model's cache takes, and how a byte budget is cut into blocks.

The one place that counts cache bytes: the engine allocates what this returns. Knows nothing of tensors or sequences.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvfolio.errors import BudgetError, OptionError
from kvfolio.planner.layer_formats import LayerFormat, names_by_layer, parse_layer_formats
from kvfolio.spec.formats import CacheFormat, find_cache_format
from kvfolio.spec.layout import OPEN_SHARE, CacheLayout, GroupLayout
from kvfolio.spec.model import RunnableSpec
from kvfolio.units import format_bytes

BLOCK_TOKENS_ALLOWED = (4, 8, 16, 32, 64, 128, 256)
DEFAULT_BLOCK_TOKENS = 16  # measured: benchmarks/block_tokens.py, docs/lab.md
DEFAULT_MAX_RUNNING = 64
SINK_SHARE = 4  # of a budget that is split, sink groups are set aside at most one part in so many


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """What a user chooses about the cache."""

    kv_memory: int  # bytes for everything: sealed and open blocks
    block_tokens: int | None = None  # None: what the formats like best
    kv_format: str = "auto"  # auto: the compute dtype
    max_running: int = DEFAULT_MAX_RUNNING  # sequences at once
    split: bool = False  # True: a fixed share of the budget for each group (devices without lazy memory)
    kv_layers: str = ""  # layers that are stored otherwise: planner/layer_formats.py
    sink_blocks: int = 0  # first blocks of every sequence that lossy full-attention layers keep exact

    def __post_init__(self) -> None:
        check_block_tokens(self.block_tokens)
        if self.max_running < 1:
            raise OptionError(f"max_running is {self.max_running}; at least 1 sequence must be able to run")
        if self.kv_memory < 1:
            raise OptionError(f"kv_memory is {self.kv_memory} bytes; give a positive size such as 1GiB")
        if self.sink_blocks < 0:
            raise OptionError(f"sink_blocks is {self.sink_blocks}; accepted: 0 (no block is kept exact) or more")
        self.exceptions  # noqa: B018 - what is no list of layers is refused here

    @property
    def exceptions(self) -> tuple[LayerFormat, ...]:
        return parse_layer_formats(self.kv_layers)


def check_block_tokens(block_tokens: int | None) -> None:
    """Raise OptionError for a block of a size that kernels do not read."""
    if block_tokens is not None and block_tokens not in BLOCK_TOKENS_ALLOWED:
        raise OptionError(f"block_tokens is {block_tokens}; accepted: {BLOCK_TOKENS_ALLOWED}")


def default_block_tokens(fmt: CacheFormat) -> int:
    """Tokens of a block in a cache of which nobody said how many."""
    return fmt.default_block_tokens or DEFAULT_BLOCK_TOKENS


def plan_cache(spec: RunnableSpec, dtype: str, options: CacheOptions) -> CacheLayout:
    """Cut ``options.kv_memory`` into open and sealed blocks for ``spec`` computed in ``dtype``.

    The result never takes more than the budget. Raises BudgetError when not even one block of every group fits,
    OptionError or UnknownModelError for formats and layers that there are not.
    """
    formats = _find_formats(spec, dtype, options)
    tokens, groups = formats.block_tokens, _groups(spec, formats, options.sink_blocks)
    sizes = [group.block_bytes for group in groups]
    open_row = sum(group.open_block_bytes for group in groups)
    num_open = max(1, min(options.max_running, options.kv_memory // OPEN_SHARE // open_row))
    budget = options.kv_memory - num_open * open_row
    budget -= budget % math.gcd(*sizes)
    if budget < sum(sizes):
        raise BudgetError(
            f"kv_memory {format_bytes(options.kv_memory)} ({options.kv_memory:,} B) is smaller than one block: "
            f"{tokens} tokens take {sum(sizes):,} B sealed and {open_row:,} B open; "
            f"give at least {num_open * open_row + sum(sizes):,} B, or fewer block_tokens"
        )
    counts = [budget // size for size in sizes]
    if options.split:
        counts = _split(groups, max(1, spec.max_context // 2), tokens, num_open, budget)
        budget = sum(count * size for count, size in zip(counts, sizes, strict=True))
    layouts = tuple(
        replace(group, num_blocks=count, num_open_blocks=num_open) for group, count in zip(groups, counts, strict=True)
    )
    return CacheLayout(layouts, tokens, formats.default, formats.exact, budget)


@dataclass(frozen=True, slots=True)
class _Formats:
    """How each layer is stored, and the blocks in which."""

    block_tokens: int
    exact: CacheFormat
    default: CacheFormat
    by_layer: tuple[CacheFormat, ...]


def _find_formats(spec: RunnableSpec, dtype: str, options: CacheOptions) -> _Formats:
    """The tokens of a block first, from the formats' names if nobody said how many; then the formats themselves."""
    default = dtype if options.kv_format == "auto" else options.kv_format
    names = names_by_layer(options.exceptions, len(spec.layers), default, dtype)
    tokens = options.block_tokens or max(default_block_tokens(find_cache_format(name)) for name in set(names))
    found = {name: find_cache_format(name, tokens) for name in {dtype, default, *names}}
    for fmt in found.values():
        fmt.check_block_tokens(tokens)
    return _Formats(tokens, found[dtype], found[default], tuple(found[name] for name in names))


def _groups(spec: RunnableSpec, formats: _Formats, num_sinks: int) -> list[GroupLayout]:
    """The layer groups, a sink group behind each lossy one whose layers read all tokens; without any blocks yet."""
    tokens, made = formats.block_tokens, list[GroupLayout]()
    for group in spec.groups(formats.by_layer):
        fmt, exact_bytes = formats.by_layer[group.layer_indices[0]], group.block_bytes(tokens, formats.exact)
        made.append(GroupLayout(group, fmt, group.block_bytes(tokens, fmt), exact_bytes, 0, 0))
        if num_sinks and fmt != formats.exact and group.kind.window is None:
            made.append(GroupLayout(group, formats.exact, exact_bytes, 0, 0, 0, num_sinks))
    return made


def _split(groups: Sequence[GroupLayout], mean_tokens: int, tokens: int, num_open: int, budget: int) -> list[int]:
    """Blocks of each group, in the proportion that sequences of ``mean_tokens`` hold them; at least one each.

    Sink groups have those of all sequences that can run beside that, if it is no more than a part of the budget:
    short sequences hold as many of them as long ones.
    """
    weights = [min(mean_tokens, group.group.kind.window or mean_tokens) for group in groups]
    weights = [min(one, (group.num_sinks or one) * tokens) for one, group in zip(weights, groups, strict=True)]
    spare = budget - sum(group.block_bytes for group in groups)
    sink_row = sum(group.block_bytes for group in groups if group.is_sinks)
    beside = 0
    if sink_row:
        num_sinks = max(group.num_sinks or 0 for group in groups)
        beside = min(num_open * num_sinks, spare // SINK_SHARE // sink_row)
    spare -= beside * sink_row
    row = sum(weight * group.block_bytes for weight, group in zip(weights, groups, strict=True))
    return [1 + beside * group.is_sinks + spare * weight // row for weight, group in zip(weights, groups, strict=True)]
