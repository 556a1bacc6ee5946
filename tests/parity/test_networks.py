"""Our networks against transformers, on tiny random models of every family."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import tiny
import torch
import transformers
from doubles import GrowingView, PlainOps, Session
from tiny import TinyModel, some_tokens

from kvfolio.models.build import LanguageModel, build_model
from kvfolio.models.parts import RopeTable, inverse_frequencies
from kvfolio.models.weights import open_weights
from kvfolio.spec.model import Rope, RunnableSpec
from kvfolio.spec.source import open_model

TOLERANCE = 1e-4  # measured: 2e-5 at worst, on logits that spread by 1.6
FAMILIES = list(tiny.BUILDERS)
CPU = torch.device("cpu")


def build(model: TinyModel, spec: RunnableSpec | None = None, dtype: torch.dtype = torch.float32) -> LanguageModel:
    source = open_model(model.folder)
    source = replace(source, spec=spec or source.spec)
    return build_model(source.spec, open_weights(source, dtype, CPU))


@pytest.mark.parametrize("num_tokens", [1, 7, 33])
@pytest.mark.parametrize("name", FAMILIES)
def test_logits_of_a_prompt_are_those_of_transformers(
    name: str, num_tokens: int, tiny_model: Callable[[str], TinyModel]
) -> None:
    model = tiny_model(name)
    prompt = some_tokens(num_tokens)
    logits = Session(build(model)).step({0: prompt})[0]
    assert logits.shape == (num_tokens, tiny.VOCAB)
    torch.testing.assert_close(logits, model.logits(prompt), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_greedy_decoding_over_a_growing_cache_picks_the_tokens_of_transformers(
    name: str, tiny_model: Callable[[str], TinyModel]
) -> None:
    model = tiny_model(name)
    session, text = Session(build(model)), some_tokens(25)  # 25 + 12 tokens pass the window of 16
    logits = session.step({0: text})[0]
    for _ in range(12):
        expected = model.logits(text)[-1]
        torch.testing.assert_close(logits[-1], expected, atol=TOLERANCE, rtol=0)
        token = int(expected.argmax())
        assert int(logits[-1].argmax()) == token
        text.append(token)
        logits = session.step({0: [token]})[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_two_sequences_in_one_step_do_not_see_each_other(name: str, tiny_model: Callable[[str], TinyModel]) -> None:
    model = tiny_model(name)
    first, second = some_tokens(30, seed=1), some_tokens(9, seed=2)
    session = Session(build(model))
    session.step({0: first[:20]})  # then a chunk of the first beside the whole second one
    logits = session.step({0: first[20:], 1: second})
    torch.testing.assert_close(logits[0], model.logits(first)[20:], atol=TOLERANCE, rtol=0)
    torch.testing.assert_close(logits[1], model.logits(second), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name.startswith("deepseek")])
def test_absorbed_and_expanded_attention_give_the_same_logits(
    name: str, tiny_model: Callable[[str], TinyModel]
) -> None:
    model = build(tiny_model(name))
    absorbed, expanded = Session(model), Session(model, expanded=True)
    for chunk in (some_tokens(20, seed=3), some_tokens(1, seed=4), some_tokens(12, seed=5)):
        found, expected = absorbed.step({0: chunk})[0], expanded.step({0: chunk})[0]
        torch.testing.assert_close(found, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", FAMILIES)
def test_rows_choose_whose_logits_are_computed(name: str, tiny_model: Callable[[str], TinyModel]) -> None:
    model = build(tiny_model(name))
    token_ids, positions = torch.tensor(some_tokens(9)), torch.arange(9)

    def run(rows: list[int]) -> torch.Tensor:
        view = GrowingView(model.spec.layers)
        view.owners = [0] * 9
        return model.forward(token_ids, positions, view, PlainOps(), torch.tensor(rows, dtype=torch.int64))

    everything = run(list(range(9)))
    torch.testing.assert_close(run([8, 2]), everything[[8, 2]], atol=1e-5, rtol=0)
    assert run([]).shape == (0, tiny.VOCAB)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "name",
    [
        *("llama", "qwen3", "gemma3", "gpt2", "falcon-7b", "falcon-40b"),
        *("mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss", "deepseek-v2", "deepseek-v3"),
    ],
)
def test_half_precision_is_as_close_to_f32_as_that_of_transformers(
    name: str, dtype: torch.dtype, tiny_model: Callable[[str], TinyModel]
) -> None:
    model, prompt = tiny_model(name), some_tokens(33)
    exact = model.logits(prompt)

    def error(logits: torch.Tensor) -> torch.Tensor:
        """Of the row in the middle: of two experts that are nearly as good, rounding may choose the other one."""
        return (logits.float() - exact).std(dim=1).median()

    theirs = type(model.model).from_pretrained(model.folder, dtype=dtype).eval()
    with torch.inference_mode():
        their_error = error(theirs(torch.tensor([prompt])).logits[0])
    logits = Session(build(model, dtype=dtype)).step({0: prompt})[0]
    assert logits.dtype == dtype
    assert error(logits) < 1.25 * their_error


@pytest.mark.parametrize("name", FAMILIES)
def test_a_network_holds_the_parameters_that_its_spec_counts(name: str, tiny_model: Callable[[str], TinyModel]) -> None:
    model = build(tiny_model(name))
    theirs = tiny_model(name).model
    corrections = sum(one.numel() for key, one in theirs.named_buffers() if key.endswith("e_score_correction_bias"))
    assert model.spec.num_params == theirs.num_parameters() + corrections  # which transformers does not count
    assert model.weight_bytes == 4 * model.spec.num_params


def test_window_layers_turn_by_their_own_rope(tiny_model: Callable[[str], TinyModel]) -> None:
    model, other = tiny_model("mistral"), Rope(500.0, 16)  # all its layers have windows
    spec = open_model(model.folder).spec
    prompt = some_tokens(20)
    local = Session(build(model, replace(spec, network=replace(spec.network, rope_local=other)))).step({0: prompt})[0]
    everywhere = Session(build(model, replace(spec, network=replace(spec.network, rope=other)))).step({0: prompt})[0]
    assert torch.equal(local, everywhere)
    assert not torch.allclose(local, model.logits(prompt), atol=0.1)


@pytest.mark.parametrize("truncate", [True, False])
def test_the_inverse_frequencies_of_gpt_oss_are_those_of_transformers(truncate: bool) -> None:
    numbers = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096}
    config = transformers.GptOssConfig(rope_parameters=numbers | {"truncate": truncate})
    rotary = transformers.models.gpt_oss.modeling_gpt_oss.GptOssRotaryEmbedding(config)
    inverse, factor = inverse_frequencies(Rope(150000.0, 64, "yarn", 32.0, 4096, truncate=truncate))
    torch.testing.assert_close(inverse, rotary.inv_freq, atol=0, rtol=1e-6)
    assert factor == pytest.approx(rotary.attention_scaling)


@pytest.mark.parametrize("name", ["llama", "llama-rope-linear", "llama-rope-llama3", "llama-rope-yarn"])
def test_rotary_tables_are_those_of_transformers(name: str, tiny_model: Callable[[str], TinyModel]) -> None:
    positions = torch.tensor([0, 1, 63, 64, 255])
    rope = open_model(tiny_model(name).folder).spec.network.rope
    assert rope is not None
    cos, sin = RopeTable(rope, CPU).at(positions)
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(tiny_model(name).model.config)
    their_cos, their_sin = rotary(torch.zeros(1), positions[None])  # [1, num_tokens, width]: both halves alike
    torch.testing.assert_close(torch.cat([cos, cos], dim=1), their_cos[0], atol=2e-5, rtol=0)
    torch.testing.assert_close(torch.cat([sin, sin], dim=1), their_sin[0], atol=2e-5, rtol=0)
