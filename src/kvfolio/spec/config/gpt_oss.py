"""What the network of gpt-oss needs, from its config.json; its weights may be published as MXFP4.

Knows nothing of layers' memory or of tensors. What the network computes in one way only is refused in any other.
"""

from collections.abc import Sequence

from kvfolio.errors import BrokenModelError, UnknownModelError
from kvfolio.spec.fields import Fields, show
from kvfolio.spec.layers import PagedLayer
from kvfolio.spec.model import Experts, Network
from kvfolio.spec.ropes import require_base, rope_parameters, ropes_from_config, usable_context

# The experts' gate, as models/gpt_oss.py computes it; class defaults of transformers 5.24.
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0

_MXFP4_KEYS = ("quant_method", "modules_to_not_convert", "dequantize")


def decoded_mxfp4(fields: Fields) -> Fields:
    """``fields`` of a model whose weights are decoded to 16 bits or more when they are read.

    Published configs name no dtype; transformers computes their MXFP4 weights in bf16. Raises UnknownModelError for
    any other quantisation: which tensors are packed, the files themselves say.
    """
    packed = fields.child("quantization_config")
    if packed is None:
        return fields
    method = packed.text("quant_method")
    if method != "mxfp4":
        raise UnknownModelError(
            f"{packed.where}: quant_method is {show(method)}; known for gpt_oss: mxfp4, and folders without "
            "quantization_config"
        )
    for name, value in packed.values.items():
        if name not in _MXFP4_KEYS and value is not None:
            raise UnknownModelError(f"{packed.where}: {name} is not known; known: {', '.join(_MXFP4_KEYS)}")
    if fields.text("dtype", "torch_dtype") is not None:
        return fields
    fields.note("dtype is absent: bfloat16 assumed, in which transformers computes MXFP4 weights")
    return fields.over({"dtype": "bfloat16"})


def gpt_oss_network(fields: Fields, layers: Sequence[PagedLayer]) -> tuple[Network, int]:
    """(network, tokens a sequence may have). Raises UnknownModelError for arithmetic that the network does not have."""
    _refuse_other(fields, "swiglu_alpha", SWIGLU_ALPHA)
    _refuse_other(fields, "swiglu_limit", SWIGLU_LIMIT)
    if not fields.flag("attention_bias", True):
        raise UnknownModelError(f"{fields.where}: attention_bias is False; known for gpt_oss: true")
    if fields.text("hidden_act") not in (None, "silu"):
        raise UnknownModelError(f"{fields.where}: hidden_act is {show(fields.get('hidden_act'))}; known: silu")
    parameters = rope_parameters(fields)
    if parameters is None:  # the class would take those of one checkpoint
        raise fields.missing("rope_parameters")
    require_base(fields)
    head_width, max_positions = layers[0].k_width, fields.integer("max_position_embeddings")
    rope, rope_local = ropes_from_config(fields, head_width, max_positions, layers)
    if rope_local is not None:
        raise UnknownModelError(f"{parameters.where}: two ropes; known for gpt_oss: one for all layers")
    width = fields.integer("intermediate_size")
    network = Network(
        hidden_size=fields.integer("hidden_size"),
        num_q_heads=fields.integer("num_attention_heads"),
        intermediate_size=width,
        vocab_size=fields.integer("vocab_size"),
        norm_eps=fields.number("rms_norm_eps", assume=1e-5),
        activation="silu",
        attention_scale=head_width**-0.5,
        rope=rope,
        qkv_bias=True,
        o_bias=True,
        mlp_bias=True,
        tie_embeddings=fields.flag("tie_word_embeddings", False),
        experts=Experts(
            num_experts=fields.integer("num_local_experts"),
            per_token=_experts_per_token(fields),
            width=width,
            layers=tuple(range(len(layers))),
            normalise=True,  # a softmax over the chosen ones is one over all, made to add up to 1 again
        ),
    )
    return network, usable_context(max_positions, rope)


def _experts_per_token(fields: Fields) -> int:
    """Published configs spell it twice."""
    count = fields.integer("num_experts_per_tok", high=fields.integer("num_local_experts"))
    if fields.integer("experts_per_token", default=count) != count:
        raise BrokenModelError(
            f"{fields.where}: experts_per_token is {show(fields.get('experts_per_token'))} and num_experts_per_tok "
            f"{count}; correct one of them"
        )
    return count


def _refuse_other(fields: Fields, name: str, computed: float) -> None:
    if fields.number(name, default=computed) != computed:
        raise UnknownModelError(f"{fields.where}: {name} is {show(fields.get(name))}; known: {computed:g}")
