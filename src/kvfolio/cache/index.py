"""The index cards of written blocks: found by digest, or as what may follow a digest; and what was evicted, and when.

Knows nothing of who holds a block, of bytes or of eviction order.
"""

from kvfolio.cache.prefix import Scope

DEFAULT_PRIORITY = 50  # of what nobody asked to keep longer or shorter
PIN = 101  # above every priority: evicted last
MAX_SIBLINGS = 32  # blocks behind one digest that a search for a common beginning looks at: the newest
MAX_SCOPES = 64  # scopes that are remembered to explain a miss


class Card:
    """One block's content: which tokens behind which parent, and the block that stores it in each layer group."""

    __slots__ = ("block", "blocks", "digest", "expires_s", "parent", "priority", "tokens", "uses", "was_evicted")

    def __init__(self, digest: bytes, parent: bytes, tokens: bytes, block: int, num_groups: int) -> None:
        self.digest = digest
        self.parent = parent
        self.tokens = tokens  # packed
        self.block = block  # its place in the sequence
        self.blocks: list[int | None] = [None] * num_groups
        self.priority = DEFAULT_PRIORITY
        self.expires_s: float | None = None  # when the priority is the default again
        self.uses = 0  # hits since it was written
        self.was_evicted = False  # before it was ever hit, and came back before that was forgotten

    @property
    def is_filed(self) -> bool:
        """Whether any group still has its block."""
        return any(block is not None for block in self.blocks)


class PrefixIndex:
    """All cards. A card leaves when no group has its block any more."""

    def __init__(self, num_groups: int, num_remembered: int) -> None:
        self._num_groups = num_groups
        self._num_remembered = num_remembered
        self.cards: dict[bytes, Card] = {}  # by digest
        self._child: dict[bytes, Card] = {}  # by parent: one card ...
        self._siblings: dict[bytes, list[Card]] = {}  # ... and, where there are several, the others, newest last
        self._evicted: dict[bytes, tuple[float, bool]] = {}  # digest → when, and whether it was never hit; oldest first
        self._scopes: dict[Scope, None] = {}  # latest last

    def __len__(self) -> int:
        return len(self.cards)

    def write(self, digest: bytes, parent: bytes, tokens: bytes, block: int) -> Card:
        """The card of ``digest``, made if there is none."""
        card = self.cards.get(digest)
        if card is not None:
            return card
        card = self.cards[digest] = Card(digest, parent, tokens, block, self._num_groups)
        if self._evicted:
            card.was_evicted = self._evicted.pop(digest, (0.0, False))[1]
        if self._child.setdefault(parent, card) is not card:
            self._siblings.setdefault(parent, []).append(card)
        return card

    def forget_block(self, card: Card, group: int, now_s: float) -> None:
        """The group's block was evicted; without any block the card goes, too."""
        card.blocks[group] = None
        self._evicted.pop(card.digest, None)
        self._evicted[card.digest] = now_s, card.uses == 0 and not card.was_evicted
        if len(self._evicted) > self._num_remembered:
            del self._evicted[next(iter(self._evicted))]
        if not card.is_filed:
            self._remove(card)

    def children(self, parent: bytes) -> list[Card]:
        """Cards of what followed ``parent``, the newest first, not all of them if there are many."""
        first = self._child.get(parent)
        if first is None:
            return []
        others = self._siblings.get(parent)
        return [first] if others is None else [*others[: -MAX_SIBLINGS - 1 : -1], first]

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
        del self.cards[card.digest]
        others = self._siblings.get(card.parent)
        if self._child[card.parent] is not card:
            assert others is not None
            others.remove(card)
        elif others:
            self._child[card.parent] = others.pop()
        else:
            del self._child[card.parent]
        if others is not None and not others:
            del self._siblings[card.parent]

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
