"""Who is worth waiting for: a sequence that is about to compute what a request would have to compute, too.

Knows nothing of how a scheduler waits. Blocks of four tokens.
"""

import pytest
from cached import A, B, begin, grow, leave, look_up, text, write
from small import layout_of, lossy

from kvfolio.cache.ledger import Ledger


def waits(ledger: Ledger, tokens: list[int]) -> tuple[int, int]:
    """(tokens that are there, tokens of the next block that somebody else is about to compute)"""
    hit = look_up(ledger, tokens)
    assert (hit.computing is not None) is (hit.num_computing > 0)
    return hit.num_tokens, hit.num_computing


def test_a_request_waits_for_whoever_computes_its_next_block() -> None:
    ledger = Ledger(layout_of((None, 1)))
    begin(ledger, A, text(0, 12))
    hit = look_up(ledger, text(0, 12))
    assert (hit.num_tokens, hit.computing, hit.num_computing) == (0, ledger._holdings[A], 4)
    ledger.extend(A, 6)  # granted is not yet written
    assert waits(ledger, text(0, 12)) == (0, 4)
    ledger.commit(A)
    # 6 tokens are there, 4 of them sealed; of the block behind those A computes all four.
    assert waits(ledger, text(0, 12)) == (6, 4)
    grow(ledger, A, 12)
    assert waits(ledger, text(0, 12)) == (11, 0)


@pytest.mark.parametrize(("common", "expected"), [(0, 0), (1, 1), (3, 3), (4, 4), (9, 4)])
def test_it_is_told_how_much_of_the_next_block_will_be_of_use(common: int, expected: int) -> None:
    ledger = Ledger(layout_of((None, 1)))
    begin(ledger, A, text(0, 12))
    assert waits(ledger, [*text(0, common), *text(100, 10)]) == (0, expected)


@pytest.mark.parametrize(("common", "expected"), [(3, 0), (4, 4)])
def test_in_a_lossy_format_a_part_of_a_block_that_will_be_sealed_is_of_no_use(common: int, expected: int) -> None:
    ledger = Ledger(lossy(layout_of((None, 1))))
    begin(ledger, A, text(0, 12))
    assert waits(ledger, [*text(0, common), *text(100, 10)]) == (0, expected)


def test_in_a_lossy_format_a_block_that_stays_open_is_of_use() -> None:
    ledger = Ledger(lossy(layout_of((None, 1))))
    begin(ledger, A, text(0, 3))
    assert waits(ledger, [0, 1, 99, 99]) == (0, 2)


def test_nobody_waits_for_one_that_decodes() -> None:
    ledger = Ledger(layout_of((None, 1)))
    write(ledger, A, text(0, 6))
    ledger._holdings[A].chain.append(6)
    assert waits(ledger, text(0, 12)) == (6, 0)
    ledger._holdings[A].chain.append(7)  # two tokens known ahead are a prompt again
    assert waits(ledger, text(0, 12)) == (6, 4)


def test_nobody_waits_for_one_that_has_ended() -> None:
    ledger = Ledger(layout_of((None, 1)))
    begin(ledger, A, text(0, 12))
    grow(ledger, A, 6)
    leave(ledger, A)
    assert waits(ledger, text(0, 12)) == (6, 0)


def test_nobody_waits_for_what_can_be_copied_already() -> None:
    ledger = Ledger(layout_of((None, 1)))
    write(ledger, A, [*text(0, 6), 99, 99])
    leave(ledger, A)
    begin(ledger, B, [*text(0, 5), 88, 88, 88])
    assert waits(ledger, [*text(0, 6), 77, 77]) == (6, 0)  # B computes one of the two that A's block has


def test_of_two_the_one_with_more_in_common_is_waited_for() -> None:
    ledger = Ledger(layout_of((None, 1)))
    begin(ledger, A, [0, 1, 99, 99, 99])
    begin(ledger, B, [0, 1, 2, 99, 99])
    hit = look_up(ledger, text(0, 8))
    assert (hit.computing, hit.num_computing) == (ledger._holdings[B], 3)


def test_nobody_waits_for_a_private_sequence() -> None:
    ledger = Ledger(layout_of((None, 1)))
    begin(ledger, A, text(0, 12), None)
    assert waits(ledger, text(0, 12)) == (0, 0)
