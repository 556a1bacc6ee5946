"""Every kernel in plain torch, on any device: the definition of correct, and the fallback where there is no extension.

Reads and writes the same bytes as the C++ kernels. Knows nothing of pools beyond the rows it is handed.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kvfolio.errors import OptionError
from kvfolio.kernels.codec import TORCH_DTYPES, seal, unseal
from kvfolio.kernels.shapes import ChunkBlocks, LayerGeometry, LayerMemory
from kvfolio.spec.formats import CacheFormat


@dataclass(frozen=True, slots=True)
class ReferencePlan:
    """The reference needs no plan: it walks the chunks."""

    geometry: LayerGeometry
    chunks: tuple[ChunkBlocks, ...]


class ReferenceOps:
    """The arithmetic of a network in torch. With ``deterministic``, every row is computed on its own."""

    name = "reference"

    def __init__(self, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        if not self.deterministic:
            return functional.linear(x, weight, bias)
        return torch.cat([functional.linear(row, weight, bias) for row in torch.split(x, 1)])

    def head_linear(self, x: Tensor, weight: Tensor) -> Tensor:
        if not self.deterministic:
            return torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)
        return torch.cat([torch.matmul(weight, row[0, :, :, None])[None, :, :, 0] for row in torch.split(x, 1)])

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        values = x.to(torch.float32)
        inverse = torch.rsqrt(values.square().mean(dim=-1, keepdim=True) + eps)
        return (values * inverse * weight).to(x.dtype)

    def add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        total = x + residual
        return self.rms_norm(total, weight, eps), total

    def layer_norm(self, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        return functional.layer_norm(x, (x.shape[-1],), weight, bias, eps)

    def rope(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = cos.shape[1]
        values = x.to(torch.float32)
        first, second, rest = values[..., :half], values[..., half : 2 * half], x[..., 2 * half :]
        cosine, sine = cos[:, None, :], sin[:, None, :]
        rotated = torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1).to(x.dtype)
        return torch.cat((rotated, rest), dim=-1)

    def gated(self, gate_up: Tensor, activation: str) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return self.activate(gate, activation) * up

    def activate(self, x: Tensor, activation: str) -> Tensor:
        if self.deterministic and x.shape[0] > 1:  # torch rounds the last few numbers of a tensor in another way
            return torch.cat([self.activate(row, activation) for row in torch.split(x, 1)])
        if activation == "silu":
            return functional.silu(x)
        if activation in ("gelu", "gelu_tanh"):
            return functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
        raise OptionError(f"unknown activation {activation!r}; known: silu, gelu, gelu_tanh")

    def plan(self, geometry: LayerGeometry, chunks: tuple[ChunkBlocks, ...]) -> ReferencePlan:
        return ReferencePlan(geometry, chunks)

    def attend(
        self,
        plan: ReferencePlan,
        memory: LayerMemory,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        """See models.parts.KVView.attend. Writes and seals first, then reads (law 1)."""
        geometry = plan.geometry
        out = torch.empty((*q.shape[:2], geometry.v_width), dtype=q.dtype, device=q.device)
        row = 0
        for chunk in plan.chunks:
            rows = slice(row, row + chunk.num_tokens)
            row += chunk.num_tokens
            own_k, own_v = write_chunk(geometry, memory, chunk, k[rows], v[rows])
            stored_k, stored_v = read_stored(geometry, memory, chunk)
            step = 1 if self.deterministic else chunk.num_tokens
            for begin in range(0, chunk.num_tokens, step):
                part = slice(rows.start + begin, rows.start + min(begin + step, chunk.num_tokens))
                queries = q[part].to(torch.float32) * scale
                own, stored = (own_k, own_v), (stored_k, stored_v)
                out[part] = attend_chunk(geometry, chunk, chunk.start + begin, queries, own, stored, sink_logits)
        return out


def _parts(rows: Tensor, geometry: LayerGeometry, fmt: CacheFormat) -> tuple[Tensor, ...]:
    """(keys, k scales, values, v scales) of ``rows`` uint8 [num_blocks, layer_bytes]: views [num_blocks, heads, …]."""
    each = geometry.num_kv_heads * geometry.block_tokens
    sizes = [
        each * fmt.k.code_bytes(geometry.own_k_width),
        each * fmt.k.scales_bytes(geometry.own_k_width),
        each * fmt.v.code_bytes(geometry.v_width),
        each * fmt.v.scales_bytes(geometry.v_width),
    ]
    heads = geometry.num_kv_heads
    return tuple(
        part.view(len(rows), heads, size // heads)
        for part, size in zip(torch.split(rows, sizes, dim=1), sizes, strict=True)
    )


def _open_part(geometry: LayerGeometry, memory: LayerMemory, slot: int) -> tuple[Tensor, Tensor]:
    """Keys [num_kv_heads, own_k_width, block_tokens] and values [num_kv_heads, block_tokens, v_width] of a block."""
    size = geometry.layer_bytes(geometry.exact)
    rows = memory.open[slot : slot + 1, memory.open_offset : memory.open_offset + size]
    keys, _, values, _ = _parts(rows, geometry, geometry.exact)
    dtype = TORCH_DTYPES[geometry.exact.k.name]
    return (
        keys[0].view(dtype).view(geometry.num_kv_heads, geometry.own_k_width, geometry.block_tokens),
        values[0].view(dtype).view(-1, geometry.block_tokens, geometry.v_width),
    )


def write_chunk(
    geometry: LayerGeometry, memory: LayerMemory, chunk: ChunkBlocks, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Store the chunk; returns exact keys and values [num_kv_heads, tokens, width] from its first block's edge on."""
    tokens = geometry.block_tokens
    k = k[:, :, geometry.k_width - geometry.own_k_width :]
    carried = chunk.start % tokens  # tokens of the first block that an earlier chunk wrote
    open_k, open_v = _open_part(geometry, memory, chunk.open_slot)
    own_k = torch.cat((open_k[:, :, :carried].transpose(1, 2), k.transpose(0, 1)), dim=1)
    own_v = torch.cat((open_v[:, :carried], v.transpose(0, 1)), dim=1)
    first = chunk.start // tokens
    num_filled = chunk.stop // tokens - first
    for index in range(num_filled):
        part = slice(index * tokens, (index + 1) * tokens)
        _seal(geometry, memory, chunk, first + index, own_k[:, part], own_v[:, part])
    num_open = chunk.stop % tokens
    rest = slice(num_filled * tokens, num_filled * tokens + num_open)
    open_k[:, :, :num_open].copy_(own_k[:, rest].transpose(1, 2))
    open_v[:, :num_open].copy_(own_v[:, rest])
    return _whole_keys(geometry, own_k, own_v), own_v


def _whole_keys(geometry: LayerGeometry, k: Tensor, v: Tensor) -> Tensor:
    """Keys [num_kv_heads, tokens, k_width] from the parts that are stored as keys and the values."""
    return torch.cat((v, k), dim=-1) if geometry.v_is_prefix_of_k else k


def _seal(geometry: LayerGeometry, memory: LayerMemory, chunk: ChunkBlocks, block: int, k: Tensor, v: Tensor) -> None:
    """Store block ``block`` of the sequence, k and v [num_kv_heads, block_tokens, width], and its sink if any."""
    places = [(memory.sealed, memory.sealed_offset, chunk.sealed[block - chunk.first_block], geometry.stored)]
    if block < len(chunk.sinks):
        assert memory.sinks is not None
        places.append((memory.sinks, memory.sinks_offset, chunk.sinks[block], geometry.exact))
    for pool, offset, number, fmt in places:
        rows = pool[number : number + 1, offset : offset + geometry.layer_bytes(fmt)]
        stored = (*seal(k, fmt.k, is_key=True), *seal(v, fmt.v, is_key=False))
        for target, part in zip(_parts(rows, geometry, fmt), stored, strict=True):
            target[0].copy_(part)


def read_stored(geometry: LayerGeometry, memory: LayerMemory, chunk: ChunkBlocks) -> tuple[Tensor, Tensor]:
    """Keys and values of all sealed blocks, decoded: f32 [num_kv_heads, tokens, width], from ``first_block`` on."""
    num_sinks = max(0, min(len(chunk.sinks) - chunk.first_block, len(chunk.sealed)))
    k, v = _read(geometry, memory.sealed, memory.sealed_offset, chunk.sealed[num_sinks:], geometry.stored)
    if num_sinks == 0:
        return _whole_keys(geometry, k, v), v
    assert memory.sinks is not None
    sinks = chunk.sinks[chunk.first_block : chunk.first_block + num_sinks]
    sink_k, sink_v = _read(geometry, memory.sinks, memory.sinks_offset, sinks, geometry.exact)
    k, v = torch.cat((sink_k, k), dim=1), torch.cat((sink_v, v), dim=1)
    return _whole_keys(geometry, k, v), v


def _read(
    geometry: LayerGeometry, pool: Tensor, offset: int, blocks: tuple[int, ...], fmt: CacheFormat
) -> tuple[Tensor, Tensor]:
    """f32 [num_kv_heads, tokens, width] of keys (their own part) and values in these blocks of a pool."""
    ids = torch.tensor(blocks, dtype=torch.int64, device=pool.device)
    rows = pool[:, offset : offset + geometry.layer_bytes(fmt)].index_select(0, ids)
    keys, k_scales, values, v_scales = _parts(rows, geometry, fmt)
    k = unseal(keys, k_scales, fmt.k, is_key=True, width=geometry.own_k_width)  # [num_blocks, heads, tokens, width]
    v = unseal(values, v_scales, fmt.v, is_key=False, width=geometry.v_width)
    heads = geometry.num_kv_heads
    return (
        k.transpose(0, 1).reshape(heads, len(blocks) * geometry.block_tokens, geometry.own_k_width),
        v.transpose(0, 1).reshape(heads, len(blocks) * geometry.block_tokens, geometry.v_width),
    )


def attend_chunk(
    geometry: LayerGeometry,
    chunk: ChunkBlocks,
    start: int,
    q: Tensor,
    own: tuple[Tensor, Tensor],
    stored: tuple[Tensor, Tensor],
    sink_logits: Tensor | None = None,
) -> Tensor:
    """Attention of q [num_queries, num_q_heads, k_width] at positions start …: own block exactly, others as stored."""
    tokens, device = geometry.block_tokens, q.device
    group = geometry.num_q_heads // geometry.num_kv_heads
    num_queries = q.shape[0]
    positions = torch.arange(start, start + num_queries, device=device)
    last = start + num_queries - 1
    # Only tokens that one of these queries reads: with a query at a time, its position alone decides how sums are cut.
    oldest = 0 if geometry.window is None else max(0, start - geometry.window + 1)
    first_stored, first_own = chunk.first_block * tokens, chunk.start // tokens * tokens
    begin_stored, begin_own = max(oldest, first_stored), max(oldest, start // tokens * tokens)
    end_stored = max(begin_stored, last // tokens * tokens)
    at_stored = torch.arange(begin_stored, end_stored, device=device)
    at_own = torch.arange(begin_own, last + 1, device=device)
    stored_k, stored_v = (part[:, begin_stored - first_stored : end_stored - first_stored] for part in stored)
    own_k, own_v = (part[:, begin_own - first_own : last + 1 - first_own].to(torch.float32) for part in own)
    own_block = positions[:, None] // tokens * tokens  # where each query's own block starts
    reads_stored = at_stored[None, :] < own_block
    reads_own = (at_own[None, :] >= own_block) & (at_own[None, :] <= positions[:, None])
    visible = torch.cat((reads_stored, reads_own), dim=1)  # [num_queries, stored + own tokens]
    if geometry.window is not None:
        visible &= torch.cat((at_stored, at_own))[None, :] > positions[:, None] - geometry.window
    # The window may end before any stored token; a stored block that was passed is never visible.
    queries = q.to(torch.float32).view(num_queries, geometry.num_kv_heads, group, -1).permute(1, 2, 0, 3)
    keys = torch.cat((stored_k, own_k), dim=1)
    values = torch.cat((stored_v, own_v), dim=1)
    # Masked values may be uninitialised memory of a block another request left: take them out before the product.
    values = torch.where(visible.any(dim=0)[None, :, None], values, 0.0)
    scores = queries @ keys[:, None].transpose(2, 3)  # [num_kv_heads, group, num_queries, tokens]
    scores = scores.masked_fill(~visible, float("-inf"))
    if sink_logits is None:
        weights = torch.softmax(scores, dim=-1)
    else:  # one more term in the denominator
        column = sink_logits.view(geometry.num_kv_heads, group, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.softmax(torch.cat((scores, column), dim=-1), dim=-1)[..., :-1]
    out = weights @ values[:, None]  # [num_kv_heads, group, num_queries, v_width]
    return out.permute(2, 0, 1, 3).reshape(num_queries, geometry.num_q_heads, geometry.v_width).to(q.dtype)
