"""Turns a Hugging Face config into a RunnableSpec: families llama (with mistral, qwen2, qwen3), gemma3 and gpt2.

Knows nothing of files or tensors. Defaults are those of transformers 5.24's configuration classes; whatever would
change the result and cannot be expressed is refused by name.
"""

from collections.abc import Mapping

from kvfolio.errors import BrokenModelError, UnknownModelError
from kvfolio.spec.fields import Fields, show
from kvfolio.spec.layers import FullAttention, PagedLayer, SlidingWindow
from kvfolio.spec.model import Network, Rope, RunnableSpec
from kvfolio.spec.ropes import FULL, SLIDING, gemma3_ropes_from_config, ropes_from_config, usable_context
from kvfolio.spec.shape import UNCOUNTED, completed

MAX_LAYERS = 10_000  # a bound for absurd files, far above any model

# model_type → the class that runs it; another class of the same type (a classifier, say) has no output product
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
}

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_accurate": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
}
_DTYPES = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}

_CHANGES_THE_RESULT = "kvfolio does not compute this, and without it the model's answers would differ"
_REFUSED = {
    "llama": (),
    "mistral": ("attention_bias", "mlp_bias"),
    "qwen2": (),
    "qwen3": (),
    "gemma3_text": ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"),
    "gpt2": ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"),
}


def runnable_from_config(config: Mapping[str, object], name: str) -> RunnableSpec:
    """The model that ``config``, the content of a config.json, describes; ``name`` is what people call it.

    Raises UnknownModelError for an architecture or value outside what kvfolio knows, BrokenModelError for a field that
    is missing, of the wrong type or at odds with another.
    """
    fields = Fields(config, name)
    model_type = _model_type(fields)
    fields.refuse_if_set("quantization_config", "quantised weights are not supported; use the unquantised folder")
    for field in _REFUSED[model_type]:
        fields.refuse_if_set(field, _CHANGES_THE_RESULT)
    if model_type == "gpt2":
        return _gpt2(fields)
    return _rotary(fields, model_type)


def _model_type(fields: Fields) -> str:
    """The key of ``ARCHITECTURES`` that the config names; refuses every other by what was found."""
    model_type = fields.text("model_type")
    architectures = fields.texts("architectures") or ()
    if model_type is None and not architectures:
        raise BrokenModelError(f"{fields.where}: neither model_type nor architectures; give a model's config.json")
    known = ", ".join(ARCHITECTURES)
    found = f"model_type {show(model_type)}, architectures {show(list(architectures))}"
    if model_type is None:
        model_type = next((kind for kind, word in ARCHITECTURES.items() if word in architectures), None)
        if model_type is not None:
            fields.note(f"model_type is absent: {model_type} taken from architectures")
    if fields.get("text_config") is not None or fields.get("vision_config") is not None:
        raise UnknownModelError(f"{fields.where} reads more than text ({found}); known, all text-only: {known}")
    if model_type not in ARCHITECTURES:
        raise UnknownModelError(f"{fields.where} is not supported ({found}); known: {known}")
    if architectures and ARCHITECTURES[model_type] not in architectures:
        accepted = ARCHITECTURES[model_type]
        raise UnknownModelError(f"{fields.where} is not supported ({found}); accepted for {model_type}: {accepted}")
    return model_type


def _rotary(fields: Fields, model_type: str) -> RunnableSpec:
    """A model of the llama or gemma3 family."""
    gemma = model_type == "gemma3_text"
    hidden_size, num_q_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    head_width = _head_width(fields, model_type, hidden_size, num_q_heads)
    layers = _layers(fields, model_type, _num_kv_heads(fields, model_type, num_q_heads), head_width)
    max_positions = fields.integer("max_position_embeddings")
    rope_local: Rope | None
    if gemma:
        rope, rope_local = gemma3_ropes_from_config(fields, head_width, max_positions)
        scale = fields.number("query_pre_attn_scalar", assume=256.0) ** -0.5
    else:
        rope, rope_local = ropes_from_config(fields, head_width, max_positions, layers)
        scale = head_width**-0.5
    # Mistral has no biases and Qwen2 always has three, whatever the flag says
    biases = model_type in ("llama", "qwen3", "gemma3_text") and fields.flag("attention_bias", False)
    network = Network(
        hidden_size=hidden_size,
        num_q_heads=num_q_heads,
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        norm_eps=fields.number("rms_norm_eps", assume=1e-6),
        activation=_activation(fields, "hidden_activation", "gelu_pytorch_tanh")
        if gemma
        else _activation(fields, "hidden_act", "silu"),
        attention_scale=scale,
        rope=rope,
        rope_local=rope_local,
        qkv_bias=biases or model_type == "qwen2",
        o_bias=biases,
        mlp_bias=model_type == "llama" and fields.flag("mlp_bias", False),
        qk_norm=model_type in ("qwen3", "gemma3_text"),
        tie_embeddings=fields.flag("tie_word_embeddings", gemma),
    )
    usual_eos = {"llama": 2, "mistral": 2, "gemma3_text": 1}.get(model_type)
    context = usable_context(max_positions, rope)
    return _finished(fields, model_type, "gemma3" if gemma else "llama", layers, network, context, usual_eos)


def _gpt2(fields: Fields) -> RunnableSpec:
    """A GPT-2; its old field names and the usual ones mean the same."""
    hidden_size, num_heads = fields.integer("n_embd", "hidden_size"), fields.integer("n_head", "num_attention_heads")
    num_layers = fields.integer("n_layer", "num_hidden_layers", high=MAX_LAYERS)
    head_width = _divided(fields, hidden_size, num_heads)
    network = Network(
        hidden_size=hidden_size,
        num_q_heads=num_heads,
        intermediate_size=fields.integer("n_inner", default=4 * hidden_size),
        vocab_size=fields.integer("vocab_size", assume=50257),  # all published sizes share vocabulary and context
        norm_eps=fields.number("layer_norm_epsilon", assume=1e-5),
        activation=_activation(fields, "activation_function", "gelu_new"),
        attention_scale=head_width**-0.5 if fields.flag("scale_attn_weights", True) else 1.0,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        tie_embeddings=fields.flag("tie_word_embeddings", True),
    )
    context = fields.integer("n_positions", "max_position_embeddings", "n_ctx", assume=1024)
    layers = (FullAttention(num_heads, head_width, head_width),) * num_layers
    return _finished(fields, "gpt2", "gpt2", layers, network, context, 50256)


def _finished(
    fields: Fields,
    model_type: str,
    family: str,
    layers: tuple[PagedLayer, ...],
    network: Network,
    context: int,
    usual_eos: int | None,
) -> RunnableSpec:
    dtype = _dtype(fields)
    eos = fields.token_ids("eos_token_id") or ()
    if not eos and usual_eos is not None and not fields.names("eos_token_id"):
        fields.note(f"eos_token_id is absent: {usual_eos} assumed")
        eos = (usual_eos,)
    assumptions = tuple(fields.assumptions)
    return completed(
        RunnableSpec(
            name=fields.where,
            model_type=model_type,
            layers=layers,
            max_context=context,
            dtype=dtype,
            hidden_size=network.hidden_size,
            num_q_heads=network.num_q_heads,
            weights=UNCOUNTED,
            assumptions=assumptions,
            family=family,
            network=network,
            eos_token_ids=eos,
        )
    )


def _head_width(fields: Fields, model_type: str, hidden_size: int, num_q_heads: int) -> int:
    """Numbers in one head: stated ones win; two classes have a width of their own, the others divide."""
    if fields.get("head_dim") is not None:
        return fields.integer("head_dim")
    usual = {"qwen3": 128, "gemma3_text": 256}.get(model_type)
    return fields.integer("head_dim", assume=usual) if usual else _divided(fields, hidden_size, num_q_heads)


def _divided(fields: Fields, hidden_size: int, num_heads: int) -> int:
    if hidden_size % num_heads:
        raise BrokenModelError(
            f"{fields.where}: a hidden size of {hidden_size} does not divide into {num_heads} heads; "
            "state head_dim or correct one of the two"
        )
    return hidden_size // num_heads


def _num_kv_heads(fields: Fields, model_type: str, num_q_heads: int) -> int:
    """Key/value heads. Null means one for each query head; where the class default is one checkpoint's number
    (mistral 8, qwen 32, gemma 4), an absent field is an error, not that number."""
    if model_type == "llama" or fields.names("num_key_value_heads"):
        return fields.integer("num_key_value_heads", default=num_q_heads)
    return fields.integer("num_key_value_heads")


def _layers(fields: Fields, model_type: str, num_kv_heads: int, head_width: int) -> tuple[PagedLayer, ...]:
    """The layers in order. ``layer_types`` wins over every flag."""
    num_layers = fields.integer("num_hidden_layers", high=MAX_LAYERS)
    full = FullAttention(num_kv_heads, head_width, head_width)
    if model_type == "llama":
        fields.refuse_if_set("sliding_window", "llama has no window; model_type mistral has")
    slides = _stated_slides(fields, num_layers)
    if slides is None:
        slides = _usual_slides(fields, model_type, num_layers)
    elif any(slides) and model_type == "llama":
        raise UnknownModelError(f"{fields.where}: layer_types holds {SLIDING}; accepted for llama: {FULL}")
    elif any(slides) and model_type.startswith("qwen") and not fields.flag("use_sliding_window", False):
        fields.note(f"use_sliding_window is off, layer_types holds {SLIDING}: layer_types wins")
    if not any(slides):
        return (full,) * num_layers
    window = SlidingWindow(num_kv_heads, head_width, head_width, _window(fields, model_type))
    return tuple(window if slide else full for slide in slides)


def _stated_slides(fields: Fields, num_layers: int) -> list[bool] | None:
    """Which layers have a window according to ``layer_types``; None when the config has none."""
    types = fields.texts("layer_types")
    if types is None:
        return None
    for word in types:
        if word not in (FULL, SLIDING):
            raise UnknownModelError(f"{fields.where}: layer_types holds {show(word)}; known: {FULL}, {SLIDING}")
    if len(types) != num_layers:
        raise BrokenModelError(
            f"{fields.where}: layer_types has {len(types)} entries for {num_layers} layers; give one for each"
        )
    return [word == SLIDING for word in types]


def _usual_slides(fields: Fields, model_type: str, num_layers: int) -> list[bool]:
    """Which layers have a window when no list says so."""
    if model_type == "gemma3_text":
        period = fields.integer("sliding_window_pattern", assume=6)
        return [(index + 1) % period != 0 for index in range(num_layers)]
    if model_type == "mistral":
        return [_has_window(fields)] * num_layers
    if model_type.startswith("qwen") and fields.flag("use_sliding_window", False) and _has_window(fields):
        first = fields.integer("max_window_layers", assume=28, low=0)
        return [index >= first for index in range(num_layers)]
    return [False] * num_layers


def _has_window(fields: Fields) -> bool:
    """Whether a window is set; null and 0 switch it off, absence means the class default."""
    if not fields.names("sliding_window"):
        return True
    return fields.integer("sliding_window", default=0, low=0) > 0


def _window(fields: Fields, model_type: str) -> int:
    if fields.names("sliding_window") or model_type == "gemma3_text":
        return fields.integer("sliding_window")
    return fields.integer("sliding_window", assume=4096)


def _activation(fields: Fields, field: str, usual: str) -> str:
    word = fields.text(field)
    if word is None:
        fields.note(f"{field} is absent: {usual} assumed")
        word = usual
    if word not in _ACTIVATIONS:
        raise UnknownModelError(f"{fields.where}: {field} {word!r} is not known; known: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[word]


def _dtype(fields: Fields) -> str:
    word = fields.text("dtype", "torch_dtype")
    if word is None:
        fields.note("dtype is absent: float32 assumed, as transformers loads it")
        return "f32"
    dtype = _DTYPES.get(word.removeprefix("torch."))
    if dtype is None:
        raise UnknownModelError(f"{fields.where}: dtype {word!r} is not supported; known: {', '.join(_DTYPES)}")
    return dtype
