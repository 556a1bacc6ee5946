"""Promise = allocation: pools have the planned shapes and bytes, and what the ledger returns goes back to the system.

Resident memory is read page by page from the system (mincore), not from what the store believes.
"""

import ctypes
import mmap
import random
import sys

import pytest
import torch
from small import runnable
from torch import Tensor

from kvfolio.cache.blocks import BlockId
from kvfolio.cache.holding import SequenceId
from kvfolio.cache.ledger import Ledger
from kvfolio.cache.moves import ReturnMemory
from kvfolio.errors import BudgetError
from kvfolio.planner.memory import CacheOptions, plan_cache
from kvfolio.spec.formats import find_cache_format
from kvfolio.spec.layers import FullAttention, PagedLayer, SlidingWindow
from kvfolio.spec.layout import CacheLayout, GroupLayout
from kvfolio.spec.model import LayerGroup, Network, RunnableSpec
from kvfolio.store.pools import CacheStore

CPU = torch.device("cpu")
PAGE = mmap.PAGESIZE

LLAMA = (FullAttention(3, 64, 64),) * 4
GEMMA = (*(SlidingWindow(1, 64, 64, 48),) * 5, FullAttention(1, 64, 64))
THREE = (FullAttention(2, 32, 32), SlidingWindow(1, 32, 32, 20), SlidingWindow(1, 32, 32, 200))

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="mincore is read as Linux defines it")


def spec_of(layers: tuple[PagedLayer, ...]) -> RunnableSpec:
    network = Network(64, 4, 128, 100, 1e-5, "silu", 1.0)
    return runnable(layers, network, max_context=4096, dtype="bf16")


def layout_of_blocks(*sizes: int, budget_bytes: int, num_blocks: int | None = None) -> CacheLayout:
    """A layout of groups whose blocks take these sizes, for what only the sizes decide."""
    fmt = find_cache_format("f32")
    groups = tuple(
        GroupLayout(LayerGroup(FullAttention(1, 1, 1), (0,)), fmt, size, 64, num_blocks or budget_bytes // size, 2)
        for size in sizes
    )
    return CacheLayout(groups, 4, fmt, fmt, budget_bytes)


def resident_pages(pool: Tensor) -> list[bool]:
    """Which pages of a pool occupy memory."""
    num_pages = -(-pool.nbytes // PAGE)
    pages = (ctypes.c_ubyte * num_pages)()
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.mincore(ctypes.c_void_p(pool.data_ptr()), ctypes.c_size_t(pool.nbytes), pages) == 0
    return [bool(page & 1) for page in pages]


def resident_bytes(store: CacheStore) -> int:
    return sum(sum(resident_pages(pool)) for pool in store.sealed) * PAGE


# ---- shapes and bytes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [LLAMA, GEMMA, THREE], ids=["one group", "two groups", "three groups"])
@pytest.mark.parametrize("kv_format", ["auto", "f32", "bf16", "int8", "bf16/int8"])
@pytest.mark.parametrize("block_tokens", [4, 16, 256])
@pytest.mark.parametrize("split", [False, True])
def test_pools_have_the_planned_shapes_and_bytes(
    layers: tuple[PagedLayer, ...], kv_format: str, block_tokens: int, split: bool
) -> None:
    options = CacheOptions(9_999_999, block_tokens, kv_format, max_running=3, split=split)
    layout = plan_cache(spec_of(layers), "bf16", options)
    store = CacheStore(layout, CPU)
    assert store.allocated_bytes == layout.planned_bytes <= 9_999_999
    for group, sealed, open_pool in zip(layout.groups, store.sealed, store.open, strict=True):
        assert (sealed.dtype, open_pool.dtype) == (torch.uint8, torch.uint8)
        assert tuple(sealed.shape) == (group.num_blocks, group.block_bytes)
        assert tuple(open_pool.shape) == (layout.num_open_blocks, group.open_block_bytes)
        assert sealed.is_contiguous()
        assert open_pool.is_contiguous()


@pytest.mark.parametrize(("layers", "split"), [(LLAMA, False), (LLAMA, True), (GEMMA, True), (THREE, True)])
def test_pools_that_do_not_share_are_the_budget_to_the_byte(layers: tuple[PagedLayer, ...], split: bool) -> None:
    layout = plan_cache(spec_of(layers), "bf16", CacheOptions(8 << 20, max_running=2, split=split))
    store = CacheStore(layout, CPU)
    assert sum(pool.nbytes for pool in store.sealed) == layout.budget_bytes
    assert sum(pool.nbytes for pool in store.sealed + store.open) == layout.planned_bytes


def test_a_head_width_that_the_config_states_is_the_width_of_the_pool() -> None:
    # SZ-01, a layer of Qwen3-4B: hidden 2560, 32 heads, 8 kv heads of 128 (2560 / 32 is 80).
    layout = plan_cache(spec_of((FullAttention(8, 128, 128),) * 2), "bf16", CacheOptions(1 << 20))
    (pool,) = CacheStore(layout, CPU).sealed
    keys_and_values = pool.view(torch.bfloat16).view(layout.groups[0].num_blocks, 2, 2, 8, 16, 128)
    assert keys_and_values.shape[-1] == 128
    assert pool.shape[1] == 16 * 2 * 4096


def test_a_cache_that_cannot_be_allocated_is_refused_with_its_size() -> None:
    layout = layout_of_blocks(1 << 40, budget_bytes=1 << 62)
    with pytest.raises(BudgetError, match=r"the cache of \d+\.\d\d TiB cannot be allocated on cpu.*smaller kv_memory"):
        CacheStore(layout, CPU)


# ---- memory comes with the first write and goes when returned -------------------------------------------------------


@linux_only
def test_a_pool_takes_no_memory_before_a_block_is_written() -> None:
    store = CacheStore(layout_of_blocks(3 * PAGE, 5 * PAGE, budget_bytes=1 << 30), CPU)
    assert resident_bytes(store) == 0
    store.sealed[1][7] = 1
    assert resident_bytes(store) == 5 * PAGE
    assert resident_pages(store.sealed[1])[35:40] == [True] * 5


@linux_only
def test_returned_blocks_go_back_to_the_system_and_come_again_when_written() -> None:
    store = CacheStore(layout_of_blocks(4 * PAGE, 8 * PAGE, budget_bytes=64 * PAGE), CPU)
    store.sealed[0][:] = 1
    assert resident_bytes(store) == 64 * PAGE
    store.carry((ReturnMemory(0, BlockId(3)), ReturnMemory(0, BlockId(4)), ReturnMemory(0, BlockId(15))))
    assert resident_bytes(store) == (64 - 12) * PAGE
    gone = [index for index, is_resident in enumerate(resident_pages(store.sealed[0])) if not is_resident]
    assert gone == [*range(12, 20), *range(60, 64)]
    kept = [index for index in range(16) if index not in (3, 4, 15)]
    assert bool((store.sealed[0][kept] == 1).all())
    store.sealed[0][4] = 2
    assert resident_bytes(store) == (64 - 8) * PAGE
    assert bool((store.sealed[0][4] == 2).all())


@linux_only
@pytest.mark.parametrize("block_bytes", [PAGE + 904, 3 * PAGE - 8, 1000, PAGE - 8, 2 * PAGE + 8])
def test_returning_a_block_that_is_not_page_aligned_leaves_its_neighbours_untouched(block_bytes: int) -> None:
    store = CacheStore(layout_of_blocks(block_bytes, 64, budget_bytes=12 * block_bytes), CPU)
    pool = store.sealed[0]
    for block in range(12):
        pool[block] = block + 1
    for returned in (0, 5, 11):
        store.carry((ReturnMemory(0, BlockId(returned)),))
    for block in set(range(12)) - {0, 5, 11}:
        assert bool((pool[block] == block + 1).all()), block
    # Whole pages inside the blocks are gone, and only those.
    whole = 0
    for block in (0, 5, 11):
        begin, end = -(-block * block_bytes // PAGE), (block + 1) * block_bytes // PAGE
        whole += max(0, end - begin)
    pages = resident_pages(pool)
    assert pages.count(False) == whole


@linux_only
@pytest.mark.parametrize("layers", [GEMMA, THREE], ids=["two groups", "three groups"])
def test_groups_that_share_a_budget_never_occupy_more_than_it(layers: tuple[PagedLayer, ...]) -> None:
    # A random walk of sequences; every granted block is written in full. Blocks are whole pages: 256 tokens.
    layout = plan_cache(spec_of(layers), "f32", CacheOptions(24 << 20, block_tokens=256, max_running=6))
    assert all(group.block_bytes % PAGE == 0 for group in layout.groups)
    store, ledger, draw = CacheStore(layout, CPU), Ledger(layout), random.Random(3)
    alive: list[SequenceId] = []
    num_moves, highest = 0, 0
    for turn in range(400):
        if draw.random() < 0.3 and ledger.admit(SequenceId(turn)) is not None:
            alive.append(SequenceId(turn))
        if not alive:
            continue
        sequence = draw.choice(alive)
        num_new = ledger.largest_extension(sequence, draw.choice((1, 256, 700, 2000)))
        if num_new == 0:
            alive.remove(sequence)
            ledger.release(sequence)
            continue
        grant = ledger.extend(sequence, num_new)
        assert grant is not None
        store.carry(grant.moves)
        num_moves += len(grant.moves)
        for pool, table in zip(store.sealed, grant.tables, strict=True):
            for block in table.sealed[-(num_new // 256 + 1) :]:
                pool[block] = sequence % 251 + 1
        ledger.commit(sequence)
        if turn % 10 == 0:
            highest = max(highest, resident_bytes(store))
            assert highest <= layout.budget_bytes
            assert resident_bytes(store) <= ledger._budget.touched_bytes
    assert num_moves > 100
    assert highest > 0.9 * layout.budget_bytes


@linux_only
def test_a_single_group_never_returns_memory_and_stays_within_its_budget() -> None:
    layout = plan_cache(spec_of(LLAMA), "bf16", CacheOptions(8 << 20, max_running=2))
    store, ledger = CacheStore(layout, CPU), Ledger(layout)
    for turn in range(20):
        ledger.admit(SequenceId(turn))
        grant = ledger.extend(SequenceId(turn), ledger.largest_extension(SequenceId(turn), 4000))
        assert grant is not None
        assert grant.moves == ()
        store.carry(grant.moves)
        store.sealed[0][list(grant.tables[0].sealed)] = 1
        ledger.release(SequenceId(turn))
        assert resident_bytes(store) <= -(-layout.budget_bytes // PAGE) * PAGE


def test_no_moves_are_no_work() -> None:
    CacheStore(layout_of_blocks(PAGE, budget_bytes=PAGE), CPU).carry(())
