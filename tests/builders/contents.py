"""What the memory of a cache would hold: for every block the text it was written with, moved as the ledger says.

Knows nothing of the ledger's lists, counts or digests. A text stands for keys and values: these depend on all tokens up
to their own, on the model and on the adapter, and on nothing else.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvfolio.cache.holding import BlockTable
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
from kvfolio.spec.layout import CacheLayout, GroupLayout


class Text(NamedTuple):
    """Of whom, and all tokens from the first one on. A sealed block holds the last ``block_tokens`` of them."""

    owner: object  # the scope; of a private sequence something of its own
    tokens: tuple[int, ...]

    def until(self, stop: int) -> "Text":
        return Text(self.owner, self.tokens[:stop])


@dataclass(frozen=True, slots=True)
class Open:
    """An open block: tokens [start, len(text.tokens)) of a text."""

    start: int
    text: Text


def open_groups(layout: CacheLayout) -> list[GroupLayout]:
    """The groups that have open blocks: all but sinks."""
    return [group for group in layout.groups if group.num_sinks is None]


class Contents:
    """Memory of every group: None where nothing was written, or where it was and must not be read any more.

    Sink groups have no open blocks.
    """

    def __init__(self, layout: CacheLayout, host: CacheLayout | None = None) -> None:
        self.layout = layout
        self.block_tokens = layout.block_tokens
        self.sealed: list[list[Text | None]] = [[None] * group.num_blocks for group in layout.groups]
        self.open: list[list[Open | None]] = [[None] * layout.num_open_blocks for _ in open_groups(layout)]
        groups = host.groups if host is not None else ()
        self.host: list[list[Text | None]] = [[None] * group.num_blocks for group in groups]
        self.host_open: list[list[Open | None]] = [
            [None] * group.num_open_blocks for group in (open_groups(host) if host is not None else ())
        ]

    def carry(self, moves: Iterable[Move]) -> None:
        """Carry out moves in their order, before what the step writes."""
        for move in moves:
            match move:
                case ReturnMemory(group, block) | Poison(group, block):
                    self.sealed[group][block] = None
                case PoisonOpen(slot):
                    for slots in self.open:
                        slots[slot] = None
                case CopyToOpen(group, block, slot):
                    assert self.layout.is_lossless, "a sealed block is copied though it is encoded"
                    text = self.sealed[group][block]
                    assert text is not None, f"{move} copies what is not there"
                    self.open[group][slot] = Open(len(text.tokens) - self.block_tokens, text)
                case CopyOpen(source, target):
                    for slots in self.open:
                        assert slots[source] is not None, f"{move} copies what is not there"
                        slots[target] = slots[source]
                case SwapOut(group, block, host_block):
                    assert self.sealed[group][block] is not None, f"{move} saves what is not there"
                    self.host[group][host_block] = self.sealed[group][block]
                case SwapIn(group, host_block, block):
                    assert self.host[group][host_block] is not None, f"{move} brings back what is not there"
                    self.sealed[group][block] = self.host[group][host_block]
                case SwapOpenOut(slot, host_slot):
                    for slots, saved in zip(self.open, self.host_open, strict=True):
                        saved[host_slot] = slots[slot]
                case SwapOpenIn(host_slot, slot):
                    for slots, saved in zip(self.open, self.host_open, strict=True):
                        slots[slot] = saved[host_slot]

    def spoil(self, group: int, blocks: Iterable[int]) -> None:
        """A step writes these blocks: whatever was there is not any more."""
        for block in blocks:
            self.sealed[group][block] = None

    def spoil_open(self, slot: int) -> None:
        for slots in self.open:
            slots[slot] = None

    def write(self, text: Text, start: int, tables: Sequence[BlockTable]) -> None:
        """The step has written tokens [start, len(text.tokens)): full blocks are sealed, the rest is left open."""
        size, stop = self.block_tokens, len(text.tokens)
        for layout, sealed, table in zip(self.layout.groups, self.sealed, tables, strict=True):
            for block in range(start // size, stop // size):
                if layout.num_sinks is None or block < layout.num_sinks:
                    sealed[table.sealed[block - table.first_block]] = text.until((block + 1) * size)
        for slots in self.open:
            slots[tables[0].open_slot] = Open(stop // size * size, text)

    def verify(self, text: Text, tables: Sequence[BlockTable]) -> None:
        """Every block that ``tables`` show as written with ``text`` holds exactly that; sinks are the first blocks."""
        size, stop = self.block_tokens, len(text.tokens)
        for group, (layout, table, sealed) in enumerate(zip(self.layout.groups, tables, self.sealed, strict=True)):
            assert table.open_slot == tables[0].open_slot
            if layout.num_sinks is not None:
                written = min(stop // size, layout.num_sinks)
                assert table.first_block == 0 and written <= len(table.sealed) <= layout.num_sinks
            for place, block in enumerate(table.sealed, table.first_block):
                if (place + 1) * size <= stop:
                    there = sealed[block]
                    assert there == text.until((place + 1) * size), (
                        f"block {block} of group {group} is block {place} of {text} but holds {there}"
                    )
        for slots in self.open:
            self._verify_open(slots[tables[0].open_slot], text, f"open slot {tables[0].open_slot}")

    def verify_host(self, text: Text, firsts: Iterable[int], blocks: Iterable[Sequence[int]], slot: int) -> None:
        """The same of a sequence in the host pool."""
        last = len(text.tokens) // self.block_tokens
        for layout, first, held, saved in zip(self.layout.groups, firsts, blocks, self.host, strict=True):
            assert first + len(held) == (last if layout.num_sinks is None else min(last, layout.num_sinks))
            for place, block in enumerate(held, first):
                assert saved[block] == text.until((place + 1) * self.block_tokens), f"host block {block} of {text}"
        for slots in self.host_open:
            self._verify_open(slots[slot], text, f"host slot {slot}")

    def _verify_open(self, there: Open | None, text: Text, where: str) -> None:
        """Its beginning is what ``text`` has behind its last full block; what else it holds will be overwritten."""
        stop = len(text.tokens)
        if stop % self.block_tokens:
            start = stop // self.block_tokens * self.block_tokens
            assert there is not None and there.start == start and there.text.until(stop) == text, (
                f"{where} should hold tokens {start} to {stop} of {text} but holds {there}"
            )
