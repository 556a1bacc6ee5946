"""How long blocks are kept when nobody holds them: priorities, times to live, pins, ranges; and that all of it is soft.

Blocks of four tokens. Knows nothing of requests' wire formats or policies.
"""

import math

import pytest
from cached import A, B, C, D, blocks, chain_of, leave, look_up, pass_by, text, write
from small import layout_of

from kvfolio.cache.index import DEFAULT_PRIORITY, PIN, Card
from kvfolio.cache.ledger import Ledger, LedgerOptions
from kvfolio.cache.prefix import TokenChain
from kvfolio.cache.retention import KeepRange, Retention, highest
from kvfolio.errors import OptionError


def retain(ledger: Ledger, chain: TokenChain, keep: tuple[KeepRange, ...]) -> int:
    """Retain, and how many blocks it concerned."""
    ledger.retain(chain, keep)
    return ledger.num_kept(chain, keep)


def ledger_of(rows: int = 4) -> Ledger:
    return Ledger(layout_of((None, 1), rows=rows))


def survivors(ledger: Ledger, *starts: int) -> list[int]:
    """Which texts of one block are still there."""
    return [start for start in starts if look_up(ledger, text(start, 5)).num_tokens == 4]


def priority(ledger: Ledger, tokens: list[int], block: int = 0) -> int:
    return ledger._budget.index.cards[chain_of(tokens).digests(block + 1)[block]].priority


# ---- priorities -----------------------------------------------------------------------------------------------------


def test_the_lowest_priority_is_evicted_first_then_the_oldest() -> None:
    ledger = ledger_of()
    for start, keep in ((0, KeepRange(80)), (100, KeepRange(20)), (200, KeepRange()), (300, KeepRange(20))):
        pass_by(ledger, A, text(start, 4), (keep,))
    gone = []
    for start, sequence in ((1000, A), (1100, B), (1200, C), (1300, D)):
        before = survivors(ledger, 0, 100, 200, 300)
        write(ledger, sequence, text(start, 4), None)
        gone += [one for one in before if one not in survivors(ledger, 0, 100, 200, 300)]
    assert gone == [100, 300, 200, 0]


def test_a_pin_goes_last_but_a_pool_of_pins_still_serves() -> None:
    ledger = ledger_of()
    pass_by(ledger, A, text(0, 16), (KeepRange(PIN),))
    assert write(ledger, B, text(100, 12)) == 0
    assert (blocks(ledger, B), look_up(ledger, text(0, 16)).num_tokens) == ([3, 2, 1], 4)
    leave(ledger, B)
    pass_by(ledger, B, text(200, 8))  # in place of what is not pinned
    assert look_up(ledger, text(0, 16)).num_tokens == 4


def test_a_range_concerns_the_blocks_it_touches_and_the_highest_of_several_counts() -> None:
    ledger = ledger_of(rows=10)
    keep = (KeepRange(70, start=0, stop=5), KeepRange(30, start=8, stop=9), KeepRange(90, start=4, stop=4 + 1))
    write(ledger, A, text(0, 16), keep=keep)
    assert [priority(ledger, text(0, 16), block) for block in range(4)] == [70, 90, 30, DEFAULT_PRIORITY]


def test_a_range_without_an_end_covers_what_is_generated() -> None:
    ledger = ledger_of(rows=10)
    write(ledger, A, text(0, 6), keep=(KeepRange(60, start=4),))
    for token in (6, 7):
        ledger._holdings[A].chain.append(token)
        ledger.extend(A, 1)
        ledger.commit(A)
    assert [priority(ledger, text(0, 8), block) for block in range(2)] == [DEFAULT_PRIORITY, 60]


# ---- raised, never lowered ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second", "expected"), [(70, 90, 90), (70, 20, 70), (None, 20, 50), (20, 60, 60)])
def test_a_hit_raises_what_another_asked_for_and_never_lowers_it(first: int | None, second: int, expected: int) -> None:
    ledger = ledger_of()
    write(ledger, A, text(0, 4), keep=() if first is None else (KeepRange(first),))
    write(ledger, B, text(0, 5), keep=(KeepRange(second),))
    assert priority(ledger, text(0, 4)) == expected


def test_one_who_asks_for_nothing_changes_nothing() -> None:
    ledger = ledger_of()
    write(ledger, A, text(0, 4), keep=(KeepRange(20),))
    write(ledger, B, text(0, 5))
    assert priority(ledger, text(0, 4)) == 20


def test_two_who_write_one_block_at_once_keep_it_by_the_higher_priority() -> None:
    ledger = ledger_of(rows=10)
    for sequence, asked in ((A, 90), (B, 10)):
        chain = chain_of(text(0, 4))
        ledger.admit(sequence, chain, ledger.lookup(chain, 0), (KeepRange(asked),))
        ledger.extend(sequence, 4)
    ledger.commit(A)
    ledger.commit(B)  # its block is there already, and was never hit
    assert priority(ledger, text(0, 4)) == 90


def test_a_pin_is_not_lowered_by_a_sequence_that_comes_back_from_the_host_pool() -> None:
    layout = layout_of((None, 1))
    ledger = Ledger(layout, LedgerOptions(host=layout))
    write(ledger, A, text(0, 5), keep=(KeepRange(20),))
    assert retain(ledger, chain_of(text(0, 4)), (KeepRange(PIN),)) == 1
    ledger.swap_out(A)
    ledger.swap_in(A)
    ledger.commit(A)
    assert priority(ledger, text(0, 4)) == PIN


def test_an_equal_priority_for_a_shorter_time_shortens_nothing() -> None:
    ledger = ledger_of()
    write(ledger, A, text(0, 4), keep=(KeepRange(70),))  # for ever
    write(ledger, B, text(0, 5), keep=(KeepRange(70, ttl_s=1.0),))
    ledger.tick(5.0)
    assert priority(ledger, text(0, 4)) == 70


# ---- time -----------------------------------------------------------------------------------------------------------


def test_when_its_time_is_over_a_block_has_the_default_priority_again() -> None:
    ledger = ledger_of()
    ledger.tick(100.0)
    pass_by(ledger, A, text(0, 4), (KeepRange(80, ttl_s=5.0),))
    pass_by(ledger, A, text(100, 4), (KeepRange(10, ttl_s=5.0),))
    ledger.tick(104.9)
    assert [priority(ledger, text(start, 4)) for start in (0, 100)] == [80, 10]
    ledger.tick(105.0)
    assert [priority(ledger, text(start, 4)) for start in (0, 100)] == [DEFAULT_PRIORITY] * 2
    pass_by(ledger, A, text(200, 4))
    write(ledger, B, text(300, 8))  # one cold block, then one of those: 0 was the first to be default again
    assert survivors(ledger, 0, 100, 200) == [100, 200]


def test_a_use_by_who_asks_for_it_begins_the_time_anew() -> None:
    ledger, keep = ledger_of(), (KeepRange(80, ttl_s=5.0),)
    pass_by(ledger, A, text(0, 4), keep)
    ledger.tick(4.0)
    pass_by(ledger, A, text(0, 5), keep)
    ledger.tick(8.0)
    assert priority(ledger, text(0, 4)) == 80
    ledger.tick(9.0)
    assert priority(ledger, text(0, 4)) == DEFAULT_PRIORITY


def test_the_time_of_an_evicted_block_does_not_end_that_of_its_successor() -> None:
    ledger = ledger_of(rows=1)
    pass_by(ledger, A, text(0, 4), (KeepRange(80, ttl_s=5.0),))
    pass_by(ledger, A, text(100, 4))
    ledger.tick(1.0)
    pass_by(ledger, A, text(0, 4), (KeepRange(80, ttl_s=50.0),))
    ledger.tick(20.0)
    assert priority(ledger, text(0, 4)) == 80


# ---- asked for later ------------------------------------------------------------------------------------------------


def test_retain_sets_what_is_there_and_says_how_much_that_is() -> None:
    ledger = ledger_of()
    pass_by(ledger, A, text(0, 8), (KeepRange(80),))
    pass_by(ledger, A, text(100, 4))
    assert retain(ledger, chain_of(text(0, 14)), (KeepRange(5, start=4),)) == 1  # block 1; block 2 is not there
    assert [priority(ledger, text(0, 8), block) for block in range(2)] == [80, 5]  # lowered: this is an order
    assert retain(ledger, chain_of(text(0, 14)), (KeepRange(PIN, ttl_s=2.0),)) == 2
    assert retain(ledger, chain_of(text(0, 14)), ()) == 0
    assert retain(ledger, chain_of(text(200, 8)), (KeepRange(PIN),)) == 0
    write(ledger, B, text(300, 8))  # 3, then that of 100
    assert (blocks(ledger, B), survivors(ledger, 0, 100)) == ([3, 2], [0])
    ledger.tick(2.0)
    ledger.check()
    assert priority(ledger, text(0, 8)) == DEFAULT_PRIORITY


# ---- what is accepted -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", [-1, 102, 1000])
def test_a_priority_is_0_to_100_or_a_pin(asked: int) -> None:
    with pytest.raises(OptionError, match=f"priority is {asked}; accepted: 0"):
        KeepRange(asked)
    assert [KeepRange(one).priority for one in (0, 100, PIN)] == [0, 100, 101]


@pytest.mark.parametrize("asked", [0.0, -1.0, math.inf, math.nan])
def test_a_time_to_live_is_finite_and_more_than_nothing(asked: float) -> None:
    with pytest.raises(OptionError, match="ttl_s is"):
        KeepRange(ttl_s=asked)


@pytest.mark.parametrize(("start", "stop"), [(-1, None), (5, 4), (-3, -2)])
def test_a_range_begins_before_it_ends(start: int, stop: int | None) -> None:
    with pytest.raises(OptionError, match="are no range"):
        KeepRange(start=start, stop=stop)


@pytest.mark.parametrize(
    ("kept", "touched"),
    [
        ((0, None), [0, 1, 2]),
        ((0, 4), [0]),
        ((3, 5), [0, 1]),
        ((4, 4), []),
        ((5, 6), [1]),
        ((8, 9), [2]),
        ((12, None), []),
    ],
)
def test_a_range_touches_every_block_that_has_one_of_its_tokens(
    kept: tuple[int, int | None], touched: list[int]
) -> None:
    one = KeepRange(70, start=kept[0], stop=kept[1])
    assert [block for block in range(3) if highest((one,), 4 * block, 4 * block + 4) is one] == touched


# ---- the heap -------------------------------------------------------------------------------------------------------


def a_card() -> Card:
    return Card(b"d", b"", b"", 0, [0])


def test_cards_that_are_used_over_and_over_leave_no_trail_of_times() -> None:
    retention, cards = Retention(), [a_card() for _ in range(10)]
    for time in range(10_000):
        for card in cards:
            card.uses = 1
            retention.ask(card, (KeepRange(80, ttl_s=5.0),), 0, 4, float(time))
    assert len(retention._due) <= 1024 + 1
    retention.expire(20_000.0, lambda card: None)
    assert (retention._due, {card.priority for card in cards}) == ([], {DEFAULT_PRIORITY})


def test_nor_do_they_where_no_time_passes() -> None:
    retention, card = Retention(), a_card()
    for _ in range(10_000):
        retention.ask(card, (KeepRange(80, ttl_s=5.0),), 0, 4, 0.0)
    assert len(retention._due) <= 1024 + 1
    retention.expire(5.0, lambda card: None)
    assert (retention._due, card.priority) == ([], DEFAULT_PRIORITY)


def test_nor_do_cards_that_were_evicted() -> None:
    retention = Retention()
    for number in range(10_000):
        card = a_card()
        retention.ask(card, (KeepRange(80, ttl_s=50_000.0),), 0, 4, float(number))
        card.blocks = [None]
    assert len(retention._due) <= 1024 + 1
