"""Our product beside torch's, by number of rows, on SmolLM2's weight shapes out of the caches.

    python benchmarks/linear.py [--rows 1 4 16 32 64 256]

Shows up to how many rows ours is at least as quick (FEW_ROWS), and what the detour over f32 brings to many rows.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from kvfolio.kernels.native import FEW_ROWS, NativeOps

SHAPES = [(576, 960), (576, 576), (576, 3072), (1536, 576), (576, 49152)]  # (in, out)


def seconds(product: Callable[[Tensor, Tensor], Tensor], x: Tensor, weights: list[Tensor]) -> float:
    times = []
    for _ in range(4):
        for weight in weights:
            started = time.perf_counter()
            product(x, weight)
            times.append(time.perf_counter() - started)
    return statistics.median(times[len(weights) :])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 32, 64, 256])
    args = parser.parse_args()
    own, default = NativeOps(torch.get_num_threads(), deterministic=True), NativeOps(torch.get_num_threads())
    print(f"bf16, {torch.get_num_threads()} threads; ours up to {FEW_ROWS} rows, torch's beyond")
    for width, num_out in SHAPES:
        copies = max(3, (200 << 20) // (width * num_out * 2))  # more than the caches hold
        weights = [torch.randn(num_out, width).to(torch.bfloat16) for _ in range(copies)]
        for rows in args.rows:
            x = torch.randn(rows, width).to(torch.bfloat16)
            torch_s, own_s = seconds(functional.linear, x, weights), seconds(own.linear, x, weights)
            used_s = seconds(default.linear, x, weights)
            flops, num_bytes = 2 * rows * width * num_out, width * num_out * 2
            print(
                f"{width:5} × {num_out:5}, {rows:4} rows: torch {torch_s * 1e6:8.0f} µs, ours {own_s * 1e6:8.0f} µs "
                f"({num_bytes / own_s / 1e9:5.1f} GB/s, {flops / own_s / 1e9:5.0f} GFLOP/s), "
                f"as used {used_s * 1e6:8.0f} µs: {torch_s / used_s:.2f} × torch"
            )


if __name__ == "__main__":
    main()
