"""The host pool: where preempted sequences' blocks lie until they come back. Integers only, like the rest of the room.

Knows nothing of the device's pools, digests or why a sequence was preempted.
"""

import itertools
from dataclasses import dataclass

from kvfolio.cache.blocks import BlockId, BlockPool, OpenSlots
from kvfolio.cache.eviction import EvictionQueue, find_policy
from kvfolio.cache.holding import Holding
from kvfolio.cache.moves import Move, SwapOpenOut, SwapOut
from kvfolio.cache.prefix import TokenChain
from kvfolio.cache.retention import KeepRange
from kvfolio.spec.layout import CacheLayout


@dataclass(frozen=True, slots=True)
class Swapped:
    """A sequence whose blocks lie in the host pool: all its written tokens."""

    chain: TokenChain
    num_tokens: int
    first_block: tuple[int, ...]  # a group each
    blocks: tuple[tuple[BlockId, ...], ...]  # host blocks, a group each
    host_slot: int  # the open block
    keep: tuple[KeepRange, ...]


class HostPool:
    """Bounded: each group has its own share of blocks, as ``planner.memory`` splits a budget."""

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        clock = itertools.count().__next__
        self._pools = [
            BlockPool(group.num_blocks, EvictionQueue(find_policy("lru", group.num_blocks), clock))
            for group in layout.groups
        ]
        self._slots = OpenSlots(layout.num_open_blocks)

    @property
    def used_bytes(self) -> int:
        num_open = self._slots.num_slots - self._slots.num_free
        return sum(
            pool.num_held * group.block_bytes + num_open * group.open_block_bytes
            for pool, group in zip(self._pools, self.layout.groups, strict=True)
        )

    def bytes_for(self, holding: Holding) -> int | None:
        """Bytes that ``holding`` has written; None when there is no room for them."""
        counts = list(zip(holding.written_blocks(), self._pools, self.layout.groups, strict=True))
        if self._slots.num_free == 0 or any(count > pool.num_free for count, pool, _ in counts):
            return None
        return sum(count * group.block_bytes + group.open_block_bytes for count, _, group in counts)

    def take(self, holding: Holding) -> tuple[Swapped, tuple[Move, ...]]:
        """Room for what ``holding`` has written, and the moves to here. The caller has asked ``bytes_for``."""
        pairs = zip(self._pools, holding.written_blocks(), strict=True)
        blocks = tuple(tuple(pool.take(count)) for pool, count in pairs)
        slot = self._slots.take()
        assert slot is not None
        moves: list[Move] = [SwapOpenOut(holding.open_slot, slot)]
        for group, (sources, targets) in enumerate(zip(holding.sealed, blocks, strict=True)):
            moves += [SwapOut(group, source, target) for source, target in zip(sources, targets, strict=False)]
        first_block = tuple(holding.first_block)
        return Swapped(holding.chain, holding.num_written, first_block, blocks, slot, holding.keep), tuple(moves)

    def give(self, swapped: Swapped) -> None:
        """The sequence is back on the device, or has ended."""
        for pool, blocks in zip(self._pools, swapped.blocks, strict=True):
            pool.give(blocks)
        self._slots.give(swapped.host_slot)

    def faults(self, swapped: list[Swapped]) -> list[str]:
        """What contradicts itself, if exactly the blocks of ``swapped`` should be held."""
        found = []
        for group, pool in enumerate(self._pools):
            holders = {block: 1 for one in swapped for block in one.blocks[group]}
            found += [f"host block {block} of group {group}: {what}" for block, what in pool.faults(holders)]
        return found + self._slots.faults([one.host_slot for one in swapped])
