"""Turns the fields of a language model into its layers: the sort of each layer, and the geometry that goes with it.

Knows nothing of files, weights or model names beyond what ``class_defaults`` says about absent fields.
"""

from collections.abc import Mapping

from kvfolio.errors import UnknownModelError
from kvfolio.spec.config import heads
from kvfolio.spec.config import words as sorts
from kvfolio.spec.config.class_defaults import ClassDefaults
from kvfolio.spec.config.patterns import layer_words, rope_flags
from kvfolio.spec.config.states import state_layer
from kvfolio.spec.fields import MAX_LAYERS, Fields
from kvfolio.spec.formats import BF16, CacheFormat
from kvfolio.spec.layers import (
    BlockSparse,
    ChunkedAttention,
    CombinedLayer,
    CompressedSparse,
    CrossAttention,
    FullAttention,
    LatentAttention,
    LayerKind,
    NoCache,
    SharedCache,
    SingleKind,
    SlidingWindow,
    parts_of,
)
from kvfolio.spec.token_layers import HEAVY_RATIO, LIGHT_RATIO

_RATIOS = {sorts.CSA: LIGHT_RATIO, sorts.HCA: HEAVY_RATIO}
_RATE_NAMES = {sorts.CSA: "compressed_sparse_attention", sorts.HCA: "heavily_compressed_attention"}
_OLD_RATE_NAMES = {sorts.CSA: "compress_rate_csa", sorts.HCA: "compress_rate_hca"}

_Changes = Mapping[str, object]


def layers_of(fields: Fields, model_type: str, defaults: ClassDefaults | None) -> tuple[LayerKind, ...]:
    """Every layer's memory, in order.

    Raises UnknownModelError for what cannot be expressed, BrokenModelError for fields that are missing or at odds.
    """
    pruned = _pruned_layers(fields)
    if pruned is not None:
        return pruned
    num_layers = _num_layers(fields)
    words = layer_words(fields, model_type, defaults, num_layers)
    changes = _changes(fields, words)
    owners = heads.index_owners(fields, num_layers)
    made: dict[tuple[str, bool, tuple[tuple[str, object], ...]], LayerKind] = {}
    layers: list[LayerKind] = []
    for word, own_index, change in zip(words, owners, changes, strict=True):
        key = (word, own_index, tuple(sorted(change.items())))
        if key not in made:
            made[key] = _layer(fields.over(change) if change else fields, model_type, word, own_index)
        layers.append(made[key])
    layers = _shared(fields, words, layers)
    if _is_longcat(fields, model_type) and fields.get("num_hidden_layers") is None:  # two attentions a layer
        layers = [layer for layer in layers for _ in range(2)]
    _note_encoder(fields, layers)
    return tuple(layers)


def _is_longcat(fields: Fields, model_type: str) -> bool:
    return model_type.lower().startswith("longcat") or "LongcatFlashForCausalLM" in (
        fields.texts("architectures") or ()
    )


def _num_layers(fields: Fields) -> int:
    for name in ("layers_block_type", "hybrid_override_pattern"):  # Nemotron-H: the list is the number
        stated = fields.get(name)
        if isinstance(stated, list | str) and stated and fields.get("num_hidden_layers") is None:
            if len(stated) > MAX_LAYERS:
                raise fields.wrong(name, f"{len(stated)} entries", f"up to {MAX_LAYERS} layers")
            return len(stated)
    names = heads.DECODER_LAYER_NAMES if heads.is_encoder_decoder(fields) else heads.LAYER_NAMES
    return fields.integer(*names, high=MAX_LAYERS)


# ---- one layer ------------------------------------------------------------------------------------------------------


def _layer(fields: Fields, model_type: str, word: str, own_index: bool) -> LayerKind:
    if word == sorts.NONE:
        return NoCache()
    if word == sorts.RECURRENT:
        return state_layer(fields, model_type)
    if word == sorts.HYBRID:
        return CombinedLayer((_attention(fields, sorts.FULL, own_index), state_layer(fields, model_type)))
    if word == sorts.HYBRID_SLIDING:
        return CombinedLayer((_attention(fields, sorts.SLIDING, own_index), state_layer(fields, model_type)))
    attention = _attention(fields, word, own_index)
    if heads.is_encoder_decoder(fields) or fields.flag("add_cross_attention", False):
        return CombinedLayer((attention, _cross(fields, model_type)))
    return attention


def _attention(fields: Fields, word: str, own_index: bool) -> SingleKind:
    if word in _RATIOS or (word == sorts.SLIDING and _is_compressed(fields)):
        return _compressed(fields, word)
    if heads.has_latent(fields):
        if word != sorts.FULL:
            raise UnknownModelError(f"{fields.where}: a latent layer that is {word} is not known; known: full")
        return heads.latent(fields, own_index)
    q_heads = heads.num_q_heads(fields)
    kv_heads = heads.num_kv_heads(fields, q_heads)
    if q_heads % kv_heads:
        raise fields.wrong("num_key_value_heads", kv_heads, f"a number that {q_heads} query heads can be divided by")
    k_width = heads.key_width(fields)
    v_width = heads.value_width(fields, k_width)
    if word == sorts.SLIDING:
        return SlidingWindow(kv_heads, k_width, v_width, heads.window(fields))
    if word == sorts.CHUNKED:
        return ChunkedAttention(kv_heads, k_width, v_width, fields.integer("attention_chunk_size"))
    if word == sorts.CROSS:
        return CrossAttention(kv_heads, k_width, v_width, 0)
    if word == sorts.SPARSE:
        return _block_sparse(fields, FullAttention(kv_heads, k_width, v_width))
    if heads.index_key(fields)[1] is not None:
        raise UnknownModelError(f"{fields.where}: index keys beside plain heads are not known; known: beside a latent")
    return FullAttention(kv_heads, k_width, v_width)


def _block_sparse(fields: Fields, plain: FullAttention) -> BlockSparse:
    """MiniMax-M3: one index key a token chooses blocks of tokens."""
    child = fields.child("sparse_attention_config")
    if child is not None:
        width, blocks = child.integer("sparse_index_dim"), child.integer("sparse_topk_blocks")
        block_tokens = child.integer("sparse_block_size")
    else:
        width, blocks = fields.integer("index_head_dim"), fields.integer("index_topk_blocks")
        block_tokens = fields.integer("index_block_size")
    return BlockSparse(plain.num_kv_heads, plain.k_width, plain.v_width, width, blocks * block_tokens)


def _is_compressed(fields: Fields) -> bool:
    """DeepSeek-V4: its window layers keep one vector for key and value, too."""
    return fields.get("compress_ratios") is not None or fields.usual_of == "deepseek_v4"


def _compressed(fields: Fields, word: str) -> CompressedSparse:
    width, window = heads.key_width(fields), heads.window(fields)
    if word == sorts.SLIDING:
        return CompressedSparse(width, None, window)
    rates = fields.child("compress_rates")
    ratio = fields.integer(_OLD_RATE_NAMES[word], default=_RATIOS[word])
    if rates is not None:
        ratio = rates.integer(_RATE_NAMES[word], default=ratio)
    if word == sorts.HCA:
        return CompressedSparse(width, ratio, window)
    return CompressedSparse(width, ratio, window, fields.integer("index_head_dim"), fields.integer("index_topk"))


def _cross(fields: Fields, model_type: str) -> CrossAttention:
    """The encoder's keys and values in one decoder layer; Whisper's encoder always has the same length."""
    q_heads = heads.num_q_heads(fields)
    kv_heads, width = heads.num_kv_heads(fields, q_heads), heads.key_width(fields)
    tokens = fields.integer("max_source_positions") if model_type == "whisper" else 0
    return CrossAttention(kv_heads, width, width, tokens)


# ---- what differs from layer to layer -------------------------------------------------------------------------------


def _changes(fields: Fields, words: list[str]) -> list[_Changes]:
    """For each layer the fields that are its own: entries of lists, and names that only some layers read."""
    num_layers = len(words)
    changes: list[dict[str, object]] = [{} for _ in words]
    for name in heads.PER_LAYER_NAMES:
        values = fields.get(name)
        if isinstance(values, list):
            if len(values) < num_layers:
                raise fields.wrong(name, f"{len(values)} entries", f"one for each of the {num_layers} layers")
            for change, value in zip(changes, values[:num_layers], strict=True):
                change[name] = value
    per_layer = fields.get("num_key_value_heads_per_layer")
    if isinstance(per_layer, list):  # DeciLM
        if len(per_layer) < num_layers:
            raise fields.wrong("num_key_value_heads_per_layer", f"{len(per_layer)} entries", f"{num_layers}")
        for change, value in zip(changes, per_layer[:num_layers], strict=True):
            change["num_key_value_heads"] = value
    for word, own in ((sorts.SLIDING, _sliding_changes(fields)), (sorts.FULL, _global_changes(fields))):
        for change, layer_word in zip(changes, words, strict=True):
            if own and layer_word == word:
                change.update(own)
    if fields.usual_of == "mistral_large4_text":  # its layers without rotary positions keep the latent alone
        for change, has_rope in zip(changes, rope_flags(fields, num_layers), strict=True):
            if not has_rope:
                change["qk_rope_head_dim"] = 0
    _add_stated_changes(fields, changes)
    for change in changes:
        for name, value in change.items():
            if not isinstance(value, int | float | str | None):
                raise fields.wrong(name, value, "a number, a text or null for each layer")
    return list(changes)


def _sliding_changes(fields: Fields) -> dict[str, object]:
    """MiMo: window layers have heads of their own, under names that start with swa_; Step: in a mapping."""
    changes = {}
    for name in ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim"):
        value = fields.stated_or_usual(f"swa_{name}")
        if value is not None:
            changes[name] = value
    other = fields.child("attention_other_setting")
    if other is not None and other.get("attention_type") == "sliding_attention":
        for name in ("num_attention_heads", "num_attention_groups", "head_dim"):
            if other.get(name) is not None:
                changes[{"num_attention_groups": "num_key_value_heads"}.get(name, name)] = other.get(name)
    return changes


def _global_changes(fields: Fields) -> dict[str, object]:
    """Gemma 4: global layers have wider and fewer heads; with ``attention_k_eq_v`` fewer key heads, too."""
    changes: dict[str, object] = {}
    width = fields.stated_or_usual("global_head_dim")
    if width is not None:
        changes["head_dim"] = width
    kv_heads = fields.get("num_global_key_value_heads")
    if kv_heads is not None and fields.flag("attention_k_eq_v", True):
        changes["num_key_value_heads"] = kv_heads
    elif fields.get("attention_k_eq_v") is True and not fields.names("num_global_key_value_heads"):
        fields.note("num_global_key_value_heads is absent: num_key_value_heads assumed for global layers, too")
    return changes


def _add_stated_changes(fields: Fields, changes: list[dict[str, object]]) -> None:
    """``per_layer_config``: a mapping from layer numbers to fields that replace the model's own."""
    stated = fields.child("per_layer_config")
    if stated is None:
        return
    for number, values in stated.values.items():
        is_layer = len(number) < 6 and number.isdecimal() and int(number) < len(changes)
        if not is_layer or not isinstance(values, dict):
            raise stated.wrong(number, values, f"an object under a layer number below {len(changes)}")
        changes[int(number)].update(values)


# ---- layers that share, layers that were pruned ---------------------------------------------------------------------


def _shared(fields: Fields, words: list[str], layers: list[LayerKind]) -> list[LayerKind]:
    """Layers that read the keys and values of an earlier one instead of keeping their own."""
    num_layers = len(layers)
    sources = list(range(num_layers))
    num_shared = fields.integer("num_kv_shared_layers", default=0, low=0, high=num_layers)
    if num_shared:  # Gemma 3n and 4: the last ones read the last layer of their kind before them
        first = num_layers - num_shared
        last_of = {word: index for index, word in enumerate(words[:first])}
        for index in range(first, num_layers):
            if words[index] not in last_of:
                raise fields.wrong("num_kv_shared_layers", num_shared, "a number that leaves a layer of every kind")
            sources[index] = last_of[words[index]]
    group = _group_that_shares(fields)
    if group > 1:  # Hunyuan: the first of each group keeps them
        sources = [index - index % group for index in sources]
    stated = fields.get("kv_source_layers")
    if isinstance(stated, list) and stated != sources:
        if len(stated) != num_layers or not all(
            type(item) is int and 0 <= item <= index for index, item in enumerate(stated)
        ):
            raise fields.wrong("kv_source_layers", stated, "an earlier layer's number, or its own, for each layer")
        sources = stated
    return [_reader(fields, layers, index, source) for index, source in enumerate(sources)]


def _group_that_shares(fields: Fields) -> int:
    """How many layers in a row share keys and values (Hunyuan's CLA); 1: none."""
    if fields.flag("use_cla", False):
        return fields.integer("cla_share_factor")
    if fields.get("cla_share_factor") not in (None, 1) and not fields.names("use_cla"):
        fields.note("use_cla is absent: off assumed, and cla_share_factor is not read")
    return 1


def _reader(fields: Fields, layers: list[LayerKind], index: int, source: int) -> LayerKind:
    if index == source:
        return layers[index]
    kept = layers[source]
    if not isinstance(kept, FullAttention | SlidingWindow | LatentAttention):
        raise UnknownModelError(
            f"{fields.where}: layer {index} shares the memory of a {kept.kind} layer, which is not known; "
            "known: full attention, windows and latents; correct the fields that say which layers share"
        )
    own = layers[index]
    if isinstance(own, LatentAttention) and own.index_width:
        raise UnknownModelError(
            f"{fields.where}: layer {index} shares a latent but keeps index keys, which is not known; "
            "correct the fields that say which layers share, or indexer_types: shared where it keeps none"
        )
    return SharedCache(kept)


def _pruned_layers(fields: Fields) -> tuple[LayerKind, ...] | None:
    """Nemotron-NAS: a description of each layer, of which some have no attention left."""
    blocks = fields.get("block_configs")
    if not blocks:
        return None
    if not isinstance(blocks, list) or len(blocks) > MAX_LAYERS:
        raise fields.wrong("block_configs", blocks, f"a list of up to {MAX_LAYERS} layers")
    num_layers = _num_layers(fields)
    if len(blocks) != num_layers:
        raise fields.wrong("block_configs", f"{len(blocks)} entries", f"one for each of the {num_layers} layers")
    q_heads, width = heads.num_q_heads(fields), heads.key_width(fields)
    layers: list[LayerKind] = []
    for index, block in enumerate(blocks):
        entry = Fields({str(index): block}, f"{fields.where}: block_configs", "", fields.assumptions).child(str(index))
        attention = entry.child("attention") if entry is not None else None
        if attention is None:
            raise fields.wrong("block_configs", block, "layers that each have an attention object")
        layers.append(_pruned_layer(attention, q_heads, width))
    return tuple(layers)


def _pruned_layer(attention: Fields, q_heads: int, width: int) -> LayerKind:
    if attention.flag("no_op", False) or attention.flag("replace_with_linear", False):
        return NoCache()
    attention.refuse_if_set("sparsify", "attention with sparse weights is not known")
    if attention.get("num_key_value_heads") is not None:
        kv_heads = attention.integer("num_key_value_heads", high=heads.MAX_HEADS)
    else:
        group = attention.integer("n_heads_in_group")
        if q_heads % group:
            raise attention.wrong("n_heads_in_group", group, f"a number that divides {q_heads} query heads")
        kv_heads = q_heads // group
    if attention.get("window_length") is not None:
        kept = attention.integer("num_sink_tokens", default=0, low=0) + attention.integer("window_length")
        return SlidingWindow(kv_heads, width, width, kept)
    return FullAttention(kv_heads, width, width)


def _note_encoder(fields: Fields, layers: list[LayerKind]) -> None:
    """What the encoder's tokens cost, where their number is left to the input."""
    fmt = CacheFormat(BF16, BF16)
    parts = [part for layer in layers for part in parts_of(layer)]
    num_bytes = sum(
        part.token_bytes(fmt) for part in parts if isinstance(part, CrossAttention) and not part.encoder_tokens
    )
    if num_bytes:
        fields.note(
            f"the encoder's length is left to the input: each of its tokens takes {num_bytes:,} B at 16 bits more"
        )
