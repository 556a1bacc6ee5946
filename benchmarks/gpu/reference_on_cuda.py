"""The engine on a GPU, through the reference kernels: the same tokens as on the CPU, and what they cost there.

    python benchmarks/gpu/reference_on_cuda.py

Needs a torch with CUDA. Runs the embedded SmolLM2 in f32 on both devices and exits with 1 if a token differs.
"""

import sys
import time

import torch

from kvfolio import LLM, SamplingParams

PROMPTS = ["The capital of France is", "In a ledger, every entry", "def fibonacci(n):"]


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("no CUDA device here: nothing was checked")
    params = SamplingParams(max_tokens=48, ignore_eos=True)
    tokens = {}
    for device in ("cpu", "cuda"):
        llm = LLM(dtype="f32", device=device, kv_memory="256MiB")
        started = time.perf_counter()
        completions = llm.generate(PROMPTS, params)
        seconds = time.perf_counter() - started
        tokens[device] = [completion.token_ids for completion in completions]
        snapshot = llm.snapshot()
        assert snapshot.planned_bytes == snapshot.allocated_bytes, snapshot
        assert snapshot.usage.num_blocks_used == 0, snapshot
        print(f"{device}: {llm.ops_name}, {seconds:.2f} s, pools {snapshot.allocated_bytes:,} B")
    same = tokens["cpu"] == tokens["cuda"]
    print("the same tokens" if same else f"DIFFERENT tokens: {tokens}")
    sys.exit(0 if same else 1)


if __name__ == "__main__":
    main()
