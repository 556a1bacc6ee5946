"""What sequences hold, as data, and where others find the beginning of an open block.

Knows nothing of how blocks are granted.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NewType

from kvfolio.cache.blocks import BlockId
from kvfolio.cache.moves import Move
from kvfolio.cache.prefix import TokenChain
from kvfolio.cache.retention import KeepRange

SequenceId = NewType("SequenceId", int)


@dataclass(frozen=True, slots=True)
class BlockTable:
    """The blocks one sequence holds in one group, as a step sees them.

    Block ``first_block + i`` of the sequence lies in sealed block ``sealed[i]``; the tokens behind the last full
    block lie in open slot ``open_slot``. 10 tokens in blocks of 4: sealed [7, 2], 2 tokens open.
    """

    first_block: int
    sealed: tuple[BlockId, ...]
    open_slot: int


@dataclass(frozen=True, slots=True)
class Grant:
    """What ``extend`` gave: the sequence's tables, one a group, and the moves to carry out before they are written."""

    tables: tuple[BlockTable, ...]
    moves: tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """The pools at a glance, as plain numbers."""

    num_blocks_used: int  # held, sealed and open, over all groups; shared ones once
    used_bytes: int  # of those blocks
    wasted_bytes: int  # of those, room of open blocks in which no token lies yet
    free_bytes: int  # of the sealed budget; cached blocks count as free: they can be evicted
    sealed_by_group: tuple[int, ...]  # held blocks
    num_open_used: int  # in each group
    cached_by_group: tuple[int, ...]  # blocks that nobody holds but a request may hit
    num_evicted: int  # blocks, since the ledger was made
    num_quarantined: int  # blocks put out of use by a broken invariant; 0, or kvfolio has a bug
    host_bytes: int  # of swapped sequences


@dataclass(slots=True, eq=False)
class Holding:
    """What one sequence holds. Tokens [0, num_written) are written, [num_written, num_tokens) granted to a step."""

    chain: TokenChain
    open_slot: int
    keep: tuple[KeepRange, ...]
    num_tokens: int = 0
    num_written: int = 0
    num_filed: int = 0  # blocks before this one have their cards
    first_block: list[int] = field(default_factory=list)  # a group each
    sealed: list[list[BlockId]] = field(default_factory=list)  # a group each
    parent: bytes | None = None  # of its open block, where it is listed in OpenTexts
    is_running: bool = True
    _tables: tuple[BlockTable, ...] | None = None  # made when they are asked for

    @property
    def num_to_compute(self) -> int:
        """Known tokens that it still is going to compute; 0 when it has ended."""
        return len(self.chain.token_ids) - self.num_written if self.is_running else 0

    def written_blocks(self) -> list[int]:
        """Sealed blocks that are written and held, a group each; a sink group holds the first ones only."""
        last = self.num_written // self.chain.block_tokens
        pairs = zip(self.first_block, self.sealed, strict=True)
        return [min(max(0, last - first), len(sealed)) for first, sealed in pairs]

    def tables(self) -> tuple[BlockTable, ...]:
        """One a group."""
        if self._tables is None:
            self._tables = tuple(
                BlockTable(first, tuple(sealed), self.open_slot)
                for first, sealed in zip(self.first_block, self.sealed, strict=True)
            )
        return self._tables

    def changed(self) -> None:
        """Its blocks are others now."""
        self._tables = None


class OpenTexts:
    """Sequences, running or ended, by the parent of their open block. Private ones are not listed."""

    def __init__(self) -> None:
        self._by_parent: dict[bytes, list[Holding]] = {}

    @property
    def by_parent(self) -> Mapping[bytes, list[Holding]]:
        return self._by_parent

    def add(self, holding: Holding) -> None:
        """List ``holding`` under the parent of the block that it writes now."""
        if holding.chain.scope is None:
            return
        parent = holding.chain.parent(holding.num_written // holding.chain.block_tokens)
        if parent != holding.parent:
            self.remove(holding)
            holding.parent = parent
            self._by_parent.setdefault(parent, []).append(holding)

    def remove(self, holding: Holding) -> None:
        """Nobody finds it any more."""
        if holding.parent is None:
            return
        listed = self._by_parent[holding.parent]
        listed.remove(holding)
        if not listed:
            del self._by_parent[holding.parent]
        holding.parent = None

    def all(self) -> list[Holding]:
        """Everybody who is listed."""
        return [holding for listed in self._by_parent.values() for holding in listed]
