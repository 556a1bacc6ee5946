"""Nothing creeps up: after 30,000 requests the scheduler and the ledger are as large as after 6,000 (ME-08).

Knows nothing of tensors or answers; ``tests/laws/test_promises.py`` looks at the whole engine.
"""

import gc
import sys
import tracemalloc

import pytest
from scheduled import CarelessForecast
from small import layout_of

from kvfolio.cache import budget
from kvfolio.cache.budget import REMEMBERED
from kvfolio.cache.index import MAX_SCOPES
from kvfolio.cache.ledger import Ledger, LedgerOptions
from kvfolio.cache.prefix import Scope
from kvfolio.cache.retention import KeepRange
from kvfolio.sched.options import SchedulerOptions
from kvfolio.sched.request import Arrive, Request, RequestId
from kvfolio.sched.scheduler import Scheduler

NUM_WARM_UP, NUM_TRACED, NUM_REQUESTS, AT_ONCE = 6_000, 27_000, 30_000, 10
ROWS, NUM_OPEN = 20, 4


def request_number(number: int, has_host: bool) -> Request:
    """An own prompt of 20 tokens and one to generate; with a host pool every other one generates more, which preempts.

    One in 400 is of a tenant who never comes again, every seventh wants its blocks kept for a while.
    """
    scope = Scope(b"x", f"tenant {number}" if number % 400 == 0 else None)
    keep = (KeepRange(80, 30.0),) if number % 7 == 0 else ()
    max_tokens = 9 if has_host and number % 2 else 1
    return Request(RequestId(number), (number, *range(19)), max_tokens, frozenset(), scope, True, keep)


def serve(scheduler: Scheduler, first: int, last: int, has_host: bool) -> None:
    for number in range(first, last, AT_ONCE):
        events = [Arrive(request_number(one, has_host)) for one in range(number, min(last, number + AT_ONCE))]
        while events or not scheduler.is_idle:
            step = scheduler.step(events, float(scheduler.counters.num_steps))
            events = []
            scheduler.commit(step, {chunk.request_id: 7 for chunk in step.chunks if chunk.samples})


@pytest.mark.parametrize("has_host", [False, True], ids=["no host pool", "host pool"])
def test_thirty_thousand_requests_leave_nothing_behind(has_host: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budget, "REMEMBERED_LEAST", 0)  # else what is remembered turns over while memory is traced
    host = layout_of((None, 1), rows=12, num_open=2) if has_host else None
    ledger = Ledger(layout_of((None, 1), rows=ROWS, num_open=NUM_OPEN), LedgerOptions(host=host))
    scheduler = Scheduler(ledger, SchedulerOptions(max_context=64, max_step_tokens=64))
    if has_host:
        scheduler._forecast = CarelessForecast()
    serve(scheduler, 0, NUM_WARM_UP, has_host)
    gc.collect()
    before = sys.getallocatedblocks()
    serve(scheduler, NUM_WARM_UP, NUM_TRACED, has_host)
    gc.collect()
    assert sys.getallocatedblocks() - before < 2_000  # one object left by each request would be 21,000
    tracemalloc.start()  # which takes three times as long
    try:
        serve(scheduler, NUM_TRACED, NUM_REQUESTS, has_host)
        gc.collect()
        growth = tracemalloc.get_traced_memory()[0]  # what was there before and has gone since is not taken off
    finally:
        tracemalloc.stop()
    assert growth < (1 << 20) * (NUM_REQUESTS - NUM_TRACED) / (NUM_REQUESTS - NUM_WARM_UP)  # 44 bytes a request
    counters = scheduler.counters
    assert counters.num_finished == NUM_REQUESTS
    assert (counters.num_swaps > 1000, counters.num_preemptions > 1000) == (has_host, has_host)
    assert (scheduler._waiting, scheduler._running, ledger._holdings, ledger._swapped) == ([], {}, {}, {})
    index = ledger._budget.index
    assert len(ledger._open_texts.all()) <= NUM_OPEN
    assert len(index) <= ROWS
    assert len(index._evicted) <= REMEMBERED * ROWS
    assert len(index._scopes) <= MAX_SCOPES
    assert len(ledger._retention._due) <= 2048
    assert ledger.usage().host_bytes == 0
    ledger.check()
