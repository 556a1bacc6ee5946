"""Answers with their logits, and the same requests computed cold: each alone, on a roomy pool, from its first token on.

Knows nothing of what made an answer warm.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from served import assert_idle, recorded
from torch import Tensor

from kvfolio import LLM, SamplingParams
from kvfolio.engine.answer import Completion
from kvfolio.engine.params import CacheParams
from kvfolio.sched.scheduler import _Draft
from kvfolio.spec.formats import find_cache_format

Prompt = Sequence[int]


@dataclass(frozen=True)
class Answers:
    """What prompts gave, in their order."""

    completions: list[Completion]
    logits: list[Tensor]  # [num_generated, vocab] each

    @property
    def tokens(self) -> list[list[int]]:
        return [list(done.token_ids) for done in self.completions]

    @property
    def cached(self) -> list[int]:
        """Prompt tokens that were in the cache."""
        return [done.usage.cached_tokens for done in self.completions]


def ask(
    llm: LLM,
    prompts: Sequence[Prompt],
    params: SamplingParams | Sequence[SamplingParams],
    caching: CacheParams | None = None,
) -> Answers:
    """Ask all prompts together."""
    first = llm.engine._next_id  # others may be running
    with recorded(llm) as record:
        completions = llm.generate(prompts, params, caching)
    return Answers(completions, [torch.stack(record.rows[key]) for key in sorted(record.rows) if key >= first])


class Setting(NamedTuple):
    """A model, how it computes and how it stores."""

    name: str
    dtype: str = "f32"
    kv_format: str = "auto"
    kv_layers: str = ""
    sink_blocks: int = 0

    @property
    def options(self) -> dict[str, str | int]:
        return {name: value for name, value in self._asdict().items() if name != "name"}

    @property
    def block_tokens(self) -> int:
        """Of the smallest blocks that can be stored so."""
        return 4 if self.kv_format == "auto" else max(4, find_cache_format(self.kv_format).least_block_tokens)

    @property
    def is_lossless(self) -> bool:
        return self.kv_format == "auto" and not self.kv_layers


SETTINGS = [
    Setting("llama"),
    Setting("gemma3"),  # windows of 16 and full attention
    Setting("mistral"),  # windows of 16 only
    Setting("gpt2"),
    Setting("qwen3-moe"),
    Setting("llama", "bf16"),
    Setting("gemma3", "bf16"),
    Setting("llama", "f32", "int8"),
    Setting("gemma3", "bf16", "int8"),
    Setting("mixtral", "bf16", "int8"),
    Setting("mistral", "f32", "bf16/int8"),
    Setting("gemma3", "f32", "int8", "2=exact,5-6=bf16"),  # two groups with windows, two without
    Setting("llama", "bf16", "auto", "1=int8"),
    Setting("llama", "f32", "fp8-scaled"),
    Setting("gpt2", "bf16", "fp8/fp8-e5m2"),
    Setting("llama", "bf16", "int4"),
    Setting("gemma3", "f32", "k8v4"),
    Setting("mistral", "bf16", "int6"),
    Setting("gpt2", "f32", "int5/int2"),
    Setting("llama", "f32", "int8-channel"),
    Setting("gemma3", "bf16", "int3-rotated/int4-token"),
    Setting("falcon-7b"),
    Setting("falcon-40b", "bf16"),
    Setting("falcon-7b", "f32", "int4"),
    Setting("falcon-40b", "bf16", "int8"),
    Setting("deepseek-v3"),
    Setting("deepseek-v2-lite", "bf16"),
    Setting("deepseek-v3", "f32", "int8"),
    Setting("deepseek-v2", "bf16", "int4"),
    Setting("deepseek-v3-dense", "f32", "bf16/int8", "1=exact"),
    Setting("deepseek-v3", "bf16", "fp8"),
    Setting("deepseek-v2-lite", "f32", "int6-token/int3"),
    Setting("gpt-oss"),  # windows of 16 and full attention, a sink logit a head, experts
    Setting("gpt-oss", "bf16", "int8"),
]
SINKS = [
    Setting("deepseek-v3", "f32", "int4", sink_blocks=1),
    Setting("llama", "f32", "int8", sink_blocks=1),
    Setting("gemma3", "bf16", "int8", sink_blocks=2),
    Setting("gemma3", "f32", "int8", "2=exact,5-6=bf16", sink_blocks=1),  # in one group of four
    Setting("llama", "bf16", "int4", sink_blocks=1),
]
SETTINGS += SINKS
FEW = [Setting("llama"), Setting("gemma3"), Setting("mistral"), Setting("gemma3", "bf16", "int8")]


def spelled(setting: Setting) -> str:
    words = [setting.name, setting.dtype, setting.kv_format.replace("/", "+")]
    words += [setting.kv_layers] if setting.kv_layers else []
    return "-".join([*words, f"{setting.sink_blocks} sinks"] if setting.sink_blocks else words)


class Cold:
    """One model with one set of options, without a prefix cache, and with one that no request may read."""

    def __init__(self, folder: Path | None, **options: object) -> None:
        options = {"kv_memory": "1MiB", "deterministic": True, "debug": True, **options}
        self.llm = LLM(folder, prefix_cache=False, **options)
        self._unread = LLM(folder, **options)
        self._known: dict[tuple[tuple[int, ...], SamplingParams], tuple[list[int], Tensor]] = {}

    def answer(self, prompt: Prompt, params: SamplingParams) -> tuple[list[int], Tensor]:
        """Tokens and logits [num_generated, vocab] of ``prompt``."""
        key = tuple(prompt), params
        if key not in self._known:
            off = ask(self.llm, [prompt], params)
            assert off.cached == [0]
            assert_idle(self.llm)
            if len(self._known) % 2 == 0:  # every other one: they take their time
                unread = ask(self._unread, [prompt], params, CacheParams(reuse=False))
                assert (unread.cached, unread.tokens) == (off.cached, off.tokens)
                assert torch.equal(off.logits[0], unread.logits[0])
                assert_idle(self._unread)
            self._known[key] = off.tokens[0], off.logits[0]
        return self._known[key]

    def check(self, answers: Answers, prompts: Sequence[Prompt], params: SamplingParams) -> None:
        """Every answer is, to the bit of every logit, the one computed cold."""
        for tokens, logits, prompt in zip(answers.tokens, answers.logits, prompts, strict=True):
            expected_tokens, expected_logits = self.answer(prompt, params)
            assert tokens == expected_tokens
            assert torch.equal(logits, expected_logits)


@dataclass(frozen=True)
class Warm:
    """A model whose answers are checked, one and all."""

    llm: LLM
    cold: Cold

    def ask(self, prompts: Sequence[Prompt], params: SamplingParams, caching: CacheParams | None = None) -> Answers:
        answers = ask(self.llm, prompts, params, caching)
        self.cold.check(answers, prompts, params)
        return answers

    def cached(self, prompt: Prompt, params: SamplingParams, caching: CacheParams | None = None) -> int:
        """How many tokens of ``prompt`` were in the cache; its answer is checked."""
        return self.ask([prompt], params, caching).cached[0]


def preempt_often(llm: LLM, draw: random.Random) -> None:
    """Every now and then a running request gives up its blocks, though nobody needs them."""
    scheduler = llm.engine.scheduler
    admit_waiting = scheduler._admit_waiting

    def preempt_one(draft: _Draft) -> None:
        if len(draft.chunks) > 1 and draw.random() < 0.3:
            scheduler._preempt(draw.choice(list(scheduler._running.values())), draft)
        admit_waiting(draft)

    scheduler._admit_waiting = preempt_one
