"""One model, described by numbers: its layers in order and what its network needs to run.

Knows nothing of tensors, files or block tables. The readers in ``config`` and ``gguf`` make these values, ``planner``
prices them, ``cache`` and ``store`` group their layers, ``models`` runs them.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from kvfolio.spec.formats import CacheFormat
from kvfolio.spec.layers import LayerKind, PagedLayer


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
    truncate: bool = True  # yarn: whether the ramp begins and ends at whole frequencies


@dataclass(frozen=True, slots=True)
class Experts:
    """Feed-forward parts in which a router sends every token through a few of many small gated MLPs.

    Scores are taken over all experts in f32. Where ``groups_per_token`` < ``num_groups``, only the experts of the best
    groups of neighbours can be chosen; a group is as good as its ``group_best`` best experts together.
    """

    num_experts: int  # routed ones
    per_token: int
    width: int  # inside one expert
    layers: tuple[int, ...]  # that have them, ascending; the others are dense
    scoring: str = "softmax"  # or sigmoid
    normalise: bool = False  # whether the scores of the chosen ones are made to add up to 1
    factor: float = 1.0  # on the scores of the chosen ones, after that
    num_groups: int = 1
    groups_per_token: int = 1
    group_best: int = 1  # 1: DeepSeek-V2, 2: DeepSeek-V3
    has_bias: bool = False  # on the scores, for choosing and not for weighing
    router_f32: bool = False  # whether the router's product is in f32, too, and not in the compute dtype
    shared_width: int = 0  # of the expert that every token passes through; 0: none
    has_shared_gate: bool = False  # whether a sigmoid of its own weighs that one


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
    parallel: bool = False  # attention and feed-forward part both read the layer's input; their outputs are added to it
    num_norms: int = 2  # of a falcon layer: 1 where both parts read the same norm
    experts: Experts | None = None  # None: every layer is dense
    q_rank: int = 0  # of latent attention: numbers that queries are projected through; 0: through none
    rope_in_pairs: bool = False  # of latent attention: the weights' rotated pairs are neighbours


@dataclass(frozen=True, slots=True)
class WeightCount:
    """How many weights a model has, and the bytes they take as published. ``source``: where the counts come from."""

    num_params: int  # tied ones once
    num_active_params: int  # what one token passes through: all but the routed experts that were not chosen
    num_bytes: int  # as published: packed weights and their scales in a quantised checkpoint
    source: str  # "config", "safetensors", "gguf" or "catalogue"
    expert_params: int = 0  # of all routed experts together
    num_experts: int = 0  # routed ones, of one layer
    experts_per_token: int = 0
    expert_bytes: int = 0  # of ``num_bytes``, those of all routed experts together

    def share_left_alone(self, num_tokens: int) -> float:
        """The share of the routed experts that none of ``num_tokens`` chooses, if they choose evenly and on their own.

        An expert is left alone by all of them with probability (1 - chosen / experts) ^ tokens.
        """
        chosen = self.experts_per_token / self.num_experts if self.num_experts else 0.0
        return float((1 - chosen) ** num_tokens)


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A language model as the planner sees it: what each layer remembers, and how large it is."""

    name: str  # for people: folder, file or repository
    model_type: str  # the word found in the config: llama, deepseek_v3, …
    layers: tuple[LayerKind, ...]  # in order
    max_context: int | None  # tokens; None: the config does not say
    dtype: str  # format name of the weights as published: f32, bf16 or f16
    hidden_size: int
    num_q_heads: int
    weights: WeightCount
    assumptions: tuple[str, ...]  # what the config left open and was assumed
    _kinds: tuple[tuple[LayerKind, int], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_kinds", tuple(Counter(self.layers).items()))  # counted once, asked for often

    @property
    def num_params(self) -> int:
        return self.weights.num_params

    def kinds(self) -> tuple[tuple[LayerKind, int], ...]:
        """Layers with equal kind and geometry, with their number, in order of first appearance."""
        return self._kinds


@dataclass(frozen=True, slots=True)
class RunnableSpec(ModelSpec):
    """A model that the engine can run: with the numbers of its network, and layers that the ledger can cut."""

    layers: tuple[PagedLayer, ...]
    max_context: int
    family: str  # llama, gemma3, gpt2, falcon, deepseek or gpt_oss: the file of ``models`` that runs it
    network: Network
    eos_token_ids: tuple[int, ...] = ()

    def groups(self, formats: Sequence[CacheFormat] = ()) -> tuple["LayerGroup", ...]:
        """Layers with equal kind and geometry, in order of first appearance; each group shares one block table.

        ``formats``: that of each layer, where layers that are stored in different ones are to be told apart.
        """
        alike: dict[tuple[PagedLayer, CacheFormat | None], list[int]] = {}
        for index, kind in enumerate(self.layers):
            alike.setdefault((kind, formats[index] if formats else None), []).append(index)
        return tuple(LayerGroup(kind, tuple(indices)) for (kind, _), indices in alike.items())


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers of one kind and geometry, in one format. Their share of a token's cache is stored together."""

    kind: PagedLayer
    layer_indices: tuple[int, ...]

    @property
    def num_layers(self) -> int:
        return len(self.layer_indices)

    def layer_bytes_per_token(self, fmt: CacheFormat) -> int:
        """Bytes one layer of the group stores for one token."""
        return self.kind.token_bytes(fmt)

    def block_bytes(self, block_tokens: int, fmt: CacheFormat) -> int:
        """Bytes of one block: ``block_tokens`` tokens over all layers of the group."""
        return self.num_layers * block_tokens * self.layer_bytes_per_token(fmt)
