"""LLM on its paged cache against transformers without one: every family, greedy, f32, any company in the batch.

Knows nothing of real models (``test_real_models.py``) or of how a network is built (``test_networks.py``).
"""

from collections.abc import Callable

import pytest
from served import FAMILIES, ODD_FAMILIES, WINDOW, assert_greedy, greedy, recorded
from tiny import TinyModel, some_tokens

from kvfolio import LLM

NUM_TOKENS = 64
LENGTHS = [1, 7, 33, 300]
WINDOW_FAMILIES = ["mistral", "qwen2-windows", "gemma3", "gpt-oss"]

OpenLLM = Callable[..., LLM]
FindModel = Callable[[str], TinyModel]


def prompts_of(lengths: list[int]) -> list[list[int]]:
    return [some_tokens(length, seed=length) for length in lengths]


def assert_generates_as_transformers(llm: LLM, model: TinyModel, prompts: list[list[int]]) -> None:
    with recorded(llm) as record:
        completions = llm.generate(prompts, greedy(NUM_TOKENS))
    for prompt, completion, logits in zip(prompts, completions, record.logits(), strict=True):
        assert len(completion.token_ids) == NUM_TOKENS
        assert_greedy(model, prompt, completion.token_ids, logits)


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("name", FAMILIES + ODD_FAMILIES)
def test_a_prompt_alone_is_continued_as_by_transformers(
    name: str, length: int, open_llm: OpenLLM, served_model: FindModel
) -> None:
    assert_generates_as_transformers(open_llm(name), served_model(name), prompts_of([length]))


@pytest.mark.parametrize("lengths", [LENGTHS, LENGTHS[::-1]], ids=["short first", "long first"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_batch_of_unequal_prompts_is_continued_as_by_transformers(
    name: str, lengths: list[int], open_llm: OpenLLM, served_model: FindModel
) -> None:  # WO-01
    llm = open_llm(name)
    with recorded(llm) as record:
        assert_generates_as_transformers(llm, served_model(name), prompts_of(lengths))
    assert max(len(step.chunks) for step in record.steps) == len(lengths)  # they did run together


@pytest.mark.parametrize("name", FAMILIES)
def test_without_the_extension_the_answers_are_those_of_transformers_too(
    name: str, open_llm: OpenLLM, served_model: FindModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfolio.engine.machine.NativeOps", None)
    llm = open_llm(name)
    assert llm.ops_name == "reference"
    assert_generates_as_transformers(llm, served_model(name), prompts_of(LENGTHS))


@pytest.mark.parametrize("late", range(len(LENGTHS)))
@pytest.mark.parametrize("name", FAMILIES)
def test_a_request_that_joins_midway_changes_nobody_and_is_not_changed(
    name: str, late: int, open_llm: OpenLLM, served_model: FindModel
) -> None:
    llm, prompts = open_llm(name), prompts_of(LENGTHS)
    prompts.append(prompts.pop(late))
    engine, outputs = llm.engine, []
    with recorded(llm) as record:
        ids = [engine.submit(tuple(prompt), greedy(NUM_TOKENS)) for prompt in prompts[:-1]]
        for _ in range(20):
            outputs += engine.step()
        ids.append(engine.submit(tuple(prompts[-1]), greedy(NUM_TOKENS)))
        while engine.has_work:
            outputs += engine.step()
    tokens = {
        request_id: [out.sampled.token_id for out in outputs if out.request_id == request_id] for request_id in ids
    }
    assert [len(tokens[request_id]) for request_id in ids] == [NUM_TOKENS] * len(LENGTHS)
    for prompt, request_id, logits in zip(prompts, ids, record.logits(), strict=True):
        assert_greedy(served_model(name), prompt, tokens[request_id], logits)


@pytest.mark.parametrize("block_tokens", [4, 16, 64])
@pytest.mark.parametrize("length", [WINDOW - 1, WINDOW, WINDOW + 1, 5 * WINDOW])
@pytest.mark.parametrize("name", WINDOW_FAMILIES)
def test_a_prompt_as_long_as_the_window_and_about_it_is_continued_as_by_transformers(
    name: str, length: int, block_tokens: int, open_llm: OpenLLM, served_model: FindModel
) -> None:
    llm = open_llm(name, block_tokens=block_tokens)
    assert_generates_as_transformers(llm, served_model(name), prompts_of([length]))


@pytest.mark.parametrize("name", WINDOW_FAMILIES)
def test_a_prompt_read_in_chunks_far_past_the_window_is_continued_as_by_transformers(
    name: str, open_llm: OpenLLM, served_model: FindModel
) -> None:
    # WO-05. WO-07: what a window passes is dropped, and what stays keeps the rotation of its absolute position.
    llm = open_llm(name, max_step_tokens=128)  # 300 tokens: 128, 128 and 44, each wider than the window
    with recorded(llm) as record:
        assert_generates_as_transformers(llm, served_model(name), prompts_of([300]))
    assert [step.num_tokens for step in record.steps[:4]] == [128, 128, 44, 1]
