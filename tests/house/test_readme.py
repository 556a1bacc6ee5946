"""What README shows can be typed: verbs, options and make targets exist, Python compiles, no verb is left out."""

import importlib
import re
import shlex
from collections.abc import Iterator
from typing import Any

import pytest
from rules import ROOT

_FENCE = re.compile(r"^```(\w+)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)
_OPERATORS = {"|", "||", "&", "&&", ";", ">", ">>", "<"}
Verbs = dict[str, set[str]]  # verb → its options; "" → the options before any verb


def fences(text: str, *languages: str) -> list[str]:
    """The fenced blocks of ``text`` in one of ``languages``."""
    return [body for language, body in _FENCE.findall(text) if language in languages]


def typed_commands(text: str) -> Iterator[list[str]]:
    """The words of each ``kvfolio`` or ``make`` command in the console and bash fences of ``text``.

    In a fence with prompts only the lines behind ``$`` are commands, the rest is what was printed.
    """
    for body in fences(text, "console", "bash"):
        lines = body.replace("\\\n", " ").splitlines()
        if any(line.startswith("$ ") for line in lines):
            lines = [line[2:] for line in lines if line.startswith("$ ")]
        for line in lines:
            lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
            lexer.whitespace_split = True
            words: list[str] = []
            for word in [*lexer, ";"]:
                if word not in _OPERATORS:
                    words.append(word)
                    continue
                if words and words[0].rpartition("/")[2] in {"kvfolio", "make"}:
                    yield [words[0].rpartition("/")[2], *words[1:]]
                words = []


def command_violations(words: list[str], verbs: Verbs, targets: set[str]) -> list[str]:
    """What is wrong with one typed command: an unknown verb, option or target."""
    typed = " ".join(words)
    if words[0] == "make":
        goals = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
        return [f"{typed}: no target {goal}" for goal in goals if goal not in targets]
    verb = next((word for word in words[1:] if not word.startswith("-")), "")
    if verb not in verbs:
        return [f"{typed}: no verb {verb}"]
    given = [word.partition("=")[0] for word in words[1:] if re.match(r"--?[A-Za-z]", word)]
    return [f"{typed}: no option {option}" for option in given if option not in verbs[verb] | verbs[""]]


def known_verbs() -> Verbs:
    """Every verb of the CLI and its options."""
    return verbs_of(importlib.import_module("kvfolio.cli").make_app())


def verbs_of(app: Any) -> Verbs:
    command = importlib.import_module("typer.main").get_command(app)

    def options(one: Any) -> set[str]:
        return {"--help"} | {name for param in one.params for name in (*param.opts, *param.secondary_opts)}

    return {"": options(command)} | {verb: options(one) for verb, one in command.commands.items()}


def known_targets() -> set[str]:
    return set(re.findall(r"^([a-z][\w-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


@pytest.fixture
def readme() -> str:
    path = ROOT / "README.md"
    if not path.is_file():
        pytest.skip("no README.md yet")
    return path.read_text()


def test_every_command_in_the_readme_can_be_typed(readme: str) -> None:
    commands = list(typed_commands(readme))
    assert commands
    verbs, targets = known_verbs(), known_targets()
    found = [line for words in commands for line in command_violations(words, verbs, targets)]
    assert not found, "\n".join(found)


def test_every_verb_is_in_the_readme(readme: str) -> None:
    assert [verb for verb in known_verbs() if not re.search(rf"\bkvfolio {verb}\b", readme)] == []


def test_every_python_example_in_the_readme_compiles(readme: str) -> None:
    examples = fences(readme, "python", "py")
    assert examples
    for number, body in enumerate(examples, start=1):
        compile(body, f"README.md, Python example {number}", "exec")


def test_every_benchmark_in_the_readme_is_a_file(readme: str) -> None:
    named = set(re.findall(r"\bbenchmarks/[\w/]+\.py\b", readme))
    assert named
    assert sorted(name for name in named if not (ROOT / name).is_file()) == []


def test_the_shown_verbs_exist() -> None:
    assert {"run", "compare"} <= set(known_verbs())


EXAMPLE = """
```console
$ .venv/bin/kvfolio run --prompt "a | b" \\
    --tokens=3 | tee out   # a comment
kvfolio says something
$ make test ARGS=-x && kvfolio --version
```
```bash
pip install kvfolio
kvfolio compare
```
"""


def test_commands_are_found_behind_prompts_pipes_and_line_ends() -> None:
    assert list(typed_commands(EXAMPLE)) == [
        ["kvfolio", "run", "--prompt", "a | b", "--tokens=3"],
        ["make", "test", "ARGS=-x"],
        ["kvfolio", "--version"],
        ["kvfolio", "compare"],
    ]


@pytest.mark.parametrize(
    ("typed", "num_wrong"),
    [
        ("kvfolio run --prompt x --tokens=3", 0),
        ("kvfolio run --no-chat -n 3", 0),
        ("kvfolio --help", 0),
        ("kvfolio run --promt x", 1),
        ("kvfolio fly", 1),
        ("make test ARGS=-x", 0),
        ("make tea", 1),
    ],
)
def test_a_command_that_cannot_be_typed_is_seen(typed: str, num_wrong: int) -> None:
    typer = pytest.importorskip("typer")
    app = typer.Typer()

    @app.command()
    def run(
        prompt: str = typer.Option(), tokens: int = typer.Option(1, "--tokens", "-n"), chat: bool = False
    ) -> None: ...

    @app.command()
    def compare() -> None: ...

    assert len(command_violations(shlex.split(typed), verbs_of(app), {"test"})) == num_wrong
