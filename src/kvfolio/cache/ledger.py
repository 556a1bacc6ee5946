"""The ledger: which sequence holds which blocks, under one byte budget for all layer groups.

The only face of the room. Knows nothing of tensors, time, requests or text. A grant that does not fit is None.

The life of a sequence:  admit → (extend → commit)* → release.
"""

from dataclasses import dataclass, field
from typing import NewType

from kvfolio.cache.blocks import BlockId, BlockPool, OpenSlots
from kvfolio.errors import InvariantError
from kvfolio.spec.layout import CacheLayout

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
class ReturnMemory:
    """A move: the memory of a free block goes back to the system, because another group needs the bytes."""

    group: int
    block: BlockId


Move = ReturnMemory


@dataclass(frozen=True, slots=True)
class Grant:
    """What ``extend`` gave: the sequence's tables, one a group, and the moves to carry out before they are written."""

    tables: tuple[BlockTable, ...]
    moves: tuple[Move, ...]


@dataclass(frozen=True, slots=True)
class Usage:
    """The pools at a glance, as plain numbers."""

    num_blocks_used: int  # sealed and open, over all groups
    used_bytes: int  # of those blocks
    wasted_bytes: int  # of those, room of open blocks in which no token lies yet
    free_bytes: int  # of the sealed budget
    sealed_by_group: tuple[int, ...]
    num_open_used: int  # in each group


@dataclass(slots=True)
class _Holding:
    """What one sequence holds. Tokens [0, num_written) are written, [num_written, num_tokens) granted to a step."""

    open_slot: int
    num_tokens: int = 0
    num_written: int = 0
    first_block: list[int] = field(default_factory=list)  # a group each
    sealed: list[list[BlockId]] = field(default_factory=list)  # a group each


class Ledger:
    """Grants blocks from one byte budget to the groups of all sequences."""

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        self._pools = [BlockPool(group.num_blocks) for group in layout.groups]
        self._slots = OpenSlots(layout.num_open_blocks)
        self._holdings: dict[SequenceId, _Holding] = {}
        self._held_bytes = 0
        self._touched_bytes = 0  # held and warm blocks: memory the pools occupy

    @property
    def free_bytes(self) -> int:
        """Bytes of the budget that nobody holds."""
        return self.layout.budget_bytes - self._held_bytes

    @property
    def num_open_free(self) -> int:
        """How many more sequences can be admitted."""
        return self._slots.num_free

    def num_tokens(self, sequence: SequenceId) -> int:
        """Tokens of ``sequence`` that are written or granted."""
        return self._holdings[sequence].num_tokens

    def bytes_held(self, sequence: SequenceId) -> int:
        """Sealed bytes that ``sequence`` holds now."""
        sealed = self._holdings[sequence].sealed
        return sum(len(blocks) * group.block_bytes for blocks, group in zip(sealed, self.layout.groups, strict=True))

    def admit(self, sequence: SequenceId) -> bool:
        """Start a sequence: it takes an open block in every group. False, and nothing changed, when none is free."""
        if sequence in self._holdings:
            raise InvariantError(f"sequence {sequence} is admitted twice")
        slot = self._slots.take()
        if slot is None:
            return False
        num_groups = len(self._pools)
        self._holdings[sequence] = _Holding(slot, first_block=[0] * num_groups, sealed=[[] for _ in range(num_groups)])
        return True

    def largest_extension(self, sequence: SequenceId, limit: int) -> int:
        """How many more tokens, at most ``limit``, ``extend`` would grant now. Changes nothing."""
        tokens = self.layout.block_tokens
        rows = min(self.free_bytes // self.layout.row_bytes, *(pool.num_free for pool in self._pools))
        num_tokens = self._holdings[sequence].num_tokens
        return min(limit, (num_tokens // tokens + rows + 1) * tokens - 1 - num_tokens)

    def extend(self, sequence: SequenceId, num_new: int) -> Grant | None:
        """Grant room for the next ``num_new`` tokens: a sealed block in every group for each block they fill.

        None, and nothing changed, when the budget does not allow it. The tokens count as unwritten until ``commit``.
        """
        if self.largest_extension(sequence, num_new) < num_new:
            return None
        holding = self._holdings[sequence]
        tokens = self.layout.block_tokens
        rows = (holding.num_tokens + num_new) // tokens - holding.num_tokens // tokens
        moves: list[Move] = []
        for index in range(len(self._pools)):
            for _ in range(rows):
                holding.sealed[index].append(self._take(index, moves))
        holding.num_tokens += num_new
        return Grant(self._tables(holding), tuple(moves))

    def commit(self, sequence: SequenceId) -> None:
        """The granted tokens are written. Window layers give back the blocks that no later query reads."""
        holding = self._holdings[sequence]
        holding.num_written = holding.num_tokens
        for index, group in enumerate(self.layout.groups):
            if group.group.kind.window is None:
                continue
            needed = group.group.kind.first_token_needed(holding.num_tokens) // self.layout.block_tokens
            passed = min(needed - holding.first_block[index], len(holding.sealed[index]))
            for block in holding.sealed[index][:passed]:
                self._give(index, block)
            del holding.sealed[index][:passed]
            holding.first_block[index] += passed

    def release(self, sequence: SequenceId) -> None:
        """End a sequence: everything it holds becomes free, the newest blocks first."""
        holding = self._holdings.pop(sequence)
        for index, blocks in enumerate(holding.sealed):
            for block in reversed(blocks):
                self._give(index, block)
        self._slots.give(holding.open_slot)

    def usage(self) -> Usage:
        """What is held now."""
        sealed = tuple(pool.num_held for pool in self._pools)
        num_open = self._slots.num_slots - self._slots.num_free
        tokens = self.layout.block_tokens
        open_bytes = sum(group.open_block_bytes for group in self.layout.groups)
        empty = sum(tokens - holding.num_tokens % tokens for holding in self._holdings.values())
        return Usage(
            num_blocks_used=sum(sealed) + num_open * len(self._pools),
            used_bytes=self._held_bytes + num_open * open_bytes,
            wasted_bytes=empty * open_bytes // tokens,
            free_bytes=self.free_bytes,
            sealed_by_group=sealed,
            num_open_used=num_open,
        )

    def tokens_written(self) -> int:
        """Tokens written, over all sequences."""
        return sum(holding.num_written for holding in self._holdings.values())

    def check(self) -> None:
        """Verify every law of conservation; raises InvariantError that names each term of a broken sum."""
        held_bytes = touched_bytes = 0
        for index, (pool, group) in enumerate(zip(self._pools, self.layout.groups, strict=True)):
            pool.check([block for holding in self._holdings.values() for block in holding.sealed[index]])
            held_bytes += pool.num_held * group.block_bytes
            touched_bytes += (pool.num_held + pool.num_warm) * group.block_bytes
        if not held_bytes == self._held_bytes <= touched_bytes == self._touched_bytes <= self.layout.budget_bytes:
            raise InvariantError(
                f"bytes disagree: held {held_bytes} counted, {self._held_bytes} booked; "
                f"touched {touched_bytes} counted, {self._touched_bytes} booked; budget {self.layout.budget_bytes}"
            )
        self._slots.check([holding.open_slot for holding in self._holdings.values()])
        tokens = self.layout.block_tokens
        for sequence, holding in self._holdings.items():
            for first, sealed in zip(holding.first_block, holding.sealed, strict=True):
                if first + len(sealed) != holding.num_tokens // tokens:
                    raise InvariantError(
                        f"sequence {sequence}: {first} passed + {len(sealed)} sealed blocks != "
                        f"{holding.num_tokens} tokens // {tokens}"
                    )

    def _tables(self, holding: _Holding) -> tuple[BlockTable, ...]:
        return tuple(
            BlockTable(first, tuple(sealed), holding.open_slot)
            for first, sealed in zip(holding.first_block, holding.sealed, strict=True)
        )

    def _take(self, index: int, moves: list[Move]) -> BlockId:
        """Hold a block of group ``index``; if it is cold, other groups' warm blocks make room for its memory."""
        pool, size = self._pools[index], self.layout.groups[index].block_bytes
        if pool.num_warm == 0:
            self._touched_bytes += size
            for other, group in enumerate(self.layout.groups):
                while self._touched_bytes > self.layout.budget_bytes and other != index and self._pools[other].num_warm:
                    moves.append(ReturnMemory(other, self._pools[other].cool()))
                    self._touched_bytes -= group.block_bytes
        self._held_bytes += size
        return pool.take()

    def _give(self, index: int, block: BlockId) -> None:
        self._pools[index].give(block)
        self._held_bytes -= self.layout.groups[index].block_bytes
