"""What README shows of ``kvfolio plan`` is what it prints; a line of … stands for lines left out.

Knows nothing of numbers.
"""

import re
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
BLOCKS = [
    block.split("\n", 1)
    for block in re.findall(r"^```console\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
    if block.startswith("$ kvfolio plan") and not block.split("\n")[1].startswith("$")
]


@pytest.mark.parametrize(("typed", "shown"), BLOCKS, ids=[typed[2:40] for typed, _ in BLOCKS])
def test_the_output_in_the_readme_is_what_comes_out(
    typed: str, shown: str, cli: Callable[..., tuple[int, str, str]]
) -> None:
    status, out, _ = cli(*shlex.split(typed.removeprefix("$ kvfolio "), comments=True))
    assert status == 0
    lines = iter(line.rstrip() for line in out.splitlines())
    for line in shown.rstrip().splitlines():
        assert line == "…" or line in lines, line  # in this order: an iterator goes on where it stopped


def test_the_readme_shows_a_plan_and_a_ladder() -> None:
    assert len(BLOCKS) >= 2
