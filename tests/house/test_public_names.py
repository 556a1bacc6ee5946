"""The public Python API: a handful of sorted names, each of which exists."""

import importlib

import pytest
from rules import SRC

COMPANIONS_OF_TORCH = {"torch", "numpy", "transformers", "tokenizers", "safetensors", "gguf", "jinja2"}


def in_order(names: list[str]) -> list[str]:
    """The order that ruff (RUF022) asks of ``__all__``: CONSTANTS, Classes, functions."""
    return sorted(names, key=lambda name: (0 if name.isupper() else 1 if name[:1].isupper() else 2, name))


def missing_names(module: object, names: list[str]) -> list[str]:
    """Names that ``module`` promises and does not have; one that needs an absent torch is not held against it."""
    missing = []
    for name in names:
        try:
            getattr(module, name)
        except AttributeError:
            missing.append(name)
        except ModuleNotFoundError as error:
            if (error.name or "").split(".")[0] not in COMPANIONS_OF_TORCH:
                missing.append(name)
    return missing


def public_names() -> list[str]:
    if not (SRC / "kvfolio" / "__init__.py").is_file():
        pytest.skip("no __init__.py yet")
    return list(importlib.import_module("kvfolio").__all__)


def test_the_public_names_are_sorted_and_named_once() -> None:
    names = public_names()
    assert names == in_order(list(set(names)))


def test_every_public_name_exists() -> None:
    assert missing_names(importlib.import_module("kvfolio"), public_names()) == []


def test_every_public_name_says_what_it_is() -> None:
    kvfolio = importlib.import_module("kvfolio")
    names = [name for name in public_names() if not name.startswith("__")]
    assert [name for name in names if not getattr(getattr(kvfolio, name), "__doc__", None)] == []


def test_a_missing_name_is_seen() -> None:
    class Module:
        here = 1

        def __getattr__(self, name: str) -> object:
            if name == "LLM":
                raise ModuleNotFoundError("no torch", name="torch")
            raise AttributeError(name)

    assert missing_names(Module(), ["LLM", "gone", "here"]) == ["gone"]


def test_the_order_is_the_one_that_ruff_asks_for() -> None:
    assert in_order(["plan", "SpecError", "LLM", "BudgetError"]) == ["LLM", "BudgetError", "SpecError", "plan"]
