"""gpt-oss: a learned sink logit per query head, window and full layers by turns, experts with a clamped gate.

Knows nothing of caches, files or kernels: weights come by name, memory through a view, arithmetic through ops.
"""

import torch
from torch import Tensor

from kvfolio.models.decoder import Decoder
from kvfolio.models.llama import LlamaAttention
from kvfolio.models.parts import Ops
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


def _attention(spec: RunnableSpec, weights: Weights, index: int) -> LlamaAttention:
    """Llama's, with biases, and a sink logit for each query head."""
    name = f"model.layers.{index}.self_attn.sinks"
    return LlamaAttention(spec, weights, index, weights.get(name, (spec.network.num_q_heads,), torch.float32))


def gpt_oss(spec: RunnableSpec, weights: Weights) -> Decoder:
    """The network of a spec of this family."""
    return Decoder(spec, weights, _attention, GptOssExperts)
