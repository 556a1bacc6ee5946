"""kvfolio plans, runs and simulates the KV cache of language models.

This front door imports no torch until LLM is used.
"""

from typing import TYPE_CHECKING, Any

from kvfolio.errors import (
    BrokenModelError,
    BudgetError,
    InvariantError,
    KvfolioError,
    OptionError,
    RequestError,
    SpecError,
    UnknownModelError,
)
from kvfolio.spec.source import read_model

if TYPE_CHECKING:
    from kvfolio.engine.llm import LLM
    from kvfolio.engine.params import SamplingParams

__all__ = [
    "LLM",
    "BrokenModelError",
    "BudgetError",
    "InvariantError",
    "KvfolioError",
    "OptionError",
    "RequestError",
    "SamplingParams",
    "SpecError",
    "UnknownModelError",
    "read_model",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """LLM and SamplingParams on first use: they need torch, which takes seconds to import."""
    if name == "LLM":
        from kvfolio.engine.llm import LLM

        return LLM
    if name == "SamplingParams":
        from kvfolio.engine.params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module 'kvfolio' has no attribute {name!r}")
