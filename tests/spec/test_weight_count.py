"""Weights counted from configs, against published counts and checkpoint sizes.

Knows nothing of transformers; ``tests/parity/test_weight_count.py`` compares with its networks.
"""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published import LLAMA31_8B, SMOLLM2, Config

from kvfolio.errors import BrokenModelError
from kvfolio.spec.config.families import spec_from_config
from kvfolio.spec.config.heads import HEAD_NAMES, HIDDEN_NAMES
from kvfolio.spec.fields import Fields
from kvfolio.spec.model import ModelSpec, WeightCount
from kvfolio.spec.weights.count import count_weights

LLAMA31_70B = LLAMA31_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_hidden_layers": 80,
}
LLAMA31_405B = LLAMA31_8B | {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
    "num_hidden_layers": 126,
}
MISTRAL_7B = LLAMA31_8B | {"model_type": "mistral", "vocab_size": 32000, "sliding_window": 4096, "rope_scaling": None}
MIXTRAL_8X7B = MISTRAL_7B | {
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
GPT2: Config = {
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "vocab_size": 50257,
}
QWEN25_7B = SMOLLM2 | {
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
}
QWEN3_8B = LLAMA31_8B | {
    "model_type": "qwen3",
    "head_dim": 128,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "rope_scaling": None,
    "vocab_size": 151936,
}
QWEN3_30B_A3B = QWEN3_8B | {
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
}
QWEN3_NEXT = QWEN3_30B_A3B | {
    "model_type": "qwen3_next",
    "full_attention_interval": 4,
    "head_dim": 256,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "moe_intermediate_size": 512,
    "num_attention_heads": 16,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "num_key_value_heads": 2,
    "shared_expert_intermediate_size": 512,
}
DEEPSEEK_V3: Config = {
    "model_type": "deepseek_v3",
    "first_k_dense_replace": 3,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {"fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]},
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
KIMI_K2 = DEEPSEEK_V3 | {
    "model_type": "kimi_k2",
    "first_k_dense_replace": 1,
    "n_routed_experts": 384,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "num_nextn_predict_layers": 0,
    "vocab_size": 163840,
}
GPT_OSS_120B: Config = {
    "model_type": "gpt_oss",
    "attention_bias": True,
    "head_dim": 64,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "max_position_embeddings": 131072,
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "num_local_experts": 128,
    "quantization_config": {
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
        "quant_method": "mxfp4",
    },
    "sliding_window": 128,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}
GPT_OSS_20B = GPT_OSS_120B | {"num_hidden_layers": 24, "num_local_experts": 32}
FALCON_7B: Config = {
    "model_type": "falcon",
    "alibi": False,
    "bias": False,
    "hidden_size": 4544,
    "multi_query": True,
    "new_decoder_architecture": False,
    "num_attention_heads": 71,
    "num_hidden_layers": 32,
    "parallel_attn": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 65024,
}
GEMMA2_9B: Config = {
    "model_type": "gemma2",
    "head_dim": 256,
    "hidden_size": 3584,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 16,
    "num_hidden_layers": 42,
    "num_key_value_heads": 8,
    "sliding_window": 4096,
    "torch_dtype": "bfloat16",
    "vocab_size": 256000,
}
GEMMA3_27B: Config = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "head_dim": 128,
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "num_attention_heads": 32,
        "num_hidden_layers": 62,
        "num_key_value_heads": 16,
        "sliding_window": 1024,
        "vocab_size": 262208,
    },
    "torch_dtype": "bfloat16",
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
    },
}
MAMBA_28B: Config = {
    "model_type": "mamba",
    "conv_kernel": 4,
    "expand": 2,
    "hidden_size": 2560,
    "intermediate_size": 5120,
    "num_hidden_layers": 64,
    "state_size": 16,
    "time_step_rank": 160,
    "torch_dtype": "float32",
    "vocab_size": 50280,
}
T5_LARGE: Config = {
    "model_type": "t5",
    "d_ff": 4096,
    "d_kv": 64,
    "d_model": 1024,
    "is_encoder_decoder": True,
    "num_decoder_layers": 24,
    "num_heads": 16,
    "num_layers": 24,
    "vocab_size": 32128,
}
WHISPER_LARGE: Config = {
    "model_type": "whisper",
    "d_model": 1280,
    "decoder_attention_heads": 20,
    "decoder_ffn_dim": 5120,
    "decoder_layers": 32,
    "encoder_attention_heads": 20,
    "encoder_ffn_dim": 5120,
    "encoder_layers": 32,
    "is_encoder_decoder": True,
    "max_source_positions": 1500,
    "max_target_positions": 448,
    "num_mel_bins": 128,
    "torch_dtype": "float16",
    "vocab_size": 51866,
}
OPENELM_270M: Config = {
    "model_type": "openelm",
    "ffn_dim_divisor": 256,
    "ffn_multipliers": [
        *(0.5, 0.73, 0.97, 1.2, 1.43, 1.67, 1.9, 2.13),
        *(2.37, 2.6, 2.83, 3.07, 3.3, 3.53, 3.77, 4.0),
    ],
    "head_dim": 64,
    "max_context_length": 2048,
    "model_dim": 1280,
    "normalize_qk_projections": True,
    "num_gqa_groups": 4,
    "num_kv_heads": [3] * 5 + [4] * 7 + [5] * 4,
    "num_query_heads": [12] * 5 + [16] * 7 + [20] * 4,
    "num_transformer_layers": 16,
    "vocab_size": 32000,
}


def count(config: Config) -> tuple[WeightCount, tuple[str, ...]]:
    """The weights of ``config``, and what was assumed on the way."""
    spec = spec_from_config(config, "test")
    return spec.weights, spec.assumptions


@pytest.mark.parametrize(
    ("config", "num_params"),
    [
        (SMOLLM2, 134_515_008),
        (LLAMA31_8B, 8_030_261_248),
        (LLAMA31_70B, 70_553_706_496),
        (LLAMA31_405B, 405_853_388_800),
        (MISTRAL_7B, 7_241_732_096),
        (MIXTRAL_8X7B, 46_702_792_704),
        (GPT2, 124_439_808),
        (QWEN25_7B, 7_615_616_512),
        (QWEN3_8B, 8_190_735_360),
        (QWEN3_30B_A3B, 30_532_122_624),
        (QWEN3_NEXT, 79_674_391_296),
        (DEEPSEEK_V3, 671_026_404_352),
        (KIMI_K2, 1_026_408_209_408),
        (GPT_OSS_120B, 116_829_156_672),
        (FALCON_7B, 6_921_720_704),
        (GEMMA2_9B, 9_241_705_984),
        (MAMBA_28B, 2_768_345_600),
        (T5_LARGE, 737_668_096),
        (WHISPER_LARGE, 1_543_490_560),
        (OPENELM_270M, 271_527_168),
    ],
    ids=lambda value: str(value.get("model_type")) if isinstance(value, dict) else f"{value:,}",
)
def test_weights_are_as_many_as_published(config: Config, num_params: int) -> None:
    assert count(config)[0].num_params == num_params


@pytest.mark.parametrize("name", HIDDEN_NAMES)
def test_the_width_of_a_token_has_the_same_names_for_weights_as_for_layers(name: str) -> None:
    config = {name if field == "hidden_size" else field: value for field, value in LLAMA31_8B.items()}
    assert count(config)[0].num_params == 8_030_261_248


@pytest.mark.parametrize("name", HEAD_NAMES)
def test_the_number_of_query_heads_has_the_same_names_for_weights_as_for_layers(name: str) -> None:
    config = {name if field == "num_attention_heads" else field: value for field, value in LLAMA31_8B.items()}
    assert count(config)[0].num_params == 8_030_261_248


def test_of_two_numbers_of_heads_the_decoder_s_own_is_that_of_its_layers() -> None:
    narrow = WHISPER_LARGE | {"head_dim": 64, "num_attention_heads": 16}
    assert count(narrow)[0].num_params == count(WHISPER_LARGE)[0].num_params


@pytest.mark.parametrize(
    ("config", "billions"),
    [(MIXTRAL_8X7B, 12.9), (QWEN3_30B_A3B, 3.35), (QWEN3_NEXT, 3.87), (DEEPSEEK_V3, 37.55), (KIMI_K2, 32.86)],
    ids=["mixtral-8x7b", "qwen3-30b-a3b", "qwen3-next", "deepseek-v3", "kimi-k2"],
)
def test_of_routed_experts_only_the_chosen_ones_are_active(config: Config, billions: float) -> None:
    weights, _ = count(config)
    assert weights.num_active_params == pytest.approx(billions * 1e9, rel=0.005)
    share = weights.experts_per_token / weights.num_experts
    assert weights.num_active_params == weights.num_params - round(weights.expert_params * (1 - share))


def test_a_dense_model_is_active_as_a_whole_and_has_no_experts() -> None:
    weights, _ = count(LLAMA31_8B)
    assert weights.num_active_params == weights.num_params
    assert (weights.expert_params, weights.num_experts, weights.experts_per_token) == (0, 0, 0)


def test_experts_of_gpt_oss_are_counted_with_their_biases() -> None:
    weights, _ = count(GPT_OSS_120B)
    assert (weights.num_experts, weights.experts_per_token) == (128, 4)
    assert weights.expert_params == 36 * 128 * (3 * 2880 * 2880 + 3 * 2880)


def test_a_vision_tower_is_counted_and_no_text_token_passes_through_it() -> None:
    weights, notes = count(GEMMA3_27B)
    assert weights.num_params == pytest.approx(27_432_406_640, rel=1e-5)
    assert weights.num_active_params == 27_009_346_304
    assert not any("tower" in note for note in notes)


def test_a_tower_without_a_config_is_noted() -> None:
    weights, notes = count({key: value for key, value in GEMMA3_27B.items() if key != "vision_config"})
    assert weights.num_params == 27_009_346_304
    assert any("tower" in note and "not counted" in note for note in notes)


def test_a_tower_whose_sizes_cannot_be_read_is_noted() -> None:
    weights, notes = count(GEMMA3_27B | {"vision_config": {"hidden_size": [128, 256], "num_hidden_layers": 2}})
    assert weights.num_params == 27_009_346_304
    assert any("hidden_size is [128, 256]" in note for note in notes)


def test_layers_that_guess_ahead_are_left_out_and_noted() -> None:
    without = DEEPSEEK_V3 | {"num_nextn_predict_layers": 0}
    assert count(without)[0] == count(DEEPSEEK_V3)[0]
    assert any("MTP" in note for note in count(DEEPSEEK_V3)[1])
    assert not any("MTP" in note for note in count(without)[1])


def test_an_encoder_is_counted_and_a_generated_token_does_not_pass_through_it() -> None:
    weights, _ = count(T5_LARGE)
    encoder = 24 * (4 * 1024 * 1024 + 2 * 1024 * 4096 + 2 * 1024) + 1024
    assert weights.num_params - weights.num_active_params == encoder


def test_a_gated_t5_has_a_third_matrix() -> None:
    gated = count(T5_LARGE | {"feed_forward_proj": "gated-gelu"})[0].num_params
    assert gated - count(T5_LARGE)[0].num_params == 48 * 1024 * 4096


def test_layers_without_experts_are_dense() -> None:
    some = count(QWEN3_30B_A3B | {"mlp_only_layers": [0, 1]})[0]
    every = count(QWEN3_30B_A3B)[0]
    experts = 128 * 3 * 2048 * 768
    assert every.expert_params - some.expert_params == 2 * experts
    assert every.num_params - some.num_params == 2 * (experts + 128 * 2048 - 3 * 2048 * 6144)


@pytest.mark.parametrize(
    ("config", "gigabytes"),
    [
        (LLAMA31_8B, 16.06),
        (LLAMA31_8B | {"torch_dtype": "float32"}, 32.12),
        (LLAMA31_8B | {"torch_dtype": "torch.double"}, 64.24),
        (LLAMA31_8B | {"torch_dtype": "float8_e5m2"}, 8.03),
        (GPT_OSS_120B, 65.25),  # 60.8 GiB, its model card
        (GPT_OSS_20B, 13.76),
        (DEEPSEEK_V3, 673.1),  # 688.6 on the hub with the layer that guesses ahead
        (FALCON_7B, 14.43),  # the tied matrix lies in its files twice
    ],
    ids=["bf16", "f32", "f64", "f8", "gpt-oss-120b", "gpt-oss-20b", "fp8", "falcon"],
)
def test_a_checkpoint_takes_its_published_bytes(config: Config, gigabytes: float) -> None:
    assert count(config)[0].num_bytes == pytest.approx(gigabytes * 1e9, rel=0.002)


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
NVFP4 = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
INT4_EXPERTS = {  # as Kimi K2.5 is published
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "group_size": 32}}},
    "ignore": [
        *("lm_head", "re:.*self_attn.*", "re:.*shared_experts.*"),
        "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
    ],
}
MIXED_GROUPS = {
    "attention": {"targets": ["re:.*self_attn.*"], "weights": {"num_bits": 8, "type": "float"}},
    "experts": {"targets": ["re:.*mlp.experts.*"], "weights": {"num_bits": 4, "type": "float", "group_size": 16}},
}
MIXED = {"quant_method": "compressed-tensors", "config_groups": MIXED_GROUPS}
OF_EXPERTS = [MIXTRAL_8X7B, QWEN3_30B_A3B, QWEN3_NEXT, DEEPSEEK_V3, KIMI_K2, GPT_OSS_120B, GPT_OSS_20B]
DENSE = [SMOLLM2, LLAMA31_8B, GPT2, GEMMA3_27B, MAMBA_28B, T5_LARGE, WHISPER_LARGE, OPENELM_270M]


def bits_of_experts(config: Config) -> float:
    weights, _ = count(config)
    return 8 * weights.expert_bytes / weights.expert_params


def bits_of_the_rest(config: Config) -> float:
    weights, _ = count(config)
    return 8 * (weights.num_bytes - weights.expert_bytes) / (weights.num_params - weights.expert_params)


@pytest.mark.parametrize("config", DENSE, ids=lambda config: str(config["model_type"]))
@pytest.mark.parametrize("packed", [{}, {"quantization_config": FP8}], ids=["plain", "fp8"])
def test_without_experts_no_bytes_are_those_of_experts(config: Config, packed: Config) -> None:
    weights, _ = count(config | packed)
    assert weights.num_bytes > 0
    assert weights.expert_bytes == weights.expert_params == 0


@pytest.mark.parametrize("config", OF_EXPERTS, ids=lambda config: str(config["model_type"]))
@pytest.mark.parametrize(("dtype", "value_bytes"), [("bfloat16", 2), ("float32", 4)])
def test_plain_experts_take_the_dtype_of_all_weights(config: Config, dtype: str, value_bytes: int) -> None:
    weights, _ = count({k: v for k, v in config.items() if k != "quantization_config"} | {"torch_dtype": dtype})
    assert weights.expert_bytes == value_bytes * weights.expert_params > 0
    assert weights.num_bytes == value_bytes * weights.num_params


@pytest.mark.parametrize(
    ("config", "layers", "gigabytes"), [(GPT_OSS_120B, 36, 60.99), (GPT_OSS_20B, 24, 10.17)], ids=["120b", "20b"]
)
def test_only_the_experts_of_gpt_oss_are_packed(config: Config, layers: int, gigabytes: float) -> None:
    weights, _ = count(config)
    experts = layers * weights.num_experts
    matrices, biases = experts * 3 * 2880 * 2880, experts * 3 * 2880
    assert weights.expert_bytes == matrices * 17 // 32 + 2 * biases == pytest.approx(gigabytes * 1e9, rel=1e-3)
    assert weights.num_bytes - weights.expert_bytes == 2 * (weights.num_params - weights.expert_params)


@pytest.mark.parametrize(
    ("config", "packed", "bits", "rest"),
    [
        (DEEPSEEK_V3, FP8, 8 + 32 / 16384, 8.92),  # embedding, output matrix and norms stay bf16
        (DEEPSEEK_V3, FP8 | {"scale_fmt": "ue8m0"}, 8 + 8 / 16384, 8.92),
        (DEEPSEEK_V3 | {"expert_dtype": "fp4"}, FP8, 4.25, 8.92),
        (DEEPSEEK_V3, FP8 | {"modules_to_not_convert": ["re:.*mlp.experts.*"]}, 16, 8.92),
        (DEEPSEEK_V3, NVFP4, 4.5, 5.78),
        (DEEPSEEK_V3, NVFP4 | {"exclude_modules": ["model.layers.*.self_attn*"]}, 4.5, 13.49),
        (KIMI_K2, INT4_EXPERTS, 4.5, 16),
        (QWEN3_30B_A3B, MIXED, 4.5, 11.3),  # the embedding beside the attention
        (QWEN3_30B_A3B, {"quant_method": "aqlm"}, 16, 16),
        (QWEN3_30B_A3B, {"quant_method": "mxfp4"}, 4.25, 16),
    ],
    ids=[
        *("fp8", "fp8-ue8m0", "fp4-experts", "experts-left-out", "nvfp4", "nvfp4-attention-left-out"),
        *("int4-experts", "mixed-groups", "unknown", "mxfp4"),
    ],
)
def test_experts_and_the_rest_each_have_their_width(config: Config, packed: Config, bits: float, rest: float) -> None:
    quantised = config | {"quantization_config": packed}
    assert bits_of_experts(quantised) == pytest.approx(bits, rel=1e-6)
    assert bits_of_the_rest(quantised) == pytest.approx(rest, rel=0.01)


def test_a_layer_whose_experts_are_left_out_keeps_them_at_the_dtype() -> None:
    packed = QWEN3_30B_A3B | {"quantization_config": FP8}
    left = QWEN3_30B_A3B | {"quantization_config": FP8 | {"ignore": ["model.layers.7.mlp.experts"]}}
    more = count(left)[0].expert_bytes - count(packed)[0].expert_bytes
    assert more == pytest.approx(128 * 3 * 2048 * 768, rel=0.001)
    assert bits_of_the_rest(left) == bits_of_the_rest(packed)


def test_groups_that_name_their_targets_pack_nothing_else() -> None:
    only = {"quant_method": "compressed-tensors", "config_groups": {"experts": MIXED_GROUPS["experts"]}}
    quantised = QWEN3_30B_A3B | {"quantization_config": only}
    assert bits_of_experts(quantised) == pytest.approx(4.5)
    assert bits_of_the_rest(quantised) == 16


def test_a_group_for_the_output_matrix_says_nothing_of_the_layers() -> None:
    output = {"targets": ["re:.*lm_head"], "weights": {"num_bits": 8, "type": "float"}}
    groups = {"output": output, "layers": NVFP4_GROUPS["group_0"] | {"targets": ["Linear"]}}
    packed = {"quant_method": "compressed-tensors", "config_groups": groups}
    assert bits_of_experts(QWEN3_30B_A3B | {"quantization_config": packed}) == pytest.approx(4.5)


def test_the_first_group_for_all_matrices_counts() -> None:
    last = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float"}}
    packed = {"quant_method": "compressed-tensors", "config_groups": NVFP4_GROUPS | {"last": last}}
    assert bits_of_matrices(packed) == pytest.approx(4.5)


def test_groups_that_name_single_layers_are_noted() -> None:
    first = {"targets": ["re:.*layers\\.0\\.mlp.experts.*"], "weights": {"num_bits": 8, "type": "float"}}
    groups = {"first": first, "experts": MIXED_GROUPS["experts"]}
    quantised = QWEN3_30B_A3B | {"quantization_config": MIXED | {"config_groups": groups}}
    assert bits_of_experts(quantised) == pytest.approx(4.5)
    assert any("config_groups names single layers" in note for note in count(quantised)[1])


@given(
    experts=st.integers(0, 40),
    width=st.integers(1, 300),
    hidden=st.integers(1, 60),
    packed=st.sampled_from([None, FP8, NVFP4, INT4_EXPERTS, MIXED, {"quant_method": "mxfp4"}]),
    dtype=st.sampled_from(["bfloat16", "float32", "float8_e4m3fn"]),
)
def test_bytes_of_experts_are_a_part_of_all_bytes(
    experts: int, width: int, hidden: int, packed: Config | None, dtype: str
) -> None:
    sizes = {"num_experts": experts, "num_experts_per_tok": 1, "moe_intermediate_size": width, "hidden_size": hidden}
    weights, notes = count(QWEN3_30B_A3B | sizes | {"torch_dtype": dtype, "quantization_config": packed})
    assert not any("not counted" in note for note in notes)
    assert 0 <= weights.expert_bytes < weights.num_bytes
    assert (weights.expert_bytes > 0) == (weights.expert_params > 0) == (experts > 1)


@pytest.mark.parametrize(
    ("config", "names"),
    [
        (MIXTRAL_8X7B | {"num_experts_per_tok": 9}, "num_experts_per_tok is 9, more than num_local_experts, 8"),
        (DEEPSEEK_V3 | {"num_experts_per_tok": 257}, "num_experts_per_tok is 257, more than n_routed_experts, 256"),
        (
            MIXTRAL_8X7B | {"num_experts_per_tok": None, "moe_topk": [2] * 31 + [10]},
            "moe_topk is 10, more than num_local_experts, 8",
        ),
    ],
    ids=["mixtral", "deepseek", "one-a-layer"],
)
def test_more_experts_a_token_than_there_are_is_refused_with_both_numbers(config: Config, names: str) -> None:
    layers = spec_from_config(config, "test").layers
    fields = Fields(config, "test")
    with pytest.raises(BrokenModelError, match=names):
        count_weights(fields, fields, layers, str(config["model_type"]))
    weights, notes = count(config)
    assert weights == WeightCount(0, 0, 0, "config")
    assert any("weights are not counted" in note and names in note for note in notes)


def test_a_model_with_one_expert_is_dense_whatever_a_token_was_to_choose() -> None:
    weights, notes = count(MIXTRAL_8X7B | {"num_local_experts": 1, "num_experts_per_tok": 2})
    assert (weights.num_experts, weights.expert_bytes) == (0, 0)
    assert weights.num_active_params == weights.num_params > 0
    assert not any("not counted" in note for note in notes)


def test_a_token_may_pass_through_every_expert() -> None:
    weights, _ = count(MIXTRAL_8X7B | {"num_experts_per_tok": 8})
    assert weights.num_active_params == weights.num_params


def bits_of_matrices(config: Config) -> float:
    """Bits of one number in the matrices of Llama-3.1-8B's layers, quantised as ``config`` says."""
    matrices = 32 * 4096 * (2 * 4096 + 2 * 1024 + 3 * 14336)
    weights, _ = count(LLAMA31_8B | {"quantization_config": config})
    rest = weights.num_params - matrices
    return (weights.num_bytes - 2 * rest) * 8 / matrices


INT4_GROUPS = {"group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 128, "symmetric": True}}}
NVFP4_GROUPS = {"group_0": {"weights": {"num_bits": 4, "type": "float", "group_size": 16}}}


@pytest.mark.parametrize(
    ("config", "bits"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 16384),
        ({"quant_method": "fbgemm_fp8"}, 8),
        ({"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True}, 4 + 20 / 128),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
        (
            {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
            4 + 0.125 + 1 / 512,
        ),
        ({"quant_method": "compressed-tensors", "config_groups": INT4_GROUPS, "format": "pack-quantized"}, 4.125),
        ({"quant_method": "compressed-tensors", "config_groups": NVFP4_GROUPS}, 4.5),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, 8),
        ({"quant_method": "mxfp4"}, 16),  # packs experts, and there are none
    ],
    ids=lambda value: None if isinstance(value, float | int) else str(value["quant_method"]),
)
def test_matrices_take_their_packed_width_and_scales_and_all_else_the_dtype(config: Config, bits: float) -> None:
    assert bits_of_matrices(config) == pytest.approx(bits, rel=1e-6)


@pytest.mark.parametrize(
    ("entry", "share"),
    [
        ("lm_head", 0.0),
        ("re:.*self_attn.*", 2 * 4096 + 2 * 1024),
        ("model.layers.*.mlp", 3 * 14336),
        ("re:.*mlp\\.(gate|up|gate_up|down)_proj.*", 3 * 14336),
        ("model.layers.3.self_attn", (2 * 4096 + 2 * 1024) / 32),
        ("model.layers.3*", (2 * 4096 + 2 * 1024 + 3 * 14336) / 32),
        ("gate", 0.0),
    ],
)
def test_modules_that_are_left_out_stay_at_the_dtype(entry: str, share: float) -> None:
    packed = {"quant_method": "fp8"}
    more = bits_of_matrices(packed | {"modules_to_not_convert": [entry]}) - bits_of_matrices(packed)
    assert more == pytest.approx(8 * share / (2 * 4096 + 2 * 1024 + 3 * 14336), abs=1e-9)


def test_a_layer_named_twice_is_left_out_once() -> None:
    packed = {"quant_method": "fp8"}
    once = bits_of_matrices(packed | {"ignore": ["model.layers.0.mlp"]})
    assert bits_of_matrices(packed | {"ignore": ["model.layers.0.mlp", "re:.*layers\\.0\\.mlp.*"]}) == once


def test_a_quantisation_that_is_not_known_is_noted_and_counted_at_the_dtype() -> None:
    weights, notes = count(LLAMA31_8B | {"quantization_config": {"quant_method": "aqlm"}})
    assert weights.num_bytes == 2 * weights.num_params
    assert any("aqlm" in note for note in notes)


def test_an_untied_output_matrix_counts_beside_the_embedding() -> None:
    tied = count(LLAMA31_8B | {"tie_word_embeddings": True})[0].num_params
    assert count(LLAMA31_8B)[0].num_params - tied == 128256 * 4096


def test_a_class_that_ties_by_default_is_tied_where_the_config_is_silent() -> None:
    said = count(GEMMA2_9B | {"tie_word_embeddings": True})[0]
    assert count(GEMMA2_9B)[0] == said


def test_a_size_that_is_none_is_named() -> None:
    fields = Fields(LLAMA31_8B | {"intermediate_size": -1}, "test")
    with pytest.raises(BrokenModelError, match="intermediate_size is -1"):
        count_weights(fields, fields, spec_from_config(LLAMA31_8B, "test").layers, "llama")


@pytest.mark.parametrize("config", [LLAMA31_405B, DEEPSEEK_V3, QWEN3_NEXT], ids=["dense", "latent", "hybrid"])
def test_counting_takes_less_than_two_milliseconds(config: Config) -> None:
    spec = spec_from_config(config, "test")
    best = min(_seconds(Fields(config, "test"), spec) for _ in range(20))
    assert best < 0.002


def _seconds(fields: Fields, spec: ModelSpec) -> float:
    start = time.perf_counter()
    count_weights(fields, fields, spec.layers, spec.model_type)
    return time.perf_counter() - start
