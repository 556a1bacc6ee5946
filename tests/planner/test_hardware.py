"""The table of devices is whole and sober, names are found the way people write them, and none is guessed."""

import json
import time
from pathlib import Path

import pytest

from kvfolio.errors import OptionError
from kvfolio.planner.hardware import (
    PROFILE_VERSION,
    Device,
    device_from_profile,
    device_from_record,
    devices,
    find_device,
    search_devices,
)

GIB = 1 << 30


# ---- the table ------------------------------------------------------------------------------------------------------


def test_names_are_canonical_and_no_two_devices_share_one() -> None:
    names = [device.name for device in devices()]
    assert len(names) > 100
    assert all(name == name.lower() and not set(name) & set(" _") for name in names)
    assert len({name.replace("-", "") for name in names}) == len(names)


def test_every_device_is_found_by_its_own_name() -> None:
    for device in devices():
        assert find_device(device.name) == device


def test_every_number_lies_where_hardware_lies() -> None:
    # Catches a wrong power of ten, GB for GB/s, or a rate with sparsity beside one without.
    for device in devices():
        assert device.source, device.name
        assert device.memory_bytes is None or 4 * GIB <= device.memory_bytes <= 1024 * GIB, device.name
        assert device.bandwidth_bytes_per_s is not None, device.name
        assert 30e9 <= device.bandwidth_bytes_per_s <= 30e12, device.name
        assert device.bf16_flops is None or 10e12 <= device.bf16_flops <= 10e15, device.name
        assert device.tdp_w is None or 10 <= device.tdp_w <= 3000, device.name
        if device.fp8_flops is not None:
            assert device.bf16_flops is not None, device.name
            assert 1 <= device.fp8_flops / device.bf16_flops < 4, device.name


@pytest.mark.parametrize(
    ("name", "gib", "bandwidth", "bf16", "fp8"),
    [  # the vendors' product pages; dense
        ("h100-sxm", 80, 3.35e12, 989e12, 1979e12),
        ("h200-sxm", 141, 4.8e12, 989e12, 1979e12),
        ("a100-sxm-80gb", 80, 2.039e12, 312e12, None),
        ("l4", 24, 300e9, 121e12, 242e12),
        ("mi300x", 192, 5.3e12, 1307.4e12, 2614.9e12),
        ("tpu-v7x-ironwood", 192, 7.38e12, 2307e12, 4614e12),
        ("rtx-4090", 24, 1.008e12, 165.2e12, 330.3e12),
        ("apple-m4-pro", 64, 273e9, None, None),
        ("v100-sxm-16gb", 16, 900e9, None, None),
    ],
)
def test_published_numbers(name: str, gib: int, bandwidth: float, bf16: float | None, fp8: float | None) -> None:
    device = find_device(name)
    assert device.memory_bytes == gib * GIB
    assert device.bandwidth_bytes_per_s == bandwidth
    assert (device.bf16_flops, device.fp8_flops) == (bf16, fp8)


@pytest.mark.parametrize(
    ("name", "mib"),
    [
        ("l40s", 46068),
        ("l4", 23034),
        ("a10g", 22731),
        ("t4", 15109),
        ("v100-sxm-32gb", 32510),
        ("a100-sxm-80gb", 81251),
        ("a100-pcie-40gb", 40536),
        ("h100-sxm", 81559),
        ("h200-sxm", 143771),
        ("b200-sxm", 183359),
        ("rtx-5090", 32607),
        ("mi300x", 196592),
    ],
)
def test_what_the_driver_shows(name: str, mib: int) -> None:
    assert find_device(name).driver_bytes == mib << 20


def test_a_driver_never_shows_more_than_there_is_and_the_notes_have_its_figure() -> None:
    shown = [device for device in devices() if device.driver_bytes is not None]
    assert len(shown) > 50
    for device in shown:
        assert device.memory_bytes is not None and device.driver_bytes is not None, device.name
        assert 0.91 * device.memory_bytes < device.driver_bytes <= device.memory_bytes, device.name  # T4: 0.922
        figures = (f"{device.driver_bytes >> 20} MiB", f"{device.driver_bytes} B")
        assert any(figure in device.notes for figure in figures), device.name
        assert any(program in device.notes for program in ("nvidia-smi", "rocm-smi", "torch")), device.name


@pytest.mark.parametrize("name", ["mi250", "mi250x"])
def test_a_card_of_two_gpus_says_so_and_each_of_them_is_half_of_it(name: str) -> None:
    card, half = find_device(name), find_device(f"{name}-gcd")
    for field in ("memory_bytes", "bandwidth_bytes_per_s", "bf16_flops", "tdp_w"):
        assert 2 * getattr(half, field) == getattr(card, field), field
    assert half.source == card.source
    assert half.name in card.notes
    assert card.driver_bytes is None  # no driver shows the card


def test_a_blank_is_unknown_and_not_zero() -> None:
    socket = find_device("epyc-9004-genoa-socket")
    assert (socket.memory_bytes, socket.driver_bytes, socket.bf16_flops, socket.fp8_flops) == (None,) * 4
    assert socket.bandwidth_bytes_per_s == 12 * 4800 * 10**6 * 8  # channels x transfers x bytes


def test_the_table_is_read_in_a_moment() -> None:
    quickest = float("inf")
    for _ in range(5):
        devices.cache_clear()
        started = time.perf_counter()
        devices()
        quickest = min(quickest, time.perf_counter() - started)
    assert quickest < 0.01  # 1.3 ms where it was written; the allowance is for a busy machine


# ---- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "meant"),
    [
        ("h100-sxm", "h100-sxm"),
        ("H100 SXM", "h100-sxm"),
        ("h100_sxm", "h100-sxm"),
        (" h100sxm ", "h100-sxm"),
        ("H100-SXM5-80GB", "h100-sxm"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),  # as torch names it
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("4090", "rtx-4090"),
        ("rtx-4090-24gb", "rtx-4090"),
        ("h20", "h20-96gb"),  # not the H200, whose name begins alike
        ("b200", "b200-sxm"),  # not the GB200
        ("m3", "apple-m3"),
        ("M3 Ultra", "apple-m3-ultra"),
        ("gaudi3", "gaudi3-oam"),
        ("TPU v5e", "tpu-v5e"),
    ],
)
def test_a_device_is_found_the_way_people_write_it(given: str, meant: str) -> None:
    assert find_device(given).name == meant


@pytest.mark.parametrize(
    ("printed", "meant"),
    [  # torch.cuda.get_device_name, nvidia-smi, rocminfo; with dashes: the labels of Kubernetes nodes
        ("Tesla T4", "t4"),
        ("Tesla V100-SXM2-32GB", "v100-sxm-32gb"),
        ("Tesla V100-PCIE-16GB", "v100-pcie-16gb"),
        ("NVIDIA A10G", "a10g"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA RTX A6000", "rtx-a6000"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada"),
        ("NVIDIA A100-PCIE-40GB", "a100-pcie-40gb"),
        ("NVIDIA A100 80GB PCIe", "a100-pcie-80gb"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb"),
        ("NVIDIA H100 80GB HBM3", "h100-sxm"),  # the PCIe card has HBM2e, the NVL 94 GB
        ("NVIDIA-H100-80GB-HBM3", "h100-sxm"),
        ("NVIDIA H100 80GB HBM2e", "h100-pcie"),
        ("NVIDIA H100 PCIe", "h100-pcie"),
        ("NVIDIA H100 NVL", "h100-nvl"),
        ("NVIDIA H20", "h20-96gb"),
        ("NVIDIA H200", "h200-sxm"),
        ("NVIDIA H200 NVL", "h200-nvl"),
        ("NVIDIA GH200 480GB", "gh200-96gb"),
        ("NVIDIA B200", "b200-sxm"),
        ("NVIDIA B300 SXM6 AC", "b300-sxm"),
        ("NVIDIA GB200", "gb200-per-gpu"),
        ("NVIDIA GB10", "gb10-dgx-spark"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000-blackwell-workstation"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "rtx-pro-6000-blackwell-server"),
        ("NVIDIA GeForce RTX 4090", "rtx-4090"),
        ("NVIDIA GeForce RTX 5070 Ti", "rtx-5070-ti"),
        ("AMD Instinct MI210", "mi210"),
        ("AMD Instinct MI300X", "mi300x"),
        ("AMD Instinct MI300X OAM", "mi300x"),
        ("AMD Radeon RX 7900 XTX", "rx-7900-xtx"),
    ],
)
def test_a_device_is_found_by_the_name_that_its_driver_prints(printed: str, meant: str) -> None:
    assert find_device(printed).name == meant


@pytest.mark.parametrize(
    ("given", "candidates"),
    [
        ("h100", ["h100-pcie", "h100-sxm", "h100-nvl"]),
        ("a100-80gb", ["a100-pcie-80gb", "a100-sxm-80gb"]),
        ("mi300", ["mi300a", "mi300x"]),
        ("h200", ["h200-sxm", "h200-nvl"]),  # only the driver's full name says that it is no NVL
        ("AMD Instinct MI250X", ["mi250x", "mi250x-gcd"]),  # a product's name, and what software calls half of it
        ("AMD Instinct MI250X / MI250", ["mi250-gcd", "mi250x-gcd"]),
        ("m4 max", ["apple-m4-max-32c", "apple-m4-max-40c"]),
        ("rtx pro 6000", ["rtx-pro-6000-blackwell-server", "rtx-pro-6000-blackwell-workstation"]),
    ],
)
def test_a_name_that_fits_several_devices_lists_them(given: str, candidates: list[str]) -> None:
    with pytest.raises(OptionError, match="could be") as caught:
        find_device(given)
    assert ", ".join(candidates) in str(caught.value)
    assert "kvfolio devices" in str(caught.value)


def test_a_long_list_of_candidates_is_cut_and_says_so() -> None:
    with pytest.raises(OptionError, match=r" and \d+ more"):
        find_device("max")


@pytest.mark.parametrize(
    ("given", "near"),
    [
        ("h100-sxm-96gb", "h100-sxm"),  # there is one, but not this one
        ("rx 9070", "rx-9070-xt"),  # never the XT
        ("rtx 6000", "rtx-6000-ada"),  # never the Ada
        ("GeForce RTX 4090 Laptop GPU", "rtx-4090"),  # never the desktop's
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "rtx-pro-6000-blackwell-workstation"),
        ("NVIDIA A100-SXM4-80GB MIG 1g.10gb", "a100-sxm-80gb"),  # never a whole one
        ("gaudi4", "gaudi3-oam"),
    ],
)
def test_an_unknown_device_is_refused_with_the_nearest_names(given: str, near: str) -> None:
    with pytest.raises(OptionError, match="unknown device") as caught:
        find_device(given)
    assert near in str(caught.value).partition("nearest: ")[2]
    assert "see: kvfolio devices" in str(caught.value)


@pytest.mark.parametrize("given", ["", "  ", "-", "nvidia", "Tesla", "abacus", "AMD L40S"])
def test_what_names_nothing_is_refused(given: str) -> None:
    with pytest.raises(OptionError, match="see: kvfolio devices"):
        find_device(given)


@pytest.mark.parametrize("given", ["this", " This "])
def test_this_machine_is_not_in_the_table_and_the_refusal_says_who_measures_it(given: str) -> None:
    with pytest.raises(OptionError, match=r"kvfolio plan --device this.*measure_machine.*device_from_profile"):
        find_device(given)


def test_a_search_holds_every_word_and_keeps_the_order_of_the_table() -> None:
    assert [device.name for device in search_devices("H100")] == ["h100-pcie", "h100-sxm", "h100-nvl"]
    assert [device.name for device in search_devices("nvidia h100 sx")] == ["h100-sxm"]
    assert {device.vendor for device in search_devices("google")} == {"Google"}
    assert search_devices("abacus") == ()


# ---- a machine that was measured ------------------------------------------------------------------------------------

RECORD: dict[str, object] = {
    "kvfolio_machine_profile": PROFILE_VERSION,
    "name": "Intel(R) Xeon(R) Processor",
    "device": "cpu",
    "identity": "Intel(R) Xeon(R) Processor, 2 cores",
    "num_threads": 2,
    "memory_bytes": 24 * GIB,
    "bandwidth_bytes_per_s": 12_000_000_000,
    "copy_bytes_per_s": 6_000_000_000,
    "bf16_product_flops": 8e10,
    "f32_product_flops": 1.4e11,
    "measured_at": "2026-05-04",
}


def write(folder: Path, record: object) -> Path:
    path = folder / "machine.json"
    path.write_text(record if isinstance(record, str) else json.dumps(record))
    return path


def test_a_profile_becomes_a_device_that_computes_at_the_quicker_of_both_rates(tmp_path: Path) -> None:
    assert device_from_profile(write(tmp_path, RECORD)) == Device(
        name="Intel(R) Xeon(R) Processor",
        vendor="Intel",
        memory_bytes=24 * GIB,
        bandwidth_bytes_per_s=12_000_000_000,
        bf16_flops=1.4e11,
        fp8_flops=None,
        tdp_w=None,
        source="measured 2026-05-04",
        notes="2 threads; matrix products in bf16 8e+10, in f32 1.4e+11 FLOP/s: the quicker counts",
    )


def test_a_profile_may_leave_the_memory_unknown() -> None:
    assert device_from_record(RECORD | {"memory_bytes": None}, "x").memory_bytes is None


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ("{", "not a machine profile"),
        ("[]", "not a machine profile"),
        ({"name": "x"}, "not a machine profile"),
        (RECORD | {"kvfolio_machine_profile": 99}, "version 99"),
        (RECORD | {"name": ""}, "name is ''"),
        (RECORD | {"measured_at": 3}, "measured_at is 3"),
        (RECORD | {"bandwidth_bytes_per_s": 0}, "bandwidth_bytes_per_s is 0"),
        (RECORD | {"bandwidth_bytes_per_s": True}, "bandwidth_bytes_per_s is True"),
        (RECORD | {"f32_product_flops": float("inf")}, "f32_product_flops is inf"),
        (RECORD | {"bf16_product_flops": "fast"}, "bf16_product_flops is 'fast'"),
        ({key: value for key, value in RECORD.items() if key != "num_threads"}, "num_threads is None"),
    ],
)
def test_a_broken_profile_says_what_is_wrong_and_how_to_measure_again(
    tmp_path: Path, record: object, says: str
) -> None:
    path = write(tmp_path, record)
    with pytest.raises(OptionError) as caught:
        device_from_profile(path)
    assert says in str(caught.value)
    assert str(path) in str(caught.value)
    assert "kvfolio devices this --refresh" in str(caught.value)


def test_a_missing_profile_says_how_to_measure(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="kvfolio devices this --refresh"):
        device_from_profile(tmp_path / "machine.json")
