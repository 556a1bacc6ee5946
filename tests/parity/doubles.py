"""Plain torch stand-ins for the two things a network is handed: the arithmetic and a window on a cache.

Knows nothing of kernels, pools or blocks: a cache here is a list that grows.
"""

import torch
from torch import Tensor
from torch.nn import functional

from kvfolio.models.build import LanguageModel
from kvfolio.models.parts import Expansion
from kvfolio.spec.layers import PagedLayer

ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
}


class PlainOps:
    """The arithmetic of a network, each operation as its definition reads."""

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        return functional.linear(x, weight, bias)

    def head_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        return torch.einsum("nhi,hoi->nho", x, weight)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        exact = x.float()
        return (exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = cos.shape[1]
        first, second, rest = x[..., :half].float(), x[..., half : 2 * half].float(), x[..., 2 * half :]
        cos, sin = cos[:, None, :], sin[:, None, :]
        turned = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
        return torch.cat([turned.to(x.dtype), rest], dim=-1)

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return ACTIVATIONS[activation](gate) * up

    def activate(self, x: Tensor, activation: str) -> Tensor:
        return ACTIVATIONS[activation](x)


class GrowingView:
    """A cache of any number of sequences that only grows. ``owners`` says whose each token of the step is.

    Latent layers are computed in the absorbed form, or in the expanded one.
    """

    def __init__(self, layers: tuple[PagedLayer, ...], expanded: bool = False) -> None:
        self.layers = layers
        self.expanded = expanded
        self.owners: list[int] = []  # [num_tokens] of the step at hand; a sequence's tokens come in order
        self._stored: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}  # (layer, sequence): k, v

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, sink_logits: Tensor | None = None
    ) -> Tensor:
        out = torch.empty(*q.shape[:2], v.shape[-1], dtype=q.dtype)
        owners = torch.tensor(self.owners)
        for sequence in sorted(set(self.owners)):
            mine = (owners == sequence).nonzero()[:, 0]
            keys, values = k[mine], v[mine]
            if (layer, sequence) in self._stored:
                old_keys, old_values = self._stored[layer, sequence]
                keys, values = torch.cat([old_keys, keys]), torch.cat([old_values, values])
            self._stored[layer, sequence] = keys.clone(), values.clone()
            out[mine] = masked_attention(self.layers[layer], q[mine], keys, values, scale, sink_logits).to(q.dtype)
        return out

    def attend_latent(
        self, layer: int, q: tuple[Tensor, Tensor], k: Tensor, expansion: Expansion, scale: float
    ) -> Tensor:
        kind = self.layers[layer]
        latents, turned = k.split([kind.v_width, kind.k_width - kind.v_width], dim=-1)
        if self.expanded:  # keys and values of every head, as if the model had no latents
            plain, values = (part.transpose(0, 1) for part in expansion.expand(latents[:, 0], slice(None)))
            keys = torch.cat([plain, turned.expand(-1, plain.shape[1], -1)], dim=-1)
            return self.attend(layer, torch.cat(q, dim=-1), keys, values, scale)
        absorbed = torch.cat([expansion.absorb(q[0], PlainOps()), q[1]], dim=-1)
        return expansion.release(self.attend(layer, absorbed, k, latents, scale), PlainOps())


def masked_attention(
    kind: PagedLayer, q: Tensor, k: Tensor, v: Tensor, scale: float, sink_logits: Tensor | None = None
) -> Tensor:
    """The last len(q) tokens of a sequence attend over all of it: q [n, num_q_heads, k_width], k, v [total, …]."""
    total, shared = k.shape[0], q.shape[1] // k.shape[1]
    k, v = k.float().repeat_interleave(shared, dim=1), v.float().repeat_interleave(shared, dim=1)
    scores = torch.einsum("qhw,khw->hqk", q.float(), k) * scale  # [num_q_heads, n, total]
    for row, position in enumerate(range(total - q.shape[0], total)):
        scores[:, row, : kind.first_token_needed(position)] = -torch.inf
        scores[:, row, position + 1 :] = -torch.inf
    largest = scores.amax(-1, keepdim=True)
    weights = (scores - largest).exp()
    total = weights.sum(-1, keepdim=True)
    if sink_logits is not None:
        total = total + (sink_logits[:, None, None] - largest).exp()
    return torch.einsum("hqk,khw->qhw", weights / total, v)


class Session:
    """A model run step by step over a growing cache, as the engine would."""

    def __init__(self, model: LanguageModel, expanded: bool = False) -> None:
        self.model = model
        self.view = GrowingView(model.spec.layers, expanded)
        self._lengths: dict[int, int] = {}  # tokens each sequence has

    def step(self, chunks: dict[int, list[int]]) -> dict[int, Tensor]:
        """Run each sequence's next tokens, all in one forward; {sequence: logits [its tokens, vocab]}."""
        token_ids, positions, owners = [], [], []
        for sequence, chunk in chunks.items():
            start = self._lengths.get(sequence, 0)
            token_ids += chunk
            positions += range(start, start + len(chunk))
            owners += [sequence] * len(chunk)
            self._lengths[sequence] = start + len(chunk)
        self.view.owners = owners
        with torch.inference_mode():
            logits = self.model.forward(
                torch.tensor(token_ids), torch.tensor(positions), self.view, PlainOps(), torch.arange(len(token_ids))
            )
        return dict(zip(chunks, logits.split([len(chunk) for chunk in chunks.values()]), strict=True))
