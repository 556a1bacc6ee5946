"""How far one model's next-token distributions lie from another's: perplexity, KL divergence, agreement.

Knows nothing of caches, formats, or of where the logits come from.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from kvfolio.errors import OptionError, RequestError

PIECE_NUMBERS = 1 << 21  # logits looked at in one go, in f64: 16 MiB each of a few tensors, whatever the vocabulary


@dataclass(frozen=True, slots=True)
class Quality:
    """One set of distributions against another, over ``num_positions`` positions of one text."""

    perplexity: float  # exp of the mean negative log-likelihood of the token that follows
    reference_perplexity: float
    mean_kld: float  # KL(reference || found) of the next-token distribution, in nats
    p99_kld: float  # the 99th percentile, linear between the two positions beside it
    top1: float  # share of positions where both hold the same token for the most likely
    num_positions: int

    @property
    def perplexity_change(self) -> float:
        """As a share of the reference's perplexity: 0.01 is 1 % worse."""
        return self.perplexity / self.reference_perplexity - 1


class QualityMeter:
    """Takes logits piece by piece and keeps three numbers a position, whatever the vocabulary."""

    def __init__(self) -> None:
        self._klds: list[Tensor] = []  # [n] f64 each, as the next two
        self._losses: list[Tensor] = []
        self._reference_losses: list[Tensor] = []
        self._num_same = 0
        self._num_positions = 0

    def add(self, reference: Tensor, found: Tensor, targets: Tensor) -> None:
        """Take in positions: logits [n, vocab] of both, and the token [n] int64 that follows each in the text.

        Raises RequestError, and takes in nothing, if a logit is not finite: no average over it would mean anything.
        """
        if reference.shape != found.shape or targets.shape != reference.shape[:1]:
            raise OptionError(
                f"logits of {tuple(reference.shape)} and {tuple(found.shape)} with {tuple(targets.shape)} targets "
                "cannot be compared; give [n, vocab] twice and [n]"
            )
        self._check_finite("reference", reference)
        self._check_finite("found", found)
        num_rows = max(1, PIECE_NUMBERS // max(1, reference.shape[1]))
        for at in range(0, len(targets), num_rows):
            rows = slice(at, at + num_rows)
            self._add_rows(reference[rows].double(), found[rows].double(), targets[rows])

    def _check_finite(self, name: str, logits: Tensor) -> None:
        if torch.isfinite(logits.sum()):  # one that is not finite makes the sum so; a huge sum alone says nothing
            return
        broken = (~torch.isfinite(logits)).any(dim=1).nonzero().flatten()
        if len(broken):
            raise RequestError(
                f"logits that are not finite, {name}, at {len(broken):,} of {len(logits):,} positions, the first "
                f"behind {self._num_positions + int(broken[0]):,} sound ones: the format or the dtype overflows"
            )

    def _add_rows(self, reference: Tensor, found: Tensor, targets: Tensor) -> None:
        self._num_same += int((reference.argmax(dim=1) == found.argmax(dim=1)).sum())
        reference = torch.log_softmax(reference, dim=1)
        found = torch.log_softmax(found, dim=1)
        at = targets[:, None]
        self._reference_losses.append(-reference.gather(1, at)[:, 0])
        self._losses.append(-found.gather(1, at)[:, 0])
        # Of equal distributions rounding leaves some -1e-17: a divergence is never negative.
        self._klds.append((reference.exp() * (reference - found)).sum(dim=1).clamp(min=0.0))
        self._num_positions += len(targets)

    def result(self) -> Quality:
        """Over all positions so far. Raises OptionError when there are none."""
        if not self._num_positions:
            raise OptionError("no position was measured; give a longer text")
        klds = torch.cat(self._klds)
        return Quality(
            perplexity=_exp(float(torch.cat(self._losses).mean())),
            reference_perplexity=_exp(float(torch.cat(self._reference_losses).mean())),
            mean_kld=float(klds.mean()),
            p99_kld=_percentile(klds, 0.99),
            top1=self._num_same / self._num_positions,
            num_positions=self._num_positions,
        )


def _percentile(values: Tensor, share: float) -> float:
    """Linear between neighbours, as numpy has it. Not torch.quantile, which refuses more than 16 M values."""
    ordered = values.sort().values
    at = share * (len(ordered) - 1)
    low = math.floor(at)
    high = min(low + 1, len(ordered) - 1)
    return float(ordered[low] + (ordered[high] - ordered[low]) * (at - low))


def _exp(loss: float) -> float:
    """e to a mean loss; infinite beyond what a float holds, as numbers of a broken model may be."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
