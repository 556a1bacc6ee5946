"""Counts the weights of the part of a layer that mixes tokens: attention of every kind, and recurrent states.

Knows nothing of feed-forward parts, embeddings or storage. Sizes that follow from the layer's memory (heads, widths)
come from its kind; the rest (ranks, convolutions, gates) from the fields.
"""

from dataclasses import dataclass

from kvfolio.spec.config.heads import num_q_heads
from kvfolio.spec.fields import Fields
from kvfolio.spec.layers import (
    BlockSparse,
    CombinedLayer,
    CompressedSparse,
    CrossAttention,
    FullAttention,
    HeadLayer,
    LatentAttention,
    LayerKind,
    NoCache,
    RecurrentState,
    SharedCache,
    SlidingWindow,
)
from kvfolio.spec.weights.numbers import Weights
from kvfolio.spec.weights.recurrent import recurrent_weights
from kvfolio.spec.weights.traits import Traits, bare_type


@dataclass(frozen=True, slots=True)
class MixerFacts:
    """What the attention layers of one model share."""

    model_type: str
    hidden: int
    heads: int
    sliding_heads: int  # where window layers have their own number
    traits: Traits
    qkv_bias: bool
    o_bias: bool
    qk_norm: str
    gate: str
    q_rank: int  # 0: queries are not compressed
    shared_query: int  # Step-3: width between the two query matrices; 0: one matrix
    index_heads: int
    latent_gate: bool
    key_is_value: bool  # full layers have no value matrix
    grouped_heads: int  # query heads of a key head, where it differs by layer; 0: ``heads`` for all


def read_mixer_facts(fields: Fields, hidden: int, model_type: str, traits: Traits) -> MixerFacts:
    """The facts of ``fields``; raises BrokenModelError for values that are no sizes."""
    kind = bare_type(model_type)
    recurrent_only = not traits.feed_forward
    groups = fields.integer("num_gqa_groups", default=0, low=0) if kind == "openelm" else 0
    heads = 1 if recurrent_only or groups else num_q_heads(fields)
    other = fields.child("attention_other_setting") or Fields({}, fields.where)
    sparse = fields.child("sparse_attention_config") or Fields({}, fields.where)
    fixed = kind.startswith("qwen2")  # a bias whatever the fields say
    bias = _any_flag(fields, ("attention_bias", "use_bias", "bias", "use_qkv_bias", "add_bias_linear"))
    qkv = _any_flag(fields, ("attention_bias", "qkv_bias", "use_qkv_bias", "add_qkv_bias", "use_bias", "bias"))
    own = (
        heads
        if recurrent_only
        else fields.integer("swa_num_attention_heads", "num_sliding_attention_heads", default=0, low=0)
    )
    return MixerFacts(
        model_type=kind,
        hidden=hidden,
        heads=heads,
        sliding_heads=own or other.integer("num_attention_heads", default=heads),
        traits=traits,
        qkv_bias=traits.qkv_bias if qkv is None or fixed else qkv,
        o_bias=traits.o_bias if bias is None or traits.qkv_bias != traits.o_bias else bias,
        qk_norm=_qk_norm(fields, traits),
        gate="query" if fields.flag("attn_output_gate", False) else traits.gate,
        q_rank=fields.integer("q_lora_rank", default=0, low=0),
        shared_query=fields.integer("share_q_dim", default=0, low=0),
        index_heads=fields.integer("index_n_heads", default=0, low=0)
        or sparse.integer("sparse_num_index_heads", default=0, low=0),
        latent_gate=fields.flag("mla_use_output_gate", False),
        key_is_value=fields.flag("attention_k_eq_v", False),
        grouped_heads=groups,
    )


def mixer_weights(kind: LayerKind, facts: MixerFacts, fields: Fields) -> Weights:
    """Weights of one layer's mixing part, without the norms in front of it."""
    if isinstance(kind, CombinedLayer):
        merged = facts.model_type.startswith("t5gemma2")  # one attention reads the encoder's tokens and the text
        parts = kind.parts[:1] if merged else kind.parts
        return sum((mixer_weights(part, facts, fields) for part in parts), Weights())
    if isinstance(kind, NoCache):
        return Weights()
    if isinstance(kind, RecurrentState):
        return recurrent_weights(kind, fields, facts.hidden, facts.heads)
    if isinstance(kind, CompressedSparse) or facts.model_type == "deepseek_v4":
        return _compressed(kind, facts, fields)
    if isinstance(kind, SharedCache):
        return _sharing(kind, facts)
    if isinstance(kind, LatentAttention):
        return _latent(kind, facts)
    return _heads(kind, facts)


def _any_flag(fields: Fields, names: tuple[str, ...]) -> bool | None:
    """Whether one of the flags is set; None where the config has none of them."""
    values = [fields.get(name) for name in names]
    known = [value for value in values if isinstance(value, bool)]
    return any(known) if known else None


def _qk_norm(fields: Fields, traits: Traits) -> str:
    flag = _any_flag(fields, ("use_qk_norm", "qk_layernorm", "qk_norm"))
    per_layer = fields.get("qk_norm_type") == "per_layer"
    if flag is None:
        return traits.qk_norm
    return (("all" if per_layer else traits.qk_norm) or "head") if flag else ""


def _query_heads(kind: HeadLayer, facts: MixerFacts) -> int:
    if facts.grouped_heads:
        return kind.num_kv_heads * facts.grouped_heads
    return facts.sliding_heads if isinstance(kind, SlidingWindow) else facts.heads


def _heads(kind: HeadLayer, facts: MixerFacts) -> Weights:
    """Query, key, value and output matrices of attention by heads, and what comes beside them."""
    heads = _query_heads(kind, facts)
    query, key, value = heads * kind.k_width, kind.num_kv_heads * kind.k_width, kind.num_kv_heads * kind.v_width
    inner = heads * kind.v_width
    if facts.key_is_value and isinstance(kind, FullAttention):
        value = 0
    matrices = facts.hidden * (key + value + inner) + _query_matrices(query, facts)
    matrices += facts.hidden * {"query": query, "head": heads}.get(facts.gate, 0)
    other = facts.qkv_bias * (query + key + value) + facts.o_bias * facts.hidden
    other += {"head": 2 * kind.k_width, "all": query + key}.get(facts.qk_norm, 0)
    if facts.model_type == "gpt_oss":
        other += heads  # attention sinks
    if facts.model_type == "whisper":
        other -= facts.qkv_bias * key  # keys alone have no bias
    if facts.model_type == "mllama" and isinstance(kind, CrossAttention):
        other += 2 * kind.k_width + 2
    if isinstance(kind, BlockSparse) and facts.index_heads:
        matrices += facts.hidden * kind.index_width * (facts.index_heads + 1)
        other += 2 * kind.index_width
    return Weights(matrices, other)


def _query_matrices(query: int, facts: MixerFacts) -> int:
    if facts.shared_query:
        return facts.shared_query * (facts.hidden + query)
    return facts.hidden * query


def _sharing(kind: SharedCache, facts: MixerFacts) -> Weights:
    """A layer that reads another's keys and values has matrices for queries and output alone."""
    if isinstance(kind.source, LatentAttention):
        return _latent(kind.source, facts)
    query = _query_heads(kind.source, facts) * kind.source.k_width
    inner = _query_heads(kind.source, facts) * kind.source.v_width
    biases = facts.qkv_bias * query + facts.o_bias * facts.hidden
    return Weights(facts.hidden * (query + inner), biases + (kind.source.k_width if facts.qk_norm else 0))


def _latent(kind: LatentAttention, facts: MixerFacts) -> Weights:
    """MLA (arXiv 2405.04434, section 2.1), and the indexer of DeepSeek-V3.2 where the layer has one."""
    query = facts.heads * kind.expanded_k_width
    value = facts.heads * kind.expanded_v_width
    expanded = facts.heads * (kind.expanded_k_width - kind.rope_width + kind.expanded_v_width)
    rank = facts.q_rank
    matrices = rank * (facts.hidden + query) if rank else facts.hidden * query
    matrices += facts.hidden * (kind.rank + kind.rope_width) + kind.rank * expanded + value * facts.hidden
    matrices += facts.hidden * value * facts.latent_gate
    other = rank + kind.rank
    if kind.index_width:
        matrices += (rank or facts.hidden) * facts.index_heads * kind.index_width
        matrices += facts.hidden * (kind.index_width + facts.index_heads)
        other += 2 * kind.index_width
    return Weights(matrices, other)


def _compressed(kind: LayerKind, facts: MixerFacts, fields: Fields) -> Weights:
    """DeepSeek-V4: one key-value vector for all heads, output in low rank by groups, and a compressor.

    A layer that chooses among its compressed vectors compresses overlapping stretches, with matrices twice as wide.
    """
    width, hidden, rank = fields.integer("head_dim"), facts.hidden, facts.q_rank
    out_rank, groups = fields.integer("o_lora_rank"), fields.integer("o_groups")
    query = facts.heads * width
    matrices = rank * (hidden + query) + hidden * width + out_rank * query + groups * out_rank * hidden
    other = rank + width + facts.heads
    if isinstance(kind, CompressedSparse) and kind.ratio is not None:
        wide = 2 if kind.index_width else 1
        matrices += 2 * hidden * wide * width
        other += kind.ratio * wide * width + width
        if kind.index_width:
            matrices += 2 * hidden * 2 * kind.index_width
            matrices += facts.index_heads * (kind.index_width * rank + hidden)
            other += kind.ratio * 2 * kind.index_width + kind.index_width
    streams = fields.integer("hc_mult", default=1)
    if streams > 1:  # hyper-connections in front of attention and of feed-forward
        mixes = (2 + streams) * streams
        other += 2 * (mixes * streams * hidden + mixes + 3)
    return Weights(matrices, other)
