"""Swapping by exact moves: what goes to the host pool, what comes back, and what need not.

Blocks of four tokens, ten of them, and a host pool of four with one slot unless said otherwise.
"""

import copy

import pytest
from cached import SCOPE, A, B, C, begin, blocks, chain_of, grow, leave, look_up, refs, table_of, text, write
from small import layout_of

from kvfolio.cache.blocks import BlockId
from kvfolio.cache.ledger import Ledger, LedgerOptions
from kvfolio.cache.moves import Poison, SwapIn, SwapOpenIn, SwapOpenOut, SwapOut
from kvfolio.errors import InvariantError


def ledger_of(*shapes: tuple[int | None, int], host_rows: int = 4, host_open: int = 1, **sizes: int) -> Ledger:
    shapes = shapes or ((None, 1),)
    host = layout_of(*shapes, rows=host_rows, num_open=host_open)
    return Ledger(layout_of(*shapes, **sizes), LedgerOptions(host=host))  # type: ignore[arg-type]


def out(group: int, block: int, host_block: int) -> SwapOut:
    return SwapOut(group, BlockId(block), BlockId(host_block))


def back(group: int, host_block: int, block: int) -> SwapIn:
    return SwapIn(group, BlockId(host_block), BlockId(block))


def state_of(ledger: Ledger) -> object:
    pools = [(bytes(pool._state), list(pool.refs), sorted(pool.queue), pool._warm[:]) for pool in ledger._budget.pools]
    return pools, list(ledger._slots._free), dict(ledger._swapped), set(ledger._holdings), copy.copy(ledger.usage())


def test_what_is_written_goes_out_and_the_device_holds_nothing() -> None:
    ledger = ledger_of()
    write(ledger, A, text(0, 10))
    assert ledger.bytes_to_swap(A) == 2 * 32 + 32  # two sealed blocks, the open one
    assert ledger.swap_out(A) == (SwapOpenOut(0, 0), out(0, 0, 0), out(0, 1, 1))
    ledger.check()
    usage = ledger.usage()
    assert (ledger.is_swapped(A), usage.host_bytes, usage.num_open_used) == (True, 96, 0)
    assert (ledger.free_bytes, usage.cached_by_group) == (320, (2,))  # it can be hit by others meanwhile
    assert look_up(ledger, text(0, 20)).num_tokens == 10


def test_blocks_that_are_still_there_are_shared_and_only_the_open_one_copied() -> None:
    ledger = ledger_of()
    write(ledger, A, text(0, 10))
    ledger.swap_out(A)
    begin(ledger, B, text(0, 9))  # holds 0 and 1 in slot 1
    assert ledger.swap_in(A) == (SwapOpenIn(0, 2),)
    ledger.check()
    assert (blocks(ledger, A), table_of(ledger, A).open_slot, ledger.num_written(A)) == ([0, 1], 2, 10)
    assert (refs(ledger)[:2], ledger.usage().host_bytes, ledger.is_swapped(A)) == ([2, 2], 0, False)


def test_blocks_that_were_evicted_come_back_elsewhere_and_are_found_after_the_next_commit() -> None:
    ledger = ledger_of()
    write(ledger, A, text(0, 10))
    ledger.swap_out(A)
    write(ledger, B, text(100, 36), None)  # 2 … 9, then 1: the tail of A
    leave(ledger, B)  # warm, 2 on top
    assert ledger.swap_in(A) == (SwapOpenIn(0, 1), back(0, 1, 2))
    ledger.check()
    assert blocks(ledger, A) == [0, 2]
    assert look_up(ledger, text(0, 9)).num_tokens == 4  # the copy is made with the next step only
    ledger._holdings[A].chain.append(10)
    grow(ledger, A, 11)
    assert look_up(ledger, text(0, 9)).num_tokens == 8
    assert blocks(ledger, A) == [0, 2]


def test_a_copy_of_what_another_wrote_meanwhile_becomes_one_with_it() -> None:
    ledger = ledger_of()
    write(ledger, A, text(0, 10))
    ledger.swap_out(A)
    write(ledger, B, text(100, 40), None)  # everything of A's is gone
    leave(ledger, B)
    begin(ledger, C, text(0, 9))
    ledger.extend(C, 9)
    assert ledger.swap_in(A) is not None
    mine = blocks(ledger, A)
    ledger.commit(C)
    assert not set(blocks(ledger, C)) & set(mine)
    ledger.commit(A)
    ledger.check()
    assert blocks(ledger, A) == blocks(ledger, C) != mine


def test_a_private_sequence_is_copied_whole_both_ways() -> None:
    ledger = ledger_of()
    write(ledger, A, text(0, 9), None)
    assert ledger.swap_out(A) == (SwapOpenOut(0, 0), out(0, 0, 0), out(0, 1, 1))
    assert ledger.usage().cached_by_group == (0,)
    assert ledger.swap_in(A) == (SwapOpenIn(0, 0), back(0, 0, 0), back(0, 1, 1))
    ledger.check()


def test_tokens_that_are_granted_but_not_written_are_given_up() -> None:
    ledger = ledger_of()
    begin(ledger, A, text(0, 20))
    grow(ledger, A, 6)
    ledger.extend(A, 8)  # two more blocks, nothing in them
    assert ledger.bytes_to_swap(A) == 32 + 32
    assert ledger.swap_out(A) == (SwapOpenOut(0, 0), out(0, 0, 0))
    ledger.check()
    assert ledger.swap_in(A) is not None
    assert (ledger.num_tokens(A), ledger.num_written(A)) == (6, 6)


def test_a_window_takes_along_what_a_later_query_reads() -> None:
    ledger = ledger_of((None, 1), (5, 1))
    write(ledger, A, text(0, 14))  # query 14 reads 10 …: window block 2
    assert ledger.swap_out(A) == (SwapOpenOut(0, 0), out(0, 0, 0), out(0, 1, 1), out(0, 2, 2), out(1, 2, 0))
    write(ledger, B, text(100, 40), None)
    leave(ledger, B)
    moves = ledger.swap_in(A)
    assert moves is not None and len(moves) == 5
    assert [table_of(ledger, A, group).first_block for group in range(2)] == [0, 2]
    grow(ledger, A, 14)
    assert look_up(ledger, text(0, 14)).num_tokens == 13  # at 12, query 12 reads 8 …: all there


def test_copies_into_blocks_come_after_their_poison() -> None:
    layout = layout_of((None, 1))
    ledger = Ledger(layout, LedgerOptions(host=layout, debug=True))
    write(ledger, A, text(0, 4), None)
    ledger.swap_out(A)
    assert ledger.swap_in(A) == (SwapOpenIn(0, 0), Poison(0, BlockId(0)), back(0, 0, 0))


# ---- what does not fit ----------------------------------------------------------------------------------------------


def test_without_a_host_pool_nothing_is_swapped() -> None:
    ledger = Ledger(layout_of((None, 1)))
    write(ledger, A, text(0, 10))
    assert not ledger.has_host_pool
    assert ledger.bytes_to_swap(A) is None


@pytest.mark.parametrize(("num_tokens", "fits"), [(8, True), (11, True), (12, False)])
def test_the_host_pool_is_bounded(num_tokens: int, fits: bool) -> None:
    ledger = ledger_of(host_open=2)
    write(ledger, A, text(100, 11))
    ledger.swap_out(A)  # two of four
    write(ledger, B, text(0, num_tokens))
    assert (ledger.bytes_to_swap(B) is not None) is fits


def test_the_host_pool_has_a_slot_for_every_sequence_it_takes() -> None:
    ledger = ledger_of(host_open=1)
    for sequence, start in ((A, 0), (B, 100)):
        write(ledger, sequence, text(start, 5))
    ledger.swap_out(A)
    assert ledger.bytes_to_swap(B) is None
    assert ledger.swap_in(A) is not None
    assert ledger.bytes_to_swap(B) == 64


def test_a_return_that_does_not_fit_changes_nothing() -> None:
    ledger = ledger_of()
    write(ledger, A, text(0, 10))
    ledger.swap_out(A)
    write(ledger, B, text(100, 36), None)  # one of ten is free: 0, which A would hold again; its 1 was evicted
    before = state_of(ledger)
    assert ledger.swap_in(A) is None
    assert state_of(ledger) == before
    leave(ledger, B)
    assert ledger.swap_in(A) is not None


def test_what_is_cached_still_takes_room_when_it_is_held_again() -> None:
    ledger = ledger_of()
    write(ledger, A, text(0, 9))
    write(ledger, C, text(200, 4), None)
    ledger.swap_out(A)
    write(ledger, B, text(100, 32), None)  # nine are held; A's 0 is cached, its 1 evicted
    assert ledger.usage().cached_by_group == (1,)
    assert ledger.swap_in(A) is None
    leave(ledger, C)
    assert ledger.swap_in(A) == (SwapOpenIn(0, 1), back(0, 1, 2))
    ledger.check()
    assert ledger.free_bytes == 0


def test_a_return_waits_for_an_open_slot() -> None:
    ledger = ledger_of(num_open=1)
    write(ledger, A, text(0, 10))
    ledger.swap_out(A)
    begin(ledger, B, text(100, 3))
    before = state_of(ledger)
    assert ledger.swap_in(A) is None
    assert state_of(ledger) == before


# ---- the end --------------------------------------------------------------------------------------------------------


def test_a_sequence_released_while_swapped_leaves_the_host_pool() -> None:
    ledger = ledger_of()
    write(ledger, A, text(0, 10))
    ledger.swap_out(A)
    leave(ledger, A)
    assert (ledger.is_swapped(A), ledger.usage().host_bytes) == (False, 0)
    with pytest.raises(KeyError):
        ledger.release(A)
    assert write(ledger, A, text(0, 10)) == 9  # the name is free again, and the device's blocks are cached


def test_a_swapped_sequence_is_not_admitted_again() -> None:
    ledger = ledger_of()
    write(ledger, A, text(0, 10))
    ledger.swap_out(A)
    with pytest.raises(InvariantError, match="sequence 0 is admitted twice"):
        ledger.admit(A, chain_of(text(0, 4), SCOPE))
    ledger.check()


def test_the_open_tokens_of_a_swapped_sequence_can_be_copied_until_its_slot_is_needed() -> None:
    ledger = ledger_of(num_open=1)
    write(ledger, A, text(0, 6))
    ledger.swap_out(A)
    assert look_up(ledger, text(0, 7)).num_tokens == 6
    write(ledger, B, text(100, 2))
    assert look_up(ledger, text(0, 7)).num_tokens == 4
