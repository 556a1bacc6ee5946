"""Turns a GGUF header into a RunnableSpec: architectures llama, qwen2, qwen3, gemma3 and gpt2, as llama.cpp reads them.

Knows nothing of dequantising, nor of layers: those are the planner's (``layers.py``), and what the engine does not run
is refused. Reads tensor names and shapes, and the values of one small tensor (rotary divisors).
"""

from collections.abc import Sequence

from kvfolio.errors import BrokenModelError, UnknownModelError
from kvfolio.spec.fields import Fields, show
from kvfolio.spec.gguf.architectures import architecture_of, architecture_word
from kvfolio.spec.gguf.header import GgufHeader, GgufTensor, LazyArray, read_f32
from kvfolio.spec.gguf.keys import LayerCounts, integers, layer_counts
from kvfolio.spec.gguf.layers import context_of, layers_of
from kvfolio.spec.gguf.weights import stored_format
from kvfolio.spec.layers import FullAttention, LayerKind, PagedLayer, SlidingWindow
from kvfolio.spec.model import Network, Rope, RunnableSpec
from kvfolio.spec.ropes import llama3_rope_from_factors, rope_from_gguf
from kvfolio.spec.shape import UNCOUNTED, completed

FAMILIES = {"llama": "llama", "qwen2": "llama", "qwen3": "llama", "gemma3": "gemma3", "gpt2": "gpt2"}

_USE_THE_FOLDER = "use the Hugging Face folder of the model"
_PLAN_ONLY = "kvfolio plan counts this model, kvfolio run does not compute it"
_REFUSED = {
    "expert_count": "mixtures of experts are not supported",
    "pooling_type": "embedding models are not supported",
    "attn_logit_softcapping": "capped attention scores are not supported",
    "final_logit_softcapping": "capped logits are not supported",
    "logit_scale": "scaled logits are not supported",
    "embedding_scale": "scaled embeddings are not supported",
    "residual_scale": "scaled residuals are not supported",
    "attention.scale": "an attention scale of the file's own is not supported",
    "attention.clamp_kqv": "clamped queries, keys and values are not supported",
    "attention.max_alibi_bias": "ALiBi positions are not supported",
    "attention.kv_lora_rank": "latent attention is not supported",
    "attention.shared_kv_layers": "layers that read another layer's cache are not supported",
    "nextn_predict_layers": "layers that only draft tokens are not supported",
}
_GEMMA3_27B_LAYERS = 62


def runnable_from_header(header: GgufHeader) -> RunnableSpec:
    """The model that ``header`` describes.

    Raises UnknownModelError for an architecture or feature that the engine does not run, BrokenModelError for a key
    that is missing, of the wrong type or at odds with another.
    """
    architecture, fields = _architecture(header)
    tensors = {tensor.name: tensor for tensor in header.tensors}
    if any("_exps." in name for name in tensors):
        raise UnknownModelError(
            f"{header.path} holds expert tensors: mixtures of experts are not supported; {_PLAN_ONLY}"
        )
    if not tensors:
        fields.note("the file lists no tensors: tied embeddings, the usual biases and bf16 assumed")
    counts = layer_counts(fields, architecture)
    num_q_heads = _same(fields, "attention.head_count", counts)
    _same(fields, "attention.head_count_kv", counts, default=num_q_heads)  # refused where layers differ
    layers = _kept(fields, layers_of((header,), fields, architecture)[0])
    max_positions = fields.integer("context_length")
    rope, rope_local = _ropes(fields, header, architecture, layers[0].k_width, max_positions)
    network = Network(
        hidden_size=fields.integer("embedding_length"),
        num_q_heads=num_q_heads,
        intermediate_size=_same(fields, "feed_forward_length", counts),
        vocab_size=_vocab_size(fields, header, tensors),
        norm_eps=fields.number(
            "attention.layer_norm_epsilon" if architecture == "gpt2" else "attention.layer_norm_rms_epsilon"
        ),
        activation="silu" if FAMILIES[architecture] == "llama" else "gelu_tanh",
        attention_scale=_attention_scale(fields, architecture, num_q_heads, layers),
        rope=rope,
        rope_local=rope_local,
        qkv_bias=_has(tensors, "blk.0.attn_q.bias", architecture == "qwen2") or architecture == "gpt2",
        o_bias=_has(tensors, "blk.0.attn_output.bias", architecture == "gpt2"),
        mlp_bias=_has(tensors, "blk.0.ffn_up.bias", architecture == "gpt2"),
        qk_norm=architecture in ("qwen3", "gemma3"),
        tie_embeddings=not _has(tensors, "output.weight", False),
    )
    _check_tensors(header, tensors, layers[0], network)
    spec = RunnableSpec(
        name=header.path.stem,
        model_type=architecture,
        layers=layers,
        max_context=context_of(fields) or max_positions,
        dtype=stored_format((header,), fields),
        hidden_size=network.hidden_size,
        num_q_heads=num_q_heads,
        weights=UNCOUNTED,
        assumptions=tuple(fields.assumptions),
        family=FAMILIES[architecture],
        network=network,
        eos_token_ids=_eos(header),
    )
    return completed(spec)


def _architecture(header: GgufHeader) -> tuple[str, Fields]:
    """The architecture's word and a reader of its keys; refuses every other by name, and what would change results."""
    word = architecture_word(header)
    if word not in FAMILIES:
        raise UnknownModelError(
            f"{header.path}: architecture {show(word)} is not supported; known: {', '.join(FAMILIES)}; "
            "of others kvfolio plan counts the memory, kvfolio run does not compute them"
        )
    architecture, fields = architecture_of(header)
    for key, why in _REFUSED.items():
        fields.refuse_if_set(key, f"{why}; known: absent or 0; {_PLAN_ONLY}")
    if architecture != "gemma3":
        fields.refuse_if_set("attention.sliding_window", f"the header does not say which layers; {_USE_THE_FOLDER}")
    return architecture, fields


def _same(fields: Fields, key: str, counts: LayerCounts, default: int | None = None) -> int:
    """A whole number from 1, or an array of one for each layer when all are equal."""
    values = integers(fields, key, counts, default, low=1)
    if len(set(values)) > 1:
        raise UnknownModelError(
            f"{fields.where}: {fields.prefix}{key} differs between layers, {show(list(dict.fromkeys(values)))}; "
            f"known: one number for all layers; {_PLAN_ONLY}"
        )
    if values[0] < 1:
        raise fields.wrong(key, list(values), "whole numbers from 1")
    return values[0]


def _kept(fields: Fields, layers: Sequence[LayerKind]) -> tuple[PagedLayer, ...]:
    """``layers`` as they are; refuses kinds of memory and mixed widths that no network here computes."""
    kept: list[PagedLayer] = []
    for layer in layers:
        if not isinstance(layer, FullAttention | SlidingWindow):
            raise UnknownModelError(f"{fields.where}: layers of kind {layer.kind} are not supported; {_PLAN_ONLY}")
        kept.append(layer)
    widths = sorted({(layer.k_width, layer.v_width) for layer in kept})
    if len(widths) > 1:
        shown = " and ".join(f"{k_width}/{v_width}" for k_width, v_width in widths)
        raise UnknownModelError(
            f"{fields.where}: layers have keys and values of {shown} numbers, {fields.prefix}attention.key_length_swa "
            f"and value_length_swa those with a window; known: one width for all layers; {_PLAN_ONLY}"
        )
    return tuple(kept)


def _ropes(
    fields: Fields, header: GgufHeader, architecture: str, width: int, max_positions: int
) -> tuple[Rope | None, Rope | None]:
    """(rope of full-attention layers, rope of sliding-window layers or None for the same); none for GPT-2."""
    if architecture == "gpt2":
        return None, None
    gemma = architecture == "gemma3"
    base = fields.number("rope.freq_base", assume=1_000_000.0 if gemma else 10_000.0, low=1.0)
    rope = rope_from_gguf(fields, width, max_positions, base)
    for tensor in header.tensors:
        if tensor.name.startswith("rope_factors_"):
            raise UnknownModelError(f"{header.path}: tensor {tensor.name!r} (longrope) is not supported; {_PLAN_ONLY}")
        if tensor.name == "rope_freqs.weight":
            rope = _own_divisors(header, tensor, rope)
    if not gemma:
        return rope, None
    # As in llama.cpp: scaling concerns the global layers only
    return rope, Rope(fields.number("rope.freq_base_swa", assume=10_000.0, low=1.0), rope.width)


def _own_divisors(header: GgufHeader, tensor: GgufTensor, rope: Rope) -> Rope:
    if rope.scaling != "none" or tensor.shape != (rope.width // 2,):
        raise UnknownModelError(
            f"{header.path}: rope_freqs.weight {list(tensor.shape)} beside rotary scaling {rope.scaling!r} of width "
            f"{rope.width} is not supported; {_USE_THE_FOLDER}"
        )
    divisors = read_f32(header, tensor)
    if all(divisor == 1.0 for divisor in divisors):
        return rope
    return llama3_rope_from_factors(rope.base, divisors, str(header.path))


def _attention_scale(fields: Fields, architecture: str, num_q_heads: int, layers: tuple[PagedLayer, ...]) -> float:
    if architecture != "gemma3":
        return float(layers[0].k_width ** -0.5)
    # The header leaves out query_pre_attn_scalar. It is the head's width, but in the 27B hidden / heads.
    scalar = layers[0].k_width
    if len(layers) == _GEMMA3_27B_LAYERS:
        scalar = fields.integer("embedding_length") // num_q_heads
    fields.note(f"query_pre_attn_scalar is not in the file: {scalar} assumed, as llama.cpp does")
    return float(scalar**-0.5)


def _has(tensors: dict[str, GgufTensor], name: str, usual: bool) -> bool:
    return name in tensors if tensors else usual


def _vocab_size(fields: Fields, header: GgufHeader, tensors: dict[str, GgufTensor]) -> int:
    """Rows of the embedding: as stated, else as many as there are tokens, else as the tensor has."""
    if fields.get("vocab_size") is not None:
        return fields.integer("vocab_size")
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    if isinstance(tokens, LazyArray):
        return len(tokens)
    embedding = tensors.get("token_embd.weight")
    if embedding is not None and len(embedding.shape) == 2:
        return embedding.shape[0]
    raise fields.missing("vocab_size")


def _check_tensors(header: GgufHeader, tensors: dict[str, GgufTensor], kind: PagedLayer, network: Network) -> None:
    """Compare the shapes that decide a cache's size with the tensor table, where it has them."""
    hidden_size = network.hidden_size
    expected = {
        "token_embd.weight": (network.vocab_size, hidden_size),
        "blk.0.attn_q.weight": (network.num_q_heads * kind.k_width, hidden_size),
        "blk.0.attn_k.weight": (kind.num_kv_heads * kind.k_width, hidden_size),
        "blk.0.attn_v.weight": (kind.num_kv_heads * kind.v_width, hidden_size),
    }
    for name, shape in expected.items():
        tensor = tensors.get(name)
        if tensor is not None and tensor.shape != shape:
            raise BrokenModelError(
                f"{header.path}: tensor {name!r} is {list(tensor.shape)}, the metadata says {list(shape)}; "
                "convert the model again"
            )


def _eos(header: GgufHeader) -> tuple[int, ...]:
    tokenizer = Fields(header.metadata, str(header.path), "tokenizer.ggml.")
    found = [tokenizer.token_ids(f"{name}_token_id") or () for name in ("eos", "eot")]
    return tuple(dict.fromkeys(token_id for token_ids in found for token_id in token_ids))
