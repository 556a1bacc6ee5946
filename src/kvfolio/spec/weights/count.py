"""Counts a model's weights from its config: total and active, those of routed experts, and bytes as published.

Knows nothing of files that hold weights; a safetensors header or a GGUF file says better, where one is at hand.
Checked against transformers' own networks (``tests/parity/test_weight_count.py``) and published counts.
"""

from dataclasses import replace

from kvfolio.spec.config.heads import hidden_size, is_encoder_decoder
from kvfolio.spec.fields import Fields
from kvfolio.spec.layers import CrossAttention, LayerKind, RecurrentState, parts_of
from kvfolio.spec.model import WeightCount
from kvfolio.spec.weights.feed_forward import (
    FeedForward,
    feed_forward_weights,
    read_experts,
    replaced_by_matrix,
)
from kvfolio.spec.weights.mixers import MixerFacts, mixer_weights, read_mixer_facts
from kvfolio.spec.weights.numbers import Weights
from kvfolio.spec.weights.quantised import LayerPieces, published_bytes
from kvfolio.spec.weights.towers import T5_TYPES, encoder_weights, tower_weights
from kvfolio.spec.weights.traits import Traits, bare_type, traits_of

# Learned positions: where their number stands, and how many more rows the table has.
_POSITIONS = {
    "gpt2": ("n_positions", 0),
    "gpt_bigcode": ("n_positions", 0),
    "gpt_neo": ("max_position_embeddings", 0),
    "opt": ("max_position_embeddings", 2),
    "biogpt": ("max_position_embeddings", 2),
    "bart": ("max_position_embeddings", 2),
    "whisper": ("max_target_positions", 0),
}
_GUESSING = ("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")
# Ernie-VL: one number for the experts of text tokens, one for those of image tokens.
_TEXT_AND_IMAGE = ("moe_num_experts", "moe_intermediate_size")
_FALCONS = ("falcon", "refinedweb", "refinedwebmodel")


def count_weights(fields: Fields, root: Fields, layers: tuple[LayerKind, ...], model_type: str) -> WeightCount:
    """The weights of the model that ``root`` describes, ``fields`` being its text part and ``layers`` in order.

    Tied matrices count once. Towers and encoders are among all weights, and not among the active ones: a generated
    token does not pass through them. Layers that guess ahead (MTP) are among neither, which is noted. Raises
    BrokenModelError for sizes that are missing or are none, and for more experts a token than there are.
    """
    kind = _kind(fields, model_type)
    traits = traits_of(kind)
    if kind in T5_TYPES:
        traits = replace(traits, gated="gated" in (fields.text("feed_forward_proj") or T5_TYPES[kind]))
    if kind in _FALCONS:
        traits = replace(traits, mlp_bias=fields.flag("bias", False))
    hidden = hidden_size(fields)
    images = _image_experts(fields, hidden, kind)
    if images:
        fields = fields.over({name: _of_pair(fields, name, 0) for name in _TEXT_AND_IMAGE})
    facts = read_mixer_facts(fields, hidden, kind, traits)
    experts = read_experts(fields)
    feed_forward = feed_forward_weights(fields, layers, hidden, kind, traits, experts)
    pieces = _layers(fields, layers, facts, feed_forward)
    if kind in ("zamba", "zamba2"):
        pieces = _zamba_layers(fields, layers, facts)
    routed = sum(piece.routed.total for piece in pieces)
    tables, head = _embeddings(fields, root, hidden, kind, traits)
    beside = tower_weights(root, hidden) + images * sum(1 for piece in pieces if piece.routed.total)
    if any(isinstance(part, CrossAttention) for layer in layers for part in parts_of(layer)) and _has_encoder(
        fields, root
    ):
        beside += encoder_weights(root, kind)
    rest = tables + _between(fields, layers, hidden, kind, traits) + beside
    total = sum(piece.total for piece in pieces) + head + rest
    unused = routed // experts.count * (experts.count - experts.chosen) if experts.count else 0
    _note_guessing(fields)
    stored_twice = tables if kind in _FALCONS and not head else 0  # their files hold the tied matrix a second time
    num_bytes, expert_bytes = published_bytes(pieces, head + rest + stored_twice, fields, root)
    return WeightCount(
        num_params=total,
        num_active_params=total - beside - unused,
        num_bytes=num_bytes,
        source="config",
        expert_params=routed,
        num_experts=experts.count,
        experts_per_token=experts.chosen,
        expert_bytes=expert_bytes,
    )


def _kind(fields: Fields, model_type: str) -> str:
    """The model type whose traits apply: the text part's own, or that of the whole."""
    own = fields.text("model_type")
    return bare_type(own or model_type)


def _layers(
    fields: Fields, layers: tuple[LayerKind, ...], facts: MixerFacts, feed_forward: tuple[FeedForward, ...]
) -> tuple[LayerPieces, ...]:
    """Every layer's pieces; equal kinds are counted once."""
    known: dict[LayerKind, Weights] = {}
    found = []
    for index, (layer, part) in enumerate(zip(layers, feed_forward, strict=True)):
        if layer not in known:
            known[layer] = mixer_weights(layer, facts, fields)
        mixer = known[layer]
        if replaced_by_matrix(fields, index, layer):
            mixer = Weights(facts.hidden * facts.hidden)
        found.append(LayerPieces(mixer, part.dense, part.shared, part.routed))
    return tuple(found)


def _image_experts(fields: Fields, hidden: int, kind: str) -> int:
    """Ernie-VL: numbers of one layer's experts for image tokens, which no generated token passes through."""
    if not kind.startswith("ernie4_5_vl") or not any(isinstance(fields.get(name), list) for name in _TEXT_AND_IMAGE):
        return 0
    count, width = (_of_pair(fields, name, 1) for name in _TEXT_AND_IMAGE)
    return count * (3 * hidden * width + hidden)


def _of_pair(fields: Fields, name: str, which: int) -> int:
    """The number for text (0) or for images (1); one number stands for both."""
    pair = fields.get(name)
    if not isinstance(pair, list):
        return fields.integer(name)
    if len(pair) != 2 or not all(type(item) is int and 0 < item < 2**40 for item in pair):
        raise fields.wrong(name, pair, "a whole number, or two of them")
    return int(pair[which])


def _zamba_layers(fields: Fields, layers: tuple[LayerKind, ...], facts: MixerFacts) -> tuple[LayerPieces, ...]:
    """Zamba: Mamba in every layer; beside it, in some, one of a few shared transformer blocks and a matrix of its own.

    The shared blocks read the embedding beside the hidden state, so their attention is twice as wide. They are counted
    where they first appear.
    """
    hidden, kind = facts.hidden, facts.model_type
    width = 2 * hidden
    inner = fields.integer("intermediate_size", "ffn_hidden_size", default=4 * hidden)
    block = Weights(3 * width * width + width * hidden + 3 * hidden * inner, width + hidden)
    rank = fields.integer("adapter_rank", default=128) if kind == "zamba2" else 0
    own = Weights(hidden * hidden + rank * (hidden + 2 * inner))
    left = fields.integer("num_mem_blocks", default=1)
    found = []
    for layer in layers:
        mixer, beside = Weights(), Weights()
        for part in parts_of(layer):
            if isinstance(part, RecurrentState):
                mixer = mixer_weights(part, facts, fields)
            else:
                beside = own + (block if left > 0 else Weights())
                left -= 1
        found.append(LayerPieces(mixer, beside, Weights(), Weights()))
    return tuple(found)


def _embeddings(fields: Fields, root: Fields, hidden: int, kind: str, traits: Traits) -> tuple[int, int]:
    """Numbers of the tables of tokens and positions, and of an output matrix of its own."""
    vocab = fields.integer("padded_vocab_size", "vocab_size")
    width = fields.integer("word_embed_proj_dim", default=hidden)
    tables = vocab * width + (2 * width * hidden if width != hidden else 0)
    if kind == "mllama":
        tables += 8 * hidden  # tokens that only the input knows
    if kind in _POSITIONS:
        name, more = _POSITIONS[kind]
        tables += (fields.integer(name, "max_position_embeddings", "n_ctx", default=0, low=0) + more) * hidden
    tied = _tied(fields, root, traits)
    return tables, (0 if tied else vocab * width) + (vocab if traits.head_bias else 0)


def _tied(fields: Fields, root: Fields, traits: Traits) -> bool:
    """Whether the output matrix is the table of tokens: as the whole config says, or its text part, or its class."""
    for source in (root, fields):
        value = source.get("tie_word_embeddings")
        if isinstance(value, bool):
            return value
    if not traits.tied and fields.stated_or_usual("tie_word_embeddings") is None:
        fields.note("tie_word_embeddings is absent: an output matrix of its own assumed")
    return fields.flag("tie_word_embeddings", traits.tied)


def _between(fields: Fields, layers: tuple[LayerKind, ...], hidden: int, kind: str, traits: Traits) -> int:
    """Norms, and what a few families have beside attention and feed-forward."""
    norm = hidden * (2 if traits.norm_bias and not fields.flag("no_bias", False) else 1)
    norms = _falcon_norms(fields, kind) if kind in _FALCONS else traits.norms
    crossing = sum(
        1 for layer in layers if len(parts_of(layer)) > 1 and isinstance(parts_of(layer)[-1], CrossAttention)
    )
    total = (norms * len(layers) + crossing) * norm + (norm if norms or kind != "olmo" else 0)
    if kind == "bloom":
        total += norm  # behind the table of tokens
    if kind in T5_TYPES:
        tables = 2 if kind != "umt5" else len(layers) * 2
        total += tables * fields.integer("relative_attention_num_buckets", default=32) * fields.integer("num_heads")
    return total + _gemma_extras(fields, len(layers), hidden, kind) + _streams(fields, hidden, kind)


def _falcon_norms(fields: Fields, kind: str) -> int:
    """Norms of one layer: one that attention and feed-forward part share, or one each."""
    of_before_its_class = kind != "falcon" and fields.get("n_head_kv") is not None
    if fields.flag("new_decoder_architecture", False) or of_before_its_class:
        return fields.integer("num_ln_in_parallel_attn", default=2)
    return 1 if fields.flag("parallel_attn", True) else 2


def _gemma_extras(fields: Fields, num_layers: int, hidden: int, kind: str) -> int:
    """Per-layer embeddings of Gemma 3n and 4, and 3n's low-rank residuals and alternating updates."""
    if kind == "gemma4" and fields.flag("enable_moe_block", False):
        return num_layers * (4 * hidden + fields.integer("num_experts"))  # norms around the experts, scales
    narrow = fields.integer("hidden_size_per_layer_input", default=0, low=0) if kind in ("gemma3n", "gemma4") else 0
    if not narrow:
        return 0
    rows = fields.integer("vocab_size_per_layer_input", default=fields.integer("vocab_size"))
    total = num_layers * narrow * (rows + hidden) + narrow + num_layers * (2 * hidden * narrow + hidden)
    if kind == "gemma3n":
        streams = fields.integer("altup_num_inputs", default=4)
        rank = fields.integer("laurel_rank", default=64)
        total += num_layers * (2 * hidden * rank + hidden + streams**3 + streams**2 + (streams + 2) * hidden)
        total += 2 * (streams - 1) * hidden * hidden
    return total


def _streams(fields: Fields, hidden: int, kind: str) -> int:
    """DeepSeek-V4: the mixer that joins the parallel residual streams before the output."""
    streams = fields.integer("hc_mult", default=1) if kind == "deepseek_v4" else 1
    return streams * streams * hidden + streams + 1 if streams > 1 else 0


def _has_encoder(fields: Fields, root: Fields) -> bool:
    is_both = root.flag("is_encoder_decoder", False) or is_encoder_decoder(fields)
    return root.child("encoder") is not None or is_both


def _note_guessing(fields: Fields) -> None:
    for name in _GUESSING:
        value = fields.get(name)
        if isinstance(value, int) and value > 0:
            fields.note(f"{name} is {value}: layers that guess further tokens (MTP) are not among the weights counted")
            return
