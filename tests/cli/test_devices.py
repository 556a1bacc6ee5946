"""kvfolio devices: the table in three forms; a machine that is measured once, kept, and again when it is another."""

import csv
import importlib
import importlib.util
import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from kvfolio.errors import OptionError
from kvfolio.kernels import profile
from kvfolio.kernels.profile import MachineProfile
from kvfolio.planner.hardware import devices as known_devices

verb = importlib.import_module("kvfolio.cli.devices")  # the package's own name "devices" is the function
SRC = Path(verb.__file__ or "").parents[2]


def app() -> typer.Typer:
    alone = typer.Typer(pretty_exceptions_enable=False)
    alone.command()(verb.devices)
    return alone


def run(*words: str) -> Result:
    return CliRunner().invoke(app(), list(words))


# ---- the table ------------------------------------------------------------------------------------------------------


def test_the_table_names_both_units_of_memory_and_what_the_driver_shows_of_it() -> None:
    lines = run("h100-sxm").stdout.splitlines()
    assert lines[0].split() == ["device", "GB", "GiB", "driver", "GiB", "GB/s", "bf16", "fp8", "W"]
    assert lines[1].split() == ["h100-sxm", "85.9", "80.0", "79.65", "3350", "989", "1979", "700"]
    assert "GB (10^9 bytes) and GiB (2^30)" in lines[2]
    assert lines[4].startswith("h100-sxm: github:")  # of a few devices the source is shown


def test_all_devices_are_listed_and_a_dash_is_what_is_not_known() -> None:
    result = run()
    rows = [line.split() for line in result.stdout.splitlines()[1:-2]]
    assert [row[0] for row in rows] == [device.name for device in known_devices()]
    assert ["epyc-7003-milan-socket", "-", "-", "-", "204.8", "-", "-", "-"] in rows


def test_the_whole_table_fits_a_terminal_of_80_columns() -> None:
    result = CliRunner(env={"COLUMNS": "80"}).invoke(app(), [])
    assert "…" not in result.stdout
    assert all(len(line.split()) == 8 for line in result.stdout.splitlines()[1:-2])


def test_json_has_these_keys_and_no_others() -> None:
    (device,) = json.loads(run("h100-sxm", "--json").stdout)["devices"]
    assert list(device) == [
        *("name", "vendor", "memory_bytes", "bandwidth_bytes_per_s", "bf16_flops", "fp8_flops", "tdp_w"),
        *("source", "notes", "driver_bytes"),
    ]


def test_json_is_one_object_in_bytes() -> None:
    answer = json.loads(run("h100", "--json").stdout)
    assert [device["name"] for device in answer["devices"]] == ["h100-pcie", "h100-sxm", "h100-nvl"]
    assert answer["devices"][1]["memory_bytes"] == 85899345920
    assert answer["devices"][1]["driver_bytes"] == 85520809984
    assert answer["devices"][1]["bandwidth_bytes_per_s"] == 3350000000000
    assert "profile" not in answer


def test_json_does_not_wait_for_rich_or_torch() -> None:
    code = """
import sys
from kvfolio.cli.devices import devices
devices("h100", False, True, False)
assert not {"rich.table", "rich.console", "torch"} & set(sys.modules)
"""
    environment = {**os.environ, "PYTHONPATH": str(SRC)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["devices"]) == 3


def test_csv_can_be_read_back() -> None:
    rows = list(csv.DictReader(run("nvidia h100", "--csv").stdout.splitlines()))
    assert [row["name"] for row in rows] == ["h100-pcie", "h100-sxm", "h100-nvl"]
    assert (rows[1]["memory_bytes"], rows[1]["bf16_flops"]) == ("85899345920", "989000000000000")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["abacus"], "'abacus'"),
        (["--json", "--csv"], "choose one"),
        (["h100", "--refresh"], "kvfolio devices this --refresh"),
    ],
)
def test_what_cannot_be_answered_is_refused(words: list[str], says: str) -> None:
    result = run(*words)
    assert isinstance(result.exception, OptionError)
    assert says in str(result.exception)


# ---- this machine ---------------------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """A machine that is measured in no time; the identities it was measured under, in order."""
    calls: list[str] = []

    def measure(identity: str) -> MachineProfile:
        calls.append(identity)
        rate = 10**9 * len(calls)  # every time another
        return MachineProfile(
            "Test CPU",
            "cpu",
            identity,
            2,
            1 << 34,
            rate,
            rate // 2,
            1e11,
            2e11,
            product_side=512,
            measured_at="2026-05-04",
        )

    monkeypatch.setattr(profile, "measure_machine", measure)
    monkeypatch.setattr(profile, "machine_identity", lambda: "Test CPU, 2 cores")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(verb, "_has_torch", lambda: True)
    return calls


def test_this_machine_is_measured_once_and_kept(
    measured: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    device = verb.this_device()
    assert "measuring" in capsys.readouterr().err
    assert (tmp_path / "kvfolio" / "machine.json").is_file()
    assert verb.this_device() == verb.device_of(" This ") == device
    assert measured == ["Test CPU, 2 cores"]
    assert (device.bandwidth_bytes_per_s, device.bf16_flops) == (10**9, 2e11)


def test_a_name_is_looked_up_and_no_name_is_no_device() -> None:
    assert verb.device_of("H100 SXM").name == "h100-sxm"
    assert verb.device_of(None) is None
    with pytest.raises(OptionError, match="unknown device"):
        verb.device_of("abacus")


def test_a_kept_profile_is_used_with_a_word_on_its_date(
    measured: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    verb.this_device()
    assert "as measured on" not in capsys.readouterr().err  # just now
    verb.this_device()
    captured = capsys.readouterr()
    assert captured.err == "this machine as measured on 2026-05-04; again: kvfolio devices this --refresh\n"
    assert captured.out == ""  # where a plan's JSON goes
    run("this")
    verb.this_device(refresh=True)
    assert "as measured on" not in capsys.readouterr().err


def test_a_refresh_measures_again(measured: list[str]) -> None:
    verb.this_device()
    assert verb.this_device(refresh=True).bandwidth_bytes_per_s == 2 * 10**9
    assert verb.this_device().bandwidth_bytes_per_s == 2 * 10**9


def test_another_processor_or_number_of_threads_is_measured_again(
    measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    verb.this_device()
    monkeypatch.setattr(profile, "machine_identity", lambda: "Test CPU, 4 cores")
    verb.this_device()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    verb.this_device()
    assert measured == ["Test CPU, 2 cores", "Test CPU, 4 cores", "Test CPU, 4 cores, OMP_NUM_THREADS=1"]


@pytest.mark.parametrize("content", ["{", "[]", '{"kvfolio_machine_profile": 0}', "\udcff"])
def test_a_kept_profile_that_cannot_be_used_is_measured_again(
    measured: list[str], tmp_path: Path, content: str
) -> None:
    path = tmp_path / "kvfolio" / "machine.json"
    path.parent.mkdir()
    path.write_bytes(content.encode(errors="surrogateescape"))
    verb.this_device()
    assert len(measured) == 1
    assert json.loads(path.read_text())["name"] == "Test CPU"


def test_a_cache_folder_that_cannot_be_written_is_a_warning_only(
    measured: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "kvfolio").write_text("a file where the folder would be")
    with caplog.at_level(logging.WARNING):
        assert verb.this_device().bandwidth_bytes_per_s == 10**9
    assert "could not be kept" in caplog.text


def test_without_torch_a_kept_profile_is_used_and_a_missing_one_says_what_to_do(
    measured: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verb, "_has_torch", lambda: False)
    with pytest.raises(OptionError, match=r"pip install 'kvfolio\[run\]'.*by hand"):
        verb.this_device()
    assert measured == []
    monkeypatch.setattr(verb, "_has_torch", lambda: True)
    verb.this_device()
    monkeypatch.setattr(verb, "_has_torch", lambda: False)
    assert verb.this_device().name == "Test CPU"


@pytest.mark.parametrize("folder", ["", "relative"])
def test_a_cache_folder_that_is_not_absolute_is_ignored(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, folder: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert verb._profile_path() == tmp_path / ".cache" / "kvfolio" / "machine.json"


def test_the_verb_shows_this_machine_and_how_it_was_measured(measured: list[str]) -> None:
    result = run("this")
    assert result.exit_code == 0, result.exception
    assert "Test CPU" in result.stdout
    for row in ("measured", "read", "copy", "products", "kept in"):
        assert any(line.startswith(row) for line in result.stdout.splitlines())
    answer = json.loads(run("this", "--json").stdout)
    assert answer["devices"][0]["name"] == answer["profile"]["name"] == "Test CPU"
    assert answer["profile"]["copy_bytes_per_s"] == 5 * 10**8
    assert len(measured) == 1


def test_torch_is_looked_for_without_loading_it() -> None:
    assert verb._has_torch() == (importlib.util.find_spec("torch") is not None)
