"""The order in which cached blocks that nobody holds are evicted, for one layer group's pool, under five policies.

Knows nothing of what a block holds or who holds it: numbers of blocks, their facts, and a clock that counts pushes.

First the lowest retention priority (0 … 100; 101 is a pin), then the policy's lowest rank, then the oldest push. A
policy is one function of a block's facts, asked once, when the last holder lets the block go; a rank does not change
while the block waits. A policy that ages blocks does it by ranking later pushes higher: see the inflation of ``GDSF``.
"""

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from kvfolio.errors import InvariantError, OptionError


class Facts(NamedTuple):
    """What is known of a block when nobody holds it any more."""

    uses: int  # how often the block was hit since it was written; 0: never
    was_evicted: bool  # its content had been evicted not long before it was written again (a ghost hit)
    cost: float  # predicted seconds to compute its tokens again; 1.0 where nobody knows
    num_bytes: int  # > 0


# ---- policies -------------------------------------------------------------------------------------------------------


class Policy(ABC):
    """Ranks blocks: the lowest rank is evicted first, equal ranks in the order of their pushes.

    ``capacity``: blocks of the pool. Queues that are given one and the same policy share what it has learnt, so their
    ranks compare exactly; ranks of two policies of one kind compare as far as their pools have lived alike.
    """

    ranks_all_equal = False  # then a queue need not ask

    def __init__(self, capacity: int) -> None:
        self.capacity = max(capacity, 1)

    @abstractmethod
    def rank(self, facts: Facts) -> float:
        """The rank of a block that is pushed now."""

    def note_eviction(self, rank: float) -> None:
        """Learn that a block of this rank was evicted. Most policies need not know."""
        return


class LRU(Policy):
    """Least recently used (Mattson, Gecsei, Slutz, Traiger 1970, "Evaluation techniques for storage hierarchies").

    Exactly as there: all ranks are equal, so the oldest push decides. A scan longer than the pool flushes it.
    """

    ranks_all_equal = True

    def rank(self, facts: Facts) -> float:
        return 0.0


class LFU(Policy):
    """Least frequently used (Aho, Denning, Ullman 1971, "Principles of optimal page replacement": A0), ties by age.

    The paper knows the true frequencies; here they are the hits since the block was written, forgotten when it is
    evicted and never aged: what was popular once stays until everything else has gone.
    """

    def rank(self, facts: Facts) -> float:
        return float(facts.uses)


class SLRU(Policy):
    """Segmented LRU (Karedla, Love, Wherry 1994, "Caching strategies to improve disk system performance").

    Probation (never hit) goes before protected (hit), each in LRU order. In the paper the protected segment is bounded
    and its oldest block falls back to probation. A rank cannot fall: here protected has no bound, so a pool filled
    with blocks that were hit once and are dead now has one block left for newcomers, until those are hit or go.
    """

    def rank(self, facts: Facts) -> float:
        return 1.0 if facts.uses else 0.0


class S3FIFO(Policy):
    """S3-FIFO (Yang, Zhang, Qiu, Yue, Rashmi 2023, "FIFO queues are all you need for cache eviction", SOSP).

    The paper's queues become deadlines, 1.0 being the passage of one pool of blocks. A newcomer is due after 0.1, the
    small queue; a block that was hit, or whose content had been evicted (the ghost), after 0.9, the main queue, and
    0.9 more for each hit up to three: the paper's reinsertions, decided beforehand. Time follows the ranks evicted, by
    no more than two blocks an eviction. So newcomers pass through what main leaves them and age it the faster the
    less that is; a main queue of nine tenths that is never hit again is gone after three to five pools of newcomers.

    Otherwise than in the paper: a hit moves a block to the end (it is held, then pushed again), so within one deadline
    the order is LRU, not FIFO; one hit is enough for main, there it takes two; the small queue has no fixed size, it
    is what is left between deadlines, a tenth where main could fill the rest; and hits count from when the block was
    written, where the paper forgets them on the way to main. The ghost is whatever the caller remembers: the paper
    remembers the small queue's evictions alone, without which a loop a little larger than the pool is lost as by LRU.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._now = 0.0
        self._stride = 2 / self.capacity

    def rank(self, facts: Facts) -> float:
        if facts.uses or facts.was_evicted:
            return self._now + 0.9 * (1 + min(facts.uses, 3))
        return self._now + 0.1

    def note_eviction(self, rank: float) -> None:
        self._now = max(self._now, min(rank, self._now + self._stride))


class GDSF(Policy):
    """Greedy-Dual-Size-Frequency (Cherkasova 1998, "Improving WWW proxies performance with GDSF caching policy").

    Rank = L + frequency * cost / size, in seconds saved per byte held. L, the inflation, is the rank of the last block
    evicted, so that a block must earn its place again. The frequency is one, for the writing, and the hits since.

    Otherwise than in the paper: a block of low retention priority may be evicted though others rank lower; L does
    not fall back when those go.
    """

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity)
        self._inflation = 0.0

    def rank(self, facts: Facts) -> float:
        return self._inflation + (facts.uses + 1) * facts.cost / facts.num_bytes

    def note_eviction(self, rank: float) -> None:
        self._inflation = max(self._inflation, rank)


POLICIES: dict[str, type[Policy]] = {"lru": LRU, "lfu": LFU, "slru": SLRU, "s3fifo": S3FIFO, "gdsf": GDSF}


def find_policy(name: str, capacity: int) -> Policy:
    """A fresh policy for a pool of ``capacity`` blocks; an unknown name is an ``OptionError``."""
    policy = POLICIES.get(name)
    if policy is None:
        raise OptionError(f"{name!r} is no eviction policy; choose one of {', '.join(POLICIES)}")
    return policy(capacity)


# ---- the queue ------------------------------------------------------------------------------------------------------

_Key = tuple[int, float]  # priority, rank
_SPARE_LANES = 64  # lanes that may lie empty before they are swept


class _Lane(OrderedDict[int, int]):
    """The blocks of one priority and rank, block → clock of its push, the oldest first.

    An OrderedDict, because a dict that is emptied from the front looks at every place it emptied before.
    """

    __slots__ = ("key",)

    def __init__(self, key: _Key) -> None:
        self.key = key


class EvictionQueue:
    """The blocks that may be evicted, as lanes under a heap of their keys.

    A lane is looked for in the heap only when it is made and when it is found empty, so lru, lfu and slru, which have
    few lanes, take O(1) a call; where almost every block has a rank of its own (gdsf) a call takes O(log n).
    """

    def __init__(self, policy: Policy, clock: Callable[[], int]) -> None:
        """``clock`` rises with every call; queues that share it and the kind of policy can be compared by ``first``."""
        self._policy = policy
        self._rank = policy.rank
        self._clock = clock
        self._lane_of: dict[int, _Lane] = {}
        self._lanes: dict[_Key, _Lane] = {}  # empty ones too, until they come first or are swept
        self._only_lane: dict[int, _Lane] = {}  # priority → its lane, where the policy ranks all blocks equal
        self._heap: list[_Key] = []  # the keys of _lanes

    def __len__(self) -> int:
        return len(self._lane_of)

    def __contains__(self, block: int) -> bool:
        return block in self._lane_of

    def __iter__(self) -> Iterator[int]:
        """All blocks, in no order that means anything."""
        return iter(self._lane_of)

    def push(self, block: int, priority: int, facts: Facts) -> None:
        """Nobody holds the block any more: it becomes the newest of its priority and rank."""
        lane_of = self._lane_of
        if block in lane_of:
            raise InvariantError(f"block {block} is pushed but waits for its eviction already")
        lane = self._only_lane.get(priority)
        if lane is None:
            key = (priority, self._rank(facts))
            lane = self._lanes.get(key)
            if lane is None:
                lane = self._open_lane(key)
        lane[block] = self._clock()
        lane_of[block] = lane

    def remove(self, block: int) -> None:
        """The block is held again, or dropped."""
        try:
            del self._lane_of.pop(block)[block]
        except KeyError:
            raise InvariantError(f"block {block} is removed but does not wait for its eviction") from None

    def first(self) -> tuple[int, float, int] | None:
        """(priority, rank, clock of its push) of the block that ``pop`` would give; None when there is none."""
        lane = self._lowest()
        if lane is None:
            return None
        priority, rank = lane.key
        return priority, rank, lane[next(iter(lane))]

    def pop(self) -> int:
        """Evict the first block, a pinned one if there are no others, and let the policy learn of it."""
        lane = self._lowest()
        if lane is None:
            raise InvariantError("pop() on an eviction queue that is empty")
        block = next(iter(lane))
        del lane[block], self._lane_of[block]
        self._policy.note_eviction(lane.key[1])
        return block

    def reprioritise(self, block: int, priority: int) -> None:
        """Its retention has begun or ended: it keeps its rank, and becomes the newest of it."""
        lane = self._lane_of.get(block)
        if lane is None:
            raise InvariantError(f"block {block} is given a priority but does not wait for its eviction")
        if priority != lane.key[0]:
            del lane[block]
            key = (priority, lane.key[1])
            lane = self._lanes.get(key)  # it may be there and empty
            if lane is None:
                lane = self._open_lane(key)
            self._lane_of[block] = lane
            lane[block] = self._clock()

    def _open_lane(self, key: _Key) -> _Lane:
        if len(self._lanes) > 2 * len(self._lane_of) + _SPARE_LANES:
            self._lanes = {key: lane for key, lane in self._lanes.items() if lane}
            self._only_lane = {priority: lane for priority, lane in self._only_lane.items() if lane}
            self._heap = list(self._lanes)
            heapify(self._heap)
        heappush(self._heap, key)
        lane = self._lanes[key] = _Lane(key)
        if self._policy.ranks_all_equal:
            self._only_lane[key[0]] = lane
        return lane

    def _lowest(self) -> _Lane | None:
        heap = self._heap
        while heap:
            lane = self._lanes[heap[0]]
            if lane:
                return lane
            del self._lanes[heappop(heap)]
            self._only_lane.pop(lane.key[0], None)
        return None
