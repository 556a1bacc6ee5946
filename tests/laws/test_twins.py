"""Simulation = decision: the engine and the replay emit equal steps for the same requests.

The engine is the real one, on a real store; its network is a function of (request, position), its clock a counter.
Prompts begin alike, so that twins share blocks, wait for each other's, evict, keep, and swap.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import event, given, settings
from hypothesis import strategies as st
from small import layout_of, layouts, shapes_of, spec_of, token_at

from kvfolio.cache.costs import MachineCosts
from kvfolio.cache.eviction import POLICIES
from kvfolio.cache.ledger import Ledger, LedgerOptions
from kvfolio.cache.prefix import Scope
from kvfolio.engine.engine import Engine, Output
from kvfolio.engine.params import CacheParams, Retention, SamplingParams
from kvfolio.errors import RequestError
from kvfolio.planner.memory import CacheOptions, plan_cache
from kvfolio.sched.options import PREEMPTIONS, Counters, SchedulerOptions
from kvfolio.sched.request import Event, Request, RequestId, Step
from kvfolio.sched.scheduler import Scheduler
from kvfolio.sim.replay import Replay, TimedRequest, replay, roofline_step_time
from kvfolio.spec.layout import CacheLayout
from kvfolio.store.pools import CacheStore

VOCAB = 11
PLAIN = CacheParams()


@dataclass(frozen=True)
class Ask:
    """One request as a user makes it."""

    num_prompt: int
    max_tokens: int
    arrival_s: float
    stop: int = VOCAB  # a token id; VOCAB: none
    leave_after: int = 1000  # tokens after which the user has seen enough, as when a stop string is met
    own_from: int = 1000  # prompts are alike up to here
    caching: CacheParams = PLAIN

    @property
    def prompt(self) -> tuple[int, ...]:
        own = int(self.arrival_s * 2) + self.max_tokens
        return tuple((index + own * (index >= self.own_from)) % VOCAB for index in range(self.num_prompt))

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.max_tokens, stop_token_ids=(self.stop,))


class RecordingScheduler(Scheduler):
    """The scheduler, with every step kept."""

    steps: list[Step]

    def step(self, events: Iterable[Event], now_s: float | None = None) -> Step:
        step = super().step(events, now_s)
        self.steps.append(step)
        return step


class PretendedNetwork:
    """Logits from (request, position) alone; computing a step moves the clock by its step time."""

    def __init__(self, step_time: Callable[[Step], float]) -> None:
        self.now = 0.0
        self._step_time = step_time

    def run(self, step: Step) -> torch.Tensor:
        self.now += self._step_time(step)
        sampling = [chunk for chunk in step.chunks if chunk.samples]
        logits = torch.zeros(len(sampling), VOCAB)
        for row, chunk in enumerate(sampling):
            logits[row, token_at(chunk.request_id, chunk.start + len(chunk.token_ids), VOCAB)] = 1.0
        return logits


@dataclass(frozen=True)
class Served:
    """What the engine did with the requests."""

    steps: list[Step]
    requests: list[TimedRequest]  # with the tokens it produced; refused ones with one token that nobody asks for
    outputs: dict[RequestId, list[Output]]
    refusals: dict[RequestId, str]
    counters: Counters
    engine: Engine


def serve(
    layout: CacheLayout,
    options: SchedulerOptions,
    asks: Sequence[Ask],
    step_time: Callable[[Step], float],
    caching: LedgerOptions,
) -> Served:
    """Drive the engine as the LLM does: submit what has come, step, cancel what has said enough."""
    scheduler = RecordingScheduler(Ledger(layout, caching), options)
    scheduler.steps = []
    network = PretendedNetwork(step_time)
    spec = spec_of(*shapes_of(layout), vocab_size=VOCAB)
    store = CacheStore(layout, torch.device("cpu"), caching.host)
    engine = Engine(spec, scheduler, store, network, clock=lambda: network.now, fingerprint=b"x")  # type: ignore[arg-type]
    arrivals = sorted(asks, key=lambda ask: ask.arrival_s)
    asked: dict[RequestId, Ask] = {}
    refusals: dict[RequestId, str] = {}
    outputs: dict[RequestId, list[Output]] = {}
    while arrivals or engine.has_work:
        if not engine.has_work:
            network.now = max(network.now, arrivals[0].arrival_s)
        while arrivals and arrivals[0].arrival_s <= network.now:
            ask = arrivals.pop(0)
            try:
                request_id = engine.submit(ask.prompt, ask.params, ask.caching)
            except RequestError as error:
                request_id = RequestId(1000 + len(refusals))
                refusals[request_id] = str(error)
            asked[request_id] = ask
            outputs[request_id] = []
        for output in engine.step():
            outputs[output.request_id].append(output)
            if len(outputs[output.request_id]) == asked[output.request_id].leave_after:
                engine.cancel(output.request_id)
        engine.ledger.check()
    requests = [
        TimedRequest(
            Request(
                request_id,
                ask.prompt,
                ask.max_tokens,
                frozenset({ask.stop}),
                Scope(b"", ask.caching.namespace),  # another fingerprint than the engine's: no decision rests on it
                ask.caching.reuse,
                ask.caching.ranges(len(ask.prompt)),
            ),
            ask.arrival_s,
            tuple(output.sampled.token_id for output in outputs[request_id]) or (0,),
        )
        for request_id, ask in asked.items()
    ]
    return Served(scheduler.steps, requests, outputs, refusals, scheduler.counters, engine)


def assert_twins(
    layout: CacheLayout,
    options: SchedulerOptions,
    asks: Sequence[Ask],
    step_time: Callable[[Step], float] = lambda step: 1.0,
    caching: LedgerOptions | None = None,
) -> Replay:
    """Serve ``asks`` with the engine, replay them with the tokens it produced, and require equality throughout."""
    caching = caching or LedgerOptions()
    served = serve(layout, options, asks, step_time, caching)
    steps: list[Step] = []
    result = replay(layout, options, served.requests, step_time, steps.append, caching)
    if served.refusals:  # the engine refuses at its door, before a step sees the request
        assert [replace(step, refused=()) for step in steps if step.chunks] == [s for s in served.steps if s.chunks]
        assert {id_: reason for step in steps for id_, reason in step.refused} == served.refusals
    else:
        assert steps == served.steps
    assert replace_refused(result.counters) == replace_refused(served.counters)
    assert result.peak == served.engine.scheduler.peak
    for outcome in result.outcomes:
        outputs = served.outputs[outcome.request_id]
        assert outcome.num_tokens == len(outputs)
        if outputs:
            assert (outcome.first_token_s, outcome.finish_s) == (outputs[0].time_s, outputs[-1].time_s)
            assert outcome.end == (outputs[-1].finish_reason or "left")
    return result


def replace_refused(counters: Counters) -> Counters:
    return replace(counters, num_refused=0)


# ---- chosen workloads -----------------------------------------------------------------------------------------------

CROWD = [
    Ask(num_prompt=1, max_tokens=1, arrival_s=0),  # a short answer: both expect such ones, and more requests start
    Ask(num_prompt=9, max_tokens=12, arrival_s=1, own_from=0),
    Ask(num_prompt=7, max_tokens=14, arrival_s=1, own_from=0),
    Ask(num_prompt=17, max_tokens=6, arrival_s=2),
    Ask(num_prompt=3, max_tokens=20, arrival_s=3, stop=4),
    Ask(num_prompt=12, max_tokens=9, arrival_s=4, leave_after=4),
    Ask(num_prompt=1, max_tokens=15, arrival_s=60.5, leave_after=1),
]


@pytest.mark.parametrize("shapes", [[(None, 1)], [(None, 1), (6, 3)], [(3, 2), (9, 1)], [(None, 2), (5, 1), (12, 3)]])
@pytest.mark.parametrize("rows", [50, 5])
@pytest.mark.parametrize("sinks", [0, 1, 3])
def test_twins_agree_on_a_crowd_whose_pool_is_ample_or_too_small(
    shapes: list[tuple[int | None, int]], rows: int, sinks: int
) -> None:
    layout = layout_of(*shapes, rows=rows, sinks=sinks)
    result = assert_twins(layout, SchedulerOptions(max_context=64, max_step_tokens=10), CROWD)
    has_full_layers = any(window is None for window, _ in shapes)
    if rows == 50 or sinks == 0:  # the bytes of a few sinks are room for others once they are written
        assert (result.counters.num_preemptions > 0) is (rows == 5 and has_full_layers)
    assert result.counters.num_hit_tokens > 0
    assert [outcome.end for outcome in result.outcomes[5:]] == ["left", "left"]


HOST = layout_of((None, 2), (6, 1), rows=12, num_open=3)
COSTS = MachineCosts(flops_per_s=1.0, copy_bytes_per_s=50.0, flops_per_token=1.0, flops_per_read=0.1)


@pytest.mark.parametrize("eviction", ["gdsf", "s3fifo"])
@pytest.mark.parametrize("preemption", ["swap", "auto", "recompute"])
def test_twins_agree_with_everything_switched_on(eviction: str, preemption: str) -> None:
    # Twelve requests of two tenants that begin alike; some keep their blocks for a while, one reads nothing.
    keeps = (Retention(90, ttl_s=6.0, part="prompt"), Retention(10, part="decoded"))
    asks = [Ask(1, 1, 0.0)]
    for index in range(12):
        caching = CacheParams((None, "a")[index % 3 == 0], index != 7, keeps if index % 4 == 1 else ())
        asks.append(Ask(9 + index % 5, 6 + 5 * (index % 3), 1.0 + index // 3, own_from=6 + index % 4, caching=caching))
    caching = LedgerOptions(eviction, HOST, COSTS, debug=True)
    layout = layout_of((None, 2), (6, 1), rows=8, num_open=5)
    options = SchedulerOptions(max_context=64, max_step_tokens=10, preemption=preemption)
    counters = assert_twins(layout, options, asks, caching=caching).counters
    assert min(counters.num_preemptions, counters.num_hit_tokens, counters.num_waits) > 0
    assert (counters.num_swaps > 0) is (preemption != "recompute")
    assert counters.num_finished == 13


def test_twins_agree_that_memory_moves_between_groups() -> None:
    # The window group runs first and leaves warm blocks behind; the long prompt's full group then needs their bytes.
    layout = layout_of((None, 1), (4, 4), budget_bytes=1000, num_open=2)
    moves = 0

    def seconds(step: Step) -> float:
        nonlocal moves
        moves += len(step.moves)
        return 0.5

    asks = [Ask(8, 8, 0.0), Ask(8, 8, 0.0), Ask(40, 8, 3.0), Ask(6, 30, 3.0)]
    assert_twins(layout, SchedulerOptions(max_context=64, max_step_tokens=16), asks, seconds)
    assert moves > 0


def test_twins_refuse_the_same_requests_for_the_same_reasons() -> None:
    asks = [Ask(60, 2, 0), Ask(0, 1, 0), Ask(4, 2, 1), Ask(30, 1, 2), Ask(64, 1, 2), Ask(3, 70, 9), Ask(5, 3, 9)]
    result = assert_twins(layout_of((None, 1), rows=6), SchedulerOptions(max_context=64), asks)
    assert result.counters.num_refused == 5
    assert result.counters.num_finished == 2


def test_twins_agree_under_the_clock_of_a_machine() -> None:
    spec = spec_of((None, 2), (10, 1), vocab_size=VOCAB)
    layout = plan_cache(spec, "f32", CacheOptions(kv_memory=3000, block_tokens=4, max_running=4))
    step_time = roofline_step_time(spec, layout, bandwidth_bytes_per_s=9e3, flops_per_s=2e4)
    result = assert_twins(layout, SchedulerOptions(max_context=64, max_step_tokens=7), CROWD, step_time)
    assert result.end_s > 60


# ---- random workloads -----------------------------------------------------------------------------------------------


@st.composite
def crowds(draw: st.DrawFn) -> list[Ask]:
    """Requests that come within a few steps of each other, most of them small enough to be served."""
    return [
        Ask(
            num_prompt=draw(st.integers(1, 20)) if draw(st.integers(0, 9)) else draw(st.sampled_from([0, 40, 60])),
            max_tokens=draw(st.integers(1, 20)),
            arrival_s=draw(st.integers(0, 16)) / 2,
            stop=draw(st.integers(0, VOCAB + 30)),
            leave_after=draw(st.integers(1, 40)),
            own_from=draw(st.integers(0, 20)),
            caching=CacheParams(draw(st.sampled_from([None, "a"])), draw(st.booleans()), draw(retentions)),
        )
        for _ in range(draw(st.integers(2, 7)))
    ]


retentions = st.lists(
    st.builds(
        Retention,
        priority=st.integers(0, 100),
        ttl_s=st.sampled_from([None, 0.5, 3.0]),
        part=st.sampled_from(["all", "prompt", "decoded"]),
        start=st.integers(0, 6),
        pin=st.booleans(),
    ),
    max_size=2,
)


@st.composite
def cachings(draw: st.DrawFn, layout: CacheLayout) -> LedgerOptions:
    """Every policy, with and without a host pool and what is known of the machine."""
    num_blocks, num_open = draw(st.integers(1, 12)), draw(st.integers(1, 3))
    groups = tuple(replace(group, num_blocks=num_blocks, num_open_blocks=num_open) for group in layout.groups)
    host = replace(layout, groups=groups) if draw(st.booleans()) else None
    return LedgerOptions(draw(st.sampled_from(sorted(POLICIES))), host, draw(st.sampled_from([None, COSTS])))


@settings(max_examples=250, deadline=None)
@given(
    data=st.data(),
    layout=layouts(min_rows=3, min_open=2),
    crowd=crowds(),
    max_step_tokens=st.integers(1, 24),
    per_token_s=st.sampled_from([0.0, 0.125]),
    preemption=st.sampled_from(PREEMPTIONS),
)
def test_twins_agree_on_any_requests_with_any_memory(
    data: st.DataObject,
    layout: CacheLayout,
    crowd: list[Ask],
    max_step_tokens: int,
    per_token_s: float,
    preemption: str,
) -> None:
    options = SchedulerOptions(50, max_step_tokens, preemption, data.draw(st.integers(0, 3)))
    caching = data.draw(cachings(layout))
    first = Ask(1, 1, 0.0)  # a short answer: what is expected is less than what comes
    result = assert_twins(layout, options, [first, *crowd], lambda step: 1.0 + per_token_s * step.num_tokens, caching)
    event(f"preemptions: {min(result.counters.num_preemptions, 3)}, swaps: {min(result.counters.num_swaps, 1)}")
    event(f"hits: {result.counters.num_hit_tokens > 0}")
    event(f"refused: {min(result.counters.num_refused, 3)}")
