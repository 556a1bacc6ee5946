"""Picks one token for each row of logits: the best one, or a draw from what the request's filters leave.

Knows nothing of text, blocks or schedules. A row's token depends on its logits, its request's parameters and that
request's own draws alone: never on the other rows, on the size of the batch or on a preemption.

The filters apply in the order temperature, top-k, top-p, min-p, as in Hugging Face's ``generate`` (vLLM puts min-p
before the two). Temperature comes first so that top_p and min_p speak of the distribution that is drawn from. Each
filter sees what the one before it left, renormalised: top_p is a share of what top-k kept. min_p compares with the
most likely token, which no filter ever removes. Where logits are equal, the lower token id counts as the larger.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from kvfolio.engine.params import SamplingParams
from kvfolio.errors import InvariantError, KvfolioError

TINY = float(np.finfo(np.float32).tiny)  # the least temperature that f32 can divide by

# Rows are worked on in numpy: one thread each, so that no result depends on the number of threads, and no step pays
# for waking them (on two busy cores, torch took 100 ms for a row that takes 1).
Row = NDArray[np.float32]  # [vocab]


@dataclass(frozen=True, slots=True)
class Sampled:
    """One chosen token. Log-probabilities are those of the model itself, before temperature and filters."""

    token_id: int
    logprob: float | None = None  # of the chosen token; None when the request asked for none
    top: tuple[tuple[int, float], ...] = ()  # the k most likely (token_id, logprob), chosen or not, best first


class Sampler:
    """Chooses tokens; keeps a random generator for each request that draws, until the request is forgotten."""

    def __init__(self) -> None:
        self._generators: dict[Hashable, torch.Generator] = {}

    @property
    def num_requests(self) -> int:
        """Requests whose generator is kept; 0 when nothing runs."""
        return len(self._generators)

    def sample(self, logits: Tensor, requests: Sequence[tuple[Hashable, SamplingParams]]) -> list[Sampled]:
        """One token a row. logits [num_rows, vocab], of any float dtype on any device; requests in row order.

        Side effect: the generator of each request that is not greedy moves by one draw; none moves when this raises.
        Raises KvfolioError, with the names of the requests, when a row holds NaN or an infinity.
        """
        if logits.dim() != 2 or logits.shape[0] != len(requests) or (requests and not logits.shape[1]):
            raise InvariantError(f"logits of shape {list(logits.shape)} for {len(requests)} requests; one row each")
        if not requests:
            return []
        if logits.dtype == torch.float64:
            logits = logits.float()  # what f32 cannot hold is refused below, like any infinity
        best_ids = _best_ids(logits, [request_id for request_id, _ in requests])
        sampled = [Sampled(token_id) for token_id in best_ids]
        row_numbers = [
            number for number, (_, params) in enumerate(requests) if not params.is_greedy or params.logprobs is not None
        ]
        if row_numbers:
            rows = logits[row_numbers].to("cpu", torch.float32).numpy()  # [num_chosen_rows, vocab]
            for number, row in zip(row_numbers, rows, strict=True):
                request_id, params = requests[number]
                token_id = best_ids[number]
                if not params.is_greedy:
                    token_id = _draw(_weights(row, params), self._generator(request_id, params.seed))
                sampled[number] = _with_logprobs(row, token_id, params.logprobs)
        return sampled

    def score(self, logits: Tensor, token_ids: Sequence[int], num_top: int) -> list[Sampled]:
        """What a row of logits [num_rows, vocab] gave each of ``token_ids``, and its ``num_top`` best."""
        return [
            _with_logprobs(row.to("cpu", torch.float32).numpy(), token_id, num_top)
            for row, token_id in zip(logits, token_ids, strict=False)
        ]

    def forget(self, request_id: Hashable) -> None:
        """Drop the generator of a request that has ended; a request that never drew is no error."""
        self._generators.pop(request_id, None)

    def _generator(self, request_id: Hashable, seed: int | None) -> torch.Generator:
        generator = self._generators.get(request_id)
        if generator is None:
            generator = torch.Generator()  # on the CPU: the same draws whatever device the logits come from
            if seed is None:
                generator.seed()
            else:
                generator.manual_seed(seed)
            self._generators[request_id] = generator
        return generator


def _best_ids(logits: Tensor, request_ids: Sequence[Hashable]) -> list[int]:
    """The largest logit of every row, the lowest id where several are equal. One transfer for the whole batch."""
    largest, ids = logits.max(dim=-1)  # [num_rows]; NaN counts as the largest
    is_finite = largest.isfinite() & logits.amin(dim=-1).isfinite()
    best_ids, finite = torch.stack([ids, is_finite.to(ids.dtype)]).tolist()
    broken = [str(request_id) for request_id, flag in zip(request_ids, finite, strict=True) if not flag]
    if broken:
        raise KvfolioError(
            f"the model's logits hold NaN or an infinity for request {', '.join(broken)}; no token can be chosen; "
            "check the model file, or compute in bf16 or f32 where f16 overflows"
        )
    return [int(token_id) for token_id in best_ids]


def _weights(row: Row, params: SamplingParams) -> Row:
    """What the draw gives each token: 1 for the most likely, 0 for those filtered out."""
    # The subtraction first: no temperature can then turn a finite logit into NaN; an underflow to 0 is meant.
    with np.errstate(over="ignore", under="ignore"):
        weights: Row = np.exp((row - row.max()) / np.float32(max(params.temperature, TINY)))
    if 0 < params.top_k < row.size:
        kept = np.zeros(row.size, np.bool_)
        kept[_largest(row, params.top_k)] = True
        weights = weights * kept
    if params.top_p < 1:
        weights = weights * _nucleus(row, weights, params.top_p)
    if params.min_p > 0:
        weights = weights * (weights >= np.float32(params.min_p))
    return weights


def _nucleus(row: Row, weights: Row, share: float) -> NDArray[np.bool_]:
    """[vocab]: the fewest most likely tokens whose weights reach ``share`` of all.

    Sorting a vocabulary of 49,152 takes 4 ms; this sums the weights by size class, finds the class in which the share
    is reached and sorts that one only (0.2 ms).
    """
    # The bits of positive floats are ordered as the floats are: 8 bits of exponent and 7 of mantissa make a class.
    classes = weights.view(np.int32) >> 16
    mass = np.bincount(classes, weights)[::-1].cumsum()  # f64, from the largest class, that of weight 1
    wanted = share * mass[-1]
    place = int(np.searchsorted(mass, wanted))
    edge = mass.size - 1 - place
    kept = classes > edge
    doubtful = np.flatnonzero(classes == edge)
    doubtful = doubtful[_largest(row[doubtful], doubtful.size)]
    reached = weights[doubtful].cumsum(dtype=np.float64) + (mass[place - 1] if place else 0.0)
    kept[doubtful[: int(np.searchsorted(reached, wanted)) + 1]] = True
    return kept


def _largest(values: Row, count: int) -> NDArray[np.intp]:
    """Ids of the ``count`` largest values, best first, lower ids first where values are equal."""
    if count < values.size:
        ids = np.flatnonzero(values >= np.partition(values, -count)[-count])
    else:
        ids = np.arange(values.size)
    return ids[np.argsort(-values[ids], kind="stable")[:count]]


def _draw(weights: Row, generator: torch.Generator) -> int:
    """One token id by inverting the cumulative distribution, in f64 so that the tail keeps its share."""
    cumulative = weights.cumsum(dtype=np.float64)
    point = float(torch.rand((), generator=generator, dtype=torch.float64)) * cumulative[-1]
    # side="right" steps over tokens of weight 0; the minimum keeps a point rounded up to the very end off their tail.
    last = int(np.searchsorted(cumulative, cumulative[-1]))
    return min(int(np.searchsorted(cumulative, point, side="right")), last)


def _with_logprobs(row: Row, token_id: int, num_top: int | None) -> Sampled:
    if num_top is None:
        return Sampled(token_id)
    shifted = row - row.max()
    with np.errstate(under="ignore"):
        logprobs: Row = shifted - np.float32(np.log(np.exp(shifted).sum(dtype=np.float64)))
    top_ids = _largest(logprobs, num_top).tolist() if num_top else []
    top = tuple((int(top_id), float(logprobs[top_id])) for top_id in top_ids)
    return Sampled(token_id, float(logprobs[token_id]), top)
