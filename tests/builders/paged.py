"""Paged attention to be tested: pools of poisoned bytes, and random steps of sequences that a real ledger places.

Knows nothing of which kernels run. Every pool starts as 0xFF bytes, NaN in every float format: a read of what was never
written shows.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kvfolio.cache.holding import SequenceId
from kvfolio.cache.ledger import Ledger
from kvfolio.kernels.codec import TORCH_DTYPES
from kvfolio.kernels.shapes import ChunkBlocks, LayerGeometry, LayerMemory
from kvfolio.spec.formats import find_cache_format
from kvfolio.spec.layers import FullAttention, LatentAttention, PagedLayer, SlidingWindow
from kvfolio.spec.layout import CacheLayout, GroupLayout
from kvfolio.spec.model import LayerGroup


class Ops(Protocol):
    """What both kernels offer."""

    def plan(self, geometry: LayerGeometry, chunks: tuple[ChunkBlocks, ...]) -> Any: ...

    def attend(
        self,
        plan: Any,
        memory: LayerMemory,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        sink_logits: Tensor | None = None,
    ) -> Tensor: ...


def geometry_of(
    stored: str = "f32",
    exact: str = "f32",
    heads: tuple[int, int] = (4, 2),  # query and kv heads
    widths: tuple[int, int] = (16, 16),  # of keys and values
    block_tokens: int = 4,
    window: int | None = None,
    latent: bool = False,
) -> LayerGeometry:
    formats = find_cache_format(stored, block_tokens), find_cache_format(exact)
    return LayerGeometry(*heads, *widths, block_tokens, window, *formats, v_is_prefix_of_k=latent)


def layout_for(geometry: LayerGeometry, num_blocks: int, num_open: int) -> CacheLayout:
    """A cache of one group of two layers of this geometry."""
    heads, widths = geometry.num_kv_heads, (geometry.k_width, geometry.v_width)
    kind: PagedLayer = FullAttention(heads, *widths)
    if geometry.window is not None:
        kind = SlidingWindow(heads, *widths, geometry.window)
    if geometry.v_is_prefix_of_k:
        kind = LatentAttention(geometry.v_width, geometry.own_k_width, geometry.num_q_heads, *widths)
    group = LayerGroup(kind, (0, 1))
    sealed, exact = (group.block_bytes(geometry.block_tokens, fmt) for fmt in (geometry.stored, geometry.exact))
    layout = GroupLayout(group, geometry.stored, sealed, exact, num_blocks, num_open)
    return CacheLayout((layout,), geometry.block_tokens, geometry.stored, geometry.exact, num_blocks * sealed)


class PoisonedCache:
    """The pools of two layers, of which the second one is used: its bytes begin in the middle of every block."""

    def __init__(self, ops: Ops, geometry: LayerGeometry, num_blocks: int, num_open: int) -> None:
        stored, exact = geometry.layer_bytes(geometry.stored), geometry.layer_bytes(geometry.exact)
        self.sealed = torch.full((num_blocks, 2 * stored), 0xFF, dtype=torch.uint8)
        self.open = torch.full((num_open, 2 * exact), 0xFF, dtype=torch.uint8)
        self.ops, self.geometry = ops, geometry
        self._memory = LayerMemory(self.sealed, stored, self.open, exact)

    def attend(self, step: "Step", sink_logits: Tensor | None = None) -> Tensor:
        """[num_rows, num_q_heads, v_width]; the pools hold the step's keys and values afterwards."""
        plan = self.ops.plan(self.geometry, step.chunks)
        return self.ops.attend(plan, self._memory, step.q, step.k, step.v, self.geometry.k_width**-0.5, sink_logits)


class SinkCache(PoisonedCache):
    """With a pool of exact first blocks, of which each layer's part begins in the middle, too."""

    def __init__(self, ops: Ops, geometry: LayerGeometry, num_blocks: int, num_sinks: int) -> None:
        super().__init__(ops, geometry, num_blocks, 1)
        exact = geometry.layer_bytes(geometry.exact)
        self.sinks = torch.full((num_sinks, 2 * exact), 0xFF, dtype=torch.uint8)
        sealed = self._memory
        self._memory = LayerMemory(
            sealed.sealed, sealed.sealed_offset, sealed.open, sealed.open_offset, self.sinks, exact
        )

    @property
    def pools(self) -> tuple[Tensor, ...]:
        return self.sealed, self.open, self.sinks


@dataclass(frozen=True)
class Step:
    """The chunks of one step, and the queries, keys and values of their tokens in the same order."""

    chunks: tuple[ChunkBlocks, ...]
    q: Tensor  # [num_rows, num_q_heads, k_width]
    k: Tensor  # [num_rows, num_kv_heads, k_width]
    v: Tensor  # [num_rows, num_kv_heads, v_width]


@dataclass(frozen=True)
class Text:
    """The queries, keys and values of a whole sequence."""

    q: Tensor
    k: Tensor
    v: Tensor

    def cut(self, start: int, stop: int) -> tuple[Tensor, Tensor, Tensor]:
        return self.q[start:stop], self.k[start:stop], self.v[start:stop]


def text_of(geometry: LayerGeometry, num_tokens: int, seed: int) -> Text:
    """A random sequence; a tenth of its vectors are six times as large, as outliers in real keys are."""
    generator = torch.Generator().manual_seed(seed)
    dtype = TORCH_DTYPES[geometry.exact.k.name]

    def vectors(heads: int, width: int) -> Tensor:
        values = torch.randn(num_tokens, heads, width, generator=generator)
        large = torch.rand(num_tokens, heads, 1, generator=generator) < 0.1
        return torch.where(large, values * 6, values).to(dtype)

    heads = geometry.num_kv_heads
    q = torch.randn(num_tokens, geometry.num_q_heads, geometry.k_width, generator=generator).to(dtype)
    k, v = vectors(heads, geometry.k_width), vectors(heads, geometry.v_width)
    return Text(q, k, k[:, :, : geometry.v_width] if geometry.v_is_prefix_of_k else v)


def step_of(parts: list[tuple[ChunkBlocks, Text]]) -> Step:
    """The step that computes these chunks of these sequences."""
    cut = [text.cut(chunk.start, chunk.stop) for chunk, text in parts]
    q, k, v = (torch.cat([one[place] for one in cut]) for place in range(3))
    return Step(tuple(chunk for chunk, _ in parts), q, k, v)


def grant_chunk(ledger: Ledger, sequence: SequenceId, num_tokens: int) -> ChunkBlocks:
    """The next ``num_tokens`` of a sequence, placed by the ledger; the caller commits."""
    start = ledger.num_tokens(sequence)
    grant = ledger.extend(sequence, num_tokens)
    assert grant is not None
    (table,) = grant.tables
    return ChunkBlocks(start, num_tokens, table.first_block, table.sealed, table.open_slot)


def random_steps(geometry: LayerGeometry, layout: CacheLayout, seed: int, num_steps: int) -> Iterator[Step]:
    """Steps of sequences that come, grow by chunks of one to many tokens, and go, leaving used blocks behind."""
    draw = random.Random(seed)
    ledger = Ledger(layout)
    texts: dict[SequenceId, Text] = {}
    length = 2 * geometry.block_tokens + 60
    for index in range(num_steps):
        sequence = SequenceId(index)
        if index < 2 or draw.random() < 0.5:
            if ledger.num_open_free == 0:
                gone = draw.choice(list(texts))
                ledger.release(gone)
                del texts[gone]
            assert ledger.admit(sequence) is not None
            texts[sequence] = text_of(geometry, length, seed * 1000 + index)
        parts = []
        for sequence, text in texts.items():
            rest = length - ledger.num_tokens(sequence)
            wanted = draw.choice((1, 2, geometry.block_tokens, draw.randint(1, geometry.block_tokens + 40)))
            possible = ledger.largest_extension(sequence, min(wanted, rest))
            if possible > 0:
                parts.append((grant_chunk(ledger, sequence, possible), text))
        draw.shuffle(parts)
        if parts:
            yield step_of(parts)
        for sequence in texts:
            ledger.commit(sequence)
