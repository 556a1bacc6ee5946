"""Ctrl-C at any line of the ledger, the scheduler or the engine: what comes next is right, and nothing stays held.

Knows nothing of what the lines do: a trace function raises KeyboardInterrupt at the n-th of them.
"""

import random
import sys
from collections.abc import Callable
from types import FrameType

import pytest
from served import assert_idle, greedy, kv_memory_for
from tiny import some_tokens

from kvfolio import LLM, RequestError, Retention

OpenLLM = Callable[..., LLM]

PARTS = ("kvfolio/cache/", "kvfolio/sched/", "kvfolio/engine/engine.py", "kvfolio/store/pools.py")
PROMPTS = [some_tokens(20, seed=1) + some_tokens(length, seed=length) for length in (3, 9, 14, 6)]
PARAMS = greedy(12)


class Interrupt:
    """Counts lines of kvfolio's deciding parts, and interrupts at one of them."""

    def __init__(self, at: int | None) -> None:
        self.at, self.num_lines = at, 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> object:
        if not any(part in frame.f_code.co_filename for part in PARTS):
            return None
        if event == "line":
            self.num_lines += 1
            if self.num_lines == self.at:
                sys.settrace(None)
                raise KeyboardInterrupt
        return self

    def during(self, work: Callable[[], object]) -> None:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            work()
        finally:
            sys.settrace(before)


def tight(open_llm: OpenLLM, **more: object) -> LLM:
    options = {"block_tokens": 4, "deterministic": True, "max_step_tokens": 16, **more}
    kv_memory = kv_memory_for(open_llm("gemma3", **options), num_running=4, num_rows=12)
    return open_llm("gemma3", kv_memory=kv_memory, max_running=4, **options)


@pytest.mark.parametrize("swap_memory", [0, "1MiB"])
def test_an_interrupt_at_any_line_leaves_an_engine_that_answers_right(
    swap_memory: object, open_llm: OpenLLM, caplog: pytest.LogCaptureFixture
) -> None:
    llm = tight(open_llm, swap_memory=swap_memory)
    expected = [one.token_ids for one in llm.generate(PROMPTS, PARAMS)]
    counting = Interrupt(None)
    counting.during(lambda: llm.generate(PROMPTS, PARAMS))
    assert counting.num_lines > 5000
    draw, num_lost = random.Random(7), 0
    for _ in range(60):
        with pytest.raises(KeyboardInterrupt):
            Interrupt(draw.randrange(1, counting.num_lines)).during(lambda: llm.generate(PROMPTS, PARAMS))
        assert [one.token_ids for one in llm.generate(PROMPTS, PARAMS)] == expected
        assert_idle(llm)
    num_lost = sum("in the midst of a decision" in message for message in caplog.messages)
    assert 10 < num_lost <= 60


def test_requests_of_others_that_an_interrupt_costs_are_told(open_llm: OpenLLM) -> None:
    llm = open_llm("llama", deterministic=True)
    stream = llm.stream(PROMPTS[0], greedy(200))
    next(stream)
    llm.engine._is_torn = True  # as an interrupt in the midst of a decision leaves it
    with pytest.raises(RequestError, match="interrupted in the midst of a decision: ask again"):
        for _ in stream:
            pass
    assert len(llm.generate([PROMPTS[0]], PARAMS)[0].token_ids) == 12


@pytest.mark.parametrize("line", ["submit", "cancel"])
def test_an_interrupt_between_two_bookings_leaves_no_request_that_nobody_waits_for(
    line: str, open_llm: OpenLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_llm("llama", deterministic=True)
    whole = getattr(llm.engine, line)

    def interrupted(*arguments: object) -> object:
        monkeypatch.setattr(llm.engine, line, whole)
        if line == "submit":
            whole(*arguments)  # it is queued, but its number never comes back
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine, line, interrupted)
    stream = llm.stream(PROMPTS[0], greedy(200))
    with pytest.raises(KeyboardInterrupt):
        next(stream)
        stream.close()
    expected = open_llm("llama", deterministic=True).generate(PROMPTS, PARAMS)
    assert [one.token_ids for one in llm.generate(PROMPTS, PARAMS)] == [one.token_ids for one in expected]
    assert_idle(llm)


def test_an_interrupt_while_a_failed_step_is_cleared_up_still_tells_everybody(
    open_llm: OpenLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_llm("llama", deterministic=True)
    other = llm.stream(PROMPTS[1], greedy(200))
    next(other)

    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(llm.engine._runner, "run", fails)
    monkeypatch.setattr(llm.engine, "abandon", fails)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([PROMPTS[0]], PARAMS)
    monkeypatch.undo()
    with pytest.raises(KeyboardInterrupt):
        next(other)
    assert len(llm.generate([PROMPTS[0]], PARAMS)[0].token_ids) == 12
    assert_idle(llm)


def test_a_retention_that_is_refused_costs_nobody_anything(open_llm: OpenLLM) -> None:
    llm = open_llm("llama", block_tokens=4)
    llm.generate([PROMPTS[0]], PARAMS)
    with pytest.raises(RequestError, match="token id -1 is outside"):
        llm.retain([-1] * 9, Retention(pin=True))
    assert llm.generate([PROMPTS[0]], PARAMS)[0].usage.cached_tokens == len(PROMPTS[0]) - 1
