"""Hit = miss on a real model, SmolLM2 135M: to the bit where that is promised, and within a bound where it is not.

Knows nothing of speed. Without the package of the model everything is skipped.
"""

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pydoc_data.topics import topics

import pytest
import torch
from cold import Answers, Prompt, ask, preempt_often
from real_models import needs_smollm2
from served import assert_idle, greedy

from kvfolio import LLM, SamplingParams
from kvfolio.engine.loaded import LoadedModel, load_model
from kvfolio.engine.params import CacheParams

pytestmark = needs_smollm2

OpenSmolLM2 = Callable[..., LLM]
TEXT = topics["assert"]
NO_REUSE = CacheParams(reuse=False)


@pytest.fixture(scope="module")
def open_smollm2() -> Iterator[OpenSmolLM2]:
    """Opens the model; its weights are read once for each dtype."""
    loaded: dict[str, LoadedModel] = {}
    opened: list[LLM] = []

    def open_one(dtype: str, **options: object) -> LLM:
        if dtype not in loaded:
            loaded[dtype] = load_model(None, dtype)
        opened.append(LLM(loaded[dtype], dtype=dtype, **{"kv_memory": "64MiB", "debug": True, **options}))
        return opened[-1]

    yield open_one
    for llm in opened:
        assert_idle(llm)


class Checked:
    """A model that shares, whose answers are compared with those of one that never does."""

    def __init__(self, open_smollm2: OpenSmolLM2, **options: object) -> None:
        self.llm = open_smollm2("bf16", deterministic=True, **options)
        self._cold = open_smollm2("bf16", deterministic=True, prefix_cache=False, kv_format=self.llm.options.kv_format)

    def ask(self, prompts: list[Prompt], params: SamplingParams, caching: CacheParams | None = None) -> Answers:
        answers = ask(self.llm, prompts, params, caching)
        for tokens, logits, prompt in zip(answers.tokens, answers.logits, prompts, strict=True):
            cold = ask(self._cold, [prompt], params)
            assert (cold.tokens, cold.cached) == ([tokens], [0])
            assert torch.equal(cold.logits[0], logits)
        return answers


@pytest.mark.parametrize(("kv_format", "preemption"), [("auto", "swap"), ("int8", "recompute")])
def test_shared_copied_and_preempted_texts_answer_to_the_bit_as_cold_ones(
    kv_format: str, preemption: str, open_smollm2: OpenSmolLM2
) -> None:
    swap_memory = "8MiB" if preemption == "swap" else 0
    checked = Checked(
        open_smollm2, kv_format=kv_format, max_step_tokens=48, preemption=preemption, swap_memory=swap_memory
    )
    ids = checked.llm.tokenizer.encode(TEXT)
    prompt = ids[:75]
    first = checked.ask([prompt], greedy(6))
    assert checked.ask([prompt], greedy(6)).cached == [74 if kv_format == "auto" else 64]  # its last block was sealed
    preempt_often(checked.llm, random.Random(0))
    prompts = [[*prompt, *first.tokens[0], *ids[100:109]], [*prompt[:50], *ids[200:206]], ids[:33]]
    assert checked.ask(prompts, greedy(8)).cached == ([80, 50, 32] if kv_format == "auto" else [80, 48, 32])
    counters = checked.llm.snapshot().counters
    assert counters.num_preemptions > 0
    assert (counters.num_swaps > 0) is (preemption == "swap")
    samples = checked.llm.samples(prompt, 2, replace(greedy(5), temperature=1.0, seed=5))
    for index, sample in enumerate(samples):
        params = replace(greedy(5), temperature=1.0, seed=5 + index)
        assert list(sample.token_ids) == ask(checked._cold, [prompt], params).tokens[0]


@pytest.mark.parametrize(("dtype", "bound"), [("bf16", 2.0), ("f32", 1e-3)])
def test_without_deterministic_a_hit_drifts_within_the_rounding_of_its_dtype(
    dtype: str, bound: float, open_smollm2: OpenSmolLM2
) -> None:
    """A step of other size sums in another order. Measured: docs/lab.md."""
    llm = open_smollm2(dtype)
    ids = llm.tokenizer.encode(TEXT)
    prompt = ids[:130]
    cold = ask(llm, [prompt], greedy(5), NO_REUSE)
    for num_stored in (130, 65):
        asked = CacheParams(f"{num_stored} tokens")
        ask(llm, [prompt[:num_stored]], greedy(1), asked)
        hit = ask(llm, [prompt], greedy(5), asked)
        assert hit.cached == [min(num_stored, 129)]
        drift = (hit.logits[0][0].float() - cold.logits[0][0].float()).abs().max()
        assert drift <= bound
        if dtype == "f32":
            assert hit.tokens == cold.tokens
