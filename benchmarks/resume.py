"""A conversation of 4,000 tokens goes on with 50 more: time to the first token, warm, beside a 50-token chunk alone.

SmolLM2, bf16. The chunk is the last step of a cold request of 4,050 tokens whose first step took 4,000.
"""

import argparse
import statistics
import time

from kvfolio import LLM, SamplingParams
from kvfolio.sched.request import Step

DEPTH, NEW = 4000, 50


class Timed:
    """Stands before an engine's runner and keeps how long each step took."""

    def __init__(self, runner: object) -> None:
        self.runner = runner
        self.times: list[tuple[int, float]] = []  # tokens, seconds

    def run(self, step: Step) -> object:
        begin = time.perf_counter()
        logits = self.runner.run(step)  # type: ignore[attr-defined]
        self.times.append((step.num_tokens, time.perf_counter() - begin))
        return logits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    args = parser.parse_args()
    llm = LLM(dtype="bf16", max_step_tokens=DEPTH, kv_memory="1GiB")
    timed = llm.engine._runner = Timed(llm.engine._runner)  # type: ignore[assignment]
    one = SamplingParams(max_tokens=1, ignore_eos=True)
    resumed_s, chunk_s, cold_s = [], [], []
    for number in range(args.rounds + 1):
        text = [(token * 7919 + number * 104729) % 40000 + 100 for token in range(DEPTH + NEW)]
        other = [token + 1 for token in text]
        cold_s.append(llm.generate([text[:DEPTH]], one)[0].ttft_s)
        resumed = llm.generate([text], one)[0]
        assert resumed.usage.cached_tokens == DEPTH
        resumed_s.append(resumed.ttft_s)
        timed.times.clear()
        llm.generate([other], one)
        assert [tokens for tokens, _ in timed.times] == [DEPTH, NEW]
        chunk_s.append(timed.times[-1][1])
    middle = {
        name: statistics.median(times[1:])
        for name, times in (("cold", cold_s), ("resumed", resumed_s), ("chunk", chunk_s))
    }
    print(f"first token of {DEPTH:,} tokens, cold: {middle['cold'] * 1e3:.0f} ms")
    print(f"first token when resumed with {NEW}: {middle['resumed'] * 1e3:.1f} ms")
    ratio = middle["resumed"] / middle["chunk"]
    print(f"a chunk of {NEW} at that depth: {middle['chunk'] * 1e3:.1f} ms; ratio {ratio:.2f}")


if __name__ == "__main__":
    main()
