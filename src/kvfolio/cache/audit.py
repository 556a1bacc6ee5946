"""Verifies the laws of the ledger by counting everything anew. Changes nothing.

Knows nothing of what is done about a fault.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from kvfolio.cache.blocks import BlockId, OpenSlots
from kvfolio.cache.budget import BlockBudget
from kvfolio.cache.holding import Holding, OpenTexts, SequenceId


@dataclass(frozen=True, slots=True)
class Fault:
    """A broken law, the block it concerns if it is one, and who holds that."""

    what: str
    group: int | None = None
    block: BlockId | None = None
    owners: tuple[SequenceId, ...] = ()

    def __str__(self) -> str:
        if self.block is None:
            return self.what
        owners = ", ".join(map(str, self.owners)) or "nobody"
        return f"block {self.block} of group {self.group}, held by {owners}: {self.what}"


def find_faults(
    budget: BlockBudget, slots: OpenSlots, holdings: Mapping[SequenceId, Holding], open_texts: OpenTexts
) -> tuple[Fault, ...]:
    """All faults there are."""
    found: list[Fault] = []
    for group, pool in enumerate(budget.pools):
        holders = Counter(block for holding in holdings.values() for block in holding.sealed[group])
        for block, what in pool.faults(holders) + _card_faults(budget, group):
            owners = tuple(name for name, holding in holdings.items() if block in holding.sealed[group])
            found.append(Fault(what, group, block, owners))
    found += [Fault(what) for what in budget.index.faults()]
    found += _byte_faults(budget)
    found += [Fault(what) for what in slots.faults([holding.open_slot for holding in holdings.values()])]
    found += _sequence_faults(budget, holdings)
    kept = [holding for holding in open_texts.all() if not holding.is_running]
    running = [holding for holding in open_texts.all() if holding.is_running]
    if len(kept) != slots.num_kept or any(holding not in holdings.values() for holding in running):
        found.append(Fault(f"{len(kept)} ended texts are listed, {slots.num_kept} slots are kept"))
    return tuple(found)


def _card_faults(budget: BlockBudget, group: int) -> list[tuple[BlockId, str]]:
    """Cards and blocks must point at each other, and to no block that the group does not hold."""
    pool, index, layout = budget.pools[group], budget.index, budget.layout.groups[group]
    found: list[tuple[BlockId, str]] = []
    for number, card in enumerate(pool.cards):
        if card is not None and (card.blocks[group] != number or index.cards.get(card.digest) is not card):
            found.append((BlockId(number), "its card does not know it"))
    for card in index.cards.values():
        block = card.blocks[group]
        if block is not None and pool.cards[block] is not card:
            found.append((BlockId(block), f"card {card.digest.hex()[:8]} names it in vain"))
        elif block is not None and not layout.holds(card.block):
            found.append((BlockId(block), f"it is block {card.block} of a text, behind the {layout.num_sinks} sinks"))
    return found


def _byte_faults(budget: BlockBudget) -> list[Fault]:
    """held + cached + warm + cold + quarantined = all, in blocks and in bytes."""
    found, held_bytes, touched_bytes = [], 0, 0
    for place, (pool, group) in enumerate(zip(budget.pools, budget.layout.groups, strict=True)):
        held_bytes += (pool.num_held + pool.num_quarantined) * group.block_bytes
        touched_bytes += pool.num_touched * group.block_bytes
        terms = (pool.num_held, pool.num_cached, pool.num_warm, pool.num_cold, pool.num_quarantined)
        if sum(terms) != pool.num_blocks:
            names = zip(terms, ("held", "cached", "warm", "cold", "quarantined"), strict=True)
            told = " + ".join(f"{count} {name}" for count, name in names)
            found.append(Fault(f"group {place}: {told} are not its {pool.num_blocks} blocks"))
    booked = (budget.held_bytes, budget.touched_bytes)
    if (held_bytes, touched_bytes) != booked or not held_bytes <= touched_bytes <= budget.layout.budget_bytes:
        found.append(
            Fault(
                f"bytes disagree: held {held_bytes} counted, {booked[0]} booked; "
                f"touched {touched_bytes} counted, {booked[1]} booked; budget {budget.layout.budget_bytes}"
            )
        )
    return found


def _sequence_faults(budget: BlockBudget, holdings: Mapping[SequenceId, Holding]) -> list[Fault]:
    """A sequence holds a block for every full one that it has not passed; of a sink group, for the first ones."""
    found, tokens = [], budget.layout.block_tokens
    for name, holding in holdings.items():
        for group, first, sealed in zip(budget.layout.groups, holding.first_block, holding.sealed, strict=True):
            if first + len(sealed) != group.num_held(0, holding.num_tokens // tokens):
                limit = f", at most {group.num_sinks}" if group.is_sinks else ""
                found.append(
                    Fault(
                        f"sequence {name}: {first} passed + {len(sealed)} sealed blocks != "
                        f"{holding.num_tokens} tokens // {tokens}{limit}"
                    )
                )
    return found
