"""Speed of kvfolio beside transformers' generate, same weights, same threads, in turn in one process.

    python benchmarks/decode_speed.py [--repeats 3] [--json]

Prints medians: time to first token and decode tokens/s at 128 and 2,048 tokens of context, and for 16 unequal
prompts.
"""

import argparse
import json
import logging
import statistics
from pydoc_data import topics
from typing import Any

import peer_transformers
import torch

from kvfolio import LLM, SamplingParams
from kvfolio.kernels.profile import read_bandwidth

NUM_TOKENS = 64
BATCH_LENGTHS = [40 + 64 * index for index in range(16)]  # 40 … 1,000, mean 520


def prompts_of(llm: LLM, lengths: list[int], skip: int) -> list[list[int]]:
    """Prompts of the given lengths from Python's language reference, different text each time."""
    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    ids = llm.tokenizer.encode(text[skip * 7919 % 100_000 :][:200_000])
    prompts, at = [], 0
    for length in lengths:
        prompts.append(ids[at : at + length])
        at += length
    return prompts


def ours(llm: LLM, prompts: list[list[int]]) -> dict[str, Any]:
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True)
    completions = llm.generate(prompts, params)
    first, last = max(c.ttft_s for c in completions), max(c.time_s for c in completions)
    return {"ttft_s": first, "decode_s": last - first, "tokens": [list(c.token_ids) for c in completions]}


def theirs(model: Any, prompts: list[list[int]]) -> dict[str, Any]:
    ttft_s, decode_s, tokens = peer_transformers.generate(model, prompts, NUM_TOKENS)
    return {"ttft_s": ttft_s, "decode_s": decode_s, "tokens": tokens}


def measure(llm: LLM, model: Any, name: str, lengths: list[int], repeats: int) -> dict[str, Any]:
    rows: dict[str, list[dict[str, Any]]] = {"kvfolio": [], "transformers": []}
    for repeat in range(repeats + 1):  # the first, on a text of its own, warms both up
        prompts = prompts_of(llm, lengths, repeat)
        rows["kvfolio"].append(ours(llm, prompts))
        rows["transformers"].append(theirs(model, prompts))
    result: dict[str, Any] = {"workload": name}
    for who, all_runs in rows.items():
        runs = all_runs[1:]
        decode = [len(lengths) * (NUM_TOKENS - 1) / run["decode_s"] for run in runs]
        result[who] = {
            "ttft_s": statistics.median(run["ttft_s"] for run in runs),
            "decode_tokens_per_s": statistics.median(decode),
            "wall_s": statistics.median(run["ttft_s"] + run["decode_s"] for run in runs),
        }
    pairs = list(zip(rows["kvfolio"][1:], rows["transformers"][1:], strict=True))
    result["ratio_decode"] = statistics.median(other["decode_s"] / one["decode_s"] for one, other in pairs)
    result["ratio_wall"] = statistics.median(
        (other["ttft_s"] + other["decode_s"]) / (one["ttft_s"] + one["decode_s"]) for one, other in pairs
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--only", default="")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    llm = LLM(dtype="bf16", kv_memory="2GiB", threads=args.threads, prefix_cache=False)
    model = peer_transformers.load_smollm2(torch.bfloat16)
    workloads = {"128": [128], "2048": [2048], "batch16": BATCH_LENGTHS}
    for name, lengths in workloads.items():
        if args.only and args.only != name:
            continue
        result = measure(llm, model, name, lengths, args.repeats)
        if args.json:
            print(json.dumps(result), flush=True)
            continue
        print(f"{name} ({llm.ops_name}, {torch.get_num_threads()} threads, bf16)")
        for who in ("kvfolio", "transformers"):
            row = result[who]
            print(
                f"  {who:13} first token {row['ttft_s']:.3f} s, decode {row['decode_tokens_per_s']:.1f} tokens/s, "
                f"all {row['wall_s']:.2f} s"
            )
        print(f"  ratio: decode {result['ratio_decode']:.2f}, all {result['ratio_wall']:.2f}", flush=True)
    print(f"read bandwidth {read_bandwidth(llm.device) / 1e9:.1f} GB/s")


if __name__ == "__main__":
    main()
