"""Blocks and open slots: exact ids on pools of ten, in the order they are handed out and taken back."""

from collections.abc import Callable

import pytest

from kvfolio.cache.blocks import BlockId, BlockPool, OpenSlots
from kvfolio.errors import InvariantError


def take(pool: BlockPool, count: int) -> list[BlockId]:
    return [pool.take() for _ in range(count)]


def give(pool: BlockPool, *blocks: int) -> None:
    for block in blocks:
        pool.give(BlockId(block))


def counts(pool: BlockPool) -> tuple[int, int, int]:
    """(held, warm, cold)"""
    return pool.num_held, pool.num_warm, pool.num_cold


# ---- the pool -------------------------------------------------------------------------------------------------------


def test_fresh_blocks_come_in_order() -> None:
    pool = BlockPool(10)
    assert counts(pool) == (0, 0, 10)
    assert take(pool, 4) == [0, 1, 2, 3]
    assert counts(pool) == (4, 0, 6)
    assert pool.num_free == 6


def test_warm_blocks_are_reused_before_memory_is_touched_that_never_was() -> None:
    pool = BlockPool(10)
    take(pool, 5)
    give(pool, 1, 4, 2)  # warm: [1, 4, 2], the last given on top
    assert counts(pool) == (2, 3, 5)
    # 2, 4, 1 off the stack; then 5, the first that was never taken.
    assert take(pool, 4) == [2, 4, 1, 5]
    assert counts(pool) == (6, 0, 4)


def test_a_cooled_block_comes_back_after_the_warm_and_before_the_fresh_ones() -> None:
    pool = BlockPool(10)
    take(pool, 4)
    give(pool, 3, 0, 1)  # warm: [3, 0, 1]
    assert pool.cool() == 3  # the one that lay there longest
    assert counts(pool) == (1, 2, 7)  # cold: 3, and 4 … 9
    assert take(pool, 4) == [1, 0, 3, 4]


def test_every_block_can_be_held_at_once_and_then_there_is_none() -> None:
    pool = BlockPool(10)
    assert take(pool, 10) == list(range(10))
    assert counts(pool) == (10, 0, 0)
    with pytest.raises(InvariantError, match="10 blocks are all held"):
        pool.take()
    assert counts(pool) == (10, 0, 0)
    pool.check([BlockId(block) for block in range(10)])


def test_a_pool_of_no_blocks_has_none_to_give() -> None:
    with pytest.raises(InvariantError, match="0 blocks are all held"):
        BlockPool(0).take()


@pytest.mark.parametrize("block", [2, 7, 9, 10, -1, -10])
def test_a_block_that_nobody_holds_is_refused_and_nothing_changes(block: int) -> None:
    pool = BlockPool(10)
    take(pool, 8)
    give(pool, 7, 2)  # 7 and 2 are warm; 8 and 9 were never taken
    with pytest.raises(InvariantError, match=f"block {block} is given back but nobody holds it"):
        pool.give(BlockId(block))
    assert counts(pool) == (6, 2, 2)
    pool.check([BlockId(held) for held in (0, 1, 3, 4, 5, 6)])
    assert take(pool, 3) == [2, 7, 8]


def test_a_cooled_block_cannot_be_given_back() -> None:
    pool = BlockPool(10)
    take(pool, 1)
    give(pool, 0)
    pool.cool()
    with pytest.raises(InvariantError, match="nobody holds it"):
        give(pool, 0)


# ---- what check sees ------------------------------------------------------------------------------------------------


def lose_a_held_block(pool: BlockPool) -> None:
    pool._state[0] = 1


def mark_a_free_block_held(pool: BlockPool) -> None:
    pool._state[9] = 2


def swap_a_mark(pool: BlockPool) -> None:
    pool._state[0], pool._state[9] = 0, 2


def list_a_warm_block_twice(pool: BlockPool) -> None:
    pool._warm.append(pool._warm[0])


def list_a_held_block_as_warm(pool: BlockPool) -> None:
    pool._warm.append(BlockId(0))


def forget_a_warm_block(pool: BlockPool) -> None:
    pool._warm.pop()


def list_one_warm_block_in_place_of_another(pool: BlockPool) -> None:
    pool._warm[0] = pool._warm[1]


def list_a_held_block_in_place_of_a_warm_one(pool: BlockPool) -> None:
    pool._warm[0] = BlockId(3)


def list_a_held_block_in_place_of_a_cold_one(pool: BlockPool) -> None:
    pool.cool()
    pool._returned[0] = BlockId(3)


def take_a_block_past_the_end(pool: BlockPool) -> None:
    pool._fresh += 1


@pytest.mark.parametrize(
    "corrupt",
    [
        lose_a_held_block,
        mark_a_free_block_held,
        swap_a_mark,
        list_a_warm_block_twice,
        list_a_held_block_as_warm,
        forget_a_warm_block,
        list_one_warm_block_in_place_of_another,
        list_a_held_block_in_place_of_a_warm_one,
        list_a_held_block_in_place_of_a_cold_one,
        take_a_block_past_the_end,
    ],
)
def test_check_sees_each_way_to_corrupt_a_pool(corrupt: Callable[[BlockPool], None]) -> None:
    pool = BlockPool(10)
    held = take(pool, 6)[:4]
    give(pool, 4, 5)
    pool.check(held)
    corrupt(pool)
    with pytest.raises(InvariantError):
        pool.check(held)


@pytest.mark.parametrize(
    ("held", "words"),
    [
        ([0, 1, 2], "3 in sequences"),
        ([0, 1, 2, 3, 4], "5 in sequences"),
        ([0, 1, 2, 2], "3 distinct"),
        ([0, 1, 2, 4], "block 4 is in a sequence but marked warm"),
        ([0, 1, 2, 9], "block 9 is in a sequence but marked cold"),
    ],
)
def test_check_names_the_block_or_the_term_that_disagrees(held: list[int], words: str) -> None:
    pool = BlockPool(10)
    take(pool, 6)
    give(pool, 4, 5)
    with pytest.raises(InvariantError, match=words):
        pool.check([BlockId(block) for block in held])


# ---- open slots -----------------------------------------------------------------------------------------------------


def test_slots_come_in_order_and_the_last_given_back_comes_first() -> None:
    slots = OpenSlots(4)
    assert [slots.take() for _ in range(3)] == [0, 1, 2]
    slots.give(0)
    slots.give(1)
    assert slots.num_free == 3
    assert [slots.take() for _ in range(3)] == [1, 0, 3]


def test_no_free_slot_is_none() -> None:
    slots = OpenSlots(1)
    assert slots.take() == 0
    assert slots.take() is None
    assert slots.num_free == 0


@pytest.mark.parametrize("slot", [1, 3, 4, -1])
def test_a_slot_that_nobody_holds_is_refused_and_nothing_changes(slot: int) -> None:
    slots = OpenSlots(4)
    slots.take()
    slots.take()
    slots.give(1)
    with pytest.raises(InvariantError, match=f"open slot {slot} is given back but nobody holds it"):
        slots.give(slot)
    slots.check([0])
    assert slots.num_free == 3


@pytest.mark.parametrize("held", [[], [0], [0, 1, 2], [0, 0], [0, 3], [0, 4]])
def test_check_sees_slots_that_disagree(held: list[int]) -> None:
    slots = OpenSlots(4)
    slots.take()
    slots.take()
    slots.check([0, 1])
    with pytest.raises(InvariantError, match="open slots disagree"):
        slots.check(held)
