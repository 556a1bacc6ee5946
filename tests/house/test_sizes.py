"""Files, functions and signatures stay small enough to read.

A ceiling is raised in a commit of its own, with the reason.
"""

from rules import (
    MAX_FILE_LINES,
    MAX_FUNCTION_LINES,
    MAX_PARAMETERS,
    ROOT,
    function_violations,
    length_violations,
    module_name,
    native_files,
    python_files,
)


def test_no_file_is_longer_than_the_ceiling() -> None:
    files = [*python_files(), *native_files()]
    found = [line for path in files for line in length_violations(str(path.relative_to(ROOT)), path.read_text())]
    assert not found, "\n".join(found)


def test_no_function_is_longer_or_wider_than_the_ceiling() -> None:
    found = [line for path in python_files() for line in function_violations(module_name(path), path.read_text())]
    assert not found, "\n".join(found)


def test_a_long_file_is_seen() -> None:
    assert length_violations("a.py", "x = 1\n" * MAX_FILE_LINES) == []
    assert len(length_violations("a.py", "x = 1\n" * (MAX_FILE_LINES + 1))) == 1


def test_a_long_function_is_seen_inside_a_class_too() -> None:
    longest = "class A:\n    async def f(self):\n" + "        x = 1\n" * (MAX_FUNCTION_LINES - 1)
    assert function_violations("a", longest) == []
    assert len(function_violations("a", longest + "        x = 1\n")) == 1


def test_a_wide_signature_is_seen_whatever_the_kind_of_its_parameters() -> None:
    names = [f"p{i}" for i in range(MAX_PARAMETERS)]
    widest = f"def f(self, {', '.join(names[:3])}, /, {', '.join(names[3:5])}, *, {', '.join(names[5:])}"
    assert function_violations("a", f"{widest}): pass") == []
    assert len(function_violations("a", f"{widest}, one_more=1): pass")) == 1
    assert len(function_violations("a", f"{widest}, **rest): pass")) == 1


def test_of_a_verb_only_the_body_is_measured() -> None:
    options = ", ".join(f"p{i}" for i in range(MAX_PARAMETERS + 1))
    verb = f"def run({options}):\n" + "    x = 1\n" * MAX_FUNCTION_LINES
    assert function_violations("kvfolio.cli.run", verb) == []
    assert len(function_violations("kvfolio.cli.run", verb + "    x = 1\n")) == 1
    assert len(function_violations("kvfolio.cli.run", verb.replace("run(", "_run("))) == 2
