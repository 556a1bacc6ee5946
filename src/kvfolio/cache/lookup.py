"""The longest usable hit of a request's tokens, and why it is not longer. Changes nothing.

A hit ends where every layer group has what a query behind it reads: a full-attention group every block, a window group
those of its last window, a sink group the first ones. Knows nothing of who may run.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvfolio.cache.blocks import BlockId
from kvfolio.cache.index import Card, PrefixIndex
from kvfolio.cache.prefix import TokenChain, common_tokens
from kvfolio.spec.layers import PagedLayer
from kvfolio.spec.layout import CacheLayout, GroupLayout

MAX_BLOCKS_EXPLAINED = 1024  # blocks of other scopes that are digested to explain one miss

NEVER_SEEN = "never seen"
EVICTED = "evicted"
OTHER_NAMESPACE = "other namespace"
OTHER_ADAPTER = "other adapter"
OTHER_FINGERPRINT = "other fingerprint"
TAIL = "tail of a block"
NOT_ASKED = "reuse not asked"
PROMPT_LOGPROBS = "prompt logprobs asked"
PRIVATE = "prefix cache off"
MISS_REASONS = (
    NEVER_SEEN,
    EVICTED,
    OTHER_NAMESPACE,
    OTHER_ADAPTER,
    OTHER_FINGERPRINT,
    TAIL,
    NOT_ASKED,
    PROMPT_LOGPROBS,
    PRIVATE,
)


@dataclass(frozen=True, slots=True)
class Miss:
    """Why a hit is not longer. ``never seen``: nobody wrote these tokens behind those before them, that is remembered.

    ``tail of a block``: they lie in a block that would be entered in its middle, which lossy formats do not allow.
    The reasons that name another scope are for whoever runs the cache, not for its tenants.
    """

    reason: str  # one of MISS_REASONS
    position: int  # the first token that has to be computed
    evicted_s: float | None = None  # when, on the scheduler's clock


class OpenText(Protocol):
    """Whoever has an open block whose beginning can be copied: a running sequence, or one that has ended."""

    chain: TokenChain
    num_written: int
    open_slot: int

    @property
    def num_to_compute(self) -> int:
        """Known tokens that it still is going to compute; 0 when it has ended."""
        ...


@dataclass(slots=True)
class Hit:
    """What of a request's tokens is there already."""

    num_tokens: int  # need not be computed; behind the last whole block they are copied
    cards: list[Card]  # of whole blocks, in order, the last one the last before ``num_tokens``
    partial: Card | OpenText | None  # what holds the tokens behind the last whole block
    group_tokens: tuple[int, ...]  # whole blocks that each group alone would accept, in tokens
    computing: OpenText | None = None  # it is about to compute tokens that come next
    num_computing: int = 0  # how many of the block behind the last whole one
    generation: int = 0  # of the ledger that was asked: the answer is worthless when that has changed

    def blocks(self, layout: CacheLayout, place: int) -> tuple[int, list[BlockId]]:
        """What a sequence begins with in group ``place``: its first block, and the blocks that a query behind reads."""
        needed = layout.groups[place].blocks_needed(self.num_tokens, layout.block_tokens)
        before = self.num_tokens // layout.block_tokens - len(self.cards)  # the first card's block
        cards = self.cards[needed.start - before : needed.stop - before]
        return needed.start, [card.blocks[place] for card in cards]  # type: ignore[misc]  # a hit has them all


def find_hit(
    layout: CacheLayout,
    index: PrefixIndex,
    chain: TokenChain,
    limit: int,
    open_texts: Mapping[bytes, Sequence[OpenText]],
) -> Hit:
    """The longest hit of at most ``limit`` tokens of ``chain``; ``open_texts`` by the parent of their open block."""
    tokens = layout.block_tokens
    digests = chain.digests(limit // tokens) if limit >= tokens else []
    kinds = [group.group.kind for group in layout.groups]
    found = _found(index, digests[: limit // tokens], any(kind.window is None for kind in kinds))
    alone = [_edge(group, place, found, len(found), tokens) for place, group in enumerate(layout.groups)]
    edge, before = min(alone), max(alone)
    while edge != before:  # what one group accepts may be more than another has
        before = edge
        for place, group in enumerate(layout.groups):
            edge = _edge(group, place, found, edge, tokens)
    first = _first_needed(kinds, edge * tokens, tokens)
    cards = [card for card in found[first:edge] if card is not None]  # all of them are there
    hit = Hit(edge * tokens, cards, None, tuple(one * tokens for one in alone))
    _look_behind(layout, index, chain, limit, hit, open_texts)
    return hit


def _found(index: PrefixIndex, digests: Sequence[bytes], stops: bool) -> list[Card | None]:
    """Cards by block; up to the first that is missing where a full-attention group needs them all."""
    get, found = index.cards.get, list[Card | None]()
    for digest in digests:
        card = get(digest)
        if card is None and stops:
            break
        found.append(card)
    return found


def _first_needed(kinds: Iterable[PagedLayer], position: int, tokens: int) -> int:
    """The first block that any group needs for a query at ``position``."""
    return min(kind.first_token_needed(position) // tokens for kind in kinds)


def _edge(group: GroupLayout, place: int, found: Sequence[Card | None], most: int, tokens: int) -> int:
    """The last block edge, at most ``most``, behind which a query has all that the group's layers read."""
    kind = group.group.kind
    if kind.window is None:
        for block, card in enumerate(found[: group.num_held(0, most)]):
            if card is None or card.blocks[place] is None:
                return block
        return most
    edge = block = most
    while block > kind.first_token_needed(edge * tokens) // tokens:
        block -= 1
        card = found[block]
        if card is None or card.blocks[place] is None:
            edge = block
    return edge


def _look_behind(
    layout: CacheLayout,
    index: PrefixIndex,
    chain: TokenChain,
    limit: int,
    hit: Hit,
    open_texts: Mapping[bytes, Sequence[OpenText]],
) -> None:
    """Extend ``hit`` into the block behind it: tokens to copy, or somebody who computes them now."""
    tokens, start = layout.block_tokens, hit.num_tokens
    rest = min(tokens, limit - start)
    if rest <= 0:
        return
    parent = chain.parent(start // tokens)
    wanted = chain.packed(start, start + rest)
    most = 0
    if layout.is_lossless:
        for card in index.children(parent):
            common = common_tokens(card.tokens, wanted)
            if common > most and layout.is_whole(card.block, card.blocks):
                most, hit.partial = common, card
    best_wait = 0
    for text in open_texts.get(parent, ()):
        known = len(text.chain.token_ids)
        common = common_tokens(text.chain.packed(start, min(start + tokens, known)), wanted)
        copied = min(common, text.num_written - start)
        if copied > most:
            most, hit.partial = copied, text
        if text.num_to_compute < 2:
            continue  # it decodes: computing all at once is quicker than waiting for every token
        usable = layout.is_lossless or common == tokens or known < start + tokens
        if usable and common > max(best_wait, text.num_written - start):
            best_wait, hit.computing = common, text
    if best_wait <= most:
        hit.computing = None
    else:
        hit.num_computing = best_wait
    hit.num_tokens += most


def why_missed(layout: CacheLayout, index: PrefixIndex, chain: TokenChain, limit: int, hit: Hit) -> Miss | None:
    """Why ``hit`` is not ``limit`` tokens long; None when it is."""
    if hit.num_tokens >= limit:
        return None
    tokens = layout.block_tokens
    block = hit.num_tokens // tokens
    if (block + 1) * tokens > len(chain.token_ids):  # they fill no block
        return Miss(TAIL if _is_inside(index, chain, block, hit) else NEVER_SEEN, hit.num_tokens)
    digests = chain.digests(block + 1)
    card = index.cards.get(digests[block])
    first = block if card is None else _first_needed([g.group.kind for g in layout.groups], block * tokens, tokens)
    for digest in digests[first : block + 1]:
        card = index.cards.get(digest)
        evicted_s = index.evicted_at(digest)
        if evicted_s is not None and (card is None or not layout.is_whole(card.block, card.blocks)):
            return Miss(EVICTED, hit.num_tokens, evicted_s)
    card = index.cards.get(digests[block])
    if card is not None and layout.is_whole(card.block, card.blocks):  # all there, but the hit may not end inside it
        return Miss(TAIL, hit.num_tokens)
    return Miss(_other_scope(index, chain, block) or NEVER_SEEN, hit.num_tokens)


def _is_inside(index: PrefixIndex, chain: TokenChain, block: int, hit: Hit) -> bool:
    """Whether the next token of an unfinished block is the one that some sealed block has there."""
    start, stop = block * chain.block_tokens, hit.num_tokens + 1
    wanted = chain.packed(start, stop)
    return any(card.tokens[: len(wanted)] == wanted for card in index.children(chain.parent(block)))


def _other_scope(index: PrefixIndex, chain: TokenChain, block: int) -> str | None:
    """Which part of the scope is another one where these tokens are known; every scope is tried, found or not."""
    scope = chain.scope
    assert scope is not None
    reason, num_left = None, MAX_BLOCKS_EXPLAINED
    for other in index.other_scopes(scope):
        num_left -= block + 1
        if num_left < 0:
            break
        same_text = TokenChain(chain.token_ids[: (block + 1) * chain.block_tokens], other, chain.block_tokens)
        if same_text.digests(block + 1)[block] not in index.cards:
            continue
        if other.fingerprint != scope.fingerprint:
            reason = OTHER_FINGERPRINT
        elif other.adapter != scope.adapter:
            reason = OTHER_ADAPTER
        else:
            reason = OTHER_NAMESPACE
    return reason
