"""What has to happen to bytes before a step is computed, as plain data, in the order in which it has to happen.

Decided by the ledger, carried out by the store. Knows nothing of tensors.
"""

from dataclasses import dataclass

from kvfolio.cache.blocks import BlockId


@dataclass(frozen=True, slots=True)
class ReturnMemory:
    """The memory of a free block goes back to the system, because another group needs the bytes."""

    group: int
    block: BlockId


@dataclass(frozen=True, slots=True)
class CopyToOpen:
    """Copy-on-write: a sealed block's content, whole, into an open slot. In lossless formats only."""

    group: int
    block: BlockId
    open_slot: int


@dataclass(frozen=True, slots=True)
class CopyOpen:
    """Copy-on-write: an open slot into another one, in every group."""

    source: int
    target: int


@dataclass(frozen=True, slots=True)
class SwapOut:
    """A sealed block's bytes go to the host pool."""

    group: int
    block: BlockId
    host_block: BlockId


@dataclass(frozen=True, slots=True)
class SwapIn:
    """A sealed block's bytes come back from the host pool."""

    group: int
    host_block: BlockId
    block: BlockId


@dataclass(frozen=True, slots=True)
class SwapOpenOut:
    """An open slot's bytes go to the host pool, exactly, in every group."""

    open_slot: int
    host_slot: int


@dataclass(frozen=True, slots=True)
class SwapOpenIn:
    """An open slot's bytes come back from the host pool, in every group."""

    host_slot: int
    open_slot: int


@dataclass(frozen=True, slots=True)
class Poison:
    """Debugging: a block that is going to be written anew is filled with bytes that are no number in any format."""

    group: int
    block: BlockId


@dataclass(frozen=True, slots=True)
class PoisonOpen:
    """Debugging: the same of an open slot, in every group."""

    open_slot: int


Move = ReturnMemory | CopyToOpen | CopyOpen | SwapOut | SwapIn | SwapOpenOut | SwapOpenIn | Poison | PoisonOpen
