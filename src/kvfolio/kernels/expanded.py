"""Latent attention in the expanded form: latents become every head's keys and values before they are read.

Fewer products a pair of tokens than the absorbed form, but each latent that is read is expanded first: worth it where
many queries read together. What was expanded lies in pools of its own for the length of a call, and the kernels read it
as they read any heads. The cache holds the same bytes as after any other kernel. Knows nothing of models beyond the
expansion it is handed.
"""

import itertools
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor

from kvfolio.kernels.codec import TORCH_DTYPES
from kvfolio.kernels.reference import read_stored, write_chunk
from kvfolio.kernels.shapes import ChunkBlocks, LayerGeometry, LayerMemory

_MOST_NUMBERS = 1 << 26  # of expanded keys and values held at a time


class Expansion(Protocol):
    """What is needed of a layer's projections; models.parts.Expansion says more."""

    def expand(self, latents: Tensor, heads: slice) -> tuple[Tensor, Tensor]: ...


class Kernels(Protocol):
    """What is needed of the kernels."""

    def plan(self, geometry: LayerGeometry, chunks: tuple[ChunkBlocks, ...]) -> Any: ...

    def attend(self, plan: Any, memory: LayerMemory, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor: ...


def attend_expanded(
    ops: Kernels,
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
    rank, num_heads, k_width = geometry.v_width, q.shape[1], q.shape[2]
    own, _ = write_chunk(geometry, memory, chunk, k, k[:, :, :rank])  # [1, tokens from the first block's edge, 576]
    chunks, num_stored = _chunks(geometry, chunk)
    stored, _ = read_stored(geometry, memory, chunk)  # f32 [1, tokens, rank + rope_width]
    stored = stored[:, : num_stored * geometry.block_tokens]
    step = max(1, _MOST_NUMBERS // ((own.shape[1] + stored.shape[1]) * 2 * k_width))
    outs = []
    for head in range(0, num_heads, step):
        heads = slice(head, min(head + step, num_heads))
        parts = [_expand(part[0].to(torch.float32), rank, expansion, heads, q.dtype) for part in (own, stored)]
        outs.append(_attend_heads(ops, geometry, chunks, q[:, heads], parts[0], parts[1], scale))
    return torch.cat(outs, dim=1)


def _chunks(geometry: LayerGeometry, chunk: ChunkBlocks) -> tuple[tuple[ChunkBlocks, ...], int]:
    """The chunk over pools of its own, and how many blocks of these hold what is stored already.

    Where storing changes numbers, a chunk for each block: its own block is read exactly, the others as stored.
    """
    tokens = geometry.block_tokens
    edges = [chunk.start, chunk.stop]
    if not geometry.is_lossless:
        first = chunk.start // tokens + 1
        edges = [chunk.start, *range(first * tokens, chunk.stop, tokens), chunk.stop]
    num_stored = fresh = edges[-2] // tokens
    chunks = []
    for slot, (start, stop) in enumerate(itertools.pairwise(edges)):
        count = stop // tokens - start // tokens  # blocks that it fills
        sealed = (*range(start // tokens), *range(fresh, fresh + count))
        fresh += count
        chunks.append(ChunkBlocks(start, stop - start, 0, sealed, slot))
    return tuple(chunks), num_stored


def _attend_heads(
    ops: Kernels,
    geometry: LayerGeometry,
    chunks: tuple[ChunkBlocks, ...],
    q: Tensor,
    own: tuple[Tensor, Tensor],
    stored: tuple[Tensor, Tensor],
    scale: float,
) -> Tensor:
    """Attention of some heads over keys and values [heads, tokens, width].

    own: from the edge of the chunk's first block on; stored: from the first token on.
    """
    num_heads, tokens = q.shape[1], geometry.block_tokens
    heads = replace(  # each with a key and a value of its own
        geometry,
        num_q_heads=num_heads,
        num_kv_heads=num_heads,
        stored=geometry.exact,
        k_width=q.shape[2],
        v_width=own[1].shape[2],
        v_is_prefix_of_k=False,
    )
    num_blocks = max(chunk.sealed[-1] + 1 if chunk.sealed else 1 for chunk in chunks)
    pools = [
        torch.empty(count, heads.layer_bytes(heads.exact), dtype=torch.uint8, device=q.device)
        for count in (num_blocks, len(chunks))
    ]
    carried = chunks[0].start % tokens  # tokens of the first block that an earlier chunk wrote
    _fill(pools[0], heads, *stored)
    _fill(pools[1], heads, *(part[:, :carried] for part in own))
    k, v = (part[:, carried:].transpose(0, 1).contiguous() for part in own)
    return ops.attend(ops.plan(heads, chunks), LayerMemory(pools[0], 0, pools[1], 0), q, k, v, scale)


def _fill(pool: Tensor, geometry: LayerGeometry, k: Tensor, v: Tensor) -> None:
    """Put keys and values [heads, num_tokens, width] into the first blocks of a pool; the last may stay unfilled."""
    heads, num_tokens, k_width = k.shape
    tokens = geometry.block_tokens
    numbers = pool.view(TORCH_DTYPES[geometry.exact.k.name])
    cut = heads * k_width * tokens
    keys = numbers[:, :cut].view(len(pool), heads, k_width, tokens)
    values = numbers[:, cut:].view(len(pool), heads, tokens, v.shape[2])
    whole = num_tokens // tokens
    blocks = k[:, : whole * tokens].view(heads, whole, tokens, k_width)
    keys[:whole] = blocks.permute(1, 0, 3, 2)
    values[:whole] = v[:, : whole * tokens].view(heads, whole, tokens, v.shape[2]).transpose(0, 1)
    rest = num_tokens % tokens
    if rest:
        keys[whole, :, :, :rest] = k[:, whole * tokens :].transpose(1, 2)
        values[whole, :, :rest] = v[:, whole * tokens :]


def _expand(part: Tensor, rank: int, expansion: Expansion, heads: slice, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """[tokens, rank + rope_width] → keys [heads, tokens, plain_width + rope_width], values [heads, tokens, v_width]."""
    plain, values = expansion.expand(part[:, :rank], heads)
    k = torch.cat((plain, part[:, rank:].expand(len(plain), -1, -1)), dim=-1)
    return k.to(dtype), values.to(dtype)
