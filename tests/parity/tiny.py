"""Tiny random models of every family, made by transformers and saved as folders.

Every weight is far from its initial value (norms from one, biases from zero), so that a forgotten one shows.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from torch import Tensor

VOCAB = 256
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def _rope(kind: str, **more: object) -> dict[str, object]:
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 10000.0, **more}}


def _llama(**more: object) -> transformers.PreTrainedModel:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, **more))


def _mistral() -> transformers.PreTrainedModel:
    return transformers.MistralForCausalLM(transformers.MistralConfig(**SIZES, head_dim=16, sliding_window=16))


def _qwen2() -> transformers.PreTrainedModel:
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES, tie_word_embeddings=True))


def _qwen2_windows() -> transformers.PreTrainedModel:
    config = transformers.Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=16, max_window_layers=1)
    return transformers.Qwen2ForCausalLM(config)


def _qwen3() -> transformers.PreTrainedModel:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES, head_dim=24))


def _mixtral() -> transformers.PreTrainedModel:
    return transformers.MixtralForCausalLM(
        transformers.MixtralConfig(**SIZES, num_local_experts=6, num_experts_per_tok=2)
    )


def _qwen2_moe() -> transformers.PreTrainedModel:
    config = transformers.Qwen2MoeConfig(
        **SIZES | {"num_hidden_layers": 4},
        num_experts=6,
        num_experts_per_tok=3,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=48,
        mlp_only_layers=[2],
    )
    return transformers.Qwen2MoeForCausalLM(config)


def _qwen3_moe() -> transformers.PreTrainedModel:
    config = transformers.Qwen3MoeConfig(
        **SIZES,
        head_dim=24,
        num_experts=8,
        num_experts_per_tok=3,
        moe_intermediate_size=40,
        norm_topk_prob=True,
        decoder_sparse_step=2,
    )
    return transformers.Qwen3MoeForCausalLM(config)


def _gemma3() -> transformers.PreTrainedModel:
    sizes = SIZES | {"num_hidden_layers": 7, "num_key_value_heads": 1, "head_dim": 24, "query_pre_attn_scalar": 20}
    ropes = {
        "full_attention": {"rope_type": "linear", "rope_theta": 100000.0, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1000.0},
    }
    config = transformers.Gemma3TextConfig(
        **sizes,
        sliding_window=16,
        layer_types=(["sliding_attention"] * 2 + ["full_attention"]) * 2 + ["sliding_attention"],
        rope_parameters=ropes,
    )
    return transformers.Gemma3ForCausalLM(config)


def _gpt2() -> transformers.PreTrainedModel:
    config = transformers.GPT2Config(
        vocab_size=VOCAB, n_embd=64, n_layer=3, n_head=4, n_positions=128, bos_token_id=1, eos_token_id=2
    )
    return transformers.GPT2LMHeadModel(config)


def _falcon(**more: object) -> transformers.PreTrainedModel:
    sizes = {name: value for name, value in SIZES.items() if name not in ("intermediate_size", "num_key_value_heads")}
    return transformers.FalconForCausalLM(transformers.FalconConfig(**sizes | more))


def _deepseek(version: int, **more: object) -> transformers.PreTrainedModel:
    """Latents of 32 and rotary keys of 8 numbers; a dense layer, then two with experts."""
    sizes = SIZES | {
        "num_key_value_heads": 4,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 12,
        "v_head_dim": 20,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "n_group": 4,
        "topk_group": 2,
        "routed_scaling_factor": 1.5,
    }
    if version == 2:
        return transformers.DeepseekV2ForCausalLM(transformers.DeepseekV2Config(**sizes | more))
    return transformers.DeepseekV3ForCausalLM(transformers.DeepseekV3Config(**sizes | more))


_DEEPSEEK_YARN = _rope(
    "yarn", factor=4.0, original_max_position_embeddings=64, mscale=1.0, mscale_all_dim=0.7, beta_fast=32, beta_slow=1
)


def _gpt_oss() -> transformers.PreTrainedModel:
    config = transformers.GptOssConfig(
        **SIZES,
        head_dim=16,
        num_local_experts=5,
        num_experts_per_tok=2,
        sliding_window=16,  # in the first and the last layer
        **_rope("yarn", factor=4.0, original_max_position_embeddings=64, truncate=False),
    )
    return transformers.GptOssForCausalLM(config)


BUILDERS: dict[str, Callable[[], transformers.PreTrainedModel]] = {
    "llama": _llama,
    "llama-biases": lambda: _llama(attention_bias=True, mlp_bias=True),
    "llama-tied": lambda: _llama(tie_word_embeddings=True),
    "llama-rope-linear": lambda: _llama(**_rope("linear", factor=4.0)),
    "llama-rope-llama3": lambda: _llama(
        **_rope("llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=64)
    ),
    "llama-rope-yarn": lambda: _llama(**_rope("yarn", factor=4.0, original_max_position_embeddings=64)),
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen2-windows": _qwen2_windows,
    "qwen3": _qwen3,
    "mixtral": _mixtral,
    "qwen2-moe": _qwen2_moe,
    "qwen3-moe": _qwen3_moe,
    "gemma3": _gemma3,
    "gpt2": _gpt2,
    "falcon-7b": lambda: _falcon(hidden_size=80, num_attention_heads=5),
    "falcon-40b": lambda: _falcon(num_kv_heads=2, new_decoder_architecture=True),
    "falcon-11b": lambda: _falcon(
        num_kv_heads=2,
        new_decoder_architecture=True,
        num_ln_in_parallel_attn=1,
        ffn_hidden_size=96,
        tie_word_embeddings=False,
        rope_parameters={"rope_type": "default", "rope_theta": 500042.0},
    ),
    "deepseek-v2": lambda: _deepseek(2, q_lora_rank=24, topk_method="group_limited_greedy", **_DEEPSEEK_YARN),
    "deepseek-v2-lite": lambda: _deepseek(2, q_lora_rank=None, topk_method="greedy", n_shared_experts=1),
    "deepseek-v3": lambda: _deepseek(3, q_lora_rank=24, **_DEEPSEEK_YARN),
    "deepseek-v3-dense": lambda: _deepseek(
        3, q_lora_rank=None, first_k_dense_replace=3, attention_bias=True, rope_interleave=False
    ),
    "falcon-rw": lambda: _falcon(
        multi_query=False,
        parallel_attn=False,
        bias=True,
        **_rope("linear", factor=4.0),  # its heads and its biases
    ),
    "gpt-oss": _gpt_oss,
}


@dataclass(frozen=True)
class TinyModel:
    """A folder and the transformers model that was saved in it."""

    name: str
    folder: Path
    model: transformers.PreTrainedModel

    def logits(self, token_ids: list[int]) -> Tensor:
        """[num_tokens, vocab] f32 of transformers, computed in one go."""
        with torch.inference_mode():
            return self.model(torch.tensor([token_ids])).logits[0]


def make(name: str, folder: Path) -> TinyModel:
    """Build the model ``name`` from a fixed seed and save it as safetensors in ``folder``."""
    generator = torch.Generator().manual_seed(sum(name.encode()))
    model = BUILDERS[name]().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            _fill(key, parameter, name, generator)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.3, generator=generator)
    transformers.logging.disable_progress_bar()
    model.save_pretrained(folder)
    return TinyModel(name, folder, model)


def _fill(key: str, parameter: Tensor, name: str, generator: torch.Generator) -> None:
    if name == "gpt-oss" and key.endswith((".sinks", ".gate_up_proj")):  # sinks beside scores; gates beyond their limit
        parameter.normal_(0.0, 2.0 if key.endswith(".sinks") else 0.6, generator=generator)
    elif parameter.dim() >= 2:
        parameter.normal_(0.0, 0.2, generator=generator)
    elif key.endswith(".bias"):
        parameter.normal_(0.0, 0.3, generator=generator)
    else:  # a norm's weight; Gemma stores scale - 1
        lowest = -0.5 if name == "gemma3" else 0.5
        parameter.uniform_(lowest, lowest + 1.0, generator=generator)


def some_tokens(count: int, seed: int = 0) -> list[int]:
    """``count`` token ids."""
    return torch.randint(3, VOCAB, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
