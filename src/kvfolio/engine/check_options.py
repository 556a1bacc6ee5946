"""What a check is asked for: formats, text, limit, and how much is measured; all of it checked when made.

Knows nothing of models, and not how anything is measured.
"""

import math
from dataclasses import dataclass

from kvfolio.engine.candidate import DEFAULT_FORMATS, Candidate
from kvfolio.engine.params import MAX_THREADS, check_int, refusal
from kvfolio.errors import OptionError

DEFAULT_TOKENS = 5000
DEFAULT_SKIP = 128
DEFAULT_CHUNK = 512
DEFAULT_MAX_KLD = 0.01
DEFAULT_NEEDLE_TOKENS = 1500
DEFAULT_SPEED_TOKENS = 32
NOISE_CHUNK = 40  # the fewer rows a product has, the more its sums differ from those of a large one: 1e-11 nats


@dataclass(frozen=True, slots=True)
class CheckOptions:
    """What is measured, and on what."""

    candidates: tuple[Candidate, ...] = tuple(Candidate(name) for name in DEFAULT_FORMATS)
    text: str | None = None  # None: the language reference that ships with Python
    tokens: int | None = None  # of the text, at most; None: 5,000, or the model's context where that is shorter
    max_kld: float = DEFAULT_MAX_KLD  # mean KL divergence that the chosen format may have, in nats
    skip: int = DEFAULT_SKIP  # tokens before the first position that counts
    chunk: int = DEFAULT_CHUNK  # tokens of one step
    needle_tokens: int = DEFAULT_NEEDLE_TOKENS  # of the text around the needle; 0: recall is not measured
    speed_tokens: int = DEFAULT_SPEED_TOKENS  # decoded behind the text; 0: speed is not measured
    device: str = "cpu"
    threads: int | None = None  # None: torch's own choice

    def __post_init__(self) -> None:
        if not self.candidates:
            raise OptionError("no format to check; give one or more, such as int8")
        if self.text is not None and not self.text.strip():
            raise OptionError("the text is empty; give some, or none for the one that ships with Python")
        if self.tokens is not None:
            check_int("tokens", self.tokens, 2, 2**40, "2 or more, and more than skip")
        check_int("skip", self.skip, 0, 2**40, "0 or more tokens, such as 128")
        check_int("chunk", self.chunk, 2, 2**20, "2 or more tokens, such as 512")
        check_int("needle_tokens", self.needle_tokens, 0, 2**40, "a number of tokens; 0: no needle")
        check_int("speed_tokens", self.speed_tokens, 0, 2**20, "a number of tokens; 0: speed is not measured")
        if self.threads is not None:
            check_int("threads", self.threads, 1, MAX_THREADS, f"1 to {MAX_THREADS}; leave it out for torch's choice")
        if not isinstance(self.max_kld, int | float) or not 0 <= self.max_kld < math.inf:
            raise refusal("max_kld", self.max_kld, "0 or more nats, such as 0.01")

    @property
    def noise_chunk(self) -> int:
        """Another, smaller chunk: what differs between the two is rounding alone."""
        return min(NOISE_CHUNK, max(1, self.chunk * 5 // 8))
