"""Decode attention over latents (MLA: one key of 576 numbers, whose first 512 are the value), beside two limits.

    python benchmarks/latent_attention.py [--tokens 4096] [--heads 1,4,16,32,128] [--formats bf16,int8,int4] [--json]

Bytes over the measured read bandwidth, and FLOPs over the measured rate of f32 products (torch's, 2048 cubed): all
heads read the same latents, so from a few heads on the second limit is the larger one, and it binds. Layers take turns,
so that none is in the caches. The last lines compare prompts in the absorbed and in the expanded form, one layer.
"""

import argparse
import json
import time
from collections.abc import Callable

import torch

from kvfolio.kernels.expanded import attend_expanded
from kvfolio.kernels.native import NativeOps, measure_read_bandwidth
from kvfolio.kernels.shapes import ChunkBlocks, LayerGeometry, LayerMemory
from kvfolio.spec.formats import find_cache_format

RANK, ROPE, PLAIN, V_WIDTH = 512, 64, 128, 128  # DeepSeek V2 and V3
BLOCK_TOKENS = 16
NUM_LAYERS = 8
EXACT = find_cache_format("bf16")


class Cache:
    """Layers of one geometry, full of ``num_tokens`` random tokens in scattered blocks."""

    def __init__(self, num_heads: int, kv_format: str, num_tokens: int, ops: NativeOps) -> None:
        stored = find_cache_format(kv_format, BLOCK_TOKENS)
        shape = num_heads, 1, RANK + ROPE, RANK, BLOCK_TOKENS, None
        self.geometry = LayerGeometry(*shape, stored, EXACT, v_is_prefix_of_k=True)
        self.ops, self.num_tokens = ops, num_tokens
        num_blocks = -(-2 * num_tokens // BLOCK_TOKENS)
        block_bytes, open_bytes = (self.geometry.layer_bytes(fmt) for fmt in (stored, EXACT))
        self.blocks = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(0)).tolist()
        sealed = torch.zeros(num_blocks, NUM_LAYERS * block_bytes, dtype=torch.uint8)
        opened = torch.zeros(1, NUM_LAYERS * open_bytes, dtype=torch.uint8)
        places = range(NUM_LAYERS)
        self.layers = [LayerMemory(sealed, i * block_bytes, opened, i * open_bytes) for i in places]
        first = self.chunk(0, BLOCK_TOKENS)
        for layer in self.layers:
            self.attend(layer, first, *self.random(BLOCK_TOKENS))
        sealed[:] = sealed[self.blocks[0]].clone()  # one real block everywhere: times depend on no number

    def chunk(self, start: int, count: int) -> ChunkBlocks:
        return ChunkBlocks(start, count, 0, tuple(self.blocks[: (start + count) // BLOCK_TOKENS]), 0)

    def random(self, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Absorbed queries [count, num_heads, 576] and keys [count, 1, 576]."""
        heads = torch.randn(count, self.geometry.num_q_heads + 1, RANK + ROPE).to(torch.bfloat16)
        return heads[:, :-1].contiguous(), heads[:, -1:].contiguous()

    def attend(self, layer: LayerMemory, chunk: ChunkBlocks, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        plan = self.ops.plan(self.geometry, (chunk,))
        return self.ops.attend(plan, layer, q, k, k[:, :, :RANK], 0.1)


class Projections:
    """Random W_UK and W_UV."""

    def __init__(self, num_heads: int) -> None:
        self.keys = torch.randn(num_heads, RANK, PLAIN).to(torch.bfloat16)
        self.values = torch.randn(num_heads, RANK, V_WIDTH).to(torch.bfloat16)

    def expand(self, latents: torch.Tensor, heads: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return latents @ self.keys[heads].float(), latents @ self.values[heads].float()


def best_of(repeats: int, work: Callable[[], object]) -> float:
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return min(times)


def decode(num_heads: int, kv_format: str, num_tokens: int, ops: NativeOps, limits: tuple[float, float]) -> dict:
    """One token's attention over ``num_tokens`` in one layer."""
    cache = Cache(num_heads, kv_format, num_tokens, ops)
    chunk, (q, k) = cache.chunk(num_tokens, 1), cache.random(1)
    plan = ops.plan(cache.geometry, (chunk,))

    def step() -> None:
        for layer in cache.layers:
            ops.attend(plan, layer, q, k, k[:, :, :RANK], 0.1)

    seconds = best_of(9, step) / NUM_LAYERS
    num_bytes = num_tokens // BLOCK_TOKENS * cache.geometry.layer_bytes(cache.geometry.stored)
    flops = 2 * num_heads * (2 * RANK + ROPE) * num_tokens
    memory_s, product_s = num_bytes / limits[0], flops / limits[1]
    return {
        "format": kv_format,
        "heads": num_heads,
        "us": seconds * 1e6,
        "GB/s": num_bytes / seconds / 1e9,
        "GFLOP/s": flops / seconds / 1e9,
        "memory_limit_us": memory_s * 1e6,
        "product_limit_us": product_s * 1e6,
        "binds": "memory" if memory_s > product_s else "products",
        "of_limit": max(memory_s, product_s) / seconds,
    }


def prefill(num_heads: int, start: int, count: int, ops: NativeOps) -> dict:
    """A chunk of a prompt behind ``start`` tokens in both forms, projections of queries and outputs included."""
    cache = Cache(num_heads, "bf16", start + count, ops)
    chunk, (absorbed, k) = cache.chunk(start, count), cache.random(count)
    projections, layer = Projections(num_heads), cache.layers[0]
    q = torch.randn(count, num_heads, PLAIN + ROPE).to(torch.bfloat16)
    keys = projections.keys  # [num_heads, RANK, PLAIN], as [out, in] of each head
    values = projections.values.transpose(1, 2).contiguous()

    def in_absorbed_form() -> None:
        ops.head_linear(q[:, :, :PLAIN], keys)
        ops.head_linear(cache.attend(layer, chunk, absorbed, k), values)

    return {
        "heads": num_heads,
        "start": start,
        "tokens": count,
        "absorbed_ms": best_of(3, in_absorbed_form) * 1e3,
        "expanded_ms": best_of(3, lambda: attend_expanded(ops, cache.geometry, chunk, layer, q, k, projections, 0.1))
        * 1e3,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", default="1,4,16,32,128")
    parser.add_argument("--formats", default="bf16,int8,int4")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    ops = NativeOps(torch.get_num_threads())
    data, square = torch.zeros(1 << 28, dtype=torch.uint8), torch.randn(2048, 2048)
    bandwidth = max(measure_read_bandwidth(data) for _ in range(5))
    rate = 2 * 2048**3 / best_of(5, lambda: square @ square)
    with torch.inference_mode():
        rows = [
            decode(int(heads), name, args.tokens, ops, (bandwidth, rate))
            for name in args.formats.split(",")
            for heads in args.heads.split(",")
        ]
        forms = [prefill(16, start, count, ops) for start, count in ((0, 512), (0, 2048), (3584, 512), (4080, 16))]
    if args.json:
        print(json.dumps({"bandwidth": bandwidth, "rate": rate, "decode": rows, "prefill": forms}))
        return
    print(f"{torch.get_num_threads()} threads: reads {bandwidth / 1e9:.1f} GB/s, f32 products {rate / 1e9:.0f} GFLOP/s")
    print(f"decode over {args.tokens:,} tokens, one layer:")
    print("format  heads       us   GB/s  GFLOP/s  limit us: memory  products  binds     reached")
    for row in rows:
        print(
            f"{row['format']:6} {row['heads']:6} {row['us']:8,.0f} {row['GB/s']:6.1f} {row['GFLOP/s']:8.1f}"
            f" {row['memory_limit_us']:17,.0f} {row['product_limit_us']:9,.0f}  {row['binds']:8} {row['of_limit']:6.0%}"
        )
    print("a chunk of a prompt, 16 heads, bf16, one layer:")
    print(" start  tokens  absorbed ms  expanded ms")
    for form in forms:
        print(f"{form['start']:6,} {form['tokens']:7,} {form['absorbed_ms']:12.1f} {form['expanded_ms']:12.1f}")


if __name__ == "__main__":
    main()
