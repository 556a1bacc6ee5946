"""Prediction against measurement: one decode step of Llama-3.1-8B's shape, and the bytes of its weights and cache.

    python benchmarks/gpu/predict.py            # needs a GPU with about 40 GB free, and a few minutes
    python benchmarks/gpu/predict.py --small    # a shrunk model on the CPU: does this file work?

Plain torch with random bf16 weights, a static cache that is full up to the context, CUDA events, medians. Beside it
stands ``kvfolio.plan`` for the device's data sheet and for the bandwidth that kernels/profile.py measures here. The
plan counts every weight as read; a step only looks up a row of the embedding table, so the limit without that table is
shown too, and the share of it that was reached. Ends with a table and one line of JSON.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

import torch
from llama_step import ATTENTIONS, LLAMA_8B, SMALL, Attend, Network, check_attentions, filled_cache
from torch import Tensor

import kvfolio
from kvfolio.errors import OptionError
from kvfolio.kernels.profile import measure_machine, profile_record
from kvfolio.planner.hardware import Device, device_from_record, find_device
from kvfolio.spec.model import ModelSpec

GIB = 1 << 30
SPARE_BYTES = 2 * GIB  # for activations, graphs and the allocator


# ---- measuring ------------------------------------------------------------------------------------------------------


def allocated(device: torch.device) -> int | None:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def graph_of(work: Callable[[], object]) -> Callable[[], object] | None:
    """``work`` as one CUDA graph; None where it cannot be captured."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            work()
    except RuntimeError as error:
        torch.cuda.synchronize()
        print(f"no CUDA graph: {str(error).splitlines()[0]}", file=sys.stderr)
        return None
    return graph.replay


def median_seconds(work: Callable[[], object], device: torch.device, steps: int) -> float:
    """Of ``steps`` runs, the first few not counted; on a GPU by its own clock."""
    if device.type == "cpu":
        times = []
        for _ in range(steps + 3):
            started = time.perf_counter()
            work()
            times.append(time.perf_counter() - started)
        return statistics.median(times[3:])
    for _ in range(3):
        work()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    for mark in marks[1:]:
        work()
        mark.record()
    torch.cuda.synchronize(device)
    return statistics.median(first.elapsed_time(then) for first, then in pairwise(marks)) / 1e3


@dataclass(frozen=True, slots=True)
class Row:
    """One context and batch. Seconds of a step, bytes of all sequences' caches; None: not known or not measured."""

    batch: int
    context: int
    sheet_s: float | None  # the plan, by the data sheet
    plan_s: float  # the plan, by the measured bandwidth
    limit_s: float  # the same, the embedding table not read
    step_s: float | None
    how: str  # attention and graph of the quickest; else why nothing was measured
    cache_planned_bytes: int
    cache_bytes: int | None
    cache_allocated_bytes: int | None  # by torch's allocator


@dataclass(frozen=True, slots=True)
class Bench:
    """What every row is measured and predicted with."""

    network: Network
    spec: ModelSpec
    device: torch.device
    sheet: Device | None
    own: Device
    steps: int

    def predicted(self, batch: int, context: int) -> Row:
        spec, asked = self.spec, {"context": [context, context + 1], "users": batch}

        def step_s(device: Device, weights_bytes: int) -> float:
            plan = kvfolio.plan(spec, device=device, weights_bytes=weights_bytes, **asked)  # type: ignore[arg-type]
            assert plan.step is not None
            return plan.step.time_s

        every = spec.weights.num_bytes
        kept = kvfolio.plan(spec, device=self.own, **asked).kv.bytes_at[str(context + 1)]  # type: ignore[arg-type]
        return Row(
            batch=batch,
            context=context,
            sheet_s=None if self.sheet is None else step_s(self.sheet, every),
            plan_s=step_s(self.own, every),
            limit_s=step_s(self.own, every - self.network.shape.table_bytes),
            step_s=None,
            how="",
            cache_planned_bytes=batch * kept,
            cache_bytes=None,
            cache_allocated_bytes=None,
        )

    def measured(self, row: Row) -> Row:
        free = torch.cuda.mem_get_info(self.device)[0] if self.device.type == "cuda" else None
        if free is not None and row.cache_planned_bytes + SPARE_BYTES > free:
            return replace(row, how=f"needs {row.cache_planned_bytes / GIB:.0f} GiB, {free / GIB:.0f} free")
        before = allocated(self.device)
        cache = filled_cache(self.network.shape, row.batch, row.context + 1, self.device)
        after = allocated(self.device)
        tokens = torch.arange(row.batch, device=self.device)
        turns = self.network.turns(row.context)
        timed = dict(self._timed(lambda attend: self.network.step(tokens, cache, turns, attend)))
        how = min(timed, key=lambda name: timed[name])
        return replace(
            row,
            step_s=timed[how],
            how=how,
            cache_bytes=sum(layer.nbytes for layer in cache),
            cache_allocated_bytes=None if before is None or after is None else after - before,
        )

    def _timed(self, step: Callable[[Attend], Tensor]) -> Iterator[tuple[str, float]]:
        for name, attend in ATTENTIONS.items():

            def work(attend: Attend = attend) -> Tensor:
                return step(attend)

            assert torch.isfinite(work()).all(), f"{name} gave numbers that are none"
            yield name, median_seconds(work, self.device, self.steps)
            graph = graph_of(work) if self.device.type == "cuda" else None
            if graph is not None:
                yield f"{name}, graph", median_seconds(graph, self.device, self.steps)


# ---- what is printed ------------------------------------------------------------------------------------------------


def ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{seconds * 1e3:.3f}"


def print_rows(rows: list[Row]) -> None:
    print("\none decode step, ms; plan: reads every weight; limit: all but the embedding table; share: limit / step")
    print(f"{'batch':>5} {'context':>8} {'sheet':>9} {'plan':>9} {'limit':>9} {'step':>9} {'share':>6}  how")
    for row in rows:
        share = "–" if row.step_s is None else f"{row.limit_s / row.step_s:.0%}"
        columns = " ".join(f"{ms(value):>9}" for value in (row.sheet_s, row.plan_s, row.limit_s, row.step_s))
        print(f"{row.batch:>5} {row.context:>8,} {columns} {share:>6}  {row.how}")
    print("\nbytes of the caches")
    for row in rows:
        if row.cache_bytes is not None:
            said = "" if row.cache_allocated_bytes is None else f", allocated {row.cache_allocated_bytes:,}"
            held = f"planned {row.cache_planned_bytes:,}, held {row.cache_bytes:,}{said}"
            print(f"{row.batch:>5} {row.context:>8,}  {held}")


def find_sheet(name: str) -> Device | None:
    """The device of the table that a GPU's name means. NVIDIA's SXM parts do not say so in theirs; the others do."""
    try:
        return find_device(name)
    except OptionError as error:
        if not name.lower().endswith(" sxm"):
            return find_sheet(f"{name} sxm")
        print(f"no data sheet: {error}")
        return None


def read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a shrunk model on the CPU: only to see that this runs")
    parser.add_argument("--contexts", type=int, nargs="+", help="tokens already in the cache (0 8192 131071)")
    parser.add_argument("--batches", type=int, nargs="+", help="sequences in one step (1 16)")
    parser.add_argument("--steps", type=int, default=30, help="timed steps of each kind (30)")
    args = parser.parse_args()
    # The token that is decoded takes the last of 131,072 places.
    args.contexts = args.contexts or ([0, 64, 511] if args.small else [0, 8192, 131_071])
    args.batches = args.batches or ([1, 4] if args.small else [1, 16])
    if min(*args.contexts, 0) < 0 or min(args.batches) < 1 or args.steps < 1:
        parser.error("contexts must be 0 or more, batches and steps at least 1")
    return args


@torch.inference_mode()
def main() -> None:
    args = read_arguments()
    if not args.small and not torch.cuda.is_available():
        sys.exit("no CUDA device here: nothing was measured; --small runs a shrunk model on the CPU")
    device, shape = (torch.device("cpu"), SMALL) if args.small else (torch.device("cuda", 0), LLAMA_8B)
    spec = shape.spec()
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < spec.weights.num_bytes + SPARE_BYTES:
        sys.exit(f"the weights take {spec.weights.num_bytes / GIB:.0f} GiB; this GPU has less free")
    check_attentions(device)
    profile = measure_machine()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    sheet = find_sheet(profile.name) if device.type == "cuda" else None
    print(f"{profile.name}: {profile.bandwidth_bytes_per_s / 1e9:,.0f} GB/s, {profile.bf16_flops / 1e12:,.1f} TFLOP/s")
    if sheet is not None and sheet.bandwidth_bytes_per_s:
        print(f"data sheet of {sheet.name}: {sheet.bandwidth_bytes_per_s / 1e9:,.0f} GB/s")
    before = allocated(device)
    network = Network(shape, device)
    after = allocated(device)
    weights = {
        "planned_bytes": spec.weights.num_bytes,
        "held_bytes": network.num_bytes,
        "allocated_bytes": None if before is None or after is None else after - before,
    }
    print("weights: " + ", ".join(f"{name} {count:,}" for name, count in weights.items() if count is not None))
    own = device_from_record(profile_record(profile), "this measurement")
    bench = Bench(network, spec, device, sheet, own, args.steps)
    rows = []
    for batch in args.batches:
        for context in args.contexts:
            rows.append(bench.measured(bench.predicted(batch, context)))
            if device.type == "cuda":
                torch.cuda.empty_cache()
    print_rows(rows)
    if args.small:
        print("\n--small: the times mean nothing, such a model lies in the processor's caches")
    record = {
        "benchmark": "predict",
        "small": args.small,
        "torch": torch.__version__,
        "sheet": None if sheet is None else asdict(sheet),
        "machine": profile_record(profile),
        "weights": weights,
        "rows": [asdict(row) for row in rows],
    }
    print("\n" + json.dumps(record))
    exact = network.num_bytes == spec.weights.num_bytes
    exact = exact and all(row.cache_bytes in (None, row.cache_planned_bytes) for row in rows)
    sys.exit(0 if exact else 1)


if __name__ == "__main__":
    main()
