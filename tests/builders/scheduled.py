"""A scheduler driven step by step with pretended tokens, its ledger checked twice a step.

Knows nothing of what is claimed about it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from small import layout_of, request_of

from kvfolio.cache.ledger import Ledger, LedgerOptions
from kvfolio.sched.options import SchedulerOptions
from kvfolio.sched.request import Arrive, Event, Finished, RequestId, Step
from kvfolio.sched.scheduler import Scheduler
from kvfolio.spec.layout import CacheLayout

Part = tuple[int, int, int, bool]  # (request, start, num_tokens, samples) of a chunk


def scheduler_of(
    layout: CacheLayout | None = None,
    max_step_tokens: int = 8,
    max_context: int = 64,
    caching: LedgerOptions | None = None,
    **options: object,
) -> Scheduler:
    chosen = SchedulerOptions(max_context, max_step_tokens, **options)  # type: ignore[arg-type]
    return Scheduler(Ledger(layout or layout_of((None, 1)), caching or LedgerOptions(debug=True)), chosen)


def run(scheduler: Scheduler, *events: Event, now_s: float | None = None) -> tuple[Step, tuple[Finished, ...]]:
    """One step and its commit; every request generates 500 and up, by how many tokens it has."""
    step = scheduler.step(events, now_s)
    scheduler.ledger.check()
    tokens = {chunk.request_id: 500 + chunk.start + len(chunk.token_ids) for chunk in step.chunks if chunk.samples}
    finished = scheduler.commit(step, tokens)
    scheduler.ledger.check()
    return step, finished


def arrive(*requests: tuple[int, int, int]) -> list[Event]:
    """(id, prompt tokens, max_tokens) each"""
    return [Arrive(request_of(*request)) for request in requests]


def parts(step: Step) -> list[Part]:
    return [(chunk.request_id, chunk.start, len(chunk.token_ids), chunk.samples) for chunk in step.chunks]


def expect_answers_of(scheduler: Scheduler, num_tokens: int) -> None:
    """Bring the forecast to answers of ``num_tokens``: a request of an own prompt gives one, and is gone."""
    run(scheduler, *arrive((999, 1, num_tokens)))
    while not scheduler.is_idle:
        run(scheduler)


@dataclass
class Drained:
    """What was seen until nothing was left to do."""

    steps: list[Step] = field(default_factory=list)
    finished: list[RequestId] = field(default_factory=list)

    def computed(self, request_id: int) -> int:
        """Tokens of a request that were computed, generated ones too."""
        return sum(num for step in self.steps for who, _, num, _ in parts(step) if who == request_id)

    def hits(self, request_id: int) -> list[int]:
        """Tokens that were there at each start of a request."""
        return [one.num_hit_tokens for step in self.steps for one in step.admitted if one.request_id == request_id]


def drain(scheduler: Scheduler, events: Sequence[Event] = (), max_steps: int = 1000) -> Drained:
    """Step until nothing is left to do; fails after ``max_steps``."""
    seen = Drained()
    while events or not scheduler.is_idle:
        step, finished = run(scheduler, *events)
        events = ()
        seen.steps.append(step)
        seen.finished += [end.request_id for end in finished]
        assert len(seen.steps) <= max_steps, "it does not end"
    return seen
