"""Several threads, and generators that end at awkward moments, share one LLM: each gets what it would get alone."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest

from kvfolio import SamplingParams

if TYPE_CHECKING:
    from kvfolio import LLM

PROMPTS = [[5, 6, 7, 8] * 5, [9, 10] * 9, [11] * 33]


def greedy(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True)


def test_threads_on_one_model_get_the_tokens_they_would_get_alone(open_llm: "Callable[..., LLM]") -> None:
    llm = open_llm("llama", deterministic=True)
    alone = [llm.generate([prompt], greedy(24))[0].token_ids for prompt in PROMPTS]
    found: dict[int, list[tuple[int, ...]]] = {}
    errors: list[BaseException] = []

    def work(number: int) -> None:
        try:
            found[number] = [llm.generate([PROMPTS[number]], greedy(24))[0].token_ids for _ in range(8)]
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    assert not errors
    assert found == {number: [alone[number]] * 8 for number in range(len(PROMPTS))}


def test_a_stream_set_free_in_the_middle_of_a_step_harms_nobody(
    open_llm: "Callable[..., LLM]", monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_llm("llama", deterministic=True)
    alone = llm.generate([PROMPTS[0]], greedy(12))[0]
    left = llm.stream(PROMPTS[1], greedy(200))
    next(left)
    run, steps = llm.engine._runner.run, []

    def run_and_close(step: object) -> object:
        steps.append(step)
        if len(steps) == 4:
            left.close()  # what the garbage collector does to a stream nobody holds any more
        return run(step)  # type: ignore[arg-type]

    monkeypatch.setattr(llm.engine._runner, "run", run_and_close)
    beside = llm.generate([PROMPTS[0]], greedy(12))[0]
    assert (beside.token_ids, beside.text) == (alone.token_ids, alone.text)
    assert len(steps) >= 12
    llm.engine.ledger.check()
    assert llm.snapshot().usage.num_blocks_used == 0
