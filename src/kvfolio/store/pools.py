"""The pools: the tensor memory behind the blocks of each layer group, exactly as planned.

Knows nothing of who holds which block. On a CPU a sealed pool only reserves addresses; memory comes when a block is
first written and goes back when the ledger says so.
"""

import contextlib
import mmap
import sys

import torch
from torch import Tensor

from kvfolio.cache.ledger import Move
from kvfolio.errors import BudgetError
from kvfolio.spec.layout import CacheLayout
from kvfolio.units import format_bytes

# Addresses only, whatever the system's overcommit mode (MAP_NORESERVE of Linux; Python 3.11 does not name it).
_RESERVE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0x4000 if sys.platform == "linux" else 0)


class CacheStore:
    """Sealed and open pools of all groups: uint8 [num_blocks, block_bytes] each."""

    def __init__(self, layout: CacheLayout, device: torch.device) -> None:
        self.layout = layout
        self.device = device
        self._maps: list[mmap.mmap] = []
        try:
            self.sealed = [self._reserve(group.num_blocks, group.block_bytes) for group in layout.groups]
            self.open = [
                torch.empty((group.num_open_blocks, group.open_block_bytes), dtype=torch.uint8, device=device)
                for group in layout.groups
            ]
        except (OSError, RuntimeError, ValueError) as error:
            raise BudgetError(
                f"the cache of {format_bytes(layout.planned_bytes)} cannot be allocated on {device}: {error}; "
                f"give a smaller kv_memory"
            ) from error

    @property
    def allocated_bytes(self) -> int:
        """Bytes the pools may occupy: all open blocks, and the sealed blocks that the budget covers.

        With several groups on a CPU each sealed pool has addresses for the whole budget; the ledger sees to it that the
        blocks which occupy memory stay within it.
        """
        sealed = sum(pool.nbytes for pool in self.sealed)
        return min(sealed, self.layout.budget_bytes) + sum(pool.nbytes for pool in self.open)

    def carry(self, moves: tuple[Move, ...]) -> None:
        """Carry out the moves of a step: give the memory of free blocks back to the system."""
        if not self._maps:
            return
        page = mmap.PAGESIZE
        for move in moves:
            size = self.layout.groups[move.group].block_bytes
            begin = -(-move.block * size // page) * page  # whole pages inside the block
            end = (move.block + 1) * size // page * page
            if end > begin:
                self._maps[move.group].madvise(mmap.MADV_DONTNEED, begin, end - begin)

    def _reserve(self, num_blocks: int, block_bytes: int) -> Tensor:
        if self.device.type != "cpu":
            return torch.empty((num_blocks, block_bytes), dtype=torch.uint8, device=self.device)
        memory = mmap.mmap(-1, num_blocks * block_bytes, flags=_RESERVE)
        # Huge pages read 5 % faster. But the system fills them up again where a block's memory was returned, so with
        # several groups the pools would outgrow the budget. It is advice: a system without huge pages refuses it.
        with contextlib.suppress(AttributeError, OSError):
            memory.madvise(mmap.MADV_HUGEPAGE if len(self.layout.groups) == 1 else mmap.MADV_NOHUGEPAGE)
        self._maps.append(memory)
        return torch.frombuffer(memory, dtype=torch.uint8).view(num_blocks, block_bytes)
