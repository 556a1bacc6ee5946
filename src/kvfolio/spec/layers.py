"""The kinds of layer memory, all of them: those of ``token_layers.py``, and those that do not grow with the text.

Knows nothing of blocks, models or machines. Every kind answers the questions of ``LayerMemory``.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from kvfolio.spec.formats import CacheFormat, Format
from kvfolio.spec.token_layers import (
    BlockSparse,
    ChunkedAttention,
    CompressedSparse,
    FullAttention,
    HeadLayer,
    LatentAttention,
    LayerMemory,
    SlidingWindow,
)

__all__ = [
    "BlockSparse",
    "ChunkedAttention",
    "CombinedLayer",
    "CompressedSparse",
    "CrossAttention",
    "FullAttention",
    "HeadLayer",
    "LatentAttention",
    "LayerKind",
    "LayerMemory",
    "NoCache",
    "PagedLayer",
    "RecurrentState",
    "SharedCache",
    "SingleKind",
    "SlidingWindow",
    "parts_of",
    "with_parts",
    "without_idle_windows",
]


class _WithoutTokens(LayerMemory):
    """A layer that keeps nothing of single tokens, and so has no heads, widths or window."""

    __slots__ = ()

    @property
    def num_kv_heads(self) -> int:
        return 0

    @property
    def head_dim(self) -> int:
        return 0

    @property
    def window(self) -> int | None:
        return None


@dataclass(frozen=True, slots=True)
class RecurrentState(_WithoutTokens):
    """A state of constant size instead of tokens: Mamba, gated delta net, lightning attention, RG-LRU, short conv.

    The formats are the layer's own: a cache format for keys and values says nothing about them.
    """

    mechanism: str  # for people: mamba, mamba2, gated_delta_net, kda, lightning, rg_lru, short_conv
    state_numbers: int
    state_format: Format
    conv_numbers: int  # last inputs of the short convolution in front; 0: none
    conv_format: Format

    @property
    def kind(self) -> str:
        return "recurrent"

    def bytes_at(self, num_tokens: int, fmt: CacheFormat) -> int:
        return self.fixed_bytes(fmt)

    def fixed_bytes(self, fmt: CacheFormat) -> int:
        return self.state_format.vector_bytes(self.state_numbers) + self.conv_format.vector_bytes(self.conv_numbers)


@dataclass(frozen=True, slots=True)
class CrossAttention(HeadLayer):
    """Keys and values of an encoder's tokens: made once, read by every text token, never growing with the text."""

    encoder_tokens: int  # 0 where the config leaves the length to the input

    @property
    def kind(self) -> str:
        return "cross_attention"

    @property
    def window(self) -> int | None:
        return None

    def bytes_at(self, num_tokens: int, fmt: CacheFormat) -> int:
        return self.fixed_bytes(fmt)

    def growth(self, fmt: CacheFormat) -> Fraction:
        return Fraction(0)

    def fixed_bytes(self, fmt: CacheFormat) -> int:
        return self.encoder_tokens * self.token_bytes(fmt)

    def naive_token_bytes(self, fmt: CacheFormat) -> int:
        return 0

    def attention_flops_at(self, num_tokens: int, num_q_heads: int) -> int:
        return HeadLayer.attention_flops_at(self, self.encoder_tokens, num_q_heads)


@dataclass(frozen=True, slots=True)
class SharedCache(LayerMemory):
    """The layer reads the keys and values that an earlier layer stored, and stores none of its own."""

    source: FullAttention | SlidingWindow | LatentAttention

    @property
    def kind(self) -> str:
        return "shared"

    @property
    def num_kv_heads(self) -> int:
        return self.source.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.source.head_dim

    @property
    def window(self) -> int | None:
        return self.source.window

    def bytes_read_at(self, num_tokens: int, fmt: CacheFormat) -> int:
        return self.source.bytes_read_at(num_tokens, fmt)

    def naive_token_bytes(self, fmt: CacheFormat) -> int:
        return self.source.naive_token_bytes(fmt)

    def attention_flops_at(self, num_tokens: int, num_q_heads: int) -> int:
        return self.source.attention_flops_at(num_tokens, num_q_heads)


@dataclass(frozen=True, slots=True)
class NoCache(_WithoutTokens):
    """A layer without attention: an expert or feed-forward layer of its own, an attention that was pruned away."""

    @property
    def kind(self) -> str:
        return "none"


PagedLayer = FullAttention | SlidingWindow | LatentAttention  # what the ledger cuts into blocks today
SingleKind = (
    FullAttention
    | SlidingWindow
    | ChunkedAttention
    | BlockSparse
    | LatentAttention
    | CompressedSparse
    | RecurrentState
    | CrossAttention
    | SharedCache
    | NoCache
)


@dataclass(frozen=True, slots=True)
class CombinedLayer(LayerMemory):
    """A layer that keeps several memories side by side: attention and a state (Falcon-H1), self and cross (T5)."""

    parts: tuple[SingleKind, ...]

    @property
    def kind(self) -> str:
        return "+".join(part.kind for part in self.parts)

    @property
    def num_kv_heads(self) -> int:
        return self.parts[0].num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.parts[0].head_dim

    @property
    def window(self) -> int | None:
        return self.parts[0].window

    def token_bytes(self, fmt: CacheFormat) -> int:
        return sum(part.token_bytes(fmt) for part in self.parts if not isinstance(part, CrossAttention))

    def bytes_at(self, num_tokens: int, fmt: CacheFormat) -> int:
        return sum(part.bytes_at(num_tokens, fmt) for part in self.parts)

    def growth(self, fmt: CacheFormat) -> Fraction:
        return sum((part.growth(fmt) for part in self.parts), Fraction(0))

    def fixed_bytes(self, fmt: CacheFormat) -> int:
        return sum(part.fixed_bytes(fmt) for part in self.parts)

    def bytes_read_at(self, num_tokens: int, fmt: CacheFormat) -> int:
        return sum(part.bytes_read_at(num_tokens, fmt) for part in self.parts)

    def naive_token_bytes(self, fmt: CacheFormat) -> int:
        return sum(part.naive_token_bytes(fmt) for part in self.parts)

    def attention_flops_at(self, num_tokens: int, num_q_heads: int) -> int:
        return sum(part.attention_flops_at(num_tokens, num_q_heads) for part in self.parts)


LayerKind = SingleKind | CombinedLayer


def parts_of(kind: LayerKind) -> tuple[SingleKind, ...]:
    """The memories of one layer: one, or those of a combined layer."""
    return kind.parts if isinstance(kind, CombinedLayer) else (kind,)


def without_idle_windows(layers: tuple[LayerKind, ...], max_context: int | None) -> tuple[LayerKind, ...]:
    """Windows that no text the model reads can fill, as what they are: full attention."""

    if max_context is None:
        return layers

    def opened(part: SingleKind) -> SingleKind:
        if isinstance(part, SlidingWindow | ChunkedAttention) and part.window >= max_context:
            return FullAttention(part.num_kv_heads, part.k_width, part.v_width)
        return part

    return tuple(with_parts(kind, opened) for kind in layers)


def with_parts(kind: LayerKind, change: Callable[[SingleKind], SingleKind]) -> LayerKind:
    """The layer with each of its memories changed."""
    return (
        CombinedLayer(tuple(change(part) for part in kind.parts)) if isinstance(kind, CombinedLayer) else change(kind)
    )
