"""The table of floors: imports run downwards only, never sideways."""

import pytest
from rules import FLOORS, TORCH_FREE_ROOMS, find_cycle, floor_violations, module_name, python_files, table_violations


def test_imports_run_downwards_only() -> None:
    found = [line for path in python_files() for line in floor_violations(module_name(path), path.read_text())]
    assert not found, "\n".join(found)


def test_no_modules_import_each_other_in_a_ring() -> None:
    assert find_cycle({module_name(path): path.read_text() for path in python_files()}) == []


def test_the_table_itself_looks_downwards_only() -> None:
    assert table_violations() == []


def test_the_rooms_below_the_torch_wall_use_the_standard_library_only() -> None:
    for name in TORCH_FREE_ROOMS:
        assert FLOORS[name].packages == frozenset(), name


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("kvfolio.cache.ledger", "import torch"),
        ("kvfolio.cache.ledger", "import numpy as np"),
        ("kvfolio.cache.ledger", "from kvfolio.sched.request import Request"),  # up
        ("kvfolio.cache.ledger", "from kvfolio.planner.memory import plan_memory"),  # sideways
        ("kvfolio.cache.ledger", "from kvfolio.planner import memory"),
        ("kvfolio.cache.ledger", "import kvfolio.planner.memory"),
        ("kvfolio.cache.ledger", "from ..plan import memory"),
        ("kvfolio.cache.__init__", "from ..plan import memory"),
        ("kvfolio.cache.ledger", "def f():\n    import kvfolio.engine.engine"),
        (
            "kvfolio.cache.ledger",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from kvfolio.store.pools import Pool",
        ),
        ("kvfolio.cache.ledger", "import importlib\nimportlib.import_module('kvfolio.engine')"),
        ("kvfolio.cache.ledger", "from kvfolio import LLM"),  # the public names stand above
        ("kvfolio.cache.ledger", "import kvfolio"),
        ("kvfolio.engine.engine", "from kvfolio.sim.replay import replay"),
        ("kvfolio.sim.replay", "from kvfolio.engine.engine import Engine"),
        ("kvfolio.models.llama", "from kvfolio.store.view import View"),
        ("kvfolio.models.llama", "from kvfolio.kernels.reference import ReferenceOps"),
        ("kvfolio.kernels.ops", "from kvfolio.spec.model import RunnableSpec"),  # spec.formats only
        ("kvfolio.kernels.ops", "from kvfolio.spec import model"),
        ("kvfolio.engine.runner", "from kvfolio.kernels import _native"),
        ("kvfolio.engine.runner", "import kvfolio.kernels._native"),
        ("kvfolio.sched.scheduler", "from kvfolio.cache import _digest"),
        ("kvfolio.server.app", "from kvfolio.cache.ledger import Ledger"),
        ("kvfolio.spec.source", "import gguf"),
        ("kvfolio.store.disk", "import torch"),  # a file stricter than its room
        ("kvfolio.planner.memory", "import plotly"),  # allowed in figures only
        ("kvfolio.errors", "from kvfolio.units import format_bytes"),
        ("kvfolio.cli", "import torch"),
        ("kvfolio.cli", "from kvfolio.engine.engine import Engine"),  # at the top: --help would load torch
        ("kvfolio.__init__", "from kvfolio.engine.engine import LLM"),
        ("kvfolio.gossip.talk", "import json"),  # a room without a row in the table
    ],
)
def test_the_walk_sees(module: str, source: str) -> None:
    assert len(floor_violations(module, source)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        (
            "kvfolio.cache.ledger",
            "import heapq\nfrom kvfolio.errors import InvariantError\nfrom kvfolio.cache.blocks import Block",
        ),
        ("kvfolio.cache.ledger", "from .blocks import Block\nfrom ..spec.layers import LayerKind"),
        ("kvfolio.kernels.ops", "from kvfolio.spec.formats import Format\nfrom kvfolio.spec import formats"),
        ("kvfolio.kernels.native", "from kvfolio.kernels import _native"),
        ("kvfolio.cache.digest", "from kvfolio.cache import _digest"),
        ("kvfolio.planner.page.figures", "import plotly.graph_objects"),
        (
            "kvfolio.cli",
            "from kvfolio import plan\ndef run():\n    from kvfolio import LLM\n    import kvfolio.engine",
        ),
        ("kvfolio.__init__", "def __getattr__(name):\n    from kvfolio.engine.engine import LLM\n    return LLM"),
        ("kvfolio.__main__", "from kvfolio.cli import main"),
    ],
)
def test_the_walk_lets_pass(module: str, source: str) -> None:
    assert floor_violations(module, source) == []


def test_the_walk_sees_a_ring() -> None:
    ring = find_cycle(
        {"kvfolio.cache.a": "from kvfolio.cache import b", "kvfolio.cache.b": "def f():\n    import kvfolio.cache.a"}
    )
    assert ring == ["kvfolio.cache.a", "kvfolio.cache.b", "kvfolio.cache.a"]
