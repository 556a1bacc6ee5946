"""Free and held blocks of one layer group, and the open slots of the running sequences.

Knows nothing of sequences, tokens or bytes: it hands out integers and takes them back, each in O(1).
"""

from typing import NewType

from kvfolio.errors import InvariantError

BlockId = NewType("BlockId", int)

_COLD, _WARM, _HELD = 0, 1, 2
_MARKS = ("cold", "warm", "held")


class BlockPool:
    """The sealed blocks of one group.

    A free block is *cold* when its memory was never written (or was returned to the system) and *warm* when it
    still occupies memory. Warm blocks are reused first, so the memory touched stays as small as the load.

        cold ──take──▶ held ──give──▶ warm ──take──▶ held
          ▲                             │
          └────────────cool─────────────┘
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
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
    def num_free(self) -> int:
        return self.num_warm + self.num_cold

    @property
    def num_held(self) -> int:
        return self.num_blocks - self.num_free

    def take(self) -> BlockId:
        """Hold one free block, a warm one if there is any. The caller has checked that one is free."""
        if self._warm:
            block = self._warm.pop()
        elif self._returned:
            block = self._returned.pop()
        elif self._fresh < self.num_blocks:
            block = BlockId(self._fresh)
            self._fresh += 1
        else:
            raise InvariantError(f"take() on a pool whose {self.num_blocks} blocks are all held")
        self._state[block] = _HELD
        return block

    def give(self, block: BlockId) -> None:
        """Free a held block; it stays warm. A block that is not held is refused and nothing changes."""
        if not 0 <= block < self.num_blocks or self._state[block] != _HELD:
            raise InvariantError(f"block {block} is given back but nobody holds it (pool of {self.num_blocks})")
        self._state[block] = _WARM
        self._warm.append(block)

    def cool(self) -> BlockId:
        """Turn one warm block cold and name it: its memory can go back to the system."""
        block = self._warm.pop(0)  # rare: only when another group needs the bytes
        self._state[block] = _COLD
        self._returned.append(block)
        return block

    def check(self, held: list[BlockId]) -> None:
        """Compare with ``held``, every block that some sequence says it holds."""
        marked = self._state.count(_HELD)
        if not marked == len(held) == len(set(held)) == self.num_held:
            raise InvariantError(
                f"held blocks disagree: {marked} marked, {len(held)} in sequences, {len(set(held))} distinct, "
                f"{self.num_held} = {self.num_blocks} - {self.num_warm} warm - {self.num_cold} cold"
            )
        free = self._warm + self._returned
        if len(set(free)) != len(free):
            raise InvariantError(f"free blocks are listed twice: {len(free)} listed, {len(set(free))} distinct")
        lists = (
            ("a sequence", held, _HELD),
            ("the warm list", self._warm, _WARM),
            ("the cold list", self._returned, _COLD),
        )
        for place, blocks, mark in lists:
            for block in blocks:
                if self._state[block] != mark:
                    raise InvariantError(f"block {block} is in {place} but marked {_MARKS[self._state[block]]}")


class OpenSlots:
    """Open blocks: one for each running sequence, the same number in every group."""

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self) -> int | None:
        """A free slot, or None."""
        return self._free.pop() if self._free else None

    def give(self, slot: int) -> None:
        """Free a slot. One that is free already is refused."""
        if slot in self._free or not 0 <= slot < self.num_slots:
            raise InvariantError(f"open slot {slot} is given back but nobody holds it (of {self.num_slots})")
        self._free.append(slot)

    def check(self, held: list[int]) -> None:
        if sorted(held + self._free) != list(range(self.num_slots)):
            raise InvariantError(
                f"open slots disagree: {sorted(held)} held, {sorted(self._free)} free of {self.num_slots}"
            )
