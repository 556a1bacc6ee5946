"""Random workloads on tiny pools: every request ends, within steps that can be counted before, with its own tokens.

Prompts over three tokens begin alike all the time. Blocks hold what was written into them: every query is held to read
the tokens of its own request, wherever they were shared, copied, swapped or evicted meanwhile.
"""

import itertools
import random
import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st
from scheduled import CarelessForecast, PretendedStore
from small import layout_of, lossy

from kvfolio.cache.costs import MachineCosts
from kvfolio.cache.eviction import POLICIES
from kvfolio.cache.ledger import Ledger, LedgerOptions
from kvfolio.cache.prefix import Scope
from kvfolio.cache.retention import KeepRange
from kvfolio.sched.options import PREEMPTIONS, Counters, SchedulerOptions
from kvfolio.sched.request import Arrive, Event, Leave, Request, RequestId, Step
from kvfolio.sched.scheduler import Scheduler
from kvfolio.spec.layout import CacheLayout

MAX_CONTEXT = 64
seeds = st.integers(0, 2**60)  # drawing one by one makes half of all workloads the smallest one there is
ALPHABET = 3


@dataclass(frozen=True)
class Come:
    """A request and the step at which it comes; it may leave at a later one."""

    request: Request
    at: int
    leaves_at: int | None = None


@dataclass
class Run:
    """What came of a workload."""

    answers: dict[RequestId, list[int]] = field(default_factory=dict)
    refused: set[RequestId] = field(default_factory=set)
    steps: list[Step] = field(default_factory=list)
    preempted: Counter[RequestId] = field(default_factory=Counter)
    counters: Counters = field(default_factory=Counters)


def next_token(text: Sequence[int]) -> int:
    """What the pretended model answers: a function of all tokens before it."""
    return zlib.crc32(bytes(text)) % ALPHABET


def expected_answer(request: Request) -> list[int]:
    """What a request generates alone: up to a stop token or max_tokens."""
    answer: list[int] = []
    while len(answer) < request.max_tokens and not (answer and answer[-1] in request.stop_token_ids):
        answer.append(next_token([*request.prompt, *answer]))
    return answer


def run(
    layout: CacheLayout,
    options: SchedulerOptions,
    comes: Sequence[Come],
    caching: LedgerOptions,
    is_careless: bool = False,
) -> Run:
    """Run all of ``comes``, the ledger checked twice a step; fails when more steps compute than the bound allows."""
    scheduler, store, done = Scheduler(Ledger(layout, caching), options), PretendedStore(layout), Run()
    if is_careless:  # that requests end does not rest on forecasts
        scheduler._forecast = CarelessForecast()
    texts = {come.request.id: list(come.request.prompt) for come in comes}
    at, last = 0, max(max(come.at, come.leaves_at or 0) for come in comes)
    most = bound(comes, options.max_preemptions)
    while at <= last or not scheduler.is_idle:
        events: list[Event] = [Arrive(come.request) for come in comes if come.at == at]
        events += [Leave(come.request.id) for come in comes if come.leaves_at == at]
        step = scheduler.step(events, float(at))
        scheduler.ledger.check()
        done.refused.update(request_id for request_id, _ in step.refused)
        done.preempted.update(step.preempted)
        store.compute(step, texts)
        tokens = {chunk.request_id: next_token(texts[chunk.request_id]) for chunk in step.chunks if chunk.samples}
        for request_id, token in tokens.items():
            texts[request_id].append(token)
            done.answers.setdefault(request_id, []).append(token)
        scheduler.commit(step, tokens)
        scheduler.ledger.check()
        assert bool(step.chunks) or scheduler.is_idle  # no step without progress
        if step.chunks:
            done.steps.append(step)
        assert len(done.steps) <= most
        at += 1
    usage = scheduler.ledger.usage()
    assert (usage.num_blocks_used, usage.used_bytes, usage.num_open_used, usage.host_bytes) == (0, 0, 0, 0)
    assert scheduler.ledger.free_bytes == layout.budget_bytes
    assert scheduler.ledger.num_open_free == layout.num_open_blocks
    done.counters = scheduler.counters
    assert done.counters.num_steps == len(done.steps)
    assert done.counters.num_preemptions == done.preempted.total()
    return done


def bound(comes: Sequence[Come], max_preemptions: int) -> int:
    """The most steps that a workload can take.

    No step is without a token computed. A request computes each token that it can ever cache at most once a start, and
    it starts once and after each preemption, of which there are ``max_preemptions`` at most.
    """
    return sum((1 + max_preemptions) * max(0, come.request.max_cached_tokens) for come in comes)


@st.composite
def workloads(draw: st.DrawFn, may_leave: bool = False, is_private: bool = False) -> list[Come]:
    """Up to ten requests whose prompts are cut from two texts of three tokens, with ends of their own.

    The first one gives a token, others meet a stop token: short answers let requests start that become longer than
    expected.
    """
    chance = random.Random(draw(seeds))
    shared = [chance.choices(range(ALPHABET), k=30) for _ in range(2)]
    comes = []
    for index in range(chance.randint(3, 10)):
        begin = chance.choice(shared)[: chance.choice((0, 3, 8, 9, 14))]
        end = chance.choices(range(ALPHABET), k=chance.randint(not begin, 4))
        request = Request(
            RequestId(index),
            (*begin, *end),
            chance.choice((2, 20, 30, 30)) if comes else 1,
            frozenset(chance.sample(range(ALPHABET), chance.choice((0, 0, 0, 1)))),
            None if is_private or chance.random() < 0.1 else Scope(b"", chance.choice((None, None, "a"))),
            chance.random() < 0.9,
            chance.choice(((), (KeepRange(90, 4.0),), (KeepRange(10, None, 2, 9), KeepRange(101, 2.0, 8)))),
        )
        at = chance.randint(0, 8) if comes else 0
        leaves = may_leave and chance.random() < 0.4
        comes.append(Come(request, at, at + chance.randint(0, 20) if leaves else None))
    return sorted(comes, key=lambda come: come.at)


@st.composite
def caches(draw: st.DrawFn) -> tuple[CacheLayout, LedgerOptions]:
    """Split and common budgets, windows, lossless and lossy, every eviction policy, with and without a host pool.

    All hold one long request, and few hold several.
    """
    chance = random.Random(draw(seeds))
    windows = chance.sample((None, None, 1, 3, 4, 5, 8, 11), chance.choice((1, 1, 2, 3)))
    shapes = [(window, chance.randint(1, 3)) for window in dict.fromkeys([*windows, None][: len(windows) + 1])]
    sinks = chance.choice((0, 0, 0, 1, 2))
    longest = layout_of(*shapes, sinks=sinks).bytes_held(48)
    budget = round(longest * chance.uniform(1.0, 1.8))
    layout = layout_of(*shapes, budget_bytes=budget, num_open=chance.randint(3, 6), sinks=sinks)
    if chance.random() < 0.3:
        layout = replace(layout, groups=tuple(replace(one, num_blocks=chance.randint(10, 20)) for one in layout.groups))
    host = None
    if chance.random() < 0.6:
        most = chance.randint(1, 16)
        groups = tuple(replace(group, num_blocks=most, num_open_blocks=1 + most // 5) for group in layout.groups)
        host = replace(layout, groups=groups)
    if chance.random() < 0.3:
        layout = lossy(layout)
    costs = chance.choice((None, MachineCosts(1.0, 60.0, 1.0, 0.1)))  # about as many seconds to copy as to compute
    return layout, LedgerOptions(chance.choice(sorted(POLICIES)), host, costs, debug=True)


@st.composite
def choices(draw: st.DrawFn) -> SchedulerOptions:
    chance = random.Random(draw(seeds))
    return SchedulerOptions(
        MAX_CONTEXT, chance.choice((1, 4, 6, 10, 20, 30)), chance.choice(PREEMPTIONS), chance.choice((0, 1, 1, 2, 3, 3))
    )


@settings(max_examples=250, deadline=None)
@given(cache=caches(), comes=workloads(), options=choices(), is_careless=st.booleans())
def test_every_request_ends_within_the_bound_with_the_tokens_it_gives_alone(
    cache: tuple[CacheLayout, LedgerOptions], comes: list[Come], options: SchedulerOptions, is_careless: bool
) -> None:
    layout, caching = cache
    done = run(layout, options, comes, caching, is_careless)
    event(f"preemptions: {min(done.counters.num_preemptions, 3)}")
    event(f"swaps: {min(done.counters.num_swaps, 3)}, refused: {done.counters.num_swaps_refused > 0}")
    event(f"hits: {done.counters.num_hit_tokens > 0}, waits: {done.counters.num_waits > 0}")
    for come in comes:
        request = come.request
        if request.id in done.refused:
            total = len(request.prompt) + request.max_tokens
            assert total > MAX_CONTEXT or not layout.fits(request.max_cached_tokens)
            assert request.id not in done.answers
        else:
            assert done.answers[request.id] == expected_answer(request)
    assert done.counters.num_finished == len(comes) - len(done.refused)
    assert max(done.preempted.values(), default=0) <= options.max_preemptions


@settings(max_examples=200, deadline=None)
@given(cache=caches(), comes=workloads(may_leave=True), options=choices(), is_careless=st.booleans())
def test_requests_that_leave_at_any_moment_leave_nothing_behind_and_hang_nobody(
    cache: tuple[CacheLayout, LedgerOptions], comes: list[Come], options: SchedulerOptions, is_careless: bool
) -> None:
    layout, caching = cache
    done = run(layout, options, comes, caching, is_careless)
    for come in comes:
        answer, expected = done.answers.get(come.request.id, []), expected_answer(come.request)
        stays = come.leaves_at is None and come.request.id not in done.refused
        assert answer == (expected if stays else expected[: len(answer)])
    assert done.counters.num_finished + done.counters.num_left + len(done.refused) == len(comes)


@settings(max_examples=150, deadline=None)
@given(cache=caches(), comes=workloads(), options=choices(), is_careless=st.booleans())
def test_every_step_keeps_to_its_tokens_and_only_unprotected_requests_give_way(
    cache: tuple[CacheLayout, LedgerOptions], comes: list[Come], options: SchedulerOptions, is_careless: bool
) -> None:
    layout, caching = cache
    order = {come.request.id: place for place, come in enumerate(comes)}  # as they came
    num_preempted: Counter[RequestId] = Counter()
    for step in run(layout, options, comes, caching, is_careless).steps:
        assert 1 <= step.num_tokens <= options.max_step_tokens
        ids = [chunk.request_id for chunk in step.chunks]
        assert len(set(ids)) == len(ids) <= layout.num_open_blocks
        assert set(step.swapped) <= set(step.preempted)
        assert not set(step.preempted) & set(ids)
        for victim in step.preempted:
            assert num_preempted[victim] < options.max_preemptions
            # Who still runs is older, or cannot give way either.
            assert all(order[id_] < order[victim] or num_preempted[id_] >= options.max_preemptions for id_ in ids)
        num_preempted.update(step.preempted)
        decodes = [order[c.request_id] for c in step.chunks if c.samples and len(c.token_ids) == 1]
        started = [order[one.request_id] for one in step.admitted]
        assert [place for place in decodes if place not in started] == sorted(set(decodes) - set(started))
        slots = [chunk.tables[0].open_slot for chunk in step.chunks]
        assert len(set(slots)) == len(slots)


@settings(max_examples=100, deadline=None)
@given(cache=caches(), comes=workloads(is_private=True), options=choices())
def test_those_who_share_nothing_start_in_the_order_they_came(
    cache: tuple[CacheLayout, LedgerOptions], comes: list[Come], options: SchedulerOptions
) -> None:
    done = run(cache[0], options, comes, cache[1])
    starts = [one.request_id for step in done.steps for one in step.admitted if not one.num_preemptions]
    assert starts == [come.request.id for come in comes if come.request.id not in done.refused]
    assert (done.counters.num_hit_tokens, done.counters.num_waits) == (0, 0)


@settings(max_examples=50, deadline=None)
@given(comes=workloads(), max_step_tokens=st.integers(1, 20))
def test_ample_memory_computes_every_token_that_is_not_there_exactly_once(
    comes: list[Come], max_step_tokens: int
) -> None:
    layout = layout_of((None, 1), (7, 2), rows=100, num_open=8)
    done = run(layout, SchedulerOptions(MAX_CONTEXT, max_step_tokens), comes, LedgerOptions())
    assert done.counters.num_preemptions == 0
    served = [come.request for come in comes if come.request.id not in done.refused]
    needed = sum(len(request.prompt) + len(done.answers[request.id]) - 1 for request in served)
    assert done.counters.num_tokens_computed == needed - done.counters.num_hit_tokens


@pytest.mark.parametrize("max_preemptions", [0, 1, 3])
def test_eight_large_requests_on_the_smallest_pool_that_holds_one_all_end(max_preemptions: int) -> None:
    # Each needs all 12 blocks in the end; all come at once.
    comes = [Come(Request(RequestId(index), (index,) * 20, 28), 0) for index in range(8)]
    layout = layout_of((None, 1), (6, 2), budget_bytes=12 * 32 + 2 * 64, num_open=8)
    assert layout.longest_sequence(99) >= 47
    done = run(layout, SchedulerOptions(MAX_CONTEXT, 16, max_preemptions=max_preemptions), comes, LedgerOptions())
    assert all(done.answers[come.request.id] == expected_answer(come.request) for come in comes)


# ---- all of them ----------------------------------------------------------------------------------------------------

PROMPTS = ((0, 1), (0, 1, 2, 0, 1), (2,))  # two that begin alike, and another
TINY = [layout_of((None, 1), rows=3, num_open=2), layout_of((None, 1), (3, 1), rows=3, num_open=3, counts=(3, 2))]


@pytest.mark.parametrize("layout", TINY, ids=["two at once", "split, with a window"])
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_three_requests_end_however_they_arrive(layout: CacheLayout, preemption: str) -> None:
    # All arrivals within three steps, all prompts, short and long answers.
    host = layout if preemption == "swap" else None
    options = SchedulerOptions(MAX_CONTEXT, 4, preemption, max_preemptions=1)
    for prompts in itertools.product(PROMPTS, repeat=3):
        for arrivals in itertools.combinations_with_replacement(range(3), 2):
            for lengths in itertools.product((2, 9), repeat=3):
                requests = [
                    Request(RequestId(index), prompt, length)
                    for index, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
                ]
                comes = [Come(one, at) for one, at in zip(requests, (0, *arrivals), strict=True)]
                done = run(layout, options, comes, LedgerOptions(host=host), is_careless=True)
                assert done.counters.num_finished == 3
                assert all(done.answers[one.id] == expected_answer(one) for one in requests)
