"""Requests, the events that concern them, and the step: one scheduling decision as plain data.

Knows nothing of text, tensors or how long anything takes.
"""

from dataclasses import dataclass, field
from typing import NewType

from kvfolio.cache.holding import BlockTable, SequenceId
from kvfolio.cache.lookup import Miss, OpenText
from kvfolio.cache.moves import Move
from kvfolio.cache.prefix import Scope, TokenChain
from kvfolio.cache.retention import KeepRange

RequestId = NewType("RequestId", int)


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked, in tokens."""

    id: RequestId
    prompt: tuple[int, ...]  # token ids
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    scope: Scope | None = field(default_factory=Scope)  # with whom it shares blocks; None: with nobody
    reads_cache: bool = True  # False: everything is computed, though others may hit what it leaves
    keep: tuple[KeepRange, ...] = ()  # how long its blocks are worth keeping
    scores_prompt: bool = False  # logits are wanted for every prompt token: none can be taken from the cache

    @property
    def max_cached_tokens(self) -> int:
        """The most tokens its cache can ever hold: the last sampled token is never read back."""
        return len(self.prompt) + self.max_tokens - 1


@dataclass(slots=True, eq=False)
class RequestState:
    """How far a request has come. Preemption loses what is cached, never a token."""

    request: Request
    arrival: int  # requests are numbered as they come: the lower, the older
    chain: TokenChain  # prompt and generated tokens
    num_preemptions: int = 0
    num_scored: int = 0  # tokens whose logits somebody has seen, where the prompt is to be scored
    awaits: tuple[OpenText, int] | None = None  # who computes what it needs next, and how far that was

    @property
    def sequence(self) -> SequenceId:
        return SequenceId(self.request.id)

    @property
    def num_known(self) -> int:
        """Tokens whose ids are known: the prompt and what was generated."""
        return len(self.chain.token_ids)

    @property
    def num_generated(self) -> int:
        return self.num_known - len(self.request.prompt)

    @property
    def max_hit(self) -> int:
        """The most tokens that may come from the cache: the last one is computed, and what is still to be scored."""
        if not self.request.reads_cache:
            return 0
        return min(self.num_known - 1, self.num_scored) if self.request.scores_prompt else self.num_known - 1

    @property
    def max_left(self) -> int:
        """Tokens it may still generate."""
        return self.request.max_tokens - self.num_generated


@dataclass(frozen=True, slots=True)
class Arrive:
    """Event: a request has come in."""

    request: Request


@dataclass(frozen=True, slots=True)
class Leave:
    """Event: a request ends from outside: aborted, or its text met a stop string."""

    request_id: RequestId


@dataclass(frozen=True, slots=True)
class Retain:
    """Event: the written blocks of a text are to be kept by these ranges from now on."""

    token_ids: tuple[int, ...]
    scope: Scope
    keep: tuple[KeepRange, ...]


Event = Arrive | Leave | Retain


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one request to compute in this step."""

    request_id: RequestId
    start: int  # position of the first token
    token_ids: tuple[int, ...]
    samples: bool  # whether the logits of the last token yield a new token
    tables: tuple[BlockTable, ...]  # a layer group each
    scores: bool = False  # whether the logits of all its tokens are wanted
    num_prompt_tokens: int = 0  # of its tokens, those of the prompt: the first ones


@dataclass(frozen=True, slots=True)
class Admission:
    """A request that starts in this step, or starts again, and what of its tokens was there already."""

    request_id: RequestId
    num_hit_tokens: int  # not computed: shared, copied, or back from the host pool
    group_tokens: tuple[int, ...]  # whole blocks that each layer group alone would have accepted, in tokens
    miss: Miss | None  # why not more; None: all but the last token was there
    num_preemptions: int  # 0: it starts for the first time
    was_swapped: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """One decision: what to move, then what to compute. The engine carries it out, the simulator prices it."""

    index: int
    chunks: tuple[Chunk, ...]
    moves: tuple[Move, ...]
    preempted: tuple[RequestId, ...]
    swapped: tuple[RequestId, ...]  # of the preempted ones, those whose blocks went to the host pool
    admitted: tuple[Admission, ...]
    refused: tuple[tuple[RequestId, str], ...]  # arrivals that can never be served, and why

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Finished:
    """A request has ended by itself: ``stop`` (a stop token) or ``length`` (max_tokens)."""

    request_id: RequestId
    reason: str
