"""The Llama family: Llama 1 to 3, Mistral, SmolLM2, Qwen2 (biases on q, k, v), Qwen3 (norms on q and k), and those
of their kind with experts: Mixtral, Qwen2-MoE, Qwen3-MoE.

Knows nothing of caches, files or kernels: weights come by name, memory through a view, arithmetic through ops.
"""

import torch
from torch import Tensor

from kvfolio.errors import UnknownModelError
from kvfolio.models.experts import feed_forward
from kvfolio.models.parts import KVView, Ops, RopeTable, Rotary
from kvfolio.models.weights import Weights
from kvfolio.spec.model import RunnableSpec


class LlamaLayer:
    """norm → attention → add and norm → gated MLP or experts. The last addition is left to the next norm."""

    def __init__(self, spec: RunnableSpec, weights: Weights, index: int) -> None:
        network, kind = spec.network, spec.layers[index]
        self.index = index
        self.is_local = kind.window is not None
        self.num_q_heads = network.num_q_heads
        self.num_kv_heads = kind.num_kv_heads
        self.head_width = kind.k_width
        self.attention_scale = network.attention_scale
        self.norm_eps = network.norm_eps

        hidden = network.hidden_size
        q_rows, kv_rows = self.num_q_heads * self.head_width, self.num_kv_heads * self.head_width
        name = f"model.layers.{index}"
        self.input_norm = weights.norm_scale(f"{name}.input_layernorm.weight", hidden)  # [hidden] f32
        self.qkv = weights.linear(  # [q_rows + 2 * kv_rows, hidden]
            [f"{name}.self_attn.{part}_proj" for part in "qkv"], [q_rows, kv_rows, kv_rows], hidden, network.qkv_bias
        )
        self.q_norm = self.k_norm = None  # [head_width] f32
        if network.qk_norm:
            self.q_norm = weights.norm_scale(f"{name}.self_attn.q_norm.weight", self.head_width)
            self.k_norm = weights.norm_scale(f"{name}.self_attn.k_norm.weight", self.head_width)
        self.o = weights.linear([f"{name}.self_attn.o_proj"], [hidden], q_rows, network.o_bias)  # [hidden, q_rows]
        self.mlp_norm = weights.norm_scale(f"{name}.post_attention_layernorm.weight", hidden)  # [hidden] f32
        self.mlp = feed_forward(network, weights, index)

    def forward(
        self, delta: Tensor | None, residual: Tensor, rotary: Rotary, view: KVView, ops: Ops
    ) -> tuple[Tensor, Tensor]:
        """(delta, residual), both [num_tokens, hidden]; their sum is the hidden state. No delta: nothing to add yet."""
        if delta is None:
            x = ops.rms_norm(residual, self.input_norm, self.norm_eps)
        else:
            x, residual = ops.add_rms_norm(delta, residual, self.input_norm, self.norm_eps)
        delta = self.attention(x, rotary, view, ops)  # [num_tokens, hidden]
        x, residual = ops.add_rms_norm(delta, residual, self.mlp_norm, self.norm_eps)
        return self.mlp.forward(x, ops), residual

    def attention(self, x: Tensor, rotary: Rotary, view: KVView, ops: Ops) -> Tensor:
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
        out = view.attend(self.index, q, k, v, self.attention_scale)  # [num_tokens, num_q_heads, head_width]
        return self.o.forward(out.reshape(-1, num_q * self.head_width), ops)


class LlamaModel:
    """Embedding, layers, final norm, head."""

    def __init__(self, spec: RunnableSpec, weights: Weights) -> None:
        network = spec.network
        if network.rope is None:
            raise UnknownModelError(
                f"{spec.name}: a network of the family llama needs rotary positions, none are given"
            )
        vocab, hidden = network.vocab_size, network.hidden_size
        self.spec = spec
        self.embedding = weights.get("model.embed_tokens.weight", (vocab, hidden))  # [vocab, hidden]
        self.layers = [LlamaLayer(spec, weights, index) for index in range(len(spec.layers))]
        self.norm = weights.norm_scale("model.norm.weight", hidden)  # [hidden] f32
        self.head = (  # [vocab, hidden]
            self.embedding if network.tie_embeddings else weights.get("lm_head.weight", (vocab, hidden))
        )
        self.rope = RopeTable(network.rope, weights.device)  # of full-attention layers
        self.rope_local = (  # of sliding-window layers: the same one, but for rare configurations
            self.rope if network.rope_local is None else RopeTable(network.rope_local, weights.device)
        )
        self.weight_bytes = weights.delivered_bytes

    def forward(self, token_ids: Tensor, positions: Tensor, view: KVView, ops: Ops, rows: Tensor) -> Tensor:
        """token_ids, positions [num_tokens], rows [num_rows] → logits [num_rows, vocab] of the compute dtype."""
        rotary = self.rope.at(positions)
        rotary_local = rotary if self.rope_local is self.rope else self.rope_local.at(positions)
        delta, residual = None, self.embedding[token_ids]  # [num_tokens, hidden]
        for layer in self.layers:
            delta, residual = layer.forward(delta, residual, rotary_local if layer.is_local else rotary, view, ops)
        assert delta is not None
        x, _ = ops.add_rms_norm(
            delta[rows], residual[rows], self.norm, self.spec.network.norm_eps
        )  # [num_rows, hidden]
        return ops.linear(x, self.head)
