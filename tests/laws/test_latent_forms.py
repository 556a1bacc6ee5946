"""Latent attention, absorbed and expanded: one answer, the same bytes, and a form that no hit decides.

Knows nothing of how either is computed.
"""

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from cold import ask, preempt_often
from served import greedy
from tiny import TinyModel, some_tokens

from kvfolio import LLM
from kvfolio.errors import OptionError
from kvfolio.planner.memory import CacheOptions, plan_cache
from kvfolio.spec.config.runnable import runnable_from_config
from kvfolio.store.view import ChunkRows, StepView, StoreViews

OpenLLM = Callable[..., LLM]
TOLERANCE = 1e-4
V3 = {
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_shared_experts": 1,
    "n_routed_experts": 256,
    "routed_scaling_factor": 2.5,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_group": 8,
    "topk_group": 4,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "max_position_embeddings": 163840,
    "torch_dtype": "bfloat16",
}


def watched(llm: LLM) -> list[tuple[int, int, int]]:
    """(start, tokens, of which expanded) of every chunk from now on."""
    seen: list[tuple[int, int, int]] = []
    views: StoreViews = llm.engine._runner._views
    make = views.view

    def view(chunks: Sequence[ChunkRows]) -> StepView:
        seen.extend((chunk.start, chunk.num_tokens, chunk.num_expanded) for chunk in chunks)
        return make(chunks)

    views.view = view  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "deepseek-v3-dense"])
@pytest.mark.parametrize("kv_format", ["auto", "int8", "int4", "bf16/int6"])
def test_prompts_in_the_expanded_form_give_the_logits_of_the_absorbed_one(
    name: str, kv_format: str, open_llm: OpenLLM
) -> None:
    """In lossy formats, too, where the last bit may decide between two codes: both read earlier blocks as stored."""
    options = {"kv_format": kv_format, "dtype": "f32", "block_tokens": 16, "max_step_tokens": 40}
    prompts = [some_tokens(75, seed=1), some_tokens(30, seed=2), some_tokens(5, seed=3)]
    absorbed, expanded = (open_llm(name, latent_form=form, **options) for form in ("absorbed", "expanded"))
    seen = watched(expanded)
    expected, found = (ask(llm, prompts, greedy(6)) for llm in (absorbed, expanded))
    assert sum(count for _, _, count in seen) == 110
    assert found.tokens == expected.tokens
    for one, other in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(one, other, atol=TOLERANCE if kv_format == "auto" else 0.05, rtol=0)


def test_a_prompt_is_expanded_and_an_answer_absorbed_whatever_was_found(open_llm: OpenLLM) -> None:
    llm = open_llm("deepseek-v3", latent_form="expanded", block_tokens=4)
    prompt = some_tokens(50, seed=7)
    seen = watched(llm)
    answer = ask(llm, [prompt], greedy(4))
    assert seen == [(0, 50, 50), (50, 1, 0), (51, 1, 0), (52, 1, 0)]
    seen.clear()
    again = ask(llm, [[*prompt, *answer.tokens[0], 9]], greedy(1))
    assert again.cached[0] > 50
    assert all(expanded == tokens for _, tokens, expanded in seen)


def test_what_a_preempted_request_computes_again_keeps_its_form(open_llm: OpenLLM) -> None:
    roomy = open_llm("deepseek-v3", latent_form="expanded", block_tokens=4, dtype="f32")
    prompts = [some_tokens(21, seed=1), some_tokens(18, seed=2)]
    expected = ask(roomy, prompts, greedy(30))
    llm = open_llm("deepseek-v3", latent_form="expanded", block_tokens=4, dtype="f32", prefix_cache=False)
    preempt_often(llm, random.Random(1))
    seen = watched(llm)
    found = ask(llm, prompts, greedy(30))
    mixed = [(start, tokens, expanded) for start, tokens, expanded in seen if 0 < expanded < tokens]
    assert mixed, "nobody was preempted"
    assert all(start + expanded in (21, 18) for start, _, expanded in mixed)
    assert found.tokens == expected.tokens
    for one, other in zip(found.logits, expected.logits, strict=True):
        torch.testing.assert_close(one, other, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", ["deepseek-v2", "deepseek-v3"])
def test_both_forms_give_the_logits_of_transformers(
    name: str, open_llm: OpenLLM, served_model: Callable[[str], TinyModel]
) -> None:
    prompt = some_tokens(60, seed=5)
    expected = served_model(name).logits(prompt)[-1]
    for form in ("absorbed", "expanded"):
        found = ask(open_llm(name, latent_form=form, dtype="f32"), [prompt], greedy(1)).logits[0][0]
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


def test_the_form_is_part_of_what_identifies_stored_bits(open_llm: OpenLLM) -> None:
    absorbed, expanded = (open_llm("deepseek-v3", latent_form=form) for form in ("absorbed", "expanded"))
    assert absorbed.engine._fingerprint != expanded.engine._fingerprint


@pytest.mark.parametrize(
    ("name", "options", "match"),
    [
        ("deepseek-v3", {"latent_form": "naive"}, "latent_form is 'naive'; accepted: one of absorbed, expanded"),
        ("deepseek-v3", {"latent_form": "expanded", "deterministic": True}, "deterministic is on"),
        ("llama", {"latent_form": "expanded"}, "no layers with latents"),
    ],
)
def test_a_form_that_cannot_be_is_refused(name: str, options: dict[str, object], match: str, open_llm: OpenLLM) -> None:
    with pytest.raises(OptionError, match=match):
        open_llm(name, **options)


def test_a_token_of_deepseek_v3_takes_70272_bytes_in_bf16() -> None:
    """61 layers of 512 + 64 numbers; of 128 heads with keys and values of their own it would be 4,997,120."""
    spec = runnable_from_config(V3, "v3")
    layout = plan_cache(spec, "bf16", CacheOptions(kv_memory=1 << 30))
    assert layout.bytes_per_token == 70_272
    (group,) = layout.groups
    assert group.block_bytes == 16 * 70_272
    assert group.num_blocks == layout.budget_bytes // group.block_bytes
    int8 = plan_cache(spec, "bf16", CacheOptions(kv_memory=1 << 30, kv_format="int8"))
    assert int8.bytes_per_token == 61 * (512 + 4 + 64 + 4)
