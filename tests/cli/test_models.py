"""kvfolio models: the table and its JSON, what a word finds, and how layers are put into words.

Knows nothing of the numbers in the catalogue beyond a few published ones.
"""

import json
import subprocess
import sys
from io import StringIO

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

import kvfolio
from kvfolio.cli.models import attention_words, model_table, models
from kvfolio.errors import UnknownModelError
from kvfolio.spec.catalogue import catalogue, find_entry, spec_of_entry


def run(*words: str) -> str:
    app = typer.Typer()
    app.command()(models)
    result = CliRunner().invoke(app, list(words))
    if result.exception is not None:
        raise result.exception
    return result.stdout


def test_every_model_of_the_catalogue_has_a_row() -> None:
    rows = {line.split()[0] for line in run().splitlines() if line.strip()}
    assert set(catalogue()) <= rows


def test_a_row_says_size_layers_cache_and_context() -> None:
    row = next(line for line in run("llama-3.1-8b").splitlines() if "llama" in line)
    assert row.split() == ["llama-3.1-8b", "8.03", "B", "8.03", "B", "32", "32", "full", "128.00", "KiB", "131,072"]


def test_a_narrow_terminal_cuts_neither_names_nor_numbers() -> None:
    specs = [spec_of_entry(entry) for entry in catalogue().values()]
    text = StringIO()
    Console(width=80, file=text).print(model_table(specs, 80))
    assert "…" not in text.getvalue()
    assert all(f"{spec.name} " in text.getvalue() for spec in specs)
    assert "1,048,576" in text.getvalue()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("deepseek-v3", "61 MLA"),
        ("deepseek-v3.2", "61 indexed MLA"),
        ("deepseek-v4-flash", "21 compressed 1/4 · 20 compressed 1/128 · 2 window 128"),
        ("gemma-3-27b", "52 window 1,024 · 10 full"),
        ("llama-3.2-11b-vision", "32 full · 8 cross"),
        ("llama-4-scout", "36 chunk 8,192 · 12 full"),
        ("mamba-2.8b", "64 mamba"),
        ("falcon-h1-0.5b", "36 full+mamba2"),
        ("qwen3-next-80b-a3b", "36 gated delta net · 12 full"),
    ],
)
def test_layers_are_put_into_words(name: str, words: str) -> None:
    entry = find_entry(name)
    assert entry is not None
    assert attention_words(spec_of_entry(entry)) == words


def test_every_kind_of_layer_in_the_catalogue_has_a_word() -> None:
    for entry in catalogue().values():
        words = attention_words(spec_of_entry(entry))
        assert sum(int(part.split()[0]) for part in words.split(" · ")) == len(spec_of_entry(entry).layers)


def test_json_is_one_object_with_stable_keys() -> None:
    answer = json.loads(run("Llama-3.1-8B", "--json"))
    (model,) = answer["models"]
    assert model["name"] == "llama-3.1-8b"
    assert list(model) == [
        *("name", "repo", "aliases", "num_parameters", "num_active_parameters", "weights_bytes", "num_layers"),
        *("attention", "bytes_per_token", "bytes_fixed", "max_context", "source", "assumptions"),
    ]
    assert (model["num_parameters"], model["weights_bytes"], model["num_layers"]) == (8_030_261_248, 16_060_522_496, 32)
    assert (model["bytes_per_token"], model["bytes_fixed"], model["max_context"]) == (131_072, 0, 131_072)
    assert len(json.loads(run("--json"))["models"]) == len(catalogue())


@pytest.mark.parametrize("name", ["gemma-3-27b", "deepseek-v3.2", "qwen3-next-80b-a3b"])
def test_what_a_plan_says_too_is_called_as_it_is_there_and_is_the_same(name: str) -> None:
    (model,) = json.loads(run(name, "--json"))["models"]
    planned = kvfolio.plan(name)
    shared = (planned, planned.model, planned.kv)
    sizes = ("weights_bytes", "bytes_per_token", "bytes_fixed")
    for key in ("num_parameters", "num_active_parameters", "max_context", *sizes):
        (value,) = [getattr(part, key) for part in shared if hasattr(part, key)]
        assert model[key] == value, key


def test_a_text_finds_names_and_hub_ids_in_any_case() -> None:
    def found(text: str) -> set[str]:
        return {model["name"] for model in json.loads(run(text, "--json"))["models"]}

    assert found("MIXTRAL") == {"mixtral-8x7b", "mixtral-8x22b"}
    assert found("state-spaces/") == {"mamba-2.8b"}


def test_a_text_that_finds_nothing_is_answered_with_the_nearest_names() -> None:
    with pytest.raises(
        UnknownModelError, match=r"no model of the catalogue has 'mixtrall' in its name; nearest: mixtral"
    ):
        run("mixtrall")


def test_json_needs_no_table() -> None:
    code = (
        "import sys; before = set(sys.modules); from kvfolio.cli.models import models; models('gpt2', True); "
        "print('rich.table' in set(sys.modules) - before)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.splitlines()[-1] == "False"
