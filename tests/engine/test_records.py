"""The file of finished measurements: what was written is found, what is damaged is not, other files stay.

Knows nothing of what is measured.
"""

import json
import math
from pathlib import Path

import pytest

from kvfolio import OptionError
from kvfolio.engine.records import Records

KEY = {"what": "quality", "candidate": {"kv_format": "int8"}}
ONE, TWO, THREE = ({"top1": number} for number in (1, 2, 3))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "check.jsonl"


def test_what_was_added_is_found_under_an_equal_key_and_no_other(path: Path) -> None:
    Records(path).add(KEY, {"mean_kld": 0.1 + 0.2, "perplexity": math.inf})
    found = Records(path)
    assert found.find(dict(reversed(KEY.items()))) == {"mean_kld": 0.1 + 0.2, "perplexity": math.inf}
    assert found.find(KEY | {"skip": 1}) is None
    assert (len(found), found.has(KEY), found.has({})) == (1, True, False)


def test_without_a_file_results_last_as_long_as_the_object() -> None:
    records = Records()
    records.add(KEY, ONE)
    assert records.find(KEY) == ONE
    assert Records().find(KEY) is None


def test_a_line_that_is_cut_costs_itself_alone(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    records = Records(path)
    records.add(KEY, ONE)
    records.add({}, TWO)
    path.write_bytes(path.read_bytes()[:-9])
    records = Records(path)
    assert "line 2 is damaged" in caplog.text
    assert (records.find(KEY), records.find({})) == (ONE, None)
    records.add({}, THREE)
    again = Records(path)
    assert (again.find(KEY), again.find({})) == (ONE, THREE)


def test_a_file_that_is_one_cut_line_is_ours_all_the_same(path: Path) -> None:
    Records(path).add(KEY, ONE)
    whole = path.read_bytes()
    for num_bytes in (5, len(whole) // 2):
        path.write_bytes(whole[:num_bytes])
        records = Records(path)
        assert not records.has(KEY)
        records.add(KEY, TWO)
        assert Records(path).find(KEY) == TWO


def test_results_of_another_version_are_not_used(path: Path) -> None:
    path.write_text(json.dumps({"kvfolio_check": 0, "key": KEY, "result": ONE}) + "\n")
    assert Records(path).find(KEY) is None


@pytest.mark.parametrize("content", [b"some prose\n", b'{"prompt": "hello"}\n[1]\n', b"\xff\xfe\x00", b"3\n"])
def test_somebody_elses_file_is_refused_and_left_as_it_was(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(OptionError, match="holds no measurements"):
        Records(path)
    assert path.read_bytes() == content


@pytest.mark.parametrize("name", [".", "missing/check.jsonl", "a\0b"])
def test_a_file_that_cannot_be_written_is_refused_at_once(name: str, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="cannot hold measurements"):
        Records(tmp_path / name)


def test_a_file_that_can_no_longer_be_written_is_an_error_that_says_so(path: Path) -> None:
    records = Records(path)
    path.unlink()
    path.mkdir()
    with pytest.raises(OptionError, match="cannot be written"):
        records.add(KEY, ONE)
