"""How long blocks are worth keeping when nobody holds them: by token range, with a priority and a time to live.

Soft: whatever is asked for here, a block that nobody holds can be evicted. Knows nothing of blocks' content.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvfolio.cache.index import DEFAULT_PRIORITY, PIN, Ask, Card
from kvfolio.errors import OptionError

MAX_PRIORITY = 100


@dataclass(frozen=True, slots=True)
class KeepRange:
    """Tokens [start, stop) of a sequence are kept by this priority until ``ttl_s`` after it wrote, hit or let them go.

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
        first, last = max(start, self.start), stop if self.stop is None else min(stop, self.stop)
        return first < last


class Retention:
    """Gives cards their priorities and takes them back when their time is over.

    A card has the highest priority of those that were asked for and still last, or the default one.
    """

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Card]] = []  # a heap: when something that was asked for ends
        self._count = 0  # breaks ties: cards are not ordered
        self._most = 1024  # entries beyond which those of evicted cards are thrown out

    def ask(self, card: Card, ranges: Sequence[KeepRange], start: int, stop: int, now_s: float) -> None:
        """A request wrote, hit or let go the card of its tokens [start, stop): apply its ranges that touch them.

        Of several ranges the highest priority counts. What nobody asked for but somebody hits is not lowered.
        """
        best = highest(ranges, start, stop)
        if best is None:
            return
        if card.asks or card.uses == 0 or best.priority > DEFAULT_PRIORITY:
            self._set(card, (*card.asks, _asked(best, now_s)), now_s)

    def put(self, card: Card, kept: KeepRange, now_s: float) -> None:
        """The card has this priority from now on, whatever was asked for before."""
        self._set(card, (_asked(kept, now_s),), now_s)

    def expire(self, now_s: float, reprioritise: Callable[[Card], None]) -> None:
        """Cards lose what was asked for until now."""
        while self._due and self._due[0][0] <= now_s:
            due_s, _, card = heapq.heappop(self._due)
            if card.expires_s == due_s:  # else it was asked for again since
                card.expires_s = None
                self._set(card, card.asks, now_s)
                reprioritise(card)

    def _set(self, card: Card, asks: tuple[Ask, ...], now_s: float) -> None:
        """Give the card what of ``asks`` lasts and adds to the others."""
        lasting = sorted({one for one in asks if one[1] > now_s}, reverse=True)
        kept: list[Ask] = []  # falling priorities, rising times
        for one in lasting:
            if not kept or one[1] > kept[-1][1]:
                kept.append(one)
        card.asks = tuple(kept)
        card.priority = kept[0][0] if kept else DEFAULT_PRIORITY
        next_s = kept[0][1] if kept and kept[0][1] < math.inf else None
        if next_s is not None and next_s != card.expires_s:
            self._count += 1
            heapq.heappush(self._due, (next_s, self._count, card))
        card.expires_s = next_s
        if len(self._due) > self._most:
            valid = (entry for entry in self._due if entry[2].is_filed and entry[2].expires_s == entry[0])
            self._due = list({id(entry[2]): entry for entry in valid}.values())
            heapq.heapify(self._due)
            self._most = max(1024, 2 * len(self._due))


def _asked(kept: KeepRange, now_s: float) -> Ask:
    return kept.priority, math.inf if kept.ttl_s is None else now_s + kept.ttl_s


def highest(ranges: Sequence[KeepRange], start: int, stop: int) -> KeepRange | None:
    """Of the ranges that touch tokens [start, stop), the one of the highest priority."""
    asked = [one for one in ranges if one.touches(start, stop)]
    return max(asked, key=lambda one: one.priority) if asked else None
