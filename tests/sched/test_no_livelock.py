"""Random workloads on tiny pools: every request ends, within steps that can be counted before, with its own tokens."""

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import event, given, settings
from hypothesis import strategies as st
from small import layout_of, layouts, request_of, token_at

from kvfolio.cache.ledger import Ledger
from kvfolio.sched.options import Counters, SchedulerOptions
from kvfolio.sched.request import Arrive, Event, Leave, Request, RequestId, Step
from kvfolio.sched.scheduler import Scheduler
from kvfolio.spec.layout import CacheLayout

MAX_CONTEXT = 64


@dataclass(frozen=True)
class Come:
    """A request and the step at which it comes; it may leave at a later one."""

    request: Request
    at: int
    leaves_at: int | None = None


@dataclass(frozen=True)
class Run:
    """What came of a workload."""

    answers: dict[RequestId, list[int]]
    refused: set[RequestId]
    steps: list[Step]
    counters: Counters


def run(layout: CacheLayout, max_step_tokens: int, comes: Sequence[Come], max_steps: int) -> Run:
    """Run all of ``comes``, the ledger checked twice a step; fails when more than ``max_steps`` compute something."""
    scheduler = Scheduler(Ledger(layout), SchedulerOptions(MAX_CONTEXT, max_step_tokens))
    answers: dict[RequestId, list[int]] = {}
    refused: set[RequestId] = set()
    steps: list[Step] = []
    at, last = 0, max(max(come.at, come.leaves_at or 0) for come in comes)
    while at <= last or not scheduler.is_idle:
        events: list[Event] = [Arrive(come.request) for come in comes if come.at == at]
        events += [Leave(come.request.id) for come in comes if come.leaves_at == at]
        step = scheduler.step(events)
        scheduler.ledger.check()
        tokens = {}
        for chunk in step.chunks:
            if chunk.samples:
                token = token_at(chunk.request_id, chunk.start + len(chunk.token_ids), 1000)
                tokens[chunk.request_id] = token
                answers.setdefault(chunk.request_id, []).append(token)
        scheduler.commit(step, tokens)
        scheduler.ledger.check()
        refused.update(request_id for request_id, _ in step.refused)
        if step.chunks:
            steps.append(step)
        assert len(steps) <= max_steps
        at += 1
    assert scheduler.ledger.free_bytes == layout.budget_bytes
    assert scheduler.ledger.usage().num_blocks_used == 0
    assert scheduler.ledger.num_open_free == layout.num_open_blocks
    assert scheduler.counters.num_steps == len(steps)
    return Run(answers, refused, steps, scheduler.counters)


def bound(comes: Sequence[Come]) -> int:
    """The most steps a workload can take.

    In every step the oldest request gets at least a token on, unless decodes of newer ones used up the step's tokens.
    The first happens at most prompt + max_tokens times a request, for the oldest is never preempted; the second
    generates a token that is never lost: at most max_tokens times a request.
    """
    return sum(len(come.request.prompt) + 2 * max(0, come.request.max_tokens) for come in comes)


@st.composite
def workloads(draw: st.DrawFn, may_leave: bool = False) -> list[Come]:
    comes = []
    for index in range(draw(st.integers(1, 8))):
        at = draw(st.integers(0, 12))
        stops = frozenset(token_at(index, draw(st.integers(1, 60)), 1000) for _ in range(draw(st.integers(0, 1))))
        request = request_of(index, draw(st.integers(1, 30)), draw(st.integers(1, 20)), stops)
        leaves = may_leave and draw(st.booleans())
        comes.append(Come(request, at, at + draw(st.integers(0, 15)) if leaves else None))
    return sorted(comes, key=lambda come: come.at)


def expected_answer(request: Request) -> list[int]:
    """What a request generates, whoever else is there: tokens by position, up to a stop token or max_tokens."""
    answer: list[int] = []
    while len(answer) < request.max_tokens and not (answer and answer[-1] in request.stop_token_ids):
        answer.append(token_at(request.id, len(request.prompt) + len(answer), 1000))
    return answer


@settings(max_examples=250, deadline=None)
@given(layout=layouts(min_rows=2, min_open=2), comes=workloads(), max_step_tokens=st.integers(1, 20))
def test_every_request_ends_within_the_bound_with_the_same_tokens_whatever_the_memory(
    layout: CacheLayout, comes: list[Come], max_step_tokens: int
) -> None:
    done = run(layout, max_step_tokens, comes, bound(comes))
    event(f"preemptions: {min(done.counters.num_preemptions, 3)}")
    for come in comes:
        request = come.request
        if request.id in done.refused:
            total = len(request.prompt) + request.max_tokens
            assert total > MAX_CONTEXT or not layout.fits(request.max_cached_tokens)
            assert request.id not in done.answers
        else:
            assert done.answers[request.id] == expected_answer(request)
    assert done.counters.num_finished == len(comes) - len(done.refused)


@settings(max_examples=150, deadline=None)
@given(layout=layouts(min_rows=2, min_open=2), comes=workloads(may_leave=True), max_step_tokens=st.integers(1, 20))
def test_requests_that_leave_at_any_moment_leave_nothing_behind(
    layout: CacheLayout, comes: list[Come], max_step_tokens: int
) -> None:
    done = run(layout, max_step_tokens, comes, bound(comes))
    for come in comes:
        answer = done.answers.get(come.request.id, [])
        assert answer == expected_answer(come.request)[: len(answer)]


@settings(max_examples=150, deadline=None)
@given(layout=layouts(min_rows=2, min_open=2), comes=workloads(), max_step_tokens=st.integers(1, 20))
def test_every_step_keeps_to_its_tokens_and_only_newer_requests_give_way(
    layout: CacheLayout, comes: list[Come], max_step_tokens: int
) -> None:
    order = [come.request.id for come in comes]  # as they came
    started: list[RequestId] = []
    for step in run(layout, max_step_tokens, comes, bound(comes)).steps:
        assert 1 <= step.num_tokens <= max_step_tokens
        ids = [chunk.request_id for chunk in step.chunks]
        assert len(set(ids)) == len(ids) <= layout.num_open_blocks
        if step.preempted:
            places = [order.index(request_id) for request_id in step.preempted]
            assert min(places) > max(order.index(request_id) for request_id in ids)
            assert places == sorted(places, reverse=True)
        started += [request_id for request_id in ids if request_id not in started]
        # Decodes stand by age; newcomers, who start at 0, are behind those who ran before.
        decodes = [
            order.index(c.request_id) for c in step.chunks if c.samples and len(c.token_ids) == 1 and c.start > 0
        ]
        assert decodes == sorted(decodes)
        slots = [chunk.tables[0].open_slot for chunk in step.chunks]
        assert len(set(slots)) == len(slots)
    assert [order.index(request_id) for request_id in started] == sorted(order.index(id_) for id_ in started)


@settings(max_examples=100, deadline=None)
@given(comes=workloads(), max_step_tokens=st.integers(1, 20))
def test_ample_memory_computes_every_token_exactly_once(comes: list[Come], max_step_tokens: int) -> None:
    done = run(layout_of((None, 1), (7, 2), rows=200, num_open=8), max_step_tokens, comes, bound(comes))
    assert done.counters.num_preemptions == 0
    served = [come.request for come in comes if come.request.id not in done.refused]
    needed = sum(len(request.prompt) + len(done.answers[request.id]) - 1 for request in served)
    assert done.counters.num_tokens_computed == needed


def test_eight_large_requests_on_the_smallest_pool_that_holds_one_all_end() -> None:
    # Each needs all 12 blocks in the end; all come at once.
    comes = [Come(request_of(index, 20, 28), 0) for index in range(8)]
    layout = layout_of((None, 1), (6, 2), budget_bytes=12 * 32 + 2 * 64, num_open=8)
    assert layout.longest_sequence(99) >= 47
    done = run(layout, 16, comes, bound(comes))
    assert all(done.answers[come.request.id] == expected_answer(come.request) for come in comes)
