"""Measures this machine: how fast it reads memory, the limit that decode speed is shown beside, copies and multiplies.

Knows nothing of models. The results are plain numbers; a profile is written as JSON and read by planner/hardware.py.
Torch is imported by what measures: who only asks for the machine's identity does not wait for it.
"""

import dataclasses
import functools
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

PROFILE_VERSION = 1  # raised when a field changes its meaning; planner/hardware.py reads this one

READ_BYTES = 256 << 20  # well beyond any cache of a small machine
GPU_BYTES = 2 << 30  # so much takes even a fast GPU 0.3 ms: its launch hardly shows

PRODUCT_SIDES = (512, 1024, 2048, 4096, 8192)
LONG_PASS_S = 0.02  # a product that takes so long is not made larger
PRODUCT_S = 0.5  # seconds of passes for one dtype


@dataclass(frozen=True, slots=True)
class MachineProfile:
    """What was measured, with torch and the kernels of this build.

    ``name``: of the processor, or of the GPU where torch has one. ``identity``: what the machine was; another one makes
    the profile stale. ``memory_bytes``: all the memory a process may use, None where unknown. ``copy_bytes_per_s``:
    bytes moved within the device's memory, each counted once though it is read and written.
    """

    name: str
    device: str
    identity: str
    num_threads: int
    memory_bytes: int | None
    bandwidth_bytes_per_s: int
    copy_bytes_per_s: int
    bf16_product_flops: float
    f32_product_flops: float
    product_side: int  # the larger of the two products was [side, side] x [side, side]
    measured_at: str  # ISO 8601 date

    @property
    def bf16_flops(self) -> float:
        """The quicker of the two products: a network in bf16 may be computed in either."""
        return max(self.bf16_product_flops, self.f32_product_flops)


# ---- what this machine is -------------------------------------------------------------------------------------------


def cpu_name() -> str:
    """The processor's model as the system prints it; its architecture where the system does not say."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return " ".join(line.partition(":")[2].split())
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown processor"


def machine_identity() -> str:
    """A line that changes when the processor, the cores we may use or the presence of a GPU do. Torch-free."""
    drivers = (("NVIDIA", "/dev/nvidiactl"), ("AMD", "/dev/kfd"))
    gpus = [f"{vendor} driver" for vendor, place in drivers if Path(place).exists()]
    return ", ".join([cpu_name(), f"{_num_cores()} cores", *gpus])


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def host_memory_bytes(
    limits: tuple[Path, ...] = (
        Path("/sys/fs/cgroup/memory.max"),
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
    ),
) -> int | None:
    """Bytes of RAM: the machine's, or the container's limit where that is less; None where neither is known."""
    known = [limit for limit in (_machine_bytes(), *map(_limit_bytes, limits)) if limit is not None]
    return min(known) if known else None


def _machine_bytes() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not a POSIX system
        return None


def _limit_bytes(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # no such file, or "max": no limit
        return None


# ---- measuring ------------------------------------------------------------------------------------------------------


def measure_machine(identity: str | None = None) -> MachineProfile:
    """Measure the first CUDA device of torch, or the processor where there is none; 2 to 5 seconds.

    ``identity`` is kept with the numbers: ``machine_identity()``, or what the caller tells machines apart by.
    """
    import torch

    on_gpu = torch.cuda.is_available()
    device, num_bytes = (torch.device("cuda", 0), GPU_BYTES) if on_gpu else (torch.device("cpu"), READ_BYTES)
    bf16, bf16_side = _product_flops(device, torch.bfloat16)
    f32, f32_side = _product_flops(device, torch.float32)
    return MachineProfile(
        name=torch.cuda.get_device_name(device) if on_gpu else cpu_name(),
        device=str(device),
        identity=machine_identity() if identity is None else identity,
        num_threads=torch.get_num_threads(),
        memory_bytes=torch.cuda.get_device_properties(device).total_memory if on_gpu else host_memory_bytes(),
        bandwidth_bytes_per_s=int(read_bandwidth(device, num_bytes=num_bytes)),
        copy_bytes_per_s=int(_copy_bandwidth(device, num_bytes // 2)),
        bf16_product_flops=bf16,
        f32_product_flops=f32,
        product_side=max(bf16_side, f32_side),
        measured_at=time.strftime("%Y-%m-%d"),
    )


def read_bandwidth(device: "torch.device", repeats: int = 5, num_bytes: int = READ_BYTES) -> float:
    """Bytes a second that all threads read together: the median of ``repeats`` passes over ``num_bytes``."""
    import torch

    data = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    return statistics.median(_one_pass(data) for _ in range(repeats + 1))


def _one_pass(data: "Tensor") -> float:
    if data.device.type == "cpu":
        try:
            from kvfolio.kernels.native import measure_read_bandwidth
        except ImportError:  # installed without a compiler: torch's sum stands in
            pass
        else:
            return measure_read_bandwidth(data)
    started = time.perf_counter()
    data.sum().item()  # waits for the device
    return data.nbytes / (time.perf_counter() - started)


def _copy_bandwidth(
    device: "torch.device", num_bytes: int, repeats: int = 5, to: "torch.device | None" = None
) -> float:
    """Bytes copied a second from ``device`` to another one, or within it."""
    import torch

    source = torch.ones(num_bytes // 4, dtype=torch.float32, device=device)
    target = torch.zeros_like(source, device=to or device)  # written, so that no page is new when the copy begins
    return statistics.median(num_bytes / _seconds(device, lambda: target.copy_(source)) for _ in range(repeats))


def copy_and_product_rates(device: "torch.device") -> tuple[float, float]:
    """(bytes copied a second between ``device`` and host memory, FLOP a second of a product of prompt size); 0.3 s."""
    import torch

    rows, side, dice = 512, 1024, torch.Generator(device).manual_seed(0)
    left, right = (torch.rand((num_rows, side), device=device, generator=dice) for num_rows in (rows, side))
    product_s = min(_seconds(device, lambda: torch.mm(left, right)) for _ in range(5))
    return _copy_bandwidth(device, 64 << 20, to=torch.device("cpu")), 2 * rows * side * side / product_s


def _product_flops(device: "torch.device", dtype: "torch.dtype") -> tuple[float, int]:
    """FLOP a second of the quickest pass of [n, n] x [n, n], and n: the first side that takes long enough to time."""
    import torch

    dice = torch.Generator(device).manual_seed(0)  # our own: a measurement must not change what a caller samples
    for side in PRODUCT_SIDES:
        # Random values: a GPU draws less power, and runs faster, on zeros and ones.
        left, right = (torch.rand((side, side), dtype=dtype, device=device, generator=dice) for _ in range(2))
        multiply = functools.partial(torch.mm, left, right, out=torch.empty_like(left))
        _seconds(device, multiply)  # threads and memory are set up once
        quickest = _seconds(device, multiply)
        if quickest >= LONG_PASS_S:
            break
    end = time.perf_counter() + PRODUCT_S
    while time.perf_counter() < end:
        quickest = min(quickest, _seconds(device, multiply))
    return 2 * side**3 / quickest, side


def _seconds(device: "torch.device", work: Callable[[], Any]) -> float:
    """How long ``work`` takes until the device is done with it."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - started


# ---- writing --------------------------------------------------------------------------------------------------------


def profile_record(profile: MachineProfile) -> dict[str, Any]:
    """The profile as it is written: its fields, the version, and ``bf16_flops``."""
    fields = dataclasses.asdict(profile)
    return {"kvfolio_machine_profile": PROFILE_VERSION, **fields, "bf16_flops": profile.bf16_flops}


def write_profile(profile: MachineProfile, path: Path) -> None:
    """Write ``path`` at once: whoever reads meanwhile sees the old file or the new one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f"{path.name}.{os.getpid()}")
    try:
        half.write_text(json.dumps(profile_record(profile), indent=2) + "\n", encoding="utf-8")
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)
