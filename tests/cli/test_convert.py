"""kvfolio convert on a tiny model: the table, its JSON, what it says of quality, and refusals in one line.

Knows nothing of what is written (``tests/models/test_convert.py``).
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tiny import TinyModel

Run = Callable[..., tuple[int, str, str]]  # the fixture cli of conftest.py


@pytest.fixture
def folder(tiny_model: "Callable[[str], TinyModel]") -> Path:
    return tiny_model("llama").folder


def test_the_table_says_what_heads_cost_and_that_joined_ones_need_training(
    cli: Run, folder: Path, tmp_path: Path
) -> None:
    status, out, err = cli("convert", folder, tmp_path / "out", "--kv-heads", 1)
    assert (status, err) == (0, "")
    rows = {line[:18].strip(): line[18:].split() for line in out.splitlines()[1:5]}
    assert rows["key/value heads"] == ["2", "1"]
    assert rows["f32 cache a token"] == ["768", "B", "384", "B"]  # 3 layers, k and v, 16 wide, f32
    assert rows.keys() == {"", "key/value heads", "f32 cache a token", "weights"}
    assert f"wrote {tmp_path / 'out'}\n" in out
    assert "expect no useful answers before the model is trained further (GQA, arXiv 2305.13245: for 5 %" in out


@pytest.mark.parametrize(("number", "said"), [(2, "the weights are the same bytes"), (4, "answers as before")])
def test_without_joined_heads_nothing_is_said_of_training(
    number: int, said: str, cli: Run, folder: Path, tmp_path: Path
) -> None:
    status, out, _ = cli("convert", folder, tmp_path / "out", "--kv-heads", number)
    assert status == 0
    assert said in out
    assert "trained" not in out


def test_json_has_the_stable_keys(cli: Run, folder: Path, tmp_path: Path) -> None:
    status, out, err = cli("convert", folder, tmp_path / "out", "--kv-heads", 1, "--json")
    assert (status, err) == (0, "")
    answer = json.loads(out)
    assert answer.keys() == {"model", "out", "dtype", "num_q_heads", "before", "after", "needs_training"}
    for heads in (answer["before"], answer["after"]):
        assert heads.keys() == {"num_kv_heads", "cache_bytes_per_token", "weights_bytes"}
    assert (answer["out"], answer["needs_training"]) == (str(tmp_path / "out"), True)


def test_a_converted_folder_is_planned_with_its_new_heads(cli: Run, folder: Path, tmp_path: Path) -> None:
    cli("convert", folder, tmp_path / "out", "--kv-heads", 1)
    figures = []
    for place in (folder, tmp_path / "out"):
        status, out, _ = cli("plan", place, "--kv-format", "f32", "--json")
        assert status == 0
        figures.append(json.loads(out)[0]["kv"]["bytes_per_token"])
    assert figures == [768, 384]


def test_what_cannot_be_done_is_one_line_and_status_2(cli: Run, folder: Path, tmp_path: Path) -> None:
    status, out, err = cli("convert", folder, tmp_path / "out", "--kv-heads", 3)
    assert (status, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("error: --kv-heads is 3; ")
    status, out, _ = cli("convert", folder, folder, "--kv-heads", 1, "--json")
    assert (status, json.loads(out)["error"]["kind"]) == (2, "OptionError")
    status, _, err = cli("convert", folder, tmp_path / "out")
    assert status == 2
    assert "--kv-heads" in err
