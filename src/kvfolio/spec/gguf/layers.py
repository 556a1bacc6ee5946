"""Turns the GGUF header of any architecture that llama.cpp writes into a ModelSpec: what each layer remembers.

Knows nothing of networks: ``runnable.py`` reads those of the families that the engine runs, and takes their layers
from here. A layer is counted as llama.cpp would keep it; where the header leaves something out, that is noted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvfolio.errors import BrokenModelError, UnknownModelError
from kvfolio.spec.fields import Fields
from kvfolio.spec.gguf.architectures import KNOWN, STATES_BESIDE_ATTENTION, STATES_ONLY, architecture_of
from kvfolio.spec.gguf.header import GgufHeader, part_names
from kvfolio.spec.gguf.keys import LayerCounts, flags, integers, layer_counts
from kvfolio.spec.gguf.states import may_keep_states, recurrent_layers, state_of
from kvfolio.spec.gguf.weights import count_weights, first_part, parts_at_hand, stored_format
from kvfolio.spec.gguf.windows import Windows, windows_of
from kvfolio.spec.layers import (
    BlockSparse,
    ChunkedAttention,
    CombinedLayer,
    CompressedSparse,
    CrossAttention,
    FullAttention,
    LatentAttention,
    LayerKind,
    NoCache,
    SharedCache,
    SingleKind,
    SlidingWindow,
    without_idle_windows,
)
from kvfolio.spec.model import ModelSpec
from kvfolio.spec.token_layers import HEAVY_RATIO, LIGHT_RATIO

_USE_THE_FOLDER = "use the Hugging Face folder of the model"
_GEMMA3N_OWN_LAYERS = 20  # the others read what these stored

Shapes = Mapping[str, tuple[int, ...]]  # of the tensors, by name


def spec_from_gguf(header: GgufHeader) -> ModelSpec:
    """The model that ``header`` describes, with its weights counted from the tensor tables of all parts at hand.

    Raises UnknownModelError for a file without a KV cache (encoders, adapters, vision parts) and for keys that may
    decide a cache and are not known, BrokenModelError for one that is missing, of the wrong type or at odds.
    """
    header = first_part(header)
    architecture, fields = architecture_of(header)
    parts = parts_at_hand(header, fields)
    layers, q_heads = layers_of(parts, fields, architecture)
    max_context = context_of(fields)
    names = part_names(header.path)
    return ModelSpec(
        name=names[0].removesuffix(f"-00001-of-{len(names):05}.gguf") if names else header.path.stem,
        model_type=architecture,
        layers=without_idle_windows(layers, max_context),
        max_context=max_context,
        dtype=stored_format(parts, fields),
        hidden_size=fields.integer("embedding_length"),
        num_q_heads=max(q_heads),
        weights=count_weights(parts, fields),
        assumptions=tuple(fields.assumptions),
    )


def layers_of(
    parts: Sequence[GgufHeader], fields: Fields, architecture: str
) -> tuple[tuple[LayerKind, ...], tuple[int, ...]]:
    """(the memory of every layer, its query heads), in order and without layers that only draft tokens.

    The tensor tables of ``parts`` say what keys leave out, and must agree with them. Raises as ``spec_from_gguf`` does
    for keys that decide a layer.
    """
    counts = layer_counts(fields, architecture)
    heads = _heads(fields, architecture, counts)
    shapes = {tensor.name: tensor.shape for part in parts for tensor in part.tensors}
    layers = _layers(shapes, fields, architecture, counts, heads)
    _check_tensors(shapes, fields, architecture, layers)
    return layers, heads[0]


def _heads(fields: Fields, architecture: str, counts: LayerCounts) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Query heads and key/value heads of every layer; 0: no attention there."""
    if architecture in STATES_ONLY:
        return (0,) * counts.model, (0,) * counts.model
    low = 0 if may_keep_states(fields, architecture) else 1
    heads = integers(fields, "attention.head_count", counts, low=low)
    if fields.get("attention.head_count_kv") is None:
        if architecture not in KNOWN:
            fields.note(f"{fields.prefix}attention.head_count_kv is absent: as many as query heads")
        return heads, heads
    kv_heads = integers(fields, "attention.head_count_kv", counts, low=low)
    return heads, kv_heads


@dataclass(frozen=True, slots=True)
class _Attention:
    """The numbers that the attention layers of a model share."""

    k_width: int
    v_width: int
    windowed_k_width: int
    windowed_v_width: int
    windows: Windows
    latent: LatentAttention | None  # without its index key
    index_width: int  # 0: no index keys
    top_k: int
    indexed: tuple[bool, ...]  # for each layer whether it has an index key of its own
    chooses: tuple[bool, ...]  # for each layer whether it reads only the tokens chosen


def _layers(
    shapes: Shapes,
    fields: Fields,
    architecture: str,
    counts: LayerCounts,
    heads: tuple[tuple[int, ...], tuple[int, ...]],
) -> tuple[LayerKind, ...]:
    q_heads, kv_heads = heads
    recurrent = recurrent_layers(fields, architecture, counts, kv_heads)
    state = state_of(fields, architecture, max(q_heads)) if any(recurrent) else None
    if architecture == "deepseek4":
        return _compressed(fields, counts)
    beside = architecture in STATES_BESIDE_ATTENTION
    attention = None
    if any(kv and (beside or not alone) for kv, alone in zip(kv_heads, recurrent, strict=True)):
        attention = _attention(shapes, fields, architecture, counts, q_heads)
    own = counts.model - _shared_layers(fields, architecture, counts)
    layers: list[LayerKind] = []
    for index in range(counts.model):
        kind: SingleKind = NoCache()
        if attention is not None and kv_heads[index] and (beside or not recurrent[index]):
            kind = _kind(fields, attention, index, (q_heads[index], kv_heads[index]))
            if index >= own:
                kind = _shared(fields, kind, layers[:own])
        if state is not None and recurrent[index]:
            layers.append(state if isinstance(kind, NoCache) else CombinedLayer((kind, state)))
        elif architecture == "t5" and isinstance(kind, FullAttention):
            layers.append(CombinedLayer((kind, CrossAttention(kind.num_kv_heads, kind.k_width, kind.v_width, 0))))
        else:
            layers.append(kind)
    if architecture == "t5":
        fields.note("the encoder's text is as long as the input: its keys and values are counted for 0 tokens")
    return tuple(layers)


def _attention(
    shapes: Shapes, fields: Fields, architecture: str, counts: LayerCounts, q_heads: tuple[int, ...]
) -> _Attention:
    k_width, v_width = _width(fields, "key", q_heads), _width(fields, "value", q_heads)
    index_width = fields.integer("attention.indexer.key_length", default=0, low=0)
    latent = _latent(fields, max(q_heads), k_width)
    indexed, top_k = (False,) * counts.model, 0
    chooses = indexed
    if index_width:
        top_k = fields.integer("attention.indexer.top_k")
        indexed = _indexed(shapes, fields, architecture, counts)
        chooses = (True,) * counts.model
        if architecture == "minimax-m3":
            top_k, chooses = top_k * fields.integer("attention.indexer.block_size"), indexed
        elif latent is None:
            raise UnknownModelError(
                f"{fields.where}: {fields.prefix}attention.indexer.key_length without a latent cache is not known; "
                f"{_USE_THE_FOLDER}"
            )
    return _Attention(
        k_width=k_width,
        v_width=v_width,
        windowed_k_width=fields.integer("attention.key_length_swa", default=k_width),
        windowed_v_width=fields.integer("attention.value_length_swa", default=v_width),
        windows=windows_of(fields, architecture, counts),
        latent=latent,
        index_width=index_width,
        top_k=top_k,
        indexed=indexed,
        chooses=chooses,
    )


def _kind(fields: Fields, attention: _Attention, index: int, heads: tuple[int, int]) -> SingleKind:
    """The memory of one attention layer that has ``heads``, (query, key/value)."""
    num_q_heads, num_kv_heads = heads
    slides = attention.windows.slides[index]
    latent = attention.latent
    if latent is not None:
        if slides:
            raise UnknownModelError(
                f"{fields.where}: {fields.prefix}attention.sliding_window beside a latent cache is not known; "
                f"{_USE_THE_FOLDER}"
            )
        return LatentAttention(
            rank=latent.rank,
            rope_width=latent.rope_width,
            num_heads=latent.num_heads,
            expanded_k_width=latent.expanded_k_width,
            expanded_v_width=latent.expanded_v_width,
            index_width=attention.index_width if attention.indexed[index] else 0,
            top_k=attention.top_k if attention.chooses[index] else None,
        )
    if num_q_heads % num_kv_heads:
        raise BrokenModelError(
            f"{fields.where}: {num_q_heads:,} query heads cannot share {num_kv_heads:,} key/value heads in layer "
            f"{index}; the first must be a multiple of the second"
        )
    if slides:
        sliding = ChunkedAttention if attention.windows.chunked else SlidingWindow
        widths = (attention.windowed_k_width, attention.windowed_v_width)
        return sliding(num_kv_heads, *widths, attention.windows.window)
    if attention.chooses[index]:
        return BlockSparse(num_kv_heads, attention.k_width, attention.v_width, attention.index_width, attention.top_k)
    return FullAttention(num_kv_heads, attention.k_width, attention.v_width)


def _width(fields: Fields, name: str, q_heads: tuple[int, ...]) -> int:
    """Numbers in one head's key or value; the stated length wins over the division."""
    if fields.get(f"attention.{name}_length") is not None:
        return fields.integer(f"attention.{name}_length")
    hidden_size = fields.integer("embedding_length")
    num_heads = next((heads for heads in q_heads if heads), 0)
    if not num_heads or hidden_size % num_heads:
        raise BrokenModelError(
            f"{fields.where}: embedding_length {hidden_size:,} does not divide into {num_heads:,} heads and "
            f"{fields.prefix}attention.{name}_length is missing; convert the model again"
        )
    return hidden_size // num_heads


def _latent(fields: Fields, num_heads: int, k_width: int) -> LatentAttention | None:
    """What a layer keeps when only the latent is cached; None where llama.cpp keeps every head, expanded."""
    if fields.get("attention.kv_lora_rank") is None:
        return None
    rank = fields.integer("attention.kv_lora_rank")
    expanded_k = fields.integer("attention.key_length_mla", default=0, low=0)
    expanded_v = fields.integer("attention.value_length_mla", default=0, low=0)
    if not (expanded_k and expanded_v):
        fields.note(
            f"{fields.prefix}attention.key_length_mla is absent: llama.cpp keeps every head expanded, not the latent "
            f"of {rank:,} numbers; a new conversion of the model may add it"
        )
        return None
    rope_width = fields.integer("rope.dimension_count", default=max(0, k_width - rank), low=0)
    if rank + rope_width != k_width:
        raise BrokenModelError(
            f"{fields.where}: attention.key_length is {k_width:,}, and the latent has {rank:,} numbers and "
            f"{rope_width:,} rotary ones; convert the model again"
        )
    return LatentAttention(rank, rope_width, num_heads, expanded_k, expanded_v)


def _indexed(shapes: Shapes, fields: Fields, architecture: str, counts: LayerCounts) -> tuple[bool, ...]:
    """For each layer whether it keeps an index key; the others of a latent model reuse an earlier layer's choice."""
    listed = flags(fields, "attention.indexer.types", counts)
    if listed is not None:
        return listed
    if architecture == "minimax-m3":
        dense = fields.integer("leading_dense_block_count", default=0, low=0)
        return tuple(index >= dense for index in range(counts.model))
    found = {name.split(".")[1] for name in shapes if ".indexer." in name}
    return tuple(not found or str(index) in found for index in range(counts.model))


def _compressed(fields: Fields, counts: LayerCounts) -> tuple[LayerKind, ...]:
    """DeepSeek-V4: a window of vectors that are key and value at once, behind it compressed ones."""
    key = "attention.compress_ratios"
    if fields.get(key) is None:
        raise fields.missing(key)
    width = fields.integer("attention.key_length")
    window = fields.integer("attention.sliding_window")
    index_width = fields.integer("attention.indexer.key_length")
    top_k = fields.integer("attention.indexer.top_k")
    fields.note("the running sums of the compressors are not counted: they do not grow with the text")
    by_ratio: dict[int, LayerKind] = {
        0: CompressedSparse(width, None, window),
        LIGHT_RATIO: CompressedSparse(width, LIGHT_RATIO, window, index_width, top_k),
        HEAVY_RATIO: CompressedSparse(width, HEAVY_RATIO, window),
    }
    ratios = integers(fields, key, counts)
    for ratio in ratios:
        if ratio not in by_ratio:
            raise UnknownModelError(
                f"{fields.where}: {fields.prefix}{key} holds {ratio:,}; known: 0, {LIGHT_RATIO} and {HEAVY_RATIO}"
            )
    return tuple(by_ratio[ratio] for ratio in ratios)


def _shared_layers(fields: Fields, architecture: str, counts: LayerCounts) -> int:
    """How many layers, counted from the last, read what an earlier one stored."""
    usual = max(0, counts.model - _GEMMA3N_OWN_LAYERS) if architecture == "gemma3n" else 0
    shared = fields.integer("attention.shared_kv_layers", default=usual, low=0)
    if shared >= counts.model:
        raise fields.wrong("attention.shared_kv_layers", shared, f"a whole number below the {counts.model} layers")
    return shared


def _shared(fields: Fields, kind: SingleKind, earlier: Sequence[LayerKind]) -> SharedCache:
    """A layer that reads the last earlier layer of its own kind."""
    for source in reversed(earlier):
        if type(source) is type(kind) and isinstance(source, FullAttention | SlidingWindow | LatentAttention):
            return SharedCache(source)
    raise BrokenModelError(
        f"{fields.where}: {fields.prefix}attention.shared_kv_layers leaves no layer of kind {kind.kind!r} that a later "
        "one could read; convert the model again"
    )


def _check_tensors(shapes: Shapes, fields: Fields, architecture: str, layers: Sequence[LayerKind]) -> None:
    """Compare the key and value matrices that are in the tensor table with the widths that the keys give."""
    for index, layer in enumerate(layers):
        kind = layer.parts[0] if isinstance(layer, CombinedLayer) else layer
        if not isinstance(kind, FullAttention | SlidingWindow | ChunkedAttention | BlockSparse):
            continue
        for letter, width in (("k", kind.k_width), ("v", kind.v_width)):
            name = f"blk.{index}.attn_{letter}.weight"
            shape, rows = shapes.get(name), kind.num_kv_heads * width
            if shape is None or len(shape) != 2 or shape[0] == rows:
                continue
            fault = f"{fields.where}: tensor {name!r} is {list(shape)}, the metadata says {rows:,} rows"
            if architecture in KNOWN:
                raise BrokenModelError(f"{fault}; convert the model again")
            raise UnknownModelError(f"{fault}: the keys of {architecture} mean something else; {_USE_THE_FOLDER}")


def context_of(fields: Fields) -> int | None:
    """Tokens a sequence may have: as stated, scaling included, but for YaRN switched on by hand."""
    if fields.get("context_length") is None:
        return None
    stated = fields.integer("context_length")
    if fields.text("rope.scaling.type") != "yarn":
        return stated
    factor = fields.number("rope.scaling.factor", "rope.scale_linear", default=1.0, low=-1.0)  # 0: not scaled
    original = fields.integer("rope.scaling.original_context_length", default=stated)
    return int(stated * factor) if original == stated and factor > 1.0 else stated
