"""How many tokens a block should have: room wasted in half-empty blocks against speed of attention.

    python benchmarks/block_tokens.py

Waste is counted over sequences of 1 to 1,024 tokens, as the mean of each one's share and as the share of all room.
"""

import statistics
import time

import torch

from kvfolio.kernels.native import NativeOps
from kvfolio.kernels.shapes import ChunkBlocks, LayerGeometry, LayerMemory
from kvfolio.spec.formats import find_cache_format

LAYERS, CONTEXT, PROMPT = 30, 2048, 512  # SmolLM2's layers, so that a step does not live in the caches


def waste(block_tokens: int) -> tuple[float, float]:
    """(mean over the sequences of wasted over allocated, all wasted over all allocated)."""
    rooms = [(length, -(-length // block_tokens) * block_tokens) for length in range(1, 1025)]
    shares = [(room - length) / room for length, room in rooms]
    return statistics.mean(shares), sum(room - length for length, room in rooms) / sum(room for _, room in rooms)


def seconds_a_layer(block_tokens: int, num_new: int, threads: int) -> float:
    """Attention of one layer at CONTEXT tokens, of which the last ``num_new`` are computed; median of 9 passes."""
    fmt = find_cache_format("bf16")
    geometry = LayerGeometry(9, 3, 64, 64, block_tokens, None, fmt, fmt)
    size = geometry.layer_bytes(fmt)
    num_blocks = CONTEXT // block_tokens + 1
    pool = torch.randn(num_blocks * LAYERS * size // 2).to(torch.bfloat16).view(torch.uint8).view(num_blocks, -1)
    room = torch.zeros(1, LAYERS * size, dtype=torch.uint8)
    memories = [LayerMemory(pool, layer * size, room, layer * size) for layer in range(LAYERS)]
    blocks = tuple(torch.randperm(num_blocks - 1).tolist())
    q = torch.randn(num_new, 9, 64).to(torch.bfloat16)
    k, v = (torch.randn(num_new, 3, 64).to(torch.bfloat16) for _ in "kv")
    ops = NativeOps(threads)
    plan = ops.plan(geometry, (ChunkBlocks(CONTEXT - num_new, num_new, 0, blocks, 0),))
    times = []
    for _ in range(9):
        started = time.perf_counter()
        for memory in memories:
            ops.attend(plan, memory, q, k, v, 0.125)
        times.append((time.perf_counter() - started) / LAYERS)
    return statistics.median(times)


def main() -> None:
    threads = torch.get_num_threads()
    print(f"tokens a block  mean waste  waste of all  decode at {CONTEXT}, µs a layer  chunk of {PROMPT}, ms a layer")
    for block_tokens in (8, 16, 32, 64):
        mean, overall = waste(block_tokens)
        decode = seconds_a_layer(block_tokens, 1, threads)
        prefill = seconds_a_layer(block_tokens, PROMPT, threads)
        print(f"{block_tokens:14}  {mean:10.1%}  {overall:12.1%}  {decode * 1e6:29.0f}  {prefill * 1e3:25.1f}")


if __name__ == "__main__":
    main()
