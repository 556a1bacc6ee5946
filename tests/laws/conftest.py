"""Opens tiny models beside their cold runs, for the laws that compare the two.

Knows nothing of what is claimed about them.
"""

from collections.abc import Callable

import pytest
from cold import Cold, Setting, Warm
from served import kv_memory_for
from tiny import TinyModel

from kvfolio import LLM

OpenLLM = Callable[..., LLM]
OpenWarm = Callable[..., Warm]


@pytest.fixture(scope="session")
def find_cold(served_model: Callable[[str], TinyModel]) -> Callable[[Setting, int], Cold]:
    """The cold run of a setting, with what it has answered already."""
    made: dict[tuple[Setting, int], Cold] = {}

    def find(setting: Setting, block_tokens: int) -> Cold:
        if (setting, block_tokens) not in made:
            folder = served_model(setting.name).folder
            made[setting, block_tokens] = Cold(folder, block_tokens=block_tokens, **setting.options)
        return made[setting, block_tokens]

    return find


@pytest.fixture
def open_warm(open_llm: OpenLLM, find_cold: Callable[[Setting, int], Cold]) -> OpenWarm:
    """Opens a model of a setting, beside its cold run; ``rows``: a pool of so many blocks in each group."""

    def open_one(setting: Setting, block_tokens: int | None = None, rows: int | None = None, **options: object) -> Warm:
        block_tokens = block_tokens or setting.block_tokens
        options = {
            "kv_memory": "2MiB",
            "deterministic": True,
            "debug": True,
            **setting.options,
            **options,
            "block_tokens": block_tokens,
        }
        cold = find_cold(setting, block_tokens)
        if rows is not None:
            options.setdefault("max_running", 3)
            options["kv_memory"] = kv_memory_for(cold.llm, options["max_running"], rows)
        return Warm(open_llm(setting.name, **options), cold)

    return open_one
