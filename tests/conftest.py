"""What the tests of every room share: the small layouts and requests of ``builders``, and tiny models to be served.

Torch is imported only when a model is asked for. Knows nothing of what is tested.
"""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tiny import TinyModel

    from kvfolio import LLM

# The models are tiny: a second thread costs more than it brings. Torch reads this when it is loaded.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Test folders are no packages: what they share is imported by name, however pytest is started.
sys.path.insert(0, str(Path(__file__).parent / "builders"))
sys.path.insert(0, str(Path(__file__).parent / "parity"))  # tiny.py and served.py
pytest.register_assert_rewrite("served")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> "Callable[[str], TinyModel]":
    """The tiny model of a name as a folder, made when first asked for."""
    import tiny

    made: dict[str, TinyModel] = {}

    def find(name: str) -> "TinyModel":
        if name not in made:
            made[name] = tiny.make(name, tmp_path_factory.mktemp(name))
        return made[name]

    return find


@pytest.fixture(scope="session")
def served_model(tmp_path_factory: pytest.TempPathFactory) -> "Callable[[str], TinyModel]":
    """The tiny model of a name, with a long context and a tokenizer; made when first asked for."""
    import served

    made: dict[str, TinyModel] = {}

    def find(name: str) -> "TinyModel":
        if name not in made:
            made[name] = served.make(name, tmp_path_factory.mktemp(f"served-{name}"))
        return made[name]

    return find


@pytest.fixture
def open_llm(served_model: "Callable[[str], TinyModel]") -> "Iterator[Callable[..., LLM]]":
    """Opens a tiny model with the options given. However the test ends, nothing may be held by then."""
    import served

    from kvfolio import LLM

    opened: list[LLM] = []

    def open_one(name: str, **options: object) -> LLM:
        opened.append(LLM(served_model(name).folder, **{"kv_memory": "8MiB", **options}))
        return opened[-1]

    yield open_one
    for llm in opened:
        served.assert_idle(llm)
