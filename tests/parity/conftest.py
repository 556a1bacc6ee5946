"""Tiny models as folders, one of each kind a session; the parity files import each other by name."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import tiny


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tiny.TinyModel]:
    """The tiny model of a name, made when first asked for."""
    made: dict[str, tiny.TinyModel] = {}

    def find(name: str) -> tiny.TinyModel:
        if name not in made:
            made[name] = tiny.make(name, tmp_path_factory.mktemp(name))
        return made[name]

    return find
