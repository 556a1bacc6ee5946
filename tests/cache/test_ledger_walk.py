"""The law of the ledger: every block that a sequence holds contains the keys of exactly its tokens, after every step.

The walks themselves and the model that the ledger is compared with: tests/builders/walked.py and contents.py.
"""

import os
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from small import Shape, layout_of, layouts, lossy
from walked import Walk, random_operation

from kvfolio.cache.costs import MachineCosts
from kvfolio.cache.eviction import POLICIES
from kvfolio.cache.ledger import LedgerOptions
from kvfolio.spec.layout import CacheLayout

SOAK = int(os.environ.get("KVFOLIO_SOAK", "1"))  # times as many operations: `make soak` walks a million
COSTS = MachineCosts(1e9, 1e9, 100.0, 7.0)


class AnyLife(RuleBasedStateMachine):
    """Any operation of any sequence on any small cache, the model compared after each."""

    @initialize(
        layout=layouts(min_rows=2),
        policy=st.sampled_from(sorted(POLICIES)),
        host_rows=st.sampled_from((0, 1, 4)),
        is_lossy=st.booleans(),
        is_debug=st.booleans(),
    )
    def start(self, layout: CacheLayout, policy: str, host_rows: int, is_lossy: bool, is_debug: bool) -> None:
        host = replace_counts(layout, host_rows) if host_rows else None
        self.walk = Walk(lossy(layout) if is_lossy else layout, LedgerOptions(policy, host, COSTS, is_debug))

    @rule(draw=st.randoms(use_true_random=False))
    def operate(self, draw: random.Random) -> None:
        random_operation(self.walk, draw, longest=30)

    @invariant()
    def ledger_and_model_agree(self) -> None:
        if hasattr(self, "walk"):
            self.walk.compare()

    def teardown(self) -> None:
        if hasattr(self, "walk"):
            self.walk.finish()


def replace_counts(layout: CacheLayout, rows: int) -> CacheLayout:
    """A host pool of ``rows`` blocks and two slots for each group of ``layout``."""
    groups = tuple(replace(group, num_blocks=rows, num_open_blocks=2) for group in layout.groups)
    return replace(layout, groups=groups, budget_bytes=rows * layout.first_row_bytes)


TestAnyLife = AnyLife.TestCase
TestAnyLife.settings = settings(max_examples=60 * SOAK, stateful_step_count=50, deadline=None)

CASES: dict[str, tuple[tuple[Shape, ...], int | None, tuple[int, ...] | None, int]] = {
    "full": (((None, 1),), None, None, 0),
    "window": (((6, 1),), None, None, 0),
    "full and window": (((None, 1), (5, 2)), 10 * 96 + 40, None, 0),
    "full and two windows": (((None, 2), (9, 3), (3, 1)), 1750, None, 0),
    "split by group": (((None, 1), (8, 1)), 18 * 32, (10, 8), 0),
    "full and sinks": (((None, 1),), 12 * 32 + 7, None, 2),
    "full and window and sinks": (((7, 1), (None, 2)), 1300, None, 1),
    "sinks split by group": (((None, 1), (8, 1)), 22 * 32, (10, 5, 7), 3),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("policy", POLICIES)
def test_in_a_hundred_thousand_operations_no_block_ever_holds_what_its_sequence_did_not_write(
    case: str, policy: str
) -> None:
    shapes, budget_bytes, counts, sinks = CASES[case]
    layout = layout_of(*shapes, budget_bytes=budget_bytes, counts=counts, sinks=sinks)
    number = list(CASES).index(case) + list(POLICIES).index(policy)
    host = replace_counts(layout, 6) if number % 3 else None
    layout = lossy(layout) if number % 4 == 3 else layout
    walk = Walk(layout, LedgerOptions(policy, host, COSTS, debug=number % 2 == 0))
    draw = random.Random(f"{case} {policy}")
    for _ in range(100_000 // len(CASES) // len(POLICIES) * SOAK):
        random_operation(walk, draw)
        walk.compare()
    walk.finish()
    SEEN.update(walk.seen)


SEEN: Counter[str] = Counter()


def test_the_walks_came_past_everything_that_can_happen() -> None:
    if not SEEN:
        pytest.skip("the walks did not run in this process")
    wanted = ["admit", "hit", "extend", "refuse", "evict", "deduplicate", "wait", "CopyToOpen", "CopyOpen", "SwapOut"]
    wanted += [
        "SwapIn",
        "ReturnMemory",
        "found again",
        "same slot",
        "no slot",
        "no way back",
        "host full",
        "never seen",
        "evicted",
    ]
    wanted += ["tail of a block", "other namespace", "Poison", "PoisonOpen", "SwapOpenIn"]
    assert min(SEEN[event] for event in wanted) > 20, SEEN
