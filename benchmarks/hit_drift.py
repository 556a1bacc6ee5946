"""How far a cache hit moves the logits where products of many and few rows round differently: SmolLM2, cold beside hit.

Six prompts of 40 to 600 tokens, each hit in four places. With `deterministic` every difference is 0.
"""

import argparse
from dataclasses import dataclass, field

import torch

from kvfolio import LLM, CacheParams, SamplingParams
from kvfolio.sched.request import Step

LENGTHS = (40, 120, 250, 400, 500, 600)
NEW = 32
WAYS = (("f32", "auto", False), ("bf16", "auto", False), ("bf16", "int8", False), ("bf16", "auto", True))


class Kept:
    """Stands before an engine's runner and keeps the first row of logits of a request."""

    def __init__(self, runner: object) -> None:
        self.runner = runner
        self.first: torch.Tensor | None = None

    def run(self, step: Step) -> torch.Tensor:
        logits: torch.Tensor = self.runner.run(step)  # type: ignore[attr-defined]
        if self.first is None and len(logits):
            self.first = logits[0].float().clone()
        return logits


@dataclass
class Drift:
    """What was seen of one way to compute."""

    largest: float = 0.0
    spread: list[float] = field(default_factory=list)  # standard deviation of the logits
    num_equal: int = 0
    num_pairs: int = 0


def ask(llm: LLM, kept: Kept, tokens: list[int], namespace: str, num_new: int = NEW) -> tuple[torch.Tensor, list[int]]:
    """The first row of logits of a request, and its greedy tokens."""
    kept.first = None
    params = SamplingParams(max_tokens=num_new, ignore_eos=True)
    found = llm.generate([tokens], params, CacheParams(namespace))[0]
    assert kept.first is not None
    return kept.first, list(found.token_ids)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    args = parser.parse_args()
    for dtype, kv_format, deterministic in WAYS:
        llm = LLM(dtype=dtype, kv_format=kv_format, deterministic=deterministic)
        kept = llm.engine._runner = Kept(llm.engine._runner)  # type: ignore[assignment]
        drift = Drift()
        text = llm.tokenizer.encode(
            "The ledger lists who holds which leaf, and since when, and for whom it is kept. " * 60
        )
        for length in args.lengths:
            prompt = text[:length]
            cold, expected = ask(llm, kept, prompt, f"cold {length}")
            drift.spread.append(float(cold.std()))
            for number, hit in enumerate((length, length // 2, length - 3, length - 7)):
                ask(llm, kept, prompt[:hit], f"warm {length} {number}", 1)
                warm, tokens = ask(llm, kept, prompt, f"warm {length} {number}")
                drift.largest = max(drift.largest, float((warm - cold).abs().max()))
                drift.num_equal += tokens == expected
                drift.num_pairs += 1
        name = f"{dtype}, cache {kv_format}{', deterministic' if deterministic else ''}"
        spread = sum(drift.spread) / len(drift.spread)
        print(
            f"{name}: largest difference of a first logit {drift.largest:.2g} (they spread by {spread:.2g}); "
            f"{NEW} greedy tokens equal in {drift.num_equal} of {drift.num_pairs}"
        )


if __name__ == "__main__":
    main()
