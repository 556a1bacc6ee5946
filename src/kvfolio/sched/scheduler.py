"""The scheduler: continuous batching with chunked prefill under a token budget, sharing, and preemption.

Decides from requests and the ledger alone. Knows nothing of tensors, text or what a step costs.

Why every request ends. Requests are ordered by arrival. One that was preempted ``max_preemptions`` times is
*protected*: it starts again only when all it can ever need is free beside what other protected ones can ever need,
and it is never preempted again. An unprotected request preempts only newer unprotected ones, a protected one any
unprotected one. So there are finitely many preemptions, and behind the last of them the running requests only grow and
end: the oldest protected one, or without any the oldest, always finds room. A waiting request is passed over only
while a running one computes its next block: a finite wait for somebody who was admitted before; else nobody passes it.
"""

from bisect import insort
from collections.abc import Iterable, Mapping

from kvfolio.cache.holding import Grant
from kvfolio.cache.ledger import Ledger
from kvfolio.cache.lookup import NOT_ASKED, PRIVATE, PROMPT_LOGPROBS, Hit, Miss
from kvfolio.cache.moves import Move
from kvfolio.cache.prefix import TokenChain
from kvfolio.errors import InvariantError
from kvfolio.sched.growth import GrowthForecast
from kvfolio.sched.options import Counters, SchedulerOptions
from kvfolio.sched.request import (
    Admission,
    Arrive,
    Chunk,
    Event,
    Finished,
    Request,
    RequestId,
    RequestState,
    Retain,
    Step,
)
from kvfolio.units import enough_bytes, format_bytes

MAX_SCORED_TOKENS = 128  # tokens of a chunk whose logits are all wanted: a row of logits is as long as the vocabulary


class _Draft:
    """The step being put together. A request scheduled in it may still be preempted by an older one."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.chunks: dict[RequestId, Chunk] = {}
        self.moves: list[Move] = []
        self.preempted: list[RequestId] = []
        self.swapped: list[RequestId] = []
        self.admitted: list[Admission] = []

    def add(self, state: RequestState, start: int, num_tokens: int, grant: Grant) -> None:
        stop = start + num_tokens
        token_ids = tuple(state.chain.token_ids[start:stop])
        samples = stop == state.num_known
        num_prompt = max(0, min(stop, len(state.request.prompt)) - start)
        self.chunks[state.request.id] = Chunk(
            state.request.id,
            start,
            token_ids,
            samples,
            grant.tables,
            scores=state.request.scores_prompt and num_prompt > 0,
            num_prompt_tokens=num_prompt,
        )
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
        self._forecast = GrowthForecast()
        self._num_arrived = 0
        self._waiting: list[RequestState] = []  # oldest first
        self._running: dict[RequestId, RequestState] = {}  # oldest first

    def start_anew(self) -> None:
        """Forget all requests and all that is cached: for when a decision was cut short and nothing can be trusted."""
        self.ledger = Ledger(self.ledger.layout, self.ledger.options)
        self._waiting, self._running = [], {}

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

    def step(self, events: Iterable[Event], now_s: float | None = None) -> Step:
        """Take in ``events``, then decide what to compute next. An empty step means there is nothing to do.

        ``now_s`` is the time on the caller's clock, by which blocks are kept; without it no time passes.
        """
        refused = self.take_in(events, now_s)
        draft = _Draft(self.options.max_step_tokens)
        for decoding in (True, False):  # decodes first: a long prompt must not stall those who are already reading
            for state in tuple(self._running.values()):
                if state.request.id in self._running and (self._num_left(state) == 1) is decoding:
                    self._continue(state, draft)
        self._admit_waiting(draft)
        if not draft.chunks and not self.is_idle:
            raise InvariantError(
                f"nothing can run: {len(self._running)} running, {len(self._waiting)} waiting, "
                f"{self.ledger.free_bytes} bytes free, {self.ledger.num_open_free} open slots free"
            )
        self._count(draft, len(refused))
        return Step(
            self.counters.num_steps,
            tuple(draft.chunks.values()),
            tuple(draft.moves),
            tuple(draft.preempted),
            tuple(draft.swapped),
            tuple(draft.admitted),
            refused,
        )

    def commit(self, step: Step, tokens: Mapping[RequestId, int]) -> tuple[Finished, ...]:
        """Book the outcome of ``step``: ``tokens`` holds one new token id for each chunk that samples.

        Side effects: ledger entries are written, finished requests are released.
        """
        finished: list[Finished] = []
        for chunk in step.chunks:
            state = self._running[chunk.request_id]
            self.ledger.commit(state.sequence)
            state.num_scored = max(state.num_scored, chunk.start + len(chunk.token_ids))
            if not chunk.samples:
                continue
            token = tokens[chunk.request_id]
            state.chain.append(token)
            if token in state.request.stop_token_ids:
                finished.append(Finished(chunk.request_id, "stop"))
            elif state.max_left <= 0:
                finished.append(Finished(chunk.request_id, "length"))
        for end in finished:
            self._end(self._running[end.request_id])
        self.counters.num_finished += len(finished)
        return tuple(finished)

    def take_in(self, events: Iterable[Event], now_s: float | None = None) -> tuple[tuple[RequestId, str], ...]:
        """Book ``events`` without scheduling anything; returns the arrivals that can never be served, and why."""
        if now_s is not None:
            self.ledger.tick(now_s)
        refused: list[tuple[RequestId, str]] = []
        for event in events:
            if isinstance(event, Arrive):
                reason = self.refusal(event.request)
                if reason is None:
                    chain = TokenChain(event.request.prompt, event.request.scope, self.ledger.layout.block_tokens)
                    self._waiting.append(RequestState(event.request, self._num_arrived, chain))
                    self._num_arrived += 1
                else:
                    refused.append((event.request.id, reason))
                continue
            if isinstance(event, Retain):
                chain = TokenChain(event.token_ids, event.scope, self.ledger.layout.block_tokens)
                self.ledger.retain(chain, event.keep)
                continue
            for state in [state for state in self._waiting if state.request.id == event.request_id]:
                self._waiting.remove(state)
                if self.ledger.is_swapped(state.sequence):
                    self.ledger.release(state.sequence)
                self.counters.num_left += 1
            if event.request_id in self._running:
                self._end(self._running[event.request_id])
                self.counters.num_left += 1
        return tuple(refused)

    # ---- those who run ----------------------------------------------------------------------------------------------

    def _num_left(self, state: RequestState) -> int:
        """Known tokens of a running request that no step was granted yet: 1 when it decodes, 0 once scheduled."""
        return state.num_known - self.ledger.num_tokens(state.sequence)

    def _continue(self, state: RequestState, draft: _Draft) -> None:
        """Schedule the next tokens of a running request, preempting others if it cannot move at all."""
        start = self.ledger.num_tokens(state.sequence)
        wanted = min(state.num_known - start, draft.budget)
        if state.request.scores_prompt:
            wanted = min(wanted, MAX_SCORED_TOKENS)
        while wanted > 0:
            possible = self.ledger.largest_extension(state.sequence, wanted)
            grant = self.ledger.extend(state.sequence, possible) if possible > 0 else None
            if grant is not None:
                draft.add(state, start, possible, grant)
                return
            victim = self._victim(state)
            if victim is None:
                return  # it waits: those who hold the blocks will end
            self._preempt(victim, draft)

    def _is_protected(self, state: RequestState) -> bool:
        return state.num_preemptions >= self.options.max_preemptions

    def _victim(self, state: RequestState) -> RequestState | None:
        """Who gives up blocks for ``state``: the newest request that is not protected, an older one to nobody but
        a protected request."""
        for other in reversed(self._running.values()):
            if other is state or self._is_protected(other):
                continue
            return other if other.arrival > state.arrival or self._is_protected(state) else None
        return None

    def _preempt(self, state: RequestState, draft: _Draft) -> None:
        """Take all blocks of ``state``; it waits where its arrival places it, and goes on from its tokens."""
        draft.drop(state.request.id)
        draft.preempted.append(state.request.id)
        num_written = self.ledger.num_written(state.sequence)
        if self._is_swap_better(state, num_written):
            draft.swapped.append(state.request.id)
            draft.moves.extend(self.ledger.swap_out(state.sequence))
        else:
            self.counters.num_tokens_lost += num_written
            self.ledger.release(state.sequence)
        state.num_preemptions += 1
        del self._running[state.request.id]
        insort(self._waiting, state, key=lambda one: one.arrival)

    def _is_swap_better(self, state: RequestState, num_written: int) -> bool:
        """Whether the blocks should go to the host pool: bytes over bandwidth, both ways, against FLOPs over rate."""
        if self.options.preemption == "recompute" or num_written == 0:
            return False
        if self.options.preemption == "auto" and not self.ledger.has_host_pool:
            return False
        num_bytes, costs = self.ledger.bytes_to_swap(state.sequence), self.ledger.options.costs
        if num_bytes is None:
            self.counters.num_swaps_refused += 1
            return False
        if self.options.preemption == "swap" or costs is None:
            return True
        return 2 * costs.move_s(num_bytes) < costs.compute_s(0, num_written)

    def _end(self, state: RequestState) -> None:
        self.ledger.release(state.sequence)
        del self._running[state.request.id]
        if state.num_generated:
            self._forecast.learn(state.num_generated)

    # ---- those who wait ---------------------------------------------------------------------------------------------

    def _admit_waiting(self, draft: _Draft) -> None:
        """Start waiting requests in their order; those that wait for another's blocks are passed over."""
        at = 0
        while at < len(self._waiting) and draft.budget > 0 and not draft.preempted:
            state = self._waiting[at]
            if self._still_awaits(state):
                at += 1
                continue
            is_swapped = self.ledger.is_swapped(state.sequence)
            hit = self.ledger.lookup(state.chain, 0 if is_swapped else state.max_hit)
            if hit.computing is not None and self._is_worth_waiting(state, hit):
                self.counters.num_waits += state.awaits is None
                state.awaits = hit.computing, hit.computing.num_written
                at += 1
                continue
            if not self._admit(state, hit, draft):
                return
            del self._waiting[at]
            self._continue(state, draft)

    def _is_worth_waiting(self, state: RequestState, hit: Hit) -> bool:
        """A whole block is; a part of one only at the end of a longer wait."""
        return hit.num_computing == self.ledger.layout.block_tokens or state.awaits is not None

    def _still_awaits(self, state: RequestState) -> bool:
        """Whether the one it waits for has come no further since it was looked up."""
        if state.awaits is None:
            return False
        other, num_written = state.awaits
        return other.num_to_compute > 0 and other.num_written == num_written

    def _admit(self, state: RequestState, hit: Hit, draft: _Draft) -> bool:
        """Start a request if what it is predicted to need fits beside what the running ones are predicted to need."""
        need = _less(self._predicted_blocks(state), self.ledger.blocks_shared(hit))
        for other in self._running.values():
            growth = _less(self._predicted_blocks(other), self.ledger.blocks_held(other.sequence))
            need = [one + more for one, more in zip(need, growth, strict=True)]
        if not self.ledger.has_room(need):
            return False
        was_swapped = self.ledger.is_swapped(state.sequence)
        if was_swapped:
            moves = self.ledger.swap_in(state.sequence)
        else:
            moves = self.ledger.admit(state.sequence, state.chain, hit, state.request.keep)
        if moves is None:
            return False
        draft.moves.extend(moves)
        draft.admitted.append(self._admission(state, hit, was_swapped))
        self._running[state.request.id] = state
        if next(reversed(self._running.values())).arrival < max(one.arrival for one in self._running.values()):
            self._running = dict(sorted(self._running.items(), key=lambda item: item[1].arrival))
        state.awaits = None
        return True

    def _predicted_blocks(self, state: RequestState) -> list[int]:
        """Sealed blocks of each group that it will hold in the end; of a protected request, the most it can."""
        is_protected = self._is_protected(state)
        num_tokens = state.request.max_cached_tokens if is_protected else self._forecast.num_tokens(state)
        layout = self.ledger.layout
        return [layout.blocks_held(group, num_tokens) for group in layout.groups]

    def _admission(self, state: RequestState, hit: Hit, was_swapped: bool) -> Admission:
        """The record of a start; a first one is counted."""
        request, counters = state.request, self.counters
        num_hit = self.ledger.num_tokens(state.sequence)
        miss = None
        if not was_swapped and num_hit < state.num_known - 1:
            if request.scope is None:
                miss = Miss(PRIVATE, 0)
            elif not request.reads_cache or request.scores_prompt:
                miss = Miss(NOT_ASKED if not request.reads_cache else PROMPT_LOGPROBS, num_hit)
            else:
                miss = self.ledger.why_missed(state.chain, state.num_known - 1, hit)
        if state.num_preemptions == 0:
            counters.num_prompt_tokens += len(request.prompt)
            counters.num_hit_tokens += num_hit
            if miss is not None:
                counters.misses[miss.reason] = counters.misses.get(miss.reason, 0) + 1
        return Admission(request.id, num_hit, hit.group_tokens, miss, state.num_preemptions, was_swapped)

    def _count(self, draft: _Draft, num_refused: int) -> None:
        counters, usage = self.counters, self.ledger.usage()
        if usage.used_bytes >= self.peak.used_bytes:
            self.peak = usage
        counters.num_refused += num_refused
        counters.num_preemptions += len(draft.preempted)
        counters.num_swaps += len(draft.swapped)
        if draft.chunks:
            counters.num_steps += 1
            counters.num_tokens_computed += sum(len(chunk.token_ids) for chunk in draft.chunks.values())


def _less(counts: list[int], other: list[int]) -> list[int]:
    """What ``counts`` has beyond ``other``, place by place."""
    return [max(0, one - less) for one, less in zip(counts, other, strict=True)]
