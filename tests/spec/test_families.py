"""Every config of a decoder becomes its layers by its fields, or is refused by name.

Knows nothing of files: configs are dictionaries here.
"""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from published import (
    GEMMA3_270M,
    GPT2,
    LLAMA31_8B,
    MISTRAL_7B,
    QWEN2_7B,
    QWEN3_06B,
    QWEN3_4B,
    QWEN3_32B,
    SMOLLM2,
)
from traps import DEEPSEEK_V3, GATED_DELTA, Config, Trap, plain
from traps_layers import ALL

from kvfolio.errors import BrokenModelError, KvfolioError, UnknownModelError
from kvfolio.spec.config.families import spec_from_config
from kvfolio.spec.config.runnable import runnable_from_config
from kvfolio.spec.formats import BF16, CacheFormat
from kvfolio.spec.layers import (
    BlockSparse,
    CombinedLayer,
    CompressedSparse,
    FullAttention,
    LatentAttention,
    SharedCache,
    SlidingWindow,
)
from kvfolio.spec.model import ModelSpec

BYTES16 = CacheFormat(BF16, BF16)
INDEXED = DEEPSEEK_V3 | {"model_type": "deepseek_v32", "index_head_dim": 128, "index_topk": 2048, "index_n_heads": 64}


def read(config: Config) -> ModelSpec:
    return spec_from_config(config, "model")


def bytes_at(spec: ModelSpec, num_tokens: int) -> int:
    return sum(layer.bytes_at(num_tokens, BYTES16) for layer in spec.layers)


# ---- sizes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trap", ALL.values(), ids=ALL)
def test_a_config_takes_its_bytes(trap: Trap) -> None:
    spec = read(trap.config)
    far = 2**20  # behind every window, and a multiple of every ratio
    assert bytes_at(spec, far) == trap.fixed + trap.growing * far
    assert sum(layer.naive_token_bytes(BYTES16) for layer in spec.layers) == trap.naive


@pytest.mark.parametrize("trap", ALL.values(), ids=ALL)
def test_a_cache_that_is_not_used_in_training_is_still_there(trap: Trap) -> None:
    assert read(trap.config | {"use_cache": False}).layers == read(trap.config).layers


@pytest.mark.parametrize(
    ("config", "num_tokens", "num_bytes"),
    [
        (DEEPSEEK_V3, 65_536, 4_605_345_792),
        ({"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12}, 8_192, 301_989_888),
        (
            {"model_type": "gpt_bigcode", "n_layer": 24, "n_embd": 2048, "n_head": 16, "multi_query": True},
            8_192,
            100_663_296,
        ),
    ],
    ids=["latent", "gpt2", "santacoder"],
)
def test_a_text_takes_the_bytes_that_users_computed(config: Config, num_tokens: int, num_bytes: int) -> None:
    assert bytes_at(read(config), num_tokens) == num_bytes


def test_a_hybrid_charges_its_attention_layers_alone_for_the_text() -> None:
    config = plain("qwen3_5_text", 64, 5120, 24, 4, head_dim=256, full_attention_interval=4, **GATED_DELTA)
    spec = read(config)
    attention = [layer for layer in spec.layers if isinstance(layer, FullAttention)]
    assert len(attention) == 16
    assert sum(layer.bytes_at(262_144, BYTES16) for layer in attention) == 16_384 * 2**20
    assert sum(layer.fixed_bytes(BYTES16) for layer in spec.layers) > 0


def test_a_layer_that_shares_names_the_layer_it_reads() -> None:
    trap = ALL["layers: the last layers share"]
    shared = [layer for layer in read(trap.config).layers if isinstance(layer, SharedCache)]
    assert len(shared) == 15
    assert {type(layer.source) for layer in shared} == {FullAttention, SlidingWindow}
    assert all(layer.bytes_at(1000, BYTES16) == 0 for layer in shared)


def test_layers_stand_in_order() -> None:
    windows = [layer.window for layer in read(ALL["windows: letters"].config).layers]
    assert windows == [4096, 4096, 4096, None] * 16
    first_global = plain("cohere2", 8, 512, 8, 8, sliding_window=64, layer_switch=4)
    first_global["order_of_interleaved_layers"] = "global_attn_first"
    assert [layer.window for layer in read(first_global).layers] == [None, 64, 64, 64] * 2
    own = plain("mistral", 4, 512, 8, 8, sliding_window=[None, 64])
    assert [layer.window for layer in read(own).layers] == [None, 64] * 2


def test_prediction_layers_behind_the_last_are_no_layers_of_the_text() -> None:
    spec = read(ALL["latents: compressed vectors"].config)
    assert len(spec.layers) == 43
    assert all(isinstance(layer, CompressedSparse) for layer in spec.layers)
    too_many = plain("deepseek_v4", 3, 4096, 64, 1, compress_ratios=[0, 4, 128, 0])
    with pytest.raises(BrokenModelError, match="compress_ratios"):
        read(too_many | {"num_nextn_predict_layers": 0})


def test_a_top_k_is_in_tokens() -> None:
    blocks = read(ALL["latents: blocks chosen by an index"].config).layers[-1]
    assert isinstance(blocks, BlockSparse) and blocks.top_k == 2048
    tokens = read(ALL["latents: index keys that some layers share"].config).layers
    assert {layer.top_k for layer in tokens if isinstance(layer, LatentAttention)} == {2048}


def test_an_encoder_without_a_length_is_priced_by_the_token() -> None:
    spec = read(ALL["layers: an encoder of any length"].config)
    assert all(isinstance(layer, CombinedLayer) for layer in spec.layers)
    assert any("12,288 B" in text for text in spec.assumptions)
    pictures = read(ALL["layers: layers for pictures"].config)
    assert any("32,768 B" in text for text in pictures.assumptions)


def test_a_decoder_inside_a_pair_reads_its_encoder() -> None:
    pair: Config = {
        "model_type": "vision-encoder-decoder",
        "decoder": plain("mbart", 4, 1024, 16) | {"is_decoder": True},
    }
    assert {layer.kind for layer in read(pair).layers} == {"full+cross_attention"}


@pytest.mark.parametrize(
    "config",
    [SMOLLM2, LLAMA31_8B, MISTRAL_7B, QWEN2_7B, QWEN3_06B, QWEN3_4B, QWEN3_32B, GEMMA3_270M, GPT2],
    ids=["smollm2", "llama31", "mistral", "qwen2", "qwen3-06", "qwen3-4", "qwen3-32", "gemma3", "gpt2"],
)
@pytest.mark.parametrize(
    "change",
    [
        {},
        {"sliding_window": 64},
        {"sliding_window": None},
        {"sliding_window": 64, "use_sliding_window": True, "max_window_layers": 3},
        {"sliding_window": 64, "sliding_window_pattern": 3},
        {"num_key_value_heads": None},
    ],
    ids=["as published", "window", "no window", "window from layer 3", "count", "no key heads"],
)
def test_what_runs_has_the_layers_that_are_planned(config: Config, change: Config) -> None:
    try:
        runs = runnable_from_config(config | change, "model")
    except KvfolioError:
        pytest.skip("the engine does not run it")
    planned = read(config | change)
    assert planned.layers == runs.layers
    assert planned.max_context == runs.max_context
    assert (planned.hidden_size, planned.num_q_heads) == (runs.hidden_size, runs.num_q_heads)


# ---- what is assumed ------------------------------------------------------------------------------------------------


def test_an_absent_field_takes_the_default_of_its_class_and_says_so() -> None:
    spec = read(plain("mistral", 32, 4096, 32))
    assert spec.layers[0].num_kv_heads == 8
    assert "num_key_value_heads is absent: 8 assumed, the default of model_type mistral" in spec.assumptions
    assert "sliding_window is absent: 4,096 assumed, the default of model_type mistral" in spec.assumptions


def test_a_model_without_a_type_is_known_by_its_architecture() -> None:
    nameless = {name: value for name, value in plain("mistral", 32, 4096, 32).items() if name != "model_type"}
    spec = read(nameless | {"architectures": ["MistralForCausalLM"]})
    assert spec.model_type == "mistral" and spec.layers[0].num_kv_heads == 8
    assert "model_type is absent: mistral taken from architectures" in spec.assumptions
    by_fields = read(nameless | {"architectures": ["SomebodyForCausalLM"]})
    assert by_fields.model_type == "unknown" and by_fields.layers[0].num_kv_heads == 32


def test_null_is_not_absent() -> None:
    spec = read(plain("mistral", 32, 4096, 32, sliding_window=None) | {"num_key_value_heads": None})
    assert spec.layers[0] == FullAttention(32, 128, 128)


def test_a_complete_config_needs_no_assumption() -> None:
    config = plain("llama", 30, 576, 9, 3, intermediate_size=1536, vocab_size=49152, tie_word_embeddings=True)
    assert read(config).assumptions == ()


def test_an_unknown_model_is_read_by_its_fields_and_says_so() -> None:
    spec = read(plain("somebody_v9", 30, 576, 9, 3))
    assert spec.layers == (FullAttention(3, 64, 64),) * 30
    assert any("somebody_v9 is not known" in text for text in spec.assumptions)


def test_heads_that_an_unknown_model_leaves_out_are_as_many_as_its_queries() -> None:
    spec = read(plain("somebody_v9", 30, 576, 9))
    assert spec.layers[0].num_kv_heads == 9
    assert any("key/value heads" in text for text in spec.assumptions)


@pytest.mark.parametrize(
    "field",
    [
        {"kv_lora_width_rank": 512},
        {"kv_compress_ratio": 4},
        {"mamba_layers": [1, 2]},
        {"ssm_cfg": {"d": 1}},
        {"local_window": 1024},
        {"cla_groups": 2},
        {"indexer_budget": 2048},
        {"hybrid_ratio": "3:1"},
    ],
    ids=lambda field: next(iter(field)),
)
def test_an_unknown_model_with_a_field_that_might_decide_is_refused(field: Config) -> None:
    with pytest.raises(UnknownModelError, match=next(iter(field))):
        read(plain("somebody_v9", 30, 576, 9, 3) | field)


def test_an_unknown_model_may_have_switches_that_are_off() -> None:
    spec = read(plain("somebody_v9", 30, 576, 9, 3, mamba_layers=None, local_window=0, use_sparse_attention=False))
    assert spec.layers == (FullAttention(3, 64, 64),) * 30


def test_an_unknown_model_may_say_twice_which_layers_attend() -> None:
    config = plain("somebody_v9", 4, 2048, 16, 2, head_dim=256, full_attention_interval=4, **GATED_DELTA)
    twice = config | {"layer_types": ["linear_attention"] * 3 + ["full_attention"], "mamba_ssm_dtype": "float32"}
    assert [layer.kind for layer in read(twice).layers] == [layer.kind for layer in read(config).layers]
    assert read(config).layers[3] == FullAttention(2, 256, 256)


@pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size", "num_attention_heads"])
def test_a_missing_number_of_an_unknown_model_is_named(field: str) -> None:
    config = plain("somebody_v9", 30, 576, 9, 3)
    del config[field]
    with pytest.raises(BrokenModelError, match=f"{field} is missing"):
        read(config)


def test_weights_that_cannot_be_counted_do_not_hide_the_cache() -> None:
    spec = read(plain("somebody_v9", 30, 576, 9, 3))
    assert spec.weights.num_params == 0
    assert any("weights are not counted" in text for text in spec.assumptions)


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "config",
    [
        plain("bert", 12, 768, 12, architectures=["BertForMaskedLM"], use_cache=True),
        plain("roberta", 12, 768, 12),
        plain("deberta-v2", 12, 768, 12),
        plain("vit", 12, 768, 12),
        {"model_type": "clip", "text_config": plain("clip_text_model", 12, 512, 8)},
        plain("somebody_v9", 12, 768, 12, architectures=["SomebodyForMaskedLM"]),
        plain("gemma3_text", 24, 768, 3, 1, architectures=["Gemma3TextModel"], use_bidirectional_attention=True),
    ],
    ids=["bert", "roberta", "deberta", "vit", "clip", "masked", "embedding"],
)
def test_an_encoder_is_refused(config: Config) -> None:
    with pytest.raises(UnknownModelError, match="encoder-only: no KV cache"):
        read(config)


def test_an_encoder_that_decodes_has_a_cache() -> None:
    assert read(plain("bert", 12, 768, 12, is_decoder=True)).layers == (FullAttention(12, 64, 64),) * 12


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (plain("llama", 2, 512, 8, layer_types=["full_attention", "wavelet_attention"]), "wavelet_attention"),
        (plain("nemotron_h", 3, 512, 8, hybrid_override_pattern="M*Q"), "'Q'"),
        (plain("deepseek_v4", 2, 512, 8, 1, compress_ratios=[4, 16]), "16"),
        (plain("dory", 4, 512, 8, 8), "several times.*give the config of a model that passes each layer once"),
        (DEEPSEEK_V3 | {"layer_types": ["sliding_attention"] * 61, "sliding_window": 64}, "latent"),
        (plain("llama", 2, 512, 8, 8, index_topk=64, index_head_dim=64), "index keys"),
        (INDEXED | {"index_kpool": 2}, "index_kpool is 2: .*known: 1; correct the field"),
        (INDEXED | {"kv_source_layers": [0] * 61}, "layer 1 shares a latent but keeps index keys.*correct the fields"),
        (
            plain("qwen3_5_text", 4, 512, 8, 2, head_dim=64, kv_source_layers=[0, 0, 2, 3], **GATED_DELTA),
            "layer 1 shares the memory of a .*known: full attention, windows and latents; correct the fields",
        ),
    ],
    ids=["kind", "letter", "ratio", "loop", "latent window", "index", "pooled", "shared index", "shared state"],
)
def test_what_is_not_known_is_refused_by_name(config: Config, named: str) -> None:
    with pytest.raises(UnknownModelError, match=named):
        read(config)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"num_hidden_layers": 10**12}, "num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_attention_heads": "nine"}, "num_attention_heads"),
        ({"num_key_value_heads": 7}, "num_key_value_heads"),
        ({"num_key_value_heads": True}, "num_key_value_heads"),
        ({"head_dim": -64}, "head_dim"),
        ({"head_dim": None, "hidden_size": 577}, "divide into"),
        ({"sliding_window": "wide", "model_type": "mistral"}, "sliding_window"),
        ({"max_position_embeddings": math.nan}, "max_position_embeddings"),
        ({"text_config": {"hidden_size": 576}, "model_type": "somebody_v9"}, "num_hidden_layers"),
        ({"num_kv_shared_layers": 31}, "num_kv_shared_layers"),
        ({"per_layer_config": {"99": {"head_dim": 1}}}, "99"),
        ({"per_layer_config": {"9" * 5000: {"head_dim": 1}}}, "layer number"),
        ({"per_layer_config": {"1": {"head_dim": [1]}}}, "head_dim"),
        ({"attention_types": [[["global"], 10**9]] * 3}, "attention_types"),
        ({"attn_layer_indices": [31]}, "attn_layer_indices"),
        ({"block_configs": [3] * 30}, "block_configs"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_broken_value_is_named(change: Config, named: str) -> None:
    with pytest.raises(BrokenModelError, match=named):
        read(plain("llama", 30, 576, 9, 3) | change)


def test_an_object_that_is_no_config_is_refused() -> None:
    with pytest.raises(BrokenModelError, match="model_type"):
        read({"format": "pt"})


# ---- context and dtype ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("positions", "scaling", "context"),
    [
        (32_768, {"rope_type": "telechat3-yarn", "factor": 4.0, "original_max_position_embeddings": 8_192}, 32_768),
        (1_048_576, {"type": "deepseek_yarn", "factor": 32, "original_max_position_embeddings": 32_768}, 1_048_576),
        (32_768, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768}, 131_072),
        (131_072, {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8_192}, 131_072),
        (131_072, {"rope_type": "llama3", "factor": 32.0, "original_max_position_embeddings": 8_192}, 131_072),
        (32_768, None, 32_768),
    ],
    ids=["telechat", "deepseek", "by hand", "llama3", "llama3 32", "none"],
)
def test_a_context_is_scaled_once(positions: int, scaling: Config | None, context: int) -> None:
    config = plain("llama", 30, 576, 9, 3, rope_scaling=scaling) | {"max_position_embeddings": positions}
    assert read(config).max_context == context


def test_a_context_that_is_not_stated_is_none() -> None:
    config = plain("somebody_v9", 30, 576, 9, 3)
    del config["max_position_embeddings"]
    assert read(config).max_context is None


@pytest.mark.parametrize(
    ("fields", "dtype"),
    [
        ({"torch_dtype": "float16"}, "f16"),
        ({"torch_dtype": None, "dtype": "bfloat16"}, "bf16"),
        ({"torch_dtype": "float32"}, "f32"),
        ({"torch_dtype": "torch.half"}, "f16"),
        ({"torch_dtype": None}, "bf16"),
    ],
    ids=["f16", "dtype", "f32", "half", "absent"],
)
def test_a_dtype_is_kept_as_stated(fields: Config, dtype: str) -> None:
    assert read(plain("llama", 30, 576, 9, 3) | fields).dtype == dtype


@pytest.mark.parametrize("word", ["float64", "float8_e4m3fn", "posit16"])
def test_a_dtype_that_no_cache_has_is_noted_and_counted_as_bfloat16(word: str) -> None:
    spec = read(plain("llama", 30, 576, 9, 3, torch_dtype=word))
    assert spec.dtype == "bf16"
    assert f"dtype is '{word}': the cache is counted as bfloat16's" in spec.assumptions


def test_the_dtype_may_stand_outside() -> None:
    inner = plain("qwen3_text", 2, 512, 8, 8)
    del inner["torch_dtype"]
    assert read({"model_type": "qwen3_vl", "dtype": "float16", "text_config": inner}).dtype == "f16"


# ---- junk -----------------------------------------------------------------------------------------------------------

_NAMES = [*sorted({name for trap in ALL.values() for name in trap.config}), "text_config", "rope_scaling", "decoder"]
_JUNK = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(10**13), 10**13)
    | st.floats()
    | st.sampled_from(["full_attention", "LLLG", "M*-E", "mistral", "yarn", "", "x"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(_NAMES), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(ALL)), st.dictionaries(st.sampled_from(_NAMES), _JUNK, max_size=3))
def test_junk_gives_a_named_error_or_finite_bytes(name: str, junk: Config) -> None:
    try:
        spec = read(ALL[name].config | junk)
    except KvfolioError as error:
        assert str(error)
        return
    assert 0 <= bytes_at(spec, 1000) < 2**120
    assert spec.max_context is None or spec.max_context >= 1


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.text(max_size=8) | st.sampled_from(_NAMES), _JUNK, max_size=8))
def test_nothing_but_junk_gives_a_named_error_or_finite_bytes(junk: Config) -> None:
    try:
        assert bytes_at(read(junk), 1000) >= 0
    except KvfolioError as error:
        assert str(error)


def test_a_class_that_stores_more_heads_than_the_weights_have_is_named() -> None:
    config: dict[str, object] = {"model_type": "falcon", "num_hidden_layers": 60, "hidden_size": 8192}
    config |= {"num_attention_heads": 128, "new_decoder_architecture": True, "num_kv_heads": 8, "vocab_size": 65024}
    spec = spec_from_config(config, "falcon-40b")
    assert spec.layers[0].num_kv_heads == 8
    assert any("transformers stores 128, 16 times the bytes" in note for note in spec.assumptions)


def test_a_checkpoint_that_asks_for_a_smaller_cache_is_heard() -> None:
    config: dict[str, object] = {"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64, "vocab_size": 100}
    config |= {"num_attention_heads": 4, "quantization_config": {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}}
    assert any("asks for its own cache format" in note for note in spec_from_config(config, "toy").assumptions)
    config["quantization_config"] = {"kv_cache_scheme": None}
    assert not any("cache format" in note for note in spec_from_config(config, "toy").assumptions)


@pytest.mark.parametrize(("window", "growing"), [(262_144, 393_216), (131_072, 393_216), (131_071, 0)])
def test_a_window_that_no_text_can_fill_is_full_attention(window: int, growing: int) -> None:
    config: dict[str, object] = {"model_type": "phi3", "num_hidden_layers": 32, "hidden_size": 3072}
    config |= {"num_attention_heads": 32, "num_key_value_heads": 32, "intermediate_size": 8192, "vocab_size": 32064}
    spec = spec_from_config(config | {"max_position_embeddings": 131_072, "sliding_window": window}, "phi-3-mini-128k")
    assert sum(layer.growth(BYTES16) for layer in spec.layers) == growing
    assert any("no effect" in note for note in spec.assumptions) == (growing > 0)
