"""Importing kvfolio and asking for help is quick because neither loads torch, where torch is installed."""

import os
import subprocess
import sys

import pytest
from rules import SRC

HEAVY = ("torch", "numpy", "transformers")


def loaded_after(code: str) -> set[str]:
    """Which heavy packages a fresh interpreter has loaded after ``code``."""
    path = os.pathsep.join([str(SRC), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys\nprint('loaded:', *(set({HEAVY}) & set(sys.modules)))"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.rpartition("loaded:")[2].split())


def test_importing_kvfolio_does_not_load_torch() -> None:
    assert loaded_after("import kvfolio") == set()


def test_asking_for_help_does_not_load_torch() -> None:
    code = """
from typer.testing import CliRunner
from kvfolio.cli import make_app
assert CliRunner().invoke(make_app(), ["--help"]).exit_code == 0
"""
    assert loaded_after(code) == set()


def test_a_loaded_package_is_seen() -> None:
    pytest.importorskip("numpy")
    assert loaded_after("import numpy") == {"numpy"}
