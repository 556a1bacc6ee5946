"""The scheduler: continuous batching with chunked prefill under a token budget, preemption by recompute.

Decides from requests and the ledger alone. Knows nothing of tensors, text or what a step costs.

Why every request ends: requests run in order of arrival. Only a newer request is ever preempted, so the oldest one
always makes room for itself; it fits alone (checked on arrival), so it ends after finitely many steps; then the next
one is the oldest.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from kvfolio.cache.ledger import Grant, Ledger, Move
from kvfolio.errors import InvariantError, OptionError
from kvfolio.sched.request import Arrive, Chunk, Event, Finished, Request, RequestId, RequestState, Step
from kvfolio.units import enough_bytes, format_bytes

DEFAULT_MAX_STEP_TOKENS = 1024  # measured: docs/lab.md


@dataclass(frozen=True, slots=True)
class SchedulerOptions:
    """What a user chooses about scheduling."""

    max_context: int  # tokens the model can read
    max_step_tokens: int = DEFAULT_MAX_STEP_TOKENS  # prompt and decode tokens computed in one step

    def __post_init__(self) -> None:
        if self.max_step_tokens < 1 or self.max_context < 1:
            raise OptionError(
                f"max_step_tokens is {self.max_step_tokens} and max_context {self.max_context}; both must be at least 1"
            )


@dataclass(slots=True)
class Counters:
    """Running totals since the scheduler was made."""

    num_steps: int = 0
    num_tokens_computed: int = 0
    num_preemptions: int = 0
    num_refused: int = 0
    num_finished: int = 0  # by themselves
    num_left: int = 0  # from outside: cancelled, or ended by a stop string


class _Draft:
    """The step being put together. A request scheduled in it may still be preempted by an older one."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.chunks: dict[RequestId, Chunk] = {}
        self.moves: list[Move] = []
        self.preempted: list[RequestId] = []

    def add(self, state: RequestState, start: int, num_tokens: int, grant: Grant) -> None:
        stop = start + num_tokens
        token_ids = state.token_ids(start, stop)
        samples = stop == state.num_known
        self.chunks[state.request.id] = Chunk(state.request.id, start, token_ids, samples, grant.tables)
        self.moves.extend(grant.moves)
        self.budget -= num_tokens

    def drop(self, request_id: RequestId) -> None:
        chunk = self.chunks.pop(request_id, None)
        if chunk is not None:
            self.budget += len(chunk.token_ids)


class Scheduler:
    """``step`` decides, ``commit`` takes the outcome; between the two somebody computes, or pretends to."""

    def __init__(self, ledger: Ledger, options: SchedulerOptions) -> None:
        self.ledger = ledger
        self.options = options
        self.counters = Counters()
        self.peak = ledger.usage()  # at the step that used the most bytes
        self._waiting: deque[RequestState] = deque()
        self._running: dict[RequestId, RequestState] = {}  # oldest first

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def is_idle(self) -> bool:
        return not self._waiting and not self._running

    def refusal(self, request: Request) -> str | None:
        """Why ``request`` can never be served, with the numbers and the way out; None when it can. Changes nothing."""
        num_prompt, context = len(request.prompt), self.options.max_context
        asked = f"{num_prompt:,} prompt tokens + max_tokens {request.max_tokens:,}"
        if num_prompt == 0:
            return "the prompt is empty: it needs at least 1 token to predict from"
        if request.max_tokens < 1:
            return f"max_tokens is {request.max_tokens}; ask for at least 1"
        if num_prompt >= context:
            return (
                f"the prompt has {num_prompt:,} tokens; the model's context is {context:,}, one for the answer: "
                f"shorten the prompt to at most {context - 1:,}"
            )
        if num_prompt + request.max_tokens > context:
            return f"{asked} exceed the model's context of {context:,}: ask for at most {context - num_prompt:,}"
        layout = self.ledger.layout
        need = request.max_cached_tokens
        if not layout.fits(need):
            return (
                f"{asked} need {format_bytes(layout.bytes_held(need))} of cache; the pool has "
                f"{format_bytes(layout.budget_bytes)}, which holds {layout.longest_sequence(need):,} tokens: "
                f"kv_memory of {enough_bytes(layout.kv_memory_for(need))} is enough, or ask for fewer tokens"
            )
        return None

    def step(self, events: Iterable[Event]) -> Step:
        """Take in ``events``, then decide what to compute next. An empty step means there is nothing to do."""
        refused = self.take_in(events)
        draft = _Draft(self.options.max_step_tokens)
        for decoding in (True, False):  # decodes first: a long prompt must not stall those who are already reading
            for state in tuple(self._running.values()):
                if state.request.id in self._running and (self._num_left(state) == 1) is decoding:
                    self._continue(state, draft)
        while self._waiting and draft.budget > 0 and not draft.preempted and self._admit(draft):
            pass
        if not draft.chunks and not self.is_idle:
            raise InvariantError(
                f"nothing can run: {len(self._running)} running, {len(self._waiting)} waiting, "
                f"{self.ledger.free_bytes} bytes free, {self.ledger.num_open_free} open slots free"
            )
        self._count(draft, len(refused))
        return Step(
            self.counters.num_steps, tuple(draft.chunks.values()), tuple(draft.moves), tuple(draft.preempted), refused
        )

    def commit(self, step: Step, tokens: Mapping[RequestId, int]) -> tuple[Finished, ...]:
        """Book the outcome of ``step``: ``tokens`` holds one new token id for each chunk that samples.

        Side effects: ledger entries are written, finished requests are released.
        """
        finished: list[Finished] = []
        for chunk in step.chunks:
            state = self._running[chunk.request_id]
            self.ledger.commit(state.sequence)
            if not chunk.samples:
                continue
            token = tokens[chunk.request_id]
            state.generated.append(token)
            if token in state.request.stop_token_ids:
                finished.append(Finished(chunk.request_id, "stop"))
            elif len(state.generated) >= state.request.max_tokens:
                finished.append(Finished(chunk.request_id, "length"))
        for end in finished:
            self._end(self._running[end.request_id])
        self.counters.num_finished += len(finished)
        return tuple(finished)

    def take_in(self, events: Iterable[Event]) -> tuple[tuple[RequestId, str], ...]:
        """Book ``events`` without scheduling anything; returns the arrivals that can never be served, and why."""
        refused: list[tuple[RequestId, str]] = []
        for event in events:
            if isinstance(event, Arrive):
                reason = self.refusal(event.request)
                if reason is None:
                    self._waiting.append(RequestState(event.request))
                else:
                    refused.append((event.request.id, reason))
                continue
            for state in [state for state in self._waiting if state.request.id == event.request_id]:
                self._waiting.remove(state)
                self.counters.num_left += 1
            if event.request_id in self._running:
                self._end(self._running[event.request_id])
                self.counters.num_left += 1
        return tuple(refused)

    def _num_left(self, state: RequestState) -> int:
        """Known tokens of a running request that no step was granted yet: 1 when it decodes, 0 once scheduled."""
        return state.num_known - self.ledger.num_tokens(state.sequence)

    def _continue(self, state: RequestState, draft: _Draft) -> None:
        """Schedule the next tokens of a running request, preempting newer ones if it cannot move at all."""
        start = self.ledger.num_tokens(state.sequence)
        wanted = min(state.num_known - start, draft.budget)
        while wanted > 0:
            possible = self.ledger.largest_extension(state.sequence, wanted)
            grant = self.ledger.extend(state.sequence, possible) if possible > 0 else None
            if grant is not None:
                draft.add(state, start, possible, grant)
                return
            newest = next(reversed(self._running.values()))
            if newest is state:
                return  # it waits: older ones hold the blocks and will end
            self._preempt(newest, draft)

    def _preempt(self, state: RequestState, draft: _Draft) -> None:
        """Take all blocks of ``state``; it waits at the head of the queue and is computed again from its tokens."""
        draft.drop(state.request.id)
        draft.preempted.append(state.request.id)
        self.ledger.release(state.sequence)
        del self._running[state.request.id]
        self._waiting.appendleft(state)

    def _admit(self, draft: _Draft) -> bool:
        """Start the first waiting request if all its known tokens fit beside what the running ones still need."""
        state, layout = self._waiting[0], self.ledger.layout
        promised = sum(
            max(0, layout.bytes_held(other.num_known) - self.ledger.bytes_held(other.sequence))
            for other in self._running.values()
        )
        if layout.bytes_held(state.num_known) + promised > self.ledger.free_bytes:
            return False
        if not self.ledger.admit(state.sequence):
            return False
        self._running[state.request.id] = self._waiting.popleft()
        self._continue(state, draft)
        return True

    def _end(self, state: RequestState) -> None:
        self.ledger.release(state.sequence)
        del self._running[state.request.id]

    def _count(self, draft: _Draft, num_refused: int) -> None:
        counters, usage = self.counters, self.ledger.usage()
        if usage.used_bytes >= self.peak.used_bytes:
            self.peak = usage
        counters.num_refused += num_refused
        counters.num_preemptions += len(draft.preempted)
        if draft.chunks:
            counters.num_steps += 1
            counters.num_tokens_computed += sum(len(chunk.token_ids) for chunk in draft.chunks.values())
