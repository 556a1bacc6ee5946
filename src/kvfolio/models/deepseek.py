"""DeepSeek V2 and V3: attention over one latent and one rotary key a token (MLA), then a gated MLP or experts.

Knows nothing of caches, files or kernels: weights come by name, memory through a view, arithmetic through ops.
Source: 2405.04434 sec. 2.1 and appendix C; the absorbed form is its observation that W_UK and W_UV need not be
applied to cached latents.
"""

import torch
from torch import Tensor

from kvfolio.models.decoder import Decoder
from kvfolio.models.experts import feed_forward
from kvfolio.models.parts import KVView, Linear, Ops, Rotary
from kvfolio.models.weights import Weights
from kvfolio.spec.model import RunnableSpec
from kvfolio.spec.token_layers import LatentAttention

LATENT_NORM_EPS = 1e-6  # of the norms on latents, whatever the config says of the others


class LatentHeads:
    """W_UK and W_UV of one layer: applied to queries and outputs (absorbed), or to latents (expanded)."""

    def __init__(self, kv_b: Tensor, kind: LatentAttention) -> None:
        plain = kind.expanded_k_width - kind.rope_width
        heads = kv_b.view(kind.num_heads, plain + kind.expanded_v_width, kind.rank)
        self.keys = heads[:, :plain].transpose(1, 2).contiguous()  # [num_heads, rank, plain_width]
        self.values = heads[:, plain:].contiguous()  # [num_heads, v_width, rank]

    def absorb(self, q: Tensor, ops: Ops) -> Tensor:
        """q [num_tokens, num_heads, plain_width] → [num_tokens, num_heads, rank]: what latents are multiplied with."""
        return ops.head_linear(q, self.keys)

    def release(self, out: Tensor, ops: Ops) -> Tensor:
        """Weighed sums of latents [num_tokens, num_heads, rank] → of values [num_tokens, num_heads, v_width]."""
        return ops.head_linear(out, self.values)

    def expand(self, latents: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        """[num_tokens, rank] f32 → keys [heads, num_tokens, plain_width], values [heads, num_tokens, v_width], f32."""
        keys, values = self.keys[heads].to(latents.dtype), self.values[heads].to(latents.dtype)
        return torch.matmul(latents, keys), torch.matmul(latents, values.transpose(1, 2))


class MultiHeadLatentAttention:
    """One latent and one rotary key a token, which all heads read."""

    def __init__(self, spec: RunnableSpec, weights: Weights, index: int) -> None:
        network, kind = spec.network, spec.layers[index]
        assert isinstance(kind, LatentAttention)
        self.index = index
        self.kind = kind
        self.plain_width = kind.expanded_k_width - kind.rope_width
        self.attention_scale = network.attention_scale
        self.q_rank = network.q_rank

        hidden, attention = network.hidden_size, f"model.layers.{index}.self_attn"
        down = [f"{attention}.kv_a_proj_with_mqa"]  # to latent and rotary key
        rows = [kind.k_width]
        q_name, q_in = f"{attention}.q_proj", hidden
        if self.q_rank:
            down, rows = [f"{attention}.q_a_proj", *down], [self.q_rank, *rows]
            self.q_norm = weights.norm_scale(f"{attention}.q_a_layernorm.weight", self.q_rank)  # [q_rank] f32
            q_name, q_in = f"{attention}.q_b_proj", self.q_rank
        stacked = weights.linear(down, rows, hidden, network.qkv_bias)  # [q_rank + rank + rope_width, hidden]
        q_rows = kind.num_heads * kind.expanded_k_width
        q = weights.get(f"{q_name}.weight", (q_rows, q_in)).view(kind.num_heads, kind.expanded_k_width, q_in)
        plain, turned = torch.split(q, [self.plain_width, kind.rope_width], dim=1)
        if network.rope_in_pairs:
            turned = halves(turned, 1)
            for part in (stacked.weight, stacked.bias):
                if part is not None:
                    part[-kind.rope_width :] = halves(part[-kind.rope_width :], 0)
        self.down = stacked
        self.q = Linear(torch.cat((plain.flatten(0, 1), turned.flatten(0, 1))), None)  # every head's plain part first
        self.latent_norm = weights.norm_scale(f"{attention}.kv_a_layernorm.weight", kind.rank)  # [rank] f32
        expanded = kind.num_heads * (self.plain_width + kind.expanded_v_width)
        self.heads = LatentHeads(weights.get(f"{attention}.kv_b_proj.weight", (expanded, kind.rank)), kind)
        out_rows = kind.num_heads * kind.expanded_v_width
        self.o = weights.linear(
            [f"{attention}.o_proj"], [hidden], out_rows, network.o_bias
        )  # [hidden, heads * v_width]

    def forward(self, x: Tensor, rotary: Rotary, view: KVView, ops: Ops) -> Tensor:
        """x [num_tokens, hidden], normed → [num_tokens, hidden]."""
        kind = self.kind
        lows = self.down.forward(x, ops)  # [num_tokens, q_rank + rank + rope_width]
        low_q, latent, k_rope = torch.split(lows, [self.q_rank, kind.rank, kind.rope_width], dim=1)
        if self.q_rank:
            x = ops.rms_norm(low_q, self.q_norm, LATENT_NORM_EPS)
        q = self.q.forward(x, ops)  # [num_tokens, heads * plain_width + heads * rope_width]
        at = kind.num_heads * self.plain_width
        plain = q[:, :at].view(-1, kind.num_heads, self.plain_width)
        turned = ops.rope(q[:, at:].view(-1, kind.num_heads, kind.rope_width), *rotary)
        k = torch.cat(  # [num_tokens, 1, rank + rope_width]
            (
                ops.rms_norm(latent, self.latent_norm, LATENT_NORM_EPS)[:, None],
                ops.rope(k_rope[:, None], *rotary),
            ),
            dim=-1,
        )
        out = view.attend_latent(self.index, (plain, turned), k, self.heads, self.attention_scale)
        return self.o.forward(out.flatten(1), ops)  # of [num_tokens, heads, v_width]


def deepseek(spec: RunnableSpec, weights: Weights) -> Decoder:
    """The network of a spec of this family."""
    return Decoder(spec, weights, MultiHeadLatentAttention, feed_forward)


def halves(x: Tensor, axis: int) -> Tensor:
    """Rotated numbers along ``axis`` from DeepSeek's order, where a pair is (2i, 2i + 1), to ours: (i, i + half)."""
    pairs = x.reshape(*x.shape[:axis], -1, 2, *x.shape[axis + 1 :])
    return pairs.transpose(axis, axis + 1).reshape(x.shape)
