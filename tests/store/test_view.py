"""What a model is shown of the store: each layer its own bytes, each chunk its own blocks, sinks beside them.

The kernels are a recorder; the ledger, the pools and their bytes are real.
"""

from typing import Any

import pytest
import torch
from small import runnable
from torch import Tensor

from kvfolio.cache.holding import SequenceId
from kvfolio.cache.ledger import Ledger, LedgerOptions
from kvfolio.cache.moves import CopyOpen, PoisonOpen, SwapIn, SwapOpenIn, SwapOpenOut, SwapOut
from kvfolio.kernels.shapes import ChunkBlocks, LayerGeometry, LayerMemory
from kvfolio.planner.memory import CacheOptions, plan_cache
from kvfolio.spec.layers import FullAttention, SlidingWindow
from kvfolio.spec.layout import CacheLayout
from kvfolio.spec.model import Network, RunnableSpec
from kvfolio.store.pools import CacheStore
from kvfolio.store.view import ChunkRows, StoreViews

CPU, A, B = torch.device("cpu"), SequenceId(0), SequenceId(1)
FULL, WINDOW = FullAttention(2, 16, 16), SlidingWindow(2, 16, 16, 8)
LAYERS = (WINDOW, FULL, WINDOW, FULL, FULL)
NOTHING = torch.empty(0)


class Recorder:
    """Stands in for kernels: keeps what it was asked."""

    def __init__(self) -> None:
        self.plans: list[tuple[LayerGeometry, tuple[ChunkBlocks, ...]]] = []
        self.attended: list[tuple[Any, LayerMemory]] = []
        self.sink_logits: list[Tensor | None] = []

    def plan(self, geometry: LayerGeometry, chunks: tuple[ChunkBlocks, ...]) -> int:
        self.plans.append((geometry, chunks))
        return len(self.plans) - 1

    def attend(
        self,
        plan: Any,
        memory: LayerMemory,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        sink_logits: Tensor | None = None,
    ) -> Tensor:
        self.attended.append((plan, memory))
        self.sink_logits.append(sink_logits)
        return q


def spec() -> RunnableSpec:
    return runnable(LAYERS, Network(64, 4, 128, 100, 1e-5, "silu", 1.0), max_context=64)


def layout_of_options(**options: object) -> CacheLayout:
    return plan_cache(spec(), "f32", CacheOptions(1 << 20, 4, "int8", max_running=3, **options))  # type: ignore[arg-type]


def shown(layout: CacheLayout, *lengths: tuple[int, int]) -> tuple[Recorder, CacheStore, list[Any]]:
    """A step of chunks (written, new): what the kernels were told of it, and the tables."""
    ledger, store, ops = Ledger(layout), CacheStore(layout, CPU), Recorder()
    chunks = []
    for number, (written, new) in enumerate(lengths):
        name = SequenceId(number)
        ledger.admit(name)
        assert ledger.extend(name, written) is not None
        ledger.commit(name)
        grant = ledger.extend(name, new)
        assert grant is not None
        chunks.append((written, new, grant.tables))
    view = StoreViews(store, 4, ops).view([ChunkRows(*chunk) for chunk in chunks])
    for layer in range(len(LAYERS)):
        view.attend(layer, NOTHING, NOTHING, NOTHING, 1.0)
    return ops, store, chunks


def test_each_layer_has_the_plan_and_the_bytes_of_its_group() -> None:
    ops, store, chunks = shown(layout_of_options(kv_layers="3=exact,4=f16"), (0, 9))
    assert [one.group.layer_indices for one in store.layout.groups] == [(0, 2), (1,), (3,), (4,)]
    assert [(geometry.stored.name, geometry.window) for geometry, _ in ops.plans] == [
        ("int8", 8),
        ("int8", None),
        ("f32", None),
        ("f16", None),
    ]
    for layer, group in enumerate((0, 1, 0, 2, 3)):
        plan, memory = ops.attended[layer]
        assert plan == group
        assert memory.sealed is store.sealed[group] and memory.open is store.open[group]
        (chunk,) = ops.plans[group][1]
        table = chunks[0][2][group]
        assert chunk == ChunkBlocks(0, 9, 0, table.sealed, table.open_slot)
        assert (memory.sinks, memory.sinks_offset) == (None, 0)
    assert ops.attended[2][1].sealed_offset == store.layout.groups[0].block_bytes // 2  # the second of its group


def test_sink_logits_are_handed_on_and_are_none_where_a_network_has_none() -> None:
    layout, ops, logits = layout_of_options(), Recorder(), torch.ones(4)
    view = StoreViews(CacheStore(layout, CPU), 4, ops).view([])
    view.attend(0, NOTHING, NOTHING, NOTHING, 1.0, logits)
    view.attend(1, NOTHING, NOTHING, NOTHING, 1.0)
    assert ops.sink_logits[0] is logits
    assert ops.sink_logits[1] is None


@pytest.mark.parametrize("num_sinks", [1, 2, 3])
def test_sinks_are_shown_with_the_blocks_of_the_group_before_them(num_sinks: int) -> None:
    ops, store, chunks = shown(layout_of_options(sink_blocks=num_sinks), (5, 4), (13, 1), (0, 3))
    assert [one.group.layer_indices for one in store.layout.groups] == [(0, 2), (1, 3, 4), (1, 3, 4)]
    assert len(ops.plans) == 2  # a sink group has none of its own
    assert all(chunk.sinks == () for chunk in ops.plans[0][1])
    for chunk, (_, _, tables) in zip(ops.plans[1][1], chunks, strict=True):
        assert (chunk.sealed, chunk.sinks) == (tables[1].sealed, tables[2].sealed)
    assert [len(chunk.sinks) for chunk in ops.plans[1][1]] == [min(2, num_sinks), min(3, num_sinks), 0]
    exact = store.layout.groups[2].block_bytes // 3
    for layer, place in ((1, 0), (3, 1), (4, 2)):
        plan, memory = ops.attended[layer]
        assert plan == 1
        assert memory.sinks is store.sealed[2]
        assert (memory.sinks_offset, memory.open_offset) == (place * exact, place * exact)
    assert ops.attended[0][1].sinks is None


def test_open_blocks_move_where_sink_groups_have_none() -> None:
    host = layout_of_options(sink_blocks=2, split=True)
    store = CacheStore(layout_of_options(sink_blocks=2), CPU, host)
    assert [pool.shape[1] > 0 for pool in store.open] == [True, True, False]
    for pool in store.open:
        pool.zero_()
        pool[0] = 7
    store.carry((CopyOpen(0, 1), SwapOpenOut(1, 2), PoisonOpen(0), SwapOpenIn(2, 2)))
    for pool in store.open[:2]:
        assert [int(pool[slot].max()) for slot in range(3)] == [0xFF, 7, 7]


def test_sinks_go_to_the_host_pool_and_come_back_as_they_were() -> None:
    host = layout_of_options(sink_blocks=2, split=True)
    layout = layout_of_options(sink_blocks=2)
    store, ledger = CacheStore(layout, CPU, host), Ledger(layout, LedgerOptions(host=host, debug=True))
    ledger.admit(A)
    grant = ledger.extend(A, 13)
    assert grant is not None
    store.carry(grant.moves)
    ledger.commit(A)
    for number, block in enumerate(grant.tables[2].sealed):
        store.sealed[2][block] = 30 + number
    out = ledger.swap_out(A)
    assert sum(isinstance(move, SwapOut) and move.group == 2 for move in out) == 2
    store.carry(out)
    ledger.admit(B)
    other = ledger.extend(B, 13)  # poisons the blocks
    assert other is not None
    store.carry(other.moves)
    back = ledger.swap_in(A)
    assert back is not None and sum(isinstance(move, SwapIn) and move.group == 2 for move in back) == 2
    store.carry(back)
    again = ledger.extend(A, 0)
    assert again is not None
    assert [int(store.sealed[2][block].min()) for block in again.tables[2].sealed] == [30, 31]
    assert set(again.tables[2].sealed).isdisjoint(other.tables[2].sealed)
