"""transformers on the same weights, for benchmarks that run both in one process. Knows nothing of kvfolio's engine."""

import time
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, LogitsProcessor, LogitsProcessorList

from kvfolio.models.weights_gguf import GgufTensors
from kvfolio.spec.source import find_default_model, open_model


def load_smollm2(dtype: torch.dtype) -> LlamaForCausalLM:
    """The embedded SmolLM2 as transformers runs it: same dequantised weights, SDPA attention."""
    source = open_model(find_default_model())
    assert source.header is not None
    spec, network = source.spec, source.spec.network
    assert network.rope is not None
    config = LlamaConfig(
        vocab_size=network.vocab_size,
        hidden_size=network.hidden_size,
        intermediate_size=network.intermediate_size,
        num_hidden_layers=len(spec.layers),
        num_attention_heads=network.num_q_heads,
        num_key_value_heads=spec.layers[0].num_kv_heads,
        max_position_embeddings=spec.max_context,
        rms_norm_eps=network.norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": network.rope.base},
        tie_word_embeddings=network.tie_embeddings,
        eos_token_id=None,
        pad_token_id=2,
        bos_token_id=None,
    )
    model = LlamaForCausalLM(config).to(dtype).eval()
    tensors = GgufTensors(source.header, spec)
    state = {}
    for name, parameter in model.named_parameters():
        state[name] = torch.empty(parameter.shape, dtype=dtype)
        tensors.read_into(name, state[name])
    model.load_state_dict(state, strict=False)
    model.tie_weights()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 2
    return model


class _Times(LogitsProcessor):  # type: ignore[misc]
    """Notes when the logits of each token are ready."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.times.append(time.perf_counter())
        return scores


@torch.inference_mode()
def generate(
    model: LlamaForCausalLM, prompts: list[list[int]], num_tokens: int
) -> tuple[float, float, list[list[int]]]:
    """(seconds to the first token, seconds from the first to the last, tokens of each prompt), greedy, DynamicCache.

    Unequal prompts are padded on the left, as transformers needs it.
    """
    width = max(map(len, prompts))
    ids = torch.tensor([[2] * (width - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    times = _Times()
    started = time.perf_counter()
    out = model.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=num_tokens,
        do_sample=False,
        cache=DynamicCache(config=model.config),
        logits_processor=LogitsProcessorList([times]),
    )
    return times.times[0] - started, times.times[-1] - times.times[0], out[:, width:].tolist()
