"""Bytes of one sequence's cache, for any model: what it needs, what kvfolio holds, what vLLM reserves.

Knows nothing of devices, users or tensors. ``num_tokens`` counts prompt and answer together.
"""

from collections import Counter
from fractions import Fraction

from kvfolio.spec.formats import CacheFormat
from kvfolio.spec.layers import ChunkedAttention, CrossAttention, HeadLayer, RecurrentState, SingleKind, parts_of
from kvfolio.spec.model import ModelSpec

DEFAULT_IN_FLIGHT = 8192  # vLLM's max_num_batched_tokens on large GPUs


def bytes_at(spec: ModelSpec, num_tokens: int, fmt: CacheFormat) -> int:
    """Bytes that a sequence of ``num_tokens`` needs: no rounding, no reserve. The ideal."""
    return sum(count * kind.bytes_at(num_tokens, fmt) for kind, count in spec.kinds())


def growth(spec: ModelSpec, fmt: CacheFormat) -> Fraction:
    """Bytes that one more token adds once every window is full."""
    return sum((count * kind.growth(fmt) for kind, count in spec.kinds()), Fraction(0))


def fixed_bytes(spec: ModelSpec, fmt: CacheFormat) -> int:
    """Bytes that do not grow: full windows, states, an encoder's tokens. bytes_at(n) → fixed_bytes + growth · n."""
    return sum(count * kind.fixed_bytes(fmt) for kind, count in spec.kinds())


def naive_bytes_at(spec: ModelSpec, num_tokens: int, fmt: CacheFormat) -> int:
    """Bytes of a cache that keeps every head's key and value of every token: no window, latent or sharing used."""
    return num_tokens * sum(count * kind.naive_token_bytes(fmt) for kind, count in spec.kinds())


def bytes_read_at(spec: ModelSpec, num_tokens: int, fmt: CacheFormat) -> int:
    """Bytes of cache that decoding one more token of a sequence of ``num_tokens`` reads."""
    return sum(count * kind.bytes_read_at(num_tokens, fmt) for kind, count in spec.kinds())


def attention_flops_at(spec: ModelSpec, num_tokens: int) -> int:
    """FLOPs of q·k and p·v of one token over ``num_tokens``, in all layers."""
    return sum(count * kind.attention_flops_at(num_tokens, spec.num_q_heads) for kind, count in spec.kinds())


def kvfolio_bytes_at(spec: ModelSpec, num_tokens: int, fmt: CacheFormat, exact: CacheFormat, block_tokens: int) -> int:
    """Bytes that kvfolio holds for a lone sequence: full blocks in ``fmt``, and one open, ``exact`` block a group.

    For models that kvfolio runs this is what the ledger grants and the store allocates
    (``CacheLayout.bytes_held`` and its open blocks); for others, what the same rules would take.
    """
    return sum(
        count * _paged_bytes(part, num_tokens, fmt, exact, block_tokens)
        for kind, count in spec.kinds()
        for part in parts_of(kind)
    )


def _paged_bytes(kind: SingleKind, num_tokens: int, fmt: CacheFormat, exact: CacheFormat, block_tokens: int) -> int:
    if isinstance(kind, RecurrentState | CrossAttention):
        return kind.fixed_bytes(fmt)
    sealed, horizon = num_tokens // block_tokens, kind.horizon()
    held = sealed if horizon is None else min(sealed, -(-horizon // block_tokens))
    compressed = kind.bytes_at(num_tokens, fmt) - kind.token_bytes(fmt) * min(num_tokens, horizon or num_tokens)
    return block_tokens * (held * kind.token_bytes(fmt) + kind.token_bytes(exact)) + compressed


def vllm_bytes_at(
    spec: ModelSpec, num_tokens: int, fmt: CacheFormat, block_tokens: int, in_flight: int = DEFAULT_IN_FLIGHT
) -> int:
    """Bytes that vLLM reserves for one sequence of ``num_tokens``.

    A window layer is given window - 1 tokens and those ``in_flight`` in one step (max_num_batched_tokens), rounded up
    to blocks, and one block more, since the window may begin inside a block; a chunked layer its chunk and the tokens
    in flight; everything else whole blocks. Layers of several kinds are padded to groups of equal size (vLLM 0.33,
    kv_cache_utils). The pages that it widens to fit recurrent states are not counted: 1 to 10 % of such models.
    """
    parts = Counter[SingleKind]()
    for kind, count in spec.kinds():
        for part in parts_of(kind):
            parts[part] += count
    if not any(isinstance(part, RecurrentState) for part in parts):
        heads = Counter({part: count for part, count in parts.items() if _has_heads(part)})
        parts |= in_groups(heads)
    return sum(count * _vllm_bytes(part, num_tokens, fmt, block_tokens, in_flight) for part, count in parts.items())


def _has_heads(part: SingleKind) -> bool:
    return isinstance(part, HeadLayer) and not isinstance(part, CrossAttention)


def in_groups(parts: "Counter[SingleKind]") -> "Counter[SingleKind]":
    """Layers as vLLM groups them: each kind padded to a multiple of the rarest, or all to the commonest if near it."""
    if len(parts) < 2:
        return parts
    least, most = min(parts.values()), max(parts.values())
    group = most if most < 1.25 * least else least
    return Counter({part: -(-count // group) * group for part, count in parts.items()})


def _vllm_bytes(kind: SingleKind, num_tokens: int, fmt: CacheFormat, block_tokens: int, in_flight: int) -> int:
    if isinstance(kind, RecurrentState | CrossAttention):
        return kind.fixed_bytes(fmt)
    horizon = kind.horizon()
    if horizon is None:
        return kind.bytes_at(rounded_up(num_tokens, block_tokens), fmt)
    compressed = kind.bytes_at(num_tokens, fmt) - kind.token_bytes(fmt) * min(num_tokens, horizon)
    if isinstance(kind, ChunkedAttention):
        tokens = rounded_up(min(horizon + in_flight, num_tokens), block_tokens)
    else:
        tokens = rounded_up(min(horizon - 1 + in_flight, num_tokens), block_tokens) + block_tokens
    return tokens * kind.token_bytes(fmt) + compressed


def rounded_up(num_tokens: int, block_tokens: int) -> int:
    """``num_tokens`` in whole blocks."""
    return -(-num_tokens // block_tokens) * block_tokens
