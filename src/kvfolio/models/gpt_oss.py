"""gpt-oss: a learned sink logit per query head, window and full layers by turns, experts with a clamped gate.

Knows nothing of caches, files or kernels: weights come by name, memory through a view, arithmetic through ops.
"""

import torch
from torch import Tensor

from kvfolio.models.decoder import Decoder
from kvfolio.models.parts import KVView, Ops, Rotary
from kvfolio.models.weights import Weights
from kvfolio.spec.config.gpt_oss import SWIGLU_ALPHA, SWIGLU_LIMIT
from kvfolio.spec.model import RunnableSpec


class GptOssExperts:
    """A router, and the gated products that it chooses among: in every row the ``per_token`` of highest logit."""

    def __init__(self, spec: RunnableSpec, weights: Weights, index: int) -> None:
        experts, hidden, name = spec.network.experts, spec.network.hidden_size, f"model.layers.{index}.mlp"
        assert experts is not None  # spec/config/gpt_oss.py always has some
        count, width = experts.num_experts, experts.width
        self.per_token = experts.per_token
        self.router = weights.linear([f"{name}.router"], [count], hidden, bias=True)  # [count, hidden]
        inner, down = f"{name}.experts.gate_up_proj", f"{name}.experts.down_proj"
        self.gate_up = weights.get(inner, (count, 2 * width, hidden))  # rows: gate and up by turns
        self.gate_up_bias = weights.get(f"{inner}_bias", (count, 2 * width))
        self.down = weights.get(down, (count, hidden, width))
        self.down_bias = weights.get(f"{down}_bias", (count, hidden))

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        """x [num_tokens, hidden], normed → [num_tokens, hidden].

        A row goes through its own experts in their order, alone or beside others: its sum never depends on them.
        """
        logits = self.router.forward(x, ops).to(torch.float32)  # [num_tokens, num_experts]
        ranked = torch.sort(logits, dim=1, descending=True, stable=True)  # of equal logits the lower number is better
        shares, chosen = torch.softmax(ranked.values[:, : self.per_token], dim=1), ranked.indices[:, : self.per_token]
        out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for expert in torch.unique(chosen).tolist():
            rows, places = torch.where(chosen == expert)
            gate_up = ops.linear(x[rows], self.gate_up[expert], self.gate_up_bias[expert])  # [num_rows, 2 * width]
            y = ops.linear(self.gated(gate_up, ops), self.down[expert], self.down_bias[expert])  # [num_rows, hidden]
            out[rows] += y.to(torch.float32) * shares[rows, places, None]
        return out.to(x.dtype)

    @staticmethod
    def gated(gate_up: Tensor, ops: Ops) -> Tensor:
        """gate * sigmoid(alpha * gate) * (up + 1), both clamped; gate_up [num_rows, gate and up by turns].

        In f32, as silu(alpha * gate) * ((up + 1) / alpha).
        """
        gate = gate_up[:, ::2].to(torch.float32).clamp(max=SWIGLU_LIMIT)  # [num_rows, width]
        up = gate_up[:, 1::2].to(torch.float32).clamp(-SWIGLU_LIMIT, SWIGLU_LIMIT)
        pair = torch.cat((gate * SWIGLU_ALPHA, (up + 1) / SWIGLU_ALPHA), dim=1)
        return ops.gated(pair, "silu").to(gate_up.dtype)


class GptOssAttention:
    """Grouped heads with biases, and a sink logit for each query head."""

    def __init__(self, spec: RunnableSpec, weights: Weights, index: int) -> None:
        network, kind = spec.network, spec.layers[index]
        self.index = index
        self.num_q_heads = network.num_q_heads
        self.num_kv_heads = kind.num_kv_heads
        self.head_width = kind.k_width
        self.attention_scale = network.attention_scale

        hidden = network.hidden_size
        q_rows, kv_rows = self.num_q_heads * self.head_width, self.num_kv_heads * self.head_width
        name = f"model.layers.{index}"
        self.qkv = weights.linear(  # [q_rows + 2 * kv_rows, hidden]
            [f"{name}.self_attn.{part}_proj" for part in "qkv"], [q_rows, kv_rows, kv_rows], hidden, network.qkv_bias
        )
        self.sink_logits = weights.get(f"{name}.self_attn.sinks", (self.num_q_heads,), torch.float32)  # [num_q_heads]
        self.o = weights.linear([f"{name}.self_attn.o_proj"], [hidden], q_rows, network.o_bias)  # [hidden, q_rows]

    def forward(self, x: Tensor, rotary: Rotary, view: KVView, ops: Ops) -> Tensor:
        """x [num_tokens, hidden], normed → [num_tokens, hidden]."""
        num_q, num_kv = self.num_q_heads, self.num_kv_heads
        heads = self.qkv.forward(x, ops).view(-1, num_q + 2 * num_kv, self.head_width)  # [num_tokens, q | k | v, width]
        qk = ops.rope(heads[:, : num_q + num_kv], *rotary)  # q and k lie side by side: one call
        q, k = torch.split(qk, [num_q, num_kv], dim=1)  # each [num_tokens, its heads, head_width]
        v = heads[:, num_q + num_kv :]
        out = view.attend(self.index, q, k, v, self.attention_scale, self.sink_logits)  # [num_tokens, q, head_width]
        return self.o.forward(out.reshape(-1, num_q * self.head_width), ops)


def gpt_oss(spec: RunnableSpec, weights: Weights) -> Decoder:
    """The network of a spec of this family."""
    return Decoder(spec, weights, GptOssAttention, GptOssExperts)
