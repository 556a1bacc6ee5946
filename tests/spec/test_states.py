"""Recurrent states of published models: bytes of one layer, worked out by hand from the sizes that stand beside them.

Those of whole models (layers * bytes) were also measured with transformers and vLLM's planner where noted.
"""

import pytest

from kvfolio.errors import BrokenModelError, UnknownModelError
from kvfolio.spec.config.states import state_layer
from kvfolio.spec.fields import Fields
from kvfolio.spec.formats import BF16, F16, F32, CacheFormat
from kvfolio.spec.layers import RecurrentState

Config = dict[str, object]


def mamba2_names(heads: int, head_dim: int | str, groups: int, state_size: int, **more: object) -> Config:
    """The field names of Bamba, which Granite 4 and Falcon-H1 took over."""
    return {
        "mamba_n_heads": heads,
        "mamba_d_head": head_dim,
        "mamba_n_groups": groups,
        "mamba_d_state": state_size,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        **more,
    }


def nemotron_names(heads: int, head_dim: int, state_size: int, **more: object) -> Config:
    return {
        "mamba_num_heads": heads,
        "mamba_head_dim": head_dim,
        "n_groups": 8,
        "ssm_state_size": state_size,
        "conv_kernel": 4,
        "expand": 2,
        **more,
    }


def delta_names(key_heads: int, value_heads: int, **more: object) -> Config:
    return {
        "linear_num_key_heads": key_heads,
        "linear_key_head_dim": 128,
        "linear_num_value_heads": value_heads,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        **more,
    }


def kimi_names(heads: int) -> Config:
    return {"linear_attn_config": {"num_heads": heads, "head_dim": 128, "short_conv_kernel_size": 4}}


JAMBA: Config = {"mamba_d_state": 16, "mamba_d_conv": 4, "mamba_expand": 2, "intermediate_size": 14336}
ZAMBA2: Config = {"mamba_d_state": 64, "mamba_d_conv": 4, "mamba_expand": 2, "mamba_headdim": 64}
FALCON_MAMBA: Config = {"state_size": 16, "conv_kernel": 4, "expand": 16, "intermediate_size": 8192}
CODESTRAL: Config = {"num_heads": 128, "head_dim": 64, "n_groups": 8, "state_size": 128, "conv_kernel": 4, "expand": 2}
PLAMO2: Config = {"mamba_num_heads": 64, "hidden_size_per_head": 128, "mamba_d_state": 64, "mamba_d_conv": 4}
RING_MINI: Config = {"num_attention_heads": 16, "head_dim": 128, "layer_group_size": 5, "group_norm_size": 4}
LING_3: Config = RING_MINI | {"short_conv_kernel_size": 4, "kda_lower_bound": -5.0}
MINIMAX: Config = {"num_attention_heads": 64, "head_dim": 128, "num_key_value_heads": 8}

NEMOTRON_NANO = nemotron_names(64, 64, 128, mamba_ssm_cache_dtype="float32")  # expand * hidden_size is 5,376, not 4,096
GRANITE_SMALL = mamba2_names(128, 64, 1, 128)
QWEN35 = delta_names(16, 48, mamba_ssm_dtype="float32")

# model_type, hidden_size, the other fields, mechanism, bytes of one layer: state + convolution.
PUBLISHED: dict[str, tuple[str, int, Config, str, int]] = {
    "Mamba-2.8B": ("mamba", 2560, {"state_size": 16, "conv_kernel": 4, "expand": 2}, "mamba", 163_840 + 30_720),
    "Falcon-Mamba-7B": ("falcon_mamba", 4096, FALCON_MAMBA, "mamba", 262_144 + 49_152),
    "Jamba-1.5-Mini": ("jamba", 4096, JAMBA, "mamba", 262_144 + 49_152),
    "Jamba-1.5-Large": ("jamba", 8192, JAMBA, "mamba", 524_288 + 98_304),
    "Codestral-Mamba": ("mamba2", 4096, CODESTRAL, "mamba2", 2_097_152 + 61_440),
    "Bamba-9B": ("bamba", 4096, mamba2_names(128, "auto", 1, 128), "mamba2", 2_097_152 + 50_688),
    "Granite-4.0-H-Small": ("granitemoehybrid", 4096, GRANITE_SMALL, "mamba2", 2_097_152 + 50_688),
    "Granite-4.0-H-Tiny": ("granitemoehybrid", 1536, mamba2_names(48, 64, 1, 128), "mamba2", 786_432 + 19_968),
    "Falcon-H1-0.5B": ("falcon_h1", 1024, mamba2_names(24, 64, 1, 128, mamba_d_ssm=1536), "mamba2", 393_216 + 10_752),
    "Zamba2-2.7B": ("zamba2", 2560, ZAMBA2 | {"n_mamba_heads": 80, "mamba_ngroups": 1}, "mamba2", 655_360 + 31_488),
    "Zamba2-7B": ("zamba2", 3584, ZAMBA2 | {"n_mamba_heads": 112, "mamba_ngroups": 2}, "mamba2", 917_504 + 44_544),
    "PLaMo-2-8B": ("plamo2", 4096, PLAMO2, "mamba2", 1_048_576 + 49_152),
    "Nemotron-H-8B": ("nemotron_h", 4096, nemotron_names(128, 64, 128), "mamba2", 4_194_304 + 61_440),
    "Nemotron-H-56B": ("nemotron_h", 8192, nemotron_names(256, 64, 256), "mamba2", 16_777_216 + 122_880),
    "Nemotron-3-Nano": ("nemotron_h", 2688, NEMOTRON_NANO, "mamba2", 2_097_152 + 36_864),
    "Qwen3-Next-80B-A3B": ("qwen3_next", 2048, delta_names(16, 32), "gated_delta_net", 1_048_576 + 49_152),
    "Qwen3.5-27B": ("qwen3_5_text", 5120, QWEN35, "gated_delta_net", 3_145_728 + 61_440),
    "Olmo-Hybrid-7B": ("olmo_hybrid", 3840, {"num_attention_heads": 30}, "gated_delta_net", 1_105_920 + 69_120),
    "Kimi-Linear-48B-A3B": ("kimi_linear", 2304, kimi_names(32), "kda", 2_097_152 + 73_728),
    "Kimi-K3": ("kimi_linear", 7168, kimi_names(96), "kda", 6_291_456 + 221_184),
    "Ling-3.0-Tiny": ("bailing_hybrid", 1536, LING_3, "kda", 1_048_576 + 36_864),
    "Ring-Mini-Linear-2.0": ("bailing_moe_linear", 2048, RING_MINI, "lightning", 524_288),
    "MiniMax-Text-01": ("minimax_text_01", 6144, MINIMAX, "lightning", 2_097_152),
    "MiniMax-M1": ("minimax_m1", 6144, MINIMAX, "lightning", 2_097_152),
    "RecurrentGemma-2B": ("recurrent_gemma", 2560, {"lru_width": 2560, "conv1d_width": 4}, "rg_lru", 10_240 + 15_360),
    "RecurrentGemma-9B": ("recurrent_gemma", 4096, {"conv1d_width": 4}, "rg_lru", 16_384 + 24_576),
    "LFM2-1.2B": ("lfm2", 2048, {"conv_L_cache": 3, "conv_dim": 2048}, "short_conv", 8_192),
    "ZAYA1-8B": ("zaya", 2048, {"num_attention_heads": 8, "num_key_value_heads": 2}, "cca", 256 + 5_120),
    "RWKV-4-7B": ("rwkv", 4096, {}, "rwkv", 49_152 + 16_384),
    "xLSTM-7B": ("xlstm", 4096, {"num_heads": 8}, "xlstm", 2_101_264),
}

# Recurrent layers, bytes of a sequence as vLLM counts them, bytes as transformers keeps them (both measured).
WHOLE_MODELS = {
    "Mamba-2.8B": (64, 12_451_840, 23_592_960),
    "Jamba-1.5-Mini": (28, 8_716_288, 16_515_072),
    "Granite-4.0-H-Small": (36, 77_322_240, 153_427_968),
    "Falcon-H1-0.5B": (36, 14_542_848, 28_827_648),
    "Nemotron-3-Nano": (23, 49_082_368, 49_364_992),
    "Qwen3-Next-80B-A3B": (36, 39_518_208, 77_856_768),
    "Qwen3.5-27B": (48, 153_944_064, 154_927_104),
    "Kimi-K3": (69, 449_372_160, 454_459_392),
}


def read(
    model_type: str, hidden_size: int, sizes: Config, dtype: str | None = "bfloat16"
) -> tuple[RecurrentState, list[str]]:
    fields = Fields({"hidden_size": hidden_size, "torch_dtype": dtype, **sizes}, "config.json")
    return state_layer(fields, model_type), fields.assumptions


def bytes_of(layer: RecurrentState) -> int:
    return layer.fixed_bytes(CacheFormat(BF16, BF16))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_layer_takes_its_bytes(name: str) -> None:
    model_type, hidden_size, sizes, mechanism, expected = PUBLISHED[name]
    layer, _ = read(model_type, hidden_size, sizes)
    assert (layer.mechanism, bytes_of(layer)) == (mechanism, expected)


@pytest.mark.parametrize("name", WHOLE_MODELS)
def test_bytes_of_a_whole_model_are_those_measured_and_the_note_has_those_of_transformers(name: str) -> None:
    num_layers, counted, kept_by_transformers = WHOLE_MODELS[name]
    layer, assumptions = read(*PUBLISHED[name][:3])
    assert num_layers * bytes_of(layer) == counted
    assert (
        f"is counted as vLLM stores it (state in {layer.state_format.name}, 3 conv columns in bf16)" in assumptions[-1]
    )
    assert f"{counted // num_layers:,} B a sequence" in assumptions[-1]
    assert f"transformers keeps {kept_by_transformers // num_layers:,} B (state in f32, 4" in assumptions[-1]


def test_a_cache_format_for_keys_says_nothing_about_a_state() -> None:
    layer, _ = read("qwen3_next", 2048, delta_names(16, 32))
    assert layer.fixed_bytes(CacheFormat(F32, F32)) == bytes_of(layer)


# ---- formats --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["mamba_ssm_dtype", "mamba_ssm_cache_dtype"])
@pytest.mark.parametrize(
    ("name", "fmt"), [("float32", F32), ("torch.float", F32), ("bfloat16", BF16), ("half", F16), ("auto", BF16)]
)
@pytest.mark.parametrize("model", ["Granite-4.0-H-Small", "Nemotron-H-8B", "Qwen3-Next-80B-A3B", "Jamba-1.5-Mini"])
def test_a_state_dtype_in_the_config_wins(model: str, field: str, name: str, fmt: object) -> None:
    model_type, hidden_size, sizes, *_ = PUBLISHED[model]
    layer, _ = read(model_type, hidden_size, sizes | {field: name})
    assert (layer.state_format, layer.conv_format) == (fmt, BF16)


@pytest.mark.parametrize("name", ["fp8", "float8_e4m3fn", "float64"])
def test_a_state_dtype_that_is_not_known_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnknownModelError, match=rf"dtype of recurrent states is '{name}'; known: auto, float32"):
        read("bamba", 4096, GRANITE_SMALL | {"mamba_ssm_dtype": name})


def test_kda_keeps_f32_whatever_the_config_says() -> None:
    layer, _ = read("kimi_linear", 2304, kimi_names(32) | {"mamba_ssm_dtype": "bfloat16"})
    assert layer.state_format == F32


def test_qwen35_without_its_state_dtype_is_read_as_published_and_that_is_noted() -> None:
    layer, assumptions = read("qwen3_5_text", 5120, delta_names(16, 48))
    assert layer.state_format == F32
    assert assumptions[0].startswith("mamba_ssm_dtype is absent: float32 assumed")


@pytest.mark.parametrize(
    ("dtype", "fmt", "noted"),
    [
        ("float16", F16, None),
        ("torch.bfloat16", BF16, None),
        ("float32", BF16, "dtype is float32"),
        (None, BF16, "dtype is"),
    ],
)
def test_a_state_in_the_dtype_of_the_model_takes_16_bits(dtype: str | None, fmt: object, noted: str | None) -> None:
    layer, assumptions = read("jamba", 4096, JAMBA, dtype)
    assert (layer.state_format, layer.conv_format) == (fmt, fmt)
    assert [note.startswith(noted or "no note") for note in assumptions[:-1]] == ([True] if noted else [])


# ---- which mechanism ------------------------------------------------------------------------------------------------


def test_ling_25_has_lightning_attention_and_ling_3_of_the_same_name_has_kda() -> None:
    assert read("bailing_hybrid", 4096, RING_MINI)[0].mechanism == "lightning"
    assert read("bailing_hybrid", 4096, LING_3)[0].mechanism == "kda"


def test_kda_written_by_transformers_is_the_same_layer() -> None:
    flat: Config = {"linear_num_heads": 32, "linear_head_dim": 128, "linear_conv_kernel_dim": 4}
    assert read("kimi_linear", 2304, flat)[0] == read("kimi_linear", 2304, kimi_names(32))[0]


def test_a_family_that_is_not_known_is_read_by_its_fields_and_that_is_noted() -> None:
    layer, assumptions = read("granite5", 4096, GRANITE_SMALL)
    assert layer == read("granitemoehybrid", 4096, GRANITE_SMALL)[0]
    assert assumptions[0] == "model_type 'granite5' is not known: its recurrent layers are read by their mamba_n_heads"


def test_olmo_hybrid_derives_only_the_sizes_that_are_null() -> None:
    sizes: Config = {"num_attention_heads": 30, "linear_num_value_heads": 15, "linear_key_head_dim": None}
    layer, _ = read("olmo_hybrid", 3840, sizes)
    assert (layer.state_numbers, layer.conv_numbers) == (15 * 96 * 192, 3 * (2 * 30 * 96 + 15 * 192))


def test_a_field_that_is_null_tells_nothing() -> None:
    layer, _ = read("rg9", 4096, {"linear_attn_config": None, "mamba_d_state": None, "lru_width": 4096})
    assert layer.mechanism == "rg_lru"


@pytest.mark.parametrize("model_type", ["rwkv7", "inkling_text", "llama"])
def test_a_mechanism_that_is_not_known_is_refused_by_name(model_type: str) -> None:
    with pytest.raises(UnknownModelError, match=f"recurrent layers of model_type '{model_type}' are not known"):
        read(model_type, 4096, {"num_attention_heads": 32})


def test_per_layer_convolutions_of_qwen4_are_refused_by_name() -> None:
    assert read("qwen4_exp_text", 2048, delta_names(16, 32) | {"ple_layer_ids": []})[0].mechanism == "gated_delta_net"
    with pytest.raises(UnknownModelError, match="ple_layer_ids"):
        read("qwen4_exp_text", 2048, delta_names(16, 32) | {"ple_layer_ids": [2]})


# ---- sizes that are missing or wrong --------------------------------------------------------------------------------


def test_heads_that_do_not_make_up_the_inner_width_are_refused() -> None:
    with pytest.raises(BrokenModelError, match="mamba_n_heads 128 times mamba_d_head 32 is not the inner width 8192"):
        read("bamba", 4096, mamba2_names(128, 32, 1, 128))
    with pytest.raises(BrokenModelError, match="8192 does not divide into 100 heads; correct one of them"):
        read("bamba", 4096, mamba2_names(100, "auto", 1, 128))


def test_absent_sizes_are_those_of_the_class_and_noted() -> None:
    layer, assumptions = read("jamba", 4096, {})
    assert layer == read("jamba", 4096, JAMBA)[0]
    assert "mamba_d_state is absent: 16 assumed" in assumptions


@pytest.mark.parametrize("kernel", [0, -4, 2.5, "4"])
def test_a_kernel_that_is_no_whole_number_above_zero_is_refused(kernel: object) -> None:
    with pytest.raises(BrokenModelError, match="mamba_d_conv"):
        read("jamba", 4096, JAMBA | {"mamba_d_conv": kernel})


def test_a_kernel_of_one_keeps_no_inputs() -> None:
    layer, assumptions = read("jamba", 4096, JAMBA | {"mamba_d_conv": 1})
    assert (layer.conv_numbers, bytes_of(layer)) == (0, 262_144)
    assert "as vLLM stores it (state in bf16)" in assumptions[-1]
