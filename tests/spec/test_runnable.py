"""Hugging Face configs become the right model, or are refused by name.

Knows nothing of files: configs are dictionaries here. Numbers of weights are those of transformers 5.24 (meta device).
"""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published import (
    DEEPSEEK_V2,
    DEEPSEEK_V2_LITE,
    DEEPSEEK_V3,
    FALCON_7B,
    FALCON_40B,
    GEMMA3_270M,
    GPT2,
    LLAMA31_8B,
    MISTRAL_7B,
    MIXTRAL_8X7B,
    QWEN2_7B,
    QWEN3_06B,
    QWEN3_4B,
    QWEN3_30B_A3B,
    QWEN3_32B,
    QWEN15_MOE,
    SMOLLM2,
    Config,
    growing_bytes,
    read,
    windows,
    without,
)

from kvfolio.errors import BrokenModelError, KvfolioError, UnknownModelError
from kvfolio.spec.layers import FullAttention, SlidingWindow

SHARED_CONFIGS = Path(__file__).resolve().parents[3] / "shared" / "configs"

# ---- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "num_bytes"),
    [
        (SMOLLM2, 23_040),
        (LLAMA31_8B, 131_072),
        (QWEN2_7B, 57_344),
        (QWEN3_4B, 147_456),  # SZ-01: 92,160 with hidden / heads
        (QWEN3_32B, 262_144),  # SZ-01: 163,840 with hidden / heads
        (GPT2, 36_864),
        (MISTRAL_7B, 0),
        (DEEPSEEK_V2, 69_120),
        (DEEPSEEK_V2_LITE, 31_104),
        (DEEPSEEK_V3, 70_272),  # SZ-03: 4,997,120 with keys and values of every head
        (GEMMA3_270M, 3_072),  # 3 global layers * 1 head * 512 numbers * 2 bytes
    ],
)
def test_a_token_takes_its_published_bytes(config: Config, num_bytes: int) -> None:
    assert growing_bytes(read(config)) == num_bytes


@pytest.mark.parametrize(
    ("config", "num_params"),
    [
        (SMOLLM2, 134_515_008),
        (LLAMA31_8B, 8_030_261_248),
        (QWEN2_7B, 7_615_616_512),
        (QWEN3_06B, 596_049_920),
        (MISTRAL_7B, 7_241_732_096),
        (MIXTRAL_8X7B, 46_702_792_704),
        (QWEN15_MOE, 14_315_784_192),
        (QWEN3_30B_A3B, 30_532_122_624),
        (DEEPSEEK_V2, 235_741_434_880),
        (DEEPSEEK_V2_LITE, 15_706_484_224),
        (DEEPSEEK_V3, 671_026_404_352 + 58 * 256),  # transformers does not count the corrections of scores
        (GEMMA3_270M, 268_098_176),
        (GPT2, 124_439_808),
    ],
)
def test_the_weights_are_counted_exactly(config: Config, num_params: int) -> None:
    assert read(config).num_params == num_params


@pytest.mark.parametrize(
    ("config", "changes", "more"),
    [
        (SMOLLM2, {"tie_word_embeddings": False}, 49152 * 576),
        (SMOLLM2, {"attention_bias": True}, 30 * (9 * 64 + 2 * 3 * 64 + 576)),
        (SMOLLM2, {"mlp_bias": True}, 30 * (2 * 1536 + 576)),
        (QWEN3_06B, {"attention_bias": True}, 28 * (16 * 128 + 2 * 8 * 128 + 1024)),
        (GPT2, {"n_positions": 1025}, 768),
    ],
)
def test_biases_untied_embeddings_and_positions_add_their_weights(config: Config, changes: Config, more: int) -> None:
    assert read(config, **changes).num_params - read(config).num_params == more


@pytest.mark.skipif(not SHARED_CONFIGS.is_dir(), reason="no ../shared/configs beside the repository")
def test_every_config_of_our_families_agrees_with_the_measured_cache() -> None:
    truth = json.loads((SHARED_CONFIGS / "truth.json").read_text())
    agreed = []
    for path in sorted(SHARED_CONFIGS.glob("*__*.json")):
        try:
            spec = read(json.loads(path.read_text()))
        except UnknownModelError:
            continue
        known = truth[path.stem]
        assert growing_bytes(spec) == known["growth_bytes_per_token"], path.stem
        below = {int(window): count for window, count in known["windowed_bytes_per_token_below_window"].items()}
        groups = [group for group in spec.groups() if group.kind.window is not None]
        # 16-bit keys and values of one token in the windowed layers
        found = {g.kind.window: g.num_layers * g.kind.num_kv_heads * 4 * g.kind.k_width for g in groups}
        assert found == below, path.stem
        agreed.append(path.stem)
    assert len(agreed) >= 18


@pytest.mark.skipif(not SHARED_CONFIGS.is_dir(), reason="no ../shared/configs beside the repository")
def test_every_other_config_is_refused_by_its_model_type() -> None:
    refused = 0
    for path in sorted(SHARED_CONFIGS.glob("*__*.json")):
        config = json.loads(path.read_text())
        try:
            read(config)
        except UnknownModelError as error:
            assert repr(config["model_type"]) in str(error) or "quantised weights" in str(error)
            refused += 1
    assert refused >= 44


# ---- what the network needs -----------------------------------------------------------------------------------------


def test_llama_is_read_in_full() -> None:
    spec = read(SMOLLM2)
    assert (spec.name, spec.family, spec.model_type, spec.dtype) == ("toy", "llama", "llama", "bf16")
    assert spec.layers == (FullAttention(3, 64, 64),) * 30
    assert (spec.max_context, spec.eos_token_ids, spec.assumptions) == (8192, (2,), ())
    network = spec.network
    assert (network.hidden_size, network.num_q_heads, network.intermediate_size) == (576, 9, 1536)
    assert (network.vocab_size, network.norm_eps, network.activation) == (49152, 1e-5, "silu")
    assert (network.attention_scale, network.tie_embeddings, network.qk_norm) == (0.125, True, False)
    assert (network.qkv_bias, network.o_bias, network.mlp_bias) == (False, False, False)


def test_each_family_has_its_own_biases_and_norms() -> None:
    def traits(config: Config) -> tuple[bool, bool, bool, bool]:
        network = read(config).network
        return network.qkv_bias, network.o_bias, network.mlp_bias, network.qk_norm

    assert traits(MISTRAL_7B) == (False, False, False, False)
    assert traits(SMOLLM2 | {"attention_bias": True, "mlp_bias": True}) == (True, True, True, False)
    assert traits(QWEN2_7B) == (True, False, False, False)
    assert traits(QWEN3_06B) == (False, False, False, True)
    assert traits(MIXTRAL_8X7B) == (False, False, False, False)
    assert traits(QWEN15_MOE) == (True, False, False, False)
    assert traits(QWEN15_MOE | {"qkv_bias": False}) == (False, False, False, False)
    assert traits(QWEN3_30B_A3B) == (False, False, False, True)
    assert traits(GEMMA3_270M) == (False, False, False, True)
    assert traits(GPT2) == (True, True, True, False)


def test_gemma3_scales_attention_by_its_own_number_not_by_the_head() -> None:
    assert read(GEMMA3_270M).network.attention_scale == 1 / 16
    assert read(GEMMA3_270M, query_pre_attn_scalar=168, head_dim=128).network.attention_scale == 168**-0.5


def test_gpt2_may_leave_its_scores_unscaled() -> None:
    assert read(GPT2).network.attention_scale == 64**-0.5
    assert read(GPT2, scale_attn_weights=False).network.attention_scale == 1.0


def test_gpt2_is_read_by_its_old_names_and_by_the_usual_ones() -> None:
    old = without(GPT2, "n_ctx")
    new = {
        "hidden_size": 768,
        "num_attention_heads": 12,
        "num_hidden_layers": 12,
        "max_position_embeddings": 1024,
    }
    assert read(without(old, "n_embd", "n_head", "n_layer", "n_positions") | new) == read(old)
    assert read(old).network.intermediate_size == 3072
    assert read(old, n_inner=100).network.intermediate_size == 100


def test_the_three_numbers_of_a_gpt2_suffice_for_its_cache() -> None:
    spec = read({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12})
    assert growing_bytes(spec, "f16") * 8192 == 301_989_888  # SZ-09
    assert "vocab_size is absent: 50,257 assumed" in spec.assumptions


@pytest.mark.parametrize(
    ("word", "activation"), [("silu", "silu"), ("swish", "silu"), ("gelu", "gelu"), ("gelu_new", "gelu_tanh")]
)
def test_activations_are_known_under_their_names(word: str, activation: str) -> None:
    assert read(SMOLLM2, hidden_act=word).network.activation == activation


@pytest.mark.parametrize(
    ("found", "token_ids"),
    [({"eos_token_id": 7}, (7,)), ({"eos_token_id": [7, 9, 7]}, (7, 9)), ({"eos_token_id": None}, ()), ({}, (2,))],
)
def test_end_tokens_are_one_several_none_or_the_class_default(found: Config, token_ids: tuple[int, ...]) -> None:
    spec = read(without(SMOLLM2, "eos_token_id") | found)
    assert spec.eos_token_ids == token_ids
    assert spec.assumptions == (() if found else ("eos_token_id is absent: 2 assumed",))


@pytest.mark.parametrize("field", ["dtype", "torch_dtype"])
@pytest.mark.parametrize(
    ("word", "dtype"), [("float32", "f32"), ("bfloat16", "bf16"), ("half", "f16"), ("torch.float16", "f16")]
)
def test_the_dtype_has_two_spellings(field: str, word: str, dtype: str) -> None:
    assert read(without(SMOLLM2, "torch_dtype") | {field: word}).dtype == dtype


def test_what_was_assumed_is_listed() -> None:
    spec = read(without(QWEN3_06B, "head_dim", "rms_norm_eps", "hidden_act", "torch_dtype"))
    assert spec.assumptions == (
        "head_dim is absent: 128 assumed, the default of model_type qwen3",
        "rms_norm_eps is absent: 1e-06 assumed",
        "hidden_act is absent: silu assumed",
        "dtype is absent: float32 assumed, as transformers loads it",
    )
    assert spec.layers[0].k_width == 128


def test_the_architecture_suffices_where_the_model_type_is_absent() -> None:
    spec = read(without(SMOLLM2, "model_type"))
    assert (spec.model_type, spec.assumptions) == ("llama", ("model_type is absent: llama taken from architectures",))


# ---- windows (SZ-05) ------------------------------------------------------------------------------------------------


def test_a_window_that_is_switched_off_is_no_window() -> None:
    assert set(windows(read(QWEN2_7B))) == {None}
    assert set(windows(read(QWEN2_7B, use_sliding_window=True, sliding_window=None))) == {None}
    assert set(windows(read(QWEN2_7B, use_sliding_window=True, sliding_window=0))) == {None}
    assert set(windows(read(without(QWEN3_06B, "use_sliding_window"), sliding_window=2048))) == {None}


def test_qwen2_windows_its_upper_layers() -> None:
    spec = read(QWEN2_7B, use_sliding_window=True, sliding_window=4096, num_hidden_layers=36)
    assert windows(spec) == [None] * 28 + [4096] * 8


@pytest.mark.parametrize(("found", "window"), [(4096, 4096), (0, None), (None, None)])
def test_mistral_windows_every_layer_or_none(found: int | None, window: int | None) -> None:
    spec = read(MISTRAL_7B, sliding_window=found)
    assert windows(spec) == [window] * 32
    assert spec.layers[0] == (SlidingWindow(8, 128, 128, 4096) if window else FullAttention(8, 128, 128))


def test_a_mistral_without_the_field_has_the_window_of_its_class() -> None:
    spec = read(without(MISTRAL_7B, "sliding_window"))
    assert windows(spec) == [4096] * 32
    assert spec.assumptions == ("sliding_window is absent: 4,096 assumed, the default of model_type mistral",)


def test_every_sixth_layer_of_gemma3_is_global() -> None:
    assert windows(read(GEMMA3_270M)) == ([512] * 5 + [None]) * 3
    assert windows(read(GEMMA3_270M, sliding_window_pattern=2)) == [512, None] * 9
    absent = read(without(GEMMA3_270M, "sliding_window_pattern"))
    assert windows(absent) == ([512] * 5 + [None]) * 3
    assert absent.assumptions == ("no list of layer types: the pattern of model_type gemma3_text assumed",)


@pytest.mark.parametrize("config", [QWEN2_7B, QWEN3_06B, MISTRAL_7B, GEMMA3_270M])
def test_layer_types_win_over_every_flag(config: Config) -> None:
    types = ["sliding_attention", "full_attention", "full_attention"]
    spec = read(config, layer_types=types, num_hidden_layers=3, sliding_window=64, max_window_layers=2)
    assert windows(spec) == [64, None, None]
    off = "use_sliding_window is off, layer_types holds sliding_attention: layer_types wins"
    assert (off in spec.assumptions) == ("use_sliding_window" in config)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "mamba"}, r"'mamba', architectures \[\]\); known: llama, mistral, qwen2, qwen3, mixtral"),
        ({"architectures": ["BertModel"]}, r"model_type None, architectures \['BertModel'\]"),
        (SMOLLM2 | {"architectures": ["LlamaForSequenceClassification"]}, "accepted for llama: LlamaForCausalLM"),
        ({"model_type": "gemma3", "text_config": {"hidden_size": 1}}, "reads more than text .*'gemma3'"),
        (SMOLLM2 | {"hidden_act": "relu2"}, "hidden_act 'relu2' is not known; known: silu, swish, gelu"),
        (SMOLLM2 | {"torch_dtype": "float8_e4m3fn"}, "'float8_e4m3fn' is not supported; known: float32, bfloat16"),
        (SMOLLM2 | {"quantization_config": {"quant_method": "awq"}}, "quantization_config is .*'awq'.*unquantised"),
        (SMOLLM2 | {"sliding_window": 4096}, "sliding_window is 4096: llama has no window"),
        (SMOLLM2 | {"layer_types": ["sliding_attention"] * 30}, "known for llama: full_attention"),
        (MISTRAL_7B | {"attention_bias": True}, "attention_bias is True"),
        (MIXTRAL_8X7B | {"attention_bias": True}, "attention_bias is True"),
        (GEMMA3_270M | {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        (GEMMA3_270M | {"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0"),
        (GEMMA3_270M | {"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        (GPT2 | {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is True"),
        (GPT2 | {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn is True"),
        (GPT2 | {"add_cross_attention": True}, "add_cross_attention is True"),
        (
            QWEN3_06B | {"layer_types": ["linear_attention"] * 28},
            "layer_types holds 'linear_attention'; known for qwen3: full_attention, sliding_attention",
        ),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(config: Config, message: str) -> None:
    with pytest.raises(UnknownModelError, match=message):
        read(config)


@pytest.mark.parametrize(
    ("config", "fields"),
    [
        (
            SMOLLM2,
            "hidden_size num_hidden_layers num_attention_heads intermediate_size vocab_size max_position_embeddings",
        ),
        (MISTRAL_7B, "num_key_value_heads"),
        (QWEN2_7B, "num_key_value_heads"),
        (QWEN3_06B, "num_key_value_heads"),
        (MIXTRAL_8X7B, "num_key_value_heads"),
        (QWEN15_MOE, "num_key_value_heads"),
        (QWEN3_30B_A3B, "num_key_value_heads"),
        (GEMMA3_270M, "num_key_value_heads sliding_window"),
        (GPT2, "n_embd n_head n_layer"),
    ],
)
def test_a_missing_field_is_named_not_filled_with_one_checkpoints_number(config: Config, fields: str) -> None:
    for field in fields.split():
        with pytest.raises(BrokenModelError, match=f"toy: {field} is missing"):
            read(without(config, field))


def test_llama_without_key_value_heads_has_one_for_each_query_head() -> None:
    assert read(without(SMOLLM2, "num_key_value_heads")).layers[0] == FullAttention(9, 64, 64)
    assert read(QWEN2_7B, num_key_value_heads=None).layers[0].num_kv_heads == 28


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "576"}, "hidden_size is '576'; accepted: a whole number from 1"),
        ({"hidden_size": 576.5}, "hidden_size is 576.5; accepted: a whole number"),
        ({"num_hidden_layers": 0}, "num_hidden_layers is 0; accepted: a whole number from 1 to 10,000"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000; accepted"),
        ({"num_attention_heads": -9}, "num_attention_heads is -9; accepted"),
        ({"vocab_size": True}, "vocab_size is True; accepted: a whole number"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps is 'small'; accepted: a number above 0"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; accepted"),
        ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'; accepted: true or false"),
        ({"eos_token_id": [1, "2"]}, r"eos_token_id is \[1, '2'\]; accepted: a token id, a list"),
        ({"eos_token_id": -1}, "eos_token_id is -1; accepted"),
        ({"architectures": "LlamaForCausalLM"}, "architectures is 'LlamaForCausalLM'; accepted: a list of texts"),
        ({"model_type": 3}, "model_type is 3; accepted: a text"),
        ({"rope_scaling": "linear"}, "rope_scaling is 'linear'; accepted: an object or null"),
        ({"layer_types": ["full_attention"]}, "layer_types is '1 entries'; accepted: one for each of the 30"),
        (
            {"num_attention_heads": 10, "head_dim": 64},
            "is 3; accepted: a number that 10 query heads",
        ),
        ({"num_attention_heads": 12, "num_key_value_heads": 12, "hidden_size": 577}, "577 .* 12"),
        ({"head_dim": 63}, "63 rotated numbers in a head of 63; accepted: an even number"),
    ],
)
def test_a_wrong_value_is_refused_with_field_value_and_what_is_accepted(changes: Config, message: str) -> None:
    with pytest.raises(BrokenModelError, match=message):
        read(SMOLLM2, **changes)


def test_a_json_that_is_no_config_is_called_that() -> None:
    with pytest.raises(BrokenModelError, match=r"neither model_type nor architectures; give a model's config\.json"):
        read({"version": 1})


ANY_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
ROPE_JSON = st.dictionaries(
    st.sampled_from(["rope_type", "factor", "rope_theta", "full_attention", "beta_fast", "truncate", "mscale"]),
    ANY_JSON | st.sampled_from(["yarn", "llama3", "linear"]),
)


@settings(max_examples=400, deadline=None)
@given(st.data())
def test_no_value_of_any_field_ends_in_anything_but_a_model_or_our_error(data: st.DataObject) -> None:
    configs = [SMOLLM2, QWEN2_7B, QWEN3_06B, MISTRAL_7B, GEMMA3_270M, GPT2, LLAMA31_8B, FALCON_7B, FALCON_40B]
    config = data.draw(st.sampled_from(configs))
    dense = [SMOLLM2, QWEN2_7B, QWEN3_06B, MISTRAL_7B, GEMMA3_270M, GPT2, LLAMA31_8B]
    config = data.draw(st.sampled_from([*dense, MIXTRAL_8X7B, QWEN15_MOE, QWEN3_30B_A3B]))
    extra = ["rope_parameters", "layer_types", "partial_rotary_factor", "original_max_position_embeddings"]
    for name in data.draw(st.lists(st.sampled_from(sorted(config) + extra), min_size=1, max_size=3)):
        value = data.draw(ROPE_JSON if name.startswith("rope_") else ANY_JSON)
        config = config | {name: value}
    try:
        assert read(config).num_params > 0
    except KvfolioError as error:
        assert str(error).startswith("toy")
