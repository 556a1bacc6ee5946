"""Free, cached and held blocks of one layer group, and the open slots of the running sequences.

Knows nothing of sequences, tokens or bytes: it hands out integers and takes them back.
"""

from collections.abc import Callable
from typing import NewType

from kvfolio.cache.eviction import EvictionQueue, Facts
from kvfolio.cache.index import Card
from kvfolio.errors import InvariantError

BlockId = NewType("BlockId", int)

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
        self.generation = [0] * num_blocks  # how often it was taken: tells two lives of a block apart
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

    def take(self) -> BlockId:
        """Hold one block that is warm, or else cold. The caller has seen to it that there is one."""
        if self._warm:
            block = self._warm.pop()
        elif self._returned:
            block = self._returned.pop()
        elif self._fresh < self.num_blocks:
            block = BlockId(self._fresh)
            self._fresh += 1
        else:
            raise InvariantError(f"take() on a pool whose {self.num_blocks} blocks are all held or cached")
        self._state[block] = _HELD
        self.refs[block] = 1
        self.generation[block] += 1
        self.num_held += 1
        return block

    def share(self, block: BlockId) -> bool:
        """One more holder of a held or cached block. True when nobody had held it."""
        if self.refs[block]:
            self.refs[block] += 1
            return False
        if self._state[block] != _CACHED:
            raise InvariantError(f"block {block} is shared but {_MARKS[self._state[block]]}")
        self.queue.remove(block)
        self._state[block] = _HELD
        self.refs[block] = 1
        self.num_held += 1
        return True

    def give(self, block: BlockId, facts: Facts) -> bool:
        """One holder less; without any the block is cached if it has a card, else warm. True when nobody is left.

        A block that is not held is refused and nothing changes.
        """
        if not 0 <= block < self.num_blocks or self._state[block] != _HELD:
            raise InvariantError(f"block {block} is given back but nobody holds it (pool of {self.num_blocks})")
        self.refs[block] -= 1
        if self.refs[block]:
            return False
        self.num_held -= 1
        card = self.cards[block]
        if card is None:
            self._state[block] = _WARM
            self._warm.append(block)
        else:
            self._state[block] = _CACHED
            self.queue.push(block, card.priority, facts)
        return True

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

    @property
    def num_free(self) -> int:
        return len(self._free) + len(self._kept)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    def take(self) -> int | None:
        """A free slot, or the one that was kept for longest, or None."""
        if self._free:
            return self._free.pop()
        if not self._kept:
            return None
        slot = next(iter(self._kept))
        self._kept.pop(slot)()
        return slot

    def give(self, slot: int, on_reuse: Callable[[], None] | None = None) -> None:
        """Free a slot; with ``on_reuse`` it is kept as long as another is free. One that is free already is refused."""
        if slot in self._free or slot in self._kept or not 0 <= slot < self.num_slots:
            raise InvariantError(f"open slot {slot} is given back but nobody holds it (of {self.num_slots})")
        if on_reuse is None:
            self._free.append(slot)
        else:
            self._kept[slot] = on_reuse

    def faults(self, held: list[int]) -> list[str]:
        """What contradicts itself, if exactly ``held`` should be held."""
        if sorted([*held, *self._free, *self._kept]) == list(range(self.num_slots)):
            return []
        return [
            f"open slots disagree: {sorted(held)} held, {sorted(self._free)} free, {sorted(self._kept)} kept "
            f"of {self.num_slots}"
        ]
