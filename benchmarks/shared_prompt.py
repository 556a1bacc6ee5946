"""32 users arrive at once behind one system prompt of 1,500 tokens, with 100 of their own: with and without sharing.

SmolLM2, bf16, 64 tokens generated each, a fresh model for each way.
"""

import argparse
import random
import time

from kvfolio import LLM, SamplingParams

USERS, SHARED, OWN, NEW = 32, 1500, 100, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--users", type=int, default=USERS)
    args = parser.parse_args()
    draw = random.Random(0)
    shared = draw.choices(range(100, 49000), k=SHARED)
    prompts = [shared + draw.choices(range(100, 49000), k=OWN) for _ in range(args.users)]
    params = SamplingParams(max_tokens=NEW, ignore_eos=True)
    walls = []
    for prefix_cache in (True, False):
        llm = LLM(dtype="bf16", kv_memory="2GiB", prefix_cache=prefix_cache)
        begin = time.perf_counter()
        completions = llm.generate(prompts, params)
        walls.append(time.perf_counter() - begin)
        counters = llm.snapshot().counters
        first_s = max(completion.ttft_s for completion in completions)
        print(
            f"sharing {'on' if prefix_cache else 'off'}: {walls[-1]:.1f} s, last first token after {first_s:.1f} s, "
            f"{counters.num_tokens_computed - args.users * (NEW - 1):,} prompt tokens computed, peak "
            f"{llm.snapshot().peak.used_bytes / (1 << 20):.0f} MiB"
        )
    print(f"ratio: {walls[1] / walls[0]:.1f}")


if __name__ == "__main__":
    main()
