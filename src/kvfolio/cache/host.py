"""The host pool: where preempted sequences' blocks lie until they come back. Integers only, like the rest of the room.

Knows nothing of the device's pools, digests or why a sequence was preempted.
"""

import itertools
from dataclasses import dataclass

from kvfolio.cache.blocks import BlockId, BlockPool, OpenSlots
from kvfolio.cache.eviction import EvictionQueue, find_policy
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

    def fits(self, counts: list[int]) -> bool:
        """Whether one more sequence with so many sealed blocks in each group has room."""
        return self._slots.num_free > 0 and all(
            count <= pool.num_free for count, pool in zip(counts, self._pools, strict=True)
        )

    def take(self, counts: list[int]) -> tuple[tuple[tuple[BlockId, ...], ...], int]:
        """Host blocks in each group, and a slot for the open block. The caller has asked ``fits``."""
        blocks = tuple(tuple(pool.take(count)) for pool, count in zip(self._pools, counts, strict=True))
        slot = self._slots.take()
        assert slot is not None
        return blocks, slot

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
