"""Why a hit is not longer: every reason a ledger can give, with the exact position, and what each group would accept.

Knows nothing of the reasons that only a scheduler can give. Blocks of four tokens.
"""

import pytest
from cached import SCOPE, A, B, C, begin, chain_of, grow, leave, look_up, miss_of, pass_by, text, write
from small import layout_of, lossy

from kvfolio.cache import budget
from kvfolio.cache.ledger import Ledger, LedgerOptions
from kvfolio.cache.lookup import EVICTED, NEVER_SEEN, OTHER_ADAPTER, OTHER_FINGERPRINT, OTHER_NAMESPACE, TAIL, Miss
from kvfolio.cache.prefix import Scope


def ledger_of(*shapes: tuple[int | None, int], rows: int = 10) -> Ledger:
    return Ledger(layout_of(*(shapes or ((None, 1),)), rows=rows))


def forget_open(ledger: Ledger) -> None:
    """Take all slots that are kept, so that only sealed blocks are found."""
    slots = [ledger._slots.take() for _ in range(ledger.num_open_free)]
    for slot in slots:
        assert slot is not None
        ledger._slots.give(slot)
    ledger.check()


def test_there_is_no_reason_when_all_but_the_last_token_is_there() -> None:
    ledger = ledger_of()
    pass_by(ledger, A, text(0, 12))
    assert [miss_of(ledger, text(0, stop)) for stop in (1, 5, 8, 9, 12)] == [None] * 5


def test_what_nobody_wrote_was_never_seen() -> None:
    ledger = ledger_of()
    assert miss_of(ledger, text(0, 9)) == Miss(NEVER_SEEN, 0)
    pass_by(ledger, A, text(0, 8))
    assert miss_of(ledger, text(100, 9)) == Miss(NEVER_SEEN, 0)
    assert miss_of(ledger, [*text(0, 8), *text(100, 8)]) == Miss(NEVER_SEEN, 8)
    assert miss_of(ledger, [*text(0, 6), *text(100, 8)]) == Miss(NEVER_SEEN, 6)  # two tokens of block 1 are copied


@pytest.mark.parametrize(("num_tokens", "position"), [(10, 8), (11, 8), (7, None), (9, None)])
def test_tokens_that_fill_no_block_and_that_no_block_begins_with_were_never_seen(
    num_tokens: int, position: int | None
) -> None:
    ledger = ledger_of()
    pass_by(ledger, A, text(0, 8))
    assert miss_of(ledger, text(0, num_tokens)) == (None if position is None else Miss(NEVER_SEEN, position))


def test_in_a_lossy_format_tokens_that_a_sealed_block_begins_with_are_its_tail() -> None:
    ledger = Ledger(lossy(layout_of((None, 1))))
    pass_by(ledger, A, text(0, 12))
    assert miss_of(ledger, text(0, 11)) == Miss(TAIL, 8)  # 8 and 9 lie in the sealed block 2
    assert miss_of(ledger, [*text(0, 8), 99, 99, 99]) == Miss(NEVER_SEEN, 8)


def test_in_a_lossy_format_a_block_that_would_be_entered_in_its_middle_is_a_tail() -> None:
    ledger = Ledger(lossy(layout_of((None, 1))))
    pass_by(ledger, A, text(0, 12))
    assert miss_of(ledger, text(0, 12)) == Miss(TAIL, 8)  # block 2 is there, but token 11 has to be computed
    assert miss_of(ledger, [*text(0, 10), 99, 99, 99, 99]) == Miss(NEVER_SEEN, 8)  # nobody wrote 8, 9, 99, 99


def test_an_evicted_block_is_named_with_the_time_it_was_evicted_last() -> None:
    ledger = ledger_of(rows=4)
    pass_by(ledger, A, text(0, 16))
    ledger.tick(7.5)
    write(ledger, B, text(100, 8))  # tokens 12 … 15 and 8 … 11 go
    assert miss_of(ledger, text(0, 17)) == Miss(EVICTED, 8, 7.5)
    assert miss_of(ledger, text(0, 8)) is None
    leave(ledger, B)
    ledger.tick(9.0)
    write(ledger, C, text(200, 12))  # tokens 4 … 7, 0 … 3 and 104 … 107
    assert miss_of(ledger, text(0, 17)) == Miss(EVICTED, 0, 9.0)
    assert miss_of(ledger, text(100, 9)) == Miss(EVICTED, 4, 9.0)


def test_an_evicted_block_that_is_written_again_is_there() -> None:
    ledger = ledger_of(rows=4)
    pass_by(ledger, A, text(0, 8))
    pass_by(ledger, B, text(100, 16))
    assert miss_of(ledger, text(0, 9)) == Miss(EVICTED, 0, 0.0)
    pass_by(ledger, A, text(0, 8))
    assert miss_of(ledger, text(0, 9)) is None


def test_what_was_evicted_long_ago_was_never_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "REMEMBERED_LEAST", 0)
    ledger = ledger_of(rows=1)  # four evictions are remembered
    for start in range(0, 600, 100):
        pass_by(ledger, A, text(start, 4))
    found = [miss_of(ledger, text(start, 5)) for start in range(0, 600, 100)]
    assert found == [Miss(NEVER_SEEN, 0), *[Miss(EVICTED, 0, 0.0)] * 4, None]


@pytest.mark.parametrize(
    ("other", "reason"),
    [
        (Scope(b"model", "tenant"), OTHER_NAMESPACE),
        (Scope(b"model", None, "lora"), OTHER_ADAPTER),
        (Scope(b"another"), OTHER_FINGERPRINT),
        (Scope(b"model", "tenant", "lora"), OTHER_ADAPTER),  # the adapter changes the keys, a namespace does not
        (Scope(b"another", "tenant", "lora"), OTHER_FINGERPRINT),
    ],
)
def test_tokens_that_lie_in_another_scope_say_which_part_of_it_differs(other: Scope, reason: str) -> None:
    ledger = ledger_of()
    write(ledger, A, text(0, 8), other)
    assert miss_of(ledger, text(0, 9)) == Miss(reason, 0)
    write(ledger, B, text(0, 4))
    assert miss_of(ledger, text(0, 9)) == Miss(reason, 4)
    assert miss_of(ledger, text(100, 9)) == Miss(NEVER_SEEN, 0)
    assert miss_of(ledger, text(0, 9), other) is None


def test_a_scope_that_nobody_used_lately_explains_nothing() -> None:
    ledger = ledger_of(rows=100)
    pass_by(ledger, A, text(0, 8))
    for number in range(64):
        write(ledger, B, [number], Scope(b"model", str(number)))
        leave(ledger, B)
    assert miss_of(ledger, text(0, 9), Scope(b"model", "new")) == Miss(NEVER_SEEN, 0)


def test_a_miss_changes_nothing() -> None:
    ledger = ledger_of()
    write(ledger, A, text(0, 9))
    before = ledger.usage()
    miss_of(ledger, text(0, 20))
    assert ledger.usage() == before
    ledger.check()


# ---- groups ---------------------------------------------------------------------------------------------------------


def test_each_group_says_what_it_would_accept_alone() -> None:
    ledger = ledger_of((None, 1), (5, 1))
    pass_by(ledger, A, text(0, 16))
    assert look_up(ledger, text(0, 17)).group_tokens == (16, 16)
    ledger.tick(3.0)
    for _ in range(3):
        ledger._budget._evict(1)  # the window's blocks 0, 1 and 2, which were passed
    hit = look_up(ledger, text(0, 17))
    assert (hit.num_tokens, hit.group_tokens) == (16, (16, 16))  # query 16 reads 12 …
    hit = look_up(ledger, text(0, 15))
    assert (hit.num_tokens, hit.group_tokens) == (0, (12, 0))
    assert miss_of(ledger, text(0, 15)) == Miss(EVICTED, 0, 3.0)


def test_what_a_window_lost_is_evicted_though_another_group_has_it() -> None:
    ledger = ledger_of((None, 1), (8, 1))
    pass_by(ledger, A, text(0, 16))
    ledger.tick(2.0)
    ledger._budget._evict(1)  # window block 0; query 4 … 11 cannot do without it
    assert miss_of(ledger, text(0, 9)) == Miss(EVICTED, 0, 2.0)
    assert look_up(ledger, text(0, 13)).num_tokens == 12


def test_a_window_block_that_did_not_come_back_with_its_text_is_still_evicted() -> None:
    layout = layout_of((None, 1), (5, 1), rows=5)
    ledger = Ledger(layout, LedgerOptions(host=layout))
    write(ledger, A, text(0, 17))
    ledger.tick(4.0)
    ledger.swap_out(A)
    write(ledger, B, text(100, 20))  # everything of A's is evicted from the device
    leave(ledger, B)
    assert miss_of(ledger, text(0, 17)) == Miss(EVICTED, 0, 4.0)
    assert ledger.swap_in(A) is not None  # all blocks of the full group, the window's last one
    ledger.commit(A)
    ledger.check()
    assert miss_of(ledger, text(0, 17)) is None
    assert look_up(ledger, text(0, 9)).group_tokens == (8, 0)
    assert miss_of(ledger, text(0, 9)) == Miss(EVICTED, 0, 4.0)


def test_explaining_a_miss_needs_no_more_than_the_tokens_that_are_known() -> None:
    ledger = ledger_of()
    begin(ledger, A, text(0, 3))
    grow(ledger, A, 3)
    leave(ledger, A)
    forget_open(ledger)
    assert miss_of(ledger, text(0, 3)) == Miss(NEVER_SEEN, 0)  # its open block is gone, and was never sealed
    chain = chain_of(text(0, 4), SCOPE)
    assert ledger.why_missed(chain, 3, ledger.lookup(chain, 3)) == Miss(NEVER_SEEN, 0)
