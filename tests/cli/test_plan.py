"""kvfolio plan and fleet: stable JSON keys, faces that say the same numbers, refusals in one line, and speed to start.

Knows nothing of how numbers are made.
"""

import csv
import dataclasses
import io
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvfolio
from kvfolio.spec.catalogue import catalogue

Run = Callable[..., tuple[int, str, str]]  # the fixture cli of conftest.py
CARD = ("--device", "h100-sxm", "--device-memory", "80GB", "--utilisation", "1.0", "--weights-bytes", "16.06GB")


def plans(cli: Run, *words: object) -> list[dict[str, Any]]:
    status, out, err = cli("plan", *words, "--json")
    assert (status, err) == (0, "")
    answer: list[dict[str, Any]] = json.loads(out)
    return answer


def test_json_has_the_stable_keys(cli: Run) -> None:
    (plan,) = plans(cli, "llama-3.1-8b", "--context", "4096,131072", *CARD)
    assert plan["model"] == {
        "name": "llama-3.1-8b",
        "model_type": "llama",
        "num_parameters": 8_030_261_248,
        "num_active_parameters": 8_030_261_248,
        "max_context": 131_072,
    }
    assert isinstance(plan["assumptions"], list)
    kv = plan["kv"]
    assert (kv["bytes_per_token"], kv["bytes_fixed"]) == (131_072, 0)
    for key in ("bytes_at", "naive_bytes_at", "reserved_vllm_bytes_at", "kvfolio_bytes_at"):
        assert list(kv[key]) == ["4096", "131072"]
    (layer,) = kv["layers"]
    assert layer["kind"], layer["num_layers"] == ("full", 32)
    assert {"num_kv_heads", "head_dim", "window", "bytes_per_token", "bytes_fixed"} <= layer.keys()
    assert plan["weights_bytes"] == 16_060_000_000
    assert {"name", "memory_bytes", "bandwidth_bytes_per_s", "num_devices"} <= plan["device"].keys()
    assert plan["kv_memory_bytes"] == 80 * 10**9 - 16_060_000_000
    assert plan["users"]["reserved"] == 119
    assert {"time_s", "tokens_per_s_per_user", "tokens_per_s_total", "limit"} <= plan["step"].keys()
    assert plan["flops"]["without_cache_ratio_decode_only"] == 1250.0
    assert {"per_token", "without_cache_ratio_with_prefill"} <= plan["flops"].keys()


def test_several_models_give_one_object_each_in_their_order(cli: Run) -> None:
    names = [plan["model"]["name"] for plan in plans(cli, "deepseek-v3", "llama-3.1-8b", "--context", "4096")]
    assert names == ["deepseek-v3", "llama-3.1-8b"]


def test_csv_says_what_json_says(cli: Run) -> None:
    words = ("mistral-7b-v0.1", "gpt2", "--context", "512,8192", *CARD)
    status, out, _ = cli("plan", *words, "--csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    answer = plans(cli, *words)
    assert status == 0
    assert [(row["model"], int(row["context"]), int(row["bytes"])) for row in rows] == [
        (plan["model"]["name"], context["context"], context["bytes"]) for plan in answer for context in plan["contexts"]
    ]
    assert [row["beyond_model"] for row in rows] == ["0", "0", "0", "1"]


def test_the_table_says_what_a_person_looks_for_first(cli: Run) -> None:
    status, out, err = cli("plan", "llama-3.1-8b", "--context", "4096", *CARD)
    assert (status, err) == (0, "")
    for text in (
        "128.00 KiB a token",
        "512.00 MiB",
        "119",
        "74.51 GiB (80.0 GB)",
        "weights",
        "Change next",
        "1,250.0×",
    ):
        assert text in out
    assert "\x1b" not in out  # no colours into a pipe
    assert "…" not in out  # nothing cut


@pytest.mark.parametrize("words", [("--users", 4), ("--kv-format", "fp8", "--devices", 2, "--mean-tokens", "1k"), CARD])
def test_the_table_ends_with_a_command_that_makes_the_same_plan_again(cli: Run, words: tuple[object, ...]) -> None:
    _, out, _ = cli("plan", "mistral-7b-v0.1", *words)
    again = shlex.split(out.rpartition("Again: kvfolio plan ")[2])
    first, second = plans(cli, "mistral-7b-v0.1", *words)[0], plans(cli, *again)[0]
    first.pop("assumptions"), second.pop("assumptions")  # what was assumed then is stated now
    assert first == second


def test_weights_that_do_not_fit_are_said_with_the_way_out(cli: Run) -> None:
    status, out, _ = cli("plan", "llama-3.1-70b", "--device", "h100-sxm", "--context", "8192")
    assert status == 0
    assert "do not fit" in out
    assert "short by" in out
    assert "--devices 2" in out


def test_models_side_by_side_are_marked_beyond_what_they_read(cli: Run) -> None:
    status, out, _ = cli("plan", "gpt2", "llama-3.1-8b")
    assert status == 0
    row = next(line for line in out.splitlines() if line.startswith("gpt2"))
    assert row.count("*") == 5  # of six contexts it reads 1K
    assert "* more than the model was made to read" in out


def test_the_ladder_is_one_row_each(cli: Run) -> None:
    status, out, _ = cli("plan", "llama-3.1-8b", "--what-if", *CARD)
    assert status == 0
    rows = [line.split()[0] for line in out.splitlines()[2:11]]
    assert rows == ["as", "MHA", "GQA-8", "MQA", "MLA", "bf16", "int8", "int6", "int4"]
    status, out, _ = cli("plan", "llama-3.1-8b", "--what-if", "--json", *CARD)
    assert [row["users"]["reserved"] for row in json.loads(out)[0]["rows"][1:5]] == [29, 119, 952, 423]


def test_a_fleet_in_json_and_in_words(cli: Run) -> None:
    words = ("fleet", "llama-3.1-8b", "--conversations", 20_000, "--kv-memory", "60GiB", "--context", 8192)
    status, out, _ = cli(*words, "--json")
    answer = json.loads(out)
    assert status == 0
    assert (answer["conversations_per_device"], answer["num_devices"]) == (60, 334)
    assert answer["bytes_per_conversation"] == 2**30
    assert isinstance(answer["assumptions"], list)
    status, out, _ = cli(*words)
    assert status == 0
    assert "334 × h100-sxm: 60 conversations" in out


@pytest.mark.parametrize(
    ("words", "kind", "fault"),
    [
        (("plan", "lama-3.1-8b"), "UnknownModelError", "llama-3.1-8b"),
        (("plan", "llama-3.1-8b", "--context", "-1"), "OptionError", "number of tokens"),
        (("plan", "llama-3.1-8b", "--device-memory", "80XB"), "OptionError", "unknown unit 'XB'"),
        (("plan", "llama-3.1-8b", "--users", "many"), "OptionError", "--users"),
        (("plan", "llama-3.1-8b", "--colour"), "OptionError", "No such option"),
        (("plan", "llama-3.1-8b", "--csv", "--what-if"), "OptionError", "at once"),
        (("plan",), "OptionError", "MODEL"),
        (("fleet", "llama-3.1-8b", "--conversations", "0"), "OptionError", "conversations is 0"),
        (("fleet", "llama-3.1-8b", "--conversations", "1", "--kv-memory", "1MB"), "BudgetError", "short by"),
    ],
)
def test_refusals_are_one_line_and_status_2_and_json_when_asked(
    cli: Run, words: tuple[str, ...], kind: str, fault: str
) -> None:
    status, out, err = cli(*words)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert fault in err
    status, out, err = cli(*words, "--json")
    assert (status, err) == (2, "")
    error = json.loads(out)["error"]
    assert error["kind"] == kind
    assert fault in error["message"]


def test_an_encoder_is_refused_with_the_reason(cli: Run, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "bert", "architectures": ["BertForMaskedLM"], "use_cache": True}))
    status, _, err = cli("plan", config)
    assert status == 2
    assert "encoder-only: no KV cache" in err


def test_a_plan_needs_no_torch_and_no_transformers() -> None:
    script = (
        "import sys; sys.modules['torch'] = sys.modules['transformers'] = sys.modules['numpy'] = None\n"
        "sys.argv = ['kvfolio', 'plan', 'llama-3.1-8b', '--context', '4096']\n"
        "from kvfolio.cli import main\nmain()"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "128.00 KiB a token" in done.stdout


def test_every_model_of_the_catalogue_at_twenty_contexts_is_a_moments_work() -> None:
    names = list(catalogue())[:40]
    contexts = tuple(1024 * 2**step // 2 for step in range(20))
    kvfolio.plan(names[0])  # the tables are read once
    started = time.perf_counter()
    for name in names:
        assert len(kvfolio.plan(name, context=contexts).contexts) == 20
    assert time.perf_counter() - started < 10  # a bound for hangs; benchmarks/plan_speed.py measures


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ((), {}),
        (("--mean-tokens", "16k"), {"mean_tokens": 16_384}),
        (("--context", "4k", "--devices", "2"), {"context": 4096, "devices": 2}),
    ],
)
def test_the_command_line_and_python_plan_the_same_fleet(
    cli: Run, words: tuple[str, ...], options: dict[str, Any]
) -> None:
    status, out, _ = cli("fleet", "llama-3.1-8b", "--conversations", 100, *words, "--json")
    assert status == 0
    assert json.loads(out) == json.loads(json.dumps(dataclasses.asdict(kvfolio.fleet("llama-3.1-8b", 100, **options))))


@pytest.mark.parametrize("block_tokens", [4, 8])
def test_blocks_too_small_for_packed_formats_are_planned_like_any_other(
    cli: Run, tmp_path: Path, block_tokens: int
) -> None:
    blocks = ("--block-tokens", block_tokens)
    status, out, err = cli("plan", "llama-3.1-8b", "--context", "4096", *blocks)
    assert status == 0, err
    assert "--kv-format fp8: " in out
    assert "--kv-format int4: " not in out  # the engine would refuse it beside these blocks
    status, out, err = cli("plan", "llama-3.1-8b", "--context", "4096", *blocks, "--what-if")
    assert status == 0, err
    assert "int4" in out
    status, _, err = cli("plan", "llama-3.1-8b", "--context", "4096", *blocks, "--html", tmp_path / "page.html")
    assert status == 0, err
