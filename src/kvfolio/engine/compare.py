"""Decodes the same text with and without the cache: are the tokens the same, and what does each way cost?

Without a cache every token is a request of its own over the whole text so far. Knows nothing of how a step is computed.
"""

from dataclasses import dataclass

from kvfolio.engine.english import english_ids
from kvfolio.engine.llm import LLM
from kvfolio.engine.params import CacheParams, SamplingParams
from kvfolio.errors import OptionError
from kvfolio.planner.compute import DecodeFlops, decode_flops, textbook_flops, weight_bytes_read

COLD = CacheParams(reuse=False)  # each text is computed, whatever ran before


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first token that differs, and how close the two best tokens were there."""

    index: int
    with_cache: int  # token id
    without_cache: int
    logprob_gap: float  # between the best and the second-best token, with the cache


@dataclass(frozen=True, slots=True)
class Way:
    """One way to decode: measured time, counted FLOPs, bytes that one step reads on average."""

    time_s: float
    flops: int
    bytes_read_per_step: int


@dataclass(frozen=True, slots=True)
class Comparison:
    """Both ways, side by side. Times and FLOPs are those of decoding: the prompt's one pass is common to both."""

    prompt_tokens: int
    tokens: int
    identical: bool
    divergence: Divergence | None
    text: str
    prefill_s: float
    with_cache: Way
    without_cache: Way
    flops: DecodeFlops
    textbook_with_cache: float  # 2N·G
    textbook_without_cache: float  # 2N·G·(P + G/2)

    @property
    def time_ratio(self) -> float:
        return self.without_cache.time_s / self.with_cache.time_s


def compare(llm: LLM, prompt_tokens: int, tokens: int) -> Comparison:
    """Decode ``tokens`` tokens behind a prompt of ``prompt_tokens`` tokens of English, greedily, both ways.

    Raises OptionError for counts that cannot be compared, RequestError if they do not fit the model or its cache.
    """
    if prompt_tokens < 1 or tokens < 2:
        raise OptionError(
            f"compare needs at least 1 prompt token and 2 decoded ones, not {prompt_tokens} and {tokens}: "
            "the first token comes out of the prompt's pass, the cache serves those behind it"
        )
    prompt = english_ids(llm.tokenizer, prompt_tokens)
    _one_token(llm, prompt)  # warm-up: pages and threads
    cached = llm.generate([prompt], SamplingParams(max_tokens=tokens, ignore_eos=True, logprobs=2), COLD)[0]
    uncached_ids = [cached.token_ids[0]]
    time_s = 0.0
    for done in range(1, tokens):
        # The cached way's tokens lead both, so that one difference does not hide what follows it.
        token_id, step_s = _one_token(llm, [*prompt, *cached.token_ids[:done]])
        uncached_ids.append(token_id)
        time_s += step_s
    flops = decode_flops(llm.spec, prompt_tokens, tokens)
    num_params = llm.spec.weights.num_active_params
    textbook = textbook_flops(num_params, prompt_tokens, tokens)
    return Comparison(
        prompt_tokens,
        tokens,
        tuple(uncached_ids) == cached.token_ids,
        _divergence(cached.token_ids, uncached_ids, cached.top_logprobs or ()),
        cached.text,
        cached.ttft_s,
        Way(cached.time_s - cached.ttft_s, flops.decode_with_cache, _bytes_read(llm, prompt_tokens, tokens, True)),
        Way(time_s, flops.decode_without_cache, _bytes_read(llm, prompt_tokens, tokens, False)),
        flops,
        *textbook,
    )


def _one_token(llm: LLM, ids: list[int]) -> tuple[int, float]:
    """(the next token, seconds) of one pass over all of ``ids``; nothing is kept."""
    completion = llm.generate([ids], SamplingParams(max_tokens=1, ignore_eos=True), COLD)[0]
    return completion.token_ids[0], completion.time_s


def _divergence(
    cached: tuple[int, ...], uncached: list[int], top: tuple[tuple[tuple[int, float], ...], ...]
) -> Divergence | None:
    for index, (one, other) in enumerate(zip(cached, uncached, strict=True)):
        if one != other:
            (_, best), (_, second) = top[index]
            return Divergence(index, one, other, best - second)
    return None


def _bytes_read(llm: LLM, prompt_tokens: int, tokens: int, with_cache: bool) -> int:
    """Weights, and keys and values of the text so far, for one decoded token: the mean over all of them.

    Without a cache the whole text is computed in chunks of at most max_step_tokens: each reads the weights, and the
    keys and values up to its end.
    """
    longest = llm.options.max_step_tokens
    total = 0
    positions = range(prompt_tokens, prompt_tokens + tokens - 1)
    for last in positions:
        begins = [last] if with_cache else range(0, last + 1, longest)
        for begin in begins:
            end = min(begin + longest - 1, last)
            total += weight_bytes_read(llm.spec, llm.dtype, end + 1 - begin) + llm.layout.bytes_read(end, end + 1)
    return total // len(positions)
