"""One answer on its way, and what becomes of it: pieces of text, then a completion.

Knows nothing of how tokens are computed.
"""

from collections import deque
from dataclasses import dataclass, field

from kvfolio.engine.engine import CacheUse, Output
from kvfolio.engine.params import SamplingParams
from kvfolio.engine.text import StopMatcher, TextStream


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request, as OpenAI's API names them."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int  # prompt tokens that were in the cache already


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to one prompt."""

    text: str
    token_ids: tuple[int, ...]  # generated, a stop token included
    finish_reason: str  # stop or length
    usage: Usage
    logprobs: tuple[float, ...] | None  # of each generated token, if asked for
    top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None
    prompt_logprobs: tuple[float | None, ...] | None  # of each prompt token, if asked for; the first one has none
    prompt_top_logprobs: tuple[tuple[tuple[int, float], ...], ...] | None
    ttft_s: float  # from submission to the first token
    time_s: float  # from submission to the last token
    cache: CacheUse  # what was found in the cache, why not more, and preemptions


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of an answer as it is generated. The last one has the whole completion."""

    text: str
    completion: Completion | None = None


@dataclass(slots=True)
class Answer:
    """One request on its way."""

    index: int
    prompt_tokens: int
    params: SamplingParams
    stream: TextStream
    stops: StopMatcher
    submitted_s: float
    first_s: float = 0.0
    last_s: float = 0.0
    text: list[str] = field(default_factory=list)
    outputs: list[Output] = field(default_factory=list)
    pieces: deque[Piece] = field(default_factory=deque)  # not yet taken by the caller
    error: BaseException | None = None  # the engine failed: nothing more will come

    def push(self, output: Output) -> tuple[str, str | None]:
        """Book one token; returns (text that can be shown now, why the answer ends or None)."""
        self.last_s = output.time_s
        if not self.outputs:
            self.first_s = output.time_s
        self.outputs.append(output)
        shown, hit = self.stops.push(self.stream.push(output.sampled.token_id))
        reason = output.finish_reason
        if hit is None and reason is not None:
            rest, hit = self.stops.push(self.stream.finish())
            shown += rest
            if hit is None:
                shown += self.stops.finish()
        if hit is not None:
            reason = "stop"
        self.text.append(shown)
        return shown, reason

    def completion(self, reason: str) -> Completion:
        sampled = [output.sampled for output in self.outputs]
        scores = self.outputs[0].prompt_scores
        if self.params.prompt_logprobs is not None and scores is None:
            scores = ()  # a prompt of one token
        wants_logprobs = self.params.logprobs is not None
        return Completion(
            text="".join(self.text),
            token_ids=tuple(choice.token_id for choice in sampled),
            finish_reason=reason,
            usage=Usage(self.prompt_tokens, len(sampled), self.outputs[0].cache.num_hit_tokens),
            logprobs=tuple(choice.logprob or 0.0 for choice in sampled) if wants_logprobs else None,
            top_logprobs=tuple(choice.top for choice in sampled) if wants_logprobs else None,
            prompt_logprobs=None if scores is None else (None, *(one.logprob for one in scores)),
            prompt_top_logprobs=None if scores is None else ((), *(one.top for one in scores)),
            ttft_s=self.first_s - self.submitted_s,
            time_s=self.last_s - self.submitted_s,
            cache=self.outputs[-1].cache,
        )
