"""Turns a GGUF header into a RunnableSpec: architectures llama, qwen2, qwen3, gemma3 and gpt2, as llama.cpp reads them.

Knows nothing of dequantising. Reads tensor names and shapes, and the values of one small tensor (rotary divisors).
"""

from kvfolio.errors import BrokenModelError, UnknownModelError
from kvfolio.spec.config.runnable import MAX_LAYERS
from kvfolio.spec.fields import Fields, show
from kvfolio.spec.gguf.header import GgufHeader, GgufTensor, LazyArray, read_f32
from kvfolio.spec.layers import FullAttention, PagedLayer, SlidingWindow
from kvfolio.spec.model import Network, Rope, RunnableSpec
from kvfolio.spec.ropes import llama3_rope_from_factors, rope_from_gguf, usable_context
from kvfolio.spec.shape import UNCOUNTED, completed

FAMILIES = {"llama": "llama", "qwen2": "llama", "qwen3": "llama", "gemma3": "gemma3", "gpt2": "gpt2"}

_USE_THE_FOLDER = "use the Hugging Face folder of the model"
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
}
_GEMMA3_PERIOD = 6  # every sixth layer is global; the header does not say so
_GEMMA3_27B_LAYERS = 62


def runnable_from_header(header: GgufHeader) -> RunnableSpec:
    """The model that ``header`` describes.

    Raises UnknownModelError for an architecture or feature outside what kvfolio knows, BrokenModelError for a key that
    is missing, of the wrong type or at odds with another.
    """
    architecture, fields = _architecture(header)
    tensors = {tensor.name: tensor for tensor in header.tensors}
    if any("_exps." in name for name in tensors):
        raise UnknownModelError(f"{header.path} holds expert tensors; mixtures of experts are not supported")
    if not tensors:
        fields.note("the file lists no tensors: tied embeddings and the usual biases assumed")
    num_q_heads = _equal(fields, "attention.head_count")
    layers = _layers(fields, architecture, num_q_heads)
    max_positions = fields.integer("context_length")
    rope, rope_local = _ropes(fields, header, architecture, layers[0].k_width, max_positions)
    network = Network(
        hidden_size=fields.integer("embedding_length"),
        num_q_heads=num_q_heads,
        intermediate_size=_equal(fields, "feed_forward_length"),
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
        max_context=usable_context(max_positions, rope),
        dtype=_dtype(header, fields),
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
    where = str(header.path)
    kind = Fields(header.metadata, where, "general.").text("type") or "model"
    if kind != "model":
        raise UnknownModelError(f"{where} holds a GGUF of type {show(kind)}, not a model; give the model's own file")
    architecture = Fields(header.metadata, where).text("general.architecture")
    if architecture is None:
        raise BrokenModelError(f"{where}: general.architecture is missing; give a GGUF file of a language model")
    if architecture not in FAMILIES:
        raise UnknownModelError(
            f"{where}: architecture {show(architecture)} is not supported; known: {', '.join(FAMILIES)}"
        )
    fields = Fields(header.metadata, where, f"{architecture}.")
    for key, why in _REFUSED.items():
        fields.refuse_if_set(key, f"{why}; known: absent or 0")
    if not fields.flag("attention.causal", True):
        raise UnknownModelError(f"{where}: {architecture}.attention.causal is false; only causal models are supported")
    return architecture, fields


def _equal(fields: Fields, key: str, default: int | None = None) -> int:
    """A whole number, or an array of one for each layer when all are equal."""
    array = fields.get(key)
    if not isinstance(array, LazyArray):
        return fields.integer(key, default=default)
    num_layers = fields.integer("block_count", high=MAX_LAYERS)
    if len(array) != num_layers:
        raise fields.wrong(key, f"{len(array)} numbers", f"one number, or {num_layers} of them, one for each layer")
    values = array.values()
    if len(set(values)) > 1:
        raise UnknownModelError(
            f"{fields.where}: {fields.prefix}{key} differs between layers, {show(list(dict.fromkeys(values)))}; "
            "known: one number for all layers"
        )
    return Fields({fields.prefix + key: values[0]}, fields.where, fields.prefix).integer(key)


def _layers(fields: Fields, architecture: str, num_q_heads: int) -> tuple[PagedLayer, ...]:
    num_layers = fields.integer("block_count", high=MAX_LAYERS)
    num_kv_heads = _equal(fields, "attention.head_count_kv", default=num_q_heads)
    k_width, v_width = _head_width(fields, "key", num_q_heads), _head_width(fields, "value", num_q_heads)
    full = FullAttention(num_kv_heads, k_width, v_width)
    if architecture != "gemma3":
        fields.refuse_if_set("attention.sliding_window", f"the header does not say which layers; {_USE_THE_FOLDER}")
        return (full,) * num_layers
    window = SlidingWindow(num_kv_heads, k_width, v_width, fields.integer("attention.sliding_window"))
    return tuple(window if slides else full for slides in _gemma3_slides(fields, num_layers))


def _gemma3_slides(fields: Fields, num_layers: int) -> list[bool]:
    """Which layers of a Gemma 3 have a window: a list of the file's own wins, then a period."""
    key = "attention.sliding_window_pattern"
    array = fields.get(key)
    if not isinstance(array, LazyArray):
        period = fields.integer(key, assume=_GEMMA3_PERIOD)
        return [(index + 1) % period != 0 for index in range(num_layers)]
    values = array.values() if len(array) == num_layers else ()
    if not values or not all(isinstance(value, bool) for value in values):
        raise fields.wrong(key, f"{len(array)} values", f"a number, or {num_layers} times true or false")
    return [value is True for value in values]


def _head_width(fields: Fields, name: str, num_q_heads: int) -> int:
    """Numbers in one head's key or value; the stated length wins over the division."""
    if fields.get(f"attention.{name}_length") is not None:
        return fields.integer(f"attention.{name}_length")
    hidden_size = fields.integer("embedding_length")
    if hidden_size % num_q_heads:
        raise BrokenModelError(
            f"{fields.where}: embedding_length {hidden_size} does not divide into {num_q_heads} heads and "
            f"{fields.prefix}attention.{name}_length is missing; convert the model again"
        )
    return hidden_size // num_q_heads


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
            raise UnknownModelError(f"{header.path}: tensor {tensor.name!r} (longrope) is not supported")
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


def _dtype(header: GgufHeader, fields: Fields) -> str:
    """The format of the matrices; norms and biases stay F32 in every file."""
    types = {tensor.type_name for tensor in header.tensors if len(tensor.shape) > 1}
    for words, dtype in (({"F32"}, "f32"), ({"F32", "F16"}, "f16"), ({"F32", "BF16"}, "bf16")):
        if types and types <= words:
            return dtype
    fields.note(f"weights are stored as {', '.join(sorted(types)) or 'nothing'}: computed in bf16")
    return "bf16"


def _eos(header: GgufHeader) -> tuple[int, ...]:
    tokenizer = Fields(header.metadata, str(header.path), "tokenizer.ggml.")
    found = [tokenizer.token_ids(f"{name}_token_id") or () for name in ("eos", "eot")]
    return tuple(dict.fromkeys(token_id for token_ids in found for token_id in token_ids))
