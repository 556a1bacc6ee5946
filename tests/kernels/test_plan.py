"""The attention plan of the C++ kernels: each distinct block is listed once for all who read it, and nothing is missed.

Items are (source, block, index in the run, first query, last query + 1, own); queries are (row, position).
"""

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import geometry_of, layout_for, random_steps

from kvfolio.kernels.shapes import ChunkBlocks, LayerGeometry

native = pytest.importorskip(
    "kvfolio.kernels.native", reason="the C++ kernels are not built here", exc_type=ImportError
)

SEALED, OPEN, SCRATCH = 0, 1, 2


def describe(geometry: LayerGeometry, *chunks: ChunkBlocks) -> dict[str, Any]:
    described: dict[str, Any] = native.NativeOps(1).plan(geometry, chunks).attention.describe()
    return described


def decode(*sealed: int, slot: int = 0, block_tokens: int = 4) -> ChunkBlocks:
    """A sequence that holds full blocks ``sealed`` and computes the first token behind them."""
    return ChunkBlocks(len(sealed) * block_tokens, 1, 0, sealed, slot)


def sealed_items(plan: dict[str, Any]) -> list[tuple[int, int, int, int]]:
    """(block, index, first query, last query + 1) of every item that lies in the sealed pool, unit by unit."""
    return [item[1:5] for unit in plan["units"] for item in unit["items"] if item[0] == SEALED]


# ---- sharing --------------------------------------------------------------------------------------------------------


def test_three_sequences_that_share_two_blocks_read_them_once() -> None:
    plan = describe(geometry_of(), decode(5, 7), decode(5, 7, slot=1), decode(5, 7, slot=2))
    (unit,) = plan["units"]
    assert unit["queries"] == [(0, 8), (1, 8), (2, 8)]
    assert unit["items"] == [
        (SEALED, 5, 0, 0, 3, False),
        (SEALED, 7, 1, 0, 3, False),
        (OPEN, 0, 2, 0, 1, True),
        (OPEN, 1, 2, 1, 2, True),
        (OPEN, 2, 2, 2, 3, True),
    ]


def test_a_tree_of_prefixes_is_shared_at_every_level() -> None:
    # 5 ─┬─ 7 ─┬─ 8       Sorted by blocks: [5 6], [5 7 8], [5 7 9]: each node's readers are neighbours.
    #    │     └─ 9
    #    └─ 6
    plan = describe(geometry_of(), decode(5, 7, 8), decode(5, 6, slot=1), decode(5, 7, 9, slot=2))
    assert plan["units"][0]["queries"] == [(1, 8), (0, 12), (2, 12)]
    assert sealed_items(plan) == [(5, 0, 0, 3), (6, 1, 0, 1), (7, 1, 1, 3), (8, 2, 1, 2), (9, 2, 2, 3)]


def test_sequences_that_share_nothing_are_units_of_their_own() -> None:
    plan = describe(geometry_of(), decode(1, 2), decode(3, slot=1))
    assert [unit["queries"] for unit in plan["units"]] == [[(0, 8)], [(1, 4)]]


def test_a_hundred_readers_of_one_block_make_two_units_for_two_threads() -> None:
    plan = describe(geometry_of(), *(decode(3, slot=slot) for slot in range(100)))
    assert [len(unit["queries"]) for unit in plan["units"]] == [64, 36]
    assert sealed_items(plan) == [(3, 0, 0, 64), (3, 0, 0, 36)]


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6), num_sequences=st.integers(1, 20), block_tokens=st.sampled_from([4, 128]))
def test_in_any_tree_of_prefixes_each_distinct_block_is_listed_once(
    seed: int, num_sequences: int, block_tokens: int
) -> None:
    # Blocks of 128 make runs of 2 blocks: deep trees then reach over several runs.
    draw = random.Random(seed)
    children: dict[tuple[int, ...], int] = {}  # path → block; the same path is the same block
    chunks = []
    for slot in range(num_sequences):
        path: tuple[int, ...] = ()
        sealed: list[int] = []
        for _ in range(draw.randint(0, 7)):
            path += (draw.randint(0, 1),)
            sealed.append(children.setdefault(path, len(children)))
        chunks.append(decode(*sealed, slot=slot, block_tokens=block_tokens))
    draw.shuffle(chunks)
    plan = describe(geometry_of(block_tokens=block_tokens), *chunks)
    listed = [block for block, *_ in sealed_items(plan)]
    assert sorted(listed) == sorted(children.values())


# ---- nothing is missed, nothing is read in vain ---------------------------------------------------------------------


def reads(geometry: LayerGeometry, plan: dict[str, Any]) -> dict[tuple[int, int], dict[int, tuple[int, int, bool]]]:
    """(row, position) → block of the sequence → (source, block, own). Fails when a query reads a block twice."""
    found: dict[tuple[int, int], dict[int, tuple[int, int, bool]]] = {}
    for unit in plan["units"]:
        assert 1 <= len(unit["queries"]) <= 64
        for source, block, index, begin, end, own in unit["items"]:
            assert 0 <= begin < end <= len(unit["queries"])
            for query in unit["queries"][begin:end]:
                of_query = found.setdefault(query, {})
                place = unit["run"] * geometry.run_blocks + index
                assert place not in of_query
                of_query[place] = (source, block, own)
    return found


def expected_reads(
    geometry: LayerGeometry, chunks: tuple[ChunkBlocks, ...]
) -> dict[tuple[int, int], dict[int, tuple[int, int, bool]]]:
    """The same, from the law: a query reads the blocks its window reaches, its own one exactly."""
    tokens, expected, row, num_scratch = geometry.block_tokens, {}, 0, 0
    for chunk in chunks:
        for position in range(chunk.start, chunk.stop):
            first = 0 if geometry.window is None else max(0, position - geometry.window + 1)
            own = position // tokens
            blocks = {
                place: (SEALED, chunk.sealed[place - chunk.first_block], False) for place in range(first // tokens, own)
            }
            if own >= chunk.stop // tokens:
                blocks[own] = (OPEN, chunk.open_slot, True)
            elif geometry.is_lossless:
                blocks[own] = (SEALED, chunk.sealed[own - chunk.first_block], True)
            else:
                blocks[own] = (SCRATCH, num_scratch + own - chunk.start // tokens, True)
            expected[row, position] = blocks
            row += 1
        num_scratch += 0 if geometry.is_lossless else chunk.stop // tokens - chunk.start // tokens
    return expected


@settings(max_examples=60, deadline=None)
@given(
    stored=st.sampled_from(["f32", "int8"]),
    block_tokens=st.sampled_from([4, 16, 128]),
    window=st.sampled_from([None, 1, 4, 9, 64, 300]),
    seed=st.integers(0, 10**6),
)
def test_every_query_reads_the_blocks_that_its_window_reaches_and_no_others(
    stored: str, block_tokens: int, window: int | None, seed: int
) -> None:
    geometry = geometry_of(stored, block_tokens=block_tokens, window=window)
    for step in random_steps(geometry, layout_for(geometry, 400 // block_tokens + 4, 4), seed, 5):
        plan = describe(geometry, *step.chunks)
        assert reads(geometry, plan) == expected_reads(geometry, step.chunks)


def test_runs_that_a_window_has_passed_are_skipped() -> None:
    # Runs of 256 tokens are 64 blocks of 4. At 1030 a window of 10 reaches back to 1021, the last block of run 3.
    geometry = geometry_of(window=10)
    plan = describe(geometry, ChunkBlocks(1030, 1, 255, (8, 3, 5), 0))
    assert [unit["run"] for unit in plan["units"]] == [3, 4]
    assert sealed_items(plan) == [(8, 63, 0, 1), (3, 0, 0, 1)]
    # At 1040 it reaches back to 1031: run 4 alone.
    plan = describe(geometry, ChunkBlocks(1040, 1, 257, (8, 3, 5), 0))
    assert [unit["run"] for unit in plan["units"]] == [4]


def test_a_prompt_is_cut_into_units_of_64_queries_within_each_run() -> None:
    plan = describe(geometry_of(), ChunkBlocks(0, 300, 0, tuple(range(75)), 0))
    queries = [(unit["run"], len(unit["queries"]), unit["queries"][0][1]) for unit in plan["units"]]
    assert queries == [
        *((0, 64, first) for first in (0, 64, 128, 192)),
        (0, 44, 256),  # the queries behind run 0 read all of it
        (1, 44, 256),
    ]


# ---- writing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("start", "num_tokens", "filled", "carried"),
    [
        (0, 3, 0, 0),
        (0, 4, 1, 0),
        (0, 11, 2, 0),
        (3, 1, 1, 1),  # three tokens lie in the open block: they move with the fourth
        (2, 1, 0, 0),
        (2, 10, 3, 1),
        (4, 8, 2, 0),
    ],
)
def test_blocks_that_fill_are_sealed_and_what_an_open_block_holds_of_them_is_carried(
    start: int, num_tokens: int, filled: int, carried: int
) -> None:
    chunk = ChunkBlocks(start, num_tokens, 0, tuple(range((start + num_tokens) // 4)), 0)
    lossless, lossy = describe(geometry_of("f32"), chunk), describe(geometry_of("int8"), chunk)
    assert (lossless["num_seals"], lossless["num_scratch"], lossless["num_carries"]) == (0, 0, carried)
    assert (lossy["num_seals"], lossy["num_scratch"], lossy["num_carries"]) == (filled, filled, carried)


def test_each_sequence_has_its_own_scratch_blocks() -> None:
    chunks = (ChunkBlocks(0, 9, 0, (4, 5), 0), ChunkBlocks(3, 2, 0, (6,), 1))
    plan = describe(geometry_of("int8"), *chunks)
    assert (plan["num_scratch"], plan["num_seals"], plan["num_carries"]) == (3, 3, 1)
    scratch = {item[1] for unit in plan["units"] for item in unit["items"] if item[0] == SCRATCH}
    assert scratch == {0, 1, 2}


def test_large_batches_are_cut_into_waves_that_bound_the_memory_of_partials() -> None:
    # A partial has 64 * 258 floats; 64 MiB hold 1,016 of them. 900 + 600 rows of one run each: two waves.
    geometry = geometry_of(heads=(64, 1), widths=(4, 256), block_tokens=256)
    chunks = tuple(ChunkBlocks(0, 250, 0, (), slot) for slot in range(6))
    plan = native.NativeOps(1).plan(geometry, chunks)
    assert plan.attention.describe()["num_waves"] == 2
    assert plan.attention.max_slots == 1016
    assert plan.partials.nbytes == 1016 * 64 * 258 * 4 <= 64 << 20
