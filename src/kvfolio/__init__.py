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
    from kvfolio.engine.params import CacheParams, Retention, SamplingParams
    from kvfolio.planner.ask import fleet, plan

__all__ = [
    "LLM",
    "BrokenModelError",
    "BudgetError",
    "CacheParams",
    "InvariantError",
    "KvfolioError",
    "OptionError",
    "RequestError",
    "Retention",
    "SamplingParams",
    "SpecError",
    "UnknownModelError",
    "fleet",
    "plan",
    "read_model",
]

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    """On first use: LLM and its parameters need torch, which takes seconds to import; the planner takes a moment."""
    if name in ("plan", "fleet"):
        from kvfolio.planner import ask

        return getattr(ask, name)
    if name == "LLM":
        from kvfolio.engine.llm import LLM

        return LLM
    if name in ("SamplingParams", "CacheParams", "Retention"):
        from kvfolio.engine import params

        return getattr(params, name)
    raise AttributeError(f"module 'kvfolio' has no attribute {name!r}")
