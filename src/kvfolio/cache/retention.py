"""How long blocks are worth keeping when nobody holds them: by token range, with a priority and a time to live.

Soft: whatever is asked for here, a block that nobody holds can be evicted. Knows nothing of blocks' content.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvfolio.cache.index import DEFAULT_PRIORITY, PIN, Card
from kvfolio.errors import OptionError

MAX_PRIORITY = 100


@dataclass(frozen=True, slots=True)
class KeepRange:
    """Tokens [start, stop) of one sequence are kept by this priority, and by the default one ``ttl_s`` after their use.

    priority: 0 (evicted first) to 100; ``retention.PIN``: last of all. stop None: to the end, whatever is generated.
    """

    priority: int = DEFAULT_PRIORITY
    ttl_s: float | None = None
    start: int = 0
    stop: int | None = None

    def __post_init__(self) -> None:
        if not (0 <= self.priority <= MAX_PRIORITY or self.priority == PIN):
            raise OptionError(f"priority is {self.priority}; accepted: 0 (evicted first) to {MAX_PRIORITY}, or a pin")
        if self.ttl_s is not None and not 0 < self.ttl_s < math.inf:
            raise OptionError(f"ttl_s is {self.ttl_s}; accepted: finite seconds, more than 0; None is for ever")
        if self.start < 0 or (self.stop is not None and self.stop < self.start):
            raise OptionError(f"tokens {self.start} to {self.stop} are no range; accepted: 0 <= start <= stop")

    def touches(self, start: int, stop: int) -> bool:
        """Whether one of the tokens [start, stop) lies in the range."""
        return self.start < stop and (self.stop is None or start < self.stop)


class Retention:
    """Gives cards their priorities and takes them back when their time is over."""

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Card]] = []  # a heap
        self._count = 0  # breaks ties: cards are not ordered
        self._most = 1024  # entries beyond which those of evicted cards are thrown out

    def ask(self, card: Card, ranges: Sequence[KeepRange], start: int, stop: int, now_s: float) -> None:
        """A request wrote or hit the card of its tokens [start, stop): apply those of its ranges that touch them.

        Of several ranges the highest priority counts. What another request asked for is raised, never lowered, while
        it lasts.
        """
        best = highest(ranges, start, stop)
        if best is None:
            return
        is_first = card.uses == 0 and card.priority == DEFAULT_PRIORITY
        if (
            is_first
            or best.priority > card.priority
            or (best.priority == card.priority and _prolongs(card, best, now_s))
        ):
            self.put(card, best, now_s)

    def put(self, card: Card, kept: KeepRange, now_s: float) -> None:
        """The card has this priority from now on, whatever it had."""
        card.priority, before_s = kept.priority, card.expires_s
        card.expires_s = None if kept.ttl_s is None else now_s + kept.ttl_s
        if card.expires_s is not None and card.expires_s != before_s:
            self._count += 1
            heapq.heappush(self._due, (card.expires_s, self._count, card))
            if len(self._due) > self._most:
                valid = (entry for entry in self._due if entry[2].is_filed and entry[2].expires_s == entry[0])
                self._due = list({id(entry[2]): entry for entry in valid}.values())
                heapq.heapify(self._due)
                self._most = max(1024, 2 * len(self._due))

    def expire(self, now_s: float, reprioritise: Callable[[Card], None]) -> None:
        """Cards whose time is over have the default priority again."""
        while self._due and self._due[0][0] <= now_s:
            due_s, _, card = heapq.heappop(self._due)
            if card.expires_s == due_s:  # else it was used again since
                card.priority, card.expires_s = DEFAULT_PRIORITY, None
                reprioritise(card)


def _prolongs(card: Card, kept: KeepRange, now_s: float) -> bool:
    """Whether ``kept`` ends later than what the card was given."""
    return card.expires_s is not None and (kept.ttl_s is None or now_s + kept.ttl_s > card.expires_s)


def highest(ranges: Sequence[KeepRange], start: int, stop: int) -> KeepRange | None:
    """Of the ranges that touch tokens [start, stop), the one of the highest priority."""
    asked = [one for one in ranges if one.touches(start, stop)]
    return max(asked, key=lambda one: one.priority) if asked else None
