"""The replay: a virtual clock around the real scheduler. Every request ends or is refused; every time is derived."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import EXACT, layout_of, layouts, request_of, runnable, shapes, spec_of, token_at

from kvfolio.cache.holding import BlockTable
from kvfolio.cache.ledger import LedgerOptions
from kvfolio.cache.prefix import Scope
from kvfolio.errors import OptionError
from kvfolio.planner.compute import attention_flops, weight_bytes_read, weight_flops
from kvfolio.planner.memory import CacheOptions, plan_cache
from kvfolio.sched.options import SchedulerOptions
from kvfolio.sched.request import Chunk, RequestId, Step
from kvfolio.sim.replay import Outcome, Replay, TimedRequest, replay, roofline_step_time, synthetic_requests
from kvfolio.spec.layers import FullAttention
from kvfolio.spec.layout import CacheLayout

OPTIONS = SchedulerOptions(max_context=64, max_step_tokens=8)


def one_second(step: Step) -> float:
    return 1.0


def timed(request_id: int, num_prompt: int, num_generated: int, arrival_s: float = 0.0, **more: int) -> TimedRequest:
    """A request that ends by length, unless ``max_tokens`` or ``stop`` (a position in its answer) says otherwise."""
    tokens = tuple(100 + index for index in range(num_generated))
    stops = frozenset({tokens[more["stop"]]}) if "stop" in more else frozenset()
    request = request_of(request_id, num_prompt, more.get("max_tokens", num_generated), stops)
    return TimedRequest(request, arrival_s, tokens)


def run(*requests: TimedRequest, layout: CacheLayout | None = None) -> Replay:
    return replay(layout or layout_of((None, 1)), OPTIONS, requests, one_second)


# ---- the clock ------------------------------------------------------------------------------------------------------


def test_a_lone_request_takes_a_step_for_each_chunk_of_its_prompt_and_for_each_further_token() -> None:
    # 20 prompt tokens at 8 a step: steps 1 to 3, the third yields token 1; tokens 2, 3, 4 take a step each.
    (outcome,) = run(timed(7, 20, 4, arrival_s=2.5)).outcomes
    assert outcome == Outcome(RequestId(7), 2.5, 2.5 + 3, 2.5 + 6, 4, 0, 0, "length", None)


def test_an_idle_clock_jumps_to_the_next_arrival() -> None:
    result = run(timed(0, 1, 1, arrival_s=10.0), timed(1, 1, 1, arrival_s=1e6))
    assert [outcome.finish_s for outcome in result.outcomes] == [11.0, 1e6 + 1]
    assert (result.end_s, result.counters.num_steps) == (1e6 + 1, 2)


def test_an_arrival_within_a_step_waits_for_the_next_one() -> None:
    # Steps begin at 0, 1, 2; the second request comes at 0.5 and is in the step that begins at 1.
    first, second = run(timed(0, 1, 3), timed(1, 1, 1, arrival_s=0.5)).outcomes
    assert (first.finish_s, second.first_token_s) == (3.0, 2.0)


def test_requests_are_served_by_arrival_and_listed_as_given() -> None:
    layout = layout_of((None, 1), num_open=1)  # one at a time
    result = run(timed(5, 1, 1, arrival_s=0.2), timed(9, 1, 1, arrival_s=0.1), layout=layout)
    assert [(outcome.request_id, outcome.finish_s) for outcome in result.outcomes] == [(5, 2.1), (9, 1.1)]


def test_nothing_to_serve_takes_no_time() -> None:
    result = run()
    assert (result.outcomes, result.end_s, result.counters.num_steps) == ((), 0.0, 0)


# ---- how requests end -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "end", "num_tokens"),
    [
        (timed(0, 3, 5), "length", 5),
        (timed(0, 3, 5, max_tokens=4), "length", 4),  # the fifth is never produced
        (timed(0, 3, 5, stop=1), "stop", 2),
        (timed(0, 3, 5, max_tokens=9), "left", 5),
        (timed(0, 3, 5, stop=4), "stop", 5),  # a stop at the last token is no leave
        (timed(0, 3, 1, max_tokens=9), "left", 1),
    ],
)
def test_a_request_ends_as_its_tokens_say(request_: TimedRequest, end: str, num_tokens: int) -> None:
    (outcome,) = run(request_).outcomes
    assert (outcome.end, outcome.num_tokens, outcome.refusal) == (end, num_tokens, None)
    assert outcome.finish_s == num_tokens  # a prompt of one chunk, then a token a step


def test_one_that_leaves_gives_its_blocks_back_in_the_next_step() -> None:
    # 2 blocks of 4: the first request fills one and stays one token short of the second. The other needs both.
    layout = layout_of((None, 1), rows=2, num_open=2)
    steps: list[Step] = []
    requests = [timed(0, 6, 1, max_tokens=2), timed(1, 8, 1)]
    result = replay(layout, OPTIONS, requests, one_second, steps.append)
    assert [outcome.finish_s for outcome in result.outcomes] == [1.0, 2.0]
    assert [[chunk.request_id for chunk in step.chunks] for step in steps] == [[0], [1]]
    assert [chunk.tables[0].sealed for step in steps for chunk in step.chunks] == [(0,), (1, 0)]  # 0 was cached


def test_a_request_bigger_than_the_pool_is_refused_with_the_numbers_and_the_next_one_runs() -> None:
    # ME-01: 50 blocks of 16 tokens, a request of 57 blocks, then one of 2.
    layout = layout_of((None, 1), rows=50, block_tokens=16)
    options = SchedulerOptions(max_context=4096)
    big, small = replay(layout, options, [timed(0, 57 * 16, 1), timed(1, 2 * 16, 1)], one_second).outcomes
    assert (big.end, big.first_token_s, big.finish_s, big.num_tokens) == ("refused", None, None, 0)
    assert big.refusal is not None
    assert "912 prompt tokens" in big.refusal
    assert "815 tokens" in big.refusal  # 50 * 16 sealed + 15 open
    assert (small.end, small.finish_s, small.refusal) == ("length", 1.0, None)


def test_refused_requests_are_counted_and_never_wait() -> None:
    result = run(timed(0, 0, 1), timed(1, 64, 1, arrival_s=1.0), timed(2, 1, 64, arrival_s=2.0), timed(3, 9, 9, 3.0))
    assert [outcome.end for outcome in result.outcomes] == ["refused", "refused", "refused", "length"]
    assert (result.counters.num_refused, result.counters.num_finished) == (3, 1)


def test_preemptions_are_told_apart_by_request_and_tokens_counted_once() -> None:
    # 3 blocks of 4. An answer of one token makes the scheduler expect such ones: both fit. Request 1 takes the third
    # block with its 8th token, in its step 3; request 0 needs it for its own in step 5.
    requests = [timed(9, 1, 1), timed(0, 3, 8, 1.0), timed(1, 6, 8, 1.0)]
    result = run(*requests, layout=layout_of((None, 1), rows=3, num_open=2))
    _, first, second = result.outcomes
    assert (first.num_preemptions, second.num_preemptions) == (0, 1)
    assert (first.num_tokens, second.num_tokens) == (8, 8)
    assert result.counters.num_preemptions == 1
    assert result.peak.sealed_by_group == (3,)


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("scope", [None, Scope()], ids=["private", "shared"])
def test_a_pool_that_must_preempt_ends_requests_as_one_that_never_does(scope: Scope | None, preemption: str) -> None:
    # ME-04: eight requests behind a short one; every token is counted once, however often its request starts.
    asked = [timed(9, 1, 1)] + [timed(index, 3 + index, 20 + index % 3, 1.0) for index in range(8)]
    requests = [replace(one, request=replace(one.request, scope=scope)) for one in asked]
    options = SchedulerOptions(64, 16, preemption)
    ample, tight = (
        replay(layout, options, requests, one_second, caching=LedgerOptions(host=layout))
        for layout in (layout_of((None, 1), rows=60, num_open=8), layout_of((None, 1), rows=12, num_open=8))
    )
    assert ample.counters.num_preemptions == 0 < tight.counters.num_preemptions
    twice = any(outcome.num_preemptions > 1 for outcome in tight.outcomes)
    assert twice or (scope, preemption) == (None, "recompute")  # computing again takes long enough for others to end
    for one, other in zip(ample.outcomes, tight.outcomes, strict=True):
        assert (one.num_tokens, one.end) == (other.num_tokens, other.end)
    assert ample.counters.num_prompt_tokens == tight.counters.num_prompt_tokens
    needed = sum(len(one.request.prompt) + len(one.generated) - 1 for one in requests)
    assert ample.counters.num_tokens_computed == needed
    if preemption == "swap":  # nothing is lost
        assert (tight.counters.num_tokens_computed, tight.counters.num_tokens_lost) == (needed, 0)
    elif scope is None:  # prompt and generated tokens are computed again
        assert tight.counters.num_tokens_computed == needed + tight.counters.num_tokens_lost
    else:  # but for what is still there
        assert needed < tight.counters.num_tokens_computed < needed + tight.counters.num_tokens_lost


# ---- what is refused before anything runs ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("requests", "words"),
    [
        ([timed(3, 1, 1), timed(3, 2, 2)], "request id 3 is given twice"),
        ([timed(3, 1, 0, max_tokens=1)], "request 3 has no generated tokens"),
        ([timed(3, 1, 1, -1.0)], "arrival_s is -1.0"),
        ([timed(3, 1, 1, math.nan)], "arrival_s is nan"),
        ([timed(3, 1, 1, math.inf)], "arrival_s is inf"),
    ],
)
def test_a_trace_that_cannot_be_is_refused(requests: list[TimedRequest], words: str) -> None:
    with pytest.raises(OptionError, match=words):
        run(*requests)


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_a_step_time_that_cannot_be_is_refused(seconds: float) -> None:
    with pytest.raises(OptionError, match="a step's time is"):
        replay(layout_of((None, 1)), OPTIONS, [timed(0, 1, 1)], lambda step: seconds)


# ---- random workloads -----------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(layout=layouts(), data=st.data())
def test_every_request_ends_or_is_refused_and_never_before_it_came(layout: CacheLayout, data: st.DataObject) -> None:
    requests = []
    for index in range(data.draw(st.integers(1, 6))):
        num_prompt, num_generated = data.draw(st.integers(0, 30)), data.draw(st.integers(1, 12))
        tokens = tuple(token_at(index, position) for position in range(num_generated))
        stops = frozenset({data.draw(st.integers(0, 20))})
        request = request_of(index, num_prompt, data.draw(st.integers(1, 14)), stops)
        requests.append(TimedRequest(request, data.draw(st.integers(0, 20)) / 2, tokens))
    computed = 0

    def seconds(step: Step) -> float:
        nonlocal computed
        computed += step.num_tokens
        return step.num_tokens / 4

    result = replay(layout, OPTIONS, requests, seconds)
    for one, outcome in zip(requests, result.outcomes, strict=True):
        assert outcome.request_id == one.request.id
        if outcome.end == "refused":
            assert (outcome.num_tokens, outcome.finish_s) == (0, None)
            assert outcome.refusal
            continue
        assert outcome.first_token_s is not None
        assert outcome.finish_s is not None
        assert one.arrival_s < outcome.first_token_s <= outcome.finish_s <= result.end_s
        expected = one.generated[: one.request.max_tokens]
        hits = [place for place, token in enumerate(expected) if token in one.request.stop_token_ids]
        assert outcome.num_tokens == (hits[0] + 1 if hits else len(expected))
    assert computed == result.counters.num_tokens_computed
    refused = sum(outcome.end == "refused" for outcome in result.outcomes)
    assert result.counters.num_refused == refused
    assert result.counters.num_preemptions == sum(outcome.num_preemptions for outcome in result.outcomes)
    assert replay(layout, OPTIONS, requests, lambda step: step.num_tokens / 4) == result


# ---- the roofline ---------------------------------------------------------------------------------------------------


def step_of(*chunks: tuple[int, int]) -> Step:
    """A step of (start, num_tokens) chunks."""
    tables = (BlockTable(0, (), 0),)
    parts = [Chunk(RequestId(i), start, (0,) * num, True, tables) for i, (start, num) in enumerate(chunks)]
    return Step(1, tuple(parts), (), (), (), (), ())


@settings(max_examples=100, deadline=None)
@given(chosen=shapes(), chunks=st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)), min_size=1, max_size=4))
def test_the_roofline_counts_what_the_planner_counts(
    chosen: tuple[tuple[int | None, int], ...], chunks: list[tuple[int, int]]
) -> None:
    spec = spec_of(*chosen, num_q_heads=3)
    step = step_of(*chunks)
    flops = sum(
        weight_flops(spec) + attention_flops(spec, position)
        for start, num_tokens in chunks
        for position in range(start, start + num_tokens)
    )
    num_bytes = weight_bytes_read(spec, "f32", 1)
    for group in spec.groups():
        for start, num_tokens in chunks:
            needed = {
                token
                for position in range(start, start + num_tokens)
                for token in range(group.kind.first_token_needed(position), position + 1)
            }
            num_bytes += group.num_layers * group.layer_bytes_per_token(EXACT) * len(needed)
    layout = layout_of(*chosen)
    assert roofline_step_time(spec, layout, 1e30, 2.0)(step) == flops / 2
    assert roofline_step_time(spec, layout, 4.0, 1e30)(step) == num_bytes / 4


def test_a_decode_step_reads_the_weights_once_and_each_cache_in_full() -> None:
    spec = spec_of((None, 2), (8, 3))
    layout = layout_of((None, 2), (8, 3))
    seconds = roofline_step_time(spec, layout, 1.0, 1e30)(step_of((5, 1), (30, 1)))
    assert seconds == weight_bytes_read(spec, "f32", 1) + 8 * (2 * 6 + 3 * 6 + 2 * 31 + 3 * 8)
    assert seconds == weight_bytes_read(spec, "f32", 1) + layout.bytes_read(5, 6) + layout.bytes_read(30, 31)


def test_sinks_are_read_as_they_lie_and_cost_no_arithmetic() -> None:
    layer = FullAttention(1, 16, 16)
    spec = runnable((layer, layer), spec_of((None, 1)).network, max_context=64)
    plain, sinks = (plan_cache(spec, "f32", CacheOptions(1 << 20, 4, "int8", sink_blocks=count)) for count in (0, 2))
    step, exact, stored = step_of((5, 1), (30, 3)), 2 * 128, 2 * 40  # bytes of a token in both layers
    weights = weight_bytes_read(spec, "f32", 1)
    assert roofline_step_time(spec, plain, 1.0, 1e30)(step) == weights + stored * (6 + 33)
    assert roofline_step_time(spec, sinks, 1.0, 1e30)(step) == weights + exact * (6 + 8) + stored * 25
    assert roofline_step_time(spec, sinks, 1e30, 1.0)(step) == roofline_step_time(spec, plain, 1e30, 1.0)(step)


def test_the_slower_of_memory_and_arithmetic_sets_the_pace() -> None:
    spec, step = spec_of((None, 1)), step_of((0, 4))
    layout = layout_of((None, 1))
    slow_memory, slow_rate = roofline_step_time(spec, layout, 1.0, 10.0), roofline_step_time(spec, layout, 10.0, 1.0)
    both = roofline_step_time(spec, layout, 1.0, 1.0)(step)
    assert both == max(slow_memory(step), slow_rate(step)) > min(slow_memory(step), slow_rate(step))


@pytest.mark.parametrize("rates", [(0.0, 1.0), (1.0, 0.0), (math.nan, 1.0), (1.0, -1.0)])
def test_a_machine_without_speed_is_refused(rates: tuple[float, float]) -> None:
    with pytest.raises(OptionError, match="more than 0"):
        roofline_step_time(spec_of((None, 1)), layout_of((None, 1)), *rates)


# ---- synthetic traffic ----------------------------------------------------------------------------------------------


def test_synthetic_requests_come_at_the_rate_asked_for_with_lengths_in_range() -> None:
    requests, again, others = (synthetic_requests(2000, 5.0, (3, 9), (1, 4), 50, seed) for seed in (1, 1, 2))
    assert requests == again != others
    assert [one.request.id for one in requests] == list(range(2000))
    assert all(a.arrival_s < b.arrival_s for a, b in pairwise(requests))
    assert requests[-1].arrival_s == pytest.approx(400, rel=0.1)
    assert {len(one.request.prompt) for one in requests} == set(range(3, 10))
    assert {len(one.generated) for one in requests} == {1, 2, 3, 4}
    assert all(one.request.max_tokens == len(one.generated) for one in requests)
    assert all(0 <= token < 50 for one in requests for token in one.request.prompt + one.generated)
