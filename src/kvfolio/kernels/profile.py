"""Measures this machine: how fast it reads memory, the limit that decode speed is shown beside.

Knows nothing of models. The result is one plain number.
"""

import statistics
import time

import torch
from torch import Tensor

try:
    from kvfolio.kernels.native import measure_read_bandwidth
except ImportError:  # installed without a compiler: torch's sum stands in
    measure_read_bandwidth = None  # type: ignore[assignment]

READ_BYTES = 256 << 20  # well beyond any cache of a small machine


def read_bandwidth(device: torch.device, repeats: int = 5) -> float:
    """Bytes a second that all threads read together: the median of ``repeats`` passes over 256 MiB."""
    data = torch.ones(READ_BYTES // 4, dtype=torch.float32, device=device)
    return statistics.median(_one_pass(data) for _ in range(repeats + 1))


def _one_pass(data: Tensor) -> float:
    if data.device.type == "cpu" and measure_read_bandwidth is not None:
        return measure_read_bandwidth(data)
    started = time.perf_counter()
    data.sum().item()  # waits for the device
    return data.nbytes / (time.perf_counter() - started)
