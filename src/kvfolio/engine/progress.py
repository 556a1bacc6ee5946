"""Progress of long work, counted in tokens.

Knows nothing of what is done, or of how progress is shown.
"""

from collections.abc import Callable

OnProgress = Callable[[str, int, int], None]  # (what is done now, tokens done, tokens in all)


class TokenProgress:
    """Counts tokens, and tells of them."""

    def __init__(self, on_progress: OnProgress, total: int) -> None:
        self._on_progress, self._total = on_progress, total
        self._done, self._words = 0, ""

    def tell(self, words: str) -> None:
        """Something else begins."""
        self._words = words
        self.add(0)

    def add(self, num_tokens: int) -> None:
        """So many more are done."""
        self._done += num_tokens
        self._on_progress(self._words, self._done, self._total)
