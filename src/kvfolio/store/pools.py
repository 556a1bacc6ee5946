"""The pools: the tensor memory behind the blocks of each layer group, exactly as planned.

Knows nothing of who holds which block. On a CPU a sealed pool only reserves addresses; memory comes when a block is
first written and goes back when the ledger says so.
"""

import contextlib
import mmap
import sys

import torch
from torch import Tensor

from kvfolio.cache.moves import (
    CopyOpen,
    CopyToOpen,
    Move,
    Poison,
    PoisonOpen,
    ReturnMemory,
    SwapIn,
    SwapOpenIn,
    SwapOpenOut,
    SwapOut,
)
from kvfolio.errors import BudgetError
from kvfolio.spec.layout import CacheLayout
from kvfolio.units import format_bytes

# Addresses only, whatever the system's overcommit mode (MAP_NORESERVE of Linux; Python 3.11 does not name it).
_RESERVE = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | (0x4000 if sys.platform == "linux" else 0)
_POISON = 0xFF  # NaN in every float format


class CacheStore:
    """Sealed and open pools of all groups, uint8 [num_blocks, block_bytes] each, and a host pool for swapping."""

    def __init__(self, layout: CacheLayout, device: torch.device, host: CacheLayout | None = None) -> None:
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
        self.host = None if host is None else CacheStore(host, torch.device("cpu"))

    @property
    def allocated_bytes(self) -> int:
        """Bytes the pools may occupy: all open blocks, and the sealed blocks that the budget covers. No host pool.

        With several groups on a CPU each sealed pool has addresses for the whole budget; the ledger sees to it that the
        blocks which occupy memory stay within it.
        """
        sealed = sum(pool.nbytes for pool in self.sealed)
        return min(sealed, self.layout.budget_bytes) + sum(pool.nbytes for pool in self.open)

    def carry(self, moves: tuple[Move, ...]) -> None:
        """Carry out the moves of a step, in their order."""
        for move in moves:
            if isinstance(move, ReturnMemory):
                self._return_memory(move)
            elif isinstance(move, CopyToOpen):
                self.open[move.group][move.open_slot] = self.sealed[move.group][move.block]
            elif isinstance(move, Poison):
                self.sealed[move.group][move.block] = _POISON
            elif isinstance(move, SwapOut | SwapIn):
                self._swap(move)
            else:
                self._carry_open(move)

    def _carry_open(self, move: CopyOpen | SwapOpenOut | SwapOpenIn | PoisonOpen) -> None:
        """Moves of open slots concern all groups."""
        hosts = [] if self.host is None else self.host.open
        if isinstance(move, CopyOpen):
            for pool in self.open:
                pool[move.target] = pool[move.source]
        elif isinstance(move, PoisonOpen):
            for pool in self.open:
                pool[move.open_slot] = _POISON
        elif isinstance(move, SwapOpenOut):
            for pool, host in zip(self.open, hosts, strict=True):
                host[move.host_slot].copy_(pool[move.open_slot])
        else:
            for pool, host in zip(self.open, hosts, strict=True):
                pool[move.open_slot].copy_(host[move.host_slot])

    def _swap(self, move: SwapOut | SwapIn) -> None:
        assert self.host is not None
        here, there = self.sealed[move.group][move.block], self.host.sealed[move.group][move.host_block]
        if isinstance(move, SwapOut):
            there.copy_(here)
        else:
            here.copy_(there)

    def _return_memory(self, move: ReturnMemory) -> None:
        """Give the memory of a free block back to the system, where it came from there."""
        if not self._maps:
            return
        page, size = mmap.PAGESIZE, self.layout.groups[move.group].block_bytes
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
