"""Checks that the numbers of a model agree with each other and counts its weights from them.

Knows nothing of configs or files: what it sees is a RunnableSpec, whoever made it.
"""

from dataclasses import replace

from kvfolio.errors import BrokenModelError
from kvfolio.spec.formats import COMPUTE_FORMATS
from kvfolio.spec.layers import PagedLayer
from kvfolio.spec.model import Network, RunnableSpec, WeightCount

UNCOUNTED = WeightCount(0, 0, 0, "config")


def completed(spec: RunnableSpec) -> RunnableSpec:
    """``spec`` with its weights counted; raises BrokenModelError where its numbers contradict each other."""
    check_shape(spec)
    count, value_bytes = count_parameters(spec), COMPUTE_FORMATS[spec.dtype].value_bytes
    network = spec.network
    routed = len(spec.layers) * _gpt_oss_expert(network) if spec.family == "gpt_oss" else 0  # one expert of each layer
    weights = WeightCount(
        num_params=count,
        num_active_params=count - routed * (network.num_experts - network.experts_per_token),
        num_bytes=count * value_bytes,
        source="config",
        expert_params=routed * network.num_experts,
        num_experts=network.num_experts,
        experts_per_token=network.experts_per_token,
        expert_bytes=routed * network.num_experts * value_bytes,
    )
    return replace(spec, weights=weights)


def check_shape(spec: RunnableSpec) -> None:
    """Raise BrokenModelError for heads that cannot be grouped, odd rotary widths and the like."""
    network = spec.network
    for kind in dict.fromkeys(spec.layers):
        if network.num_q_heads % kind.num_kv_heads:
            raise BrokenModelError(
                f"{spec.name}: {network.num_q_heads} query heads cannot share {kind.num_kv_heads} key/value heads; "
                "the first must be a multiple of the second"
            )
        for rope in (network.rope, network.rope_local):
            if rope is not None and (rope.width % 2 or rope.width > kind.k_width):
                raise BrokenModelError(
                    f"{spec.name}: {rope.width} rotated numbers in a head of {kind.k_width}; "
                    "accepted: an even number up to the head's width"
                )


def count_parameters(spec: RunnableSpec) -> int:
    """The number of weights, tied embeddings once; exact for every family."""
    network = spec.network
    per_layer = {"gpt2": _gpt2_layer, "gpt_oss": _gpt_oss_layer}.get(spec.family, _gated_layer)
    layers = sum(per_layer(network, kind) for kind in spec.layers)
    if spec.family == "gemma3":  # two more norms a layer: after attention and after the gated product
        layers += len(spec.layers) * 2 * network.hidden_size
    embedding = network.vocab_size * network.hidden_size
    output = 0 if network.tie_embeddings else embedding
    if spec.family == "gpt2":  # learned positions, and a bias beside the last norm's weight
        return embedding + output + spec.max_context * network.hidden_size + layers + 2 * network.hidden_size
    return embedding + output + layers + network.hidden_size


def _attention(network: Network, kind: PagedLayer) -> int:
    """Weights of the four products of one layer's attention, biases included."""
    q_width = network.num_q_heads * kind.k_width
    k_width = kind.num_kv_heads * kind.k_width
    v_width = kind.num_kv_heads * kind.v_width
    products = network.hidden_size * (q_width + k_width + v_width + network.num_q_heads * kind.v_width)
    biases = network.qkv_bias * (q_width + k_width + v_width) + network.o_bias * network.hidden_size
    return products + biases


def _gated_layer(network: Network, kind: PagedLayer) -> int:
    """Weights of a layer of the llama and gemma3 families: attention, gated product, two norms."""
    gated = 3 * network.hidden_size * network.intermediate_size
    gated_biases = network.mlp_bias * (2 * network.intermediate_size + network.hidden_size)
    head_norms = network.qk_norm * 2 * kind.k_width
    return _attention(network, kind) + gated + gated_biases + head_norms + 2 * network.hidden_size


def _gpt2_layer(network: Network, kind: PagedLayer) -> int:
    """Weights of a layer of GPT-2: attention, two products with biases, two norms with biases."""
    products = 2 * network.hidden_size * network.intermediate_size + network.intermediate_size + network.hidden_size
    return _attention(network, kind) + products + 4 * network.hidden_size


def _gpt_oss_layer(network: Network, kind: PagedLayer) -> int:
    """Weights of a layer of gpt-oss: attention with a sink logit per query head, router, experts, two norms."""
    router = network.num_experts * (network.hidden_size + 1)
    sink_logits = network.num_q_heads
    experts = network.num_experts * _gpt_oss_expert(network)
    return _attention(network, kind) + sink_logits + router + experts + 2 * network.hidden_size


def _gpt_oss_expert(network: Network) -> int:
    """Weights of one expert: a gated product with biases."""
    hidden, width = network.hidden_size, network.intermediate_size
    return 3 * hidden * width + 2 * width + hidden
