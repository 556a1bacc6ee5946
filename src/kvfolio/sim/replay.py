"""The simulator's half of the twins: the engine's own scheduler and ledger, fed from a trace under a virtual clock.

    step = scheduler.step(events) → now += step_time(step) → tokens from the trace → scheduler.commit(step, tokens)

Knows nothing of tensors, text or real time.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvfolio.cache.holding import Usage
from kvfolio.cache.ledger import Ledger, LedgerOptions
from kvfolio.cache.moves import Move, SwapIn, SwapOpenIn, SwapOpenOut, SwapOut
from kvfolio.errors import OptionError
from kvfolio.planner.compute import weight_bytes_read, weight_flops
from kvfolio.sched.options import Counters, SchedulerOptions
from kvfolio.sched.request import Arrive, Event, Leave, Request, RequestId, Step
from kvfolio.sched.scheduler import Scheduler
from kvfolio.spec.layers import PagedLayer
from kvfolio.spec.layout import CacheLayout
from kvfolio.spec.model import RunnableSpec


@dataclass(frozen=True, slots=True)
class TimedRequest:
    """A request, when it comes in, and what the model will answer."""

    request: Request
    arrival_s: float
    generated: tuple[int, ...]  # token ids, at least one; those behind a stop token or max_tokens are never produced


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one request. Times are on the virtual clock; None for what never happened."""

    request_id: RequestId
    arrival_s: float
    first_token_s: float | None
    finish_s: float | None  # when its last token was there
    num_tokens: int  # generated, each counted once however often it was preempted
    num_preemptions: int
    num_hit_tokens: int  # of its prompt, found in the cache when it first started
    end: str  # stop, length, left (its tokens ran out, as when its text meets a stop string) or refused
    refusal: str | None  # why, with the numbers


@dataclass(frozen=True, slots=True)
class Replay:
    """What became of all requests."""

    outcomes: tuple[Outcome, ...]  # in the order the requests were given
    counters: Counters
    peak: Usage  # at the step that used the most bytes
    end_s: float  # the virtual clock after the last step


@dataclass(slots=True)
class _Progress:
    """One request on its way."""

    timed: TimedRequest
    first_token_s: float | None = None
    finish_s: float | None = None
    num_tokens: int = 0
    num_preemptions: int = 0
    num_hit_tokens: int = 0
    end: str = ""
    refusal: str | None = None

    def book(self, now: float) -> None:
        """One more token is there."""
        self.num_tokens += 1
        self.finish_s = now
        if self.first_token_s is None:
            self.first_token_s = now

    def outcome(self) -> Outcome:
        return Outcome(
            self.timed.request.id,
            self.timed.arrival_s,
            self.first_token_s,
            self.finish_s,
            self.num_tokens,
            self.num_preemptions,
            self.num_hit_tokens,
            self.end,
            self.refusal,
        )


def replay(
    layout: CacheLayout,
    options: SchedulerOptions,
    requests: Sequence[TimedRequest],
    step_time: Callable[[Step], float],
    on_step: Callable[[Step], None] | None = None,
    caching: LedgerOptions | None = None,
) -> Replay:
    """Serve ``requests`` until none is left; ``step_time`` says how many seconds a step takes.

    A request that has come by the start of a step is an event of that step; while nothing runs the clock jumps to the
    next arrival. One whose tokens run out leaves by an event of the next step. ``on_step`` sees every step, those
    without chunks too; nothing of a step is kept. A request that can never be served is refused at its arrival.
    Raises OptionError for ids given twice, requests without tokens and times that are not finite, 0 or more.
    """
    scheduler = Scheduler(Ledger(layout, caching), options)
    progress = _checked(requests)
    arrivals = deque(sorted(progress.values(), key=lambda one: one.timed.arrival_s))
    events: list[Event] = []
    now = 0.0
    while arrivals or events or not scheduler.is_idle:
        if not events and scheduler.is_idle:
            now = max(now, arrivals[0].timed.arrival_s)
        while arrivals and arrivals[0].timed.arrival_s <= now:
            events.append(Arrive(arrivals.popleft().timed.request))
        step = scheduler.step(events, now)
        events = []
        if on_step is not None:
            on_step(step)
        for request_id, reason in step.refused:
            progress[request_id].end, progress[request_id].refusal = "refused", reason
        for request_id in step.preempted:
            progress[request_id].num_preemptions += 1
        for admission in step.admitted:
            if admission.num_preemptions == 0:
                progress[admission.request_id].num_hit_tokens = admission.num_hit_tokens
        if not step.chunks:
            continue
        now += _checked_time("a step's time", step_time(step))
        sampling = [progress[chunk.request_id] for chunk in step.chunks if chunk.samples]
        tokens = {one.timed.request.id: one.timed.generated[one.num_tokens] for one in sampling}
        for end in scheduler.commit(step, tokens):
            progress[end.request_id].end = end.reason
        for one in sampling:
            one.book(now)
            if not one.end and one.num_tokens == len(one.timed.generated):
                one.end = "left"
                events.append(Leave(one.timed.request.id))
    scheduler.ledger.check()
    return Replay(tuple(one.outcome() for one in progress.values()), scheduler.counters, scheduler.peak, now)


def _checked(requests: Sequence[TimedRequest]) -> dict[RequestId, _Progress]:
    progress: dict[RequestId, _Progress] = {}
    for timed in requests:
        request_id = timed.request.id
        if request_id in progress:
            raise OptionError(f"request id {request_id} is given twice; every request needs its own")
        if not timed.generated:
            raise OptionError(f"request {request_id} has no generated tokens; the model always yields at least 1")
        _checked_time(f"request {request_id}'s arrival_s", timed.arrival_s)
        progress[request_id] = _Progress(timed)
    return progress


def _checked_time(name: str, seconds: float) -> float:
    if not 0 <= seconds < math.inf:
        raise OptionError(f"{name} is {seconds}; accepted: finite seconds, 0 or more")
    return seconds


def roofline_step_time(
    spec: RunnableSpec,
    layout: CacheLayout,
    bandwidth_bytes_per_s: float,
    flops_per_s: float,
    copy_bytes_per_s: float = math.inf,
) -> Callable[[Step], float]:
    """Seconds of a step = moves, then max(bytes read / bandwidth, FLOPs / rate): what no machine of these rates beats.

    Moves: bytes that go to the host pool or come from it, over ``copy_bytes_per_s``; copies within the cache are free.

    Bytes: all weights once, in the published dtype, of experts those expected to be chosen; and for each chunk of
    tokens [start, stop), in each layer, the cache from the first token that the query at ``start`` needs up to
    ``stop``, once, as it is stored. FLOPs: two a weight that a token passes through; and for each query 2 (k_width +
    v_width) a head and token it reads, latents in the absorbed form. Source: roofline model
    (Williams et al., 2009); the counts are those of planner/compute.py and spec/layout.py. Norms, activations, sampling
    and moves count nothing.
    """
    if not (bandwidth_bytes_per_s > 0 and flops_per_s > 0 and copy_bytes_per_s > 0):
        raise OptionError(
            f"bandwidth is {bandwidth_bytes_per_s} B/s, the rate {flops_per_s} FLOP/s and that of copies "
            f"{copy_bytes_per_s} B/s; all must be more than 0"
        )
    flops_per_token = weight_flops(spec)
    groups = [(group.kind, group.num_layers) for group in spec.groups()]
    heads = spec.network.num_q_heads

    def seconds(step: Step) -> float:
        num_bytes = weight_bytes_read(spec, spec.dtype, step.num_tokens)
        flops = flops_per_token * step.num_tokens
        for chunk in step.chunks:
            start, stop = chunk.start, chunk.start + len(chunk.token_ids)
            num_bytes += layout.bytes_read(start, stop)
            for kind, num_layers in groups:
                read = _tokens_read(kind, stop) - _tokens_read(kind, start)
                flops += num_layers * 2 * heads * (kind.k_width + kind.v_width) * read
        moved_s = sum(_bytes_moved(move, layout) for move in step.moves) / copy_bytes_per_s
        return moved_s + max(num_bytes / bandwidth_bytes_per_s, flops / flops_per_s)

    return seconds


def _bytes_moved(move: Move, layout: CacheLayout) -> int:
    """Bytes that a move takes to or from the host pool."""
    if isinstance(move, SwapOut | SwapIn):
        return layout.groups[move.group].block_bytes
    if isinstance(move, SwapOpenOut | SwapOpenIn):
        return sum(group.open_block_bytes for group in layout.groups)
    return 0


def _tokens_read(kind: PagedLayer, num_queries: int) -> int:
    """Tokens that the queries at positions 0 … num_queries - 1 read, summed: 1 + 2 + 3 …, up to the window."""
    growing = num_queries if kind.window is None else min(num_queries, kind.window)
    return growing * (growing + 1) // 2 + growing * (num_queries - growing)


def synthetic_requests(
    num_requests: int,
    arrivals_per_s: float,
    prompt_tokens: tuple[int, int],
    generated_tokens: tuple[int, int],
    vocab_size: int = 32_000,
    seed: int = 0,
) -> list[TimedRequest]:
    """Requests that come in at random (a Poisson process), their lengths uniform within (least, most).

    ``max_tokens`` is the number of tokens generated, so each ends by length. The same arguments give the same requests.
    """
    draw = random.Random(seed)
    now, requests = 0.0, []
    for index in range(num_requests):
        now += draw.expovariate(arrivals_per_s)
        prompt = tuple(draw.choices(range(vocab_size), k=draw.randint(*prompt_tokens)))
        generated = tuple(draw.choices(range(vocab_size), k=draw.randint(*generated_tokens)))
        requests.append(TimedRequest(Request(RequestId(index), prompt, len(generated)), now, generated))
    return requests
