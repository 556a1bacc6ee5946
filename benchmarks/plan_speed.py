"""How quickly the planner answers: one model as a whole process, and forty models at twenty contexts.

    python benchmarks/plan_speed.py

Prints medians beside the promises: 0.3 s for ``kvfolio plan llama-3.1-8b`` from start to end, 1 s for the sweep.
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import kvfolio
from kvfolio.spec.catalogue import catalogue

REPEATS = 9


def median_s(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Seconds of the median run of ``work``."""
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        work()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def run_process(*words: str) -> None:
    """One command line, its output thrown away."""
    subprocess.run([sys.executable, *words], stdout=subprocess.DEVNULL, check=True)


def sweep(num_models: int = 40, num_contexts: int = 20) -> None:
    """Plans of the first models of the catalogue, read anew, at contexts from 512 tokens up, doubling."""
    contexts = tuple(512 * 2**step for step in range(num_contexts))
    for name in list(catalogue())[:num_models]:
        kvfolio.plan(name, context=contexts)


if __name__ == "__main__":
    bare = median_s(lambda: run_process("-c", "pass"))
    whole = median_s(lambda: run_process("-m", "kvfolio", "plan", "llama-3.1-8b"))
    print(f"kvfolio plan llama-3.1-8b: {whole:.3f} s (promised 0.3; Python alone {bare:.3f})")
    print(f"40 models × 20 contexts: {median_s(sweep, 3):.3f} s (promised 1)")
