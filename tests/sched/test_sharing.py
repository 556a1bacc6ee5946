"""Requests whose prompts begin alike: what one computes nobody computes again, and who waits for whom. Exact counts.

Knows nothing of what is stored: whether answers stay the same is for ``tests/laws``.
"""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from scheduled import Drained, arrive, drain, parts, run, scheduler_of
from small import Shape, layout_of, lossy

from kvfolio.cache.ledger import Ledger
from kvfolio.cache.lookup import OTHER_NAMESPACE, PRIVATE, TAIL
from kvfolio.cache.prefix import Scope, TokenChain
from kvfolio.cache.retention import KeepRange
from kvfolio.sched.options import SchedulerOptions
from kvfolio.sched.request import Arrive, Leave, Request, RequestId, Retain
from kvfolio.sched.scheduler import Scheduler
from kvfolio.spec.layout import CacheLayout

SHARED = tuple(range(1500))
REST = 1500 % 16  # 12 tokens of the shared part fill no block


def layout(*shapes: Shape, is_lossy: bool = False, rows: int = 4000, num_open: int = 40) -> CacheLayout:
    made = layout_of(*(shapes or ((None, 1),)), rows=rows, block_tokens=16, num_open=num_open)
    return lossy(made) if is_lossy else made


def own_part(number: int, num_tokens: int) -> tuple[int, ...]:
    return tuple(10_000 * (number + 1) + place for place in range(num_tokens))


def crowd(lengths: Sequence[int], max_tokens: int = 1, shared: tuple[int, ...] = SHARED) -> list[Arrive]:
    """Requests that share ``shared`` and have own parts of these lengths."""
    return [
        Arrive(Request(RequestId(number), shared + own_part(number, length), max_tokens))
        for number, length in enumerate(lengths)
    ]


def serve(events: list[Arrive], scheduler: Scheduler) -> Drained:
    done = drain(scheduler, events)
    assert sorted(done.finished) == [event.request.id for event in events]
    assert scheduler.counters.num_preemptions == 0
    assert scheduler.ledger.usage().num_blocks_used == 0
    return done


# Own parts so short that the block in which the shared part ends never fills, and longer ones; the first one decides
# whether somebody's block with the shared part's end fills while the others wait.
TAILS = {
    "short": [1 + number % 3 for number in range(32)],
    "long": [20 + 7 * number for number in range(32)],
    "short first": [2, *(40 + number for number in range(31))],
    "long first": [400, *(1 + number % 5 for number in range(31))],
    "to the edge": [4] * 32,
}


@pytest.mark.parametrize("shapes", [((None, 1),), ((None, 1), (40, 2))], ids=["full", "full and window"])
@pytest.mark.parametrize("max_step_tokens", [256, 1024, 4096])
@pytest.mark.parametrize("lengths", TAILS.values(), ids=TAILS)
def test_of_32_requests_that_come_at_once_what_they_share_is_computed_once(
    lengths: list[int], max_step_tokens: int, shapes: tuple[Shape, ...]
) -> None:
    scheduler = scheduler_of(layout(*shapes), max_step_tokens, max_context=4096)
    done = serve(crowd(lengths), scheduler)
    assert scheduler.counters.num_tokens_computed == 1500 + sum(lengths)
    assert scheduler.counters.num_hit_tokens == 31 * 1500
    assert [done.hits(number) for number in range(32)] == [[0], *[[1500]] * 31]


@pytest.mark.parametrize("max_step_tokens", [256, 1024, 4096])
def test_of_32_requests_with_long_answers_prompts_are_computed_once_and_every_answer_by_itself(
    max_step_tokens: int,
) -> None:
    lengths = TAILS["long"]
    scheduler = scheduler_of(layout(), max_step_tokens, max_context=4096)
    serve(crowd(lengths, max_tokens=30), scheduler)
    assert scheduler.counters.num_tokens_computed == 1500 + sum(lengths) + 32 * 29


@pytest.mark.parametrize("max_step_tokens", [256, 1024, 4096])
@pytest.mark.parametrize("lengths", TAILS.values(), ids=TAILS)
def test_a_lossy_format_computes_the_end_of_what_they_share_again_where_its_block_has_filled(
    lengths: list[int], max_step_tokens: int
) -> None:
    scheduler = scheduler_of(layout(is_lossy=True), max_step_tokens, max_context=4096)
    done = serve(crowd(lengths), scheduler)
    again = [1500 - done.hits(number)[0] for number in range(1, 32)]
    # An open block is exact and may be copied; one that has filled is entered at its edge. So those whose own part does
    # not fill the block leave it to be copied, and behind one whose part does, 12 tokens are computed again.
    assert max(again) <= REST < 16
    if lengths is TAILS["short"] or lengths is TAILS["short first"]:
        assert again == [0] * 31
    elif lengths is TAILS["to the edge"]:
        assert again == [REST] * 31
    elif max_step_tokens >= 1024:  # else a chunk may end within the block, and can be copied up to there
        assert again == [REST] * 31 if lengths is TAILS["long"] else [REST, *[0] * 30]
    assert scheduler.counters.num_tokens_computed == 1500 + sum(lengths) + sum(again)


def test_two_equal_prompts_in_one_step_are_computed_once_but_for_the_last_token() -> None:
    scheduler = scheduler_of(max_step_tokens=40)
    prompt = tuple(range(11))
    step, _ = run(scheduler, *(Arrive(Request(RequestId(number), prompt, 3)) for number in (0, 1)))
    assert parts(step) == [(0, 0, 11, True)]
    assert (scheduler.num_waiting, scheduler.counters.num_waits) == (1, 1)
    step, _ = run(scheduler)
    assert parts(step) == [(0, 11, 1, True), (1, 10, 1, True)]
    (admission,) = step.admitted
    assert (admission.num_hit_tokens, admission.group_tokens, admission.miss) == (10, (8,), None)
    assert [chunk.tables[0].sealed for chunk in step.chunks] == [(0, 1, 2), (0, 1)]
    done = drain(scheduler)
    assert done.finished == [0, 1]
    assert scheduler.counters.num_tokens_computed == (11 + 2) + (1 + 2)


@pytest.mark.parametrize("num_prompt", [1, 2, 3, 4, 5, 8, 9, 16, 17])
def test_a_prompt_that_is_there_in_whole_computes_one_token(num_prompt: int) -> None:
    scheduler = scheduler_of(max_step_tokens=40)
    prompt = tuple(range(num_prompt))
    drain(scheduler, [Arrive(Request(RequestId(0), prompt, 1))])
    step, finished = run(scheduler, Arrive(Request(RequestId(1), prompt, 1)))
    assert parts(step) == [(1, num_prompt - 1, 1, True)]
    assert [end.request_id for end in finished] == [1]
    assert step.admitted[0].miss is None


def test_a_lossy_format_computes_the_last_block_of_a_prompt_that_is_there_in_whole() -> None:
    scheduler = scheduler_of(layout(is_lossy=True), 64, max_context=128)
    prompt = tuple(range(48))
    drain(scheduler, [Arrive(Request(RequestId(0), prompt, 1))])
    step, _ = run(scheduler, Arrive(Request(RequestId(1), prompt, 1)))
    assert parts(step) == [(1, 32, 16, True)]
    assert step.admitted[0].miss is not None
    assert (step.admitted[0].miss.reason, step.admitted[0].miss.position) == (TAIL, 32)


def test_what_others_generated_is_shared_like_a_prompt() -> None:
    scheduler = scheduler_of(max_step_tokens=40)
    drain(scheduler, [Arrive(Request(RequestId(0), (1, 2, 3), 10))])  # then 503, 504, …, 512
    turn = (1, 2, 3, *range(503, 513), 77)
    step, _ = run(scheduler, Arrive(Request(RequestId(1), turn, 1)))
    assert parts(step) == [(1, 12, 2, True)]  # 512 was never read back


# ---- who waits for whom ---------------------------------------------------------------------------------------------


def test_when_the_one_who_computes_is_aborted_another_takes_over_where_it_stood() -> None:
    scheduler = scheduler_of(layout(), 256, max_context=4096)
    events = crowd([5, 6, 7])
    step, _ = run(scheduler, *events)
    assert parts(step) == [(0, 0, 256, False)]
    run(scheduler)
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)
    step, _ = run(scheduler, Leave(RequestId(0)))
    assert parts(step) == [(1, 512, 256, False)]  # nothing is lost
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    done = drain(scheduler)
    assert sorted(done.finished) == [1, 2]
    assert done.hits(2) == [1500]
    assert scheduler.counters.num_tokens_computed == 1500 + 6 + 7


def test_when_all_who_compute_are_aborted_one_after_the_other_the_last_one_ends() -> None:
    scheduler = scheduler_of(layout(), 100, max_context=4096)
    run(scheduler, *crowd([3] * 10))
    for number in range(9):
        step, _ = run(scheduler, Leave(RequestId(number)))
        assert [chunk.request_id for chunk in step.chunks] == [number + 1]
    assert drain(scheduler).finished == [9]
    assert scheduler.counters.num_tokens_computed == 1500 + 3


def test_when_the_one_who_computes_is_stuck_for_lack_of_blocks_and_aborted_another_takes_over() -> None:
    # Request 0 grows beyond what was expected of it and takes the last block, behind which 1 stands still at 39 tokens.
    scheduler = scheduler_of(layout_of((None, 1), rows=11), max_step_tokens=6)
    prompt = tuple(range(500, 541))
    alike = [Arrive(Request(RequestId(1), prompt, 1)), Arrive(Request(RequestId(2), (*prompt, 7), 1))]
    run(scheduler, *arrive((0, 2, 10)), *alike)
    steps = [run(scheduler)[0] for _ in range(8)]
    assert [parts(step) for step in steps[-2:]] == [[(0, 8, 1, True), (1, 34, 5, False)], [(0, 9, 1, True)]]
    assert (scheduler.counters.num_waits, scheduler.num_waiting) == (1, 1)
    assert parts(run(scheduler, Leave(RequestId(1)))[0]) == [(0, 10, 1, True)]  # 10 blocks are not free yet
    assert parts(run(scheduler)[0]) == [(2, 39, 3, True)]


def test_one_that_waits_may_leave() -> None:
    scheduler = scheduler_of(layout(), 256, max_context=4096)
    run(scheduler, *crowd([5, 6, 7]))
    run(scheduler, Leave(RequestId(1)))
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)
    assert sorted(drain(scheduler).finished) == [0, 2]


def test_those_who_wait_are_passed_over_by_other_prompts() -> None:
    scheduler = scheduler_of(max_step_tokens=16)
    alike = [Arrive(Request(RequestId(number), (*range(12), 70 + number), 2)) for number in (0, 1)]
    step, _ = run(scheduler, *alike, *arrive((2, 3, 2)))
    assert parts(step) == [(0, 0, 13, True), (2, 0, 3, True)]
    step, _ = run(scheduler)
    assert parts(step) == [(0, 13, 1, True), (2, 3, 1, True), (1, 12, 1, True)]


def test_a_stream_of_other_prompts_does_not_hold_up_those_who_wait() -> None:
    # Two newcomers a step, each of which could use all of it: the shared part comes first all the same.
    scheduler = scheduler_of(layout(rows=400, num_open=8), 64, max_context=4096)
    run(scheduler, *crowd([5, 6]))
    started: dict[int, int] = {}
    for number in range(40):
        others = [Arrive(Request(RequestId(100 + 2 * number + k), own_part(5 + 2 * number + k, 64), 2)) for k in (0, 1)]
        step, _ = run(scheduler, *others)
        for one in step.admitted:
            started.setdefault(one.request_id, number)
    assert min(one for one in started if one >= 100) == 100
    # 1,500 tokens at 64 a step: the last of them in step 24, number 22 here. Its 28 tokens left are for newcomers.
    assert started[1] == 23
    assert [one for one in started if started[one] < started[1]] == [100]


def test_those_who_wait_keep_their_place_before_later_ones_when_memory_is_short() -> None:
    # Request 1 waits for 0; 2 and 3 come later. When 0's part is there, 1 is the first to start, though all would fit.
    scheduler = scheduler_of(layout_of((None, 1), rows=8, num_open=2), max_step_tokens=8)
    alike = [Arrive(Request(RequestId(number), (*range(8), 70 + number), 2)) for number in (0, 1)]
    run(scheduler, *alike, *arrive((2, 3, 2), (3, 3, 2)))
    starts = [one.request_id for step in drain(scheduler).steps for one in step.admitted]
    assert starts == [1, 2, 3]


def test_nobody_waits_for_one_who_only_decodes() -> None:
    scheduler = scheduler_of(max_step_tokens=16)
    run(scheduler, *arrive((0, 5, 9)))
    longer = Request(RequestId(1), (0, 1, 2, 3, 4, 505, 506, 507, 508), 1)  # what request 0 will have generated
    step, _ = run(scheduler, Arrive(longer))
    assert parts(step) == [(0, 5, 1, True), (1, 5, 4, True)]
    assert scheduler.counters.num_waits == 0


# ---- who shares with nobody -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["namespaces", "private", "reads nothing"])
def test_those_who_do_not_share_neither_hit_nor_wait(how: str) -> None:
    prompt = tuple(range(10))
    one, other = Request(RequestId(0), prompt, 1), Request(RequestId(1), prompt, 1)
    if how == "namespaces":
        one, other = replace(one, scope=Scope(b"", "a")), replace(other, scope=Scope(b"", "b"))
    elif how == "private":
        other = replace(other, scope=None)
    else:
        other = replace(other, reads_cache=False)
    for events in ([[Arrive(one), Arrive(other)]], [[Arrive(one)], [Arrive(other)]]):  # at once, and one by one
        scheduler = scheduler_of(max_step_tokens=40)
        admitted = [admission for now in events for step in drain(scheduler, now).steps for admission in step.admitted]
        assert [admission.num_hit_tokens for admission in admitted] == [0, 0]
        assert (scheduler.counters.num_tokens_computed, scheduler.counters.num_waits) == (20, 0)


def test_a_miss_for_another_namespace_says_so_and_a_private_one_too() -> None:
    scheduler = scheduler_of(max_step_tokens=40)
    prompt = tuple(range(10))
    drain(scheduler, [Arrive(Request(RequestId(0), prompt, 1, scope=Scope(b"", "a")))])
    drain(scheduler, [Arrive(Request(RequestId(1), prompt, 1, scope=Scope(b"", "b")))])
    drain(scheduler, [Arrive(Request(RequestId(2), prompt, 1, scope=None))])
    assert scheduler.counters.misses == {"never seen": 1, OTHER_NAMESPACE: 1, PRIVATE: 1}


def test_one_that_reads_nothing_leaves_its_blocks_for_others() -> None:
    scheduler = scheduler_of(max_step_tokens=40)
    prompt = tuple(range(10))
    drain(scheduler, [Arrive(Request(RequestId(0), prompt, 1, reads_cache=False))])
    step, _ = run(scheduler, Arrive(Request(RequestId(1), prompt, 1)))
    assert parts(step) == [(1, 9, 1, True)]


def test_what_is_to_be_kept_is_an_event_that_both_twins_can_be_told() -> None:
    ledger = Ledger(layout_of((None, 1), rows=4))
    scheduler = Scheduler(ledger, SchedulerOptions(max_context=64))
    texts = [tuple(range(start, start + 5)) for start in (0, 100, 200, 300)]
    for number, prompt in enumerate(texts):
        drain(scheduler, [Arrive(Request(RequestId(number), prompt, 1))])
    scheduler.step([Retain(texts[0], Scope(), (KeepRange(90, ttl_s=5.0),))], now_s=1.0)
    drain(scheduler, [Arrive(Request(RequestId(4), tuple(range(400, 405)), 1))])

    def is_there(prompt: tuple[int, ...]) -> bool:
        return ledger.lookup(TokenChain(prompt, Scope(), 4), 4).num_tokens == 4

    assert [is_there(prompt) for prompt in texts] == [True, False, True, True]
    scheduler.step([], now_s=6.0)  # its time is over: it is the newest of its priority, the others go first
    drain(scheduler, [Arrive(Request(RequestId(5), tuple(range(500, 505)), 1))])
    assert [is_there(prompt) for prompt in texts] == [True, False, False, True]
