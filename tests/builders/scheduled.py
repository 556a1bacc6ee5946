"""A scheduler driven step by step with pretended tokens, its ledger checked twice a step.

Knows nothing of what is claimed about it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from small import layout_of, request_of

from kvfolio.cache.holding import BlockTable
from kvfolio.cache.ledger import Ledger, LedgerOptions
from kvfolio.cache.moves import (
    CopyOpen,
    CopyToOpen,
    Move,
    Poison,
    PoisonOpen,
    ReturnMemory,
    SwapIn,
    SwapOpenOut,
    SwapOut,
)
from kvfolio.sched.growth import GrowthForecast
from kvfolio.sched.options import SchedulerOptions
from kvfolio.sched.request import Arrive, Event, Finished, RequestId, RequestState, Step
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


class CarelessForecast(GrowthForecast):
    """Expects no growth at all: everybody is admitted who can begin, and pools run dry as often as can be."""

    def num_tokens(self, state: RequestState) -> int:
        return state.num_known


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


class PretendedStore:
    """Pools whose blocks hold token ids, so that what a step reads can be compared with what it should read.

    Here sink groups have open blocks like the others, of their own: what fills a sink comes from there.
    """

    def __init__(self, layout: CacheLayout) -> None:
        self.layout = layout
        groups = range(len(layout.groups))
        self.sealed: list[dict[int, list[int | None]]] = [{} for _ in groups]
        self.host: list[dict[int, list[int | None]]] = [{} for _ in groups]
        self.open: list[dict[int, list[int | None]]] = [{} for _ in groups]
        self.host_open: list[dict[int, list[int | None]]] = [{} for _ in groups]

    def compute(self, step: Step, texts: Mapping[RequestId, Sequence[int]]) -> None:
        """Carry out a step: its moves, then its chunks. Every query must read exactly the tokens of ``texts``."""
        for move in step.moves:
            self._carry(move)
        for chunk in step.chunks:
            text = list(texts[chunk.request_id])
            stop = chunk.start + len(chunk.token_ids)
            assert list(chunk.token_ids) == text[chunk.start : stop]
            for group, table in enumerate(chunk.tables):
                self._write(group, table, chunk.start, chunk.token_ids)
                first, last = self.layout.groups[group].group.kind.first_token_needed(chunk.start), stop
                if self.layout.groups[group].is_sinks:  # its full blocks, and no others
                    last = self.layout.groups[group].num_held(0, stop // self.layout.block_tokens)
                    assert len(table.sealed) == last
                    last *= self.layout.block_tokens
                assert self._read(group, table, first, last) == text[first:last]

    def _write(self, group: int, table: BlockTable, start: int, token_ids: Sequence[int]) -> None:
        size = self.layout.block_tokens
        content = self.open[group].setdefault(table.open_slot, [None] * size)
        for position, token in enumerate(token_ids, start):
            content[position % size] = token
            if position % size == size - 1 and self.layout.groups[group].holds(position // size):
                self.sealed[group][table.sealed[position // size - table.first_block]] = content.copy()

    def _read(self, group: int, table: BlockTable, start: int, stop: int) -> list[int | None]:
        size = self.layout.block_tokens
        found: list[int | None] = []
        for position in range(start, stop):
            block = position // size
            is_open = block == stop // size  # no sink is
            content = (
                self.open[group][table.open_slot]
                if is_open
                else self.sealed[group][table.sealed[block - table.first_block]]
            )
            found.append(content[position % size])
        return found

    def _carry(self, move: Move) -> None:
        size, groups = self.layout.block_tokens, range(len(self.layout.groups))
        if isinstance(move, ReturnMemory | Poison):
            self.sealed[move.group][move.block] = [None] * size
        elif isinstance(move, CopyToOpen):
            self.open[move.group][move.open_slot] = self.sealed[move.group][move.block].copy()
        elif isinstance(move, SwapOut):
            self.host[move.group][move.host_block] = self.sealed[move.group][move.block].copy()
        elif isinstance(move, SwapIn):
            self.sealed[move.group][move.block] = self.host[move.group].pop(move.host_block)
        else:
            for group in groups:
                here, there = self.open[group], self.host_open[group]
                if isinstance(move, CopyOpen):
                    here[move.target] = here[move.source].copy()
                elif isinstance(move, PoisonOpen):
                    here[move.open_slot] = [None] * size
                elif isinstance(move, SwapOpenOut):
                    there[move.host_slot] = here.get(move.open_slot, [None] * size).copy()
                else:
                    here[move.open_slot] = there.pop(move.host_slot)
