"""Decode speed by storage format, at a long context, in turn in one process, beside the bytes that a step must read.

    python benchmarks/format_speed.py [--context 7500] [--formats bf16,int8,int4,...] [--repeats 5] [--json]

A format may carry its tokens a block: int4@128. Ratios are medians of pairs measured one behind the other.
"""

import argparse
import json
import statistics
import time

import torch

from kvfolio import LLM, SamplingParams
from kvfolio.engine.english import english_ids
from kvfolio.engine.loaded import LoadedModel, load_model
from kvfolio.kernels.profile import read_bandwidth
from kvfolio.planner.compute import weight_bytes_read

FORMATS = "bf16,int8,fp8,k8v4,int6,int4,k4v3,k3v2"
NUM_TOKENS = 24


def open_llm(loaded: LoadedModel, name: str) -> LLM:
    kv_format, _, tokens = name.partition("@")
    options: dict[str, object] = {"block_tokens": int(tokens)} if tokens else {}
    return LLM(loaded, dtype="bf16", kv_format=kv_format, kv_memory="512MiB", **options)


def seconds_a_token(llm: LLM, prompt: list[int]) -> float:
    """Of decoding behind ``prompt``, which the cache has all but the last block of."""
    answer = llm.generate([prompt], SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True))[0]
    return (answer.time_s - answer.ttft_s) / (NUM_TOKENS - 1)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--context", type=int, default=7500)
    parser.add_argument("--formats", default=FORMATS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    names = args.formats.split(",")
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    loaded = load_model(None, "bf16")
    llms = {name: open_llm(loaded, name) for name in names}
    first = llms[names[0]]
    prompt = list(english_ids(first.tokenizer, args.context))
    times: dict[str, list[float]] = {name: [] for name in names}
    prefill_s: dict[str, float] = {}
    for name, llm in llms.items():  # the prompt's own pass, and warm-up
        started = time.monotonic()
        seconds_a_token(llm, prompt)
        prefill_s[name] = time.monotonic() - started
    for _ in range(args.repeats):
        for name, llm in llms.items():
            times[name].append(seconds_a_token(llm, prompt))
    bandwidth = read_bandwidth(first.device)
    weights = weight_bytes_read(first.spec, "bf16", 1)
    rows = []
    for name, llm in llms.items():
        cache = llm.layout.bytes_read(args.context, args.context + 1)
        ratios = [one / other for one, other in zip(times[names[0]], times[name], strict=True)]
        rows.append(
            {
                "format": name,
                "decode_tokens_per_s": 1 / statistics.median(times[name]),
                "speed_against_first": statistics.median(ratios),
                "limit_tokens_per_s": bandwidth / (weights + cache),
                "cache_bytes": cache,
                "first_pass_s": prefill_s[name],
            }
        )
    if args.json:
        print(json.dumps({"context": args.context, "bandwidth": bandwidth, "rows": rows}))
        return
    print(f"{args.context} tokens of context, {first.ops_name}, {first.threads} threads, {bandwidth / 1e9:.1f} GB/s")
    for row in rows:
        print(
            f"  {row['format']:10} {row['decode_tokens_per_s']:6.1f} tokens/s, {row['speed_against_first']:.2f}× "
            f"{names[0]}; limit {row['limit_tokens_per_s']:.1f} ({row['cache_bytes'] / 1e6:.0f} MB of cache); "
            f"prompt's pass {row['first_pass_s']:.1f} s"
        )


if __name__ == "__main__":
    main()
