"""Turns the config.json of any decoder model into a ModelSpec, by its fields: model names decide only what is absent.

Knows nothing of files or tensors. Encoders without a cache, and fields that might decide the cache but are not known,
are refused by name.
"""

import re
from collections.abc import Mapping

from kvfolio.errors import BrokenModelError, SpecError, UnknownModelError
from kvfolio.spec.config import heads
from kvfolio.spec.config.class_defaults import ClassDefaults, class_names, find_class_defaults
from kvfolio.spec.config.known_types import ENCODERS, LOOPED, REMOTE, TEXT_OF_REMOTE, USUAL_OF_REMOTE
from kvfolio.spec.config.layers import layers_of
from kvfolio.spec.config.patterns import SUPERSEDED
from kvfolio.spec.fields import Fields, show
from kvfolio.spec.formats import COMPUTE_FORMATS, format_of_dtype
from kvfolio.spec.layers import LayerKind, NoCache, without_idle_windows
from kvfolio.spec.model import ModelSpec, WeightCount
from kvfolio.spec.ropes import rope_parameters
from kvfolio.spec.weights.count import count_weights

_NESTED = (
    "text_config",
    "llm_config",
    "language_config",
    "thinker_config",
    "language_model_config",
    "text_model",
    "llm",
    "decoder",
)
_CONTEXT_NAMES = (
    "max_position_embeddings",
    "n_positions",
    "max_target_positions",
    "max_sequence_length",
    "max_seq_len",
    "max_seq_length",
    "seq_length",
    "n_ctx",
    "max_position_embedding",
    "model_max_length",
    "max_context_length",
)
_ENCODER_DECODERS = ("encoder-decoder", "vision-encoder-decoder", "speech-encoder-decoder")
_DECIDING = re.compile(
    "kv_lora|kv_rank|(^|_)mla(_|$)|(^|_)cla(_|$)|compress|latent|(^|_)(mamba|ssm|rwkv|gdn|kda|retention|lru|s4)"
    "|window|chunk|sliding|(^|_)index_|indexer|sparse|linear_attn|linear_attention|linear_num|recurr|conv_kernel|d_conv"
    "|d_state|state_size|interval|layer_pattern|layer_types|block_type|block_pattern|attn_type|attention_type|hybrid"
    "|kv_shar|shared_kv|share_kv|kv_source|kv_group|stride|n_kv|kv_n|memory|evict|local_attn|global_attn|attn_layer"
)
_HARMLESS = re.compile(
    "^mlp_|^moe_|^q_lora|_bias$|_kernels$|conv_bias|_init|_act$|_eps$|dtype|latent_size|norm|^vision|^audio|mtp_"
)


def spec_from_config(config: Mapping[str, object], name: str) -> ModelSpec:
    """The model that ``config``, the content of a config.json, describes; ``name`` is what people call it.

    Raises UnknownModelError for an encoder, an unknown kind of layer or a field that might decide the cache and is not
    known; BrokenModelError for a field that is missing, of the wrong type or at odds with another.
    """
    root = Fields(config, name)
    _refuse_encoders(root)
    fields, model_type, defaults = _text_fields(root)
    _refuse_encoders(fields)
    if model_type in LOOPED:
        raise UnknownModelError(
            f"{name}: model_type {model_type} passes its layers several times, which is not known; "
            "give the config of a model that passes each layer once"
        )
    layers = layers_of(fields, model_type, defaults)
    if all(isinstance(layer, NoCache) for layer in layers):
        raise UnknownModelError(f"{name}: no layer keeps anything; give the config of a decoder model")
    attends = any(layer.num_kv_heads for layer in layers)
    q_heads = heads.num_q_heads(fields.over(_first_of_lists(fields))) if attends else 0
    if defaults is None and model_type not in REMOTE:
        _refuse_unread(fields, model_type)
    _note_repeated_heads(fields, layers, q_heads)
    max_context = _max_context(fields, root)
    effective = without_idle_windows(layers, max_context)
    if effective != layers:
        root.note(f"the window is not smaller than the {max_context or 0:,} tokens that the model reads: no effect")
    _note_stored_format(root)
    return ModelSpec(
        name=name,
        model_type=model_type,
        layers=effective,
        max_context=max_context,
        dtype=_dtype(fields, root),
        hidden_size=heads.hidden_size(fields),
        num_q_heads=q_heads,
        weights=_weights(fields, root, layers, model_type),
        assumptions=tuple(root.assumptions),
    )


def _note_repeated_heads(fields: Fields, layers: tuple[LayerKind, ...], num_q_heads: int) -> None:
    """Falcon-40B's class in transformers repeats keys and values for every query head before it stores them."""
    heads_held = max((layer.num_kv_heads for layer in layers), default=0)
    if fields.get("new_decoder_architecture") is True and heads_held < num_q_heads:
        fields.note(
            f"{heads_held} key/value heads are counted, as the weights have them; transformers stores {num_q_heads}, "
            f"{num_q_heads // heads_held} times the bytes"
        )


def _note_stored_format(root: Fields) -> None:
    """A quantised checkpoint may ask engines for a smaller cache; how a cache is stored is the plan's choice."""
    packed = root.child("quantization_config")
    for name in ("kv_cache_scheme", "kv_cache_quant_algo"):
        asked = None if packed is None else packed.get(name)
        if asked:
            root.note(f"the checkpoint asks for its own cache format ({name} {show(asked)}); --kv-format decides here")


def _weights(fields: Fields, root: Fields, layers: tuple[LayerKind, ...], model_type: str) -> WeightCount:
    """Counted from the fields; a config that does not say enough still describes a cache."""
    try:
        return count_weights(fields, root, layers, model_type)
    except SpecError as error:
        root.note(f"weights are not counted ({error})")
        return WeightCount(0, 0, 0, "config")


# ---- where the language model lies ----------------------------------------------------------------------------------


def _text_fields(root: Fields) -> tuple[Fields, str, ClassDefaults | None]:
    """The fields of the language model, its model_type and its class's defaults."""
    outer = root.text("model_type") or _type_of_architecture(root)
    fields, stated, defaults = root, outer, find_class_defaults(outer or "")
    inner: Mapping[str, object] = {}
    has_cross = outer in _ENCODER_DECODERS or root.get("is_encoder_decoder") is True
    while True:
        has_cross = has_cross or (defaults is not None and defaults.has_cross)
        inner_type = defaults.text if defaults is not None else TEXT_OF_REMOTE.get(stated or "")
        nested = next((name for name in _NESTED if isinstance(fields.get(name), dict) and fields.get(name)), None)
        if nested is not None:  # thinker_config holds a text_config in turn
            fields = fields.child(nested) or fields
            stated = fields.text("model_type") or inner_type
        elif inner_type is not None and inner_type != stated:  # an old flat file of a class that is nested today
            if not any(fields.names(name) for name in (*heads.HIDDEN_NAMES, *heads.LAYER_NAMES)):
                fields.note(f"text_config is absent: the defaults of model_type {inner_type} assumed")
            stated, inner = inner_type, defaults.inner if defaults is not None else {}
        else:
            break
        defaults = find_class_defaults(stated or "") or (find_class_defaults(inner_type) if inner_type else None)
    model_type = stated or outer or "unknown"
    _note_unknown(root, stated or outer, defaults)
    usual = {**defaults.usual, **inner} if defaults is not None else USUAL_OF_REMOTE.get(model_type, {})
    values = dict(fields.values)
    if has_cross and (fields is not root or stated != outer):
        values = {"add_cross_attention": True, **values}
    known_as = model_type if defaults is None or find_class_defaults(model_type) else defaults.text or model_type
    return Fields(values, fields.where, "", root.assumptions, usual, known_as), model_type, defaults


def _type_of_architecture(root: Fields) -> str | None:
    """The model_type that a config without one means, where its architecture is named after a known class."""
    for word in root.texts("architectures") or ():
        stem = word.partition("For")[0].removesuffix("LMHeadModel").lower()
        model_type = next((name for name in class_names() if name.replace("_", "").replace("-", "") == stem), None)
        if model_type is not None:
            root.note(f"model_type is absent: {model_type} taken from architectures")
            return model_type
    return None


def _note_unknown(root: Fields, model_type: str | None, defaults: ClassDefaults | None) -> None:
    if model_type is None:
        if not root.texts("architectures") and not any(root.names(name) for name in heads.HIDDEN_NAMES):
            raise BrokenModelError(f"{root.where}: neither model_type nor architectures; give a model's config.json")
        root.note("model_type is absent: read by its fields")
    elif defaults is None and model_type not in REMOTE:
        root.note(f"model_type {model_type} is not known: read by its fields")


def _refuse_encoders(fields: Fields) -> None:
    model_type = fields.text("model_type") or ""
    decodes = fields.get("is_decoder") is True
    architectures = fields.texts("architectures") or ()
    masked = bool(architectures) and all(
        word.endswith(("ForMaskedLM", "ForTokenClassification")) for word in architectures
    )
    if (model_type in ENCODERS or masked) and not decodes:
        raise UnknownModelError(
            f"{fields.where}: model_type {model_type or 'unknown'} is encoder-only: no KV cache; give a decoder model"
        )
    embeds = bool(architectures) and all(word.endswith("Model") for word in architectures)
    both_ways = fields.get("use_bidirectional_attention") in (True, "all") or fields.get("is_causal") is False
    if embeds and both_ways:
        raise UnknownModelError(
            f"{fields.where}: every token attends to all others, encoder-only: no KV cache; give a decoder model"
        )


def _refuse_unread(fields: Fields, model_type: str) -> None:
    """An unknown model may carry a field that changes the cache; one that was not read is refused."""
    known = fields.asked | SUPERSEDED
    for name, value in fields.values.items():
        if value and name not in known and _DECIDING.search(name) and not _HARMLESS.search(name):
            raise UnknownModelError(
                f"{fields.where}: model_type {model_type} is not known and its field {name} ({show(value)}) may decide "
                "the cache; remove the field if it does not"
            )


# ---- context and dtype ----------------------------------------------------------------------------------------------


def _max_context(fields: Fields, root: Fields) -> int | None:
    """Tokens the model can take, as published; None where the config does not say.

    The stored maximum already holds the scaled length, but for plain YaRN switched on by hand: there it still equals
    the context before scaling, and the factor applies.
    """
    known = [name for name in _CONTEXT_NAMES if fields.get(name) is not None or name in fields.usual]
    if not known:
        return root.integer(*_CONTEXT_NAMES, default=0) or None
    stated = [name for name in known if fields.get(name) is not None]
    positions = fields.integer(*(stated or known), high=2**40)
    scaling = rope_parameters(fields)
    if scaling is None:
        return positions
    if scaling.names("full_attention"):
        scaling = scaling.child("full_attention") or scaling
    kind = scaling.get("rope_type") or scaling.get("type")
    original = scaling.get("original_max_position_embeddings") or fields.get("original_max_position_embeddings")
    if isinstance(kind, str) and kind.endswith("yarn") and original == positions:
        return max(1, int(positions * scaling.number("factor", default=1.0)))
    return positions


def _dtype(fields: Fields, root: Fields) -> str:
    word = fields.text("dtype", "torch_dtype") or root.text("dtype", "torch_dtype")
    if word is None:
        fields.note("dtype is absent: bfloat16 assumed")
        return "bf16"
    fmt = format_of_dtype(word)
    if fmt is None or fmt.name not in COMPUTE_FORMATS:
        fields.note(f"dtype is {show(word)}: the cache is counted as bfloat16's")
        return "bf16"
    return fmt.name


def _first_of_lists(fields: Fields) -> dict[str, object]:
    """The largest entry of head counts that differ from layer to layer."""
    found: dict[str, object] = {}
    for name in heads.PER_LAYER_NAMES:
        value = fields.get(name)
        if isinstance(value, list):
            found[name] = max((item for item in value if type(item) is int), default=None)
    return found
