"""Layers that keep something of every token they may still need: what that is, and how many bytes it takes.

Knows nothing of blocks, models or machines; ``layers.py`` has the other kinds. MHA, GQA and MQA differ only in
``num_kv_heads``. All bytes are those of one layer and one sequence, in the storage format given.
"""

from dataclasses import dataclass
from fractions import Fraction

from kvfolio.spec.formats import CacheFormat


class LayerMemory:
    """What every kind of layer can be asked. The answers here are those of a layer that keeps every token."""

    __slots__ = ()

    def horizon(self) -> int | None:
        """Tokens after which the layer keeps no more; None: it keeps all of them."""
        return None

    def token_bytes(self, fmt: CacheFormat) -> int:
        """Bytes of one token that is held."""
        return 0

    def bytes_at(self, num_tokens: int, fmt: CacheFormat) -> int:
        """Bytes held once ``num_tokens`` have passed."""
        horizon = self.horizon()
        held = num_tokens if horizon is None else min(num_tokens, horizon)
        return held * self.token_bytes(fmt)

    def growth(self, fmt: CacheFormat) -> Fraction:
        """Bytes that one more token adds when every window is full; a fraction in compressed layers."""
        return Fraction(self.token_bytes(fmt) if self.horizon() is None else 0)

    def fixed_bytes(self, fmt: CacheFormat) -> int:
        """What does not grow: behind every window, bytes_at(n) = fixed_bytes + growth * n."""
        return (self.horizon() or 0) * self.token_bytes(fmt)

    def bytes_read_at(self, num_tokens: int, fmt: CacheFormat) -> int:
        """Bytes of cache that decoding one more token reads."""
        return self.bytes_at(num_tokens, fmt)

    def naive_token_bytes(self, fmt: CacheFormat) -> int:
        """Bytes a token of a cache that stores every head's key and value of every token in this layer."""
        return self.token_bytes(fmt)

    def attention_flops_at(self, num_tokens: int, num_q_heads: int) -> int:
        """FLOPs of q·k and p·v of decoding one token over ``num_tokens``, a product and a sum counting 2."""
        return 0


@dataclass(frozen=True, slots=True)
class HeadLayer(LayerMemory):
    """A layer that keeps keys and values per head; the two widths may differ."""

    num_kv_heads: int
    k_width: int  # numbers in one head's key
    v_width: int  # numbers in one head's value

    @property
    def head_dim(self) -> int:
        return self.k_width

    @property
    def v_is_prefix_of_k(self) -> bool:
        """Whether the value is the beginning of the key, and stored once."""
        return False

    @property
    def token_numbers(self) -> int:
        """Numbers that are stored of one token."""
        return self.num_kv_heads * (self.k_width + self.v_width)

    def token_bytes(self, fmt: CacheFormat) -> int:
        return self.num_kv_heads * (fmt.k.vector_bytes(self.k_width) + fmt.v.vector_bytes(self.v_width))

    def attention_flops_at(self, num_tokens: int, num_q_heads: int) -> int:
        horizon = self.horizon()
        read = num_tokens if horizon is None else min(num_tokens, horizon)
        return 2 * num_q_heads * (self.k_width + self.v_width) * read


@dataclass(frozen=True, slots=True)
class FullAttention(HeadLayer):
    """Every token's key and value stay, for as long as the sequence lives."""

    @property
    def kind(self) -> str:
        return "full"

    @property
    def window(self) -> int | None:
        return None

    def first_token_needed(self, position: int) -> int:
        """The earliest token that a query at ``position`` reads."""
        return 0


@dataclass(frozen=True, slots=True)
class SlidingWindow(HeadLayer):
    """A query at position p reads the tokens p - window + 1 … p; older ones may be forgotten."""

    window: int

    @property
    def kind(self) -> str:
        return "sliding_window"

    def horizon(self) -> int | None:
        return self.window

    def first_token_needed(self, position: int) -> int:
        """The earliest token that a query at ``position`` reads."""
        return max(0, position - self.window + 1)


@dataclass(frozen=True, slots=True)
class ChunkedAttention(HeadLayer):
    """A query reads the tokens of its own chunk: the text is cut at every multiple of ``window`` (Llama 4).

    Counted is the most that is held on the way: a chunk just full.
    """

    window: int  # tokens of a chunk

    @property
    def kind(self) -> str:
        return "chunked"

    def horizon(self) -> int | None:
        return self.window


@dataclass(frozen=True, slots=True)
class BlockSparse(HeadLayer):
    """Every token's key and value stay; an index key beside them chooses the ``top_k`` tokens that are read."""

    index_width: int  # numbers of one token's index keys
    top_k: int  # tokens read: blocks chosen * tokens of a block

    @property
    def kind(self) -> str:
        return "block_sparse"

    @property
    def window(self) -> int | None:
        return None

    def token_bytes(self, fmt: CacheFormat) -> int:
        return HeadLayer.token_bytes(self, fmt) + fmt.k.vector_bytes(self.index_width)

    def bytes_read_at(self, num_tokens: int, fmt: CacheFormat) -> int:
        chosen = min(num_tokens, self.top_k) * HeadLayer.token_bytes(self, fmt)
        return chosen + num_tokens * fmt.k.vector_bytes(self.index_width)

    def naive_token_bytes(self, fmt: CacheFormat) -> int:
        return HeadLayer.token_bytes(self, fmt)

    def attention_flops_at(self, num_tokens: int, num_q_heads: int) -> int:
        return HeadLayer.attention_flops_at(self, min(num_tokens, self.top_k), num_q_heads)


@dataclass(frozen=True, slots=True)
class LatentAttention(LayerMemory):
    """MLA: one latent vector that every head's key and value are projections of, and one rotary key for all heads.

    DeepSeek-V2 (arXiv 2405.04434, section 2.1). With ``index_width`` the layer also keeps one index key a token, by
    which the ``top_k`` tokens to read are chosen (DeepSeek sparse attention, V3.2); a layer that reuses the choice of
    another has ``top_k`` and no index key of its own. The latent is stored as values are, the rotary key as keys are.
    """

    rank: int  # numbers of the latent vector
    rope_width: int  # numbers of the decoupled rotary key
    num_heads: int  # heads that the latent expands to
    expanded_k_width: int  # of one head's expanded key, its rotary part included
    expanded_v_width: int
    index_width: int = 0
    top_k: int | None = None

    @property
    def kind(self) -> str:
        return "latent" if self.top_k is None else "latent_indexed"

    @property
    def num_kv_heads(self) -> int:
        return 1

    @property
    def head_dim(self) -> int:
        return self.k_width

    @property
    def k_width(self) -> int:
        """Numbers of the one key that all heads read in the absorbed form: the latent, then the rotary key."""
        return self.rank + self.rope_width

    @property
    def v_width(self) -> int:
        """Numbers of the one value that all heads read in the absorbed form: the latent."""
        return self.rank

    @property
    def v_is_prefix_of_k(self) -> bool:
        """Whether the value is the beginning of the key, and stored once."""
        return True

    @property
    def token_numbers(self) -> int:
        """Numbers that are stored of one token."""
        return self.k_width

    @property
    def window(self) -> int | None:
        return None

    def first_token_needed(self, position: int) -> int:
        """The earliest token that a query at ``position`` reads."""
        return 0

    def token_bytes(self, fmt: CacheFormat) -> int:
        return self._latent_bytes(fmt) + self._index_bytes(fmt)

    def bytes_read_at(self, num_tokens: int, fmt: CacheFormat) -> int:
        return self._chosen(num_tokens) * self._latent_bytes(fmt) + num_tokens * self._index_bytes(fmt)

    def naive_token_bytes(self, fmt: CacheFormat) -> int:
        expanded = fmt.k.vector_bytes(self.expanded_k_width) + fmt.v.vector_bytes(self.expanded_v_width)
        return self.num_heads * expanded

    def attention_flops_at(self, num_tokens: int, num_q_heads: int) -> int:
        """In the absorbed form: every head multiplies with the latent itself."""
        return 2 * num_q_heads * (2 * self.rank + self.rope_width) * self._chosen(num_tokens)

    def _chosen(self, num_tokens: int) -> int:
        return num_tokens if self.top_k is None else min(num_tokens, self.top_k)

    def _latent_bytes(self, fmt: CacheFormat) -> int:
        return fmt.v.vector_bytes(self.rank) + (fmt.rope or fmt.k).vector_bytes(self.rope_width)

    def _index_bytes(self, fmt: CacheFormat) -> int:
        return fmt.k.vector_bytes(self.index_width) if self.index_width else 0


LIGHT_RATIO, HEAVY_RATIO = 4, 128  # tokens that a vector of DeepSeek-V4's CSA and HCA layers stands for


@dataclass(frozen=True, slots=True)
class CompressedSparse(LayerMemory):
    """DeepSeek-V4: a window of exact tokens, and behind it one vector for every ``ratio`` tokens.

    A vector is key and value at once, for all heads. With ``index_width`` each compressed vector also has an index
    key, by which ``top_k`` of them are chosen (CSA); without, all are read (HCA).
    """

    width: int
    ratio: int | None  # tokens that one compressed vector stands for; None: the layer keeps its window alone
    window: int
    index_width: int = 0
    top_k: int | None = None

    @property
    def kind(self) -> str:
        return "compressed_sparse"

    @property
    def num_kv_heads(self) -> int:
        return 1

    @property
    def head_dim(self) -> int:
        return self.width

    def horizon(self) -> int | None:
        return self.window

    def token_bytes(self, fmt: CacheFormat) -> int:
        return fmt.k.vector_bytes(self.width)

    def bytes_at(self, num_tokens: int, fmt: CacheFormat) -> int:
        compressed = self._groups(num_tokens) * self._compressed_bytes(fmt)
        return LayerMemory.bytes_at(self, num_tokens, fmt) + compressed

    def growth(self, fmt: CacheFormat) -> Fraction:
        return Fraction(self._compressed_bytes(fmt), self.ratio) if self.ratio else Fraction(0)

    def bytes_read_at(self, num_tokens: int, fmt: CacheFormat) -> int:
        exact, chosen = self._read(num_tokens)
        index = self._compressed_bytes(fmt) - self.token_bytes(fmt)
        return (exact + chosen) * self.token_bytes(fmt) + self._groups(num_tokens) * index

    def naive_token_bytes(self, fmt: CacheFormat) -> int:
        return fmt.k.vector_bytes(self.width) + fmt.v.vector_bytes(self.width)

    def attention_flops_at(self, num_tokens: int, num_q_heads: int) -> int:
        return 4 * num_q_heads * self.width * sum(self._read(num_tokens))

    def _read(self, num_tokens: int) -> tuple[int, int]:
        """Exact tokens and compressed vectors that one query reads."""
        groups = self._groups(num_tokens)
        return min(num_tokens, self.window), groups if self.top_k is None else min(groups, self.top_k)

    def _groups(self, num_tokens: int) -> int:
        return num_tokens // self.ratio if self.ratio else 0

    def _compressed_bytes(self, fmt: CacheFormat) -> int:
        index = fmt.k.vector_bytes(self.index_width) if self.index_width else 0
        return self.token_bytes(fmt) + index
