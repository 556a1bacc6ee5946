"""What README shows of the planning verbs is what they print; a line of … stands for lines left out.

Knows nothing of numbers.
"""

import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
PLANNING = ("plan", "fleet", "models", "devices")  # what they print is the same on every machine


def shown_outputs(text: str) -> Iterator[tuple[str, str]]:
    """Each planning command of the console fences of ``text`` that is followed by output, and that output."""
    for block in re.findall(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        for piece in re.split(r"^\$ ", block, flags=re.MULTILINE)[1:]:
            typed, _, shown = piece.partition("\n")
            verb = typed.removeprefix("kvfolio ").split()[0]
            if typed.startswith("kvfolio ") and verb in PLANNING and shown.strip():
                yield typed, shown.strip("\n")


SHOWN = list(shown_outputs(README))


@pytest.mark.parametrize(("typed", "shown"), SHOWN, ids=[typed[:40] for typed, _ in SHOWN])
def test_the_output_in_the_readme_is_what_comes_out(
    typed: str, shown: str, cli: Callable[..., tuple[int, str, str]]
) -> None:
    status, out, _ = cli(*shlex.split(typed.removeprefix("kvfolio "), comments=True))
    assert status == 0
    lines = iter(line.rstrip() for line in out.splitlines())
    for line in shown.rstrip().splitlines():
        assert line == "…" or line in lines, line  # in this order: an iterator goes on where it stopped


def test_the_readme_shows_a_plan_and_a_ladder() -> None:
    typed = [words for words, _ in SHOWN if words.startswith("kvfolio plan")]
    assert any("--what-if" in words for words in typed)
    assert any("--what-if" not in words for words in typed)


def test_an_output_is_found_behind_any_planning_verb() -> None:
    text = """
```console
$ kvfolio models x   # a comment
$ kvfolio fleet x
one

two
$ kvfolio run
three
```
```console
$ kvfolio devices x
four
```
"""
    assert list(shown_outputs(text)) == [("kvfolio fleet x", "one\n\ntwo"), ("kvfolio devices x", "four")]
