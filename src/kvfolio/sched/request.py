"""Requests, the events that concern them, and the step: one scheduling decision as plain data.

Knows nothing of text, tensors or how long anything takes.
"""

from dataclasses import dataclass, field
from typing import NewType

from kvfolio.cache.ledger import BlockTable, Move, SequenceId

RequestId = NewType("RequestId", int)


@dataclass(frozen=True, slots=True)
class Request:
    """What was asked, in tokens."""

    id: RequestId
    prompt: tuple[int, ...]  # token ids
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()

    @property
    def max_cached_tokens(self) -> int:
        """The most tokens its cache can ever hold: the last sampled token is never read back."""
        return len(self.prompt) + self.max_tokens - 1


@dataclass(slots=True)
class RequestState:
    """How far a request has come. Preemption loses what is cached, never a token."""

    request: Request
    generated: list[int] = field(default_factory=list)  # token ids

    @property
    def sequence(self) -> SequenceId:
        return SequenceId(self.request.id)

    @property
    def num_known(self) -> int:
        """Tokens whose ids are known: the prompt and what was generated."""
        return len(self.request.prompt) + len(self.generated)

    def token_ids(self, start: int, stop: int) -> tuple[int, ...]:
        """Known token ids in [start, stop)."""
        prompt = self.request.prompt
        if start >= len(prompt):
            return tuple(self.generated[start - len(prompt) : stop - len(prompt)])
        return prompt[start:stop] + tuple(self.generated[: max(0, stop - len(prompt))])


@dataclass(frozen=True, slots=True)
class Arrive:
    """Event: a request has come in."""

    request: Request


@dataclass(frozen=True, slots=True)
class Leave:
    """Event: a request ends from outside: aborted, or its text met a stop string."""

    request_id: RequestId


Event = Arrive | Leave


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive tokens of one request to compute in this step."""

    request_id: RequestId
    start: int  # position of the first token
    token_ids: tuple[int, ...]
    samples: bool  # whether the logits of the last token yield a new token
    tables: tuple[BlockTable, ...]  # a layer group each


@dataclass(frozen=True, slots=True)
class Step:
    """One decision: what to move, then what to compute. The engine carries it out, the simulator prices it."""

    index: int
    chunks: tuple[Chunk, ...]
    moves: tuple[Move, ...]
    preempted: tuple[RequestId, ...]
    refused: tuple[tuple[RequestId, str], ...]  # arrivals that can never be served, and why

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class Finished:
    """A request has ended by itself: ``stop`` (a stop token) or ``length`` (max_tokens)."""

    request_id: RequestId
    reason: str
