"""What a request would find in the cache and where its hit would end, in the words of the text itself.

Knows nothing of how a hit is found: cache/lookup.py.
"""

from dataclasses import dataclass

from kvfolio.cache.lookup import NOT_ASKED, PRIVATE
from kvfolio.engine.engine import Engine
from kvfolio.engine.params import CacheParams
from kvfolio.engine.text import Tokenizer
from kvfolio.errors import RequestError

SHOWN_TOKENS = 12  # of the text on either side of the place where a hit ends


@dataclass(frozen=True, slots=True)
class GroupHit:
    """One group of equal layers: how far its own blocks would reach."""

    kind: str
    window: int | None
    num_layers: int
    format: str
    num_sinks: int | None  # not None: the first blocks, exact, of the layers of the group before
    tokens: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """The hit of one prompt. Its last token is always computed: it yields the first new one."""

    prompt_tokens: int
    hit_tokens: int
    groups: tuple[GroupHit, ...]
    reason: str | None  # for the first miss: one of cache.lookup.MISS_REASONS; None: only the last token is missing
    position: int | None  # of the first token that would be computed
    evicted_ago_s: float | None
    before: str  # the text right before that token, and from it on
    after: str
    is_computed_now: bool  # another request is computing what comes next


def explain(engine: Engine, tokenizer: Tokenizer, prompt: tuple[int, ...], caching: CacheParams) -> Explanation:
    """See LLM.explain."""
    refused = engine.unknown_token(prompt) or (None if prompt else "the prompt is empty: it needs at least 1 token")
    if refused is not None:
        raise RequestError(refused)
    chain, ledger, limit = engine.chain(prompt, caching), engine.ledger, len(prompt) - 1
    hit = ledger.lookup(chain, limit if caching.reuse else 0)
    position = hit.num_tokens if hit.num_tokens < limit else None
    reads = chain.scope is not None and caching.reuse
    miss = ledger.why_missed(chain, limit, hit) if reads else None
    reason = None if miss is None else miss.reason
    if position is not None and not reads:
        reason = PRIVATE if chain.scope is None else NOT_ASKED
    groups = tuple(
        GroupHit(
            group.group.kind.kind,
            group.group.kind.window,
            group.group.num_layers,
            group.fmt.name,
            group.num_sinks,
            tokens,
        )
        for group, tokens in zip(ledger.layout.groups, hit.group_tokens, strict=True)
    )
    return Explanation(
        prompt_tokens=len(prompt),
        hit_tokens=hit.num_tokens,
        groups=groups,
        reason=reason,
        position=position,
        evicted_ago_s=None if miss is None or miss.evicted_s is None else engine.clock() - miss.evicted_s,
        before="" if position is None else tokenizer.decode(prompt[max(0, position - SHOWN_TOKENS) : position]),
        after="" if position is None else tokenizer.decode(prompt[position : position + SHOWN_TOKENS]),
        is_computed_now=hit.computing is not None,
    )
