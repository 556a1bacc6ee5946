"""Memory at start-up: what is asked for fits what is free beside the weights, or is refused with the numbers. ME-09.

Knows nothing of models beyond the bytes of their weights.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvfolio import LLM
from kvfolio.engine import machine
from kvfolio.errors import BudgetError
from kvfolio.store.host_memory import available_bytes

CPU, GPU = torch.device("cpu"), torch.device("cuda")
GIB = 1 << 30


def files(folder: Path, available_kib: int, limit: str | None, usage: int = 0) -> tuple[Path, tuple[tuple[Path, Path]]]:
    """A machine's and a container's account of memory."""
    meminfo, maximum, current = folder / "meminfo", folder / "memory.max", folder / "memory.current"
    meminfo.write_text(f"MemTotal:       999 kB\nMemAvailable:   {available_kib} kB\n")
    if limit is not None:
        maximum.write_text(limit)
        current.write_text(str(usage))
    return meminfo, ((maximum, current),)


@pytest.mark.parametrize(
    ("available_kib", "limit", "usage", "expected"),
    [
        (8 << 20, None, 0, 8 * GIB),  # no container
        (8 << 20, "max", 0, 8 * GIB),  # one without a limit
        (8 << 20, str(3 * GIB), GIB, 2 * GIB),  # the container has less than the machine
        (1 << 20, str(3 * GIB), GIB, GIB),  # somebody else has the machine's
        (8 << 20, str(GIB), 2 * GIB, 0),  # over its limit already
    ],
)
def test_what_is_free_is_the_smaller_rest_of_machine_and_container(
    available_kib: int, limit: str | None, usage: int, expected: int, tmp_path: Path
) -> None:
    assert available_bytes(*files(tmp_path, available_kib, limit, usage)) == expected


def test_where_nothing_is_known_nothing_is_said(tmp_path: Path) -> None:
    assert available_bytes(tmp_path / "none", ((tmp_path / "no", tmp_path / "nor"),)) is None


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> list[int | None]:
    """What is free, as a list of one: another process may take some of it at any time."""
    amount: list[int | None] = [8 * GIB]
    monkeypatch.setattr(machine, "available_bytes", lambda: amount[0])
    return amount


@pytest.mark.parametrize(
    ("asked", "weights", "expected"),
    [(None, GIB, GIB), (None, 7 * GIB + GIB // 2, GIB // 4), (5 * GIB, GIB, 5 * GIB), (7 * GIB, GIB, 7 * GIB)],
)
def test_a_cache_gets_what_is_asked_or_a_share_of_what_the_weights_leave(
    asked: int | None, weights: int, expected: int, free: list[int | None]
) -> None:
    assert machine.usable_kv_memory(asked, weights, CPU) == expected


def test_a_pinned_cache_larger_than_the_rest_is_refused_with_the_largest_that_would_fit(free: list[int | None]) -> None:
    message = "1.00 GiB of weights and 7.50 GiB of kv_memory need 8.50 GiB; cpu has 8.00 GiB free: kv_memory can be at "
    with pytest.raises(BudgetError, match=message + "most 7.00 GiB"):
        machine.usable_kv_memory(7 * GIB + GIB // 2, GIB, CPU)
    free[0] = 2 * GIB  # another process came in between: what counts is what is free now
    with pytest.raises(BudgetError, match=r"at most 1.00 GiB"):
        machine.usable_kv_memory(7 * GIB, GIB, CPU)


@pytest.mark.parametrize("asked", [None, GIB])
def test_weights_that_do_not_fit_alone_are_said_to_be_the_reason(asked: int | None, free: list[int | None]) -> None:
    with pytest.raises(BudgetError, match="the weights alone do not fit"):
        machine.usable_kv_memory(asked, 9 * GIB, CPU)


def test_where_free_memory_is_unknown_what_is_asked_is_taken(free: list[int | None]) -> None:
    free[0] = None
    assert machine.usable_kv_memory(3 * GIB, 99 * GIB, CPU) == 3 * GIB
    assert machine.usable_kv_memory(None, 99 * GIB, CPU) == machine.DEFAULT_KV_MEMORY
    machine.check_swap_memory(99 * GIB, CPU, GIB)


def test_a_host_pool_lies_beside_weights_and_cache_on_a_cpu_and_alone_beside_a_gpu(free: list[int | None]) -> None:
    machine.check_swap_memory(5 * GIB, CPU, 3 * GIB)
    machine.check_swap_memory(8 * GIB, GPU, 99 * GIB)
    with pytest.raises(BudgetError, match=r"swap_memory of 5.50 GiB does not fit: 8.00 GiB .* at most 5.00 GiB"):
        machine.check_swap_memory(5 * GIB + GIB // 2, CPU, 3 * GIB)
    with pytest.raises(BudgetError, match=r"at most 8.00 GiB"):
        machine.check_swap_memory(9 * GIB, GPU, 0)


@pytest.mark.parametrize(
    ("kv_format", "largest"), [("fp8", "448"), ("int8/fp8-e5m2", "57,344"), ("fp8-scaled", None), ("int4", None)]
)
def test_a_cache_without_scales_is_said_once(
    kv_format: str, largest: str | None, open_llm: Callable[..., LLM], caplog: pytest.LogCaptureFixture
) -> None:  # QC-04
    open_llm("llama", kv_format=kv_format)
    told = [record.getMessage() for record in caplog.records if "without scales" in record.getMessage()]
    assert len(told) == (0 if largest is None else 1)
    assert all(f"beyond ±{largest} become that" in message for message in told)
