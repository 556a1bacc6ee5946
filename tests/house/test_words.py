"""Names that say something, files that open with what they do, and a few things that are never written."""

from collections.abc import Callable

import pytest
from rules import (
    ROOT,
    environment_violations,
    global_violations,
    module_name,
    name_violations,
    native_files,
    native_opening_violations,
    opening_violations,
    pickle_violations,
    python_files,
    unfinished_violations,
)

Rule = Callable[[str, str], list[str]]
RULES: list[Rule] = [
    name_violations,
    unfinished_violations,
    opening_violations,
    pickle_violations,
    environment_violations,
    global_violations,
]


@pytest.mark.parametrize("rule", RULES)
def test_the_package_keeps(rule: Rule) -> None:
    found = [line for path in python_files() for line in rule(module_name(path), path.read_text())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("rule", [unfinished_violations, native_opening_violations])
def test_the_native_code_keeps(rule: Rule) -> None:
    found = [line for path in native_files() for line in rule(str(path.relative_to(ROOT)), path.read_text())]
    assert not found, "\n".join(found)


TWO_LINES = '"""Does this.\n\nKnows nothing of that.\n"""\n'


@pytest.mark.parametrize(
    ("rule", "name", "broken", "sound"),
    [
        (name_violations, "kvfolio.cache.blocks", "class BlockManager: ...", "class Block: ..."),
        (name_violations, "kvfolio.cache.blocks", "class KVHandler: ...", "class KVView: ..."),
        (name_violations, "kvfolio.cache.blocks", "class SpecBaseHTTP: ...", "class Basement: ..."),
        (unfinished_violations, "a", "x = 1  # TODO later", "todo = 1"),
        (unfinished_violations, "a", "raise NotImplementedError", "except NotImplementedError: ..."),
        (opening_violations, "a", "x = 1", TWO_LINES),
        (opening_violations, "a", '"""Does this."""', '"""Does this. Knows nothing of that."""'),
        (opening_violations, "kvfolio.cache.__init__", "", '"""Who holds which block."""'),
        (pickle_violations, "a", "def f():\n    import pickle", "import json"),
        (pickle_violations, "a", "from joblib import load", "from json import load"),
        (pickle_violations, "a", "import torch\ntorch.load('x')", "import torch\ntorch.tensor([1])"),
        (pickle_violations, "a", "np.load('x', allow_pickle=True)", "np.load('x')"),
        (environment_violations, "kvfolio.planner.memory", "import os\nos.environ['A']", "import os\nos.cpu_count()"),
        (environment_violations, "kvfolio.planner.memory", "from os import environ", "from os import cpu_count"),
        (environment_violations, "kvfolio.planner.memory", "import os\nos.getenv('A')", "environ = {}"),
        (global_violations, "a", "def f():\n    global x\n    x = 1", "def f():\n    x = 1"),
        (native_opening_violations, "a.cpp", "#include <x>\n// Does this.\n", "// Does this.\n#include <x>"),
        (native_opening_violations, "a.cpp", "", "/* Does this.\n * Knows nothing of that.\n */\n"),
        (native_opening_violations, "a.h", "#pragma once\nint x;", "#pragma once\n// Does this.\nint x;"),
    ],
)
def test_a_broken_rule_is_seen_and_a_kept_one_is_not(rule: Rule, name: str, broken: str, sound: str) -> None:
    assert len(rule(name, broken)) == 1
    assert rule(name, sound) == []


@pytest.mark.parametrize("name", ["kvfolio.cache.utils", "kvfolio.common.blocks", "kvfolio.cache.block_helpers"])
def test_an_empty_word_in_a_path_is_seen(name: str) -> None:
    assert len(name_violations(name, "")) == 1


def test_the_environment_may_be_read_by_the_cli() -> None:
    assert environment_violations("kvfolio.cli", "import os\nos.environ['A']") == []
