"""Sharing by exact block ids: what a second sequence finds, copies, waits for, and never sees.

One layer, blocks of four tokens, ten blocks, four open slots unless said otherwise. Knows nothing of schedulers.
"""

import pytest
from cached import A, B, C, D, E, begin, blocks, grow, leave, look_up, pass_by, refs, text, write
from small import layout_of, lossy

from kvfolio.cache.blocks import BlockId
from kvfolio.cache.ledger import Ledger, LedgerOptions
from kvfolio.cache.moves import CopyOpen, CopyToOpen, Poison, PoisonOpen, ReturnMemory
from kvfolio.cache.prefix import Scope
from kvfolio.cache.retention import KeepRange


def ledger_of(*shapes: tuple[int | None, int], is_lossy: bool = False, **sizes: int) -> Ledger:
    layout = layout_of(*(shapes or ((None, 1),)), **sizes)  # type: ignore[arg-type]
    return Ledger(lossy(layout) if is_lossy else layout)


# ---- whole blocks ---------------------------------------------------------------------------------------------------


def test_a_second_sequence_of_equal_tokens_holds_the_same_blocks() -> None:
    ledger = ledger_of()
    assert write(ledger, A, text(0, 10)) == 0
    assert begin(ledger, B, [*text(0, 8), 99, 99, 99, 99]) == ()
    assert (blocks(ledger, A), blocks(ledger, B)) == ([0, 1], [0, 1])
    assert refs(ledger)[:3] == [2, 2, 0]
    grow(ledger, B, 12)
    assert blocks(ledger, B) == [0, 1, 2]
    assert (ledger.free_bytes, ledger.tokens_written()) == (7 * 32, 22)  # three blocks hold 20 tokens that are sealed
    leave(ledger, A)
    assert refs(ledger)[:3] == [1, 1, 1]  # held for B still
    leave(ledger, B)
    assert (refs(ledger)[:3], ledger.usage().cached_by_group) == ([0, 0, 0], (3,))


def test_a_released_sequence_is_found_and_held_again_with_what_it_stores() -> None:
    ledger = ledger_of()
    pass_by(ledger, A, text(0, 12))
    assert (ledger.free_bytes, ledger.usage().cached_by_group) == (320, (3,))
    assert write(ledger, B, text(0, 13)) == 12
    assert blocks(ledger, B) == [0, 1, 2]
    assert ledger.usage().cached_by_group == (0,)


@pytest.mark.parametrize(
    ("num_tokens", "num_hit", "is_copied"),
    [
        (1, 0, False),  # the only token is computed
        (2, 1, True),
        (4, 3, True),  # the whole of a block is known: its last token is computed all the same
        (5, 4, False),
        (6, 5, True),
        (7, 6, True),
        (8, 7, True),  # edge - 1
        (9, 8, False),  # at the edge
        (10, 9, True),  # edge + 1: token 9 lies in the open slot of A
    ],
)
def test_a_prompt_shorter_than_a_cached_one_hits_all_but_its_last_token(
    num_tokens: int, num_hit: int, is_copied: bool
) -> None:
    ledger = ledger_of()
    pass_by(ledger, A, text(0, 10))
    hit = look_up(ledger, text(0, num_tokens))
    assert (hit.num_tokens, hit.partial is not None) == (num_hit, is_copied)
    assert [card.blocks for card in hit.cards] == [[0], [1]][: num_hit // 4]


@pytest.mark.parametrize(("num_tokens", "num_hit"), [(2, 0), (4, 0), (5, 4), (8, 4), (9, 8), (10, 9), (11, 10)])
def test_a_lossy_block_is_entered_at_its_edge_only_but_an_open_one_anywhere(num_tokens: int, num_hit: int) -> None:
    ledger = ledger_of(is_lossy=True)
    pass_by(ledger, A, text(0, 10))  # tokens 8 and 9 stay in open slot 0, exactly as they were computed
    hit = look_up(ledger, text(0, num_tokens))
    assert hit.num_tokens == num_hit
    assert begin(ledger, B, text(0, num_tokens)) == ((CopyOpen(0, 1),) if num_hit > 8 else ())


def test_a_longer_prompt_hits_every_block_of_a_shorter_one_and_its_open_tokens() -> None:
    ledger = ledger_of()
    pass_by(ledger, A, text(0, 7))
    assert look_up(ledger, text(0, 30)).num_tokens == 7
    pass_by(ledger, B, text(0, 8))
    assert look_up(ledger, text(0, 30)).num_tokens == 8


def test_a_block_is_not_found_before_it_is_committed() -> None:
    ledger = ledger_of()
    begin(ledger, A, text(0, 9))
    ledger.extend(A, 9)
    assert look_up(ledger, text(0, 9)).num_tokens == 0
    ledger.commit(A)
    assert look_up(ledger, text(0, 9)).num_tokens == 8


def test_blocks_of_a_step_that_was_given_up_are_never_found() -> None:
    ledger = ledger_of()
    write(ledger, A, text(0, 6))
    ledger._holdings[A].chain.token_ids += text(6, 8)
    ledger.extend(A, 8)  # tokens 6 … 13, of which none is computed
    leave(ledger, A)
    assert look_up(ledger, text(0, 14)).num_tokens == 4  # nor is the open slot: the step may have written over it


# ---- copies ---------------------------------------------------------------------------------------------------------


def test_a_hit_inside_a_sealed_block_copies_it_into_the_open_slot() -> None:
    ledger = ledger_of()
    pass_by(ledger, A, text(0, 8))
    assert begin(ledger, B, [*text(0, 6), 99]) == (CopyToOpen(0, BlockId(1), 0),)  # 6 of 8 tokens; slot 0 is free again
    assert (blocks(ledger, B), ledger.num_written(B)) == ([0], 6)
    assert refs(ledger)[:2] == [1, 0]  # what is copied need not be held


def test_every_group_copies_its_own_block() -> None:
    ledger = ledger_of((None, 1), (8, 2))
    pass_by(ledger, A, text(0, 8))
    assert begin(ledger, B, text(0, 8)) == (CopyToOpen(0, BlockId(1), 0), CopyToOpen(1, BlockId(1), 0))


def test_the_child_with_the_longest_common_beginning_is_copied() -> None:
    ledger = ledger_of()
    for sequence, tail in ((A, [4, 0, 0, 0]), (B, [4, 5, 6, 0]), (C, [4, 5, 0, 0])):
        pass_by(ledger, sequence, [*text(0, 4), *tail])
    assert blocks_of_cache(ledger) == [0, 1, 2, 3]
    assert begin(ledger, D, [*text(0, 7), 99])[0] == CopyToOpen(0, BlockId(2), 0)  # B's: three tokens of four
    assert ledger.num_written(D) == 7


def blocks_of_cache(ledger: Ledger) -> list[int]:
    return sorted(ledger._budget.pools[0].queue)


def test_the_open_slot_of_a_running_sequence_is_copied_as_far_as_it_is_written() -> None:
    ledger = ledger_of()
    write(ledger, A, text(0, 6))
    ledger._holdings[A].chain.token_ids += [6, 7]
    ledger.extend(A, 1)  # token 6 is granted, not written
    assert begin(ledger, B, text(0, 20)) == (CopyOpen(0, 1),)
    assert (ledger.num_written(B), blocks(ledger, B)) == (6, [0])


def test_the_kept_slot_of_one_that_has_ended_is_copied() -> None:
    ledger = ledger_of()
    write(ledger, A, text(100, 3))  # slot 0
    pass_by(ledger, B, text(0, 6))  # slot 1, kept
    assert begin(ledger, C, text(0, 20)) == (CopyOpen(1, 2),)
    assert ledger.num_written(C) == 6


def test_if_the_only_free_slot_is_the_source_nothing_is_copied() -> None:
    ledger = ledger_of(num_open=2)
    write(ledger, A, text(100, 3))
    pass_by(ledger, B, text(0, 6))
    assert begin(ledger, C, text(0, 6)) == ()
    assert (ledger.num_written(C), blocks(ledger, C), ledger.num_open_free) == (5, [0], 0)
    assert look_up(ledger, text(0, 6)).num_tokens == 5  # C has it now, as far as it says: token 5 is computed again
    leave(ledger, C)
    assert look_up(ledger, text(0, 6)).num_tokens == 5


def test_the_slot_kept_longest_is_reused_first_and_its_text_forgotten() -> None:
    ledger = ledger_of(num_open=2)
    begin(ledger, A, text(100, 3))
    begin(ledger, B, text(200, 3))
    for sequence in (A, B):
        grow(ledger, sequence, 3)
    leave(ledger, B, A)
    begin(ledger, C, text(300, 3))
    assert [look_up(ledger, text(start, 4)).num_tokens for start in (100, 200)] == [3, 0]


def test_a_kept_slot_goes_after_every_free_one() -> None:
    ledger = ledger_of()
    pass_by(ledger, A, text(0, 3))
    for sequence, start in ((B, 100), (C, 200), (D, 300)):
        begin(ledger, sequence, text(start, 3))
    assert look_up(ledger, text(0, 3)).num_tokens == 2
    begin(ledger, E, text(400, 3))
    assert look_up(ledger, text(0, 3)).num_tokens == 0


def test_in_debug_a_slot_is_poisoned_unless_it_is_filled_and_every_new_block_is() -> None:
    ledger = Ledger(layout_of((None, 1)), LedgerOptions(debug=True))
    assert begin(ledger, A, text(0, 9)) == (PoisonOpen(0),)
    assert grow(ledger, A, 9) == (Poison(0, BlockId(0)), Poison(0, BlockId(1)))
    assert begin(ledger, B, text(0, 8)) == (CopyToOpen(0, BlockId(1), 1),)


# ---- deduplication --------------------------------------------------------------------------------------------------


def test_equal_blocks_that_two_write_at_once_become_one_at_commit() -> None:
    ledger = ledger_of()
    for sequence in (A, B):
        begin(ledger, sequence, text(0, 10))
    for sequence in (A, B):
        ledger.extend(sequence, 10)  # A: 0 1, B: 2 3
    ledger.commit(A)
    assert (blocks(ledger, A), blocks(ledger, B)) == ([0, 1], [2, 3])
    ledger.commit(B)
    ledger.check()
    assert (blocks(ledger, A), blocks(ledger, B)) == ([0, 1], [0, 1])
    assert (refs(ledger)[:4], ledger.usage().sealed_by_group) == ([2, 2, 0, 0], (2,))
    grow(ledger, A, 10)
    begin(ledger, C, text(100, 12), None)
    grow(ledger, C, 12)
    assert blocks(ledger, C) == [3, 2, 4]  # what B gave back is warm


# ---- eviction -------------------------------------------------------------------------------------------------------


def test_the_tail_of_a_released_sequence_is_evicted_before_its_head() -> None:
    ledger = ledger_of(rows=4)
    pass_by(ledger, A, text(0, 16))  # 0 1 2 3
    write(ledger, B, text(100, 5))
    assert blocks(ledger, B) == [3]
    assert look_up(ledger, text(0, 20)).num_tokens == 12
    grow_by = text(105, 3)
    ledger._holdings[B].chain.token_ids += grow_by
    grow(ledger, B, 8)
    assert (blocks(ledger, B), look_up(ledger, text(0, 20)).num_tokens) == ([3, 2], 8)


def test_the_sequence_released_first_is_evicted_first_and_held_blocks_never() -> None:
    ledger = ledger_of(rows=4)
    write(ledger, A, text(0, 4))  # 0, held throughout
    pass_by(ledger, B, text(100, 4))  # 1
    pass_by(ledger, C, text(200, 4))  # 2
    write(ledger, D, text(300, 12))  # 3, then 1 and 2 in the order they were left
    assert (blocks(ledger, A), blocks(ledger, D)) == ([0], [3, 1, 2])
    assert [look_up(ledger, text(start, 5)).num_tokens for start in (0, 100, 200)] == [4, 0, 0]
    assert ledger.usage().num_evicted == 2


def test_a_child_outlives_its_parent_unseen_and_is_found_again_when_the_parent_returns() -> None:
    ledger = ledger_of(rows=4)
    pass_by(ledger, A, text(0, 8), (KeepRange(0, stop=4),))  # 0 1: block 0 goes before block 1
    write(ledger, B, text(100, 12), None)
    assert blocks(ledger, B) == [2, 3, 0]
    assert look_up(ledger, text(0, 9)).num_tokens == 0
    leave(ledger, B)
    assert write(ledger, C, [*text(0, 4), 77]) == 0  # the parent is written anew
    assert look_up(ledger, text(0, 9)).num_tokens == 8
    begin(ledger, D, text(0, 9))
    assert (blocks(ledger, C), blocks(ledger, D)) == ([2], [2, 1])


def test_the_oldest_cached_block_goes_first_whichever_group_it_is_of() -> None:
    # Full: 32 bytes a block; window 4: 96. 320 bytes are 10 blocks of one or 3 of the other.
    ledger = ledger_of((None, 1), (4, 3), budget_bytes=320)
    pass_by(ledger, A, text(0, 9))  # full 0 1, window 0 1: 256 bytes; query 9 reads 6 …: window 0 was cached first
    begin(ledger, B, text(100, 4))
    assert grow(ledger, B, 4) == ()  # full 2: 288 bytes; the window's own block 0 is the oldest: its memory stays
    assert (blocks(ledger, B, 0), blocks(ledger, B, 1)) == ([2], [0])
    assert ledger.usage().cached_by_group == (2, 1)


def test_cached_blocks_of_another_group_are_evicted_and_their_memory_returned() -> None:
    ledger = ledger_of((None, 1), (4, 3), budget_bytes=256)  # two rows: 8 blocks of the full group, 2 of the window
    pass_by(ledger, A, text(0, 8))  # all 256 bytes; cached in the order window 0, full 1, full 0, window 1
    begin(ledger, B, text(100, 13))
    # Full 2 takes the bytes of window 0; full 3 fits. The window's cold 0 takes those of full 1 and 0; then its own 1.
    returned = ((1, 0), (0, 1), (0, 0))
    assert grow(ledger, B, 8) == tuple(ReturnMemory(group, BlockId(block)) for group, block in returned)
    assert (blocks(ledger, B, 0), blocks(ledger, B, 1)) == ([2, 3], [1])  # window 0 is passed
    assert (ledger.usage().cached_by_group, ledger.usage().num_evicted) == ((0, 1), 4)


# ---- windows --------------------------------------------------------------------------------------------------------


def test_a_prefix_is_a_hit_when_the_last_window_is_there() -> None:
    ledger = ledger_of((5, 1), rows=4)
    pass_by(ledger, A, text(0, 16))  # 0 1 2 3; the passed 0 1 2 were cached first
    write(ledger, B, text(100, 8))  # 0 and 1 are evicted
    hit = look_up(ledger, text(0, 17))
    assert (hit.num_tokens, [card.blocks for card in hit.cards]) == (16, [[3]])  # query 16 reads 12 …
    assert look_up(ledger, text(0, 13)).num_tokens == 12  # query 12 reads 8 …: block 2
    assert look_up(ledger, text(0, 9)).num_tokens == 0  # query 8 reads 4 …: block 1 is gone
    begin(ledger, C, text(0, 17))
    assert (blocks(ledger, C), ledger.blocks_held(C)) == ([3], [1])


def test_a_hybrid_hits_the_longest_edge_that_all_groups_accept() -> None:
    ledger = ledger_of((None, 1), (5, 1), rows=10, num_open=4)
    write(ledger, A, text(0, 16))
    # Every edge is there as long as the window's passed blocks are cached …
    assert [look_up(ledger, text(0, stop)).num_tokens for stop in (17, 13, 9, 5)] == [16, 12, 8, 4]
    pool = ledger._budget.pools[1]
    for _ in range(2):
        ledger._budget._evict(1)  # window blocks 0 and 1
    ledger.check()
    assert [card is None for card in pool.cards[:4]] == [True, True, False, False]
    # … and now those at 12 and 16 only. Each group alone would accept more.
    hit = look_up(ledger, text(0, 12))
    assert (hit.num_tokens, hit.group_tokens) == (0, (8, 0))
    assert look_up(ledger, text(0, 13)).num_tokens == 12
    hit = look_up(ledger, [*text(0, 12), 99, 99, 99, 99, 99])
    assert (hit.num_tokens, hit.group_tokens) == (12, (12, 12))


# ---- who never shares -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "other",
    [Scope(b"model", "tenant"), Scope(b"model", ""), Scope(b"model", None, "lora"), Scope(b"another"), Scope()],
    ids=["namespace", "empty namespace", "adapter", "fingerprint", "no fingerprint"],
)
def test_another_scope_never_shares_neither_blocks_nor_open_tokens(other: Scope) -> None:
    ledger = ledger_of()
    write(ledger, A, text(0, 10))
    assert write(ledger, B, text(0, 10), other) == 0
    assert (blocks(ledger, A), blocks(ledger, B)) == ([0, 1], [2, 3])
    leave(ledger, A, B)
    assert write(ledger, C, text(0, 10), other) == 9
    assert blocks(ledger, C) == [2, 3]


def test_a_private_sequence_neither_finds_nor_is_found() -> None:
    ledger = ledger_of()
    write(ledger, A, text(0, 10))
    assert write(ledger, B, text(0, 10), None) == 0
    leave(ledger, A)
    assert write(ledger, C, text(0, 10), None) == 0
    assert (blocks(ledger, B), blocks(ledger, C)) == ([2, 3], [4, 5])
    leave(ledger, B, C)
    assert (ledger.usage().cached_by_group, ledger._slots.num_kept) == ((2,), 1)  # A's alone
