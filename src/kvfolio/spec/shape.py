"""Checks that the numbers of a model agree with each other and counts its weights from them.

Knows nothing of configs or files: what it sees is a RunnableSpec, whoever made it.
"""

from dataclasses import replace

from kvfolio.errors import BrokenModelError
from kvfolio.spec.formats import COMPUTE_FORMATS
from kvfolio.spec.layers import LatentAttention, PagedLayer
from kvfolio.spec.model import Experts, Network, RunnableSpec, WeightCount

UNCOUNTED = WeightCount(0, 0, 0, "config")


def completed(spec: RunnableSpec) -> RunnableSpec:
    """``spec`` with its weights counted; raises BrokenModelError where its numbers contradict each other."""
    check_shape(spec)
    return replace(spec, weights=count_weights(spec))


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


def count_weights(spec: RunnableSpec) -> WeightCount:
    """The weights of a network in the dtype it is published in, those of routed experts apart."""
    count, value_bytes = count_parameters(spec), COMPUTE_FORMATS[spec.dtype].value_bytes
    experts = spec.network.experts
    if experts is None:
        return WeightCount(count, count, count * value_bytes, "config")
    of_one = _expert_params(spec.network, experts) * len(experts.layers)  # expert, in all layers
    routed = of_one * experts.num_experts
    return WeightCount(
        num_params=count,
        num_active_params=count - of_one * (experts.num_experts - experts.per_token),
        num_bytes=count * value_bytes,
        source="config",
        expert_params=routed,
        num_experts=experts.num_experts,
        experts_per_token=experts.per_token,
        expert_bytes=routed * value_bytes,
    )


def count_parameters(spec: RunnableSpec) -> int:
    """The number of weights, tied embeddings once; exact for every family."""
    network = spec.network
    if spec.family in _PLAIN_LAYERS:
        layers = sum(_PLAIN_LAYERS[spec.family](network, kind) for kind in spec.layers)
    else:
        layers = sum(_gated_layer(network, kind, index) for index, kind in enumerate(spec.layers))
    if spec.family == "gpt_oss":  # a sink logit for each query head
        layers += len(spec.layers) * network.num_q_heads
    if spec.family == "gemma3":  # two more norms a layer: after attention and after the gated product
        layers += len(spec.layers) * 2 * network.hidden_size
    embedding = network.vocab_size * network.hidden_size
    output = 0 if network.tie_embeddings else embedding
    if spec.family == "gpt2":  # learned positions, and a bias beside the last norm's weight
        return embedding + output + spec.max_context * network.hidden_size + layers + 2 * network.hidden_size
    last_norm = network.hidden_size * (2 if spec.family == "falcon" else 1)  # with a bias beside the weight
    return embedding + output + layers + last_norm


def _attention(network: Network, kind: PagedLayer) -> int:
    """Weights of the products of one layer's attention, biases included."""
    if isinstance(kind, LatentAttention):
        return _latent_attention(network, kind)
    q_width = network.num_q_heads * kind.k_width
    k_width = kind.num_kv_heads * kind.k_width
    v_width = kind.num_kv_heads * kind.v_width
    products = network.hidden_size * (q_width + k_width + v_width + network.num_q_heads * kind.v_width)
    biases = network.qkv_bias * (q_width + k_width + v_width) + network.o_bias * network.hidden_size
    return products + biases


def _latent_attention(network: Network, kind: LatentAttention) -> int:
    """Weights of the projections to and from latents, and of the norms on these."""
    hidden, rank = network.hidden_size, network.q_rank
    q_rows, v_rows = kind.num_heads * kind.expanded_k_width, kind.num_heads * kind.expanded_v_width
    queries = rank * (hidden + 1 + q_rows) if rank else hidden * q_rows
    keys = hidden * kind.k_width + kind.rank + kind.rank * (q_rows - kind.num_heads * kind.rope_width + v_rows)
    biases = network.qkv_bias * (rank + kind.k_width) + network.o_bias * hidden
    return queries + keys + v_rows * hidden + biases


def _gated_layer(network: Network, kind: PagedLayer, index: int) -> int:
    """Weights of a layer of the gated families: attention, feed-forward part, two norms."""
    head_norms = network.qk_norm * 2 * kind.k_width
    return _attention(network, kind) + feed_forward_params(network, index) + head_norms + 2 * network.hidden_size


def feed_forward_params(network: Network, index: int) -> int:
    """Weights of the gated product of layer ``index``; of all its experts and their router where it has them."""
    hidden, experts = network.hidden_size, network.experts
    if experts is None or index not in experts.layers:
        biases = network.mlp_bias * (2 * network.intermediate_size + hidden)
        return 3 * hidden * network.intermediate_size + biases
    routed = experts.num_experts * (_expert_params(network, experts) + network.mlp_bias)  # and the router's bias
    corrections = experts.has_bias * experts.num_experts  # of DeepSeek-V3's scores
    routers = hidden * (experts.num_experts + experts.has_shared_gate) + corrections
    return routed + 3 * hidden * experts.shared_width + routers


def _expert_params(network: Network, experts: Experts) -> int:
    """Weights of one routed expert in one layer."""
    biases = network.mlp_bias * (2 * experts.width + network.hidden_size)
    return 3 * network.hidden_size * experts.width + biases


def _gpt2_layer(network: Network, kind: PagedLayer) -> int:
    """Weights of a layer of GPT-2: attention, two products with biases, two norms with biases."""
    products = 2 * network.hidden_size * network.intermediate_size + network.intermediate_size + network.hidden_size
    return _attention(network, kind) + products + 4 * network.hidden_size


def _falcon_layer(network: Network, kind: PagedLayer) -> int:
    """Weights of a layer of Falcon: attention, two products, one or two norms with biases."""
    products = 2 * network.hidden_size * network.intermediate_size
    biases = network.mlp_bias * (network.intermediate_size + network.hidden_size)
    return _attention(network, kind) + products + biases + network.num_norms * 2 * network.hidden_size


_PLAIN_LAYERS = {"gpt2": _gpt2_layer, "falcon": _falcon_layer}  # families whose feed-forward part has no gate
