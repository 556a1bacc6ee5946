"""Log-probabilities of the prompt's own tokens: complete and right, whatever the cache holds. WO-11.

Knows nothing of how a hit is found.
"""

from collections.abc import Callable

import pytest
import torch
from served import kv_memory_for
from tiny import TinyModel, some_tokens

from kvfolio import LLM, OptionError, SamplingParams
from kvfolio.sched.request import Step

OpenLLM = Callable[..., LLM]

PROMPT = some_tokens(117, seed=11)
OTHER = some_tokens(60, seed=12)
SCORED = SamplingParams(max_tokens=4, ignore_eos=True, prompt_logprobs=2)


def expected(model: TinyModel, prompt: list[int]) -> tuple[list[float], list[list[int]]]:
    """(log-probability of every token but the first, ids of the two most likely ones) by transformers."""
    logprobs = torch.log_softmax(model.logits(prompt)[:-1].double(), dim=-1)
    return logprobs.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].tolist(), logprobs.topk(2).indices.tolist()


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_a_prompt_that_was_there_before_is_scored_in_full(
    name: str, open_llm: OpenLLM, served_model: Callable[[str], TinyModel]
) -> None:
    llm = open_llm(name, block_tokens=16, max_step_tokens=50)
    logprobs, best = expected(served_model(name), PROMPT)
    for _ in range(2):
        completion = llm.generate([PROMPT], SCORED)[0]
        found = completion.prompt_logprobs
        assert found is not None and completion.prompt_top_logprobs is not None
        assert found[0] is None and len(found) == len(PROMPT) == len(completion.prompt_top_logprobs)
        torch.testing.assert_close(torch.tensor(found[1:]), torch.tensor(logprobs), atol=1e-4, rtol=0)
        assert [[token for token, _ in top] for top in completion.prompt_top_logprobs[1:]] == best
        assert completion.usage.cached_tokens == 0
        assert completion.cache.miss is not None
        assert completion.cache.miss.reason == "prompt logprobs asked"
        llm.generate([OTHER], SCORED)
    assert llm.snapshot().counters.misses == {"prompt logprobs asked": 4}


def test_what_a_scored_prompt_leaves_in_the_cache_serves_others(open_llm: OpenLLM) -> None:
    llm = open_llm("llama", block_tokens=16, deterministic=True)
    scored = llm.generate([PROMPT], SCORED)[0]
    plain = llm.generate([PROMPT], SamplingParams(max_tokens=4, ignore_eos=True))[0]
    assert plain.usage.cached_tokens == len(PROMPT) - 1
    assert plain.token_ids == scored.token_ids
    assert (plain.prompt_logprobs, plain.prompt_top_logprobs) == (None, None)


def test_the_logits_of_a_scored_chunk_never_take_more_than_128_rows(
    open_llm: OpenLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = open_llm("llama", block_tokens=16)
    prompt = some_tokens(300, seed=1)
    run, sizes = llm.engine._runner.run, []

    def counted(step: Step) -> torch.Tensor:
        sizes.append(step.num_tokens)
        return run(step)

    monkeypatch.setattr(llm.engine._runner, "run", counted)
    completion = llm.generate([prompt], SCORED)[0]
    assert sizes == [128, 128, 44, 1, 1, 1]
    assert completion.prompt_logprobs is not None and len(completion.prompt_logprobs) == 300


def test_scored_and_plain_requests_share_steps_and_keep_their_rows_apart(open_llm: OpenLLM) -> None:
    llm = open_llm("llama", block_tokens=4, deterministic=True, max_step_tokens=37)
    prompts = [some_tokens(length, seed=length) for length in (30, 41, 5, 1, 22)]
    params = [SamplingParams(max_tokens=6, ignore_eos=True, prompt_logprobs=0 if odd % 2 else None) for odd in range(5)]
    together = llm.generate(prompts, params)
    for prompt, chosen, one in zip(prompts, params, together, strict=True):
        alone = open_llm("llama", block_tokens=4, deterministic=True).generate([prompt], chosen)[0]
        assert (one.token_ids, one.prompt_logprobs) == (alone.token_ids, alone.prompt_logprobs)
    assert together[3].prompt_logprobs == (None,)


def test_a_prompt_that_loses_its_blocks_halfway_is_scored_once_and_right(open_llm: OpenLLM) -> None:
    options = {"block_tokens": 4, "deterministic": True, "max_step_tokens": 9, "debug": True}
    kv_memory = kv_memory_for(open_llm("llama", **options), num_running=4, num_rows=20)
    tight = open_llm("llama", kv_memory=kv_memory, max_running=4, **options)
    tight.generate([[5]], SamplingParams(max_tokens=1))  # short answers are expected from now on
    prompts = [some_tokens(length, seed=length) for length in (20, 35, 30, 28)]
    params = SamplingParams(max_tokens=40, ignore_eos=True, prompt_logprobs=1)
    found = tight.generate(prompts, params)
    assert tight.snapshot().counters.num_preemptions > 0
    for prompt, one in zip(prompts, found, strict=True):
        alone = open_llm("llama", **options).generate([prompt], params)[0]
        assert (one.token_ids, one.prompt_logprobs) == (alone.token_ids, alone.prompt_logprobs)
        assert one.prompt_top_logprobs == alone.prompt_top_logprobs


@pytest.mark.parametrize("given", [-1, 21, True, "3", 1.0])
def test_a_count_outside_0_to_20_is_refused(given: object) -> None:
    with pytest.raises(OptionError, match="prompt_logprobs is"):
        SamplingParams(prompt_logprobs=given)  # type: ignore[arg-type]
