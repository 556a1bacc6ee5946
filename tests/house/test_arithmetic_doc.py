"""docs/arithmetic.md is right: every worked number comes out, every formula has one, every code named in it exists.

Runs the fences marked ``python`` as one doctest, so a later example may use an earlier one's names.
"""

import doctest
import importlib
import re

import pytest
from rules import ROOT

DOCUMENT = ROOT / "docs" / "arithmetic.md"
_FENCE = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def wrong_examples(text: str) -> tuple[str, int]:
    """(what doctest says of the examples that fail, number of examples run)."""
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS, verbose=False)
    names: dict[str, object] = {}
    for fence in _FENCE.finditer(text):
        line = text.count("\n", 0, fence.start(1))
        test = doctest.DocTestParser().get_doctest(fence.group(1), names, "arithmetic.md", str(DOCUMENT), line)
        runner.run(test, out=said.append, clear_globs=False)
        names = test.globs
    return "".join(said), runner.tries


def sections(text: str) -> dict[str, str]:
    """Title → text, of every section of the second level."""
    pieces = re.split(r"^## (.+)$", text, flags=re.MULTILINE)
    return dict(zip(pieces[1::2], pieces[2::2], strict=True))


def named_code(text: str) -> list[str]:
    return sorted(set(re.findall(r"`(kvfolio(?:\.\w+)+)`", text)))


def exists(name: str) -> bool:
    """Whether ``name`` can be reached: a module, then attributes."""
    parts = name.split(".")
    for end in range(len(parts), 1, -1):
        try:
            place: object = importlib.import_module(".".join(parts[:end]))
        except ModuleNotFoundError:
            continue
        for part in parts[end:]:
            if not hasattr(place, part):
                return False
            place = getattr(place, part)
        return True
    return False


def test_every_worked_number_comes_out() -> None:
    said, num_run = wrong_examples(DOCUMENT.read_text())
    assert said == ""
    assert num_run > 40


def test_every_formula_has_a_worked_number() -> None:
    assert [title for title, body in sections(DOCUMENT.read_text()).items() if ">>> " not in body] == []


def test_the_code_named_beside_a_formula_exists() -> None:
    assert [name for name in named_code(DOCUMENT.read_text()) if not exists(name)] == []


def test_a_wrong_number_is_seen() -> None:
    said, num_run = wrong_examples("```python\n>>> x = 2\n```\ntext\n```python\n>>> x + x\n5\n```\n")
    assert num_run == 2
    assert "Expected:\n    5\nGot:\n    4" in said


@pytest.mark.parametrize(("name", "here"), [("kvfolio.errors.SpecError", True), ("kvfolio.errors.Gone", False)])
def test_a_missing_name_is_seen(name: str, here: bool) -> None:
    assert exists(name) is here
