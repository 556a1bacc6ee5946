"""The machine's profile: every rate is plausible, memory respects the container, and what is written can be read."""

import json
from pathlib import Path

import pytest
import torch

from kvfolio.kernels import profile
from kvfolio.kernels.profile import (
    MachineProfile,
    cpu_name,
    host_memory_bytes,
    machine_identity,
    measure_machine,
    profile_record,
    read_bandwidth,
    write_profile,
)
from kvfolio.planner import hardware

GIB = 1 << 30
MEASURED = MachineProfile(
    name="AMD EPYC 9654",
    device="cpu",
    identity="AMD EPYC 9654, 96 cores",
    num_threads=96,
    memory_bytes=64 * GIB,
    bandwidth_bytes_per_s=400 * 10**9,
    copy_bytes_per_s=150 * 10**9,
    bf16_product_flops=6e12,
    f32_product_flops=4e12,
    product_side=4096,
    measured_at="2026-05-04",
)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sizes: the tests ask whether it is measured, not how exactly."""
    monkeypatch.setattr(profile, "READ_BYTES", 8 << 20)
    monkeypatch.setattr(profile, "PRODUCT_SIDES", (64, 128))
    monkeypatch.setattr(profile, "PRODUCT_S", 0.01)


@pytest.mark.usefixtures("quick")
@pytest.mark.skipif(torch.cuda.is_available(), reason="measures the GPU here")
def test_every_rate_of_the_processor_is_measured() -> None:
    measured = measure_machine()
    assert (measured.name, measured.device, measured.identity) == (cpu_name(), "cpu", machine_identity())
    assert measured.num_threads == torch.get_num_threads()
    assert 1e8 < measured.copy_bytes_per_s < 1e13
    assert 1e8 < measured.bandwidth_bytes_per_s < 1e13
    assert 1e7 < measured.bf16_product_flops < 1e16
    assert 1e8 < measured.f32_product_flops < 1e16
    assert measured.bf16_flops == max(measured.bf16_product_flops, measured.f32_product_flops)


@pytest.mark.usefixtures("quick")
def test_measuring_changes_nothing_that_is_sampled_afterwards() -> None:
    torch.manual_seed(7)
    expected = torch.rand(4)
    torch.manual_seed(7)
    measure_machine()
    assert torch.equal(torch.rand(4), expected)


def test_a_rate_is_bytes_by_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    # One pass takes half a second by this clock, whatever it really takes.
    monkeypatch.setattr(profile, "_seconds", lambda device, work: 0.5)
    assert profile._copy_bandwidth(torch.device("cpu"), 1 << 20) == (1 << 20) / 0.5
    monkeypatch.setattr(profile, "PRODUCT_S", 0)
    assert profile._product_flops(torch.device("cpu"), torch.float32) == (2 * 512**3 / 0.5, 512)


def test_a_quick_machine_is_given_larger_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile, "PRODUCT_SIDES", (8, 16, 32))
    monkeypatch.setattr(profile, "PRODUCT_S", 0)
    monkeypatch.setattr(profile, "_seconds", lambda device, work: 1e-6)
    assert profile._product_flops(torch.device("cpu"), torch.float32)[1] == 32


def test_the_bandwidth_can_be_measured_without_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "kvfolio.kernels.native", None)  # importing it fails, as without a compiler
    assert read_bandwidth(torch.device("cpu"), repeats=1, num_bytes=1 << 20) > 1e7


def test_memory_is_that_of_the_container_where_that_is_less(tmp_path: Path) -> None:
    machine = host_memory_bytes(limits=())
    assert machine is not None
    limit = tmp_path / "memory.max"
    limit.write_text(f"{64 << 20}\n")
    assert host_memory_bytes((limit,)) == 64 << 20
    for no_limit in ("max\n", f"{machine * 2}\n"):
        limit.write_text(no_limit)
        assert host_memory_bytes((limit, tmp_path / "missing")) == machine


def test_what_is_written_can_be_read_by_the_planner(tmp_path: Path) -> None:
    path = tmp_path / "cache" / "machine.json"
    write_profile(MEASURED, path)
    device = hardware.device_from_profile(path)
    assert (device.name, device.vendor, device.memory_bytes) == ("AMD EPYC 9654", "AMD", 64 * GIB)
    assert (device.bandwidth_bytes_per_s, device.bf16_flops) == (400 * 10**9, 6e12)
    assert json.loads(path.read_text()) == profile_record(MEASURED)
    assert [each.name for each in path.parent.iterdir()] == ["machine.json"]  # and no half file beside it


def test_writer_and_reader_speak_of_the_same_version() -> None:
    assert profile.PROFILE_VERSION == hardware.PROFILE_VERSION


def test_a_folder_that_cannot_be_made_is_an_os_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        write_profile(MEASURED, tmp_path / "file" / "machine.json")


def test_measuring_what_preemption_reckons_with_changes_nobodys_draws() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    copy_bytes_per_s, flops_per_s = profile.copy_and_product_rates(torch.device("cpu"))
    assert copy_bytes_per_s > 0 < flops_per_s
    assert torch.equal(torch.get_rng_state(), before)
