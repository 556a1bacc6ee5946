"""What a check has found: a row for each cache, the smallest that is allowed, and the Pareto front. Plain data.

Knows nothing of how it was measured or is printed; field names are the stable keys of ``--json``.
"""

from dataclasses import dataclass

from kvfolio.engine.candidate import StoredSize
from kvfolio.engine.needle import Recall
from kvfolio.engine.quality import Quality
from kvfolio.engine.speed import DecodeSpeed


@dataclass(frozen=True, slots=True)
class Row:
    """One cache and what was measured of it; None: not asked for, or not to be had."""

    name: str
    kv_format: str
    size: StoredSize
    quality: Quality | None
    recall: Recall | None
    num_answers_like_exact: int | None
    speed: DecodeSpeed | None
    failure: str | None  # why its quality cannot be measured


@dataclass(frozen=True, slots=True)
class Check:
    """Everything that was measured; field names are the keys of ``--json``."""

    model: str
    dtype: str  # published: of stored exact tokens, and of the speed
    num_tokens: int
    skip: int
    chunk: int
    noise_chunk: int
    max_kld: float
    needle_tokens: int | None
    reference: Row  # the exact cache in f32
    noise: Quality
    rows: tuple[Row, ...]

    @property
    def chosen(self) -> Row | None:
        """The smallest format within ``max_kld``; of equally small ones the closer. None: there is none."""
        allowed = [(row.size.bits, row.quality.mean_kld, row) for row in self.rows if row.quality is not None]
        allowed = [one for one in allowed if one[1] <= self.max_kld]
        return min(allowed, key=lambda one: one[:2])[2] if allowed else None

    @property
    def front(self) -> tuple[str, ...]:
        """Names of the formats than which none is both smaller and closer to the reference."""
        points = [(row.size.bits, row.quality.mean_kld, row.name) for row in self.rows if row.quality is not None]
        return tuple(
            name
            for bits, kld, name in points
            if not any(b <= bits and k <= kld and (b < bits or k < kld) for b, k, _ in points)
        )
