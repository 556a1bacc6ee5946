"""The index cards of written blocks: found by digest, or as what may follow a digest; and what was evicted, and when.

Knows nothing of who holds a block, of bytes or of eviction order.
"""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

from kvfolio.cache.prefix import Scope

DEFAULT_PRIORITY = 50  # of what nobody asked to keep longer or shorter
PIN = 101  # above every priority: evicted last
MAX_SIBLINGS = 32  # blocks behind one digest that a search for a common beginning looks at: the newest
MAX_SCOPES = 32  # scopes that are remembered to explain a miss


Ask = tuple[int, float]  # a priority, and until when


class _NewCard:
    """What most cards have in common for all their life: it costs nothing to write it on them."""

    __slots__ = ()

    priority = DEFAULT_PRIORITY
    asks: tuple[Ask, ...] = ()  # what was asked for: falling priorities, each lasting longer than the one before
    expires_s: float | None = None  # when the first of them ends
    uses = 0  # hits since it was written
    was_evicted = False  # before it was ever hit, and came back before that was forgotten


class Card(_NewCard):
    """One block's content: which tokens behind which parent, and the block that stores it in each layer group."""

    __slots__ = ("__dict__", "block", "blocks", "digest", "parent", "tokens")

    def __init__(self, digest: bytes, parent: bytes, tokens: bytes, block: int, blocks: list[int | None]) -> None:
        self.digest = digest
        self.parent = parent
        self.tokens = tokens  # packed
        self.block = block  # its place in the sequence
        self.blocks = blocks  # a group each

    @property
    def is_filed(self) -> bool:
        """Whether any group still has its block."""
        return any(block is not None for block in self.blocks)


class PrefixIndex:
    """All cards. A card leaves when no group has its block any more."""

    def __init__(self, num_groups: int, num_remembered: int) -> None:
        self._nowhere: list[int | None] = [None] * num_groups
        self._num_remembered = num_remembered
        self.cards: dict[bytes, Card] = {}  # by digest
        self._child: dict[bytes, Card] = {}  # by parent: one card ...
        self._siblings: dict[bytes, dict[Card, None]] = {}  # ... and, where there are several, the others, newest last
        self._evicted = OrderedDict[bytes, tuple[float, bool]]()  # when, and whether it was never hit; oldest first
        self._scopes: dict[Scope, None] = {}  # latest last

    def __len__(self) -> int:
        return len(self.cards)

    def write(self, digests: Sequence[bytes], parent: bytes, packed: bytes, first: int) -> list[Card]:
        """The cards of consecutive blocks from block ``first`` on, made where there are none.

        ``parent``: the digest in front of them; ``packed``: all their tokens.
        """
        cards, child, nowhere = self.cards, self._child, self._nowhere
        size, written = len(packed) // len(digests), []
        for place, digest in enumerate(digests):
            card = cards.get(digest)
            if card is None:
                tokens = packed[place * size : (place + 1) * size]
                card = cards[digest] = Card(digest, parent, tokens, first + place, nowhere.copy())
                if child.setdefault(parent, card) is not card:
                    self._siblings.setdefault(parent, {})[card] = None
                if digest in self._evicted and self._evicted[digest][1]:  # remembered on: another group may lack it
                    card.was_evicted = True
            written.append(card)
            parent = digest
        return written

    def forget_block(self, card: Card, group: int, now_s: float) -> None:
        """The group's block was evicted; without any block the card goes, too."""
        card.blocks[group] = None
        self._evicted.pop(card.digest, None)
        self._evicted[card.digest] = now_s, card.uses == 0 and not card.was_evicted
        if len(self._evicted) > self._num_remembered:
            self._evicted.popitem(last=False)
        if not card.is_filed:
            self._remove(card)

    def children(self, parent: bytes) -> list[Card]:
        """Cards of what followed ``parent``, the newest first, not all of them if there are many."""
        first = self._child.get(parent)
        if first is None:
            return []
        others = self._siblings.get(parent)
        return [first] if others is None else [*islice(reversed(others), MAX_SIBLINGS), first]

    def evicted_at(self, digest: bytes) -> float | None:
        """When the block of ``digest`` was evicted from any group last; None if it was not, or that is forgotten."""
        found = self._evicted.get(digest)
        return None if found is None else found[0]

    def remember_scope(self, scope: Scope) -> None:
        """Called for every request: which scopes a miss can be explained with."""
        self._scopes.pop(scope, None)
        self._scopes[scope] = None
        if len(self._scopes) > MAX_SCOPES:
            del self._scopes[next(iter(self._scopes))]

    def other_scopes(self, scope: Scope) -> list[Scope]:
        """Scopes that were used lately, but ``scope``."""
        return [other for other in self._scopes if other != scope]

    def _remove(self, card: Card) -> None:
        """Also a card that is not where it should be: an audit must not fall over what it is to heal."""
        if self.cards.get(card.digest) is card:
            del self.cards[card.digest]
        others = self._siblings.get(card.parent, {})
        if self._child.get(card.parent) is not card:
            others.pop(card, None)
        elif others:
            self._child[card.parent], _ = others.popitem()
        else:
            del self._child[card.parent]
        if not others:
            self._siblings.pop(card.parent, None)

    def faults(self) -> list[str]:
        """What contradicts itself among the cards."""
        found = [
            f"card {card.digest.hex()[:8]} is filed elsewhere" for key, card in self.cards.items() if key != card.digest
        ]
        listed = [*self._child.values(), *(card for others in self._siblings.values() for card in others)]
        if len(listed) != len(self.cards) or any(self.cards.get(card.digest) is not card for card in listed):
            found.append(f"{len(listed)} cards are listed by parent, {len(self.cards)} by digest")
        found += [f"card {card.digest.hex()[:8]} has no block" for card in self.cards.values() if not card.is_filed]
        return found
