"""How much memory this machine, or the container around us, still has. Torch-free.

Knows nothing of caches. Linux only; elsewhere the answer is None: unknown.
"""

from pathlib import Path

_CGROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),  # version 2
    (
        Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
        Path("/sys/fs/cgroup/memory/memory.usage_in_bytes"),
    ),  # version 1
)


def available_bytes(
    meminfo: Path = Path("/proc/meminfo"), cgroups: tuple[tuple[Path, Path], ...] = _CGROUPS
) -> int | None:
    """Bytes that can be allocated without swapping: the smaller of the machine's and the container's rest."""
    rests = [_machine_rest(meminfo)] + [_container_rest(limit, usage) for limit, usage in cgroups]
    known = [rest for rest in rests if rest is not None]
    return min(known) if known else None


def _machine_rest(meminfo: Path) -> int | None:
    try:
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return None
    return None


def _container_rest(limit: Path, usage: Path) -> int | None:
    try:
        return max(0, int(limit.read_text()) - int(usage.read_text()))
    except (OSError, ValueError):  # no such file, or "max": no limit
        return None
