"""kvfolio devices: the table of known devices, and this machine's own numbers, measured once and kept.

Knows nothing of how they are measured or what they are used for.
"""

import csv
import dataclasses
import importlib.util
import json
import logging
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from kvfolio.cli.options import Json
from kvfolio.errors import OptionError
from kvfolio.planner.hardware import SEE, THIS, Device, device_from_record, find_device, search_devices
from kvfolio.planner.hardware import devices as known_devices

logger = logging.getLogger("kvfolio")

_FIELDS = tuple(field.name for field in dataclasses.fields(Device))
_FEW = 3  # devices of which source and notes are printed too


def devices(
    text: Annotated[
        str | None, typer.Argument(help="Words of a name or vendor; or: this, the machine we run on. Left out: all.")
    ] = None,
    refresh: Annotated[bool, typer.Option("--refresh", help="With this: measure again (2 to 5 s).")] = False,
    as_json: Json = False,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print comma-separated values, sizes in bytes.")] = False,
) -> None:
    """Memory, bandwidth and speed of known devices, or of this machine."""
    if as_json and as_csv:
        raise OptionError("--json and --csv: choose one")
    record: dict[str, Any] | None = None
    if text is not None and text.strip().lower() == THIS:
        record = machine_record(refresh)
        found: tuple[Device, ...] = (device_from_record(record, "this machine"),)
    elif refresh:
        raise OptionError("--refresh measures this machine: kvfolio devices this --refresh")
    else:
        found = known_devices() if text is None else search_devices(text)
    if not found:
        raise OptionError(f"no known device has {text!r} in its name or vendor; {SEE}")
    if as_json:
        answer: dict[str, Any] = {"devices": [dataclasses.asdict(device) for device in found]}
        print(json.dumps(answer if record is None else answer | {"profile": record}))
    elif as_csv:
        _print_csv(found)
    else:
        _print_table(found)
        if record is not None:
            _print_how(record)


# ---- this machine ---------------------------------------------------------------------------------------------------


def device_of(name: str | None) -> Device | None:
    """The device that an option names: ``this`` is the machine we run on, anything else a name of the table.

    None where the option was left out. Raises OptionError for a name that means no device, or several.
    """
    if name is None:
        return None
    return this_device() if name.strip().lower() == THIS else find_device(name)


def this_device(refresh: bool = False) -> Device:
    """The machine we run on: from the profile kept in the cache folder, measured first where there is none that fits.

    Says on standard error which of both it was: a kept figure may be of a day when the machine was busy. Raises
    OptionError where it would have to be measured and torch is not installed.
    """
    return device_from_record(machine_record(refresh, say_kept=True), "this machine")


def machine_record(refresh: bool = False, say_kept: bool = False) -> dict[str, Any]:
    """The machine's profile as written to JSON; measures, says so on standard error, and keeps it where it must.

    ``say_kept``: say on standard error that a kept profile is used, for a caller that does not show its date.
    """
    from kvfolio.kernels.profile import machine_identity, measure_machine, profile_record, write_profile

    # Torch takes its number of threads from here, so that another number is another machine.
    threads = os.environ.get("OMP_NUM_THREADS")
    identity = machine_identity() + (f", OMP_NUM_THREADS={threads}" if threads else "")
    path = _profile_path()
    kept = None if refresh or path is None else _read(path)
    if kept is not None and kept["identity"] == identity:
        if say_kept:
            print(
                f"this machine as measured on {kept['measured_at']}; again: kvfolio devices this --refresh",
                file=sys.stderr,
            )
        return kept
    if not _has_torch():
        raise OptionError(
            "measuring this machine needs torch: pip install 'kvfolio[run]'; or state its numbers by hand "
            "(--device-memory, --bandwidth, --flops), or name a known device (kvfolio devices)"
        )
    print("measuring this machine (2-5 s) ...", file=sys.stderr)
    profile = measure_machine(identity)
    try:
        if path is None:
            raise OSError("there is no home folder")
        write_profile(profile, path)
    except OSError as error:
        logger.warning("the machine's profile could not be kept (%s): it is measured again next time", error)
    return profile_record(profile)


def _profile_path() -> Path | None:
    """machine.json in the user's cache folder, as the XDG base directories have it; None without a home."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not folder.is_absolute():  # unset, or relative and to be ignored
        try:
            folder = Path.home() / ".cache"
        except RuntimeError:
            return None
    return folder / "kvfolio" / "machine.json"


def _read(path: Path) -> dict[str, Any] | None:
    """The profile kept in ``path``; None where it is missing, broken or of another version: it is measured again."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        device_from_record(record, str(path))
    except (OSError, ValueError, OptionError):
        return None
    return record if isinstance(record, dict) and isinstance(record.get("identity"), str) else None


def _has_torch() -> bool:
    try:
        return importlib.util.find_spec("torch") is not None
    except ImportError:
        return False


# ---- printing -------------------------------------------------------------------------------------------------------


def _print_csv(found: tuple[Device, ...]) -> None:
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(_FIELDS)
    table.writerows([_in_full(getattr(device, field)) for field in _FIELDS] for device in found)


def _in_full(value: str | float | None) -> str | float | None:
    return int(value) if isinstance(value, float) else value


def _print_table(found: tuple[Device, ...]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))  # a blank between columns: all fit in 80
    table.add_column("device", no_wrap=True)
    for title in ("GB", "GiB", "driver GiB", "GB/s", "bf16", "fp8", "W"):
        table.add_column(title, justify="right", no_wrap=True)
    for device in found:
        memory = device.memory_bytes
        table.add_row(
            device.name,
            "-" if memory is None else f"{memory / 10**9:.1f}",
            "-" if memory is None else f"{memory / 2**30:.1f}",
            "-" if device.driver_bytes is None else f"{device.driver_bytes / 2**30:.2f}",
            _in_units(device.bandwidth_bytes_per_s, 10**9),
            _in_units(device.bf16_flops, 10**12),
            _in_units(device.fp8_flops, 10**12),
            _in_units(device.tdp_w, 1),
        )
    Console(highlight=False).print(table)
    print("memory in GB (10^9 bytes) and GiB (2^30), and what of it the driver shows to programs")
    print("bf16 and fp8 in dense TFLOP/s; -: not known; sources: --json")
    if len(found) <= _FEW:
        for device in found:
            print(f"{device.name}: {device.source}" + (f"; {device.notes}" if device.notes else ""))


def _in_units(value: float | None, unit: int) -> str:
    if value is None:
        return "-"
    size = value / unit
    return f"{size:.0f}" if size >= 1000 else f"{size:.4g}"


def _print_how(record: dict[str, Any]) -> None:
    """How this machine was measured, and what the table has no column for."""
    rows = [
        ("measured", f"{record['measured_at']} on {record['identity']}"),
        ("read", f"{record['bandwidth_bytes_per_s'] / 1e9:.1f} GB/s: the median of passes of all threads over memory"),
        ("copy", f"{record['copy_bytes_per_s'] / 1e9:.1f} GB/s: each byte counted once"),
        (
            "products",
            f"bf16 {record['bf16_product_flops'] / 1e12:.3g}, f32 {record['f32_product_flops'] / 1e12:.3g} TFLOP/s",
        ),
        ("kept in", str(_profile_path() or "-")),
    ]
    for name, value in rows:
        print(f"{name:<9} {value}")
    print("other work on the machine lowers all of these: measure again when it is idle, with --refresh")
