"""Reads the geometry of one layer's attention: heads, widths of keys and values, latent vectors, index keys, windows.

Knows nothing of which layer it is for: per-layer values are laid over the fields before they come here.
"""

from kvfolio.errors import BrokenModelError, UnknownModelError
from kvfolio.spec.config.words import WINDOW_NAMES
from kvfolio.spec.fields import Fields, show
from kvfolio.spec.layers import LatentAttention

MAX_HEADS = 2**20
MAX_WIDTH = 2**24

HIDDEN_NAMES = ("hidden_size", "n_embd", "d_model", "n_embed", "dim", "model_dim")
_DECODER_LAYERS = ("decoder_layers", "num_decoder_layers", "decoder_num_hidden_layers")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_transformer_layers")
_DECODER_HEADS = ("decoder_attention_heads", "decoder_num_attention_heads", "num_decoder_attention_heads")
_HEADS = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "num_query_heads")
# An encoder-decoder model has numbers for both; the decoder's own come first there.
LAYER_NAMES, DECODER_LAYER_NAMES = (*_LAYERS, *_DECODER_LAYERS), (*_DECODER_LAYERS, *_LAYERS)
HEAD_NAMES, DECODER_HEAD_NAMES = (*_HEADS, *_DECODER_HEADS), (*_DECODER_HEADS, *_HEADS)
KV_HEAD_NAMES: tuple[str, ...] = (
    "num_key_value_heads",
    "n_kv_heads",
    "num_kv_heads",
    "num_attention_groups",
    "n_head_kv",
)
WIDTH_NAMES = ("head_dim", "attention_head_dim", "kv_channels", "d_kv", "d_head", "head_size", "attention_head_size")
# Families whose published heads are of another width than the hidden size divided by their number.
_OWN_WIDTH = ("falcon_h1", "minimax", "qwen3")
# Values that may stand as a list with an entry for each layer.
PER_LAYER_NAMES = ("num_attention_heads", "num_query_heads", "num_key_value_heads", "num_kv_heads", "head_dim")


def hidden_size(fields: Fields) -> int:
    """Width of a token between layers."""
    return fields.integer(*HIDDEN_NAMES, high=MAX_WIDTH)


def num_q_heads(fields: Fields) -> int:
    """Query heads of one layer; in an encoder-decoder model those of the decoder."""
    names = DECODER_HEAD_NAMES if is_encoder_decoder(fields) else HEAD_NAMES
    return fields.integer(*names, high=MAX_HEADS)


def is_encoder_decoder(fields: Fields) -> bool:
    """Whether an encoder's tokens are read beside the text's."""
    return fields.silent("is_encoder_decoder") is True


def num_kv_heads(fields: Fields, q_heads: int) -> int:
    """Heads of keys and values, in every spelling; without any, one for each query head."""
    nested = fields.child("attn_config")
    if nested is not None:  # DBRX and MPT
        fewest = 1 if nested.silent("attn_type") == "multiquery_attention" else q_heads
        has_default = "kv_n_heads" in nested.usual  # DBRX: absent means that, and null nothing
        return nested.integer("kv_n_heads", default=None if has_default else fewest, high=MAX_HEADS)
    if fields.flag("multi_query_attention", False):  # ChatGLM
        return fields.integer("multi_query_group_num", high=MAX_HEADS)
    took_in = fields.usual_of == "falcon" and fields.get("multi_query") is not None  # by transformers: num_kv_heads
    if fields.get("n_head_kv") is not None and not took_in:
        return fields.integer("n_head_kv", high=MAX_HEADS)
    if fields.get("attention_head_type") == "multiquery":  # SantaCoder, under GPT-2's model_type
        return 1
    if _is_old_falcon(fields) and fields.flag("multi_query", False):
        return 1
    if fields.get("multi_query_group_num") is not None and not fields.names("multi_query_attention"):
        fields.note("multi_query_attention is absent: off assumed, and multi_query_group_num is not read")
    names = ("decoder_num_key_value_heads", *KV_HEAD_NAMES) if is_encoder_decoder(fields) else KV_HEAD_NAMES
    if not any(fields.silent(name) is not None for name in names):
        _note_one_each(fields, q_heads, names)
        return q_heads
    return fields.integer(*names, default=q_heads, high=MAX_HEADS)


def _is_old_falcon(fields: Fields) -> bool:
    """Whether the old architecture's flag decides; the new one has num_kv_heads, which the old one does not read."""
    name = "new_decoder_architecture"
    is_new = fields.flag(name, False)
    stated = any(fields.get(other) not in (None, 1) for other in ("num_kv_heads", "n_head_kv"))
    if stated and not fields.names(name) and fields.usual_of == "falcon":
        fields.note(f"{name} is absent: False assumed, the default of model_type falcon; num_kv_heads is not read")
    return not is_new


def _note_one_each(fields: Fields, q_heads: int, names: tuple[str, ...]) -> None:
    """A class without such a field has always one for each query head, which is no assumption."""
    if any(fields.names(name) for name in names):
        return
    name = next((name for name in names if name in fields.usual), None)
    each = f"one for each of the {q_heads} query heads"
    if name is not None:
        fields.note(f"{name} is absent: {each}, as model_type {fields.usual_of} assumes")
    elif not fields.usual:
        fields.note(f"no number of key/value heads ({', '.join(names)}, multi_query): {each} assumed")


def key_width(fields: Fields) -> int:
    """Numbers in one head's key: stated, the class's own, or the hidden size divided by the heads."""
    for name in WIDTH_NAMES:
        if fields.get(name) is not None:
            return fields.integer(name, high=MAX_WIDTH)
    if not any(fields.names(name) for name in WIDTH_NAMES):
        for name in WIDTH_NAMES:
            if name in fields.usual:
                return fields.integer(name, high=MAX_WIDTH)
    heads, hidden = num_q_heads(fields), hidden_size(fields)
    if fields.usual_of in ("zamba", "zamba2"):  # its attention reads the token and the embedding side by side
        hidden = fields.integer("attention_hidden_size", default=2 * hidden, high=MAX_WIDTH)
    if hidden % heads:
        raise BrokenModelError(
            f"{fields.where}: a hidden size of {hidden} does not divide into {heads} heads; "
            "state head_dim or correct one of the two"
        )
    width = hidden // heads
    is_unusual = fields.usual_of.startswith(_OWN_WIDTH) or (width > 128 and width != 256)
    if is_unusual and not any(fields.names(name) for name in WIDTH_NAMES):
        fields.note(f"head_dim is absent: {width} assumed, the hidden size divided by {heads} heads")
    return width


def value_width(fields: Fields, k_width: int) -> int:
    """Numbers in one head's value: as the key's, unless the config states another width."""
    return fields.integer("v_head_dim", default=k_width, low=0, high=MAX_WIDTH) or k_width


def window(fields: Fields) -> int:
    """Tokens of the window, in every spelling; one size for all layers."""
    if fields.get("sliding_window") is None and fields.silent("local_attention") is not None:  # both sides of a token
        return max(1, fields.integer("local_attention") // 2)
    value = fields.get("interleaved_sliding_window") or fields.get("sliding_window")
    if isinstance(value, list):
        if not all(item is None or type(item) is int for item in value):
            raise fields.wrong("sliding_window", value, "a list of whole numbers and null")
        sizes = {item for item in value if item}
        if len(sizes) != 1 or min(sizes) < 1:
            raise UnknownModelError(f"{fields.where}: windows of {show(value)} tokens; known: one size for all layers")
        return int(sizes.pop())
    return fields.integer(*WINDOW_NAMES)


def has_latent(fields: Fields) -> bool:
    """Whether keys and values are projections of one latent vector (MLA); use_mla false switches it off.

    Raises BrokenModelError where the vector has no rank but its key has a rotary part, which only a latent has.
    """
    if not fields.flag("use_mla", True):
        return False
    rank = fields.silent("kv_lora_rank")
    if rank is not None and rank != 0:
        return True
    if fields.get("qk_rope_head_dim"):
        if rank is None:
            raise fields.missing("kv_lora_rank")
        raise fields.wrong("kv_lora_rank", rank, "a whole number from 1, as qk_rope_head_dim is set, too")
    return False


def latent(fields: Fields, has_index: bool) -> LatentAttention:
    """A latent layer; ``has_index``: whether it keeps index keys of its own, where the model has any."""
    rope_width = fields.integer("qk_rope_head_dim", low=0, high=MAX_WIDTH)
    heads = num_q_heads(fields)
    usual_width = hidden_size(fields) // heads
    plain_width = fields.integer("qk_nope_head_dim", default=usual_width, low=0, high=MAX_WIDTH)
    v_width = fields.integer("v_head_dim", default=usual_width, high=MAX_WIDTH)
    index_width, top_k = index_key(fields)
    return LatentAttention(
        rank=fields.integer("kv_lora_rank", high=MAX_WIDTH),
        rope_width=rope_width,
        num_heads=heads,
        expanded_k_width=plain_width + rope_width,
        expanded_v_width=v_width,
        index_width=index_width if has_index else 0,
        top_k=top_k,
    )


def index_key(fields: Fields) -> tuple[int, int | None]:
    """(numbers of one token's index key, tokens it chooses); (0, None) without an index (DeepSeek sparse attention)."""
    if fields.silent("index_topk") is None:
        return 0, None
    pooled = fields.integer("index_kpool", default=1)
    if pooled > 1:
        raise UnknownModelError(
            f"{fields.where}: index_kpool is {pooled:,}: index keys of several tokens are not known; "
            "known: 1; correct the field, or take a model with an index key for each token"
        )
    return fields.integer("index_head_dim", high=MAX_WIDTH), fields.integer("index_topk")


def index_owners(fields: Fields, num_layers: int) -> list[bool]:
    """Which layers compute index keys; the others reuse the choice of the last that does (GLM-5.2)."""
    types = fields.texts("indexer_types")
    pattern = fields.get("index_topk_pattern")
    if types is None and isinstance(pattern, str | list):
        types = tuple({"F": "full", "S": "shared"}.get(item, str(item)) for item in pattern)
    if types is not None:
        if len(types) < num_layers or set(types) - {"full", "shared"}:
            raise fields.wrong("indexer_types", types, f"full or shared for each of the {num_layers} layers")
        return [word == "full" for word in types[:num_layers]]
    if fields.get("index_skip_topk_offset") is not None:
        every = fields.integer("index_topk_freq", assume=1, low=0) or 1
    else:
        every = fields.integer("index_topk_freq", default=1, low=0) or 1
    offset = fields.integer("index_skip_topk_offset", assume=2, low=0) if every > 1 else 0
    return [max(index - offset + 1, 0) % every == 0 for index in range(num_layers)]
