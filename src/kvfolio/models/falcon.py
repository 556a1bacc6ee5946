"""Falcon: attention and a plain MLP side by side behind one or two layer norms, or, in the oldest, one after the other.

Knows nothing of caches, files or kernels: weights come by name, memory through a view, arithmetic through ops.
"""

import torch
from torch import Tensor

from kvfolio.errors import UnknownModelError
from kvfolio.models.gpt2 import LayerNorm
from kvfolio.models.parts import KVView, Linear, Ops, RopeTable, Rotary
from kvfolio.models.weights import Weights
from kvfolio.spec.model import RunnableSpec

# What stands before attention and before the MLP, by (parallel, num_norms); one name: both read the same.
NORM_NAMES = {
    (True, 1): ("input_layernorm",),
    (True, 2): ("ln_attn", "ln_mlp"),
    (False, 2): ("input_layernorm", "post_attention_layernorm"),
}


class FalconLayer:
    """Parallel: x + attention(norm(x)) + MLP(norm(x)). Else: norm → attention → add → norm → MLP → add."""

    def __init__(self, spec: RunnableSpec, weights: Weights, index: int) -> None:
        network, kind = spec.network, spec.layers[index]
        self.index = index
        self.num_q_heads = network.num_q_heads
        self.num_kv_heads = kind.num_kv_heads
        self.head_width = kind.k_width
        self.attention_scale = network.attention_scale
        self.activation = network.activation
        self.parallel = network.parallel

        hidden, width = network.hidden_size, network.intermediate_size
        q_rows = self.num_q_heads * self.head_width
        rows = q_rows + 2 * self.num_kv_heads * self.head_width
        name = f"h.{index}"
        self.norms = [
            LayerNorm(weights, f"{name}.{norm}", hidden, network.norm_eps)
            for norm in NORM_NAMES[network.parallel, network.num_norms]
        ]
        fused = weights.linear([f"{name}.self_attention.query_key_value"], [rows], hidden, network.qkv_bias)
        self.qkv = Linear(  # [rows, hidden]: q | k | v
            parts_apart(fused.weight, self.num_q_heads, self.num_kv_heads),
            None if fused.bias is None else parts_apart(fused.bias, self.num_q_heads, self.num_kv_heads),
        )
        self.o = weights.linear([f"{name}.self_attention.dense"], [hidden], q_rows, network.o_bias)  # [hidden, q_rows]
        self.up = weights.linear([f"{name}.mlp.dense_h_to_4h"], [width], hidden, network.mlp_bias)  # [width, hidden]
        self.down = weights.linear([f"{name}.mlp.dense_4h_to_h"], [hidden], width, network.mlp_bias)  # [hidden, width]

    def forward(self, x: Tensor, rotary: Rotary, view: KVView, ops: Ops) -> Tensor:
        """[num_tokens, hidden] → the same shape."""
        normed = self.norms[0].forward(x, ops)
        attended = self.attention(normed, rotary, view, ops)
        if not self.parallel:
            x = x + attended
            return x + self.mlp(self.norms[1].forward(x, ops), ops)
        if len(self.norms) == 2:
            normed = self.norms[1].forward(x, ops)
        return x + (self.mlp(normed, ops) + attended)

    def mlp(self, x: Tensor, ops: Ops) -> Tensor:
        """x [num_tokens, hidden], normed → [num_tokens, hidden]."""
        return self.down.forward(ops.activate(self.up.forward(x, ops), self.activation), ops)

    def attention(self, x: Tensor, rotary: Rotary, view: KVView, ops: Ops) -> Tensor:
        """x [num_tokens, hidden], normed → [num_tokens, hidden]."""
        num_q, num_kv = self.num_q_heads, self.num_kv_heads
        heads = self.qkv.forward(x, ops).view(-1, num_q + 2 * num_kv, self.head_width)  # [num_tokens, q | k | v, width]
        qk = ops.rope(heads[:, : num_q + num_kv], *rotary)  # q and k lie side by side: one call
        q, k = torch.split(qk, [num_q, num_kv], dim=1)  # each [num_tokens, its heads, head_width]
        out = view.attend(self.index, q, k, heads[:, num_q + num_kv :], self.attention_scale)
        return self.o.forward(out.reshape(-1, num_q * self.head_width), ops)


def parts_apart(rows: Tensor, num_q_heads: int, num_kv_heads: int) -> Tensor:
    """Rows in Falcon's order, for each key head its queries, the key and the value, in ours: all q, all k, all v.

    One key head for all queries (7B) and one for each (the oldest) are the two ends of the same order.
    rows [(num_q_heads + 2 * num_kv_heads) * head_width, ...] → the same shape, a copy.
    """
    queries = num_q_heads // num_kv_heads  # of one key head
    groups = rows.view(num_kv_heads, queries + 2, -1, *rows.shape[1:])  # [num_kv_heads, q… | k | v, head_width, ...]
    parts = torch.split(groups, [queries, 1, 1], dim=1)
    return torch.cat([part.reshape(-1, *rows.shape[1:]) for part in parts])


class FalconModel:
    """Embedding, layers, final norm, head."""

    def __init__(self, spec: RunnableSpec, weights: Weights) -> None:
        network = spec.network
        if network.rope is None:
            raise UnknownModelError(
                f"{spec.name}: a network of the family falcon needs rotary positions, none are given"
            )
        vocab, hidden = network.vocab_size, network.hidden_size
        self.spec = spec
        self.embedding = weights.get("word_embeddings.weight", (vocab, hidden))  # [vocab, hidden]
        self.layers = [FalconLayer(spec, weights, index) for index in range(len(spec.layers))]
        self.norm = LayerNorm(weights, "ln_f", hidden, network.norm_eps)
        self.head = (  # [vocab, hidden]
            self.embedding if network.tie_embeddings else weights.get("lm_head.weight", (vocab, hidden))
        )
        self.rope = RopeTable(network.rope, weights.device)
        self.weight_bytes = weights.delivered_bytes

    def forward(self, token_ids: Tensor, positions: Tensor, view: KVView, ops: Ops, rows: Tensor) -> Tensor:
        """token_ids, positions [num_tokens], rows [num_rows] → logits [num_rows, vocab] of the compute dtype."""
        rotary = self.rope.at(positions)
        x = self.embedding[token_ids]  # [num_tokens, hidden]
        for layer in self.layers:
            x = layer.forward(x, rotary, view, ops)
        return ops.linear(self.norm.forward(x[rows], ops), self.head)
