"""The ledger on pools of about ten blocks: exact ids and their derivation, one budget, refusals without a trace."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
from small import layout_of

from kvfolio.cache.blocks import BlockId
from kvfolio.cache.holding import BlockTable, Grant, SequenceId, Usage
from kvfolio.cache.ledger import Ledger
from kvfolio.cache.moves import ReturnMemory
from kvfolio.errors import InvariantError
from kvfolio.spec.layout import CacheLayout

A, B, C = SequenceId(0), SequenceId(1), SequenceId(2)


def write(ledger: Ledger, sequence: SequenceId, num_new: int) -> Grant:
    """Extend and commit; the grant must be given."""
    grant = ledger.extend(sequence, num_new)
    assert grant is not None
    ledger.check()
    ledger.commit(sequence)
    ledger.check()
    return grant


def admitted(layout: CacheLayout, *sequences: SequenceId) -> Ledger:
    ledger = Ledger(layout)
    for sequence in sequences:
        assert ledger.admit(sequence) == ()
    return ledger


def everything(ledger: Ledger) -> object:
    """All that a ledger knows, to be compared."""
    budget = ledger._budget
    pools = [(bytes(pool._state), list(pool._warm), list(pool._returned), pool._fresh) for pool in budget.pools]
    fields = ["open_slot", "num_tokens", "num_written", "num_filed", "first_block", "sealed"]
    holdings = {name: [getattr(one, field) for field in fields] for name, one in ledger._holdings.items()}
    held = (budget.held_bytes, budget.touched_bytes)
    return pools, list(ledger._slots._free), copy.deepcopy(holdings), held, ledger.usage()


# ---- one group ------------------------------------------------------------------------------------------------------


def test_a_sequence_takes_a_block_for_every_four_tokens_and_leaves_the_rest_open() -> None:
    ledger = admitted(layout_of((None, 1)), A)
    # 10 tokens in blocks of 4: two sealed blocks, 2 tokens open.
    assert write(ledger, A, 10) == Grant((BlockTable(0, (BlockId(0), BlockId(1)), 0),), ())
    assert write(ledger, A, 1).tables[0].sealed == (0, 1)
    # The 12th token fills the third block.
    assert write(ledger, A, 1).tables[0].sealed == (0, 1, 2)
    assert (ledger.num_tokens(A), ledger.tokens_written(), ledger.blocks_held(A)) == (12, 12, [3])


def test_two_sequences_share_nothing() -> None:
    ledger = admitted(layout_of((None, 1)), A, B)
    assert write(ledger, A, 5).tables == (BlockTable(0, (BlockId(0),), 0),)
    assert write(ledger, B, 9).tables == (BlockTable(0, (BlockId(1), BlockId(2)), 1),)
    assert write(ledger, A, 3).tables == (BlockTable(0, (BlockId(0), BlockId(3)), 0),)


def test_a_released_sequence_leaves_its_blocks_warm_its_oldest_on_top() -> None:
    ledger = admitted(layout_of((None, 1)), A, B)
    write(ledger, A, 12)  # 0, 1, 2
    write(ledger, B, 4)  # 3
    ledger.release(A)  # given back 2, 1, 0: the stack ends in 0
    ledger.check()
    assert ledger.admit(C) == ()
    assert write(ledger, C, 16).tables == (BlockTable(0, (BlockId(0), BlockId(1), BlockId(2), BlockId(4)), 0),)


def test_a_preempted_sequence_may_be_released_between_grant_and_commit() -> None:
    ledger = admitted(layout_of((None, 1)), A)
    ledger.extend(A, 9)
    ledger.release(A)
    ledger.check()
    assert ledger.usage() == Usage(0, 0, 0, 320, (0,), 0, (0,), 0, 0, 0)


def test_usage_counts_open_and_sealed_blocks_and_the_room_that_stays_empty() -> None:
    # Two groups, 1 and 2 layers: a block of 4 tokens takes 32 and 64 bytes, sealed as open.
    ledger = admitted(layout_of((None, 1), (5, 2), rows=10), A, B)
    write(ledger, A, 6)  # a row; 2 of 4 places in its open blocks are taken
    write(ledger, B, 3)  # no row; 3 of 4 are taken
    assert ledger.usage() == Usage(
        num_blocks_used=2 + 4,  # a row of two blocks; two open rows of two
        used_bytes=3 * 96,
        wasted_bytes=(2 + 1) * 24,  # empty places, 24 bytes a token
        free_bytes=960 - 96,
        sealed_by_group=(1, 1),
        num_open_used=2,
        cached_by_group=(0, 0),  # private sequences leave nothing behind
        num_evicted=0,
        num_quarantined=0,
        host_bytes=0,
    )


# ---- windows --------------------------------------------------------------------------------------------------------


def test_a_window_gives_back_the_blocks_that_no_later_query_reads() -> None:
    ledger = admitted(layout_of((6, 1)), A)
    # 10 tokens: the next query, at 10, reads the tokens 5 … 10. Block 0 holds 0 … 3: passed at commit.
    assert write(ledger, A, 10).tables == (BlockTable(0, (BlockId(0), BlockId(1)), 0),)
    assert ledger.blocks_held(A) == [1]
    # The 12th token fills block 2 of the sequence: it is the passed block 0, still warm. Query 12 reads 7 … 12.
    assert write(ledger, A, 2).tables == (BlockTable(1, (BlockId(1), BlockId(0)), 0),)
    # Query 15 reads 10 …: block 1 (tokens 4 … 7) is passed. Block 3 of the sequence takes its place.
    assert write(ledger, A, 3).tables == (BlockTable(1, (BlockId(1), BlockId(0)), 0),)
    assert write(ledger, A, 1).tables == (BlockTable(2, (BlockId(0), BlockId(1)), 0),)


def test_a_window_within_the_own_block_leaves_no_sealed_block_held() -> None:
    ledger = admitted(layout_of((1, 1), rows=3), A)
    for num_tokens in range(1, 40):
        write(ledger, A, 1)
        # Query n reads only itself, and its block is open; the block that filled last is passed at its own commit.
        assert ledger.blocks_held(A) == [0], num_tokens
    assert ledger.usage().free_bytes == 3 * 32


def test_a_long_prompt_in_one_chunk_holds_its_passed_blocks_until_it_is_written() -> None:
    ledger = admitted(layout_of((4, 1)), A)
    grant = ledger.extend(A, 40)
    assert grant is not None
    assert grant.tables[0].sealed == tuple(range(10))
    assert ledger.largest_extension(A, 9) == 3
    ledger.commit(A)  # query 40 reads 37 …: block 9 stays
    assert (ledger.blocks_held(A), ledger.largest_extension(A, 99)) == ([1], 39)
    assert write(ledger, A, 1).tables == (BlockTable(9, (BlockId(9),), 0),)


# ---- one budget -----------------------------------------------------------------------------------------------------


def test_a_group_that_needs_memory_takes_that_of_another_groups_free_blocks() -> None:
    # Full: 32 bytes a block; window 4: 96. 320 bytes are 2.5 rows, or 10 blocks of one or 3 of the other.
    ledger = admitted(layout_of((None, 1), (4, 3), budget_bytes=320), A)
    write(ledger, A, 8)  # full 0 1, window 0 1: 256 bytes touched; then query 8 reads 5 …, window 0 is warm
    write(ledger, A, 4)  # full 2 is cold: 288 touched; window takes the warm 0, then 1 is warm
    write(ledger, A, 4)  # full 3: 320 touched; window takes 1, then 0 is warm
    assert ledger.largest_extension(A, 9) == 3  # 5 blocks are held, 96 bytes are free: no whole row
    write(ledger, A, 3)  # query 19 reads 16 …: window 1 is warm, too
    # Full 4 is cold and would be the 352nd byte: the window's block 0, warm for longest, goes back to the system.
    assert write(ledger, A, 1) == Grant(
        (BlockTable(0, tuple(map(BlockId, range(5))), 0), BlockTable(4, (BlockId(1),), 0)),
        (ReturnMemory(group=1, block=BlockId(0)),),
    )
    assert ledger._budget.touched_bytes == 5 * 32 + 96


def test_memory_is_returned_only_as_far_as_needed() -> None:
    # Three sequences with 12-token prompts leave window blocks warm; how many go back is what the full group takes.
    ledger = admitted(layout_of((None, 4), (4, 1), budget_bytes=1000), A, B)
    write(ledger, A, 16)  # 4 * 128 + 4 * 32 = 640 bytes; three of the window's blocks are warm: 96
    write(ledger, B, 4)  # full 4 (768), window's warm block
    assert ledger._budget.touched_bytes == 768
    # One more is 896; the second would be 1024: 24 too many, so one block of 32 goes.
    moves = write(ledger, B, 4).moves + write(ledger, B, 4).moves
    assert len(moves) == 1
    assert ledger._budget.touched_bytes == 992


def test_a_grant_that_does_not_fit_is_none_and_changes_nothing() -> None:
    ledger = admitted(layout_of((None, 1), (20, 2), budget_bytes=250), A, B)  # a row is 96: two fit
    write(ledger, A, 7)
    write(ledger, B, 3)
    assert ledger.largest_extension(A, 99) == 4  # up to the 11th: the row that the 12th needs is not there
    before = everything(ledger)
    assert ledger.extend(A, 5) is None
    assert ledger.extend(B, 9) is None
    assert everything(ledger) == before
    assert write(ledger, A, 4).moves == ()
    assert ledger.largest_extension(A, 99) == 0
    before = everything(ledger)
    assert ledger.extend(A, 1) is None
    assert everything(ledger) == before


def test_a_pool_without_a_free_block_refuses_though_bytes_are_free() -> None:
    # Split: the budget is the sum of 5 full blocks and 1 window block of 32 bytes each.
    ledger = admitted(layout_of((None, 1), (4, 1), budget_bytes=6 * 32, counts=(5, 1)), A, B)
    assert ledger.extend(A, 8) is None
    write(ledger, A, 4)
    assert ledger.free_bytes == 4 * 32
    assert ledger.extend(B, 4) is None
    write(ledger, A, 3)  # query 7 reads 4 …: the window's only block is passed
    assert write(ledger, B, 4).tables[1].sealed == (0,)


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_a_sequence_that_finds_no_open_block_is_not_admitted_and_nothing_changes() -> None:
    ledger = admitted(layout_of((None, 1), num_open=2), A, B)
    before = everything(ledger)
    assert ledger.admit(C) is None
    assert everything(ledger) == before
    ledger.release(A)
    assert ledger.num_open_free == 1
    assert ledger.admit(C) == ()


def test_a_sequence_admitted_twice_is_refused_and_nothing_changes() -> None:
    ledger = admitted(layout_of((None, 1)), A)
    write(ledger, A, 9)
    before = everything(ledger)
    with pytest.raises(InvariantError, match="sequence 0 is admitted twice"):
        ledger.admit(A)
    assert everything(ledger) == before


def test_a_sequence_released_twice_is_refused_and_nothing_changes() -> None:
    ledger = admitted(layout_of((None, 1), (4, 1)), A, B)
    write(ledger, A, 9)
    write(ledger, B, 9)
    ledger.release(A)
    before = everything(ledger)
    with pytest.raises((InvariantError, KeyError)):
        ledger.release(A)
    assert everything(ledger) == before


@pytest.mark.parametrize(
    "use", [lambda ledger: ledger.extend(C, 1), lambda ledger: ledger.commit(C), lambda ledger: ledger.blocks_held(C)]
)
def test_a_sequence_that_was_never_admitted_is_refused(use: Callable[[Ledger], object]) -> None:
    ledger = admitted(layout_of((None, 1)), A)
    before = everything(ledger)
    with pytest.raises((InvariantError, KeyError)):
        use(ledger)
    assert everything(ledger) == before


# ---- what check sees ------------------------------------------------------------------------------------------------


def misbook_held_bytes(ledger: Ledger) -> None:
    ledger._budget.held_bytes += 32


def misbook_touched_bytes(ledger: Ledger) -> None:
    ledger._budget.touched_bytes -= 32


def touch_more_than_the_budget(ledger: Ledger) -> None:
    ledger._budget.layout = replace(ledger.layout, budget_bytes=319)


def lose_a_block(ledger: Ledger) -> None:
    ledger._holdings[A].sealed[0].pop()


def hold_a_block_twice(ledger: Ledger) -> None:
    ledger._holdings[A].sealed[0][1] = ledger._holdings[A].sealed[0][0]


def share_a_block(ledger: Ledger) -> None:
    ledger._holdings[B].sealed[0][0] = ledger._holdings[A].sealed[0][0]


def hold_a_free_block(ledger: Ledger) -> None:
    ledger._holdings[A].sealed[1][0] = BlockId(9)


def free_a_held_block(ledger: Ledger) -> None:
    ledger._budget.pools[0].give(ledger._holdings[A].sealed[0][:1])


def forget_a_sequence(ledger: Ledger) -> None:
    del ledger._holdings[B]


def forget_tokens(ledger: Ledger) -> None:
    ledger._holdings[A].num_tokens -= 4


def forget_that_a_block_was_passed(ledger: Ledger) -> None:
    ledger._holdings[A].first_block[1] -= 1


def free_a_held_slot(ledger: Ledger) -> None:
    ledger._slots._free.append(ledger._holdings[A].open_slot)


def lose_a_slot(ledger: Ledger) -> None:
    ledger._slots._free.pop()


def share_a_slot(ledger: Ledger) -> None:
    ledger._holdings[A].open_slot = ledger._holdings[B].open_slot


@pytest.mark.parametrize(
    ("corrupt", "words"),
    [
        (misbook_held_bytes, "bytes disagree: held 256 counted, 288 booked"),
        (misbook_touched_bytes, "touched 320 counted, 288 booked"),
        (touch_more_than_the_budget, "touched 320 counted, 320 booked; budget 319"),
        (lose_a_block, "block 2 of group 0, held by nobody: marked held, but listed as nothing; sequence 0: 0 passed"),
        (hold_a_block_twice, "block 0 of group 0, held by 0: counts 1 holders, but 2 hold it; block 1 .* as nothing"),
        (share_a_block, "block 0 of group 0, held by 0, 1: counts 1 holders, but 2 hold it; block 3 .* as nothing"),
        (hold_a_free_block, "block 2 .* as nothing; block 9 of group 1, held by 0: marked cold, but listed as held"),
        (free_a_held_block, "block 0 of group 0, held by 0: marked warm, but listed as warm and held; bytes disagree"),
        (
            forget_a_sequence,
            "block 3 of group 0, held by nobody: marked held, but listed as nothing; block 1 of group 1",
        ),
        (forget_tokens, "sequence 0: 0 passed . 3 sealed blocks != 9 tokens // 4"),
        (forget_that_a_block_was_passed, "sequence 0: 1 passed . 1 sealed blocks != 13 tokens // 4"),
        (free_a_held_slot, "open slots disagree"),
        (lose_a_slot, "open slots disagree"),
        (share_a_slot, "open slots disagree"),
    ],
)
def test_check_sees_each_way_to_corrupt_a_ledger_and_names_the_terms(
    corrupt: Callable[[Ledger], None], words: str
) -> None:
    ledger = admitted(layout_of((None, 1), (5, 2)), A, B)  # blocks of 32 and 64 bytes, 960 in all
    write(ledger, A, 13)  # full 0 1 2; window 0 1 2, of which query 13, reading 9 …, passes 0 and 1
    write(ledger, B, 5)
    corrupt(ledger)
    with pytest.raises(InvariantError, match=words):
        ledger.check()
