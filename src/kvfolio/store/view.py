"""A step's window on the store, handed to a model: where each layer's keys and values go, and what each query reads.

Plans are made once a step for each layer group and shared by its layers; sink blocks go with the blocks of
the group before them. Knows nothing of networks or text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from kvfolio.cache.holding import BlockTable
from kvfolio.kernels.expanded import attend_expanded
from kvfolio.kernels.shapes import ChunkBlocks, LayerGeometry, LayerMemory
from kvfolio.spec.layout import CacheLayout, GroupLayout
from kvfolio.store.pools import CacheStore

MAX_WINDOW = 1 << 30  # a window beyond every position: kernels count in 32 bits


class AttentionOps(Protocol):
    """What a view needs of the kernels; a plan is theirs alone to understand."""

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


class Expansion(Protocol):
    """What a latent layer's view needs of its projections; models.parts.Expansion says more."""

    def absorb(self, q: Tensor, ops: Any) -> Tensor: ...

    def release(self, out: Tensor, ops: Any) -> Tensor: ...

    def expand(self, latents: Tensor, heads: slice) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, slots=True)
class ChunkRows:
    """Consecutive tokens of one sequence in a step, and its blocks in every group."""

    start: int  # position of the first token
    num_tokens: int
    tables: tuple[BlockTable, ...]
    num_expanded: int = 0  # the first so many are computed in the expanded form by latent layers


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """How a step reads one layer group: by the kernels' plan, but for what is expanded, which is computed before."""

    geometry: LayerGeometry
    plan: Any  # of ``rows``
    rows: Tensor | None  # int64: token rows that the plan is for; None: all
    expanded: tuple[tuple[slice, ChunkBlocks], ...] = ()  # token rows, and their blocks


class StoreViews:
    """Makes the views of one store: geometry and memory of every layer, found once."""

    def __init__(self, store: CacheStore, num_q_heads: int, ops: AttentionOps) -> None:
        self._ops = ops
        self._planned: list[tuple[int, int | None, LayerGeometry]] = []  # a group, its sink group, its geometry
        self._layers: dict[int, tuple[int, LayerMemory]] = {}  # layer → (plan, memory)
        for index, group in enumerate(store.layout.groups):
            if group.is_sinks:
                continue  # its layers are those of the group before it
            geometry, sinks = _geometry(store.layout, group, num_q_heads), store.layout.sinks_of(index)
            stored, exact = geometry.layer_bytes(geometry.stored), geometry.layer_bytes(geometry.exact)
            for place, layer in enumerate(group.group.layer_indices):
                memory = LayerMemory(
                    store.sealed[index],
                    place * stored,
                    store.open[index],
                    place * exact,
                    None if sinks is None else store.sealed[sinks],
                    0 if sinks is None else place * exact,
                )
                self._layers[layer] = (len(self._planned), memory)
            self._planned.append((index, sinks, geometry))

    def view(self, chunks: Sequence[ChunkRows]) -> "StepView":
        """The view of a step; ``chunks`` are in the order of the token rows."""
        return StepView(self._ops, [self._plan(*planned, chunks) for planned in self._planned], self._layers)

    def _plan(self, index: int, sinks: int | None, geometry: LayerGeometry, chunks: Sequence[ChunkRows]) -> GroupPlan:
        planned: list[ChunkBlocks] = []
        expanded: list[tuple[slice, ChunkBlocks]] = []
        rows: list[int] = []
        row = 0
        for chunk in chunks:
            table = chunk.tables[index]
            sink_blocks = () if sinks is None else chunk.tables[sinks].sealed
            cut = chunk.num_expanded if geometry.v_is_prefix_of_k else 0
            for first, count in ((0, cut), (cut, chunk.num_tokens - cut)):
                if count == 0:
                    continue
                where = table.first_block, table.sealed, table.open_slot, sink_blocks
                blocks = ChunkBlocks(chunk.start + first, count, *where)
                if first < cut:
                    expanded.append((slice(row, row + count), blocks))
                else:
                    planned.append(blocks)
                    rows.extend(range(row, row + count))
                row += count
        plan = self._ops.plan(geometry, tuple(planned))
        return GroupPlan(geometry, plan, torch.tensor(rows) if expanded else None, tuple(expanded))


class StepView:
    """One step of all its sequences; implements models.parts.KVView."""

    def __init__(self, ops: AttentionOps, plans: list[GroupPlan], layers: dict[int, tuple[int, LayerMemory]]) -> None:
        self._ops = ops
        self._plans = plans
        self._layers = layers

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, sink_logits: Tensor | None = None
    ) -> Tensor:
        plan, memory = self._layers[layer]
        return self._ops.attend(self._plans[plan].plan, memory, q, k, v, scale, sink_logits)

    def attend_latent(
        self, layer: int, q: tuple[Tensor, Tensor], k: Tensor, expansion: Expansion, scale: float
    ) -> Tensor:
        number, memory = self._layers[layer]
        plan = self._plans[number]
        if plan.rows is None:
            return self._absorbed(layer, q, k, expansion, scale)
        whole = torch.cat(q, dim=-1)  # [num_tokens, num_heads, plain_width + rope_width]
        parts = [  # first: what follows in the same sequence reads what they wrote
            attend_expanded(self._ops, plan.geometry, blocks, memory, whole[rows], k[rows], expansion, scale)
            for rows, blocks in plan.expanded
        ]
        out = parts[0].new_empty(q[0].shape[0], *parts[0].shape[1:])
        for (rows, _), part in zip(plan.expanded, parts, strict=True):
            out[rows] = part
        if len(plan.rows):
            rest = plan.rows.to(k.device)
            out[rest] = self._absorbed(layer, (q[0][rest], q[1][rest]), k[rest], expansion, scale)
        return out

    def _absorbed(self, layer: int, q: tuple[Tensor, Tensor], k: Tensor, expansion: Expansion, scale: float) -> Tensor:
        absorbed = expansion.absorb(q[0], self._ops)  # [num_tokens, num_heads, rank]
        v = k[:, :, : absorbed.shape[2]]
        out = self.attend(layer, torch.cat((absorbed, q[1]), dim=-1), k, v, scale)
        return expansion.release(out, self._ops)


def _geometry(layout: CacheLayout, group: GroupLayout, num_q_heads: int) -> LayerGeometry:
    kind = group.group.kind
    return LayerGeometry(
        num_q_heads,
        kind.num_kv_heads,
        kind.k_width,
        kind.v_width,
        layout.block_tokens,
        None if kind.window is None else min(kind.window, MAX_WINDOW),
        group.fmt,
        layout.exact,
        kind.v_is_prefix_of_k,
    )
