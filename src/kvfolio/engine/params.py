"""How one request wants its tokens chosen, where it ends, and how it uses the cache; all checked when made.

Knows nothing of logits, tokenizers or torch.
"""

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from kvfolio.cache.index import PIN
from kvfolio.cache.retention import MAX_PRIORITY, KeepRange
from kvfolio.errors import OptionError, RequestError

MAX_LOGPROBS = 20
MAX_SEED = 2**63 - 1
MAX_THREADS = 1024  # far more than help; the OpenMP runtime ends the process when it cannot make as many as asked for


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """What a request asks of the sampler. Raises OptionError for any value outside its range.

    The order in which the filters apply is described in ``sampler.py``.
    """

    max_tokens: int = 256  # at least 1; a request that ends earlier ends earlier
    temperature: float = 0.0  # 0: greedy, the most likely token
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    seed: int | None = None  # None: another draw each time
    stop: Sequence[str] = ()  # one string or several; the text ends right before it; kept as a tuple
    stop_token_ids: Sequence[int] = ()  # kept as a tuple
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; 0: of the chosen token; k: and of the k most likely
    prompt_logprobs: int | None = None  # the same of the prompt's tokens: none comes from the cache then

    def __post_init__(self) -> None:
        check_int("max_tokens", self.max_tokens, 1, math.inf, "1 or more; leave it out for 256")
        _check_float("temperature", self.temperature, 0, sys.float_info.max, "0 or more; 0 is greedy")
        check_int("top_k", self.top_k, 0, math.inf, "0 or more; 0 switches it off")
        # The smallest positive number stands for "more than 0": top_p 0 would leave no token.
        _check_float("top_p", self.top_p, math.ulp(0.0), 1, "more than 0, at most 1; 1 switches it off")
        _check_float("min_p", self.min_p, 0, 1, "0 to 1; 0 switches it off")
        if self.seed is not None:
            check_int("seed", self.seed, 0, MAX_SEED, "0 to 2**63 - 1; leave it out for another draw each time")
        if not isinstance(self.ignore_eos, bool):
            raise refusal("ignore_eos", self.ignore_eos, "True or False; leave it out to end at the end token")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                accepted = f"0 to {MAX_LOGPROBS}; leave it out for none"
                check_int(name, getattr(self, name), 0, MAX_LOGPROBS, accepted)
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))

    def samples(self, n: int) -> "list[SamplingParams]":
        """The same for ``n`` answers to one prompt; with a seed, answer i draws with seed + i."""
        return [self if self.seed is None else replace(self, seed=self.seed + index) for index in range(n)]

    @property
    def is_greedy(self) -> bool:
        """The choice needs no draw: temperature 0, or only the best token kept."""
        return self.temperature == 0 or self.top_k == 1


MAX_NAMESPACE = 1024
PARTS = ("all", "prompt", "decoded")


@dataclass(frozen=True, slots=True)
class Retention:
    """How long a part of a request's cache is worth keeping once nobody uses it. Soft: memory that is needed is taken.

    priority: 0 (evicted first) to 100 (last), 50 without a word; ``pin``: after all others. ``ttl_s`` seconds after the
    last request that asked for it has ended, a block is as any other. ``part``: all of the request, its prompt or the
    tokens decoded; ``start`` and ``stop`` count its tokens, as in a slice. A block counts as the part with the highest
    priority that it touches.
    """

    priority: int = 50
    ttl_s: float | None = None
    part: str = "all"
    start: int = 0
    stop: int | None = None
    pin: bool = False

    def __post_init__(self) -> None:
        check_int("priority", self.priority, 0, MAX_PRIORITY, f"0 (evicted first) to {MAX_PRIORITY}")
        if self.ttl_s is not None:
            _check_float("ttl_s", self.ttl_s, math.ulp(0.0), sys.float_info.max, "seconds, more than 0")
        if self.part not in PARTS:
            raise refusal("part", self.part, f"one of {', '.join(PARTS)}")
        check_int("start", self.start, 0, math.inf, "0 or more")
        if self.stop is not None:
            check_int("stop", self.stop, self.start, math.inf, "at least start; leave it out for the end")
        if not isinstance(self.pin, bool):
            raise refusal("pin", self.pin, "True or False")

    def range(self, num_prompt: int) -> KeepRange:
        """The same in tokens of the whole sequence."""
        first, last = {"all": (0, None), "prompt": (0, num_prompt), "decoded": (num_prompt, None)}[self.part]
        stop = last if self.stop is None else first + self.stop
        if last is not None and stop is not None:
            stop = min(stop, last)
        start = first + self.start if stop is None else min(first + self.start, stop)
        return KeepRange(PIN if self.pin else self.priority, self.ttl_s, start, stop)


@dataclass(frozen=True, slots=True)
class CacheParams:
    """How one request uses the prefix cache. Raises OptionError for any value outside its range."""

    namespace: str | None = None  # a tenant: requests of different namespaces never share; None is one of its own
    reuse: bool = True  # False: nothing is taken from the cache, everything is computed
    retention: Sequence[Retention] = ()  # one or several; kept as a tuple

    def __post_init__(self) -> None:
        if self.namespace is not None and not isinstance(self.namespace, str):
            raise refusal("namespace", self.namespace, "text; leave it out for the common one")
        if self.namespace is not None and len(self.namespace) > MAX_NAMESPACE:
            raise refusal("namespace", self.namespace, f"at most {MAX_NAMESPACE} characters; digest longer ones")
        if not isinstance(self.reuse, bool):
            raise refusal("reuse", self.reuse, "True or False")
        given = (self.retention,) if isinstance(self.retention, Retention) else self.retention
        if not isinstance(given, list | tuple) or not all(isinstance(one, Retention) for one in given):
            raise refusal("retention", self.retention, "a Retention or a list of them")
        object.__setattr__(self, "retention", tuple(given))

    def ranges(self, num_prompt: int) -> tuple[KeepRange, ...]:
        """What is asked for, in tokens of the whole sequence."""
        return tuple(one.range(num_prompt) for one in self.retention)


def refusal(name: str, given: object, accepted: str) -> OptionError:
    """The error for a value outside what ``accepted`` says."""
    shown = repr(given)
    return OptionError(f"{name} is {shown if len(shown) <= 60 else shown[:57] + '...'}; accepted: {accepted}")


T = TypeVar("T", SamplingParams, CacheParams)


def each(count: int, name: str, given: T | Sequence[T] | None, default: T) -> list[T]:
    """Parameters for ``count`` prompts: the one given for all, or one for each. Raises RequestError."""
    kind = type(default)
    if given is None or isinstance(given, kind):
        return [default if given is None else given] * count
    if not isinstance(given, list | tuple) or not all(isinstance(one, kind) for one in given):
        raise RequestError(f"{name} is {repr(given)[:60]}; accepted: {kind.__name__}, or a list of them")
    if len(given) != count:
        raise RequestError(f"{count} prompts but {len(given)} {name}: give one for all or one for each")
    return list(given)


def check_int(name: str, given: object, low: int, high: float, accepted: str) -> None:
    """Raise OptionError unless ``given`` is a whole number from ``low`` to ``high``."""
    if isinstance(given, bool) or not isinstance(given, int) or not low <= given <= high:
        raise refusal(name, given, f"a whole number, {accepted}")


def _check_float(name: str, given: object, low: float, high: float, accepted: str) -> None:
    # NaN fails both comparisons.
    if isinstance(given, bool) or not isinstance(given, int | float) or not low <= given <= high:
        raise refusal(name, given, f"a number, {accepted}")


def _stop_strings(given: object) -> tuple[str, ...]:
    strings = (given,) if isinstance(given, str) else given
    if not isinstance(strings, list | tuple) or not all(isinstance(one, str) and one for one in strings):
        raise refusal("stop", given, "a string or a list of strings, none of them empty; leave it out for none")
    return tuple(strings)


def _token_ids(given: object) -> tuple[int, ...]:
    if not isinstance(given, list | tuple):
        raise refusal("stop_token_ids", given, "a list of whole numbers; leave it out for none")
    for token_id in given:
        check_int("stop_token_ids", token_id, 0, math.inf, "0 or more; leave it out for none")
    return tuple(given)
