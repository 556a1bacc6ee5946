"""kvfolio check on a tiny model: the table, its JSON, the plot, the choice, and refusals before any work.

Knows nothing of how quality is measured.
"""

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from kvfolio.cli.check import COLUMNS, _percent
from kvfolio.cli.check import check as verb

if TYPE_CHECKING:
    from tiny import TinyModel

Run = Callable[..., tuple[int, str, str]]  # the fixture cli of conftest.py
QUICK = ("--tokens", 200, "--skip", 64, "--chunk", 40, "--no-needle", "--no-speed")


@pytest.fixture
def folder(served_model: "Callable[[str], TinyModel]") -> Path:
    return served_model("llama").folder


def test_the_table_has_a_row_for_each_format_and_ends_with_the_choice(cli: Run, folder: Path) -> None:
    words = ("--tokens", 200, "--skip", 64, "--chunk", 40, "--needle-tokens", 30)
    long = "bf16/int8@32@kv_layers=0=exact+2=int8@sink_blocks=1"
    status, out, err = cli("check", folder, "--formats", f"int8,{long}", "--max-kld", 1, *words)
    assert status == 0, err
    lines = out.splitlines()
    (head,) = (line for line in lines if line.startswith("format"))
    assert all(column in head for column in COLUMNS)
    rows = {
        line.split()[0]: line.split() for line in lines if line.startswith(("f32 (exact)", "int8 ", "bf16/int8@32"))
    }
    assert rows.keys() == {"f32", "int8", long}  # nothing is cut, however wide that makes the table
    assert "…" not in out
    assert rows["int8"][2] == "240"
    assert rows["int8"][7].endswith("/5")
    assert "noise floor (the exact cache in chunks of 25): mean KLD" in out
    assert lines[-1].startswith("smallest format with mean KLD <= 1: int8 (")
    assert "noise floor" in err  # a line for each measurement
    assert "int8: speed" in err


def test_json_has_the_stable_keys_and_nothing_else_is_printed(cli: Run, folder: Path) -> None:
    status, out, err = cli("check", folder, "--formats", "int8,bf16", *QUICK, "--json", "--max-kld", 1)
    assert (status, err) == (0, "")
    answer = json.loads(out)
    keys = "model dtype num_tokens skip chunk noise_chunk max_kld needle_tokens reference noise rows front chosen"
    assert answer.keys() == set(keys.split())
    assert answer["chosen"] == "int8"
    assert answer["front"] == ["int8", "bf16"]
    row = answer["rows"][0]
    keys = "name kv_format size quality recall num_answers_like_exact speed failure"
    assert row.keys() == set(keys.split())
    assert row["size"].keys() == {"num_bytes", "bits", "bytes_per_token", "block_tokens"}
    keys = "perplexity reference_perplexity mean_kld p99_kld top1 num_positions"
    assert row["quality"].keys() == answer["noise"].keys() == set(keys.split())
    assert row["recall"] is row["speed"] is None


def test_where_no_format_is_within_the_limit_the_closest_is_named_and_the_status_is_1(cli: Run, folder: Path) -> None:
    status, out, _ = cli("check", folder, "--formats", "int8,bf16", *QUICK, "--max-kld", "1e-9")
    assert status == 1
    assert out.splitlines()[-1].startswith("no format has mean KLD <= 1e-09: the closest is bf16 with ")
    status, out, _ = cli("check", folder, "--formats", "int8", *QUICK, "--max-kld", "1e-9", "--json")
    assert (status, json.loads(out)["chosen"]) == (1, None)


def test_text_plot_and_records_are_files(cli: Run, folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("\ufeffThe ledger knows who holds which block. " * 8)
    words = ("check", folder, "--text", text, "--formats", "int8", *QUICK, "--html", tmp_path / "check.html")
    status, out, err = cli(*words, "--resume", tmp_path / "check.jsonl", "--max-kld", 1)
    assert status == 0, err
    page = (tmp_path / "check.html").read_text()
    assert "<svg" in page and "smallest format with mean KLD" in page
    for name in ("needle", "tokens/s"):  # not asked for: no column of dashes
        assert name not in out and name not in page
    again, same, err = cli(*words, "--resume", tmp_path / "check.jsonl", "--max-kld", 1)
    assert (again, same) == (0, out)
    assert "quality" not in err  # nothing was measured
    assert sorted(path.name for path in tmp_path.iterdir()) == ["check.html", "check.jsonl", "text.txt"]


def test_a_png_is_written(cli: Run, folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    status, _, err = cli("check", folder, "--formats", "int8", *QUICK, "--png", tmp_path / "a.png", "--max-kld", 1)
    assert status == 0, err
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--formats", "int7"), "int7"),
        (("--formats", ""), "names no format"),
        (("--text", "missing.txt"), "missing.txt cannot be read"),
        (("--text", "binary.txt"), "binary.txt cannot be read"),
        (("--text", "empty.txt"), "the text is empty"),
        (("--html", "missing/check.html"), "cannot be written"),
        (("--html", "."), "cannot be written: it is a folder"),
        (("--resume", "missing/check.jsonl"), "cannot hold measurements"),
        (("--resume", "prose.txt"), "holds no measurements"),
        (("--max-kld", "nan"), "max_kld"),
        (("--html", "new.x", "--resume", "new.x"), "name one file twice"),
        (("--tokens", 100000), "the model reads 512"),
        (("--chunk", 0), "chunk"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_2(
    words: tuple[object, ...], said: str, cli: Run, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\xfa")
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "prose.txt").write_text("once upon a time\n")
    status, out, err = cli("check", folder, *QUICK, *words)
    assert (status, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1


def test_the_defaults_of_the_verb_are_those_of_the_engine() -> None:
    from kvfolio.engine.check_options import CheckOptions

    defaults = {name: one.default for name, one in inspect.signature(verb).parameters.items()}
    options = CheckOptions()
    for name in ("tokens", "max_kld", "skip", "chunk", "needle_tokens", "device", "threads"):
        assert defaults[name] == getattr(options, name), name


@pytest.mark.parametrize(
    ("share", "text"), [(1.0, "100.00%"), (0.5, "50.00%"), (0.9999, "99.99%"), (0.99999, "99.9990%")]
)
def test_less_than_all_is_never_printed_as_all(share: float, text: str) -> None:
    assert _percent(share) == text


def test_no_cell_of_the_table_is_cut_however_long_its_names_are(cli: Run, folder: Path) -> None:
    formats = "int8-channel/int8-rotated,int8@kv_layers=0-1=exact@sink_blocks=1"
    words = ("--tokens", 200, "--skip", 64, "--chunk", 40, "--needle-tokens", 30)
    status, out, err = cli("check", folder, "--formats", formats, *words, "--max-kld", 1)
    assert status == 0, err
    assert "…" not in out
    (head,) = (line for line in out.splitlines() if line.startswith("format"))
    assert all(column in head for column in COLUMNS)
    assert all(any(line.startswith(f"{name} ") for line in out.splitlines()) for name in formats.split(","))


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--threads", 0), "threads is 0; accepted"),
        (("--threads", 100000), "threads is 100000; accepted"),
        (("--max-kld", "inf"), "max_kld is inf; accepted"),
    ],
)
def test_numbers_that_the_machine_or_json_cannot_take_are_refused(
    cli: Run, folder: Path, words: tuple[object, ...], expected: str
) -> None:
    status, _, err = cli("check", folder, "--formats", "int8", *QUICK, *words)
    assert status == 2
    assert expected in err
