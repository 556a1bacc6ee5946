"""Broken invariants: raised when debugging; else the block is put out of use, said and counted, and others go on.

Every kind of corruption is planted by hand. Blocks of four tokens, ten of 32 bytes and ten of 64.
"""

import logging
from collections.abc import Callable

import pytest
from cached import A, B, C, begin, blocks, chain_of, leave, look_up, pass_by, text, write
from small import layout_of

from kvfolio.cache.blocks import NO_FACTS, BlockId
from kvfolio.cache.ledger import Ledger, LedgerOptions
from kvfolio.errors import InvariantError

FULL = layout_of((None, 1))
HYBRID = layout_of((None, 1), (5, 2))


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


# ---- given back twice -----------------------------------------------------------------------------------------------


def test_in_debug_a_block_given_back_twice_raises() -> None:
    ledger = Ledger(FULL, LedgerOptions(debug=True))
    write(ledger, A, text(0, 12))
    ledger._budget.give(0, [BlockId(1)], "nobody")
    with pytest.raises(InvariantError, match="block 1 is given back but nobody holds it"):
        ledger.release(A)


def test_a_block_given_back_twice_is_put_out_of_use_and_said_and_the_others_are_given(
    caplog: pytest.LogCaptureFixture,
) -> None:
    ledger = Ledger(FULL)
    write(ledger, A, text(0, 12))  # 0 1 2
    write(ledger, B, text(100, 8))  # 3 4
    ledger._budget.give(0, [BlockId(1)], "nobody")
    ledger.release(A)
    assert errors(caplog) == [
        "block 1 of group 0 is put out of use, please report this: 0 gave it back but nobody held it"
    ]
    ledger.check()
    usage = ledger.usage()
    assert (usage.num_quarantined, usage.cached_by_group, usage.sealed_by_group) == (1, (2,), (2,))
    assert ledger.free_bytes == 320 - 3 * 32  # two that B holds, and the one that nobody will
    assert look_up(ledger, text(0, 12)).num_tokens == 4  # its text is not found any more
    leave(ledger, B)
    assert ledger.free_bytes == 9 * 32


@pytest.mark.parametrize("damaged", [0, 1, 2])
def test_wherever_in_the_row_the_damage_lies_the_bytes_are_right(damaged: int) -> None:
    ledger = Ledger(FULL)
    write(ledger, A, text(0, 12))
    write(ledger, B, text(100, 4))
    ledger._budget.give(0, [BlockId(damaged)], "nobody")
    leave(ledger, A)
    assert ledger.free_bytes == 320 - 2 * 32
    assert ledger.usage().num_quarantined == 1


def test_the_bytes_of_a_block_in_quarantine_are_never_granted_again() -> None:
    ledger = Ledger(FULL)
    write(ledger, A, text(0, 12))
    ledger._budget.give(0, [BlockId(1)], "nobody")
    leave(ledger, A)
    begin(ledger, B, text(100, 60))
    assert ledger.largest_extension(B, 60) == 39  # nine blocks and an open one
    grant = ledger.extend(B, 36)
    assert grant is not None
    assert sorted(grant.tables[0].sealed) == [0, 2, 3, 4, 5, 6, 7, 8, 9]
    ledger.commit(B)
    ledger.check()
    assert (ledger.free_bytes, ledger.largest_extension(B, 60)) == (0, 3)
    leave(ledger, B)
    assert ledger.free_bytes == 9 * 32


def test_those_who_still_hold_a_block_in_quarantine_let_go_of_it_in_silence(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger(FULL)
    write(ledger, A, text(0, 8))
    write(ledger, B, text(0, 9))
    ledger._budget.quarantine(0, BlockId(1), "a test says so")
    ledger.check()
    assert (blocks(ledger, A), blocks(ledger, B)) == ([0, 1], [0, 1])  # they end with what they have
    assert write(ledger, C, text(0, 9)) == 4  # nobody new gets it
    leave(ledger, A, B, C)
    assert len(errors(caplog)) == 1
    assert ledger.usage().num_quarantined == 1
    assert ledger.free_bytes == 9 * 32


def test_a_block_that_is_none_is_said(caplog: pytest.LogCaptureFixture) -> None:
    ledger = Ledger(FULL)
    write(ledger, A, text(0, 8))
    ledger._holdings[A].sealed[0].append(BlockId(77))
    ledger.release(A)
    assert errors(caplog) == [
        "block 77 of group 0 does not exist, please report this: 0 gave it back but nobody held it"
    ]
    ledger.check()


# ---- every kind of corruption ---------------------------------------------------------------------------------------


def first_card(ledger: Ledger):  # type: ignore[no-untyped-def]
    return ledger._budget.index.cards[chain_of(text(0, 4)).digests(1)[0]]


def misbook_held_bytes(ledger: Ledger) -> None:
    ledger._budget.held_bytes += 32


def misbook_touched_bytes(ledger: Ledger) -> None:
    ledger._budget.touched_bytes -= 32


def hold_a_block_twice(ledger: Ledger) -> None:
    ledger._holdings[A].sealed[0][1] = ledger._holdings[A].sealed[0][0]


def share_a_block_uncounted(ledger: Ledger) -> None:
    ledger._holdings[B].sealed[0][0] = ledger._holdings[A].sealed[0][0]


def hold_a_cold_block(ledger: Ledger) -> None:
    ledger._holdings[A].sealed[1][0] = BlockId(9)


def free_a_held_block(ledger: Ledger) -> None:
    ledger._budget.pools[0].give(ledger._holdings[A].sealed[0][:1])


def hold_a_cached_block(ledger: Ledger) -> None:
    ledger._holdings[A].sealed[0][0] = BlockId(4)


def count_a_holder_too_many(ledger: Ledger) -> None:
    ledger._budget.pools[0].refs[0] += 1


def forget_a_sequence(ledger: Ledger) -> None:
    ledger._slots.give(ledger._holdings[B].open_slot)
    ledger._open_texts.remove(ledger._holdings.pop(B))


def lose_the_card_of_a_held_block(ledger: Ledger) -> None:
    ledger._budget.pools[0].cards[0] = None


def lose_the_card_of_a_cached_block(ledger: Ledger) -> None:
    ledger._budget.pools[0].cards[4] = None


def let_a_card_name_another_block(ledger: Ledger) -> None:
    first_card(ledger).blocks[0] = 8


def let_a_card_forget_its_block(ledger: Ledger) -> None:
    first_card(ledger).blocks[0] = None


def exchange_two_cards(ledger: Ledger) -> None:
    cards = ledger._budget.pools[0].cards
    cards[0], cards[1] = cards[1], cards[0]


def take_a_card_out_of_the_index(ledger: Ledger) -> None:
    del ledger._budget.index.cards[first_card(ledger).digest]


def list_a_held_block_as_warm(ledger: Ledger) -> None:
    ledger._budget.pools[0]._warm.append(BlockId(0))


def queue_a_held_block_for_eviction(ledger: Ledger) -> None:
    ledger._budget.pools[0].queue.push(0, 50, NO_FACTS)


HEALED = [
    (misbook_held_bytes, "held 256 counted, 288 booked", []),
    (misbook_touched_bytes, "touched 480 counted, 448 booked", []),
    (hold_a_block_twice, "block 0 of group 0, held by 0: counts 1 holders, but 2 hold it", [(0, 0), (0, 1)]),
    (share_a_block_uncounted, "block 0 of group 0, held by 0, 1: counts 1 holders, but 2 hold", [(0, 0), (0, 3)]),
    (hold_a_cold_block, "block 9 of group 1, held by 0: marked cold, but listed as held", [(1, 2), (1, 9)]),
    (free_a_held_block, "block 0 of group 0, held by 0: marked cached, but listed as cached and held", [(0, 0)]),
    (hold_a_cached_block, "block 4 of group 0, held by 0: marked cached, but listed as cached", [(0, 0), (0, 4)]),
    (count_a_holder_too_many, "block 0 of group 0, held by 0: counts 2 holders, but 1 hold it", [(0, 0)]),
    (forget_a_sequence, "block 3 of group 0, held by nobody: marked held, but listed as nothing", [(0, 3), (1, 3)]),
    (lose_the_card_of_a_held_block, "names it in vain", [(0, 0)]),
    (lose_the_card_of_a_cached_block, "block 4 of group 0, held by nobody: cached without an index card", [(0, 4)]),
    (let_a_card_name_another_block, "block 0 of group 0, held by 0: its card does not know it", [(0, 0), (0, 8)]),
    (let_a_card_forget_its_block, "block 0 of group 0, held by 0: its card does not know it", [(0, 0)]),
    (exchange_two_cards, "block 1 of group 0, held by 0: its card does not know it", [(0, 0), (0, 1)]),
    (list_a_held_block_as_warm, "block 0 of group 0, held by 0: marked held, but listed as warm and held", [(0, 0)]),
    (queue_a_held_block_for_eviction, "block 0 of group 0, held by 0: marked held, but listed as cached", [(0, 0)]),
]


def busy() -> Ledger:
    """A holds full 0 1 2 and the window's last, B full 3, and 4 is cached."""
    ledger = Ledger(HYBRID)
    write(ledger, A, text(0, 13))  # window 0 1 2; query 13 reads 9 …, so 0 and 1 are cached
    write(ledger, B, text(100, 5))  # window 3
    pass_by(ledger, C, text(200, 4))  # full 4, window 4
    return ledger


@pytest.mark.parametrize(("corrupt", "words", "lost"), HEALED)
def test_an_audit_names_the_corruption_puts_its_blocks_out_of_use_and_then_all_is_well(
    corrupt: Callable[[Ledger], None], words: str, lost: list[tuple[int, int]], caplog: pytest.LogCaptureFixture
) -> None:
    ledger = busy()
    assert ledger.audit() == ()
    corrupt(ledger)
    with pytest.raises(InvariantError):
        ledger.check()
    faults = ledger.audit()
    assert any(words in str(fault) for fault in faults), [str(fault) for fault in faults]
    pools = ledger._budget.pools
    assert [
        (group, block) for group, pool in enumerate(pools) for block in range(10) if pool.is_quarantined(BlockId(block))
    ] == lost
    assert ledger.usage().num_quarantined == len(lost) == len(errors(caplog))
    assert [str(fault) for fault in ledger.audit()] == []
    ledger.check()
    # The others go on, and nobody gets what was lost.
    for sequence in list(ledger._holdings):
        leave(ledger, sequence)
    most = min(10 - sum(group == which for group, _ in lost) for which in range(2))
    assert write(ledger, C, text(300, 4 * most)) == 0
    assert not {(0, block) for block in blocks(ledger, C)} & set(lost)
    assert ledger.audit() == ()
    leave(ledger, C)
    assert ledger.free_bytes == sum((10 - sum(g == group for g, _ in lost)) * (32, 64)[group] for group in range(2))


def forget_tokens(ledger: Ledger) -> None:
    ledger._holdings[A].num_tokens -= 4


def lose_a_block(ledger: Ledger) -> None:
    ledger._holdings[A].sealed[0].pop()


def forget_that_a_block_was_passed(ledger: Ledger) -> None:
    ledger._holdings[A].first_block[1] -= 1


def free_a_held_slot(ledger: Ledger) -> None:
    ledger._slots._free.append(ledger._holdings[A].open_slot)


def lose_a_slot(ledger: Ledger) -> None:
    ledger._slots._free.pop()


def share_a_slot(ledger: Ledger) -> None:
    ledger._holdings[A].open_slot = ledger._holdings[B].open_slot


def file_a_card_elsewhere(ledger: Ledger) -> None:
    first_card(ledger).digest = b"another"


def keep_a_card_without_blocks(ledger: Ledger) -> None:
    card = first_card(ledger)
    for group, block in enumerate(card.blocks):
        ledger._budget.pools[group].cards[block] = None
    card.blocks = [None, None]


def forget_a_child(ledger: Ledger) -> None:
    del ledger._budget.index._child[first_card(ledger).digest]


def lose_a_kept_text(ledger: Ledger) -> None:
    pass_by(ledger, C, text(300, 3))
    ledger._slots._kept.clear()


@pytest.mark.parametrize(
    ("corrupt", "words"),
    [
        (forget_tokens, "sequence 0: 0 passed + 3 sealed blocks != 9 tokens // 4"),
        (lose_a_block, "block 2 of group 0, held by nobody: marked held, but listed as nothing"),
        (forget_that_a_block_was_passed, "sequence 0: 1 passed + 1 sealed blocks != 13 tokens // 4"),
        (free_a_held_slot, "open slots disagree"),
        (lose_a_slot, "open slots disagree"),
        (share_a_slot, "open slots disagree"),
        (take_a_card_out_of_the_index, "block 0 of group 0, held by 0: its card does not know it"),
        (file_a_card_elsewhere, "is filed elsewhere"),
        (keep_a_card_without_blocks, "has no block"),
        (forget_a_child, "cards are listed by parent"),
        (lose_a_kept_text, "open slots disagree"),
    ],
)
def test_an_audit_names_what_no_quarantine_can_heal_and_does_not_fall_over_it(
    corrupt: Callable[[Ledger], None], words: str
) -> None:
    ledger = busy()
    corrupt(ledger)
    faults = [str(fault) for fault in ledger.audit()]
    assert any(words in fault for fault in faults), faults
    assert ledger.audit() is not None


def test_an_audit_of_a_sound_ledger_finds_and_changes_nothing() -> None:
    ledger = busy()
    before = ledger.usage()
    assert ledger.audit() == ()
    assert ledger.usage() == before
