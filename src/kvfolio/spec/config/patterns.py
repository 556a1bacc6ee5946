"""Which layer of a config is of which sort: lists, patterns, periods and counts, in every spelling found in the wild.

Knows nothing of heads or widths: the answer is one word a layer. A list of layers wins over a pattern, a pattern over
a window that is merely set, and that over what the model's class would do.
"""

from collections.abc import Callable

from kvfolio.errors import UnknownModelError
from kvfolio.spec.config.class_defaults import ClassDefaults
from kvfolio.spec.config.words import (
    CHUNKED,
    CROSS,
    CSA,
    FULL,
    HCA,
    HYBRID,
    RECURRENT,
    SLIDING,
    SPARSE,
    WINDOW_NAMES,
    has_window,
    layer_numbers,
    number_list,
    one_each,
    repeated,
    sort_of_entry,
    sort_of_letter,
    sort_of_word,
)
from kvfolio.spec.fields import Fields
from kvfolio.spec.token_layers import HEAVY_RATIO, LIGHT_RATIO

# Fields that say nothing more where a list of layers has said it all.
SUPERSEDED = frozenset(
    {
        *WINDOW_NAMES,
        "attention_chunk_size",
        "attn_layer_offset",
        "attn_layer_period",
        "full_attention_interval",
        "global_attn_every_n_layers",
        "index_n_heads",
        "interleaved_sliding_window",
        "layer_group_size",
        "local_attention",
        "max_window_layers",
        "no_rope_layer_interval",
        "sliding_window_pattern",
        "use_sliding_window",
    }
)
# Hybrids without a class that makes the list of their layers: the field that must then be there.
_NEEDED = {
    "bailing_moe_linear": "layer_group_size",
    "kimi_k3": "linear_attn_config",
    "lfm2_moe": "layer_types",
    "minimax_m1": "attn_type_list",
    "minimax_m3": "sparse_attention_config",
    "minimax_text_01": "attn_type_list",
    "nemotron-nas": "block_configs",
    "nemotron_h": "hybrid_override_pattern",
    "plamo2": "layers_block_type",
}
# Classes without attention: every layer is a state.
_ATTENTION_FREE = frozenset({"mamba", "mamba2", "falcon_mamba", "rwkv", "rwkv5", "rwkv6", "rwkv7", "xlstm"})


def layer_words(fields: Fields, model_type: str, defaults: ClassDefaults | None, num_layers: int) -> list[str]:
    """One word for each layer, in order.

    Raises UnknownModelError for a kind of layer that is not known, BrokenModelError for a list that is too short,
    or missing where the model type says that there is one.
    """
    for rule in _RULES:
        words = rule(fields, num_layers)
        if words is not None:
            return words
    if model_type in _NEEDED:
        raise fields.missing(_NEEDED[model_type])
    if model_type in _ATTENTION_FREE:
        return [RECURRENT] * num_layers
    special = _OF_TYPE.get(model_type)
    if special is not None:
        return special(fields, num_layers)
    words = _window_pattern(fields, defaults, num_layers)
    if words is not None:
        return words
    if defaults is not None and defaults.has_states_in_pattern:
        return _class_pattern(fields, defaults, num_layers)
    is_read = "use_sliding_window" in fields.usual or (defaults is None and fields.names("use_sliding_window"))
    if is_read or fields.get("use_sliding_window") is False:
        return _switched_window(fields, num_layers)
    if defaults is not None and defaults.pattern is not None:
        return _class_pattern(fields, defaults, num_layers)
    return _window_alone(fields, model_type, defaults, num_layers)


# ---- lists with an entry for each layer -----------------------------------------------------------------------------


def _layer_types(fields: Fields, num_layers: int) -> list[str] | None:
    for name in ("layer_types", "layers_block_type", "layer_block_types"):
        words = fields.texts(name)
        if words:
            kinds = [sort_of_word(fields, name, word) for word in one_each(fields, name, words, num_layers)]
            return _without_absent_window(fields, kinds)
    return None


def _hybrid_override_pattern(fields: Fields, num_layers: int) -> list[str] | None:
    text = fields.text("hybrid_override_pattern")
    if not text:
        return None
    return [
        sort_of_letter(fields, "hybrid_override_pattern", letter)
        for letter in one_each(fields, "hybrid_override_pattern", text, num_layers)
    ]


def _hybrid_layer_pattern(fields: Fields, num_layers: int) -> list[str] | None:
    """MiMo: 1 for a window, 0 for full attention."""
    flags = number_list(fields, "hybrid_layer_pattern", num_layers)
    return None if flags is None else [SLIDING if flag else FULL for flag in flags]


def _compress_ratios(fields: Fields, num_layers: int) -> list[str] | None:
    """DeepSeek-V4: tokens that one compressed vector stands for; 0: none but the window's."""
    ratios = number_list(fields, "compress_ratios", num_layers)
    if ratios is None:
        return None
    kinds = {0: SLIDING, LIGHT_RATIO: CSA, HEAVY_RATIO: HCA}
    for ratio in ratios:
        if ratio not in kinds:
            known = f"0, {LIGHT_RATIO} and {HEAVY_RATIO}"
            raise UnknownModelError(f"{fields.where}: compress_ratios holds {ratio}; known: {known}")
    return [kinds[ratio] for ratio in ratios]


def _attn_type_list(fields: Fields, num_layers: int) -> list[str] | None:
    """MiniMax: 1 for softmax attention, 0 for lightning attention."""
    flags = number_list(fields, "attn_type_list", num_layers)
    return None if flags is None else [FULL if flag else RECURRENT for flag in flags]


def _linear_attn_config(fields: Fields, num_layers: int) -> list[str] | None:
    """Kimi Linear: two lists of layers that count from 1."""
    child = fields.child("linear_attn_config")
    if child is None or not child.names("full_attn_layers"):
        return None
    full = layer_numbers(child, "full_attn_layers", num_layers + 1)
    linear = layer_numbers(child, "kda_layers", num_layers + 1)
    numbers = range(1, num_layers + 1)
    if linear and (full & linear or not full | linear >= set(numbers)):
        raise child.wrong("kda_layers", sorted(linear), "all layers from 1 that full_attn_layers leaves out")
    return [FULL if number in full else RECURRENT for number in numbers]


def _sparse_attention(fields: Fields, num_layers: int) -> list[str] | None:
    """MiniMax-M3: 1 for a layer whose blocks are chosen by index keys."""
    child = fields.child("sparse_attention_config")
    if child is None:
        return None
    if not child.flag("use_sparse_attention", True):
        return [FULL] * num_layers
    if child.names("sparse_index_dim") and child.get("sparse_attention_freq") is None:
        raise child.missing("sparse_attention_freq")
    flags = number_list(child, "sparse_attention_freq", num_layers)
    return None if flags is None else [SPARSE if flag else FULL for flag in flags]


def _attention_types(fields: Fields, num_layers: int) -> list[str] | None:
    """GPT-Neo: [[["global", "local"], 12]] stands for twelve times the two; attention_layers is the list itself."""
    stated = fields.texts("attention_layers")
    if stated:
        return [
            sort_of_word(fields, "attention_layers", word)
            for word in one_each(fields, "attention_layers", stated, num_layers)
        ]
    groups = fields.get("attention_types")
    if not groups:
        return None
    words: list[str] = []
    accepted = "a list of [kinds, times]"
    if not isinstance(groups, list):
        raise fields.wrong("attention_types", groups, accepted)
    for group in groups:
        if not (isinstance(group, list) and len(group) == 2 and isinstance(group[0], list) and type(group[1]) is int):
            raise fields.wrong("attention_types", groups, accepted)
        if not 0 <= len(words) + group[1] * len(group[0]) <= num_layers:
            raise fields.wrong("attention_types", groups, f"kinds for {num_layers} layers")
        words += group[0] * group[1]
    kinds = [sort_of_word(fields, "attention_types", word) for word in words]
    return list(one_each(fields, "attention_types", kinds, num_layers))


# ---- lists of layers by number --------------------------------------------------------------------------------------


def _attention_indices(fields: Fields, num_layers: int) -> list[str] | None:
    """Bamba and LFM2: the layers with attention; the others hold a state."""
    for name in ("attn_layer_indices", "full_attn_idxs"):
        if fields.get(name) is not None:
            indices = layer_numbers(fields, name, num_layers)
            return [FULL if index in indices else RECURRENT for index in range(num_layers)]
    return None


def _cross_layers(fields: Fields, num_layers: int) -> list[str] | None:
    """Llama 3.2 Vision: some layers read the picture's tokens only."""
    if fields.get("cross_attention_layers") is None and "cross_attention_layers" not in fields.usual:
        return None
    indices = layer_numbers(fields, "cross_attention_layers", num_layers)
    return [CROSS if index in indices else FULL for index in range(num_layers)]


def _local_layers(fields: Fields, num_layers: int) -> list[str] | None:
    if fields.get("local_layer_ids") is None or not has_window(fields):
        return None
    indices = layer_numbers(fields, "local_layer_ids", num_layers)
    return [SLIDING if index in indices else FULL for index in range(num_layers)]


def rope_flags(fields: Fields, num_layers: int) -> list[int]:
    """``no_rope_layers``: 1 for a layer with rotary positions; absent, null and empty mean the usual interval."""
    if fields.get("no_rope_layers"):
        return list(number_list(fields, "no_rope_layers", num_layers) or ())
    interval = fields.integer("no_rope_layer_interval", default=4)
    return [int((index + 1) % interval != 0) for index in range(num_layers)]


# ---- periods and patterns -------------------------------------------------------------------------------------------


def _attention_period(fields: Fields, num_layers: int) -> list[str] | None:
    """Jamba: one layer with attention in ``attn_layer_period``, the others hold a state."""
    if fields.get("attn_layer_period") is None or fields.get("mamba_d_state") is None:
        return None
    period = fields.integer("attn_layer_period")
    offset = fields.integer("attn_layer_offset", low=0)
    mamba_first = [RECURRENT, RECURRENT, HYBRID] if fields.usual_of == "zamba" else []
    attention = HYBRID if mamba_first else FULL
    rest = range(num_layers - len(mamba_first))
    words = mamba_first + [attention if index % period == offset else RECURRENT for index in rest]
    return words[:num_layers]


def _full_attention_interval(fields: Fields, num_layers: int) -> list[str] | None:
    """Qwen3-Next: every n-th layer has attention, the others hold a state. Ling: groups of layer_group_size."""
    for name in ("full_attention_interval", "layer_group_size"):
        if fields.get(name) is not None:
            interval = fields.integer(name)
            return [FULL if (index + 1) % interval == 0 else RECURRENT for index in range(num_layers)]
    return None


def _block_types(fields: Fields, num_layers: int) -> list[str] | None:
    """RecurrentGemma: kinds that repeat; its attention always has a window."""
    for name in ("block_types", "_block_types"):
        words = fields.texts(name)
        if words:
            kinds = [sort_of_word(fields, name, word) for word in words]
            if fields.get("attention_window_size") is not None or "attention_window_size" in fields.usual:
                kinds = [SLIDING if kind == FULL else kind for kind in kinds]
            return repeated(kinds, num_layers)
    return None


def _no_rope_layers(fields: Fields, num_layers: int) -> list[str] | None:
    """Llama 4: layers with rotary positions (1 in the list) attend within their chunk, the others to everything."""
    if not fields.silent("attention_chunk_size") or fields.get("sliding_window") is not None:
        return None
    flags = rope_flags(fields, num_layers)
    return [CHUNKED if flag else FULL for flag in flags]


def _window_pattern(fields: Fields, defaults: ClassDefaults | None, num_layers: int) -> list[str] | None:
    """A count (every n-th layer is full), letters (LLLG) or a list of windows, where a window is set at all.

    A class whose layers are all of one sort reads no count or letters.
    """
    windows = fields.get("interleaved_sliding_window") or fields.get("sliding_window")
    if isinstance(windows, list) and windows:
        return repeated([SLIDING if window else FULL for window in windows], num_layers)
    for name in ("sliding_window_pattern", "_sliding_window_pattern", "layer_switch", "global_attn_every_n_layers"):
        pattern = fields.get(name)
        if pattern is None and name not in ("layer_switch",) and not fields.names(name):
            pattern = fields.usual.get(name)
        if not pattern or (name == "layer_switch" and not has_window(fields)):
            continue
        if defaults is not None and name not in fields.usual and not defaults.has_windows_in_pattern:
            fields.note(f"model_type {fields.usual_of} does not read {name}: it has no effect")
            continue
        if not has_window(fields) and fields.get("local_attention") is None and "local_attention" not in fields.usual:
            return [FULL] * num_layers
        if isinstance(pattern, str):
            return repeated([sort_of_letter(fields, name, letter) for letter in pattern], num_layers)
        if isinstance(pattern, list):
            return repeated([sort_of_entry(fields, name, item) for item in pattern], num_layers)
        period = fields.integer(name)
        first = fields.usual_of.startswith("modernbert") or "global" in (
            fields.text("order_of_interleaved_layers") or ""
        )
        shift = 0 if first else 1
        return [FULL if (index + shift) % period == 0 else SLIDING for index in range(num_layers)]
    return None


# ---- a window that is merely set ------------------------------------------------------------------------------------


def _switched_window(fields: Fields, num_layers: int) -> list[str]:
    """Qwen: a window counts only where use_sliding_window is on, and from layer max_window_layers on."""
    if not fields.flag("use_sliding_window", False):
        if has_window(fields):
            fields.note("use_sliding_window is off: sliding_window has no effect")
        return [FULL] * num_layers
    if not has_window(fields):
        return [FULL] * num_layers
    if fields.get("no_rope_layers") is not None or "no_rope_layer_interval" in fields.usual:  # SmolLM3
        return [FULL if rope else SLIDING for rope in rope_flags(fields, num_layers)]
    first = fields.integer("max_window_layers", default=0, low=0)
    return [SLIDING if index >= first else FULL for index in range(num_layers)]


def _qwen2_moe(fields: Fields, num_layers: int) -> list[str]:
    """Here the class reads max_window_layers the other way round, and every second layer is full."""
    if not fields.flag("use_sliding_window", False) or not has_window(fields):
        return _switched_window(fields, num_layers)
    first = fields.integer("max_window_layers", default=num_layers, low=0)
    return [SLIDING if (index + 1) % 2 and index < first else FULL for index in range(num_layers)]


def _class_pattern(fields: Fields, defaults: ClassDefaults, num_layers: int) -> list[str]:
    pattern = defaults.pattern
    assert pattern is not None
    words = pattern.spread(num_layers)
    if words is None:
        raise fields.missing("layer_types")
    kinds = [sort_of_word(fields, "layer_types", word) for word in words]
    if len(set(kinds)) > 1 or RECURRENT in kinds or fields.usual_of == "lfm2":
        fields.note(f"no list of layer types: the pattern of model_type {fields.usual_of} assumed")
    return _without_absent_window(fields, kinds)


def _window_alone(fields: Fields, model_type: str, defaults: ClassDefaults | None, num_layers: int) -> list[str]:
    if not has_window(fields):
        if defaults is not None and defaults.has_window and not any(fields.names(name) for name in WINDOW_NAMES):
            fields.note(f"sliding_window is absent: no window, as model_type {fields.usual_of} assumes")
        return [FULL] * num_layers
    if defaults is not None and not defaults.has_window:
        fields.note(f"model_type {model_type} has no window: sliding_window is not read, full attention counted")
        return [FULL] * num_layers
    if defaults is None:
        fields.note("a window without a list of layers: every layer is taken to have it")
    return [SLIDING] * num_layers


def _without_absent_window(fields: Fields, kinds: list[str]) -> list[str]:
    """Layers named as sliding are full where the window itself is null or 0."""
    if SLIDING in kinds and not has_window(fields) and fields.names("sliding_window"):
        fields.note("sliding_window is off: layers listed as sliding are counted as full")
        return [FULL if kind == SLIDING else kind for kind in kinds]
    return kinds


# ---- parts ----------------------------------------------------------------------------------------------------------

_Rule = Callable[[Fields, int], list[str] | None]
_RULES: tuple[_Rule, ...] = (
    _layer_types,
    _hybrid_override_pattern,
    _hybrid_layer_pattern,
    _compress_ratios,
    _attn_type_list,
    _linear_attn_config,
    _sparse_attention,
    _attention_types,
    _attention_indices,
    _cross_layers,
    _local_layers,
    _attention_period,
    _full_attention_interval,
    _block_types,
    _no_rope_layers,
)
_OF_TYPE: dict[str, Callable[[Fields, int], list[str]]] = {
    "qwen2_moe": _qwen2_moe,
    "gpt_neo": lambda fields, num_layers: repeated([FULL, SLIDING], num_layers),
}
