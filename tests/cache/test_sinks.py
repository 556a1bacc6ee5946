"""Sink groups: the first blocks of every sequence, and no others, lie in a second group, too; found and swapped alike.

Exact block ids on pools of ten. Group 0 reads all tokens, group 1 are its sinks, group 2, where there is one, a window.
"""

import pytest
from cached import A, B, C, begin, blocks, chain_of, grow, leave, look_up, miss_of, pass_by, refs, table_of, text, write
from small import layout_of

from kvfolio.cache.blocks import BlockId
from kvfolio.cache.holding import BlockTable
from kvfolio.cache.ledger import Ledger, LedgerOptions
from kvfolio.cache.lookup import EVICTED, TAIL
from kvfolio.cache.moves import Poison, SwapIn, SwapOpenIn, SwapOpenOut, SwapOut
from kvfolio.spec.layout import CacheLayout

SINKS = [1, 2, 3]


def ledger_of(sinks: int, *, rows: int = 10, debug: bool = False, host: CacheLayout | None = None) -> Ledger:
    return Ledger(layout_of((None, 1), (8, 1), rows=rows, sinks=sinks), LedgerOptions(host=host, debug=debug))


def drop(ledger: Ledger, group: int, block: int) -> None:
    """Evict one block that nobody holds."""
    pool, index = ledger._budget.pools[group], ledger._budget.index
    pool.queue.remove(block)
    pool.drop_card(BlockId(block), lambda card: index.forget_block(card, group, 1.0))
    pool._state[block] = 1  # warm
    pool._warm.append(BlockId(block))
    ledger.check()


# ---- what is held ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sinks", SINKS)
def test_a_sequence_holds_its_first_blocks_twice(sinks: int) -> None:
    ledger = ledger_of(sinks)
    begin(ledger, A, text(0, 23))
    for num_tokens in (3, 4, 7, 8, 9, 12, 20, 23):
        grow(ledger, A, num_tokens)
        table = table_of(ledger, A, 1)
        assert table == BlockTable(0, tuple(range(min(num_tokens // 4, sinks))), 0)
        assert len(blocks(ledger, A, 0)) == num_tokens // 4
        assert ledger.blocks_held(A) == [
            ledger.layout.blocks_held(ledger.layout.groups[0], num_tokens),
            min(num_tokens // 4, sinks),
            len(blocks(ledger, A, 2)),
        ]
    assert [len(blocks(ledger, A, group)) for group in range(3)] == [5, sinks, 1]
    leave(ledger, A)
    assert ledger.usage().cached_by_group == (5, sinks, 5)  # the window's are cached where it left them


def test_a_block_behind_the_sinks_takes_no_room_for_one() -> None:
    # 4 tokens in every layer: 32 bytes. Three blocks in all groups, two beyond the sink in two: 3 * 32 + 2 * 64.
    layout = layout_of((None, 1), budget_bytes=32 * 2 + 32 * 3, sinks=1)
    assert [layout.fits(num_tokens) for num_tokens in (3, 4, 16, 19, 20)] == [True, True, True, True, False]
    assert layout.longest_sequence(100) == 19
    ledger = Ledger(layout)
    begin(ledger, A, text(0, 30))
    assert ledger.largest_extension(A, 30) == 19
    assert ledger.extend(A, 20) is None
    grow(ledger, A, 3)
    assert ledger.largest_extension(A, 30) == 16
    grow(ledger, A, 19)
    assert (ledger.free_bytes, ledger.largest_extension(A, 30)) == (0, 0)


def test_where_the_pool_of_sinks_is_full_nothing_begins_and_what_has_begun_goes_on() -> None:
    layout = layout_of((None, 1), counts=(10, 2), budget_bytes=12 * 32, sinks=2)
    ledger = Ledger(layout)
    begin(ledger, A, text(0, 30))
    begin(ledger, B, text(100, 30))
    grow(ledger, A, 5)
    grow(ledger, B, 5)
    assert [ledger.largest_extension(name, 30) for name in (A, B)] == [2, 2]  # the second block of each fills
    assert not ledger.has_room([0, 1])
    leave(ledger, B)
    assert ledger.largest_extension(A, 50) == 43 - 5  # ten blocks, and three tokens in the open one
    grow(ledger, A, 30)
    assert (blocks(ledger, A, 1), len(blocks(ledger, A, 0))) == ([0, 1], 7)


def test_sinks_are_poisoned_before_they_are_written_like_all_blocks() -> None:
    ledger = Ledger(layout_of((None, 1), sinks=1), LedgerOptions(debug=True))
    begin(ledger, A, text(0, 8))
    assert grow(ledger, A, 8) == (Poison(0, BlockId(0)), Poison(0, BlockId(1)), Poison(1, BlockId(0)))


# ---- what is found --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sinks", SINKS)
def test_sequences_share_their_sinks(sinks: int) -> None:
    ledger = ledger_of(sinks)
    write(ledger, A, text(0, 17))
    assert write(ledger, B, [*text(0, 16), 77, 78]) == 16
    assert blocks(ledger, A, 1) == blocks(ledger, B, 1) == list(range(sinks))
    assert refs(ledger, 1)[:4] == [2] * sinks + [0] * (4 - sinks)
    hit = look_up(ledger, text(0, 17))
    assert ledger.blocks_shared(hit) == [4, sinks, 2]
    assert hit.group_tokens == (16, 16, 16)


def test_a_hit_within_the_sinks_shares_as_many_of_them_as_it_is_long() -> None:
    ledger = ledger_of(3)
    write(ledger, A, text(0, 17))
    assert write(ledger, B, [*text(0, 8), 77]) == 8
    assert blocks(ledger, B, 1) == [0, 1]
    grow_to = [*text(0, 8), 77, 78, 79, 80, 81]
    ledger._holdings[B].chain.token_ids += grow_to[9:]
    grow(ledger, B, 13)
    assert blocks(ledger, B, 1) == [0, 1, 3]  # its third block is its own


@pytest.mark.parametrize("sinks", SINKS)
def test_a_block_behind_the_sinks_lacks_nothing(sinks: int) -> None:
    ledger = ledger_of(sinks)
    pass_by(ledger, A, text(0, 17))
    assert look_up(ledger, text(0, 17)).num_tokens == 16
    miss = miss_of(ledger, [*text(0, 14), 5, 6, 7])  # inside the fourth block, which is all there
    assert miss is not None and (miss.reason, miss.position) == ("never seen", 12)
    ledger = ledger_of(sinks)
    pass_by(ledger, A, text(0, 16))
    miss = miss_of(ledger, text(0, 16))  # the last token is always computed, and a lossy hit ends at an edge
    assert miss is not None and (miss.reason, miss.position) == (TAIL, 12)


@pytest.mark.parametrize("lost", [0, 1])
def test_a_hit_ends_before_a_sink_that_was_evicted(lost: int) -> None:
    ledger = ledger_of(2)
    pass_by(ledger, A, text(0, 17))
    drop(ledger, 1, lost)
    hit = look_up(ledger, text(0, 17))
    assert (hit.num_tokens, hit.group_tokens) == (0 if lost == 0 else 4, (16, 4 * lost, 16))
    miss = miss_of(ledger, text(0, 17))
    assert miss is not None and (miss.reason, miss.position, miss.evicted_s) == (EVICTED, 4 * lost, 1.0)
    # Computed again, the block takes its place; the others are found again, not stored twice.
    assert write(ledger, B, text(0, 17)) == 4 * lost
    assert ledger.usage().cached_by_group[:2] == (0, 0)
    assert blocks(ledger, B, 0) == [0, 1, 2, 3]
    assert look_up(ledger, text(0, 17)).num_tokens == 16


def test_a_sink_is_of_no_use_without_the_block_that_all_layers_hold() -> None:
    ledger = ledger_of(2)
    pass_by(ledger, A, text(0, 17))
    drop(ledger, 0, 0)
    assert look_up(ledger, text(0, 17)).num_tokens == 0


def test_the_end_of_a_sequence_gives_its_sinks_up_last() -> None:
    ledger = Ledger(layout_of((None, 1), budget_bytes=32 * 8, sinks=2))
    pass_by(ledger, A, text(0, 24))  # six blocks and two sinks: the budget
    write(ledger, B, text(100, 9))  # takes two and two
    assert ledger.usage().cached_by_group == (2, 2)
    assert look_up(ledger, text(0, 24)).num_tokens == 8


# ---- swapping -------------------------------------------------------------------------------------------------------

HOST = layout_of((None, 1), (8, 1), rows=6, sinks=2)


def test_sinks_are_swapped_with_their_sequence() -> None:
    ledger = ledger_of(2, host=HOST)
    write(ledger, A, text(0, 18))
    held = ledger.bytes_to_swap(A)
    assert held == 32 * (4 + 2 + 2) + 2 * 32  # blocks, sinks, window; two open blocks
    out = ledger.swap_out(A)
    assert [move for move in out if isinstance(move, SwapOut) and move.group == 1] == [
        SwapOut(1, BlockId(0), BlockId(0)),
        SwapOut(1, BlockId(1), BlockId(1)),
    ]
    assert isinstance(out[0], SwapOpenOut)
    ledger.check()
    drop(ledger, 1, 1)
    moves = ledger.swap_in(A)
    assert moves is not None
    ledger.check()
    assert [type(move) for move in moves] == [SwapOpenIn, SwapIn]  # all but one block are still there
    assert (moves[1].group, moves[1].host_block) == (1, 1)  # type: ignore[union-attr]
    assert (blocks(ledger, A, 1)[0], len(blocks(ledger, A, 1)), len(blocks(ledger, A, 0))) == (0, 2, 4)
    grow_on = ledger.extend(A, 0)
    assert grow_on is not None
    ledger.commit(A)
    leave(ledger, A)
    assert look_up(ledger, text(0, 18)).num_tokens >= 16


def test_a_host_pool_without_room_for_sinks_takes_nobody() -> None:
    host = layout_of((None, 1), (8, 1), counts=(6, 1, 6), budget_bytes=13 * 32, sinks=2)
    ledger = ledger_of(2, host=host)
    write(ledger, A, text(0, 18))
    assert ledger.bytes_to_swap(A) is None
    write(ledger, B, text(100, 6))
    assert ledger.bytes_to_swap(B) == 32 * 3 + 2 * 32


def test_tokens_granted_but_not_written_leave_no_sink_in_the_host_pool() -> None:
    ledger = ledger_of(3, host=HOST)
    begin(ledger, A, text(0, 18))
    grow(ledger, A, 6)
    assert ledger.extend(A, 8) is not None  # three blocks are granted, one is written
    assert ledger.bytes_to_swap(A) == 32 * 3 + 2 * 32
    ledger.swap_out(A)
    assert [len(one) for one in ledger._swapped[A].blocks] == [1, 1, 1]


# ---- the audit ------------------------------------------------------------------------------------------------------


def test_the_audit_names_a_sink_too_few_and_one_too_many() -> None:
    ledger = ledger_of(2)
    write(ledger, A, text(0, 18))
    ledger._holdings[A].sealed[1].pop()
    assert any("0 passed + 1 sealed blocks != 18 tokens // 4, at most 2" in str(fault) for fault in ledger.audit())
    ledger = ledger_of(2)
    write(ledger, A, text(0, 18))
    write(ledger, B, text(100, 5))
    card = ledger._budget.index.cards[chain_of(text(0, 18)).digests(4)[2]]
    card.blocks[1] = blocks(ledger, B, 1)[0]  # block 2 of A, behind its two sinks
    ledger._budget.pools[1].cards[card.blocks[1]] = card
    assert any("it is block 2 of a text, behind the 2 sinks" in str(fault) for fault in ledger.audit())


def test_usage_counts_sinks_as_blocks_and_no_open_ones_of_theirs() -> None:
    ledger = Ledger(layout_of((None, 1), sinks=2))
    write(ledger, A, text(0, 18))
    usage = ledger.usage()
    assert (usage.num_blocks_used, usage.used_bytes, usage.wasted_bytes) == (4 + 2 + 1, 32 * 7, 2 * 8)
    assert (usage.sealed_by_group, usage.num_open_used) == ((4, 2), 1)


def test_private_sequences_have_sinks_of_their_own() -> None:
    ledger = ledger_of(1)
    write(ledger, A, text(0, 9), scope=None)
    write(ledger, C, text(0, 9), scope=None)
    assert (blocks(ledger, A, 1), blocks(ledger, C, 1)) == ([0], [1])
