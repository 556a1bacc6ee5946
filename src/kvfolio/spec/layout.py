"""How one cache is cut into blocks: the numbers that planner, ledger, store and kernels must agree on.

Plain data. ``planner.memory`` decides the values; knows nothing of tensors, sequences or who holds what.
"""

from dataclasses import dataclass

from kvfolio.spec.formats import CacheFormat
from kvfolio.spec.model import LayerGroup

# Open blocks take at most this share of a cache's memory, one part in so many; with little memory fewer sequences run.
OPEN_SHARE = 4


@dataclass(frozen=True, slots=True)
class GroupLayout:
    """The blocks of one layer group."""

    group: LayerGroup
    block_bytes: int  # one sealed block: all layers of the group, in the storage format
    open_block_bytes: int  # one open block: the same tokens, exact
    num_blocks: int  # sealed blocks that the pool has addresses for
    num_open_blocks: int

    @property
    def sealed_bytes(self) -> int:
        return self.num_blocks * self.block_bytes

    @property
    def open_bytes(self) -> int:
        return self.num_open_blocks * self.open_block_bytes


@dataclass(frozen=True, slots=True)
class CacheLayout:
    """A whole cache: its groups, and the one byte budget their sealed blocks share."""

    groups: tuple[GroupLayout, ...]
    block_tokens: int
    fmt: CacheFormat  # of sealed blocks
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
        """One sealed block in every group: what ``block_tokens`` more tokens of a sequence take."""
        return sum(group.block_bytes for group in self.groups)

    @property
    def bytes_per_token(self) -> int:
        """Bytes one more token takes while no window has passed."""
        return self.row_bytes // self.block_tokens

    @property
    def is_lossless(self) -> bool:
        """Whether sealed blocks store exactly what was computed."""
        return self.fmt == self.exact

    def blocks_held(self, group: GroupLayout, num_tokens: int) -> int:
        """Sealed blocks of ``group`` that a sequence of ``num_tokens`` needs, computed in the smallest chunks.

        A window layer needs ceil(window / block_tokens): so far back the window reaches in a step that fills a block.
        """
        sealed = num_tokens // self.block_tokens
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
        sealed = max(self.bytes_held(num_tokens), self.row_bytes) + self.row_bytes
        open_row = sum(group.open_block_bytes for group in self.groups)
        return max(sealed * OPEN_SHARE // (OPEN_SHARE - 1), sealed + open_row)

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
