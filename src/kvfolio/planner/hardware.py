"""The table of known devices, devices.csv beside this file, and how a device is found by what people call it.

Knows nothing of models and measures nothing: this machine's own numbers come from a file of kernels/profile.py.
"""

import csv
import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from kvfolio.errors import OptionError

PROFILE_VERSION = 1  # of the files that kernels/profile.py writes; a test holds both numbers together

TABLE = Path(__file__).with_name("devices.csv")
SEE = "see: kvfolio devices"
_AGAIN = "measure again with: kvfolio devices this --refresh"

THIS = "this"
_MEASURED = (
    "device 'this' is the machine we run on, and it has to be measured: the command line does (kvfolio plan --device "
    "this, kvfolio devices this); from Python, kvfolio.kernels.profile.measure_machine and write_profile do, and "
    "kvfolio.planner.hardware.device_from_profile reads the file"
)

# What torch and vendors write around the name of a product; ignored where the table's name goes without it.
_VENDOR_WORDS = frozenset(("nvidia", "amd", "intel", "apple", "google", "aws"))
_BRANDS = _VENDOR_WORDS | {
    *("geforce", "tesla", "instinct", "radeon", "gpu", "tpu", "generation", "edition", "oam"),
    *("hbm2", "hbm2e", "hbm3", "hbm3e"),
}
# Names that a driver prints in full and that say less, or other, than the table's: in the words of _words.
_PRINTED = {
    "nvidia h100 80gb hbm3": ("h100-sxm",),  # the PCIe card has HBM2e, the NVL 94 GB
    "nvidia h100 80gb hbm2e": ("h100-pcie",),
    "nvidia h200": ("h200-sxm",),  # the NVL says so
    "nvidia gh200 120gb": ("gh200-96gb",),  # the size is of the processor's memory
    "nvidia gh200 480gb": ("gh200-96gb",),
    "nvidia b300 sxm ac": ("b300-sxm",),
    "amd instinct mi250x mi250": ("mi250-gcd", "mi250x-gcd"),  # one name for both cards
}
# Words that make another product of a name: "rtx 4070" never means the 4070 Ti.
_MODEL_WORDS = frozenset(("ti", "super", "pro", "max", "ultra", "plus", "xt", "xtx", "ada", "ai"))
_VENDORS = ("NVIDIA", "AMD", "Intel", "Apple")
_MOST_NAMED = 8

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Device:
    """What one device offers. None: not known, or nothing one would trust. Rates are peaks unless measured.

    ``memory_bytes``: a vendor's "80 GB" of device memory is 80 GiB, and counted so. ``bf16_flops``, ``fp8_flops``: FLOP
    a second of dense matrix products, without structured sparsity. ``tdp_w``: watts. ``notes`` says what is unusual.

    ``driver_bytes``: the total that the driver shows of ``memory_bytes``, in nvidia-smi, rocm-smi or torch; the least
    where drivers differ. ``notes`` has the figure and who shows it.
    """

    name: str
    vendor: str
    memory_bytes: int | None
    bandwidth_bytes_per_s: int | None
    bf16_flops: float | None
    fp8_flops: float | None
    tdp_w: float | None
    source: str
    notes: str
    driver_bytes: int | None = None


@functools.cache
def devices() -> tuple[Device, ...]:
    """Every known device, in the order of the table. Names are lower-case and stable."""
    with TABLE.open(encoding="utf-8", newline="") as lines:
        return tuple(_device(row) for row in csv.DictReader(lines))


def _device(row: dict[str, str]) -> Device:
    return Device(
        name=row["name"],
        vendor=row["vendor"],
        memory_bytes=_blank_or(int, row["memory_bytes"]),
        bandwidth_bytes_per_s=_blank_or(int, row["bandwidth_bytes_per_s"]),
        bf16_flops=_blank_or(float, row["bf16_flops"]),
        fp8_flops=_blank_or(float, row["fp8_flops"]),
        tdp_w=_blank_or(float, row["tdp_w"]),
        source=row["source"],
        notes=row["notes"],
        driver_bytes=_blank_or(int, row["driver_bytes"]),
    )


def _blank_or(kind: Callable[[str], T], text: str) -> T | None:
    return kind(text) if text else None


# ---- finding one ----------------------------------------------------------------------------------------------------


def nominal_bytes(name: str) -> int | None:
    """What the table says of the memory of the device called exactly ``name``; None for one that it has not."""
    return next((device.memory_bytes for device in devices() if device.name == name), None)


def find_device(name: str) -> Device:
    """The device called ``name``: in full, as a driver prints it, or by any words of its name that fit no other.

    ``H100 SXM``, ``h100_sxm``, ``h100sxm`` and ``NVIDIA H100 80GB HBM3`` are one device. A size such as ``80gb`` counts
    as a word of every device with so much memory. Raises OptionError that lists the candidates of an ambiguous name and
    the nearest names to an unknown one; a sibling (Ti, Super, Max) is never taken for the name without the word. The
    name ``this`` is refused: only the command line measures the machine we run on.
    """
    if name.strip().lower() == THIS:
        raise OptionError(_MEASURED)
    words = _words(name)
    for found in _readings(words):
        if len(found) == 1:
            return found[0]
        if found:
            names = _listed([device.name for device in found])
            raise OptionError(f"device {name!r} could be {names}; give one of them in full ({SEE})")
    near = _nearest(words)
    raise OptionError(f"unknown device {name!r}; " + (f"nearest: {_listed(near)}; {SEE}" if near else SEE))


def _readings(words: list[str]) -> Iterator[list[Device]]:
    """The devices that ``words`` may mean, a list for each way to read them, the surest first."""
    squashed, printed = "".join(words), _PRINTED.get(" ".join(words), ())
    yield [device for device in devices() if squashed == "".join(_words(device.name))]
    yield [device for device in devices() if device.name in printed]
    for fits in (str.__eq__, str.startswith):  # whole words first, so that h20 is not the H200
        yield [device for device in devices() if words and _matches(device, words, fits)]


def search_devices(text: str) -> tuple[Device, ...]:
    """The devices whose name or vendor holds every word of ``text``, in the order of the table; none is no error."""
    words = _words(text)
    return tuple(
        device for device in devices() if all(word in f"{device.vendor.lower()} {device.name}" for word in words)
    )


def _words(name: str) -> list[str]:
    words = re.split(r"[\s_/-]+", name.strip().lower())
    return [re.sub(r"^sxm\d$", "sxm", word) for word in words if word]


def _matches(device: Device, words: list[str], fits: Callable[[str, str], bool]) -> bool:
    own = set(_words(device.name))
    if any(word in _VENDOR_WORDS - {device.vendor.lower()} - own for word in words):
        return False
    asked = [word for word in words if word in own or word not in _BRANDS]
    stated = set()
    for word in asked:
        hits = {one for one in own if fits(one, word)}
        if not hits and not _is_size_of(device, word):
            return False
        stated |= hits
    return bool(stated) and not (own - stated) & _MODEL_WORDS


def _is_size_of(device: Device, word: str) -> bool:
    size = re.fullmatch(r"(\d{1,6})(?:gb|gib)", word)
    return size is not None and device.memory_bytes == int(size[1]) << 30


def _nearest(words: list[str]) -> list[str]:
    """Names that hold the most telling word, its model number; otherwise those spelled nearly alike."""
    import difflib  # only where something went wrong

    names = [device.name for device in devices()]
    telling = max(
        (word for word in words if word not in _BRANDS),
        key=lambda word: (bool(re.search(r"\d", word)), len(word)),
        default="",
    )
    holding = [name for name in names if len(telling) >= 3 and telling in name]
    return holding or difflib.get_close_matches("-".join(words), names, n=4, cutoff=0.5)


def _listed(names: list[str]) -> str:
    rest = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {rest} more" if rest > 0 else "")


# ---- a machine that was measured ------------------------------------------------------------------------------------


def device_from_profile(path: Path) -> Device:
    """The machine whose profile ``path`` holds; OptionError where that is missing, broken or of another version."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OptionError(f"{path}: {error.strerror or error}; {_AGAIN}") from error
    except ValueError as error:  # not JSON, not UTF-8
        raise OptionError(f"{path} is not a machine profile ({error}); {_AGAIN}") from error
    return device_from_record(record, str(path))


def device_from_record(record: object, origin: str) -> Device:
    """The machine that a profile's record describes; errors name ``origin``."""
    if not isinstance(record, Mapping) or "kvfolio_machine_profile" not in record:
        raise OptionError(f"{origin} is not a machine profile; kvfolio devices this --refresh writes one")
    version = record["kvfolio_machine_profile"]
    if version != PROFILE_VERSION:
        raise OptionError(
            f"{origin} is a machine profile of version {version!r}; this kvfolio reads {PROFILE_VERSION}; {_AGAIN}"
        )
    name = _text(record, "name", origin)
    measured_at, where = _text(record, "measured_at", origin), _text(record, "device", origin)
    bf16, f32 = (_rate(record, key, origin) for key in ("bf16_product_flops", "f32_product_flops"))
    threads = f"{_rate(record, 'num_threads', origin):.0f} threads" if where == "cpu" else where
    memory = record.get("memory_bytes")
    return Device(
        name=name,
        vendor=next((vendor for vendor in _VENDORS if vendor.lower() in name.lower()), "generic"),
        memory_bytes=None if memory is None else int(_rate(record, "memory_bytes", origin)),
        bandwidth_bytes_per_s=int(_rate(record, "bandwidth_bytes_per_s", origin)),
        bf16_flops=max(bf16, f32),
        fp8_flops=None,
        tdp_w=None,
        source=f"measured {measured_at}",
        notes=f"{threads}; matrix products in bf16 {bf16:.3g}, in f32 {f32:.3g} FLOP/s: the quicker counts",
    )


def _text(record: Mapping[str, object], key: str, origin: str) -> str:
    value = record.get(key)
    if not isinstance(value, str) or not value:
        raise OptionError(f"{origin}: {key} is {value!r}; a machine profile has text there; {_AGAIN}")
    return value


def _rate(record: Mapping[str, object], key: str, origin: str) -> float:
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise OptionError(f"{origin}: {key} is {value!r}; a machine profile has a positive number there; {_AGAIN}")
    return value
