"""The command line on tiny models: stable JSON keys, text and account apart, every error one line and status 2."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tiny import TinyModel

Run = Callable[..., tuple[int, str, str]]  # the fixture cli of conftest.py


@pytest.fixture
def folder(served_model: "Callable[[str], TinyModel]") -> Path:
    return served_model("llama").folder


def test_run_prints_the_text_on_one_stream_and_the_account_on_the_other(cli: Run, folder: Path) -> None:
    status, out, err = cli("run", folder, "--prompt", "hello", "--max-tokens", 8, "--kv-memory", "1MiB", "--raw")
    assert status == 0
    assert out.endswith("\n")
    for row in ("tokens", "cache", "pool", "used", "first token", "decode", "kernels"):
        assert row in err
        assert row not in out
    assert "0 held now" in err


def test_run_json_has_the_stable_keys(cli: Run, folder: Path) -> None:
    status, out, _ = cli("run", folder, "--prompt", "hello", "--max-tokens", 9, "--kv-memory", "1MiB", "--json")
    assert status == 0
    answer = json.loads(out)
    assert {"text", "token_ids", "finish_reason", "usage", "kv", "speed", "reuse", "preemption"} <= answer.keys()
    assert answer["usage"].keys() == {"prompt_tokens", "completion_tokens", "cached_tokens"}
    assert answer["usage"]["completion_tokens"] == len(answer["token_ids"]) <= 9
    assert answer["usage"]["cached_tokens"] == 0
    kv = answer["kv"]
    keys = "bytes_per_token planned_bytes allocated_bytes used_bytes num_blocks num_blocks_used block_tokens layers"
    assert set(keys.split()) <= kv.keys()
    assert {"kind", "num_layers", "num_kv_heads", "head_dim", "window"} <= kv["layers"][0].keys()
    assert kv["planned_bytes"] == kv["allocated_bytes"] <= 1 << 20
    assert 0 < kv["num_blocks_used"] <= kv["num_blocks"]
    assert kv["num_blocks_held"] == 0
    speed = answer["speed"]
    assert {"ttft_s", "decode_tokens_per_s", "limit_tokens_per_s", "bandwidth_bytes_per_s"} <= speed.keys()
    assert speed["ttft_s"] > 0
    assert speed["bandwidth_bytes_per_s"] > 1e8


def test_run_says_how_each_group_of_layers_is_stored(cli: Run, folder: Path) -> None:
    how = ("--kv-format", "int8", "--kv-layers", "1=exact", "--sink-blocks", 2)
    words = ("run", folder, "--prompt", "hello", "--max-tokens", 40, "--kv-memory", "1MiB", "--raw", *how)
    status, out, _ = cli(*words, "--json")
    assert status == 0
    kv = json.loads(out)["kv"]
    assert [(layer["num_layers"], layer["num_sinks"]) for layer in kv["layers"]] == [(2, None), (2, 2), (1, None)]
    dtype = kv["layers"][2]["format"]
    assert [layer["format"] for layer in kv["layers"]] == ["int8", dtype, dtype]
    assert (kv["format"], kv["planned_bytes"]) == (f"int8 + {dtype}", kv["allocated_bytes"])
    assert kv["num_blocks_used"] <= kv["num_blocks"]
    _, _, err = cli(*words)
    assert f", int8, the first 2 blocks in {dtype}, too; 1 full" in err
    assert f"{kv['bytes_per_token']:,} B a token planned" in err


def test_compare_takes_exceptions_too(cli: Run, folder: Path) -> None:
    how = ("--kv-format", "int8", "--kv-layers", "0-1=exact", "--sink-blocks", 1)
    status, out, _ = cli("compare", folder, "--prompt-tokens", 40, "--tokens", 4, "--kv-memory", "1MiB", *how)
    assert status == 0
    assert " + int8, deterministic" in out


def test_a_batch_answers_every_line_in_order_with_its_own_fields(cli: Run, folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "batch.jsonl"
    lines = [{"prompt": "a", "max_tokens": 3}, {"prompt": "b c d"}, {"prompt": "a", "max_tokens": 3, "temperature": 0}]
    prompts.write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    words = ("run", folder, "--prompts", prompts, "--raw", "--max-tokens", 5, "--kv-memory", "1MiB", "--json")
    status, out, _ = cli(*words)
    assert status == 0
    results = json.loads(out)["results"]
    assert [len(result["token_ids"]) <= limit for result, limit in zip(results, (3, 5, 3), strict=True)] == [True] * 3
    assert results[0] == results[2]


def test_compare_finds_the_same_tokens_with_and_without_the_cache(cli: Run, folder: Path) -> None:
    words = ("compare", folder, "--prompt-tokens", 40, "--tokens", 12, "--kv-memory", "1MiB", "--json")
    status, out, _ = cli(*words)
    assert status == 0
    result = json.loads(out)
    assert result["identical"] is True
    assert result["divergence"] is None
    for way in ("with_cache", "without_cache"):
        assert result[way].keys() == {"time_s", "flops", "bytes_read_per_step"}
    assert result["ratio"].keys() == {"time", "flops_decode_only", "flops_with_prefill"}
    # 11 tokens behind 41 … 51 tokens of text: without a cache each costs a pass over all of them
    assert 40 < result["ratio"]["flops_decode_only"] < 52
    assert result["ratio"]["flops_with_prefill"] < result["ratio"]["flops_decode_only"]


def test_compare_shows_both_ways_as_a_table(cli: Run, folder: Path) -> None:
    status, out, _ = cli("compare", folder, "--prompt-tokens", 8, "--tokens", 4, "--kv-memory", "1MiB")
    assert status == 0
    assert "the same tokens" in out
    for word in ("with cache", "without cache", "ratio", "decode only", "FLOPs"):
        assert word in out


MISTAKES = {
    "a path that is not there": (["run", "/no/such/model", "--prompt", "x"], "/no/such/model"),
    "a folder without a config": (["run", "{tmp}", "--prompt", "x"], "config.json"),
    "an empty prompt": (["run", "{model}", "--prompt", ""], "empty"),
    "a blank prompt": (["run", "{model}", "--prompt", " \n"], "empty"),
    "a prompt longer than the context": (["run", "{model}", "--raw", "--prompt", "x" * 3000], "512"),
    "more tokens than the context": (["run", "{model}", "--prompt", "x", "--max-tokens", "100000"], "100,000"),
    "a pool smaller than one block": (["run", "{model}", "--prompt", "x", "--kv-memory", "100"], "one block"),
    "a pool larger than the machine": (["run", "{model}", "--prompt", "x", "--kv-memory", "9000TiB"], "free"),
    "a size without sense": (["run", "{model}", "--prompt", "x", "--kv-memory", "lots"], "'lots'"),
    "a request larger than the pool": (
        ["run", "{model}", "--prompt", "x", "--max-tokens", "400", "--kv-memory", "40KiB", "--block-tokens", "4"],
        "kv_memory",
    ),
    "an unknown format": (["run", "{model}", "--prompt", "x", "--kv-format", "int7"], "int7"),
    "an odd block size": (["run", "{model}", "--prompt", "x", "--block-tokens", "17"], "17"),
    "a device that is not there": (["run", "{model}", "--prompt", "x", "--device", "warp"], "warp"),
    "two kinds of prompts": (["run", "{model}", "--prompt", "x", "--prompts", "y"], "not both"),
    "a missing batch": (["run", "{model}", "--prompts", "/no/such/file"], "/no/such/file"),
    "a bad temperature": (["run", "{model}", "--prompt", "x", "--temperature", "nan"], "temperature"),
    "too few tokens to compare": (["compare", "{model}", "--tokens", "1"], "2"),
    "more text than there is": (["compare", "{model}", "--prompt-tokens", "99999999"], "99,999,999"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_with_the_way_out_and_status_2(
    mistake: str, cli: Run, folder: Path, tmp_path: Path
) -> None:
    words, named = MISTAKES[mistake]
    status, out, err = cli(*(word.format(model=folder, tmp=tmp_path) for word in words))
    assert status == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert named in err


def test_an_unknown_architecture_is_refused_by_name(cli: Run, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}))
    status, _, err = cli("run", tmp_path, "--prompt", "x")
    assert status == 2
    assert "mamba" in err
    assert "llama" in err  # what is known


def test_a_cut_weight_file_and_a_missing_tokenizer_are_named(cli: Run, folder: Path, tmp_path: Path) -> None:
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    status, _, err = cli("run", tmp_path, "--prompt", "x")
    assert status == 2
    assert err.count("\n") == 1
    assert "model.safetensors" in err
    for file in tmp_path.glob("tokenizer*"):
        file.unlink()
    status, _, err = cli("run", tmp_path, "--prompt", "x")
    assert status == 2
    assert err.count("\n") == 1
    assert "tokenizer" in err


@pytest.mark.parametrize(
    "line",
    ["not json", "[]", "{}", '{"prompt": 3}', '{"prompt": "a", "messages": []}', '{"prompt": "a", "best_of": 2}', ""],
)
def test_a_broken_line_of_a_batch_is_named(line: str, cli: Run, folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "batch.jsonl"
    prompts.write_text('{"prompt": "fine"}\n' + line + "\n" if line else "\n")
    status, out, err = cli("run", folder, "--prompts", prompts, "--raw")
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1
    assert ("line 2" if line else "no prompts") in err


def test_a_prompt_may_come_through_a_pipe(folder: Path) -> None:
    command = [sys.executable, "-m", "kvfolio", "run", str(folder), "--raw", "--max-tokens", "4", "--json"]
    done = subprocess.run(
        command, input="hello", capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "100"}
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["usage"]["completion_tokens"] <= 4


def test_a_line_separator_inside_a_prompt_does_not_break_its_line(cli: Run, folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "batch.jsonl"
    prompts.write_text('\ufeff{"prompt": "a\u2028b\u0085c"}\r\n{"prompt": "d"}\r\n', encoding="utf-8")
    status, out, err = cli("run", folder, "--prompts", prompts, "--raw", "--max-tokens", 2, "--json")
    assert status == 0, err
    assert len(json.loads(out)["results"]) == 2


@pytest.mark.parametrize(
    ("line", "options", "named"),
    [
        ('{"prompt": "a", "prompt": "b"}', [], "twice"),
        ("[" * 100_000, [], "JSON"),
        ('{"prompt": "a", "max_tokens": 100000}', [], "100,000"),
        ('{"messages": [{"role": "user", "content": "a"}]}', ["--raw"], "--raw"),
    ],
)
def test_what_a_line_cannot_have_is_refused_with_its_number(
    line: str, options: list[str], named: str, cli: Run, folder: Path, tmp_path: Path
) -> None:
    prompts = tmp_path / "batch.jsonl"
    prompts.write_text('{"prompt": "fine"}\n' + line if options == [] else line)
    status, out, err = cli("run", folder, "--prompts", prompts, *options)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert named in err
    assert "line " in err


def test_a_system_message_goes_before_the_messages_of_a_line(cli: Run, folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "batch.jsonl"
    prompts.write_text('{"messages": [{"role": "user", "content": "a"}]}')
    counts = []
    for options in ([], ["--system", "be brief"]):
        status, out, err = cli("run", folder, "--prompts", prompts, "--max-tokens", 2, "--json", *options)
        assert status == 0, err
        counts.append(json.loads(out)["results"][0]["usage"]["prompt_tokens"])
    assert counts[1] > counts[0]


def test_logprobs_asked_for_in_a_line_are_in_the_answer(cli: Run, folder: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "batch.jsonl"
    prompts.write_text('{"prompt": "a", "logprobs": 2, "max_tokens": 3}\n{"prompt": "a", "max_tokens": 3}')
    status, out, err = cli("run", folder, "--prompts", prompts, "--raw", "--json")
    assert status == 0, err
    first, second = json.loads(out)["results"]
    assert len(first["logprobs"]) == len(first["token_ids"])
    assert [len(top) for top in first["top_logprobs"]] == [2] * len(first["token_ids"])
    assert "logprobs" not in second


def test_a_chat_cannot_be_raw_or_json(cli: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    for option in ("--raw", "--json"):
        status, out, err = cli("run", folder, option)
        assert (status, (out + err).count("\n")) == (2, 1)
        assert option in out + err  # asked for JSON, the refusal is JSON, too


def test_a_full_disk_behind_the_output_is_one_line(folder: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full here")
    command = [sys.executable, "-m", "kvfolio", "run", str(folder), "--raw", "--prompt", "a", "--max-tokens", "4"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "No space left" in done.stderr
