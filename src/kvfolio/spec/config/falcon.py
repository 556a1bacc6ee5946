"""Reads what a Falcon network needs from its config, and brings configs from before transformers had the class to it.

Knows nothing of files or tensors. Sources: transformers' ``FalconConfig`` and ``FalconDecoderLayer``, and its script
``convert_custom_code_checkpoint.py``, which changed the config of such a checkpoint and no tensor.
"""

from collections.abc import Mapping, Sequence

from kvfolio.errors import BrokenModelError, UnknownModelError
from kvfolio.spec.fields import Fields
from kvfolio.spec.layers import FullAttention, PagedLayer
from kvfolio.spec.model import Network
from kvfolio.spec.ropes import ropes_from_config

OLD_TYPES = ("RefinedWeb", "RefinedWebModel")  # of the code that was published beside the first checkpoints
_OLD_NAMES = {"n_head": "num_attention_heads", "n_layer": "num_hidden_layers", "n_head_kv": "num_kv_heads"}
_OLD_CLASS, _CLASS = "RWForCausalLM", "FalconForCausalLM"
CONTEXT = 2048  # of the class; the published 7B and 40B leave it out


def as_falcon(config: Mapping[str, object], where: str) -> Mapping[str, object]:
    """``config`` under the names of model_type falcon; any other model_type comes back as it is.

    Raises BrokenModelError for a field that stands there under both names, or one whose absence means something else
    under the other model_type.
    """
    if config.get("model_type") not in OLD_TYPES:
        return config
    for old, new in _OLD_NAMES.items():
        if old in config and new in config:
            raise BrokenModelError(f"{where}: {old} and {new} mean the same; remove one of them")
    is_new = config.get("n_head_kv") is not None
    for name in ("parallel_attn",) if is_new else ("multi_query", "parallel_attn"):
        if config.get(name) is None:  # false for the old code, true for transformers' class
            raise Fields(config, where).missing(name)
    renamed = {_OLD_NAMES.get(name, name): value for name, value in config.items()}
    classes = config.get("architectures")
    if isinstance(classes, list):
        renamed["architectures"] = [_CLASS if word == _OLD_CLASS else word for word in classes]
    return renamed | {"model_type": "falcon", "new_decoder_architecture": is_new}


def falcon_network(fields: Fields, layers: Sequence[PagedLayer], activation: str) -> Network:
    """The network of a Falcon with ``layers``; ``activation`` is that of its feed-forward part.

    Raises UnknownModelError for a layer that transformers' class does not compute, or computes and kvfolio does not.
    """
    hidden_size, num_q_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    _check_layers(fields, layers, hidden_size, num_q_heads)
    parallel, num_norms = _layer_form(fields)
    max_positions = fields.integer("max_position_embeddings", assume=CONTEXT)
    head_width = layers[0].k_width
    rope, _ = ropes_from_config(fields, head_width, max_positions, layers)
    biases = fields.flag("bias", False)
    return Network(
        hidden_size=hidden_size,
        num_q_heads=num_q_heads,
        intermediate_size=fields.integer("ffn_hidden_size", default=4 * hidden_size),
        vocab_size=fields.integer("vocab_size"),
        norm_eps=fields.number("layer_norm_epsilon", assume=1e-5),
        activation=activation,
        attention_scale=head_width**-0.5,
        rope=rope,
        qkv_bias=biases,
        o_bias=biases,
        mlp_bias=biases,
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        parallel=parallel,
        num_norms=num_norms,
    )


def _layer_form(fields: Fields) -> tuple[bool, int]:
    """(whether attention and feed-forward part read the layer's input side by side, norms in front of them)."""
    is_parallel = fields.stated_flag("parallel_attn", True)
    num_norms = fields.integer("num_ln_in_parallel_attn", default=0, low=0)
    if fields.flag("new_decoder_architecture", False):
        if not is_parallel:
            raise UnknownModelError(
                f"{fields.where}: parallel_attn is False beside new_decoder_architecture, which transformers' class "
                "does not compute either; accepted there: true"
            )
        if num_norms > 2:
            raise fields.wrong("num_ln_in_parallel_attn", num_norms, "1, 2 or null")
        return True, num_norms or 2
    if is_parallel and num_norms > 1:
        raise UnknownModelError(
            f"{fields.where}: num_ln_in_parallel_attn is {num_norms} without new_decoder_architecture, which "
            "transformers' class does not compute either; accepted there: 1 or null"
        )
    return is_parallel, 1 if is_parallel else 2


def _check_layers(fields: Fields, layers: Sequence[PagedLayer], hidden_size: int, num_q_heads: int) -> None:
    """Refuse layers other than those of the class, which has its own rule for heads and reads no head_dim or window."""
    if fields.get("n_embed") not in (None, hidden_size):  # the class takes it, if it is there
        raise fields.wrong("n_embed", fields.get("n_embed"), f"null, or hidden_size, {hidden_size:,}")
    if hidden_size % num_q_heads:
        raise fields.wrong("num_attention_heads", num_q_heads, f"a number that divides hidden_size, {hidden_size:,}")
    num_kv_heads = fields.integer("num_kv_heads", default=num_q_heads)
    if not fields.flag("new_decoder_architecture", False):
        if fields.flag("multi_query", True):
            num_kv_heads = 1
        elif num_kv_heads != num_q_heads:
            raise fields.wrong("num_kv_heads", num_kv_heads, f"{num_q_heads}, as multi_query is false, or null")
    width = hidden_size // num_q_heads
    expected = FullAttention(num_kv_heads, width, width)
    for layer in layers:
        if layer != expected:
            raise UnknownModelError(
                f"{fields.where}: a layer of {layer.kind} attention with {layer.num_kv_heads} key/value heads of "
                f"{layer.k_width}; known for falcon: full, {num_kv_heads} of {width}, by num_kv_heads, multi_query and "
                "hidden_size alone; remove what says otherwise"
            )
