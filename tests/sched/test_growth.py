"""Admission by predicted growth: what is expected of answers, in exact numbers, and who starts because of it."""

import pytest
from scheduled import arrive, drain, expect_answers_of, parts, run, scheduler_of
from small import layout_of, request_of

from kvfolio.cache.prefix import TokenChain
from kvfolio.sched.growth import FIRST_GUESS, GrowthForecast
from kvfolio.sched.request import Arrive, Leave, Request, RequestId, RequestState


def state_of(num_prompt: int, max_tokens: int, num_generated: int = 0, block_tokens: int = 4) -> RequestState:
    request = request_of(0, num_prompt, max_tokens)
    state = RequestState(request, 0, TokenChain(request.prompt, None, block_tokens))
    for token in range(num_generated):
        state.chain.append(token)
    return state


def forecast_after(*answers: int) -> GrowthForecast:
    forecast = GrowthForecast()
    for num_generated in answers:
        forecast.learn(num_generated)
    return forecast


# ---- the forecast ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "num_generated", "expected"),
    [
        (100, 40, 0, 120),  # half of what it may generate
        (100, 41, 0, 120),  # 20.5 is rounded to even
        (100, 43, 0, 122),
        (100, 5000, 0, 100 + FIRST_GUESS),
        (100, 5000, 255, 355 + 4),  # a block, where less is expected
        (100, 5000, 300, 400 + 4),
        (100, 40, 19, 119 + 4),
        (100, 40, 39, 139),  # all it can ever hold: the last token is never read back
        (100, 1, 0, 100),
    ],
)
def test_before_the_first_answer_has_ended_half_of_what_is_asked_for_is_expected_and_256_at_most(
    num_prompt: int, max_tokens: int, num_generated: int, expected: int
) -> None:
    assert forecast_after().num_tokens(state_of(num_prompt, max_tokens, num_generated)) == expected


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ((30,), 130),
        ((30, 30, 30), 130),
        ((16, 32), 100 + 17),  # 16 + 16 / 16
        ((16, 32, 0), 100 + 16),  # 17 - 17 / 16 = 15.94
        ((1,), 100 + 4),  # a block at least
        ((1000,), 100 + 199),  # never more than it can hold
    ],
)
def test_then_the_running_mean_of_the_answers_is(answers: tuple[int, ...], expected: int) -> None:
    assert forecast_after(*answers).num_tokens(state_of(100, 200)) == expected


def test_one_that_has_outgrown_the_mean_is_expected_to_go_on_for_a_block() -> None:
    forecast = forecast_after(10)
    sizes = [forecast.num_tokens(state_of(100, 200, num_generated)) for num_generated in (0, 5, 6, 7, 50, 197, 199)]
    assert sizes == [110, 110, 110, 111, 154, 299, 299]
    assert forecast.num_tokens(state_of(100, 200, 50, block_tokens=16)) == 166


# ---- who starts -----------------------------------------------------------------------------------------------------


def test_requests_start_beside_each_other_when_what_is_expected_of_them_fits_though_their_worst_does_not() -> None:
    # 4 prompt tokens and half of 8: 2 blocks each, 3 at worst. 6 blocks hold three by the first guess.
    scheduler = scheduler_of(layout_of((None, 1), rows=6, num_open=8), max_step_tokens=64)
    step, _ = run(scheduler, *arrive((0, 4, 9), (1, 4, 9), (2, 4, 9), (3, 4, 9)))
    assert [one.request_id for one in step.admitted] == [0, 1, 2]
    assert sorted(drain(scheduler).finished) == [0, 1, 2, 3]
    assert scheduler.counters.num_preemptions == 1  # the guess was too low


def test_what_running_ones_are_still_expected_to_need_is_kept_for_them() -> None:
    scheduler = scheduler_of(layout_of((None, 1), rows=6, num_open=8), max_step_tokens=64)
    run(scheduler, *arrive((0, 4, 24)))  # 4 + 12 tokens: 4 blocks, of which it holds one
    assert scheduler.ledger.usage().sealed_by_group == (1,)
    step, _ = run(scheduler, *arrive((1, 4, 1), (2, 4, 1), (3, 4, 1)))
    assert [one.request_id for one in step.admitted] == [1, 2]  # a block each; the last one waits
    step, _ = run(scheduler)
    assert [one.request_id for one in step.admitted] == [3]


def test_short_answers_let_more_requests_start() -> None:
    for num_generated, num_started in ((None, 2), (1, 3)):  # 4 + 10 tokens are 3 blocks, 4 + 4 are 2
        scheduler = scheduler_of(layout_of((None, 1), rows=6, num_open=8), max_step_tokens=64)
        if num_generated is not None:
            expect_answers_of(scheduler, num_generated)
        step, _ = run(scheduler, *arrive((0, 4, 20), (1, 4, 20), (2, 4, 20), (3, 4, 20)))
        assert len(step.admitted) == num_started


def test_answers_that_ended_from_outside_are_learned_from_too_if_there_is_one() -> None:
    scheduler = scheduler_of(layout_of((None, 1), rows=6, num_open=8), max_step_tokens=64)
    run(scheduler, *arrive((0, 4, 20)))
    step, _ = run(scheduler, Leave(RequestId(0)), *arrive((1, 4, 20), (2, 4, 20), (3, 4, 20)))
    assert [one.request_id for one in step.admitted] == [1, 2, 3]
    scheduler = scheduler_of(layout_of((None, 1), rows=6, num_open=8), max_step_tokens=2)
    run(scheduler, *arrive((0, 4, 20)))  # two of its prompt tokens
    run(scheduler, Leave(RequestId(0)))
    scheduler.options = scheduler_of(max_step_tokens=64).options
    step, _ = run(scheduler, *arrive((1, 4, 20), (2, 4, 20), (3, 4, 20)))
    assert [one.request_id for one in step.admitted] == [1, 2]


def test_blocks_that_others_hold_need_no_room() -> None:
    # 5 blocks. Request 0 holds 4 and needs no more; request 1 is the same prompt and one answer of its own.
    scheduler = scheduler_of(layout_of((None, 1), rows=5), max_step_tokens=64)
    run(scheduler, *arrive((0, 16, 2)))
    same = Request(RequestId(1), request_of(0, 16, 1).prompt, 2)
    step, _ = run(scheduler, Arrive(same), *arrive((2, 8, 1)))
    # Of the prompt 15 tokens are there: 3 blocks shared and 3 tokens copied.
    assert parts(step) == [(0, 16, 1, True), (1, 15, 1, True)]
    assert step.chunks[1].tables[0].sealed[:3] == (0, 1, 2)


def test_blocks_that_are_only_cached_need_room_like_new_ones() -> None:
    scheduler = scheduler_of(layout_of((None, 1), rows=5), max_step_tokens=64)
    drain(scheduler, arrive((0, 16, 1)))
    run(scheduler, *arrive((1, 7, 9)))  # 2 blocks are expected, one is held
    assert scheduler.ledger.usage().cached_by_group == (4,)
    same = Request(RequestId(2), request_of(0, 16, 1).prompt, 1)
    assert parts(run(scheduler, Arrive(same))[0]) == [(1, 7, 1, True)]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)


def test_a_window_group_is_expected_to_hold_its_window() -> None:
    # Two windows of 8 tokens: 2 blocks each, whatever the length. A full layer would need 12.
    scheduler = scheduler_of(layout_of((8, 1), rows=4), max_step_tokens=64)
    step, _ = run(scheduler, *arrive((0, 7, 40), (1, 7, 40), (2, 7, 1)))
    assert [one.request_id for one in step.admitted] == [0, 1]
