"""Free, cached and held blocks of one layer group, and the open slots of the running sequences.

Knows nothing of sequences, tokens or bytes: it hands out integers and takes them back.
"""

from collections.abc import Callable, Sequence
from typing import NewType

from kvfolio.cache.eviction import EvictionQueue, Facts
from kvfolio.cache.index import Card
from kvfolio.errors import InvariantError

BlockId = NewType("BlockId", int)

NO_FACTS = Facts(0, False, 1.0, 1)  # for policies that ask for none

_COLD, _WARM, _CACHED, _HELD, _QUARANTINED = range(5)
_MARKS = ("cold", "warm", "cached", "held", "quarantined")


class BlockPool:
    """The sealed blocks of one group.

    A free block is *cold* when its memory was never written (or was returned to the system) and *warm* when it
    still occupies memory. Warm blocks are reused first, so the memory touched stays as small as the load. A block with
    an index card that nobody holds is *cached*: it can be held again with what it stores, or evicted.

        cold ──take──▶ held ──give──▶ warm ──take──▶ held          one that has a card:
          ▲                             │ ▲                        held ──give──▶ cached ──share──▶ held
          └────────────cool─────────────┘ └──────────evict─────────────────────────┘
    """

    def __init__(self, num_blocks: int, queue: EvictionQueue) -> None:
        self.num_blocks = num_blocks
        self.num_held = 0
        self.num_quarantined = 0
        self.queue = queue  # of the cached blocks
        self.cards: list[Card | None] = [None] * num_blocks
        self.refs = [0] * num_blocks  # sequences that hold it
        self._state = bytearray(num_blocks)
        self._warm: list[BlockId] = []
        self._returned: list[BlockId] = []  # cold again
        self._fresh = 0  # ids from here on were never taken

    @property
    def num_warm(self) -> int:
        return len(self._warm)

    @property
    def num_cold(self) -> int:
        return len(self._returned) + self.num_blocks - self._fresh

    @property
    def num_cached(self) -> int:
        return len(self.queue)

    @property
    def num_free(self) -> int:
        """Blocks that can be taken: cached ones can, once they are evicted."""
        return self.num_blocks - self.num_held - self.num_quarantined

    @property
    def num_touched(self) -> int:
        """Blocks that occupy memory."""
        return self.num_blocks - self.num_cold

    def take(self, count: int = 1) -> list[BlockId]:
        """Hold blocks that are warm, else those that are cold. The caller has seen to it that there are so many."""
        if count > self.num_warm + self.num_cold:
            raise InvariantError(f"take() of {count} on a pool that has {self.num_warm} warm and {self.num_cold} cold")
        taken: list[BlockId] = []
        for spare in (self._warm, self._returned):  # the last given first
            num_spare = min(count - len(taken), len(spare))
            if num_spare:
                taken += spare[: -num_spare - 1 : -1]
                del spare[-num_spare:]
        num_fresh = count - len(taken)
        if num_fresh:
            taken += map(BlockId, range(self._fresh, self._fresh + num_fresh))
            self._fresh += num_fresh
        refs, state = self.refs, self._state
        for block in taken:
            refs[block] = 1
            state[block] = _HELD
        self.num_held += count
        return taken

    def share(self, blocks: Sequence[BlockId]) -> int:
        """One more holder of each block, held or cached. Returns how many of them nobody had held."""
        refs, before = self.refs, self.num_held
        for block in blocks:
            if refs[block]:
                refs[block] += 1
                continue
            if self._state[block] != _CACHED:
                raise InvariantError(f"block {block} is shared but {_MARKS[self._state[block]]}")
            self.queue.remove(block)
            self._state[block] = _HELD
            refs[block] = 1
            self.num_held += 1
        return self.num_held - before

    def give(
        self,
        blocks: Sequence[BlockId],
        facts_of: Callable[[BlockId], Facts] | None = None,
        on_damage: Callable[[BlockId], None] | None = None,
    ) -> int:
        """One holder less of each block; without any it is cached, in this order, if it has a card, else warm.

        Returns how many nobody holds now. A block that nobody held is refused, or told to ``on_damage`` and left out.
        """
        refs, state, cards, push, before = self.refs, self._state, self.cards, self.queue.push, self.num_held
        for block in blocks:
            if not 0 <= block < self.num_blocks or state[block] != _HELD:
                if on_damage is None:
                    raise InvariantError(f"block {block} is given back but nobody holds it (of {self.num_blocks})")
                on_damage(block)
                continue
            if refs[block] > 1:
                refs[block] -= 1
                continue
            refs[block] = 0
            self.num_held -= 1
            card = cards[block]
            if card is None:
                state[block] = _WARM
                self._warm.append(block)
            else:
                state[block] = _CACHED
                push(block, card.priority, NO_FACTS if facts_of is None else facts_of(block))
        return before - self.num_held

    def evict(self, forget: Callable[[Card], None]) -> None:
        """Turn the first cached block warm; ``forget`` takes it off its card."""
        block = BlockId(self.queue.pop())
        self.drop_card(block, forget)
        self._state[block] = _WARM
        self._warm.append(block)

    def drop_card(self, block: BlockId, forget: Callable[[Card], None]) -> None:
        """The block can no longer be found."""
        card, self.cards[block] = self.cards[block], None
        if card is not None:
            forget(card)

    def cool(self) -> BlockId:
        """Turn one warm block cold and name it: its memory can go back to the system."""
        block = self._warm.pop(0)  # rare: only when another group needs the bytes
        self._state[block] = _COLD
        self._returned.append(block)
        return block

    def quarantine(self, block: BlockId) -> None:
        """Take a block out of use for good, whatever it was: it is neither held nor free nor cached any more."""
        if self._state[block] == _QUARANTINED:
            return
        if block in self.queue:
            self.queue.remove(block)
        self._warm = [other for other in self._warm if other != block]
        if block >= self._fresh:  # it must not be taken when its turn comes
            self._returned[:0] = map(BlockId, range(block - 1, self._fresh - 1, -1))
            self._fresh = block + 1
        self._returned = [other for other in self._returned if other != block]
        self._state[block] = _QUARANTINED
        self.refs[block] = 0
        self.num_quarantined += 1
        self.num_held = self._state.count(_HELD)

    def is_quarantined(self, block: BlockId) -> bool:
        return self._state[block] == _QUARANTINED

    def faults(self, holders: dict[BlockId, int]) -> list[tuple[BlockId, str]]:
        """Blocks whose marks, counts and lists contradict each other; ``holders``: sequences that say they hold one."""
        places: dict[int, list[str]] = {}
        for name, blocks in (("warm", self._warm), ("cold", self._returned), ("cached", list(self.queue))):
            for block in blocks:
                places.setdefault(block, []).append(name)
        for block in holders:
            places.setdefault(block, []).append("held")
        found: list[tuple[BlockId, str]] = []
        for number in range(self.num_blocks):
            block, mark = BlockId(number), _MARKS[self._state[number]]
            listed = places.pop(number, [])
            default = ["cold"] if number >= self._fresh else []
            if mark == "quarantined":
                if set(listed) - {"held"}:  # its last holders may not have let go yet
                    found.append((block, f"quarantined, but listed as {' and '.join(listed)}"))
                continue
            if (listed or default) != [mark]:
                found.append((block, f"marked {mark}, but listed as {' and '.join(listed) or 'nothing'}"))
            elif self.refs[number] != holders.get(block, 0):
                found.append((block, f"counts {self.refs[number]} holders, but {holders.get(block, 0)} hold it"))
            elif (mark == "cached") > (self.cards[number] is not None):
                found.append((block, "cached without an index card"))
            elif self.cards[number] is not None and mark in ("cold", "warm"):
                found.append((block, f"{mark} with an index card"))
        found += [(BlockId(number), "not a block of this pool") for number in places]
        return found


class OpenSlots:
    """Open blocks: one for each running sequence, the same number in every group.

    The slot of a sequence that has ended may be kept with what it holds until it is needed: the end of its text.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._kept: dict[int, Callable[[], None]] = {}  # oldest first → what to call when it is reused
        self._is_held = bytearray(num_slots)

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._kept)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def take(self) -> int | None:
        """A free slot, or the one that was kept for longest, or None."""
        if self._free:
            slot = self._free.pop()
        elif self._kept:
            slot = next(iter(self._kept))
            self._kept.pop(slot)()
        else:
            return None
        self._is_held[slot] = True
        return slot

    def give(self, slot: int, on_reuse: Callable[[], None] | None = None) -> None:
        """Free a slot; with ``on_reuse`` it is kept as long as another is free. One that is free already is refused."""
        if not 0 <= slot < self.num_slots or not self._is_held[slot]:
            raise InvariantError(f"open slot {slot} is given back but nobody holds it (of {self.num_slots})")
        self._is_held[slot] = False
        if on_reuse is None:
            self._free.append(slot)
        else:
            self._kept[slot] = on_reuse

    def faults(self, held: list[int]) -> list[str]:
        """What contradicts itself, if exactly ``held`` should be held."""
        marked = [slot for slot in range(self.num_slots) if self._is_held[slot]]
        if sorted([*held, *self._free, *self._kept]) == list(range(self.num_slots)) and sorted(held) == marked:
            return []
        return [
            f"open slots disagree: {sorted(held)} held, {marked} marked, {sorted(self._free)} free, "
            f"{sorted(self._kept)} kept of {self.num_slots}"
        ]
