"""The scheduler, step by step: continuous batching, chunked prefill, who gives way, who is refused and why."""

import pytest
from scheduled import arrive, expect_answers_of, parts, run, scheduler_of
from small import layout_of, request_of

from kvfolio.cache.holding import SequenceId
from kvfolio.cache.lookup import NEVER_SEEN
from kvfolio.cache.prefix import TokenChain
from kvfolio.errors import InvariantError, OptionError
from kvfolio.sched.options import Counters, SchedulerOptions
from kvfolio.sched.request import Arrive, Finished, Leave, Request, RequestId, RequestState, Step
from kvfolio.sched.scheduler import Scheduler

# ---- continuous batching, chunked prefill ---------------------------------------------------------------------------


def test_a_request_runs_from_prompt_to_length() -> None:
    scheduler = scheduler_of()
    step, finished = run(scheduler, *arrive((3, 5, 3)))
    assert (step.index, parts(step), finished) == (1, [(3, 0, 5, True)], ())
    assert step.chunks[0].token_ids == (3000, 3001, 3002, 3003, 3004)
    step, finished = run(scheduler)
    assert (step.index, parts(step), step.chunks[0].token_ids, finished) == (2, [(3, 5, 1, True)], (505,), ())
    step, finished = run(scheduler)
    assert (step.chunks[0].token_ids, finished) == ((506,), (Finished(RequestId(3), "length"),))
    assert scheduler.is_idle
    assert scheduler.ledger.free_bytes == scheduler.ledger.layout.budget_bytes
    assert scheduler.counters == Counters(
        num_steps=3, num_tokens_computed=7, num_finished=1, num_prompt_tokens=5, misses={NEVER_SEEN: 1}
    )


def test_a_stop_token_ends_a_request_before_its_length() -> None:
    scheduler = scheduler_of()
    event = Arrive(request_of(0, 5, 20, stops=frozenset({506})))
    assert run(scheduler, event)[1] == ()
    assert run(scheduler)[1] == (Finished(RequestId(0), "stop"),)
    assert scheduler.is_idle


def test_a_long_prompt_is_cut_into_chunks_and_only_the_last_one_samples() -> None:
    scheduler = scheduler_of(max_step_tokens=8)
    assert parts(run(scheduler, *arrive((0, 20, 2)))[0]) == [(0, 0, 8, False)]
    assert parts(run(scheduler)[0]) == [(0, 8, 8, False)]
    assert parts(run(scheduler)[0]) == [(0, 16, 4, True)]
    assert parts(run(scheduler)[0]) == [(0, 20, 1, True)]


def test_a_newcomer_joins_those_who_run() -> None:
    scheduler = scheduler_of()
    run(scheduler, *arrive((0, 3, 9)))
    assert parts(run(scheduler, *arrive((1, 4, 9)))[0]) == [(0, 3, 1, True), (1, 0, 4, True)]
    assert parts(run(scheduler)[0]) == [(0, 4, 1, True), (1, 4, 1, True)]


def test_decodes_come_before_prefills_however_long_the_prompt() -> None:
    scheduler = scheduler_of(layout_of((None, 1), rows=20))
    run(scheduler, *arrive((0, 30, 2)))  # the older one has a long prompt: 8 tokens a step
    # Of 8 tokens the older prompt takes all; the newcomer waits, for it would get none.
    assert parts(run(scheduler, *arrive((1, 2, 9)))[0]) == [(0, 8, 8, False)]
    run(scheduler)
    # The prompt's last 6 leave 2 for the newcomer. Then both decode, and a third one's prompt has the rest.
    assert parts(run(scheduler)[0]) == [(0, 24, 6, True), (1, 0, 2, True)]
    assert parts(run(scheduler, *arrive((2, 20, 1)))[0]) == [(0, 30, 1, True), (1, 2, 1, True), (2, 0, 6, False)]
    assert parts(run(scheduler)[0]) == [(1, 3, 1, True), (2, 6, 7, False)]


def test_an_older_prompt_gets_what_newer_decodes_leave() -> None:
    scheduler = scheduler_of(layout_of((None, 1), rows=20), max_step_tokens=8)
    run(scheduler, *arrive((0, 9, 3)))
    # One token is left of the prompt: it counts as a decode and comes first.
    assert parts(run(scheduler, *arrive((1, 7, 9)))[0]) == [(0, 8, 1, True), (1, 0, 7, True)]
    scheduler = scheduler_of(layout_of((None, 1), rows=20), max_step_tokens=4)
    run(scheduler, *arrive((0, 2, 3), (1, 2, 9)))
    run(scheduler, *arrive((2, 20, 1)))  # 2 decodes and 2 of the prompt
    assert parts(run(scheduler)[0]) == [(0, 3, 1, True), (1, 3, 1, True), (2, 2, 2, False)]
    assert parts(run(scheduler)[0]) == [(1, 4, 1, True), (2, 4, 3, False)]


def test_requests_start_in_the_order_they_came_and_a_small_one_does_not_overtake() -> None:
    scheduler = scheduler_of(layout_of((None, 1), rows=6, num_open=4))
    run(scheduler, *arrive((0, 8, 9)))
    # 4 of 6 blocks are free. The second needs 5; the third would fit, and waits behind it.
    step, _ = run(scheduler, *arrive((1, 20, 1), (2, 1, 1)))
    assert parts(step) == [(0, 8, 1, True)]
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 2)
    run(scheduler, Leave(RequestId(0)))
    assert scheduler.num_running == 1
    firsts = [chunk.request_id for _ in range(3) for chunk in run(scheduler)[0].chunks if chunk.start == 0]
    assert firsts == [2]


def test_no_more_run_at_once_than_there_are_open_blocks() -> None:
    scheduler = scheduler_of(layout_of((None, 1), num_open=2))
    step, _ = run(scheduler, *arrive((0, 1, 2), (1, 1, 2), (2, 1, 2)))
    assert [chunk.request_id for chunk in step.chunks] == [0, 1]
    step, finished = run(scheduler)
    assert [end.request_id for end in finished] == [0, 1]
    assert [chunk.request_id for chunk in run(scheduler)[0].chunks] == [2]


def test_a_newcomer_does_not_slip_past_one_that_waits_for_a_block() -> None:
    # 3 blocks, all held after step 3; in step 6 request 1 waits for one. Request 2 would need none to start.
    scheduler = scheduler_of(layout_of((None, 1), rows=3), max_step_tokens=16)
    expect_answers_of(scheduler, 1)
    run(scheduler, *arrive((0, 6, 6), (1, 3, 6)))
    for _ in range(4):
        assert [chunk.request_id for chunk in run(scheduler)[0].chunks] == [0, 1]
    step, _ = run(scheduler, *arrive((2, 1, 1)))
    assert (parts(step), step.preempted) == ([(0, 10, 1, True)], ())
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)  # request 0 has ended


def test_an_empty_step_means_there_is_nothing_to_do() -> None:
    scheduler = scheduler_of()
    assert scheduler.step([]) == Step(0, (), (), (), (), (), ())
    assert (scheduler.is_idle, scheduler.counters) == (True, Counters())


# ---- what can never be served ---------------------------------------------------------------------------------------


def refusal(request: Request, scheduler: Scheduler) -> str:
    """The refusal, asked for and as an event: both say the same, and nothing waits."""
    asked = scheduler.refusal(request)
    step = scheduler.step([Arrive(request)])
    assert step.refused == (((request.id, asked),) if asked is not None else ())
    assert asked is not None
    assert scheduler.is_idle
    assert scheduler.counters == Counters(num_refused=1)
    return asked


def test_a_request_larger_than_the_pool_is_refused_with_the_numbers_and_the_one_behind_it_runs() -> None:
    # ME-01: 50 blocks of 16 tokens, a request of 57 blocks, then one of 2. A token takes 8 bytes.
    scheduler = scheduler_of(layout_of((None, 1), rows=50, block_tokens=16), max_context=4096, max_step_tokens=64)
    step, finished = run(scheduler, *arrive((0, 57 * 16, 1), (1, 2 * 16, 1)))
    assert step.refused == (
        (
            RequestId(0),
            "912 prompt tokens + max_tokens 1 need 7.12 KiB of cache; the pool has 6.25 KiB, which holds 815 tokens: "
            "kv_memory of 10KiB is enough, or ask for fewer tokens",
        ),
    )
    assert finished == (Finished(RequestId(1), "length"),)


@pytest.mark.parametrize(("num_prompt", "max_tokens"), [(51, 1), (50, 2), (1, 51), (26, 26)])
def test_the_largest_request_that_fits_is_served_and_one_token_more_is_not(num_prompt: int, max_tokens: int) -> None:
    # 12 sealed blocks of 4 and 3 open tokens hold 51; the last token sampled is never read back and needs no place.
    layout = layout_of((None, 1), rows=12, num_open=1)
    scheduler = scheduler_of(layout)
    request = request_of(0, num_prompt, max_tokens)
    assert request.max_cached_tokens == 51
    assert scheduler.refusal(request) is None
    steps = [run(scheduler, Arrive(request))[0]]
    while not scheduler.is_idle and len(steps) < 99:
        steps.append(run(scheduler)[0])
    step = steps[-1]
    assert step.chunks[-1].start + len(step.chunks[-1].token_ids) == 51
    assert scheduler.counters.num_preemptions == 0
    for larger in (request_of(0, num_prompt + 1, max_tokens), request_of(0, num_prompt, max_tokens + 1)):
        assert "holds 51 tokens" in refusal(larger, scheduler_of(layout))


def test_what_is_usable_is_what_is_checked_at_the_size_of_a_large_pool() -> None:
    # ME-01: 13 blocks of 8,192 tokens, the last of them open: 12 sealed ones and 8,191 tokens.
    layout = layout_of((None, 1), rows=12, block_tokens=8192, num_open=1)
    scheduler = scheduler_of(layout, max_context=106_497, max_step_tokens=1 << 17)
    assert layout.longest_sequence(10**6) == 106_495
    for num_prompt, max_tokens in ((98_304, 1), (98_304, 8192), (106_495, 1)):
        assert scheduler.refusal(request_of(0, num_prompt, max_tokens)) is None
    for num_prompt, max_tokens in ((98_304, 8193), (106_495, 2), (106_496, 1)):
        assert "holds 106,495 tokens" in (scheduler.refusal(request_of(0, num_prompt, max_tokens)) or "")
    step, finished = run(scheduler, *arrive((0, 106_495, 1), (1, 106_496, 1)))
    assert ([one for one, _ in step.refused], [end.request_id for end in finished]) == ([1], [0])


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens", "words"),
    [
        (0, 1, "the prompt is empty: it needs at least 1 token"),
        (1, 0, "max_tokens is 0; ask for at least 1"),
        (1, -3, "max_tokens is -3; ask for at least 1"),
        (
            64,
            1,
            "the prompt has 64 tokens; the model's context is 64, one for the answer: shorten the prompt to at most 63",
        ),
        (1000, 1, "shorten the prompt to at most 63"),
        (60, 5, "60 prompt tokens + max_tokens 5 exceed the model's context of 64: ask for at most 4"),
        (1, 1000, "1 prompt tokens + max_tokens 1,000 exceed the model's context of 64: ask for at most 63"),
    ],
)
def test_what_can_never_be_served_is_refused_with_the_way_out(num_prompt: int, max_tokens: int, words: str) -> None:
    assert words in refusal(request_of(0, num_prompt, max_tokens), scheduler_of(layout_of((None, 1), rows=99)))


def test_the_whole_context_can_be_used() -> None:
    scheduler = scheduler_of(layout_of((None, 1), rows=16))
    for num_prompt, max_tokens in ((63, 1), (1, 63), (32, 32)):
        assert scheduler.refusal(request_of(0, num_prompt, max_tokens)) is None


def test_a_window_lets_a_request_fit_that_full_layers_would_not() -> None:
    request = request_of(0, 50, 9)
    assert scheduler_of(layout_of((None, 1), rows=4)).refusal(request) is not None
    scheduler = scheduler_of(layout_of((6, 1), rows=4))
    assert scheduler.refusal(request) is None
    run(scheduler, Arrive(request))
    for _ in range(50):
        run(scheduler)
    assert (scheduler.is_idle, scheduler.counters.num_preemptions) == (True, 0)


@pytest.mark.parametrize(("max_context", "max_step_tokens"), [(0, 1), (1, 0), (-1, -1)])
def test_options_out_of_range_are_refused(max_context: int, max_step_tokens: int) -> None:
    with pytest.raises(OptionError, match="both must be at least 1"):
        SchedulerOptions(max_context, max_step_tokens)


# ---- leaving --------------------------------------------------------------------------------------------------------


def test_a_running_request_that_leaves_is_gone_from_the_next_step_and_its_blocks_are_free() -> None:
    scheduler = scheduler_of()
    run(scheduler, *arrive((0, 6, 9), (1, 2, 9)))
    step, _ = run(scheduler, Leave(RequestId(0)))
    assert [chunk.request_id for chunk in step.chunks] == [1]
    assert scheduler.ledger.usage().sealed_by_group == (0,)
    run(scheduler, Leave(RequestId(1)))
    assert scheduler.is_idle
    assert scheduler.ledger.free_bytes == scheduler.ledger.layout.budget_bytes


def test_a_request_that_leaves_in_the_middle_of_its_prompt_frees_what_it_had() -> None:
    scheduler = scheduler_of()
    run(scheduler, *arrive((0, 20, 9)))
    assert run(scheduler, Leave(RequestId(0)))[0].chunks == ()
    assert scheduler.is_idle
    assert scheduler.ledger.usage().num_blocks_used == 0


def test_a_waiting_request_that_leaves_never_runs() -> None:
    scheduler = scheduler_of(layout_of((None, 1), num_open=1))
    run(scheduler, *arrive((0, 1, 2), (1, 1, 2), (2, 1, 2)))
    run(scheduler, Leave(RequestId(1)))
    assert [chunk.request_id for chunk in run(scheduler)[0].chunks] == [2]


def test_a_request_that_comes_and_leaves_at_once_never_runs() -> None:
    scheduler = scheduler_of()
    assert run(scheduler, *arrive((0, 1, 2)), Leave(RequestId(0)))[0].chunks == ()
    assert scheduler.is_idle


def test_a_preempted_request_that_leaves_does_not_come_back() -> None:
    scheduler = scheduler_of(layout_of((None, 1), rows=4))
    run(scheduler, *arrive((0, 4, 9), (1, 4, 9)))
    preempted = [run(scheduler)[0].preempted for _ in range(8)]
    assert preempted[-1] == (1,)
    run(scheduler, Leave(RequestId(1)))
    assert scheduler.is_idle


def test_one_that_nobody_knows_or_that_has_ended_may_leave() -> None:
    scheduler = scheduler_of()
    run(scheduler, *arrive((0, 1, 1)))
    step, _ = run(scheduler, Leave(RequestId(0)), Leave(RequestId(77)), *arrive((1, 1, 1)))
    assert [chunk.request_id for chunk in step.chunks] == [1]


def test_events_can_be_booked_without_a_step() -> None:
    scheduler = scheduler_of()
    run(scheduler, *arrive((0, 6, 9)))
    refused = scheduler.take_in([Leave(RequestId(0)), *arrive((1, 0, 1), (2, 1, 1))])
    assert [request_id for request_id, _ in refused] == [1]
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 1)
    assert scheduler.ledger.usage().num_blocks_used == 0
    scheduler.ledger.check()


# ---- what a state knows ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "stop", "expected"),
    [(0, 3, (0, 1, 2)), (1, 5, (1, 2, 7, 8)), (3, 6, (7, 8, 9)), (5, 6, (9,)), (0, 6, (0, 1, 2, 7, 8, 9)), (4, 4, ())],
)
def test_known_tokens_are_the_prompt_and_then_what_was_generated(
    start: int, stop: int, expected: tuple[int, ...]
) -> None:
    state = RequestState(request_of(0, 3, 9), 0, TokenChain((0, 1, 2), None, 4))
    for token in (7, 8, 9):
        state.chain.append(token)
    assert tuple(state.chain.token_ids[start:stop]) == expected
    assert (state.num_known, state.num_generated, state.max_left) == (6, 3, 6)


def test_a_scheduler_that_could_run_nothing_would_say_so_with_the_numbers() -> None:
    scheduler = scheduler_of(layout_of((None, 1), num_open=1))
    scheduler.ledger.admit(SequenceId(9))  # behind the scheduler's back
    with pytest.raises(InvariantError, match="0 running, 1 waiting, 320 bytes free, 0 open slots free"):
        scheduler.step(arrive((0, 1, 1)))
