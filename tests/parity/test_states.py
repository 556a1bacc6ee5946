"""Sizes of recurrent states against those that transformers keeps, on tiny random models in bf16.

Knows nothing of which layers are recurrent: one such layer of each model is looked at.
"""

import re
from typing import Any

import pytest

from kvfolio.spec.config.states import state_layer
from kvfolio.spec.fields import Fields
from kvfolio.spec.formats import BF16, CacheFormat

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.20")

Sizes = dict[str, object]

SMALL: Sizes = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
EXPERTS: Sizes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED: Sizes = EXPERTS | {"shared_expert_intermediate_size": 32}
EVERY_OTHER: Sizes = {"layer_types": ["linear_attention", "full_attention"] * 2}
MAMBA1: Sizes = {"state_size": 8, "conv_kernel": 3, "expand": 3}
MAMBA2: Sizes = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 24,
    "mamba_d_conv": 3,
    "mamba_expand": 2,
}
DELTA: Sizes = EVERY_OTHER | {
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 3,
    "head_dim": 16,
}
LATENT: Sizes = EXPERTS | {
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
    "num_key_value_heads": 4,
}
CONV: Sizes = {"conv_L_cache": 4, "layer_types": ["conv", "full_attention"] * 2}
KIMI: Sizes = {
    "head_dim": 16,
    "num_heads": 3,
    "short_conv_kernel_size": 3,
    "kda_layers": [1, 3],
    "full_attn_layers": [2, 4],
}
MODELS: dict[str, Sizes] = {
    "jamba": {"mamba_d_state": 8, "mamba_d_conv": 3, "mamba_expand": 3, "attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba": {"mamba_d_state": 8, "mamba_d_conv": 3, "layers_block_type": ["linear_attention", "hybrid"] * 2},
    "mamba": MAMBA1,
    "falcon_mamba": MAMBA1,
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 24, "conv_kernel": 3},
    "bamba": MAMBA2 | {"attn_layer_indices": [1]},
    "granitemoehybrid": MAMBA2 | {"layer_types": ["mamba", "attention"] * 2, "num_local_experts": 2},
    "falcon_h1": MAMBA2 | {"mamba_d_ssm": 96, "mamba_n_heads": 6, "head_dim": 16},
    "zamba2": {
        "n_mamba_heads": 8,
        "mamba_ngroups": 2,
        "mamba_d_state": 24,
        "mamba_d_conv": 3,
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
    },
    "nemotron_h": {
        "mamba_num_heads": 6,
        "mamba_head_dim": 16,
        "n_groups": 2,
        "ssm_state_size": 24,
        "conv_kernel": 3,
        "layers_block_type": ["mamba", "attention", "mamba", "mamba"],
    },
    "qwen3_next": DELTA | SHARED,
    "qwen3_5_text": DELTA,
    "qwen3_5_moe_text": DELTA | SHARED,
    "lara_mini": DELTA | EXPERTS,
    "olmo_hybrid": EVERY_OTHER | {"num_key_value_heads": 4},
    "kimi_linear": LATENT | {"linear_attn_config": KIMI},
    "bailing_hybrid": LATENT | {"head_dim": 24, "short_conv_kernel_size": 3, "layer_group_size": 2},
    "lfm2": CONV,
    "lfm2_moe": CONV | EXPERTS,
    "lfm3": CONV | {"head_dim": 16},
    "zaya": EXPERTS | {"num_experts_per_tok": 1, "head_dim": 16, "cca_time0": 3, "router_hidden_size": 16},
    "recurrent_gemma": {"lru_width": 64, "conv1d_width": 3, "block_types": ["recurrent", "attention"]},
    "minimax": EVERY_OTHER | {"head_dim": 24, "num_local_experts": 2},
    "rwkv": {},
    "xlstm": {"num_heads": 4, "hidden_size": 128},
}
# Models whose states transformers keeps in the model's dtype; those of all others are in f32.
ALL_BF16 = ("minimax", "xlstm", "zaya")


def kept_states(model: Any, output: Any) -> list[Any]:
    """The tensors that transformers keeps for one recurrent layer of ``model`` after a prompt of one sequence."""
    if model.config.model_type == "recurrent_gemma":
        block = model.model.layers[0].temporal_block
        return [block.rg_lru.recurrent_states, block.conv1d_state]
    if model.config.model_type == "rwkv":
        return [tensor[..., 0] for tensor in output.state]
    if model.config.model_type == "xlstm":
        return list((output.get("cache") or output["cache_params"]).rnn_state[0])
    cache = output["cache"] if "cache" in output else output["past_key_values"]
    if model.config.model_type == "minimax":
        return [cache.linear_cache[0]]
    first = next(layer for layer in cache.layers if hasattr(layer, "conv_states"))
    return [
        state for kind in (first.recurrent_states, first.conv_states) for state in kind.values() if state is not None
    ]


@pytest.mark.parametrize("model_type", MODELS)
def test_bytes_said_of_transformers_are_what_it_keeps(model_type: str) -> None:
    if model_type not in transformers.CONFIG_MAPPING:
        pytest.skip(f"this transformers has no {model_type}")
    config = transformers.AutoConfig.for_model(model_type, **(SMALL | MODELS[model_type]))
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        kept = kept_states(model, model(torch.arange(3, 11)[None], use_cache=True))

    fields = Fields(config.to_dict() | {"dtype": "bfloat16"}, model_type)
    layer = state_layer(fields, model_type)
    said = re.findall(r"([\d,]+) B", fields.assumptions[-1])  # as counted; in transformers, where it differs
    assert int(said[-1].replace(",", "")) == sum(tensor.numel() * tensor.element_size() for tensor in kept)
    assert int(said[0].replace(",", "")) == layer.fixed_bytes(CacheFormat(BF16, BF16))
    in_f32 = sum(tensor.numel() for tensor in kept if tensor.dtype is torch.float32)
    assert in_f32 == (0 if model_type in ALL_BF16 else layer.state_numbers)
