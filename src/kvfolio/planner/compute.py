"""Floating-point operations and bytes of weights read, with and without a cache.

Knows nothing of clocks or machines: it counts; a bandwidth or a rate turns counts into seconds. What a step reads of
the cache: ``spec.layout.CacheLayout.bytes_read``.
Formulas: docs/arithmetic.md.
"""

from dataclasses import dataclass

from kvfolio.planner import sizes
from kvfolio.spec.formats import COMPUTE_FORMATS
from kvfolio.spec.model import RunnableSpec


def attention_flops(spec: RunnableSpec, position: int) -> int:
    """FLOPs of q·k and p·v of one token at ``position``, all layers: 2 (k_width + v_width) a head and token read."""
    return sizes.attention_flops_at(spec, position + 1)


def weight_flops(spec: RunnableSpec) -> int:
    """FLOPs of the weight products of one token, 2 a weight that it passes through.

    An embedding table that is only looked up counts none, nor do experts that were not chosen.
    """
    return 2 * (spec.weights.num_active_params - _looked_up(spec))


def _looked_up(spec: RunnableSpec) -> int:
    """Weights of an embedding table that multiplies nothing."""
    network = spec.network
    return 0 if network.tie_embeddings else network.vocab_size * network.hidden_size


@dataclass(frozen=True, slots=True)
class DecodeFlops:
    """FLOPs of a prompt of P tokens and G decoded ones. Decode only leaves the prompt's one pass out."""

    prefill: int
    decode_with_cache: int
    decode_without_cache: int

    @property
    def ratio_decode_only(self) -> float:
        return self.decode_without_cache / self.decode_with_cache

    @property
    def ratio_with_prefill(self) -> float:
        """The first token comes out of the prompt's pass, which both pay once."""
        return (self.prefill + self.decode_without_cache) / (self.prefill + self.decode_with_cache)


def decode_flops(spec: RunnableSpec, prompt_tokens: int, num_tokens: int) -> DecodeFlops:
    """Counted FLOPs: with a cache each decoded token costs one pass, without it a pass over all tokens before it.

    The output product is counted for every token, as 2N a token has it; the engine leaves it out where it samples none.
    Decoding token i (0-based, after the first, which the prompt's pass yields) has prompt_tokens + i tokens of text.
    """
    prefix = [0]  # prefix[n]: attention FLOPs of one pass over n tokens
    for position in range(prompt_tokens + num_tokens):
        prefix.append(prefix[-1] + attention_flops(spec, position))
    weights = weight_flops(spec)
    lengths = range(prompt_tokens + 1, prompt_tokens + num_tokens)
    return DecodeFlops(
        prefill=weights * prompt_tokens + prefix[prompt_tokens],
        decode_with_cache=sum(weights + prefix[n] - prefix[n - 1] for n in lengths),
        decode_without_cache=sum(weights * n + prefix[n] for n in lengths),
    )


def textbook_flops(num_params: int, prompt_tokens: int, num_tokens: int) -> tuple[float, float]:
    """(with, without) a cache, decode only, attention left out: 2N·G against 2N·G·(P + G/2)."""
    with_cache = 2.0 * num_params * num_tokens
    return with_cache, with_cache * (prompt_tokens + num_tokens / 2)


def weight_bytes(spec: RunnableSpec, dtype: str) -> int:
    """Bytes of the weights held in ``dtype``."""
    return spec.num_params * COMPUTE_FORMATS[dtype].value_bytes


def weight_bytes_read(spec: RunnableSpec, dtype: str, num_tokens: int) -> int:
    """Bytes of weights that a step of ``num_tokens`` reads: all but an embedding table that is only looked up.

    Of experts, those that are expected to be chosen.
    """
    weights = spec.weights
    left_alone = round(weights.expert_params * weights.share_left_alone(num_tokens))
    read = weights.num_params - _looked_up(spec) - left_alone
    return read * COMPUTE_FORMATS[dtype].value_bytes
