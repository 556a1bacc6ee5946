"""Reads the network of DeepSeek V2 and V3 out of a config: latent attention, its rotary part, experts.

Knows nothing of files or weights. The layers, as the planner reads them, say how wide latents are.
"""

import math

from kvfolio.errors import UnknownModelError
from kvfolio.spec.fields import Fields
from kvfolio.spec.layers import LatentAttention, PagedLayer
from kvfolio.spec.model import Experts, Network
from kvfolio.spec.ropes import rope_parameters, ropes_from_config


def deepseek_network(
    fields: Fields, model_type: str, layers: tuple[PagedLayer, ...], activation: str, experts: Experts | None
) -> Network:
    """The network's numbers; refuses what would change answers and is not computed."""
    kind = layers[0]
    if not isinstance(kind, LatentAttention) or kind.rope_width == 0 or kind.expanded_k_width == kind.rope_width:
        raise UnknownModelError(
            f"{fields.where}: {model_type} is run with a latent (kv_lora_rank), a rotary key (qk_rope_head_dim) and a "
            "part without positions (qk_nope_head_dim), each of 1 or more"
        )
    kv_heads = fields.integer("num_key_value_heads", default=kind.num_heads)
    if kv_heads != kind.num_heads:
        raise fields.wrong("num_key_value_heads", kv_heads, f"as many as query heads, {kind.num_heads}, or null")
    head_dim = fields.integer("head_dim", default=kind.rope_width)
    if head_dim != kind.rope_width:
        raise fields.wrong("head_dim", head_dim, f"the rotary key's width, {kind.rope_width}, or no such field")
    in_pairs = fields.stated_flag("rope_interleave", True)
    if model_type == "deepseek_v2" and not in_pairs:
        raise fields.wrong("rope_interleave", False, "true or absent: deepseek_v2 always rotates neighbours")
    rope, local = ropes_from_config(fields, kind.rope_width, fields.integer("max_position_embeddings"), layers)
    assert local is None  # there are no layers with a window
    biases = fields.flag("attention_bias", False)
    return Network(
        hidden_size=fields.integer("hidden_size"),
        num_q_heads=kind.num_heads,
        intermediate_size=fields.integer("intermediate_size"),
        vocab_size=fields.integer("vocab_size"),
        norm_eps=fields.number("rms_norm_eps", assume=1e-6),
        activation=activation,
        attention_scale=kind.expanded_k_width**-0.5 * _magnitude(fields) ** 2,
        rope=rope,
        qkv_bias=biases,
        o_bias=biases,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        experts=experts,
        q_rank=_q_rank(fields),
        rope_in_pairs=in_pairs,
    )


def _q_rank(fields: Fields) -> int:
    """The rank of the queries' projection; 0 where a null says that it is a single matrix."""
    if not fields.names("q_lora_rank"):
        raise fields.missing("q_lora_rank")  # the class's value is that of one checkpoint
    return fields.integer("q_lora_rank", default=0, low=0)


def _magnitude(fields: Fields) -> float:
    """What YaRN multiplies queries and keys with, besides the factor on cos and sin (DeepSeek's mscale_all_dim)."""
    parameters = rope_parameters(fields)
    if parameters is None or (parameters.text("rope_type", "type") or "default") == "default":
        return 1.0
    share = parameters.number("mscale_all_dim", default=0.0)
    factor = parameters.number("factor", default=1.0)
    return 0.1 * share * math.log(factor) + 1.0 if share and factor > 1.0 else 1.0
