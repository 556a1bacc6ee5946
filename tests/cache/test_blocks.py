"""Blocks and open slots: exact ids on pools of ten, in the order they are handed out and taken back."""

import itertools
from collections import Counter
from collections.abc import Callable

import pytest

from kvfolio.cache.blocks import NO_FACTS, BlockId, BlockPool, OpenSlots
from kvfolio.cache.eviction import EvictionQueue, find_policy
from kvfolio.cache.index import Card
from kvfolio.errors import InvariantError


def pool_of(num_blocks: int) -> BlockPool:
    return BlockPool(num_blocks, EvictionQueue(find_policy("lru", num_blocks), itertools.count().__next__))


def take(pool: BlockPool, count: int) -> list[BlockId]:
    """Block by block: a test below takes them all at once."""
    return [block for _ in range(count) for block in pool.take()]


def give(pool: BlockPool, *blocks: int) -> None:
    pool.give([BlockId(block) for block in blocks])


def write_cards(pool: BlockPool, *blocks: int) -> None:
    for block in blocks:
        pool.cards[block] = Card(bytes([block]), b"", b"", block, [block])


def faults(pool: BlockPool, held: list[int]) -> list[tuple[int, str]]:
    """What ``pool`` finds, if ``held`` are the blocks that sequences hold, one mention for each holder."""
    return [(int(block), what) for block, what in pool.faults(Counter(map(BlockId, held)))]


def counts(pool: BlockPool) -> tuple[int, int, int]:
    """(held, warm, cold)"""
    return pool.num_held, pool.num_warm, pool.num_cold


# ---- the pool -------------------------------------------------------------------------------------------------------


def test_fresh_blocks_come_in_order() -> None:
    pool = pool_of(10)
    assert counts(pool) == (0, 0, 10)
    assert take(pool, 4) == [0, 1, 2, 3]
    assert counts(pool) == (4, 0, 6)
    assert pool.num_free == 6


def test_warm_blocks_are_reused_before_memory_is_touched_that_never_was() -> None:
    pool = pool_of(10)
    take(pool, 5)
    give(pool, 1, 4, 2)  # warm: [1, 4, 2], the last given on top
    assert counts(pool) == (2, 3, 5)
    # 2, 4, 1 off the stack; then 5, the first that was never taken.
    assert take(pool, 4) == [2, 4, 1, 5]
    assert counts(pool) == (6, 0, 4)


@pytest.mark.parametrize("num_taken", range(11))
def test_blocks_taken_at_once_are_those_taken_one_by_one(num_taken: int) -> None:
    pools = [pool_of(10), pool_of(10)]
    for pool in pools:
        take(pool, 6)
        give(pool, 3, 0, 1, 5, 2, 4)
        assert [pool.cool(), pool.cool()] == [3, 0]
    assert take(pools[0], num_taken) == pools[1].take(num_taken) == [4, 2, 5, 1, 0, 3, 6, 7, 8, 9][:num_taken]
    assert counts(pools[0]) == counts(pools[1])
    assert faults(pools[1], [4, 2, 5, 1, 0, 3, 6, 7, 8, 9][:num_taken]) == []


def test_a_cooled_block_comes_back_after_the_warm_and_before_the_fresh_ones() -> None:
    pool = pool_of(10)
    take(pool, 4)
    give(pool, 3, 0, 1)  # warm: [3, 0, 1]
    assert pool.cool() == 3  # the one that lay there longest
    assert counts(pool) == (1, 2, 7)  # cold: 3, and 4 … 9
    assert take(pool, 4) == [1, 0, 3, 4]


def test_every_block_can_be_held_at_once_and_then_there_is_none() -> None:
    pool = pool_of(10)
    assert take(pool, 10) == list(range(10))
    assert counts(pool) == (10, 0, 0)
    with pytest.raises(InvariantError, match="1 on a pool that has 0 warm and 0 cold"):
        take(pool, 1)
    assert counts(pool) == (10, 0, 0)
    assert faults(pool, list(range(10))) == []


def test_a_pool_of_no_blocks_has_none_to_give() -> None:
    with pytest.raises(InvariantError, match="0 warm and 0 cold"):
        take(pool_of(0), 1)


@pytest.mark.parametrize("block", [2, 7, 9, 10, -1, -10])
def test_a_block_that_nobody_holds_is_refused_and_nothing_changes(block: int) -> None:
    pool = pool_of(10)
    take(pool, 8)
    give(pool, 7, 2)  # 7 and 2 are warm; 8 and 9 were never taken
    with pytest.raises(InvariantError, match=f"block {block} is given back but nobody holds it"):
        give(pool, block)
    assert counts(pool) == (6, 2, 2)
    assert faults(pool, [0, 1, 3, 4, 5, 6]) == []
    assert take(pool, 3) == [2, 7, 8]


def test_a_cooled_block_cannot_be_given_back() -> None:
    pool = pool_of(10)
    take(pool, 1)
    give(pool, 0)
    pool.cool()
    with pytest.raises(InvariantError, match="nobody holds it"):
        give(pool, 0)


# ---- sharing and caching --------------------------------------------------------------------------------------------


def test_a_block_is_free_when_its_last_holder_lets_go() -> None:
    pool = pool_of(10)
    take(pool, 2)
    assert pool.share([BlockId(0), BlockId(0)]) == 0  # it was held already
    assert [pool.give([BlockId(0)]) for _ in range(3)] == [0, 0, 1]  # blocks that nobody holds then
    assert (counts(pool), pool.refs[:2]) == ((1, 1, 8), [0, 1])


def test_a_block_with_a_card_is_cached_and_can_be_held_again() -> None:
    pool = pool_of(10)
    take(pool, 3)
    write_cards(pool, 1, 2)
    give(pool, 1, 0, 2)
    assert (counts(pool), pool.num_cached, pool.num_free) == ((0, 1, 7), 2, 10)
    assert take(pool, 2) == [0, 3]  # the warm one, then a cold one: what is cached stays
    assert pool.share([BlockId(2), BlockId(3)]) == 1  # nobody had held 2
    assert (counts(pool), pool.num_cached) == ((3, 0, 6), 1)
    assert faults(pool, [0, 2, 3, 3]) == []


def test_the_block_that_was_cached_first_is_evicted_first_and_forgotten_by_its_card() -> None:
    pool = pool_of(10)
    take(pool, 3)
    write_cards(pool, 0, 1, 2)
    give(pool, 1, 0, 2)
    forgotten: list[Card] = []
    pool.evict(forgotten.append)
    pool.evict(forgotten.append)
    assert [card.block for card in forgotten] == [1, 0]
    assert pool.cards[:3] == [None, None, pool.cards[2]]
    assert take(pool, 3) == [0, 1, 3]
    assert faults(pool, [0, 1, 3]) == []


def test_a_block_that_is_neither_held_nor_cached_cannot_be_shared() -> None:
    pool = pool_of(10)
    take(pool, 2)
    give(pool, 1)
    for block, mark in ((1, "warm"), (2, "cold")):
        with pytest.raises(InvariantError, match=f"block {block} is shared but {mark}"):
            pool.share([BlockId(block)])
    assert faults(pool, [0]) == []


def test_a_damaged_block_among_those_given_is_told_and_the_others_are_given() -> None:
    pool = pool_of(10)
    take(pool, 4)
    give(pool, 1)
    damaged: list[BlockId] = []
    assert pool.give([BlockId(0), BlockId(1), BlockId(12), BlockId(3)], on_damage=damaged.append) == 2
    assert (damaged, counts(pool)) == ([1, 12], (1, 3, 6))
    assert faults(pool, [2]) == []


# ---- quarantine -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", range(10))
def test_a_block_in_quarantine_is_never_taken_again_whatever_it_was(block: int) -> None:
    pool = pool_of(10)
    take(pool, 6)
    write_cards(pool, 0, 1)
    give(pool, 1, 2, 5)  # held 0 3 4; cached 1; warm 5; cold 2, which is returned, and 6 … 9, which nobody took
    assert pool.cool() == 2
    pool.quarantine(BlockId(block))
    pool.quarantine(BlockId(block))  # once is enough
    pool.cards[block] = None
    assert pool.num_quarantined == 1
    assert pool.num_held + pool.num_cached + pool.num_warm + pool.num_cold + pool.num_quarantined == 10
    assert faults(pool, [held for held in (0, 3, 4) if held != block]) == []
    while pool.num_cached:
        pool.evict(lambda card: None)
    taken = take(pool, pool.num_free)
    assert sorted(taken) == [other for other in (1, 2, 5, 6, 7, 8, 9) if other != block]


def test_fresh_blocks_come_in_order_around_one_in_quarantine() -> None:
    pool = pool_of(10)
    take(pool, 2)
    pool.quarantine(BlockId(5))
    assert take(pool, 7) == [2, 3, 4, 6, 7, 8, 9]


# ---- what faults sees -----------------------------------------------------------------------------------------------


def lose_a_held_block(pool: BlockPool) -> None:
    pool._state[0] = 1


def mark_a_free_block_held(pool: BlockPool) -> None:
    pool._state[9] = 3


def swap_a_mark(pool: BlockPool) -> None:
    pool._state[0], pool._state[9] = 0, 3


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


def forget_a_cached_block(pool: BlockPool) -> None:
    pool.queue.pop()


def cache_a_held_block(pool: BlockPool) -> None:
    pool.queue.push(0, 50, NO_FACTS)


def count_a_holder_too_many(pool: BlockPool) -> None:
    pool.refs[1] += 1


def count_a_holder_too_few(pool: BlockPool) -> None:
    pool.refs[3] -= 1


def lose_the_card_of_a_cached_block(pool: BlockPool) -> None:
    pool.cards[6] = None


def give_a_warm_block_a_card(pool: BlockPool) -> None:
    write_cards(pool, 4)


def give_a_cold_block_a_card(pool: BlockPool) -> None:
    write_cards(pool, 9)


@pytest.mark.parametrize(
    ("corrupt", "found"),
    [
        (lose_a_held_block, [(0, "marked warm, but listed as held")]),
        (mark_a_free_block_held, [(9, "marked held, but listed as nothing")]),
        (swap_a_mark, [(0, "marked cold, but listed as held"), (9, "marked held, but listed as nothing")]),
        (list_a_warm_block_twice, [(4, "marked warm, but listed as warm and warm")]),
        (list_a_held_block_as_warm, [(0, "marked held, but listed as warm and held")]),
        (forget_a_warm_block, [(5, "marked warm, but listed as nothing")]),
        (
            list_one_warm_block_in_place_of_another,
            [(4, "marked warm, but listed as nothing"), (5, "marked warm, but listed as warm and warm")],
        ),
        (
            list_a_held_block_in_place_of_a_warm_one,
            [(3, "marked held, but listed as warm and held"), (4, "marked warm, but listed as nothing")],
        ),
        (
            list_a_held_block_in_place_of_a_cold_one,
            [(3, "marked held, but listed as cold and held"), (4, "marked cold, but listed as nothing")],
        ),
        (take_a_block_past_the_end, [(7, "marked cold, but listed as nothing")]),
        (forget_a_cached_block, [(6, "marked cached, but listed as nothing")]),
        (cache_a_held_block, [(0, "marked held, but listed as cached and held")]),
        (count_a_holder_too_many, [(1, "counts 2 holders, but 1 hold it")]),
        (count_a_holder_too_few, [(3, "counts 1 holders, but 2 hold it")]),
        (lose_the_card_of_a_cached_block, [(6, "cached without an index card")]),
        (give_a_warm_block_a_card, [(4, "warm with an index card")]),
        (give_a_cold_block_a_card, [(9, "cold with an index card")]),
    ],
)
def test_each_way_to_corrupt_a_pool_is_seen_and_its_block_named(
    corrupt: Callable[[BlockPool], None], found: list[tuple[int, str]]
) -> None:
    pool = pool_of(10)
    take(pool, 7)
    pool.share([BlockId(3)])
    write_cards(pool, 6)
    give(pool, 4, 5, 6)  # held 0 1 2 3, the last one twice; warm 4 5; cached 6; cold 7 8 9
    assert faults(pool, [0, 1, 2, 3, 3]) == []
    corrupt(pool)
    assert faults(pool, [0, 1, 2, 3, 3]) == found


@pytest.mark.parametrize(
    ("held", "found"),
    [
        ([0, 1, 2], [(3, "marked held, but listed as nothing")]),
        ([0, 1, 2, 3, 4], [(4, "marked warm, but listed as warm and held")]),
        ([0, 1, 2, 2], [(2, "counts 1 holders, but 2 hold it"), (3, "marked held, but listed as nothing")]),
        ([0, 1, 2, 3, 9], [(9, "marked cold, but listed as held")]),
        ([0, 1, 2, 3, 10], [(10, "not a block of this pool")]),
    ],
)
def test_a_block_that_sequences_and_pool_disagree_about_is_named(held: list[int], found: list[tuple[int, str]]) -> None:
    pool = pool_of(10)
    take(pool, 6)
    give(pool, 4, 5)
    assert faults(pool, held) == found


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
    assert slots.faults([0]) == []
    assert slots.num_free == 3


def test_a_kept_slot_is_free_but_reused_after_all_others_and_the_oldest_first() -> None:
    slots, reused = OpenSlots(4), list[int]()
    assert [slots.take() for _ in range(4)] == [0, 1, 2, 3]
    for slot in (2, 0):
        slots.give(slot, lambda slot=slot: reused.append(slot))  # type: ignore[misc]
    slots.give(3)
    assert (slots.num_free, slots.num_kept) == (3, 2)
    assert (slots.take(), reused) == (3, [])
    assert (slots.take(), reused) == (2, [2])
    assert (slots.take(), reused) == (0, [2, 0])
    assert slots.take() is None
    assert slots.faults([0, 1, 2, 3]) == []


def test_a_kept_slot_is_not_given_back_again() -> None:
    slots = OpenSlots(4)
    slots.take()
    slots.give(0, lambda: None)
    with pytest.raises(InvariantError, match="open slot 0 is given back but nobody holds it"):
        slots.give(0)


@pytest.mark.parametrize("held", [[], [0], [0, 1, 2], [0, 0], [0, 3], [0, 4]])
def test_slots_that_disagree_are_seen(held: list[int]) -> None:
    slots = OpenSlots(4)
    slots.take()
    slots.take()
    assert slots.faults([0, 1]) == []
    assert slots.faults(held) == [f"open slots disagree: {held} held, [0, 1] marked, [2, 3] free, [] kept of 4"]
