"""Latent attention in the expanded form: latents become every head's keys and values before they are read.

Fewer products a pair of tokens than the absorbed form, but each latent that is read is expanded first: worth it where
many queries read together. Plain torch on any device; pools hold the same bytes as after any other kernel. Knows
nothing of models beyond the expansion it is handed.
"""

from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from kvfolio.kernels.reference import attend_chunk, read_stored, write_chunk
from kvfolio.kernels.shapes import ChunkBlocks, LayerGeometry, LayerMemory

_MOST_NUMBERS = 1 << 26  # of expanded keys and values, and of scores, held at a time


class Expansion(Protocol):
    """What is needed of a layer's projections; models.parts.Expansion says more."""

    def expand(self, latents: Tensor, heads: slice) -> tuple[Tensor, Tensor]: ...


def attend_expanded(
    geometry: LayerGeometry,
    chunk: ChunkBlocks,
    memory: LayerMemory,
    q: Tensor,
    k: Tensor,
    expansion: Expansion,
    scale: float,
) -> Tensor:
    """Write a chunk's latents and rotary keys, seal what fills, then attend, all heads over their own keys and values.

    q [num_tokens, num_heads, plain_width + rope_width], k [num_tokens, 1, rank + rope_width]
    → [num_tokens, num_heads, v_width]. What a query reads is what it reads in the absorbed form (law 1).
    """
    num_tokens, num_heads, k_width = q.shape
    own, _ = write_chunk(geometry, memory, chunk, k, k[:, :, : geometry.v_width])  # [1, tokens, rank + rope_width]
    stored, _ = read_stored(geometry, memory, chunk)  # f32, as own
    queries = q.to(torch.float32) * scale
    outs = []
    step = max(1, _MOST_NUMBERS // ((own.shape[1] + stored.shape[1]) * 2 * k_width))
    for head in range(0, num_heads, step):
        heads = slice(head, min(head + step, num_heads))
        own_parts, stored_parts = (
            _expanded(part[0].to(torch.float32), geometry.v_width, expansion, heads) for part in (own, stored)
        )
        count, _, v_width = own_parts[1].shape
        each = replace(  # every head has keys and values of its own
            geometry, num_q_heads=count, num_kv_heads=count, k_width=k_width, v_width=v_width, v_is_prefix_of_k=False
        )
        rows = max(1, _MOST_NUMBERS // ((own.shape[1] + stored.shape[1]) * count))
        pieces = [
            attend_chunk(each, chunk, chunk.start + row, queries[row : row + rows, heads], own_parts, stored_parts)
            for row in range(0, num_tokens, rows)
        ]
        outs.append(torch.cat(pieces))
    return torch.cat(outs, dim=1).to(q.dtype)


def _expanded(part: Tensor, rank: int, expansion: Expansion, heads: slice) -> tuple[Tensor, Tensor]:
    """[tokens, rank + rope_width] → keys [heads, tokens, plain_width + rope_width], values [heads, tokens, v_width]."""
    plain, values = expansion.expand(part[:, :rank], heads)
    return torch.cat((plain, part[:, rank:].expand(len(plain), -1, -1)), dim=-1), values
