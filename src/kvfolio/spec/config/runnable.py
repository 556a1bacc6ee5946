"""Turns a Hugging Face config into a RunnableSpec: what a network needs beside its weights, for every family that runs.

Knows nothing of files or tensors. Defaults are those of transformers 5.24's configuration classes; whatever would
change the result and cannot be expressed is refused by name.
"""

from collections.abc import Mapping

from kvfolio.errors import BrokenModelError, UnknownModelError
from kvfolio.spec.config.class_defaults import find_class_defaults
from kvfolio.spec.config.deepseek import deepseek_network
from kvfolio.spec.config.experts import experts_from_config
from kvfolio.spec.config.falcon import CONTEXT, as_falcon, falcon_network
from kvfolio.spec.config.gpt_oss import decoded_mxfp4, gpt_oss_network
from kvfolio.spec.config.layers import layers_of
from kvfolio.spec.fields import MAX_LAYERS, Fields, show
from kvfolio.spec.formats import COMPUTE_FORMATS, DTYPE_WORDS, format_of_dtype
from kvfolio.spec.layers import LatentAttention, PagedLayer
from kvfolio.spec.model import Network, Rope, RunnableSpec
from kvfolio.spec.ropes import (
    FULL,
    SLIDING,
    gemma3_ropes_from_config,
    require_base,
    ropes_from_config,
    usable_context,
)
from kvfolio.spec.shape import UNCOUNTED, completed

# model_type → the class that runs it; another class of the same type (a classifier, say) has no output product
ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "gpt2": "GPT2LMHeadModel",
    "falcon": "FalconForCausalLM",
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
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

# Where the class would assume the number of one checkpoint, weights of another would be misread.
_REQUIRED = {
    "llama": ("num_hidden_layers",),
    "mistral": ("num_hidden_layers", "num_key_value_heads"),
    "qwen2": ("num_hidden_layers", "num_key_value_heads"),
    "qwen3": ("num_hidden_layers", "num_key_value_heads"),
    "mixtral": ("num_hidden_layers", "num_key_value_heads", "rms_norm_eps"),
    "qwen2_moe": ("num_hidden_layers", "num_key_value_heads"),
    "qwen3_moe": ("num_hidden_layers", "num_key_value_heads"),
    "gemma3_text": ("num_hidden_layers", "num_key_value_heads", "sliding_window"),
    "gpt2": (),
    "falcon": ("num_hidden_layers",),
    "deepseek_v2": ("num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    "deepseek_v3": ("num_hidden_layers", "kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"),
    "gpt_oss": ("num_hidden_layers", "num_key_value_heads", "head_dim", "sliding_window"),
}
_CHANGES_THE_RESULT = "kvfolio does not compute this, and without it the model's answers would differ"
_REFUSED = {
    "llama": (),
    "mistral": ("attention_bias", "mlp_bias"),
    "qwen2": (),
    "qwen3": (),
    "mixtral": ("attention_bias", "mlp_bias"),
    "qwen2_moe": (),
    "qwen3_moe": (),
    "gemma3_text": ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"),
    "gpt2": ("scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn", "add_cross_attention"),
    "falcon": ("alibi", "apply_residual_connection_post_layernorm"),
    "deepseek_v2": ("sliding_window", "mlp_bias"),
    "deepseek_v3": ("sliding_window", "mlp_bias"),
    "gpt_oss": (),
}


def runnable_from_config(config: Mapping[str, object], name: str) -> RunnableSpec:
    """The model that ``config``, the content of a config.json, describes; ``name`` is what people call it.

    Raises UnknownModelError for an architecture or value outside what kvfolio knows, BrokenModelError for a field that
    is missing, of the wrong type or at odds with another.
    """
    fields = Fields(as_falcon(config, name), name)
    model_type = _model_type(fields)
    if model_type == "gpt_oss":
        fields = decoded_mxfp4(fields)
        layers = _layers(fields, model_type)
        network, context = gpt_oss_network(fields, layers)
        return _finished(fields, model_type, model_type, layers, network, context, None)
    fields.refuse_if_set("quantization_config", "quantised weights are not supported; use the unquantised folder")
    for field in _REFUSED[model_type]:
        fields.refuse_if_set(field, _CHANGES_THE_RESULT)
    if model_type == "gpt2":
        return _gpt2(fields)
    if model_type == "falcon":
        return _falcon(fields)
    if model_type.startswith("deepseek"):
        return _deepseek(fields, model_type)
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
    if model_type == "mixtral":
        require_base(fields)
    hidden_size, num_q_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    layers = _layers(fields, model_type)
    head_width = layers[0].k_width
    max_positions = fields.integer("max_position_embeddings")
    rope_local: Rope | None
    if gemma:
        rope, rope_local = gemma3_ropes_from_config(fields, head_width, max_positions)
        scale = fields.number("query_pre_attn_scalar", assume=256.0) ** -0.5
    else:
        rope, rope_local = ropes_from_config(fields, head_width, max_positions, layers)
        scale = head_width**-0.5
    # Mistral and Mixtral have no biases and Qwen2 always has three, whatever the flag says
    biases = model_type in ("llama", "qwen3", "qwen3_moe", "gemma3_text") and fields.flag("attention_bias", False)
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
        qkv_bias=biases or model_type == "qwen2" or (model_type == "qwen2_moe" and fields.flag("qkv_bias", True)),
        o_bias=biases,
        mlp_bias=model_type == "llama" and fields.flag("mlp_bias", False),
        qk_norm=model_type in ("qwen3", "qwen3_moe", "gemma3_text"),
        tie_embeddings=fields.flag("tie_word_embeddings", gemma),
        experts=experts_from_config(_with_usual(fields, model_type), model_type, len(layers)),
    )
    usual_eos = {"llama": 2, "mistral": 2, "mixtral": 2, "gemma3_text": 1}.get(model_type)
    context = usable_context(max_positions, rope)
    return _finished(fields, model_type, "gemma3" if gemma else "llama", layers, network, context, usual_eos)


def _gpt2(fields: Fields) -> RunnableSpec:
    """A GPT-2; its old field names and the usual ones mean the same."""
    hidden_size, num_heads = fields.integer("n_embd", "hidden_size"), fields.integer("n_head", "num_attention_heads")
    fields.integer("n_layer", "num_hidden_layers", high=MAX_LAYERS)  # never the class's own number
    layers = _layers(fields, "gpt2")
    head_width = layers[0].k_width
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
    return _finished(fields, "gpt2", "gpt2", layers, network, context, 50256)


def _falcon(fields: Fields) -> RunnableSpec:
    layers = _layers(fields, "falcon")
    network = falcon_network(fields, layers, _activation(fields, "activation", "gelu"))
    context = usable_context(fields.integer("max_position_embeddings", assume=CONTEXT), network.rope)
    return _finished(fields, "falcon", "falcon", layers, network, context, 11)


def _deepseek(fields: Fields, model_type: str) -> RunnableSpec:
    layers = _layers(fields, model_type)
    experts = experts_from_config(_with_usual(fields, model_type), model_type, len(layers))
    network = deepseek_network(fields, model_type, layers, _activation(fields, "hidden_act", "silu"), experts)
    context = usable_context(fields.integer("max_position_embeddings"), network.rope)
    usual_eos = 1 if model_type == "deepseek_v3" else 2
    return _finished(fields, model_type, "deepseek", layers, network, context, usual_eos)


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


def _layers(fields: Fields, model_type: str) -> tuple[PagedLayer, ...]:
    """The layers in order, as the planner reads them; refuses kinds of memory that the engine does not keep."""
    for name in _REQUIRED[model_type]:
        if not fields.names(name):
            raise fields.missing(name)
    _check_layer_types(fields, model_type)
    layers = layers_of(_with_usual(fields, model_type), model_type, find_class_defaults(model_type))
    kept: list[PagedLayer] = []
    for layer in layers:
        if not isinstance(layer, PagedLayer) or (isinstance(layer, LatentAttention) and layer.top_k is not None):
            raise UnknownModelError(f"{fields.where}: the engine keeps no layers of kind {layer.kind}")
        kept.append(layer)
    return tuple(kept)


def _with_usual(fields: Fields, model_type: str) -> Fields:
    """``fields`` with the values that the class of ``model_type`` takes for absent ones."""
    defaults = find_class_defaults(model_type)
    usual = defaults.usual if defaults is not None else {}
    return Fields(fields.values, fields.where, fields.prefix, fields.assumptions, usual, model_type)


def _check_layer_types(fields: Fields, model_type: str) -> None:
    """Refuse what the family's network does not compute, whatever the planner can count."""
    accepted = (FULL,) if model_type == "llama" else (FULL, SLIDING)
    if model_type == "llama":
        fields.refuse_if_set("sliding_window", "llama has no window; model_type mistral has")
    types = fields.texts("layer_types") or ()
    for word in types:
        if word not in accepted:
            known = ", ".join(accepted)
            raise UnknownModelError(f"{fields.where}: layer_types holds {show(word)}; known for {model_type}: {known}")
    if SLIDING in types and model_type.startswith("qwen") and not fields.flag("use_sliding_window", False):
        fields.note(f"use_sliding_window is off, layer_types holds {SLIDING}: layer_types wins")


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
    fmt = format_of_dtype(word)
    if fmt is None or fmt.name not in COMPUTE_FORMATS:
        raise UnknownModelError(f"{fields.where}: dtype {word!r} is not supported; known: {', '.join(DTYPE_WORDS)}")
    return fmt.name
