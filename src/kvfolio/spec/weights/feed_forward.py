"""Counts the weights of the feed-forward part of every layer: dense, shared experts, routed experts and their router.

Knows nothing of attention or storage. Which layers have experts is written in a dozen ways; each is read here.
"""

from dataclasses import dataclass

from kvfolio.errors import BrokenModelError
from kvfolio.spec.fields import Fields, show
from kvfolio.spec.layers import LayerKind, NoCache, SharedCache
from kvfolio.spec.weights.numbers import NOTHING, Weights, per_layer
from kvfolio.spec.weights.traits import Traits, bare_type

_DENSE_WIDTH = (
    "dense_intermediate_size",
    "intermediate_size",
    "n_inner",
    "ffn_hidden_size",
    "ffn_dim",
    "decoder_ffn_dim",
    "d_ff",
    "dff",
    "ff_intermediate_size",
    "block_ff_dim",
)
_EXPERT_WIDTH = ("moe_intermediate_size", "expert_ffn_hidden_size")
_ONLY_WIDTH = (
    "intermediate_size",
    "ffn_hidden_size",
    "decoder_ffn_dim",
    "d_ff",
)  # of models where experts are the whole feed-forward
_NUM_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts", "num_routed_experts")
_CHOSEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "moe_top_k",
    "top_k_experts",
    "experts_per_token",
    "num_selected_experts",
)
_SHARED_COUNT = ("n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts")
_SHARED_WIDTH = (
    "shared_expert_intermediate_size",
    "moe_shared_expert_intermediate_size",
    "shared_intermediate_size",
    "share_expert_dim",
)
_DENSE_HEAD = ("first_k_dense_replace", "num_dense_layers", "moe_layer_num_skipped")
# Their experts are as wide as intermediate_size says.
_ONE_WIDTH = ("llama4", "mixtral", "phimoe", "minimax", "minimax_text_01")
_ONE_WIDTH_BY_DEFAULT = ("arctic", "grok_1", "hunyuan")
_OWN_LAYER = {"-": "dense", "e": "sparse", "mlp": "dense", "moe": "sparse"}  # Nemotron-H; all else mixes tokens


@dataclass(frozen=True, slots=True)
class FeedForward:
    """The feed-forward part of one layer."""

    dense: Weights = NOTHING
    shared: Weights = NOTHING  # experts that every token passes through, and what stands around the routed ones
    routed: Weights = NOTHING  # all routed experts together


@dataclass(frozen=True, slots=True)
class Experts:
    """How many routed experts a layer has, and how many of them a token passes through."""

    count: int = 0
    chosen: int = 0


def read_experts(fields: Fields) -> Experts:
    """Routed experts of ``fields``; none where the model is dense.

    Raises BrokenModelError where a token is to pass through more of them than there are.
    """
    inner = fields.child("ffn_config")
    source = inner if inner is not None and inner.silent("moe_num_experts") is not None else fields
    raw = next((source.get(name) for name in _NUM_EXPERTS if source.get(name) is not None), None)
    if isinstance(raw, list):  # one a layer (Hunyuan), or one a modality (Ernie-VL)
        items = [item for item in raw if isinstance(item, int)]
        count = sum(items) if len(set(items)) != 1 or len(items) == 2 else items[0]
    else:
        count = source.integer(*_NUM_EXPERTS, default=0, low=0)
    if count == 0:
        _check_dense(source)
    elif fields.usual_of == "kimi_linear" and not any(fields.names(name) for name in _NUM_EXPERTS):
        fields.note(f"num_experts is absent: {count:,} assumed, which the class calls num_local_experts")
    if count < 2 or not (fields.flag("enable_moe_block", True) and fields.flag("is_moe", True)):
        return Experts()
    chosen = next((source.get(name) for name in _CHOSEN if source.get(name) is not None), None)
    if isinstance(chosen, list) and chosen and all(type(item) is int and item > 0 for item in chosen):
        used = max(chosen)  # one a layer
    else:
        used = source.integer(*_CHOSEN, assume=1)
    if used > count:
        raise BrokenModelError(
            f"{source.where}: {_name_set(source, _CHOSEN)} is {used:,}, more than {_name_set(source, _NUM_EXPERTS)}, "
            f"{count:,}; a token cannot pass through more experts than there are: correct one of them"
        )
    return Experts(count, used)


def _check_dense(fields: Fields) -> None:
    """A model without a number of experts is dense; one that has other fields of experts lacks it."""
    told = next((name for name in (*_CHOSEN, *_EXPERT_WIDTH, *_SHARED_COUNT) if fields.get(name)), None)
    stated = next((name for name in _NUM_EXPERTS if fields.names(name)), None)
    if told is None:
        return
    if stated is None:
        raise BrokenModelError(
            f"{fields.where}: {told} is {show(fields.get(told))}, but the number of experts is missing; "
            f"add one of {', '.join(_NUM_EXPERTS)}, or take a complete file"
        )
    if fields.get(stated) is not None:
        fields.note(f"{stated} is {show(fields.get(stated))}: every layer is counted as dense, whatever {told} says")


def _name_set(fields: Fields, names: tuple[str, ...]) -> str:
    """The first of ``names`` that is set, or that the model's class sets."""
    return next((name for name in names if fields.silent(name) is not None), names[0])


def feed_forward_weights(
    fields: Fields, layers: tuple[LayerKind, ...], hidden: int, model_type: str, traits: Traits, experts: Experts
) -> tuple[FeedForward, ...]:
    """The feed-forward part of every layer, in order."""
    kind, count = bare_type(model_type), len(layers)
    blocks = fields.get("block_configs")
    if isinstance(blocks, list):
        return _searched(fields, blocks, hidden, count)
    pattern = _pattern(fields, count, kind, traits, experts)
    dense = _dense_widths(fields, layers, hidden, kind) if {"dense", "both"} & set(pattern) else (0,) * count
    sparse = (FeedForward(),) * count
    if {"sparse", "both"} & set(pattern):
        sparse = _sparse(fields, count, hidden, kind, traits, experts)
    found = []
    for index, name in enumerate(pattern):
        if name in ("dense", "both") and not dense[index]:
            raise fields.wrong(_name_set(fields, _DENSE_WIDTH), 0, "the width of a feed-forward, from 1")
        wide = _block(hidden, dense[index], traits) if name in ("dense", "both") else NOTHING
        part = sparse[index] if name in ("sparse", "both") else FeedForward()
        found.append(FeedForward(wide, part.shared, part.routed))
    return tuple(found)


def _block(hidden: int, width: int, traits: Traits) -> Weights:
    """One feed-forward: two or three matrices between ``hidden`` and ``width``."""
    ways_in = 2 if traits.gated else 1
    return Weights((ways_in + 1) * hidden * width, traits.mlp_bias * (ways_in * width + hidden))


# ---- which layers ---------------------------------------------------------------------------------------------------


def _pattern(fields: Fields, count: int, kind: str, traits: Traits, experts: Experts) -> tuple[str, ...]:
    """For every layer: none, dense, sparse (experts) or both."""
    if not traits.feed_forward:
        return ("none",) * count
    own = fields.get("layers_block_type") or fields.get("hybrid_override_pattern")
    if kind == "nemotron_h" and isinstance(own, list | str) and len(own) >= count:
        return tuple(_OWN_LAYER.get(str(item).lower(), "none") for item in own[:count])
    if not experts.count:
        return ("dense",) * count
    if kind == "longcat_flash":  # two attentions and two dense parts around every layer of experts
        return tuple("dense" if index % 2 else "both" for index in range(count))
    if kind in ("gemma4", "gemma4_unified", "arctic"):
        return ("both",) * count
    return tuple("sparse" if flag else "dense" for flag in _sparse_layers(fields, count, kind))


def _sparse_layers(fields: Fields, count: int, kind: str) -> list[bool]:
    """Whether each layer has experts."""
    layers = range(count)
    types = fields.get("mlp_layer_types")
    if isinstance(types, list) and len(types) >= count:
        return [item != "dense" for item in types[:count]]
    frequency = fields.get("moe_layer_freq")
    if isinstance(frequency, list) and len(frequency) >= count:
        return [bool(item) for item in frequency[:count]]
    listed = fields.get("moe_layers") or fields.get("moe_layers_enum")
    if isinstance(listed, str):
        listed = [int(item) for item in listed.split(",") if item.strip().isdigit()]
    if isinstance(listed, list):
        return [index in listed for index in layers]
    if kind == "step3":
        fields.note("moe_layers_enum is absent: experts in every layer but the first four and the last assumed")
        return [4 <= index < count - 1 for index in layers]
    if kind == "jamba":
        period, offset = (
            fields.integer("expert_layer_period", default=2),
            fields.integer("expert_layer_offset", default=1, low=0),
        )
        return [index % period == offset for index in layers]
    step = fields.integer("interleave_moe_layer_step", default=0, low=0)
    if step:
        return [(index + 1) % step == 0 for index in layers]
    if kind.startswith("ernie4_5"):
        return _ernie_layers(fields, count)
    first = fields.integer(*_DENSE_HEAD, default=0, low=0)
    if fields.names("n_routed_experts") and not fields.usual and not any(fields.names(name) for name in _DENSE_HEAD):
        fields.note(f"{_DENSE_HEAD[0]} is absent: experts in the first layers, too, assumed")
    every = fields.integer("moe_layer_freq", default=1)
    sparse_step = fields.integer("decoder_sparse_step", default=1)
    only = fields.get("mlp_only_layers")
    dense_only = set(only) if isinstance(only, list) else set()
    return [
        index >= first and index % every == 0 and (index + 1) % sparse_step == 0 and index not in dense_only
        for index in layers
    ]


def _ernie_layers(fields: Fields, count: int) -> list[bool]:
    bounds = []
    for name, usual in (("moe_layer_start_index", 1), ("moe_layer_end_index", count - 1)):
        value = fields.get(name)
        items = value if isinstance(value, list) else [value]
        numbers = [item for item in items if isinstance(item, int) and item >= 0]
        bounds.append(min(numbers) if numbers and name.endswith("start_index") else max(numbers, default=usual))
    interval = fields.integer("moe_layer_interval", default=1)
    return [bounds[0] <= index <= bounds[1] and (index + 1) % interval == 0 for index in range(count)]


# ---- how wide -------------------------------------------------------------------------------------------------------


def _dense_widths(fields: Fields, layers: tuple[LayerKind, ...], hidden: int, kind: str) -> tuple[int, ...]:
    """Width of the dense feed-forward in every layer."""
    count = len(layers)
    if kind.startswith("granitemoe") or kind == "granite_moe":
        shared = per_layer(fields, ("shared_intermediate_size",), count)
        return shared or (0,) * count
    if kind == "openelm":
        return _multiplied(fields, hidden, count)
    if kind == "hf_olmo" and fields.get("mlp_hidden_size") is not None:  # both halves of the gated product together
        return (fields.integer("mlp_hidden_size") // 2,) * count
    names: tuple[str, ...] = ("intermediate_size_mlp",) if kind == "llama4" else _DENSE_WIDTH
    if kind == "whisper" and fields.get("decoder_ffn_dim") is None:
        fields.note("decoder_ffn_dim is absent: four times d_model assumed, as in every published Whisper")
        names = ()
    found = per_layer(fields, names, count)
    if found is None:
        inner = fields.child("ffn_config")
        if inner is None and not fields.usual and not fields.get("expansion_ratio") and not fields.get("mlp_ratio"):
            fields.note("intermediate_size (or ffn_hidden_size) is absent: four times the hidden size assumed")
        ratio = fields.integer("expansion_ratio", "mlp_ratio", default=4)
        width = inner.integer("ffn_hidden_size", default=ratio * hidden) if inner else ratio * hidden
        found = (width,) * count
    if kind in ("qwen", "recurrent_gemma", "moshi"):  # the field counts both halves of the gated product
        return tuple(width // 2 for width in found)
    if kind.startswith("lfm2") and fields.flag("block_auto_adjust_ff_dim", kind == "lfm2"):
        multiple = fields.integer("block_multiple_of", default=256)
        factor = fields.number("block_ffn_dim_multiplier", default=1.0)
        return tuple(-(-int(factor * int(2 * width / 3)) // multiple) * multiple for width in found)
    if fields.flag("use_double_wide_mlp", False):
        return tuple(
            width * (2 if isinstance(layer, SharedCache) else 1) for width, layer in zip(found, layers, strict=True)
        )
    return found


def _multiplied(fields: Fields, hidden: int, count: int) -> tuple[int, ...]:
    """OpenELM: a multiplier a layer, rounded to a multiple of the divisor, never down by more than a tenth."""
    raw = fields.get("ffn_multipliers")
    divisor = fields.integer("ffn_dim_divisor", default=256)
    if not isinstance(raw, list) or len(raw) < count or not all(isinstance(item, int | float) for item in raw):
        raise fields.wrong("ffn_multipliers", raw, f"a list of {count} numbers")
    widths = []
    for factor in raw[:count]:
        exact = factor * hidden
        rounded = max(divisor, int(exact + divisor / 2) // divisor * divisor)
        widths.append(rounded + divisor if rounded < 0.9 * exact else rounded)
    return tuple(widths)


def _sparse(
    fields: Fields, count: int, hidden: int, kind: str, traits: Traits, experts: Experts
) -> tuple[FeedForward, ...]:
    """Router, routed and shared experts, for every layer as if it had them."""
    inner = fields.child("ffn_config")
    widths = per_layer(inner, ("ffn_hidden_size",), count) if inner is not None else None
    if widths is None and kind not in _ONE_WIDTH:
        widths = per_layer(fields, _EXPERT_WIDTH, count)
        if widths is None and not fields.usual and kind not in _ONE_WIDTH_BY_DEFAULT:
            fields.note("moe_intermediate_size is absent: experts as wide as intermediate_size assumed")
    if widths is None and not kind.startswith("gemma4"):
        widths = per_layer(fields, _ONLY_WIDTH, count)
    if widths is None:
        raise fields.missing("moe_intermediate_size")
    narrow = fields.integer("moe_latent_size", "routed_expert_hidden_size", default=0) or hidden
    if fields.get("latent_moe_use_norm") and narrow == hidden:
        raise fields.missing("routed_expert_hidden_size")
    shared = _shared_widths(fields, widths, kind)
    gate = hidden if kind.startswith(("qwen2_moe", "qwen3_next", "qwen3_5", "qwen3_omni")) else 0
    found = []
    for width, shared_width in zip(widths, shared, strict=True):
        one = _block(narrow, width, traits)
        around = Weights(
            2 * hidden * narrow if narrow != hidden else 0, experts.count * hidden + bool(shared_width) * gate
        )
        biases = experts.count if traits.mlp_bias else 0
        beside = _block(hidden, shared_width, traits) if shared_width else NOTHING
        found.append(FeedForward(shared=beside + around + Weights(0, biases), routed=one.times(experts.count)))
    return tuple(found)


def _shared_widths(fields: Fields, widths: tuple[int, ...], kind: str) -> tuple[int, ...]:
    """Width of the shared experts of every layer taken together; 0: none."""
    count = len(widths)
    if kind == "llama4":
        return widths
    shared = per_layer(fields, _SHARED_WIDTH, count)
    numbers = per_layer(fields, _SHARED_COUNT, count)
    if shared is not None:
        return tuple(
            width * (number if kind == "nemotron_h" else 1)
            for width, number in zip(shared, numbers or (1,) * count, strict=True)
        )
    if numbers is None:
        return (0,) * count
    return tuple(width * number for width, number in zip(widths, numbers, strict=True))


def _searched(fields: Fields, blocks: list[object], hidden: int, count: int) -> tuple[FeedForward, ...]:
    """Models found by search (Nemotron-NAS): every layer has its own multiplier, a plain matrix or nothing."""
    found = []
    for index in range(count):
        block = blocks[index] if index < len(blocks) else None
        part = block.get("ffn") if isinstance(block, dict) else None
        if not isinstance(part, dict):
            raise fields.wrong("block_configs", block, f"{count} objects with an ffn each")
        layer = Fields(part, f"{fields.where}: block_configs[{index}].ffn")
        if layer.flag("no_op", False):
            found.append(FeedForward())
        elif layer.flag("replace_with_linear", False):
            found.append(FeedForward(Weights(hidden * hidden)))
        else:
            exact = int(2 * layer.number("ffn_mult") * hidden / 3)
            width = layer.integer("intermediate_size", default=-(-exact // 256) * 256)
            found.append(FeedForward(Weights(3 * hidden * width)))
    return tuple(found)


def replaced_by_matrix(fields: Fields, index: int, layer: LayerKind) -> bool:
    """Whether a search put one plain matrix in the place of this layer's attention."""
    blocks = fields.get("block_configs")
    if not isinstance(layer, NoCache) or not isinstance(blocks, list) or index >= len(blocks):
        return False
    block = blocks[index]
    part = block.get("attention") if isinstance(block, dict) else None
    return isinstance(part, dict) and part.get("replace_with_linear") is True
