"""The config of gpt-oss becomes a network, or is refused by name where the network computes otherwise.

Knows nothing of files or tensors: configs are dictionaries here.
"""

import pytest
from published import Config, growing_bytes, read, windows, without

from kvfolio.errors import BrokenModelError, UnknownModelError
from kvfolio.spec.model import Experts, Rope

YARN: Config = {
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "rope_type": "yarn",
    "truncate": False,
}
MXFP4: Config = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}
GPT_OSS_20B: Config = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "attention_dropout": 0.0,
    "eos_token_id": 200002,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "quantization_config": MXFP4,
    "rms_norm_eps": 1e-05,
    "rope_scaling": YARN,
    "rope_theta": 150000,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def test_the_published_config_is_read_in_full() -> None:
    spec = read(GPT_OSS_20B)
    network = spec.network
    assert (spec.family, spec.max_context, spec.eos_token_ids) == ("gpt_oss", 131072, (200002,))
    assert windows(spec) == [128, None] * 12
    assert growing_bytes(spec) == 12 * 2 * 8 * 64 * 2
    assert network.rope == Rope(150000.0, 64, "yarn", 32.0, 4096, truncate=False)
    assert network.rope_local is None
    assert network.experts == Experts(32, 4, 2880, tuple(range(24)), normalise=True)
    assert (network.qkv_bias, network.o_bias, network.mlp_bias, network.tie_embeddings) == (True, True, True, False)
    assert network.attention_scale == 0.125


def test_its_weights_are_counted_as_they_are_decoded() -> None:
    weights = read(GPT_OSS_20B).weights
    expert = 3 * 2880 * 2880 + 3 * 2880
    assert weights.num_params == 20_914_757_184  # of transformers 5.24 on the meta device
    assert weights.num_bytes == 2 * weights.num_params
    assert weights.expert_params == 24 * 32 * expert
    assert weights.num_active_params == weights.num_params - 24 * 28 * expert


def test_without_a_dtype_packed_weights_are_computed_in_bf16_and_that_is_said() -> None:
    spec = read(GPT_OSS_20B)
    assert spec.dtype == "bf16"
    assert spec.assumptions == ("dtype is absent: bfloat16 assumed, in which transformers computes MXFP4 weights",)
    assert read(GPT_OSS_20B, dtype="float16").dtype == "f16"
    assert read(GPT_OSS_20B, quantization_config=None, torch_dtype="bfloat16").dtype == "bf16"
    assert read(GPT_OSS_20B, quantization_config=None).dtype == "f32"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quantization_config": {"quant_method": "fp8"}}, "quant_method is 'fp8'; known for gpt_oss: mxfp4"),
        ({"quantization_config": {"bits": 4}}, "quant_method is None; known for gpt_oss: mxfp4"),
        ({"quantization_config": MXFP4 | {"group_size": 64}}, "quantization_config: group_size is not known"),
        ({"swiglu_limit": 10.0}, r"swiglu_limit is 10\.0; known: 7"),
        ({"swiglu_alpha": 1.0}, r"swiglu_alpha is 1\.0; known: 1\.702"),
        ({"attention_bias": False}, "attention_bias is False; known for gpt_oss: true"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; known: silu"),
        ({"rope_scaling": YARN | {"rope_type": "longrope"}}, "rope type 'longrope' is not supported"),
        (
            {"rope_scaling": {"full_attention": YARN, "sliding_attention": {"rope_type": "default"}}},
            "two ropes; known for gpt_oss: one for all layers",
        ),
        ({"layer_types": ["chunked_attention"] * 24}, "layer_types holds 'chunked_attention'; known for gpt_oss"),
        ({"architectures": ["GptOssForSequenceClassification"]}, "accepted for gpt_oss: GptOssForCausalLM"),
    ],
)
def test_what_the_network_does_not_compute_is_refused_by_name(changes: Config, message: str) -> None:
    with pytest.raises(UnknownModelError, match=message):
        read(GPT_OSS_20B, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"experts_per_token": 2}, "experts_per_token is 2 and num_experts_per_tok 4; correct one of them"),
        ({"num_experts_per_tok": 33}, "num_experts_per_tok is 33; accepted: a whole number from 1 to 32"),
        ({"num_local_experts": 0}, "num_local_experts is 0; accepted"),
        ({"swiglu_limit": "7"}, "swiglu_limit is '7'; accepted: a number"),
    ],
)
def test_numbers_that_contradict_each_other_are_refused(changes: Config, message: str) -> None:
    with pytest.raises(BrokenModelError, match=message):
        read(GPT_OSS_20B, **changes)


@pytest.mark.parametrize(
    ("absent", "named"),
    [
        ("rope_scaling", "rope_parameters"),
        ("rope_theta", "rope_theta"),
        ("num_local_experts", "num_local_experts"),
        ("num_experts_per_tok", "num_experts_per_tok"),
        ("num_hidden_layers", "num_hidden_layers"),
        ("num_key_value_heads", "num_key_value_heads"),
        ("head_dim", "head_dim"),
        ("sliding_window", "sliding_window"),
    ],
)
def test_a_number_that_the_class_would_take_from_one_checkpoint_must_be_stated(absent: str, named: str) -> None:
    with pytest.raises(BrokenModelError, match=f"{named} is missing"):
        read(without(GPT_OSS_20B, absent))


def test_both_spellings_of_the_rope_mean_the_same() -> None:
    new = without(GPT_OSS_20B, "rope_scaling", "rope_theta") | {"rope_parameters": YARN | {"rope_theta": 150000}}
    assert read(new).network == read(GPT_OSS_20B).network
