"""A Llama network in plain torch with random weights: one decode step over a cache that is full up to its last place.

Knows nothing of kvfolio's engine, nor of clocks: for benchmarks on a GPU that hold the planner against a measurement.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

import kvfolio
from kvfolio.spec.layers import FullAttention
from kvfolio.spec.model import ModelSpec, WeightCount

ROPE_BASE, NORM_EPS = 500_000.0, 1e-5


@dataclass(frozen=True, slots=True)
class Shape:
    """The numbers of a Llama network."""

    num_layers: int
    hidden: int
    num_q_heads: int
    num_kv_heads: int
    head_width: int
    inner: int  # of the gated MLP
    vocab: int

    @property
    def num_params(self) -> int:
        heads = (2 * self.num_q_heads + 2 * self.num_kv_heads) * self.head_width
        layer = heads * self.hidden + 3 * self.hidden * self.inner + 2 * self.hidden
        return 2 * self.vocab * self.hidden + self.num_layers * layer + self.hidden

    @property
    def table_bytes(self) -> int:
        """Bytes of the embedding table, of which a step looks up one row a sequence."""
        return 2 * self.vocab * self.hidden

    def spec(self) -> ModelSpec:
        """This shape as the planner sees it; the full one must be the catalogue's."""
        layers = (FullAttention(self.num_kv_heads, self.head_width, self.head_width),) * self.num_layers
        weights = WeightCount(self.num_params, self.num_params, 2 * self.num_params, "config")
        spec = ModelSpec("shape", "llama", layers, None, "bf16", self.hidden, self.num_q_heads, weights, ())
        if self == LLAMA_8B:
            known = kvfolio.read_model("llama-3.1-8b")
            assert (spec.layers, spec.num_params) == (known.layers, known.num_params), "the catalogue says otherwise"
        return spec


LLAMA_8B = Shape(32, 4096, 32, 8, 128, 14_336, 128_256)
SMALL = Shape(3, 256, 8, 2, 32, 512, 1000)


# ---- the network ----------------------------------------------------------------------------------------------------

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def attend_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A group's heads stand as its queries, so keys and values are read once. q: [batch, kv heads, group, width]."""
    return functional.scaled_dot_product_attention(q, k, v)


def attend_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same as two batched products."""
    scores = torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2))
    return torch.matmul(torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype), v)


ATTENTIONS: dict[str, Attend] = {"sdpa": attend_sdpa, "products": attend_products}


@dataclass(frozen=True, slots=True)
class Layer:
    norm: Tensor
    qkv: Tensor
    out: Tensor
    mlp_norm: Tensor
    gate_up: Tensor
    down: Tensor


class Network:
    """Random weights of a shape, and the step of one token a sequence."""

    def __init__(self, shape: Shape, device: torch.device) -> None:
        self.shape = shape
        dice = torch.Generator(device).manual_seed(0)

        def weight(rows: int, columns: int) -> Tensor:
            values = torch.empty((rows, columns), dtype=torch.bfloat16, device=device)
            return values.normal_(0, columns**-0.5, generator=dice)

        def ones() -> Tensor:
            return torch.ones(shape.hidden, dtype=torch.bfloat16, device=device)

        q_width = shape.num_q_heads * shape.head_width
        qkv_width = q_width + 2 * shape.num_kv_heads * shape.head_width
        self.table, self.head = weight(shape.vocab, shape.hidden), weight(shape.vocab, shape.hidden)
        self.norm = ones()
        self.layers = [
            Layer(
                norm=ones(),
                qkv=weight(qkv_width, shape.hidden),
                out=weight(shape.hidden, q_width),
                mlp_norm=ones(),
                gate_up=weight(2 * shape.inner, shape.hidden),
                down=weight(shape.hidden, shape.inner),
            )
            for _ in range(shape.num_layers)
        ]

    @property
    def num_bytes(self) -> int:
        layers = [getattr(layer, name) for layer in self.layers for name in Layer.__slots__]
        return sum(weight.nbytes for weight in (self.table, self.head, self.norm, *layers))

    def turns(self, position: int) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines of one position, for heads that turn their two halves against each other."""
        half = self.shape.head_width // 2
        angles = position * ROPE_BASE ** (-torch.arange(half, dtype=torch.float64) / half)
        cos, sin = torch.cat((angles, angles)).cos(), torch.cat((-angles, angles)).sin()
        return cos.to(self.table), sin.to(self.table)

    def step(self, tokens: Tensor, cache: list[Tensor], turns: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Logits [batch, vocab] of one more token a sequence; it is written to the last place of ``cache``.

        cache: of each layer [2 (keys, values), batch, kv heads, tokens, width].
        """
        shape, batch = self.shape, len(tokens)
        half, turned = shape.head_width // 2, shape.num_q_heads + shape.num_kv_heads
        group = shape.num_q_heads // shape.num_kv_heads
        hidden = self.table[tokens]
        for layer, kept in zip(self.layers, cache, strict=True):
            x = functional.rms_norm(hidden, (shape.hidden,), layer.norm, NORM_EPS)
            qkv = functional.linear(x, layer.qkv).view(batch, -1, shape.head_width)
            qk = qkv[:, :turned]
            qk = torch.addcmul(qk * turns[0], qk.roll(half, -1), turns[1])
            kept[0, :, :, -1].copy_(qk[:, shape.num_q_heads :])
            kept[1, :, :, -1].copy_(qkv[:, turned:])
            q = qk[:, : shape.num_q_heads].reshape(batch, shape.num_kv_heads, group, shape.head_width)
            mixed = attend(q, kept[0], kept[1]).reshape(batch, -1)
            hidden = torch.addmm(hidden, mixed, layer.out.t())
            x = functional.rms_norm(hidden, (shape.hidden,), layer.mlp_norm, NORM_EPS)
            gate, up = functional.linear(x, layer.gate_up).chunk(2, dim=-1)
            hidden = torch.addmm(hidden, functional.silu(gate) * up, layer.down.t())
        return functional.linear(functional.rms_norm(hidden, (shape.hidden,), self.norm, NORM_EPS), self.head)


def filled_cache(shape: Shape, batch: int, num_tokens: int, device: torch.device) -> list[Tensor]:
    dice = torch.Generator(device).manual_seed(1)
    size = (2, batch, shape.num_kv_heads, num_tokens, shape.head_width)
    return [
        torch.empty(size, dtype=torch.bfloat16, device=device).normal_(generator=dice) for _ in range(shape.num_layers)
    ]


def check_attentions(device: torch.device) -> None:
    """Both forms, in f32, against attention whose keys and values are repeated for every head."""
    dice = torch.Generator(device).manual_seed(2)
    k, v = (torch.randn((2, 2, 50, 16), device=device, generator=dice) for _ in range(2))
    q = torch.randn((2, 8, 1, 16), device=device, generator=dice)
    right = functional.scaled_dot_product_attention(q, k.repeat_interleave(4, 1), v.repeat_interleave(4, 1))
    for name, attend in ATTENTIONS.items():
        given = attend(q.view(2, 2, 4, 16), k, v).reshape(2, 8, 1, 16)
        torch.testing.assert_close(given, right, rtol=2e-3, atol=2e-3, msg=lambda text, name=name: f"{name}: {text}")
