"""GPT-2: learned positions, layer norms with biases, one plain MLP a layer.

Knows nothing of caches, files or kernels: weights come by name, memory through a view, arithmetic through ops.
"""

import torch
from torch import Tensor

from kvfolio.models.parts import KVView, Ops
from kvfolio.models.weights import Weights
from kvfolio.spec.model import RunnableSpec


class LayerNorm:
    """(x - mean) / sqrt(var + eps) * weight + bias."""

    def __init__(self, weights: Weights, name: str, width: int, eps: float) -> None:
        self.weight = weights.get(f"{name}.weight", (width,))  # [width]
        self.bias = weights.get(f"{name}.bias", (width,))  # [width]
        self.eps = eps

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        """[num_tokens, width] → the same shape."""
        return ops.layer_norm(x, self.weight, self.bias, self.eps)


class Gpt2Layer:
    """norm → attention → add → norm → MLP → add."""

    def __init__(self, spec: RunnableSpec, weights: Weights, index: int) -> None:
        network, kind = spec.network, spec.layers[index]
        self.index = index
        self.num_heads = network.num_q_heads
        self.head_width = kind.k_width
        self.attention_scale = network.attention_scale
        self.activation = network.activation

        hidden, width = network.hidden_size, network.intermediate_size
        name = f"h.{index}"
        self.attention_norm = LayerNorm(weights, f"{name}.ln_1", hidden, network.norm_eps)
        self.qkv = weights.linear([f"{name}.attn.c_attn"], [3 * hidden], hidden, bias=True)  # [3 * hidden, hidden]
        self.o = weights.linear([f"{name}.attn.c_proj"], [hidden], hidden, bias=True)  # [hidden, hidden]
        self.mlp_norm = LayerNorm(weights, f"{name}.ln_2", hidden, network.norm_eps)
        self.up = weights.linear([f"{name}.mlp.c_fc"], [width], hidden, bias=True)  # [width, hidden]
        self.down = weights.linear([f"{name}.mlp.c_proj"], [hidden], width, bias=True)  # [hidden, width]

    def forward(self, x: Tensor, view: KVView, ops: Ops) -> Tensor:
        """[num_tokens, hidden] → the same shape."""
        x = x + self.attention(self.attention_norm.forward(x, ops), view, ops)
        up = self.up.forward(self.mlp_norm.forward(x, ops), ops)  # [num_tokens, width]
        return x + self.down.forward(ops.activate(up, self.activation), ops)

    def attention(self, x: Tensor, view: KVView, ops: Ops) -> Tensor:
        """x [num_tokens, hidden], normed → [num_tokens, hidden]."""
        heads = self.qkv.forward(x, ops).view(-1, 3 * self.num_heads, self.head_width)  # [num_tokens, q | k | v, width]
        q, k, v = torch.split(heads, self.num_heads, dim=1)  # each [num_tokens, num_heads, head_width]
        out = view.attend(self.index, q, k, v, self.attention_scale)  # [num_tokens, num_heads, head_width]
        return self.o.forward(out.reshape(-1, self.num_heads * self.head_width), ops)


class Gpt2Model:
    """Token and position embeddings, layers, final norm, head."""

    def __init__(self, spec: RunnableSpec, weights: Weights) -> None:
        network = spec.network
        vocab, hidden = network.vocab_size, network.hidden_size
        self.spec = spec
        self.embedding = weights.get("wte.weight", (vocab, hidden))  # [vocab, hidden]
        self.position_embedding = weights.get("wpe.weight", (spec.max_context, hidden))  # [max_context, hidden]
        self.layers = [Gpt2Layer(spec, weights, index) for index in range(len(spec.layers))]
        self.norm = LayerNorm(weights, "ln_f", hidden, network.norm_eps)
        self.head = (  # [vocab, hidden]
            self.embedding if network.tie_embeddings else weights.get("lm_head.weight", (vocab, hidden))
        )
        self.weight_bytes = weights.delivered_bytes

    def forward(self, token_ids: Tensor, positions: Tensor, view: KVView, ops: Ops, rows: Tensor) -> Tensor:
        """token_ids, positions [num_tokens], rows [num_rows] → logits [num_rows, vocab] of the compute dtype."""
        x = self.embedding[token_ids] + self.position_embedding[positions]  # [num_tokens, hidden]
        for layer in self.layers:
            x = layer.forward(x, view, ops)
        return ops.linear(self.norm.forward(x[rows], ops), self.head)
