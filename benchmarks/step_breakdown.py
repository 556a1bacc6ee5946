"""Where one decode step's time goes: products, attention, small operations, Python; beside the memory limit.

    python benchmarks/step_breakdown.py [--contexts 128 2048]

Times each call of the kernels from outside (which adds about 0.3 µs a call) over 100 steps of SmolLM2 in bf16.
"""

import argparse
import statistics
import time
from collections import defaultdict
from typing import Any

from kvfolio import LLM, SamplingParams
from kvfolio.kernels.profile import read_bandwidth

PARTS = {
    "products": ("linear",),
    "attention": ("attend",),
    "small operations": ("rms_norm", "add_rms_norm", "rope", "gated"),
    "attention plan": ("plan",),
}


class Timed:
    """Ops whose calls are timed."""

    def __init__(self, ops: Any, seconds: dict[str, float]) -> None:
        for part, names in PARTS.items():
            for name in names:
                setattr(self, name, self._timed(getattr(ops, name), part, seconds))

    @staticmethod
    def _timed(call: Any, part: str, seconds: dict[str, float]) -> Any:
        def timed(*args: Any) -> Any:
            started = time.perf_counter()
            result = call(*args)
            seconds[part] += time.perf_counter() - started
            return result

        return timed


def breakdown(llm: LLM, context: int, num_steps: int = 100) -> tuple[dict[str, float], float]:
    """(median seconds of each part and in all, bytes read a step) of decode steps behind ``context`` tokens."""
    engine = llm.engine
    ids = tuple(7 + 13 * index % 40_000 for index in range(context))
    request = engine.submit(ids, SamplingParams(max_tokens=num_steps + 8, ignore_eos=True))
    while not engine.step():
        pass
    seconds: dict[str, float] = defaultdict(float)
    ops = engine._runner._ops
    engine._runner._ops = engine._runner._views._ops = Timed(ops, seconds)
    before = engine.decode_meter.bytes_read
    steps: list[dict[str, float]] = []
    for _ in range(num_steps):
        seconds.clear()
        started = time.perf_counter()
        engine.step()
        whole = time.perf_counter() - started
        steps.append({**seconds, "python, embedding, sampling": whole - sum(seconds.values()), "whole step": whole})
    engine._runner._ops = engine._runner._views._ops = ops
    engine.cancel(request)
    engine.settle()
    medians = {part: statistics.median(step[part] for step in steps) for part in steps[0]}
    return medians, (engine.decode_meter.bytes_read - before) / num_steps


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--contexts", type=int, nargs="+", default=[128, 2048])
    args = parser.parse_args()
    llm = LLM(dtype="bf16")
    bandwidth = read_bandwidth(llm.device)
    print(f"{llm.ops_name}, {llm.threads} threads, bf16; reads {bandwidth / 1e9:.1f} GB/s")
    for context in args.contexts:
        medians, num_bytes = breakdown(llm, context)
        whole = medians["whole step"]
        for part, seconds in sorted(medians.items(), key=lambda item: item[1]):
            print(f"{context:6} tokens  {part:28} {seconds * 1e3:7.2f} ms  {seconds / whole:5.0%}")
        limit = num_bytes / bandwidth
        print(f"{context:6} tokens  {'limit: bytes over bandwidth':28} {limit * 1e3:7.2f} ms  {limit / whole:5.0%}")


if __name__ == "__main__":
    main()
