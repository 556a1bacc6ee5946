"""One model, described by numbers: its layers in order and what its network needs to run.

Knows nothing of tensors, files or block tables. ``families.py`` makes these values, ``plan`` prices them,
``cache`` and ``store`` group their layers, ``models`` runs them.
"""

from dataclasses import dataclass, field

from kvfolio.spec.formats import CacheFormat
from kvfolio.spec.layers import LayerKind


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions of one kind of layer. ``scaling``: none, linear, llama3 or yarn."""

    base: float
    width: int  # rotated numbers of a head, from its start
    scaling: str = "none"
    factor: float = 1.0
    original_context: int = 0  # llama3, yarn: the context the base was trained for
    low_frequency_factor: float = 1.0  # llama3
    high_frequency_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    attention_factor: float | None = None  # yarn; None: 0.1 ln(factor) + 1


@dataclass(frozen=True, slots=True)
class Network:
    """The numbers a network needs beside its weights."""

    hidden_size: int
    num_q_heads: int
    intermediate_size: int
    vocab_size: int
    norm_eps: float
    activation: str  # silu, gelu (exact) or gelu_tanh
    attention_scale: float  # multiplies q·k
    rope: Rope | None = None  # of full-attention layers; None: learned positions
    rope_local: Rope | None = None  # of sliding-window layers; None: as ``rope``
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A decoder-only language model: what each layer remembers, and how its network is shaped."""

    name: str  # for people: folder, file or repository
    family: str  # llama, gemma3 or gpt2: the file of ``models`` that runs it
    architecture: str  # the word found in the config
    layers: tuple[LayerKind, ...]  # in order
    max_context: int  # tokens
    dtype: str  # format name of the weights as published: f32, bf16 or f16
    network: Network
    num_params: int  # weights, tied ones once
    eos_token_ids: tuple[int, ...] = ()
    assumptions: tuple[str, ...] = field(default=())  # what the config left open and was assumed

    def groups(self) -> tuple["LayerGroup", ...]:
        """Layers with equal kind and geometry, in order of first appearance; each shares one block table."""
        by_kind: dict[LayerKind, list[int]] = {}
        for index, kind in enumerate(self.layers):
            by_kind.setdefault(kind, []).append(index)
        return tuple(LayerGroup(kind, tuple(indices)) for kind, indices in by_kind.items())


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one kind and geometry. Their share of a token's cache is stored together."""

    kind: LayerKind
    layer_indices: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return len(self.layer_indices)

    def layer_bytes_per_token(self, fmt: CacheFormat) -> int:
        """Bytes one layer of the group stores for one token."""
        kind = self.kind
        return kind.num_kv_heads * (fmt.k.vector_bytes(kind.k_width) + fmt.v.vector_bytes(kind.v_width))

    def block_bytes(self, block_tokens: int, fmt: CacheFormat) -> int:
        """Bytes of one block: ``block_tokens`` tokens over all layers of the group."""
        return self.num_layers * block_tokens * self.layer_bytes_per_token(fmt)
