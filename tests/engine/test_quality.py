"""The meter of quality against its definitions, written out in Python floats."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfolio.engine import quality
from kvfolio.engine.quality import QualityMeter
from kvfolio.errors import OptionError, RequestError

Rows = list[list[float]]


@st.composite
def measured(draw: st.DrawFn) -> tuple[Rows, Rows, list[int]]:
    """(reference, found, targets) of a few positions over a small vocabulary."""
    vocab, n = draw(st.integers(1, 6)), draw(st.integers(1, 12))
    logits = st.lists(st.lists(st.floats(-40, 40, width=32), min_size=vocab, max_size=vocab), min_size=n, max_size=n)
    return draw(logits), draw(logits), draw(st.lists(st.integers(0, vocab - 1), min_size=n, max_size=n))


def _log_probs(row: Sequence[float]) -> list[float]:
    top = max(row)
    total = math.fsum(math.exp(one - top) for one in row)
    return [one - top - math.log(total) for one in row]


def _kld(reference: Sequence[float], found: Sequence[float]) -> float:
    p, q = _log_probs(reference), _log_probs(found)
    return math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True))


@settings(deadline=None)
@given(case=measured(), piece=st.integers(1, 40), cut=st.integers(0, 12))
def test_the_meter_is_its_definition_however_the_positions_are_cut(
    case: tuple[Rows, Rows, list[int]], piece: int, cut: int
) -> None:
    reference, found, targets = case
    meter = QualityMeter()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quality, "PIECE_NUMBERS", piece)
        for rows in (slice(0, cut), slice(cut, None)):
            wide = (
                torch.tensor(one, dtype=torch.float32).reshape(len(targets), -1)[rows] for one in (reference, found)
            )
            meter.add(*wide, torch.tensor(targets)[rows])
    result = meter.result()
    klds = sorted(_kld(*pair) for pair in zip(reference, found, strict=True))
    assert result.num_positions == len(targets)
    assert result.mean_kld == pytest.approx(math.fsum(klds) / len(klds), abs=1e-9)
    low = int(0.99 * (len(klds) - 1))
    high = min(low + 1, len(klds) - 1)
    weight = 0.99 * (len(klds) - 1) - low
    assert result.p99_kld == pytest.approx(klds[low] * (1 - weight) + klds[high] * weight, abs=1e-9)
    for rows, perplexity in ((reference, result.reference_perplexity), (found, result.perplexity)):
        losses = [-_log_probs(row)[target] for row, target in zip(rows, targets, strict=True)]
        assert perplexity == pytest.approx(math.exp(math.fsum(losses) / len(losses)), rel=1e-9)
    same = [a.index(max(a)) == b.index(max(b)) for a, b in zip(reference, found, strict=True)]
    assert result.top1 == sum(same) / len(same)


def test_equal_logits_diverge_by_nothing_at_all() -> None:
    logits = torch.randn(5, 1000) * 8
    meter = QualityMeter()
    meter.add(logits, logits.clone(), torch.arange(5))
    result = meter.result()
    assert (result.mean_kld, result.p99_kld, result.top1, result.perplexity_change) == (0.0, 0.0, 1.0, 0.0)


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
def test_a_logit_that_is_not_finite_is_refused_and_leaves_the_meter_as_it_was(broken: float) -> None:
    meter = QualityMeter()
    sound = torch.zeros(2, 3)
    meter.add(sound, sound, torch.zeros(2, dtype=torch.int64))
    bad = sound.clone()
    bad[1, 2] = broken
    with pytest.raises(RequestError, match="not finite, found, at 1 of 2 positions, the first behind 3"):
        meter.add(sound, bad, torch.zeros(2, dtype=torch.int64))
    assert meter.result().num_positions == 2


def test_finite_logits_whose_sum_overflows_are_sound() -> None:
    huge = torch.full((1, 4), 3e38)
    meter = QualityMeter()
    meter.add(huge, huge, torch.tensor([0]))
    assert meter.result().perplexity == pytest.approx(4.0)


def test_nothing_measured_and_unequal_shapes_are_refused() -> None:
    with pytest.raises(OptionError, match="longer text"):
        QualityMeter().result()
    with pytest.raises(OptionError, match=r"\(2, 3\) and \(2, 4\)"):
        QualityMeter().add(torch.zeros(2, 3), torch.zeros(2, 4), torch.zeros(2, dtype=torch.int64))
