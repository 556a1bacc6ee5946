"""A step's window on the store, handed to a model: where each layer's keys and values go, and what each query reads.

Plans are made once a step for each layer group and shared by its layers; sink blocks go with the blocks of
the group before them. Knows nothing of networks or text.
"""

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor

from kvfolio.cache.holding import BlockTable
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

    def view(self, chunks: Sequence[tuple[int, int, tuple[BlockTable, ...]]]) -> "StepView":
        """The view of a step; a chunk is (start, num_tokens, tables of all groups), in the order of the token rows."""
        plans = []
        for index, sinks, geometry in self._planned:
            blocks = tuple(
                ChunkBlocks(
                    start,
                    num_tokens,
                    tables[index].first_block,
                    tables[index].sealed,
                    tables[index].open_slot,
                    () if sinks is None else tables[sinks].sealed,
                )
                for start, num_tokens, tables in chunks
            )
            plans.append(self._ops.plan(geometry, blocks))
        return StepView(self._ops, plans, self._layers)


class StepView:
    """One step of all its sequences; implements models.parts.KVView."""

    def __init__(self, ops: AttentionOps, plans: list[Any], layers: dict[int, tuple[int, LayerMemory]]) -> None:
        self._ops = ops
        self._plans = plans
        self._layers = layers

    def attend(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, sink_logits: Tensor | None = None
    ) -> Tensor:
        plan, memory = self._layers[layer]
        return self._ops.attend(self._plans[plan], memory, q, k, v, scale, sink_logits)


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
    )
