"""What the tests of the command line share.

Knows nothing of any verb.
"""

import sys
from collections.abc import Callable
from typing import Any

import pytest

from kvfolio.cli import main

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def cli(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs the command line in this process: (exit status, standard output, standard error)."""

    def run(*words: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["kvfolio", *map(str, words)])
        status: Any = 0
        try:
            main()
        except SystemExit as leaving:
            status = leaving.code or 0
        out, err = capsys.readouterr()
        return int(status), out, err

    return run
