"""What every network shares: the two things it is handed (a view, an ops object) and its rotary tables.

Knows nothing of pools, blocks or schedulers: a view is a window on some cache, or on none.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from kvfolio.errors import UnknownModelError
from kvfolio.spec.model import Rope


class KVView(Protocol):
    """One step's window on the cache."""

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, sink_logits: Tensor | None = None
    ) -> Tensor:
        """Store k and v of this step's tokens for ``layer``, then attend with q over everything each may read.

        q [num_tokens, num_q_heads, k_width], k [num_tokens, num_kv_heads, k_width],
        v [num_tokens, num_kv_heads, v_width] → [num_tokens, num_q_heads, v_width].
        sink_logits [num_q_heads] f32: exp of it is one more term in the denominator of each softmax, without a value.
        Side effect: the cache holds k and v afterwards. Inputs may be views with any row stride.
        """
        ...

    def attend_latent(
        self, layer: int, q: tuple[Tensor, Tensor], k: Tensor, expansion: "Expansion", scale: float
    ) -> Tensor:
        """As ``attend``, in a layer that keeps latents.

        q: the part that meets expanded keys [num_tokens, num_heads, plain_width], and the rotary part [num_tokens,
        num_heads, rope_width]; k [num_tokens, 1, rank + rope_width]: latents, then rotary keys
        → [num_tokens, num_heads, v_width].
        """
        ...


class Ops(Protocol):
    """The arithmetic of a network. ``x`` is [num_tokens, width] of the compute dtype throughout."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias; weight [out, in]."""
        ...

    def head_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        """x[:, head] @ weight[head].T for every head; weight [num_heads, out, in].

        x [num_tokens, num_heads, in] → [num_tokens, num_heads, out], which may be strided.
        """
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x²) + eps) * weight over the last axis, computed in f32; ``weight`` is f32.

        Works on [..., width] for heads as for hidden states.
        """
        ...

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """(rms_norm(x + residual), x + residual); the sum is rounded to the compute dtype first."""
        ...

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        """(x - mean) / sqrt(var + eps) * weight + bias over the last axis."""
        ...

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate the first 2 * cos.shape[1] numbers of each head, halves paired (x[i], x[i + half]).

        x [num_tokens, num_heads, width]; cos, sin [num_tokens, half] f32. May work in place; use the result.
        """
        ...

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        """activation(gate) * up, where gate_up [num_tokens, 2 * width] holds gate, then up."""
        ...

    def activate(self, x: Tensor, activation: str) -> Tensor:
        """activation(x): silu, gelu or gelu_tanh."""
        ...


class Expansion(Protocol):
    """How one latent layer's heads get at the latents: their keys and values are projections of them."""

    def absorb(self, q: Tensor, ops: Ops) -> Tensor:
        """Queries that read latents: q [num_tokens, num_heads, plain_width] → [num_tokens, num_heads, rank]."""
        ...

    def release(self, out: Tensor, ops: Ops) -> Tensor:
        """Values out of sums of latents: out [num_tokens, num_heads, rank] → [num_tokens, num_heads, v_width]."""
        ...

    def expand(self, latents: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """Of ``heads``: keys [heads, num_tokens, plain_width] and values [heads, num_tokens, v_width], f32.

        latents [num_tokens, rank] f32.
        """
        ...


@dataclass(frozen=True, slots=True)
class Linear:
    """One matrix product with the projections that read the same input stacked in it."""

    weight: Tensor  # [out, in] compute dtype
    bias: Tensor | None  # [out] compute dtype

    def forward(self, x: Tensor, ops: Ops) -> Tensor:
        """x [num_tokens, in] → [num_tokens, out]."""
        return ops.linear(x, self.weight, self.bias)


Rotary = tuple[Tensor, Tensor]  # cos and sin of one step's positions, each [num_tokens, width / 2] f32


def inverse_frequencies(rope: Rope) -> tuple[Tensor, float]:
    """([width / 2] f32 inverse frequencies, the factor on cos and sin) of ``rope``.

    Sources: RoFormer (2104.09864) sec. 3.2; linear: 2306.15595; yarn: 2309.00071 sec. 3; llama3: Llama 3.1's code.
    """
    half = torch.arange(0, rope.width, 2, dtype=torch.int64).to(torch.float32) / rope.width
    inverse = 1.0 / (rope.base**half)
    if rope.scaling == "none":
        return inverse, 1.0
    if rope.scaling == "linear":
        return inverse / rope.factor, 1.0
    if rope.scaling == "llama3":
        return _llama3(inverse, rope), 1.0
    if rope.scaling == "yarn":
        return _yarn(inverse, rope)
    raise UnknownModelError(f"unknown rope scaling {rope.scaling!r}; known: none, linear, llama3, yarn")


def _llama3(inverse: Tensor, rope: Rope) -> Tensor:
    wavelength = 2 * math.pi / inverse
    low, high = rope.low_frequency_factor, rope.high_frequency_factor
    smooth = (rope.original_context / wavelength - low) / (high - low)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * inverse / rope.factor + smooth * inverse


def _yarn(inverse: Tensor, rope: Rope) -> tuple[Tensor, float]:
    def dimension(rotations: float) -> float:
        return rope.width * math.log(rope.original_context / (rotations * 2 * math.pi)) / (2 * math.log(rope.base))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.width - 1)
    ramp = (torch.arange(rope.width // 2, dtype=torch.float32) - low) / max(high - low, 0.001)
    keep = 1 - ramp.clamp(0.0, 1.0)  # 1: high frequency, left alone
    factor = rope.attention_factor if rope.attention_factor is not None else 0.1 * math.log(rope.factor) + 1.0
    return inverse / rope.factor * (1 - keep) + inverse * keep, factor


class RopeTable:
    """cos and sin for any position, computed on demand. Holds [width / 2] frequencies only."""

    def __init__(self, rope: Rope, device: torch.device) -> None:
        inverse, self._factor = inverse_frequencies(rope)
        self._inverse = inverse.to(device)

    def at(self, positions: Tensor) -> Rotary:
        """(cos, sin), each [num_tokens, width / 2] f32, at ``positions`` [num_tokens] int64."""
        angles = positions.to(torch.float32)[:, None] * self._inverse[None, :]
        return angles.cos() * self._factor, angles.sin() * self._factor
