"""What this machine offers a model: a device, kernels, and memory for its cache.

Knows nothing of models beyond the bytes of their weights.
"""

import logging

import torch

from kvfolio.cache.costs import MachineCosts
from kvfolio.errors import BudgetError, OptionError
from kvfolio.kernels.codec import LARGEST_FP8, STORED_DTYPES
from kvfolio.kernels.profile import copy_and_product_rates
from kvfolio.kernels.reference import ReferenceOps
from kvfolio.planner.compute import attention_flops, weight_flops
from kvfolio.spec.formats import FP8, FP8_E5M2
from kvfolio.spec.layout import CacheLayout
from kvfolio.spec.model import RunnableSpec
from kvfolio.store.host_memory import available_bytes
from kvfolio.units import format_bytes

try:
    from kvfolio.kernels.native import NativeOps
except ImportError as error:  # installed without a compiler
    NativeOps = None  # type: ignore[assignment,misc]
    _native_error: ImportError | None = error
else:
    _native_error = None

logger = logging.getLogger("kvfolio")

DEFAULT_KV_MEMORY = 1 << 30


def find_device(name: str) -> torch.device:
    """The torch device called ``name``; raises OptionError when there is none."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # meta devices hold nothing
    except (RuntimeError, AssertionError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise OptionError(f"device {name!r} cannot be used ({first_line}); try cpu") from error
    return device


def choose_ops(device: torch.device, deterministic: bool) -> "NativeOps | ReferenceOps":
    """The C++ kernels on a CPU, torch elsewhere; without the extension torch too, and that is said."""
    if device.type != "cpu":
        return ReferenceOps(deterministic)
    if NativeOps is None:
        logger.warning("the C++ kernels are not installed (%s): computing with torch, slower", _native_error)
        return ReferenceOps(deterministic)
    return NativeOps(torch.get_num_threads(), deterministic)


def tell_unscaled(layout: CacheLayout) -> None:
    """Say once that fp8 has no scales (QC-04): a scale that is forgotten looks like a bad model."""
    names = {fmt.name for group in layout.groups for fmt in (group.fmt.k, group.fmt.v)}
    for fmt in (FP8, FP8_E5M2):
        if fmt.name in names:
            logger.warning(
                "%s stores numbers as they are, without scales: those beyond ±%s become that; fp8-scaled has a scale "
                "for each vector, int8 loses less in as many bytes",
                fmt.name,
                f"{LARGEST_FP8[STORED_DTYPES[fmt.name]]:,.0f}",
            )


def free_bytes(device: torch.device) -> int | None:
    """Bytes that can be allocated on ``device``; None when that is not known."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return available_bytes() if device.type == "cpu" else None


def usable_kv_memory(asked: int | None, weights: int, device: torch.device) -> int:
    """Bytes for the cache: ``asked``, or 1 GiB, or half of what is left beside the weights if that is less.

    Raises BudgetError with have and need when weights and cache do not fit.
    """
    free = free_bytes(device)
    if free is None:
        return DEFAULT_KV_MEMORY if asked is None else asked
    rest = free - weights
    if asked is None and rest > 1:
        return min(DEFAULT_KV_MEMORY, rest // 2)
    if asked is None or asked > rest:
        need = format_bytes(weights + (asked or 0))
        raise BudgetError(
            f"{format_bytes(weights)} of weights and {format_bytes(asked or 0)} of kv_memory need {need}; "
            f"{device} has {format_bytes(free)} free: "
            + (f"kv_memory can be at most {format_bytes(rest)}" if rest > 0 else "the weights alone do not fit")
        )
    return asked


def check_swap_memory(num_bytes: int, device: torch.device, beside: int) -> None:
    """Raise BudgetError if a host pool of ``num_bytes`` does not fit in memory; on a CPU the rest lies there, too."""
    free = available_bytes()
    taken = beside if device.type == "cpu" else 0
    if free is not None and num_bytes > free - taken:
        raise BudgetError(
            f"swap_memory of {format_bytes(num_bytes)} does not fit: {format_bytes(free)} of memory are free, "
            f"{format_bytes(taken)} of them for weights and kv_memory; "
            f"it can be at most {format_bytes(max(0, free - taken))}"
        )


def machine_costs(spec: RunnableSpec, device: torch.device) -> MachineCosts:
    """What computing a token again and copying a byte cost here: measured now (0.3 s), logged, then left alone."""
    copy_bytes_per_s, flops_per_s = copy_and_product_rates(device)
    last = spec.max_context - 1
    per_read = attention_flops(spec, last) - attention_flops(spec, last - 1)  # full layers: windows are full by then
    costs = MachineCosts(
        flops_per_s=flops_per_s,
        copy_bytes_per_s=copy_bytes_per_s,
        flops_per_token=weight_flops(spec) + attention_flops(spec, last) - per_read * spec.max_context,
        flops_per_read=per_read,
    )
    logger.info(
        "preemption and eviction reckon with %.1f GFLOP/s and copies of %.1f GB/s, measured now; "
        "a token costs %.3g FLOPs, and %.3g for each one it reads",
        flops_per_s / 1e9,
        copy_bytes_per_s / 1e9,
        costs.flops_per_token,
        costs.flops_per_read,
    )
    return costs
