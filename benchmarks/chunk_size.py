"""How many prompt tokens a step should compute: time to the first token of a 2,048-token prompt by max_step_tokens.

    python benchmarks/chunk_size.py

A larger step reads the weights less often; a smaller one makes those who are decoding wait less.
"""

import statistics

from kvfolio import LLM, SamplingParams

PROMPT = 2048


def main() -> None:
    print("max_step_tokens  first token of 2,048, s  one step, s")
    for max_step_tokens in (128, 256, 512, 1024, 2048):
        llm = LLM(dtype="bf16", max_step_tokens=max_step_tokens)
        prompts = [[7 + (13 * index + seed) % 40_000 for index in range(PROMPT)] for seed in range(4)]
        params = SamplingParams(max_tokens=1)
        times = [llm.generate([prompt], params)[0].ttft_s for prompt in prompts][1:]
        ttft_s = statistics.median(times)
        print(f"{max_step_tokens:15}  {ttft_s:23.2f}  {ttft_s * max_step_tokens / PROMPT:11.2f}", flush=True)


if __name__ == "__main__":
    main()
