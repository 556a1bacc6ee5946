"""A text that grows, forks and rolls back: for parallel samples, beams and whatever branches.

Its blocks are shared through the prefix cache: a fork takes no bytes until it writes, and what one branch computed the
others find. Exact, because a hit is. Knows nothing of blocks.
"""

import operator
from collections.abc import Callable, Sequence

from kvfolio.engine.answer import Completion
from kvfolio.engine.params import CacheParams, SamplingParams, check_int
from kvfolio.engine.text import Tokenizer
from kvfolio.errors import RequestError

MAX_NEXT_TOKENS = 20
MAX_TOKEN_ID = 1 << 31  # more than any vocabulary, and what a tokenizer can take

Completer = Callable[[Sequence[Sequence[int]], SamplingParams, CacheParams], list[Completion]]


class TextSequence:
    """Made by ``LLM.sequence``. Only ``generate`` and ``next_tokens`` compute; all else is bookkeeping."""

    def __init__(self, complete: Completer, tokenizer: Tokenizer, ids: Sequence[int], caching: CacheParams) -> None:
        self._complete = complete
        self._tokenizer = tokenizer
        self._caching = caching
        self._token_ids = list(ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """All its tokens."""
        return tuple(self._token_ids)

    @property
    def text(self) -> str:
        """All its tokens as text."""
        return self._tokenizer.decode(self._token_ids)

    def append(self, more: str | Sequence[int]) -> None:
        """Add a text, as it is, or token ids. Raises RequestError, and adds nothing, for anything else."""
        ids = self._tokenizer.encode_more(more) if isinstance(more, str) else checked_ids(more)
        wrong = [token for token in ids if not 0 <= token < MAX_TOKEN_ID]
        if wrong:
            raise RequestError(f"{wrong[0]} is no token id; accepted: 0 or more, as the model's tokenizer gives them")
        self._token_ids += ids

    def generate(self, params: SamplingParams | None = None) -> Completion:
        """Complete the text; the tokens generated become part of it."""
        (completion,) = self._complete([self._token_ids], params or SamplingParams(), self._caching)
        self._token_ids += completion.token_ids
        return completion

    def next_tokens(self, k: int = 5) -> tuple[tuple[int, float], ...]:
        """The ``k`` most likely next tokens as (token id, log-probability), the best first. The text stays as it is."""
        check_int("k", k, 1, MAX_NEXT_TOKENS, f"1 to {MAX_NEXT_TOKENS}")
        params = SamplingParams(max_tokens=1, logprobs=k, ignore_eos=True)
        (completion,) = self._complete([self._token_ids], params, self._caching)
        assert completion.top_logprobs is not None
        return completion.top_logprobs[0]

    def fork(self, n: int = 1) -> "list[TextSequence]":
        """``n`` sequences that begin as this one does and go on by themselves."""
        check_int("n", n, 1, 1 << 16, "1 or more")
        return [TextSequence(self._complete, self._tokenizer, self._token_ids, self._caching) for _ in range(n)]

    def rollback(self, k: int) -> None:
        """Take back the last ``k`` tokens."""
        check_int("k", k, 0, len(self._token_ids), f"0 to {len(self._token_ids)}, the tokens there are")
        del self._token_ids[len(self._token_ids) - k :]


def checked_ids(given: Sequence[int]) -> tuple[int, ...]:
    """Token ids as whole numbers; RequestError for what is none."""
    try:
        if isinstance(given, bytes | dict):
            raise TypeError
        return tuple(operator.index(token) for token in given)
    except (TypeError, ValueError) as error:
        shown = " ".join(repr(given)[:60].split())
        raise RequestError(f"a prompt is {shown}; accepted: a text or a list of token ids") from error
