"""How much memory a model's cache takes, and how a byte budget is cut into blocks.

The one place that counts cache bytes: the engine allocates what this returns. Knows nothing of tensors or sequences.
"""

import math
from dataclasses import dataclass

from kvfolio.errors import BudgetError, OptionError
from kvfolio.spec.formats import CacheFormat, find_cache_format
from kvfolio.spec.layout import OPEN_SHARE, CacheLayout, GroupLayout
from kvfolio.spec.model import LayerGroup, RunnableSpec
from kvfolio.units import format_bytes

BLOCK_TOKENS_ALLOWED = (4, 8, 16, 32, 64, 128, 256)
DEFAULT_BLOCK_TOKENS = 16  # measured: benchmarks/block_tokens.py, docs/lab.md
DEFAULT_MAX_RUNNING = 64


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """What a user chooses about the cache."""

    kv_memory: int  # bytes for everything: sealed and open blocks
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    kv_format: str = "auto"  # auto: the compute dtype
    max_running: int = DEFAULT_MAX_RUNNING  # sequences at once
    split: bool = False  # True: a fixed share of the budget for each group (devices without lazy memory)

    def __post_init__(self) -> None:
        if self.block_tokens not in BLOCK_TOKENS_ALLOWED:
            raise OptionError(f"block_tokens is {self.block_tokens}; accepted: {BLOCK_TOKENS_ALLOWED}")
        if self.max_running < 1:
            raise OptionError(f"max_running is {self.max_running}; at least 1 sequence must be able to run")
        if self.kv_memory < 1:
            raise OptionError(f"kv_memory is {self.kv_memory} bytes; give a positive size such as 1GiB")


def bytes_per_token(spec: RunnableSpec, fmt: CacheFormat) -> int:
    """Bytes one token takes over all layers while no window has passed: Σ kv_heads * (k + v vector bytes)."""
    return sum(group.num_layers * group.layer_bytes_per_token(fmt) for group in spec.groups())


def plan_cache(spec: RunnableSpec, dtype: str, options: CacheOptions) -> CacheLayout:
    """Cut ``options.kv_memory`` into open and sealed blocks for ``spec`` computed in ``dtype``.

    The result never takes more than the budget. Raises BudgetError when not even one block of every group fits.
    """
    exact = find_cache_format(dtype)
    tokens = options.block_tokens
    fmt = exact if options.kv_format == "auto" else find_cache_format(options.kv_format, tokens)
    fmt.check_block_tokens(tokens)
    groups = spec.groups()
    sealed_sizes = [group.block_bytes(tokens, fmt) for group in groups]
    open_row = sum(group.block_bytes(tokens, exact) for group in groups)
    num_open = max(1, min(options.max_running, options.kv_memory // OPEN_SHARE // open_row))
    budget = options.kv_memory - num_open * open_row
    budget -= budget % math.gcd(*sealed_sizes)
    need = num_open * open_row + sum(sealed_sizes)
    if budget < sum(sealed_sizes):
        raise BudgetError(
            f"kv_memory {format_bytes(options.kv_memory)} ({options.kv_memory:,} B) is smaller than one block: "
            f"{tokens} tokens take {sum(sealed_sizes):,} B sealed and {open_row:,} B open; "
            f"give at least {need:,} B, or fewer block_tokens"
        )
    counts = _split(spec, groups, sealed_sizes, budget) if options.split else [budget // size for size in sealed_sizes]
    if options.split:
        budget = sum(count * size for count, size in zip(counts, sealed_sizes, strict=True))
    layouts = tuple(
        GroupLayout(group, size, group.block_bytes(tokens, exact), count, num_open)
        for group, size, count in zip(groups, sealed_sizes, counts, strict=True)
    )
    return CacheLayout(layouts, tokens, fmt, exact, budget)


def _split(spec: RunnableSpec, groups: tuple[LayerGroup, ...], sizes: list[int], budget: int) -> list[int]:
    """Blocks of each group, in the proportion that sequences of half the context hold them; at least one each."""
    mean_tokens = max(1, spec.max_context // 2)
    weights = [min(mean_tokens, group.kind.window or mean_tokens) for group in groups]
    row = sum(weight * size for weight, size in zip(weights, sizes, strict=True))
    spare = budget - sum(sizes)
    return [1 + spare * weight // row for weight in weights]
