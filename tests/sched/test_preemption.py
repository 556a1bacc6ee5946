"""Who gives up blocks for whom, whether they are copied or computed again, and what is counted. Exact ids and moves.

Knows nothing of tensors: whether answers stay the same is for ``tests/laws``.
"""

from dataclasses import replace

import pytest
from scheduled import arrive, drain, expect_answers_of, parts, run, scheduler_of
from small import Shape, layout_of, request_of

from kvfolio.cache.costs import MachineCosts
from kvfolio.cache.ledger import LedgerOptions
from kvfolio.cache.moves import SwapIn, SwapOpenIn, SwapOpenOut, SwapOut
from kvfolio.errors import OptionError
from kvfolio.sched.options import Counters, SchedulerOptions
from kvfolio.sched.request import Arrive, Finished, Leave, Request, RequestId
from kvfolio.sched.scheduler import Scheduler

FULL: Shape = (None, 1)


def pair_on_four_blocks(caching: LedgerOptions | None = None, rows: int = 4, **options: object) -> Scheduler:
    """Requests 0 and 1 of 4 prompt tokens and 9 to generate, after eight steps in which both came to 11 tokens.

    Blocks 0 to 3 are all held, two each. In the next step request 0 needs a third for its 12th token.
    """
    scheduler = scheduler_of(layout_of(FULL, rows=rows), caching=caching, **options)
    expect_answers_of(scheduler, 1)  # so that both are admitted
    for events in (arrive((0, 4, 9), (1, 4, 9)), *([],) * 7):
        assert [chunk.request_id for chunk in run(scheduler, *events)[0].chunks] == [0, 1]
    assert [scheduler.ledger._holdings[id_].sealed for id_ in (0, 1)] == [[[0, 2]], [[1, 3]]]
    assert [scheduler.ledger.num_tokens(id_) for id_ in (0, 1)] == [11, 11]
    return scheduler


def host(rows: int = 4, num_open: int = 2, costs: MachineCosts | None = None) -> LedgerOptions:
    return LedgerOptions(host=layout_of(FULL, rows=rows, num_open=num_open), costs=costs)


# ---- who ------------------------------------------------------------------------------------------------------------


def test_the_newest_gives_way_keeps_its_tokens_and_comes_back_before_later_ones() -> None:
    scheduler = scheduler_of(layout_of(FULL, rows=4))
    expect_answers_of(scheduler, 1)
    private = [Arrive(replace(request_of(id_, 4, 9), scope=None)) for id_ in (0, 1)]
    for events in (private, *([],) * 7):
        run(scheduler, *events)
    assert scheduler.ledger.free_bytes == 0
    step, finished = run(scheduler, *arrive((2, 1, 1)))
    assert (parts(step), step.preempted, step.swapped) == ([(0, 11, 1, True)], (1,), ())
    assert finished == (Finished(RequestId(0), "length"),)
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 2)
    # Request 1 has its prompt and 8 generated tokens to compute again, before anyone who came later.
    step, _ = run(scheduler)
    assert parts(step) == [(1, 0, 8, False)]
    assert step.chunks[0].token_ids == (1000, 1001, 1002, 1003, 504, 505, 506, 507)
    assert [(one.num_hit_tokens, one.num_preemptions, one.was_swapped) for one in step.admitted] == [(0, 1, False)]
    step, finished = run(scheduler)
    assert parts(step) == [(1, 8, 4, True), (2, 0, 1, True)]
    assert step.chunks[0].token_ids == (508, 509, 510, 511)
    assert finished == (Finished(RequestId(1), "length"), Finished(RequestId(2), "length"))
    assert scheduler.counters == Counters(
        num_steps=1 + 11,
        num_tokens_computed=1 + 12 + 11 + 12 + 1,
        num_preemptions=1,
        num_tokens_lost=11,
        num_finished=4,
        num_prompt_tokens=1 + 4 + 4 + 1,  # a second start adds none
        misses={"prefix cache off": 2},
    )


def test_one_that_shares_its_blocks_finds_those_that_are_left_of_them() -> None:
    scheduler = pair_on_four_blocks()
    step, _ = run(scheduler)
    assert (step.preempted, step.chunks[0].tables[0].sealed) == ((1,), (0, 2, 3))  # its last block went first
    step, _ = run(scheduler)
    assert parts(step) == [(1, 4, 8, True)]
    (admission,) = step.admitted
    assert (admission.num_hit_tokens, admission.group_tokens) == (4, (4,))
    assert admission.miss is not None
    assert (admission.miss.reason, admission.miss.position) == ("evicted", 4)
    assert step.chunks[0].tables[0].sealed[0] == 1
    assert scheduler.counters.num_tokens_computed == 1 + 12 + 11 + 8


def test_one_that_is_newest_itself_waits_instead_of_giving_way() -> None:
    scheduler = scheduler_of(layout_of(FULL, rows=3), max_step_tokens=16)
    expect_answers_of(scheduler, 1)
    run(scheduler, *arrive((0, 6, 6), (1, 3, 6)))
    for _ in range(4):
        assert [chunk.request_id for chunk in run(scheduler)[0].chunks] == [0, 1]
    step, finished = run(scheduler)  # request 1 needs a second block for its 8th token, and there are three
    assert (parts(step), step.preempted) == ([(0, 10, 1, True)], ())
    assert finished == (Finished(RequestId(0), "length"),)
    assert parts(run(scheduler)[0]) == [(1, 7, 1, True)]  # it goes on where it stood
    assert scheduler.counters.num_preemptions == 0


def test_several_give_way_the_newest_first_until_the_older_one_can_move() -> None:
    # Requests 1 and 2 are alike and share their full blocks: only the last holder frees them.
    scheduler = scheduler_of(layout_of(FULL, rows=5))
    expect_answers_of(scheduler, 1)
    alike = [Arrive(Request(RequestId(id_), (7, 7, 7, 7, 7), 16)) for id_ in (1, 2)]
    run(scheduler, *arrive((0, 3, 16)), *alike)
    steps = [run(scheduler)[0] for _ in range(9)]
    # Step 9: request 2 wants a block for its 12th token; it may not take one from 1, who is older, and waits.
    assert [chunk.request_id for chunk in steps[-2].chunks] == [0, 1]
    # Step 10: request 0 wants one for its own 12th; what 2 holds 1 holds as well.
    assert [step.preempted for step in steps] == [()] * 8 + [(2, 1)]
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.ledger.free_bytes) == (1, 2, 2 * 32)
    assert sorted(drain(scheduler).finished) == [0, 1, 2]


def test_a_chunk_of_the_same_step_is_taken_back_when_an_older_one_cannot_move() -> None:
    # Request 1 waits for 0, and 2 passes it. When 1 starts, 2 is expected to need one block; it grows beyond that.
    scheduler = scheduler_of(layout_of(FULL, rows=11))
    first, elder = Request(RequestId(0), (7, 7, 7, 7), 1), Request(RequestId(1), (7, 7, 7, 7, *range(37)), 1)
    step, _ = run(scheduler, Arrive(first), Arrive(elder), *arrive((2, 2, 10)))
    assert parts(step) == [(0, 0, 4, True), (2, 0, 2, True)]
    steps = [run(scheduler)[0] for _ in range(5)]
    assert [parts(step) for step in steps] == [[(2, 2 + i, 1, True), (1, 4 + 7 * i, 7, False)] for i in range(5)]
    # Now 1 has 39 tokens and 9 blocks, 2 has 7 and one. Decodes come first: 2 gets the last block for its 8th token.
    # Then 1 cannot move, and takes it.
    step, _ = run(scheduler)
    assert (parts(step), step.preempted) == ([(1, 39, 2, True)], (2,))
    assert scheduler.counters.num_tokens_computed == 4 + 37 + 7  # not the 8th token of request 2
    assert scheduler.counters.num_tokens_lost == 7


def test_nobody_is_admitted_in_a_step_that_preempts() -> None:
    # Split pools: the full group's 4 blocks run out while the window's bytes would let request 1 in again at once.
    scheduler = scheduler_of(layout_of(FULL, (4, 1), budget_bytes=12 * 32, counts=(4, 8)))
    expect_answers_of(scheduler, 1)
    run(scheduler, *arrive((0, 4, 9), (1, 4, 9)))
    for _ in range(7):
        run(scheduler)
    step, _ = run(scheduler, *arrive((2, 1, 9)))
    assert step.preempted == (1,)
    assert [chunk.request_id for chunk in step.chunks] == [0]
    assert next(chunk.request_id for chunk in run(scheduler)[0].chunks) == 1


# ---- protection -----------------------------------------------------------------------------------------------------


def test_with_no_preemptions_allowed_everybody_is_admitted_for_the_worst_and_nobody_gives_way() -> None:
    # Each of 3 blocks in the end: two fit on six, the third waits though nothing of it is held yet.
    scheduler = scheduler_of(layout_of(FULL, rows=6), max_preemptions=0)
    step, _ = run(scheduler, *arrive((0, 2, 11), (1, 2, 11), (2, 2, 11)))
    assert [chunk.request_id for chunk in step.chunks] == [0, 1]
    assert scheduler.ledger.usage().sealed_by_group == (0,)
    assert drain(scheduler).finished == [0, 1, 2]
    assert scheduler.counters.num_preemptions == 0


def test_a_protected_request_starts_with_room_for_all_and_takes_from_an_older_one_that_is_not() -> None:
    # 12 blocks. Request 2 ends with 6 of them, private ones, so that it is slow to compute them again.
    scheduler = scheduler_of(layout_of(FULL, rows=12), max_step_tokens=3, max_preemptions=1)
    expect_answers_of(scheduler, 1)
    run(scheduler, *arrive((0, 4, 40), (1, 4, 40)), Arrive(replace(request_of(2, 4, 21), scope=None)))
    steps = [run(scheduler)[0] for _ in range(18)]
    assert [step.preempted for step in steps] == [()] * 17 + [(2,)]
    # Request 1 has 5 blocks and is expected to need another: 6 are free for 2 when 0 has gone.
    step, _ = run(scheduler, Leave(RequestId(0)))
    assert parts(step) == [(1, 20, 1, True), (2, 0, 2, False)]
    steps = [run(scheduler)[0] for _ in range(11)]
    assert [step.preempted for step in steps] == [()] * 10 + [(1,)]  # it has grown beyond what was expected
    assert parts(steps[-1]) == [(2, 19, 1, True)]
    assert drain(scheduler).finished == [2, 1]
    assert scheduler.counters.num_preemptions == 2


def test_a_protected_request_waits_for_room_for_all_it_may_need() -> None:
    # As above, but request 2 ends with 7: by what is expected of it it would start, by what it may need it does not.
    scheduler = scheduler_of(layout_of(FULL, rows=12), max_step_tokens=3, max_preemptions=1)
    expect_answers_of(scheduler, 1)
    run(scheduler, *arrive((0, 4, 40), (1, 4, 40)), Arrive(replace(request_of(2, 4, 25), scope=None)))
    for _ in range(18):
        run(scheduler)
    assert parts(run(scheduler, Leave(RequestId(0)))[0]) == [(1, 20, 1, True)]
    scheduler.options = replace(scheduler.options, max_preemptions=2)
    assert parts(run(scheduler)[0]) == [(1, 21, 1, True), (2, 0, 2, False)]


def test_nobody_takes_from_a_protected_request_not_even_an_older_one() -> None:
    # As above with 13 blocks: 2 starts again in step 23, and in step 35 the older 1 finds none for its 36th token.
    scheduler = scheduler_of(layout_of(FULL, rows=13), max_step_tokens=3, max_preemptions=1)
    expect_answers_of(scheduler, 1)
    run(scheduler, *arrive((0, 4, 40), (1, 4, 40)), Arrive(replace(request_of(2, 4, 21), scope=None)))
    steps = [run(scheduler)[0] for _ in range(21)]
    assert [step.preempted for step in steps] == [()] * 20 + [(2,)]
    run(scheduler, Leave(RequestId(0)))
    for _ in range(11):
        run(scheduler)
    step, _ = run(scheduler)
    assert (parts(step), step.preempted, scheduler.num_running) == ([(2, 20, 1, True)], (), 2)


# ---- how: copied or computed again ----------------------------------------------------------------------------------


def test_swapped_blocks_go_to_the_host_pool_before_they_are_taken_and_come_back_before_they_are_read() -> None:
    scheduler = pair_on_four_blocks(host(), preemption="swap")
    step, _ = run(scheduler)
    assert (step.preempted, step.swapped) == ((1,), (1,))
    assert step.moves == (SwapOpenOut(2, 0), SwapOut(0, 1, 0), SwapOut(0, 3, 1))
    assert step.chunks[0].tables[0].sealed == (0, 2, 3)  # block 3 is overwritten in this step
    assert scheduler.ledger.usage().host_bytes == 3 * 32
    step, finished = run(scheduler)
    # Block 1 is still on the device and is shared; only the other one is copied, and the open one.
    open_slot = step.chunks[0].tables[0].open_slot
    (_, copied) = step.chunks[0].tables[0].sealed[:2]
    assert step.moves == (SwapOpenIn(0, open_slot), SwapIn(0, 1, copied))
    assert parts(step) == [(1, 11, 1, True)]  # nothing is computed twice
    assert step.chunks[0].tables[0].sealed[0] == 1
    (admission,) = step.admitted
    assert (admission.num_hit_tokens, admission.miss, admission.was_swapped) == (11, None, True)
    assert finished == (Finished(RequestId(1), "length"),)
    assert scheduler.ledger.usage().host_bytes == 0
    counters = scheduler.counters
    assert (counters.num_preemptions, counters.num_swaps, counters.num_swaps_refused) == (1, 1, 0)
    assert (counters.num_tokens_lost, counters.num_tokens_computed) == (0, 1 + 12 + 12)


def test_a_private_request_swaps_too_and_has_all_its_blocks_copied() -> None:
    scheduler = scheduler_of(layout_of(FULL, rows=4), caching=host(), preemption="swap")
    expect_answers_of(scheduler, 1)
    for events in ([Arrive(replace(request_of(id_, 4, 9), scope=None)) for id_ in (0, 1)], *([],) * 8):
        step, _ = run(scheduler, *events)
    assert step.moves == (SwapOpenOut(2, 0), SwapOut(0, 1, 0), SwapOut(0, 3, 1))
    step, _ = run(scheduler)
    assert [type(move) for move in step.moves] == [SwapOpenIn, SwapIn, SwapIn]
    assert (parts(step), step.admitted[0].was_swapped) == ([(1, 11, 1, True)], True)


# Request 1 has 11 tokens: 2 full blocks and an open one of 32 bytes, 96 to copy twice; computing them again takes
# 11 * flops_per_token + 66 reads.
@pytest.mark.parametrize(
    ("costs", "swaps"),
    [
        (MachineCosts(1.0, 1.09, 10.0, 1.0), False),  # 176.1 s to copy, 176 s to compute
        (MachineCosts(1.0, 1.10, 10.0, 1.0), True),  # 174.5 s
        (MachineCosts(11.0, 12.0, 16.0, 0.0), False),  # 16 s each: computing needs no host memory
        (MachineCosts(10.9, 12.0, 16.0, 0.0), True),
        (MachineCosts(1.0, 192 / 65, 0.0, 1.0), True),  # attention alone: 65 s to copy, 66 s to compute
        (MachineCosts(1.0, 192 / 67, 0.0, 1.0), False),
    ],
)
def test_auto_swaps_exactly_when_copying_out_and_back_takes_less_than_computing(
    costs: MachineCosts, swaps: bool
) -> None:
    scheduler = pair_on_four_blocks(host(costs=costs))
    assert scheduler.options.preemption == "auto"
    step, _ = run(scheduler)
    assert (step.preempted, step.swapped) == ((1,), (1,) if swaps else ())
    counters = scheduler.counters
    assert (counters.num_swaps, counters.num_swaps_refused) == (int(swaps), 0)
    assert counters.num_tokens_lost == (0 if swaps else 11)
    assert drain(scheduler).finished == [1]


DEAR, CHEAP = MachineCosts(1e9, 1.0, 1.0, 1.0), MachineCosts(1.0, 1e9, 1.0, 1.0)  # to copy


@pytest.mark.parametrize(
    ("preemption", "costs", "swaps"),
    [("swap", DEAR, True), ("recompute", CHEAP, False), ("auto", None, True), ("auto", DEAR, False)],
)
def test_a_forced_way_is_taken_whatever_it_costs(preemption: str, costs: MachineCosts | None, swaps: bool) -> None:
    scheduler = pair_on_four_blocks(host(costs=costs), preemption=preemption)
    assert bool(run(scheduler)[0].swapped) is swaps
    assert scheduler.counters.num_swaps_refused == 0


@pytest.mark.parametrize("preemption", ["swap", "auto"])
@pytest.mark.parametrize(("rows", "num_open"), [(1, 2), (4, 0)])
def test_a_full_host_pool_means_computing_again_and_is_counted(preemption: str, rows: int, num_open: int) -> None:
    scheduler = pair_on_four_blocks(host(rows, num_open, CHEAP), preemption=preemption)
    step, _ = run(scheduler)
    assert (step.preempted, step.swapped, step.moves) == ((1,), (), ())
    counters = scheduler.counters
    assert (counters.num_swaps, counters.num_swaps_refused, counters.num_tokens_lost) == (0, 1, 11)
    assert drain(scheduler).finished == [1]


def test_swapping_without_a_host_pool_is_counted_as_refused_where_it_was_asked_for() -> None:
    for preemption, num_refused in (("swap", 1), ("auto", 0), ("recompute", 0)):
        scheduler = pair_on_four_blocks(preemption=preemption)
        assert run(scheduler)[0].swapped == ()
        assert scheduler.counters.num_swaps_refused == num_refused


def test_one_that_leaves_while_its_blocks_are_swapped_out_frees_the_host_pool() -> None:
    scheduler = pair_on_four_blocks(host(), preemption="swap")
    run(scheduler)
    assert scheduler.ledger.usage().host_bytes > 0
    run(scheduler, Leave(RequestId(1)))
    assert (scheduler.ledger.usage().host_bytes, scheduler.is_idle, scheduler.counters.num_left) == (0, True, 1)


def test_an_unknown_way_and_a_negative_limit_are_refused() -> None:
    with pytest.raises(OptionError, match="preemption is 'abort'; accepted: auto, recompute, swap"):
        SchedulerOptions(64, preemption="abort")
    with pytest.raises(OptionError, match="max_preemptions is -1; accepted: 0 or more"):
        SchedulerOptions(64, max_preemptions=-1)
