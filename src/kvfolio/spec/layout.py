"""How one cache is cut into blocks: the numbers that planner, ledger, store and kernels must agree on.

Plain data. ``planner.memory`` decides the values; knows nothing of tensors, sequences or who holds what.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from kvfolio.spec.formats import CacheFormat
from kvfolio.spec.model import LayerGroup

# Open blocks take at most this share of a cache's memory, one part in so many; with little memory fewer sequences run.
OPEN_SHARE = 4


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The blocks of one layer group: layers of equal kind, geometry and format.

    A *sink group* stands right behind a lossy full-attention group and has the same layers, but it is exact and holds
    only the first ``num_sinks`` blocks of each sequence; the group before it holds these, too. It has no open blocks.
    """

    group: LayerGroup
    fmt: CacheFormat  # of its sealed blocks
    block_bytes: int  # one sealed block: all layers of the group, in the storage format
    open_block_bytes: int  # one open block: the same tokens, exact; 0 in a sink group
    num_blocks: int  # sealed blocks that the pool has addresses for
    num_open_blocks: int
    num_sinks: int | None = None  # of a sink group; None: the group holds all blocks that its layers need

    @property
    def sealed_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def open_bytes(self) -> int:
        return self.num_open_blocks * self.open_block_bytes

    @property
    def is_sinks(self) -> bool:
        """Whether this is the sink group of the one before it."""
        return self.num_sinks is not None

    def holds(self, block: int) -> bool:
        """Whether block ``block`` of a sequence is one that this group ever holds."""
        return self.num_sinks is None or block < self.num_sinks

    def num_held(self, first: int, last: int) -> int:
        """Of the blocks [first, last) of a sequence, those that this group holds."""
        return max(0, (last if self.num_sinks is None else min(last, self.num_sinks)) - first)

    def blocks_needed(self, position: int, block_tokens: int) -> range:
        """The full blocks of a sequence, of those that this group holds, which a query at ``position`` reads."""
        first = self.group.kind.first_token_needed(position) // block_tokens
        return range(first, first + self.num_held(first, position // block_tokens))


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """A whole cache: its groups, and the one byte budget their sealed blocks share."""

    groups: tuple[GroupLayout, ...]
    block_tokens: int
    fmt: CacheFormat  # of sealed blocks, but in layers that were said to be exceptions
    exact: CacheFormat  # of open blocks: the compute dtype
    budget_bytes: int  # sealed blocks of all groups together never take more

    @property
    def num_open_blocks(self) -> int:
        """Sequences that can run at once: each holds one open block in every group."""
        return self.groups[0].num_open_blocks

    @property
    def planned_bytes(self) -> int:
        """All bytes the cache may take: the sealed budget and the open blocks."""
        return self.budget_bytes + sum(group.open_bytes for group in self.groups)

    @property
    def row_bytes(self) -> int:
        """One sealed block in every group but the sinks: what ``block_tokens`` more tokens of a sequence take."""
        return sum(group.block_bytes for group in self.groups if not group.is_sinks)

    @property
    def first_row_bytes(self) -> int:
        """One sealed block in every group: what the first ``block_tokens`` tokens of a sequence take."""
        return sum(group.block_bytes for group in self.groups)

    @property
    def num_sinks(self) -> int:
        """Blocks at the beginning of each sequence that sink groups hold, the same number in all of them."""
        return max(group.num_sinks or 0 for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        """Bytes one more token takes while no window has passed."""
        return self.row_bytes // self.block_tokens

    @property
    def is_lossless(self) -> bool:
        """Whether sealed blocks store exactly what was computed."""
        return all(group.fmt == self.exact for group in self.groups)

    @property
    def format_name(self) -> str:
        """For people: the formats of all groups but the sinks, ``int8`` or ``int8 + bf16``."""
        return " + ".join(dict.fromkeys(group.fmt.name for group in self.groups if not group.is_sinks))

    def sinks_of(self, place: int) -> int | None:
        """The place of the sink group of group ``place``; None: it has none."""
        behind = place + 1
        return behind if behind < len(self.groups) and self.groups[behind].is_sinks else None

    def is_whole(self, block: int, stored: Sequence[int | None]) -> bool:
        """Whether ``stored``, a group each, lacks nothing of what groups hold of block ``block`` of a sequence."""
        return None not in stored or all(
            one is not None or not group.holds(block) for one, group in zip(stored, self.groups, strict=True)
        )

    def blocks_held(self, group: GroupLayout, num_tokens: int) -> int:
        """Sealed blocks of ``group`` that a sequence of ``num_tokens`` needs, computed in the smallest chunks.

        A window layer needs ceil(window / block_tokens): so far back the window reaches in a step that fills a block.
        """
        sealed = group.num_held(0, num_tokens // self.block_tokens)
        window = group.group.kind.window
        return sealed if window is None else min(sealed, -(-window // self.block_tokens))

    def bytes_held(self, num_tokens: int) -> int:
        """Sealed bytes that a lone sequence of ``num_tokens`` needs at its peak."""
        return sum(group.block_bytes * self.blocks_held(group, num_tokens) for group in self.groups)

    def fits(self, num_tokens: int) -> bool:
        """Whether a sequence of ``num_tokens`` fits when it is alone."""
        return self.bytes_held(num_tokens) <= self.budget_bytes and all(
            self.blocks_held(group, num_tokens) <= group.num_blocks for group in self.groups
        )

    def kv_memory_for(self, num_tokens: int) -> int:
        """A kv_memory that holds a lone sequence of ``num_tokens``, whatever number of open blocks goes with it."""
        sealed = max(self.bytes_held(num_tokens), self.first_row_bytes) + self.row_bytes
        open_row = sum(group.open_block_bytes for group in self.groups)
        return max(sealed * OPEN_SHARE // (OPEN_SHARE - 1), sealed + open_row)

    def bytes_read(self, start: int, stop: int) -> int:
        """Bytes that computing tokens [start, stop) of a sequence reads of all groups, each token once, as stored."""
        num_bytes = 0
        for place, group in enumerate(self.groups):
            first = group.group.kind.first_token_needed(start)
            if group.num_sinks is None:
                behind = self.sinks_of(place)
                num_sinks = 0 if behind is None else self.groups[behind].num_sinks or 0
                first = max(first, min(num_sinks * self.block_tokens, stop))
                last = stop
            else:
                last = min(group.num_sinks * self.block_tokens, stop)
            num_bytes += (last - first) * group.block_bytes // self.block_tokens
        return num_bytes

    def longest_sequence(self, limit: int) -> int:
        """The most tokens, at most ``limit``, that a lone sequence can hold."""
        low, high = 0, limit
        while low < high:
            middle = (low + high + 1) // 2
            if self.fits(middle):
                low = middle
            else:
                high = middle - 1
        return low
