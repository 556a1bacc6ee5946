"""The engine: requests of token ids in, token ids out. One half of the twins; the other is sim/replay.py.

    step = scheduler.step(events) → store.carry(step.moves) → runner(step) → sampler → scheduler.commit(step, tokens)

Knows nothing of text, tokenizers or files.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from kvfolio.cache.holding import Usage
from kvfolio.cache.ledger import Ledger
from kvfolio.cache.lookup import Miss
from kvfolio.cache.prefix import Scope, TokenChain
from kvfolio.engine.params import CacheParams, SamplingParams
from kvfolio.engine.runner import Runner
from kvfolio.engine.sampler import Sampled, Sampler
from kvfolio.errors import RequestError
from kvfolio.planner.compute import weight_bytes_read
from kvfolio.sched.options import Counters
from kvfolio.sched.request import Arrive, Event, Leave, Request, RequestId, Retain, Step
from kvfolio.sched.scheduler import Scheduler
from kvfolio.spec.model import RunnableSpec
from kvfolio.store.pools import CacheStore
from kvfolio.units import format_bytes

logger = logging.getLogger("kvfolio")

AUDIT_STEPS = 1024  # steps between two audits of the ledger, which happen when nothing runs


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What a request found in the cache when it first started, why not more, and how often it lost its memory since.

    ``miss`` may name another namespace: it is for whoever runs the model, not for its tenants.
    """

    num_hit_tokens: int
    group_tokens: tuple[int, ...]  # whole blocks that each layer group alone would have accepted, in tokens
    miss: Miss | None  # None: all but the last token was there
    num_preemptions: int = 0
    num_swaps: int = 0  # preemptions that went to the host pool; the others were computed again


@dataclass(frozen=True, slots=True)
class Output:
    """One new token of one request."""

    request_id: RequestId
    sampled: Sampled
    finish_reason: str | None  # stop, length, or None while it goes on
    time_s: float  # on the engine's clock
    cache: CacheUse
    prompt_scores: tuple[Sampled, ...] | None  # of the prompt's tokens but its first; with the first output


@dataclass(slots=True)
class DecodeMeter:
    """What the steps that only decode have done so far: the base of measured speed and of its limit."""

    num_tokens: int = 0
    time_s: float = 0.0
    bytes_read: int = 0  # weights once a step, cache of every sequence in it


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The engine at a glance, as plain data."""

    usage: Usage  # now
    peak: Usage  # at the step that used the most bytes
    counters: Counters
    planned_bytes: int
    allocated_bytes: int
    host_planned_bytes: int  # of the host pool
    host_allocated_bytes: int
    num_running: int
    num_waiting: int


class Engine:
    """A scheduler, a ledger, a store and a runner in step. Not thread-safe: one caller at a time."""

    def __init__(
        self,
        spec: RunnableSpec,
        scheduler: Scheduler,
        store: CacheStore,
        runner: Runner,
        clock: Callable[[], float] = time.monotonic,
        fingerprint: bytes | None = b"",
    ) -> None:
        """``fingerprint``: of what decides the stored bits of this model and cache; None: no blocks are shared."""
        self.clock = clock
        self.scheduler = scheduler
        self.decode_meter = DecodeMeter()
        self._store = store
        self._runner = runner
        self._sampler = Sampler()
        self._params: dict[RequestId, SamplingParams] = {}
        self._prompts: dict[RequestId, tuple[int, ...]] = {}  # of requests whose prompt is to be scored
        self._scores: dict[RequestId, dict[int, Sampled]] = {}  # by position in the prompt
        self._uses: dict[RequestId, CacheUse] = {}  # of requests that have started
        self._events: list[Event] = []
        self._next_id = 0
        self._fingerprint = fingerprint
        self._audited_at = 0  # steps
        self._stepping = False
        self._is_torn = False  # an interrupt cut a decision short: see _mend
        self._is_unbooked = False  # a step was decided, and neither committed nor abandoned
        self._left_in_step: list[RequestId] = []  # cancelled by somebody that a running step called, or set free
        self._spec = spec

    @property
    def ledger(self) -> Ledger:
        return self.scheduler.ledger

    @property
    def next_id(self) -> RequestId:
        """What the next request will be called."""
        return RequestId(self._next_id)

    @property
    def has_work(self) -> bool:
        return bool(self._events) or not self.scheduler.is_idle

    def refusal(self, prompt: tuple[int, ...], params: SamplingParams) -> str | None:
        """Why a request of token ids can never be served, with the way out; None when it can. Changes nothing."""
        return self._refuse(self._request(prompt, params, CacheParams()))

    def _request(self, prompt: tuple[int, ...], params: SamplingParams, caching: CacheParams) -> Request:
        """What the scheduler would be asked next."""
        stops = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            stops |= frozenset(self._spec.eos_token_ids)
        return Request(
            RequestId(self._next_id),
            prompt,
            params.max_tokens,
            stops,
            self.scope(caching),
            caching.reuse,
            caching.ranges(len(prompt)),
            params.prompt_logprobs is not None,
        )

    def scope(self, caching: CacheParams) -> Scope | None:
        """Within what a request shares blocks; None: the prefix cache is off."""
        return None if self._fingerprint is None else Scope(self._fingerprint, caching.namespace)

    def retain(self, tokens: Sequence[int], caching: CacheParams) -> int:
        """Set how long the blocks of a text are kept; returns how many of its blocks there are. Raises RequestError."""
        scope, unknown = self.scope(caching), self.unknown_token(tokens)
        if unknown is not None:
            raise RequestError(unknown)
        if scope is None:
            return 0
        keep = caching.ranges(len(tokens))
        self._events.append(Retain(tuple(tokens), scope, keep))
        self.settle()
        return self.ledger.num_kept(self.chain(tokens, caching), keep)

    def chain(self, tokens: Sequence[int], caching: CacheParams) -> TokenChain:
        """A text as the ledger knows it."""
        return TokenChain(tokens, self.scope(caching), self.ledger.layout.block_tokens)

    def _refuse(self, request: Request) -> str | None:
        return self.unknown_token(request.prompt) or self.scheduler.refusal(request)

    def unknown_token(self, prompt: Sequence[int]) -> str | None:
        """What is wrong with the first token id that the model does not have; None when it has them all."""
        vocab_size = self._spec.network.vocab_size
        for token in prompt:
            if not 0 <= token < vocab_size:
                return (
                    f"token id {token} is outside the model's vocabulary of {vocab_size:,}: use the model's tokenizer"
                )
        return None

    def submit(self, prompt: tuple[int, ...], params: SamplingParams, caching: CacheParams | None = None) -> RequestId:
        """Queue a request of token ids. Raises RequestError at once, and queues nothing, if it can never be served."""
        request = self._request(prompt, params, caching or CacheParams())
        reason = self._refuse(request)
        if reason is not None:
            self.scheduler.counters.num_refused += 1
            raise RequestError(reason)
        self._mend()
        self._next_id += 1
        self._params[request.id] = params
        if request.scores_prompt:
            self._prompts[request.id] = prompt
        self._events.append(Arrive(request))
        return request.id

    def cancel(self, request_id: RequestId) -> None:
        """End a request early; its blocks are free from the next step on. One that has ended already is no error."""
        if request_id in self._params:
            self._events.append(Leave(request_id))
            if self._stepping:  # the step still needs what we know of it
                self._left_in_step.append(request_id)
            else:
                self._forget(request_id)

    def step(self) -> list[Output]:
        """Decide one step, compute it, and return its new tokens. Without work: nothing happens."""
        self._stepping = True
        try:
            return self._step()
        finally:
            self._stepping = False
            for request_id in self._left_in_step:
                self._forget(request_id)
            self._left_in_step.clear()

    def _step(self) -> list[Output]:
        started = self.clock()
        self._is_torn |= self._is_unbooked
        self._mend()
        self._is_torn = True
        step = self._decide(started)
        self._is_unbooked = bool(step.chunks)
        self._is_torn = False
        if not step.chunks:
            return []
        logits = self._split(step, self._runner.run(step))
        sampling = [chunk.request_id for chunk in step.chunks if chunk.samples]
        sampled = self._sampler.sample(logits, [(request_id, self._params[request_id]) for request_id in sampling])
        tokens = {request_id: choice.token_id for request_id, choice in zip(sampling, sampled, strict=True)}
        self._is_torn = True
        reasons = {end.request_id: end.reason for end in self.scheduler.commit(step, tokens)}
        self._is_torn = self._is_unbooked = False
        now = self.clock()
        self._measure(step, now - started)
        outputs = [
            Output(
                request_id,
                choice,
                reasons.get(request_id),
                now,
                self._uses[request_id],
                self._prompt_scores(request_id),
            )
            for request_id, choice in zip(sampling, sampled, strict=True)
        ]
        for request_id in reasons:
            self._forget(request_id)
        if not self.has_work:
            for table in (self._params, self._uses, self._prompts, self._scores):
                table.clear()  # an interrupt may have left something
            self._audit()
        return outputs

    def _decide(self, now_s: float) -> Step:
        """The next step, its moves carried out."""
        events, self._events = self._events, []
        step = self.scheduler.step(events, now_s)
        for one in step.admitted:
            self._uses.setdefault(one.request_id, CacheUse(one.num_hit_tokens, one.group_tokens, one.miss))
        for request_id in step.preempted:
            was_swapped = request_id in step.swapped
            self._warn(request_id, was_swapped)
            use = self._uses[request_id]
            self._uses[request_id] = replace(
                use, num_preemptions=use.num_preemptions + 1, num_swaps=use.num_swaps + was_swapped
            )
        self._store.carry(step.moves)
        return step

    def _mend(self) -> None:
        """Begin anew where Ctrl-C, or an error of our own, came in the midst of a decision.

        Who holds what is not known then: all requests are lost, and all that was cached.
        """
        if not self._is_torn and (self._stepping or not self._is_unbooked):
            return
        logger.warning(
            "interrupted in the midst of a decision: %d requests and the cache are dropped", len(self._params)
        )
        self.scheduler.start_anew()
        self._events = []
        for request_id in list(self._params):
            self._forget(request_id)
        self._is_torn = self._is_unbooked = False

    def knows(self, request_id: RequestId) -> bool:
        """Whether the request is under way; one that has ended, or was lost, is not."""
        self._mend()
        return request_id in self._params

    def settle(self) -> None:
        """Book what is queued without computing a step: cancelled requests give their blocks back now.

        Inside a step it does nothing: the next one, or the next ``settle``, does it.
        """
        if self._stepping:
            return
        self._stepping = True  # what the garbage collector sets free meanwhile must not settle inside of this
        try:
            self._mend()
            events, self._events, self._is_torn = self._events, [], True
            self.scheduler.take_in(events, self.clock())
            self._is_torn = False
        finally:
            self._stepping = False

    def abandon(self) -> None:
        """End all requests, after an error in the middle of a step: nothing stays held."""
        for request_id in list(self._params):
            self.cancel(request_id)
        self.settle()
        self._is_unbooked = False

    def snapshot(self) -> Snapshot:
        """Usage, counters and bytes now."""
        self._mend()
        host = self._store.host
        return Snapshot(
            usage=self.ledger.usage(),
            peak=self.scheduler.peak,
            counters=replace(self.scheduler.counters, misses=dict(self.scheduler.counters.misses)),
            planned_bytes=self._store.layout.planned_bytes,
            allocated_bytes=self._store.allocated_bytes,
            host_planned_bytes=0 if host is None else host.layout.planned_bytes,
            host_allocated_bytes=0 if host is None else host.allocated_bytes,
            num_running=self.scheduler.num_running,
            num_waiting=self.scheduler.num_waiting,
        )

    def _forget(self, request_id: RequestId) -> None:
        self._params.pop(request_id, None)
        self._uses.pop(request_id, None)
        self._prompts.pop(request_id, None)
        self._scores.pop(request_id, None)
        self._sampler.forget(request_id)

    def _split(self, step: Step, rows: Tensor) -> Tensor:
        """Take in the scores of prompts; what is left are the rows [num_samples, vocab] of the sampling chunks."""
        if not any(chunk.scores for chunk in step.chunks):
            return rows
        sampling, at = [], 0
        for chunk in step.chunks:
            num_rows = len(chunk.token_ids) if chunk.scores else int(chunk.samples)
            if chunk.scores:
                prompt = self._prompts[chunk.request_id]
                asked = self._params[chunk.request_id].prompt_logprobs or 0
                following = prompt[chunk.start + 1 : chunk.start + 1 + num_rows]
                scored = self._sampler.score(rows[at : at + num_rows], following, asked)
                found = self._scores.setdefault(chunk.request_id, {})
                found.update((chunk.start + 1 + place, one) for place, one in enumerate(scored))
            at += num_rows
            if chunk.samples:
                sampling.append(at - 1)
        return rows[sampling]

    def _prompt_scores(self, request_id: RequestId) -> tuple[Sampled, ...] | None:
        """The scores of a whole prompt, handed out once."""
        if request_id not in self._scores:
            return None
        found = self._scores.pop(request_id)
        return tuple(found[position] for position in sorted(found))

    def _audit(self) -> None:
        """Now and then, when there is nothing else to do: are the ledger's laws kept? What breaks them is logged."""
        num_steps = self.scheduler.counters.num_steps
        if self.ledger.options.debug:
            self.ledger.check()
        elif num_steps - self._audited_at >= AUDIT_STEPS:
            self._audited_at = num_steps
            for fault in self.ledger.audit():
                logger.error("the ledger contradicts itself, please report this: %s", fault)

    def _measure(self, step: Step, time_s: float) -> None:
        if not all(chunk.samples and len(chunk.token_ids) == 1 for chunk in step.chunks):
            return
        layout = self._store.layout
        self.decode_meter.num_tokens += len(step.chunks)
        self.decode_meter.time_s += time_s
        self.decode_meter.bytes_read += weight_bytes_read(self._spec, layout.exact.name, len(step.chunks))
        self.decode_meter.bytes_read += sum(layout.bytes_read(chunk.start, chunk.start + 1) for chunk in step.chunks)

    def _warn(self, request_id: RequestId, was_swapped: bool) -> None:
        usage, counters = self.ledger.usage(), self.scheduler.counters
        logger.warning(
            "the cache ran dry: request %d gave up its blocks to an older one and will be %s (now %s of %s "
            "free, %d running, %d waiting, %d preemptions so far); more kv_memory avoids this",
            request_id,
            "copied back from the host pool" if was_swapped else "computed again",
            format_bytes(usage.free_bytes),
            format_bytes(self.ledger.layout.budget_bytes),
            self.scheduler.num_running,
            self.scheduler.num_waiting,
            counters.num_preemptions,
        )
