"""Eviction: the queue against a brute-force model, exact orders on a few blocks, and what each policy is good for.

Knows nothing of ledgers or pools: blocks are numbers; a small cache, at the end, replays workloads of keys.
"""

import functools
import itertools
import random
from collections import OrderedDict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfolio.cache.eviction import POLICIES, EvictionQueue, Facts, find_policy
from kvfolio.errors import InvariantError, OptionError

NEW = Facts(uses=0, was_evicted=False, cost=1.0, num_bytes=1)
GHOST = NEW._replace(was_evicted=True)
PINNED = 101


def used(uses: int) -> Facts:
    return NEW._replace(uses=uses)


def queue_of(policy: str, capacity: int = 10) -> EvictionQueue:
    return EvictionQueue(find_policy(policy, capacity), itertools.count().__next__)


def drain(queue: EvictionQueue) -> list[int]:
    return [queue.pop() for _ in range(len(queue))]


# ---- the queue against a model --------------------------------------------------------------------------------------


class Model:
    """Block → (priority, rank, clock); the minimum goes first."""

    def __init__(self, policy: str) -> None:
        self.policy = find_policy(policy, 10)
        self.clock = itertools.count().__next__
        self.waiting: dict[int, tuple[int, float, int]] = {}

    def push(self, block: int, priority: int, facts: Facts) -> None:
        self.waiting[block] = (priority, self.policy.rank(facts), self.clock())

    def reprioritise(self, block: int, priority: int) -> None:
        was, rank, _ = self.waiting[block]
        if was != priority:
            self.waiting[block] = (priority, rank, self.clock())

    def pop(self) -> int:
        block = min(self.waiting, key=self.waiting.__getitem__)
        self.policy.note_eviction(self.waiting.pop(block)[1])
        return block


some_facts = st.builds(
    Facts,
    uses=st.integers(0, 5),
    was_evicted=st.booleans(),
    cost=st.sampled_from([0.25, 1.0, 3.0]),
    num_bytes=st.sampled_from([1, 2, 7]),
)
words = st.sampled_from(["push", "push", "push", "remove", "pop", "reprioritise"])
priorities = st.sampled_from([0, 35, 35, 100, PINNED])
operations = st.lists(st.tuples(words, st.integers(0, 15), priorities, some_facts), max_size=120)


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=120, deadline=None, derandomize=True)
@given(operations=operations)
def test_what_goes_first_is_the_minimum_of_priority_rank_and_clock(
    policy: str, operations: list[tuple[str, int, int, Facts]]
) -> None:
    queue, model = queue_of(policy), Model(policy)
    for operation, block, priority, facts in operations:
        if operation == "pop":
            if model.waiting:
                assert queue.pop() == model.pop()
        elif operation == "push":
            if block not in model.waiting:
                queue.push(block, priority, facts)
                model.push(block, priority, facts)
        elif block in model.waiting:
            if operation == "remove":
                queue.remove(block)
                del model.waiting[block]
            else:
                queue.reprioritise(block, priority)
                model.reprioritise(block, priority)
        assert set(queue) == set(model.waiting)
        assert len(queue) == len(model.waiting)
        assert queue.first() == min(model.waiting.values(), default=None)
    assert drain(queue) == [model.pop() for _ in range(len(model.waiting))]


@pytest.mark.parametrize("policy", POLICIES)
def test_blocks_that_are_only_ever_hit_leave_nothing_behind(policy: str) -> None:
    queue, draw = queue_of(policy), random.Random(1)
    for block in range(10):
        queue.push(block, 35, NEW)
    for turn in range(20_000):
        block = draw.randrange(10)
        queue.remove(block)
        queue.push(block, draw.randrange(101), NEW._replace(uses=turn % 5, cost=draw.random()))
    assert len(queue._heap) == len(queue._lanes) < 200
    assert sorted(drain(queue)) == list(range(10))


# ---- priorities, and what is refused --------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", POLICIES)
def test_priority_goes_before_rank_and_pins_go_last(policy: str) -> None:
    queue = queue_of(policy)
    queue.push(1, PINNED, NEW)
    queue.push(2, 0, used(9))
    queue.push(3, 100, NEW)
    queue.push(4, 35, used(2))
    assert queue.first() == (0, find_policy(policy, 10).rank(used(9)), 1)
    assert drain(queue) == [2, 4, 3, 1]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_block_whose_retention_ends_goes_before_those_retained(policy: str) -> None:
    queue = queue_of(policy)
    for block in range(4):
        queue.push(block, 80, used(1))
    queue.reprioritise(2, 35)
    queue.reprioritise(0, PINNED)
    queue.reprioritise(1, 80)  # as it was: it keeps its place
    assert drain(queue) == [2, 1, 3, 0]


def test_queues_on_one_clock_tell_which_of_their_first_blocks_is_older() -> None:
    clock = itertools.count().__next__
    left, right = (EvictionQueue(find_policy("lru", 10), clock) for _ in range(2))
    left.push(5, 35, NEW)
    right.push(5, 35, NEW)
    left.remove(5)
    left.push(5, 35, used(1))
    assert (left.first(), right.first()) == ((35, 0.0, 2), (35, 0.0, 1))


def test_an_empty_queue_has_no_first_and_refuses_to_pop() -> None:
    queue = queue_of("lru")
    queue.push(3, 35, NEW)
    queue.remove(3)
    assert queue.first() is None
    assert 3 not in queue
    with pytest.raises(InvariantError, match="empty"):
        queue.pop()


def test_a_block_waits_once_and_only_one_that_waits_can_be_taken_out() -> None:
    queue = queue_of("gdsf")
    queue.push(3, 35, NEW)
    with pytest.raises(InvariantError, match="block 3 is pushed but waits"):
        queue.push(3, 0, used(2))
    with pytest.raises(InvariantError, match="block 4 is removed but does not wait"):
        queue.remove(4)
    with pytest.raises(InvariantError, match="block 4 is given a priority but does not wait"):
        queue.reprioritise(4, 0)
    assert drain(queue) == [3]


def test_an_unknown_policy_is_refused_with_those_there_are() -> None:
    with pytest.raises(OptionError, match="'fifo' is no eviction policy; choose one of lru, lfu, slru, s3fifo, gdsf"):
        find_policy("fifo", 10)


@pytest.mark.parametrize("policy", POLICIES)
def test_what_one_policy_learns_another_of_its_kind_does_not_know(policy: str) -> None:
    one, other = find_policy(policy, 10), find_policy(policy, 10)
    one.note_eviction(7.0)
    one.note_eviction(0.0)  # time does not run back
    assert other.rank(NEW) == find_policy(policy, 10).rank(NEW)
    assert (one.rank(NEW) > other.rank(NEW)) == (policy in {"s3fifo", "gdsf"})


# ---- exact orders ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "order"),
    [
        ("lru", [0, 1, 2, 3, 4, 5, 6]),
        ("lfu", [2, 3, 4, 0, 6, 1, 5]),
        ("slru", [2, 3, 4, 0, 1, 5, 6]),  # never hit, then hit, each by age
        ("s3fifo", [2, 4, 3, 0, 6, 1, 5]),  # 3 is a ghost hit; 5 and 9 hits count as 3, so age decides between them
        ("gdsf", [2, 3, 4, 0, 6, 1, 5]),
    ],
)
def test_seven_blocks_of_equal_cost_go_in_this_order(policy: str, order: list[int]) -> None:
    queue = queue_of(policy)
    for block, facts in enumerate([used(1), used(5), NEW, GHOST, NEW, used(9), used(1)]):
        queue.push(block, 35, facts)
    assert drain(queue) == order


def test_gdsf_gives_up_first_what_is_cheapest_to_compute_again_per_byte() -> None:
    queue = queue_of("gdsf")
    queue.push(0, 35, Facts(uses=0, was_evicted=False, cost=6.0, num_bytes=2))  # 3 seconds a byte
    queue.push(1, 35, Facts(uses=0, was_evicted=False, cost=6.0, num_bytes=6))  # 1
    queue.push(2, 35, Facts(uses=3, was_evicted=False, cost=1.0, num_bytes=2))  # 2: written once, hit three times
    assert drain(queue) == [1, 2, 0]


def test_gdsf_gives_up_a_valuable_block_once_inflation_has_reached_it() -> None:
    queue = queue_of("gdsf")
    queue.push(9, 35, used(2))  # rank 3
    for block in (0, 1):  # rank 1, then 2: each eviction raises the next
        queue.push(block, 35, NEW)
        assert queue.pop() == block
    queue.push(2, 35, NEW)  # rank 3 as well, and newer
    assert drain(queue) == [9, 2]


def test_s3fifo_lets_newcomers_go_after_a_tenth_of_the_pool_and_a_dead_main_after_three_pools() -> None:
    queue = queue_of("s3fifo", capacity=100)
    for block in range(90):
        queue.push(block, 35, used(1))
    for block in range(100, 110):
        queue.push(block, 35, NEW)
    for block in range(110, 410):
        evicted = queue.pop()
        assert evicted == block - 10 or block > 270
        queue.push(block, 35, NEW)
    assert min(queue) > 90


# ---- policies by workloads ------------------------------------------------------------------------------------------

CAPACITY = 50
HOT = 1000  # keys below it are the hot ones of a workload

Workload = tuple[int, ...]  # keys


def zipf(draw: random.Random) -> Workload:
    keys = range(HOT, HOT + 1000)
    return tuple(draw.choices(keys, [1 / (1 + rank) ** 0.9 for rank in range(1000)], k=12_000))


def scan(draw: random.Random) -> Workload:
    """20 hot keys, through which a working set of six caches is read over and over."""
    cold = itertools.cycle(range(HOT, HOT + 6 * CAPACITY))
    return tuple(draw.randrange(20) if draw.random() < 0.4 else next(cold) for _ in range(12_000))


def loop(draw: random.Random) -> Workload:
    return tuple(HOT + turn % (CAPACITY + 10) for turn in range(6_000))


def shift(draw: random.Random) -> Workload:
    """40 hot keys, others every thousand requests, among keys that never come again."""
    hot = [turn // 1000 * 40 for turn in range(12_000)]
    return tuple(hot[t] + draw.randrange(40) if draw.random() < 0.85 else HOT + t for t in range(12_000))


def prompt(draw: random.Random) -> Workload:
    """Requests: one of three system prompts of 16 blocks, then 4 to 40 blocks of their own."""
    keys: list[int] = []
    for _ in range(400):
        start = draw.choices((0, 16, 32), (5, 3, 1))[0]
        keys += range(start, start + 16)
        keys += range(HOT + len(keys), HOT + len(keys) + draw.randint(4, 40))
    return tuple(keys)


def costly(draw: random.Random) -> Workload:
    """A few keys that cost ten times as much, and seldom asked for; many cheap ones."""
    return tuple(draw.randrange(40) if draw.random() < 0.3 else HOT + draw.randrange(80) for _ in range(12_000))


WORKLOADS = {make.__name__: make for make in (zipf, scan, loop, shift, prompt, costly)}


def cost_of(key: int) -> float:
    return 0.01 if key < HOT else 0.001


class Cache:
    """Replays keys and remembers what was hit; a miss evicts when the cache is full."""

    def __init__(self, policy: str, whole_ghost: bool = True) -> None:
        self.queue = queue_of(policy, CAPACITY)
        self.facts: dict[int, Facts] = {}
        self.ghost: OrderedDict[int, None] = OrderedDict()
        self.whole_ghost = whole_ghost  # or only of what was never hit: the evictions of S3-FIFO's small queue
        self.hits: list[int] = []

    def get(self, key: int) -> None:
        facts = self.facts.get(key)
        if facts is not None:
            self.queue.remove(key)
            self.hits.append(key)
            self.facts[key] = facts._replace(uses=facts.uses + 1)
        else:
            if len(self.queue) == CAPACITY:
                self.evict()
            was_evicted = key in self.ghost
            self.ghost.pop(key, None)
            self.facts[key] = Facts(0, was_evicted, cost_of(key), num_bytes=4096)
        self.queue.push(key, 35, self.facts[key])

    def evict(self) -> None:
        key = self.queue.pop()
        facts = self.facts.pop(key)
        if self.whole_ghost or not (facts.uses or facts.was_evicted):
            self.ghost[key] = None
        if len(self.ghost) > CAPACITY:
            self.ghost.popitem(last=False)


@functools.cache
def keys_of(workload: str) -> Workload:
    return WORKLOADS[workload](random.Random(7))


@functools.cache
def hits(policy: str, workload: str, whole_ghost: bool = True) -> Workload:
    """The keys that were hit, in order; "random" evicts any."""
    if policy == "random":
        return random_hits(workload)
    cache = Cache(policy, whole_ghost)
    for key in keys_of(workload):
        cache.get(key)
    return tuple(cache.hits)


def random_hits(workload: str) -> Workload:
    draw, cached, found = random.Random(5), [], []
    for key in keys_of(workload):
        if key in cached:
            found.append(key)
        elif len(cached) < CAPACITY:
            cached.append(key)
        else:
            cached[draw.randrange(CAPACITY)] = key
    return tuple(found)


def hit_rate(policy: str, workload: str) -> float:
    return len(hits(policy, workload)) / len(keys_of(workload))


def hot_rate(policy: str, workload: str) -> float:
    hot = sum(key < HOT for key in keys_of(workload))
    return sum(key < HOT for key in hits(policy, workload)) / hot


@pytest.mark.parametrize("policy", ["lfu", "slru", "s3fifo", "gdsf"])
def test_the_hot_set_survives_a_scan_in_every_policy_but_lru(policy: str) -> None:
    assert hot_rate(policy, "scan") > 0.98
    assert hot_rate("lru", "scan") < 0.75


@pytest.mark.parametrize("policy", ["lfu", "slru", "s3fifo", "gdsf"])
def test_shared_system_prompts_survive_unique_tails_in_every_policy_but_lru(policy: str) -> None:
    assert hot_rate(policy, "prompt") > 0.85
    assert hot_rate("lru", "prompt") < 0.45


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_knows_more_than_chance_where_some_keys_are_popular(policy: str) -> None:
    gain = {"lru": 0.03, "gdsf": 0.1}.get(policy, 0.14)
    assert hit_rate(policy, "zipf") > hit_rate("random", "zipf") + gain


def test_policies_that_age_follow_a_hot_set_that_moves_and_lfu_and_slru_do_not() -> None:
    found = {policy: hot_rate(policy, "shift") for policy in POLICIES}
    assert found["lru"] > 0.8 and found["s3fifo"] > 0.83 and found["gdsf"] > 0.75, found
    assert found["lfu"] < 0.2 and found["slru"] < 0.4, found


@pytest.mark.parametrize("other", ["random", "lru", "lfu", "slru", "s3fifo"])
def test_gdsf_saves_more_seconds_where_costs_differ_though_it_hits_less(other: str) -> None:
    assert sum(map(cost_of, hits("gdsf", "costly"))) > 1.7 * sum(map(cost_of, hits(other, "costly")))
    assert hit_rate("gdsf", "costly") < hit_rate(other, "costly")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_loop_a_little_larger_than_the_cache_defeats_every_policy(policy: str) -> None:
    assert hit_rate("random", "loop") > 0.6
    assert hit_rate(policy, "loop") < 0.02


def test_s3fifo_keeps_most_of_a_loop_if_the_ghost_remembers_only_what_was_never_hit() -> None:
    assert len(hits("s3fifo", "loop", whole_ghost=False)) > 0.7 * len(keys_of("loop"))


@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("policy", POLICIES)
def test_no_policy_is_worse_than_chance_but_where_it_is_known_to_be(policy: str, workload: str) -> None:
    if workload != "loop" and (workload, policy) not in {("shift", "lfu"), ("shift", "slru")}:
        assert hit_rate(policy, workload) > hit_rate("random", workload) - 0.02
