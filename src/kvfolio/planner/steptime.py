"""How long one decode step and one prompt take at best: the roofline of a device.

Knows nothing of kernels, overheads or networks between devices: it is the limit a measurement is held against.
Source: Williams, Waterman, Patterson (2009); for decoding, Pope et al. (arXiv 2211.05102), section 2.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from kvfolio.planner.parallel import DeviceShare
from kvfolio.planner.sizes import attention_flops_at, bytes_read_at
from kvfolio.spec.formats import CacheFormat
from kvfolio.spec.layers import LatentAttention, LayerKind
from kvfolio.spec.model import ModelSpec, WeightCount

_PIECES = 256  # into which a long prompt is cut


@dataclass(frozen=True, slots=True)
class Speeds:
    """What one device can do. None where it is not known."""

    bandwidth_bytes_per_s: float
    flops_per_s: float | None


@dataclass(frozen=True, slots=True)
class StepTime:
    """One decode step of ``users`` sequences."""

    time_s: float
    tokens_per_s_per_user: float  # of the slowest
    tokens_per_s_total: float
    limit: Literal["memory", "compute"]
    weights_bytes_read: int
    cache_bytes_read: int
    flops: int


def step_time(shares: Sequence[DeviceShare], fmt: CacheFormat, context: int, users: int, speeds: Speeds) -> StepTime:
    """One token for each of ``users`` sequences of ``context`` tokens; bytes and FLOPs are those of the slowest device.

    Bytes: the weights once (of routed experts, those that the tokens reach), and each sequence's cache. FLOPs: 2 for
    each active weight, and attention. The slower of bytes over bandwidth and FLOPs over peak counts.

    With pipeline stages the users are cut into groups, and a token passes every stage. A group's round takes what all
    stages take for it, or what the slowest stage takes for all groups, whichever is longer; the time is that of the
    largest group. Of as many groups as stages, and of more, smaller ones, the quicker counts.
    """
    stages = sum(share.num_stages for share in shares)
    smaller = max(1, -(-users // stages) - 1)
    counts = {min(users, stages), -(-users // smaller)}
    rounds = [_round(shares, fmt, context, users, groups, speeds) for groups in sorted(counts)]
    return min(rounds, key=lambda one: one.time_s)


def _round(
    shares: Sequence[DeviceShare], fmt: CacheFormat, context: int, users: int, groups: int, speeds: Speeds
) -> StepTime:
    each, more = divmod(users, groups)  # ``more`` groups have one user more
    sizes = [(size, count) for size, count in ((each + 1, more), (each, groups - more)) if count]
    stages = {size: [_stage_time(share, fmt, context, size, speeds) for share in shares] for size, _ in sizes}
    busy = max(sum(stages[size][index].time_s * count for size, count in sizes) for index in range(len(shares)))

    def round_s(size: int) -> float:
        through = sum(stage.time_s * share.num_stages for stage, share in zip(stages[size], shares, strict=True))
        return max(through, busy)

    slowest = max(stages[sizes[0][0]], key=lambda stage: stage.time_s)
    time_s = round_s(sizes[0][0])
    total = sum(size * count / round_s(size) for size, count in sizes)
    return replace(slowest, time_s=time_s, tokens_per_s_per_user=1 / time_s, tokens_per_s_total=total)


def _stage_time(share: DeviceShare, fmt: CacheFormat, context: int, users: int, speeds: Speeds) -> StepTime:
    spec = share.spec
    weights = round(share.weights_bytes * weights_read_share(spec.weights, users))
    cache = users * bytes_read_at(spec, context, fmt)
    attention = attention_flops_at(spec, context)
    flops = users * (round(2 * spec.weights.num_active_params * share.weights_share) + attention)
    memory_s = (weights + cache) / speeds.bandwidth_bytes_per_s
    compute_s = flops / speeds.flops_per_s if speeds.flops_per_s else 0.0
    time_s = max(memory_s, compute_s)
    return StepTime(
        time_s=time_s,
        tokens_per_s_per_user=1 / time_s,
        tokens_per_s_total=users / time_s,
        limit="memory" if memory_s >= compute_s else "compute",
        weights_bytes_read=weights,
        cache_bytes_read=cache,
        flops=flops,
    )


def weights_read_share(weights: WeightCount, tokens: int) -> float:
    """The share of all weights' bytes that ``tokens`` read, experts being chosen evenly and independently.

    Towers and encoders, which no text token passes, are not read.
    """
    if not weights.num_params:
        return 1.0
    chosen = weights.experts_per_token / weights.num_experts if weights.num_experts else 0.0
    expert_share = weights.expert_bytes / weights.num_bytes if weights.num_bytes else 0.0
    other_params = weights.num_params - weights.expert_params
    always = (weights.num_active_params - weights.expert_params * chosen) / max(1, other_params)
    return min(1.0, (1 - expert_share) * min(1.0, always) + expert_share * (1 - weights.share_left_alone(tokens)))


def prefill_flops(spec: ModelSpec, num_tokens: int) -> int:
    """FLOPs of a prompt's pass: 2 for each active weight and token, and attention over the tokens before each."""
    return 2 * spec.weights.num_active_params * num_tokens + prefill_attention_flops(spec, num_tokens)


def prefill_attention_flops(spec: ModelSpec, num_tokens: int) -> int:
    """FLOPs of q·k and p·v of a whole prompt: summed over its tokens, in pieces where it is long.

    Exact where the kinds grow evenly, as full attention does.
    """
    points = [num_tokens * index // _PIECES for index in range(_PIECES + 1)]
    total = 0.0
    for kind, count in spec.kinds():
        if num_tokens <= _PIECES:
            own: float = sum(_prefill_attention(kind, n, spec.num_q_heads) for n in range(1, num_tokens + 1))
        else:
            at = [_prefill_attention(kind, n, spec.num_q_heads) for n in points]
            pieces = zip(itertools.pairwise(points), itertools.pairwise(at), strict=True)
            # a sum of f(n) over a piece is its trapezoid, and half of what f grows by
            own = sum(((end - start) * (low + high) + high - low) / 2 for (start, end), (low, high) in pieces)
        total += count * own
    return round(total)


def _prefill_attention(kind: LayerKind, num_tokens: int, num_q_heads: int) -> int:
    """FLOPs of one query of a prompt; a latent layer expands its heads there, cheaper than the absorbed form."""
    if isinstance(kind, LatentAttention):
        read = num_tokens if kind.top_k is None else min(num_tokens, kind.top_k)
        return 2 * num_q_heads * (kind.expanded_k_width + kind.expanded_v_width) * read
    return kind.attention_flops_at(num_tokens, num_q_heads)


def prefill_work(share: DeviceShare, num_tokens: int) -> tuple[int, int]:
    """(FLOPs, bytes of weights read) of a prompt's pass on a device with ``share``."""
    weights = 2 * share.spec.weights.num_active_params * num_tokens
    flops = prefill_attention_flops(share.spec, num_tokens) + round(weights * share.weights_share)
    return flops, round(share.weights_bytes * weights_read_share(share.spec.weights, num_tokens))


def prefill_time(shares: Sequence[DeviceShare], num_tokens: int, speeds: Speeds) -> float | None:
    """Seconds until a prompt of ``num_tokens`` has its first token, at best, through all pipeline stages.

    None where no rate is known.
    """
    if not speeds.flops_per_s:
        return None
    total = 0.0
    for share in shares:
        flops, read = prefill_work(share, num_tokens)
        total += share.num_stages * max(flops / speeds.flops_per_s, read / speeds.bandwidth_bytes_per_s)
    return total
