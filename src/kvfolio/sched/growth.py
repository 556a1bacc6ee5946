"""How long answers will become, learned from those that have ended: what admission reckons with.

Knows nothing of blocks. The same history gives the same forecast, so twins agree.
"""

from kvfolio.sched.request import RequestState

WEIGHT = 1 / 16  # of the latest answer in the mean
FIRST_GUESS = 256  # tokens; half of max_tokens where that is less


class GrowthForecast:
    """A running mean of the lengths of answers."""

    def __init__(self) -> None:
        self._mean: float | None = None

    def learn(self, num_generated: int) -> None:
        """An answer has ended."""
        self._mean = num_generated if self._mean is None else self._mean + WEIGHT * (num_generated - self._mean)

    def num_tokens(self, state: RequestState) -> int:
        """Tokens its cache is predicted to hold in the end: a guess while nothing is known.

        One that is longer than the mean already is expected to go on for a block.
        """
        expected = min(FIRST_GUESS, state.request.max_tokens / 2) if self._mean is None else self._mean
        left = max(round(expected) - state.num_generated, state.chain.block_tokens)
        return min(state.num_known + left, state.request.max_cached_tokens)
