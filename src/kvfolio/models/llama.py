"""The Llama family: Llama 1 to 3, Mistral, SmolLM2, Qwen2 (biases on q, k, v), Qwen3 (norms on q and k), and those
of their kind with experts: Mixtral, Qwen2-MoE, Qwen3-MoE.

Knows nothing of caches, files or kernels: weights come by name, memory through a view, arithmetic through ops.
"""

import torch
from torch import Tensor

from kvfolio.models.decoder import Decoder
from kvfolio.models.experts import feed_forward
from kvfolio.models.parts import KVView, Ops, Rotary
from kvfolio.models.weights import Weights
from kvfolio.spec.model import RunnableSpec


class LlamaAttention:
    """Grouped heads that are rotated whole; in Qwen3 normed before. gpt-oss has sink logits, f32 [num_q_heads]."""

    def __init__(self, spec: RunnableSpec, weights: Weights, index: int, sink_logits: Tensor | None = None) -> None:
        network, kind = spec.network, spec.layers[index]
        self.index = index
        self.num_q_heads = network.num_q_heads
        self.num_kv_heads = kind.num_kv_heads
        self.head_width = kind.k_width
        self.attention_scale = network.attention_scale
        self.norm_eps = network.norm_eps
        self.sink_logits = sink_logits

        hidden = network.hidden_size
        q_rows, kv_rows = self.num_q_heads * self.head_width, self.num_kv_heads * self.head_width
        name = f"model.layers.{index}"
        self.qkv = weights.linear(  # [q_rows + 2 * kv_rows, hidden]
            [f"{name}.self_attn.{part}_proj" for part in "qkv"], [q_rows, kv_rows, kv_rows], hidden, network.qkv_bias
        )
        self.q_norm = self.k_norm = None  # [head_width] f32
        if network.qk_norm:
            self.q_norm = weights.norm_scale(f"{name}.self_attn.q_norm.weight", self.head_width)
            self.k_norm = weights.norm_scale(f"{name}.self_attn.k_norm.weight", self.head_width)
        self.o = weights.linear([f"{name}.self_attn.o_proj"], [hidden], q_rows, network.o_bias)  # [hidden, q_rows]

    def forward(self, x: Tensor, rotary: Rotary, view: KVView, ops: Ops) -> Tensor:
        """x [num_tokens, hidden], normed → [num_tokens, hidden]."""
        num_q, num_kv = self.num_q_heads, self.num_kv_heads
        heads = self.qkv.forward(x, ops).view(-1, num_q + 2 * num_kv, self.head_width)  # [num_tokens, q | k | v, width]
        q, k, v = torch.split(heads, [num_q, num_kv, num_kv], dim=1)  # each [num_tokens, its heads, head_width]
        if self.q_norm is None or self.k_norm is None:
            qk = ops.rope(heads[:, : num_q + num_kv], *rotary)  # q and k lie side by side: one call
            q, k = torch.split(qk, [num_q, num_kv], dim=1)
        else:
            q = ops.rope(ops.rms_norm(q, self.q_norm, self.norm_eps), *rotary)
            k = ops.rope(ops.rms_norm(k, self.k_norm, self.norm_eps), *rotary)
        out = view.attend(self.index, q, k, v, self.attention_scale, self.sink_logits)  # [num_tokens, q, head_width]
        return self.o.forward(out.reshape(-1, num_q * self.head_width), ops)


def llama(spec: RunnableSpec, weights: Weights) -> Decoder:
    """The network of a spec of this family."""
    return Decoder(spec, weights, LlamaAttention, feed_forward)
