"""Counts what stands beside the layers that generate text: encoders, vision and audio towers, and their projectors.

Knows nothing of the decoder. Towers are counted as transformers of the sizes that their config gives; a tower whose
config gives none is noted as not counted.
"""

from kvfolio.errors import BrokenModelError
from kvfolio.spec.config.class_defaults import find_class_defaults
from kvfolio.spec.fields import Fields

_WIDTH = ("embed_dim", "width", "vt_hidden_size", "d_model", "hidden_size")
_DEPTH = ("depth", "num_hidden_layers", "layers", "vt_num_hidden_layers", "encoder_layers", "conf_num_hidden_layers")
_INNER = ("intermediate_size", "vt_intermediate_size", "encoder_ffn_dim")
_GATED = ("gemma4", "qwen2_5_vl", "qwen2_5_omni_vision", "pixtral", "glm_ocr", "ernie4_5_vl")
# With the feed-forward that each has where the config is silent.
T5_TYPES = {"t5": "relu", "longt5": "relu", "mt5": "gated-gelu", "umt5": "gated-gelu", "switch_transformers": "relu"}
_TOWERS = ("vision_config", "audio_config", "speech_config", "vision_tower_config")
# Towers that every published model of a type has: the published count of E4B less its text half.
_USUAL_TOWERS = {"gemma3n": 1_014_742_624}
_MOBILENET_V5 = 294_000_000  # rounded


def tower_weights(root: Fields, hidden: int) -> int:
    """Numbers of all towers of ``root`` and of the projectors into ``hidden``, the width of the text layers."""
    total, found = 0, False
    outer = root.child("thinker_config") or root  # Qwen-Omni
    for name in _TOWERS:
        tower = outer.child(name)
        if tower is None:
            continue
        found = True
        try:
            total += _tower(tower, name, outer, hidden)
        except BrokenModelError as error:  # sizes of a kind that is not known, such as one a stage
            root.note(f"the weights of a tower are not counted ({error})")
    usual = _USUAL_TOWERS.get(root.text("model_type") or "")
    if not found and usual:
        root.note(f"the config describes no tower: {usual:,} weights assumed, those that model_type gives it")
        return usual
    known = find_class_defaults(root.text("model_type") or "")
    if not found and ((known is not None and known.text is not None) or outer.child("text_config") is not None):
        root.note(
            "the config describes no vision or audio tower (vision_config, audio_config): "
            "if the model has one, its weights are not counted"
        )
    return total


def encoder_weights(root: Fields, model_type: str) -> int:
    """Numbers of the encoder of an encoder-decoder: T5, BART, Whisper and their kin, or a config of its own.

    One whose sizes are not found is noted.
    """
    try:
        return _encoder(root, model_type)
    except BrokenModelError as error:
        root.note(f"the weights of the encoder are not counted ({error})")
        return 0


def _encoder(root: Fields, model_type: str) -> int:
    encoder = root.child("encoder")
    if encoder is not None:
        text = encoder.child("text_config") or encoder
        if not model_type.startswith("t5gemma2"):
            return _own_encoder(text) + text.integer("vocab_size") * text.integer("hidden_size")
        tower = encoder.child("vision_config")  # and the table of tokens is the decoder's
        seen = _tower(tower, "vision_config", root, text.integer("hidden_size")) if tower is not None else 0
        return _own_encoder(text) + seen
    hidden = root.integer("d_model", "hidden_size")
    if model_type in T5_TYPES:
        inner = root.integer("num_heads", "num_attention_heads") * root.integer("d_kv", default=64)
        ways_in = 2 if "gated" in (root.text("feed_forward_proj") or T5_TYPES[model_type]) else 1
        wide = (ways_in + 1) * hidden * root.integer("d_ff")
        layers = root.integer("num_layers", "num_hidden_layers")
        return layers * (4 * hidden * inner + wide + 2 * hidden) + hidden + _more_experts(root, layers, hidden, wide)
    inner = 4 * hidden if root.get("encoder_ffn_dim") is None else root.integer("encoder_ffn_dim")
    layer = 4 * hidden * hidden + 2 * hidden * inner + inner + 9 * hidden
    layers = root.integer("encoder_layers", "num_hidden_layers")
    total = layers * layer + 2 * hidden + _more_experts(root, layers, hidden, 2 * hidden * inner + inner + hidden)
    if model_type == "whisper":
        mel, kernel = root.integer("num_mel_bins", default=80), 3
        convolutions = hidden * kernel * (mel + hidden) + 2 * hidden
        keys = root.integer("encoder_layers") * hidden  # they have no bias
        return total + convolutions - keys + root.integer("max_source_positions", default=1500) * hidden
    return total + root.integer("max_position_embeddings", default=0, low=0) * hidden


def _more_experts(root: Fields, layers: int, hidden: int, wide: int) -> int:
    """Numbers that experts add to an encoder whose feed-forwards have ``wide`` numbers each (Switch, NLLB)."""
    step = root.integer("encoder_sparse_step", default=0, low=0)
    count = root.integer("num_experts", default=1)
    return layers // step * ((count - 1) * wide + count * hidden) if step else 0


def _own_encoder(encoder: Fields) -> int:
    """T5Gemma: the layers of a Gemma, in both directions."""
    hidden, layers = encoder.integer("hidden_size"), encoder.integer("num_hidden_layers")
    heads, width = encoder.integer("num_attention_heads"), encoder.integer("head_dim")
    attention = 2 * hidden * width * (heads + encoder.integer("num_key_value_heads", default=heads))
    feed_forward = 3 * hidden * encoder.integer("intermediate_size")
    return layers * (attention + feed_forward + 4 * hidden) + hidden


def _tower(tower: Fields, name: str, root: Fields, hidden: int) -> int:
    whole = root.text("model_type") or ""
    if whole == "qwen2_vl":  # hidden_size is the width of the text there
        width = tower.integer("embed_dim", assume=1280)
    else:
        width = tower.integer(*_WIDTH, default=0, low=0)
    depth = tower.integer(*_DEPTH, default=0, low=0)
    if (tower.text("architecture") or "").startswith("mobilenetv5_300m"):  # Gemma 3n; a convolutional network
        return _MOBILENET_V5 + width * hidden
    if not width or not depth:
        lacking = "depth (num_hidden_layers or depth)" if width else "width (hidden_size or embed_dim)"
        root.note(f"{name} gives no {lacking}: the weights of that tower are not counted")
        return 0
    more = 0 if whole != "mllama" else None
    depth += tower.integer("num_global_layers", default=more, assume=8, low=0)
    ratio = tower.number("mlp_ratio", default=4.0)
    inner = tower.integer(*_INNER, default=int(ratio * width))
    kind = tower.text("model_type") or root.text("model_type") or ""
    if "gemma" in kind and "audio" in kind:  # conformer layers: two feed-forwards, attention, a gated convolution
        return depth * (16 + 5 + 3) * width * width + width * hidden
    if kind.startswith("glm4v"):  # the intermediate size is that of the merger
        out = tower.integer("out_hidden_size", default=hidden)
        merger = out * out + 3 * out * inner + 4 * width * out
        return depth * (4 * width * width + 3 * width * out + 2 * width) + _embeddings(tower, width) + merger
    attention = tower.integer("qkv_hidden_size", default=width)
    gated = kind.startswith(_GATED)
    layer = 4 * width * attention + (3 if gated else 2) * width * inner
    layer += 4 * width if gated else 9 * width + inner
    return depth * layer + _embeddings(tower, width) + _projector(tower, root, kind, width, hidden)


def _embeddings(tower: Fields, width: int) -> int:
    """Patches (or sound frames) in, and learned positions."""
    mels = tower.integer("num_mel_bins", default=0, low=0)
    if mels:
        return 3 * width * (mels + width) + tower.integer("max_source_positions", default=1500) * width
    patch = tower.get("patch_size") or tower.get("spatial_patch_size") or 14
    side = patch if isinstance(patch, int) else 14
    channels = tower.integer("in_channels", "in_chans", "num_channels", default=3)
    pixels = channels * side * side * tower.integer("temporal_patch_size", default=1)
    table = 2 * tower.integer("position_embedding_size", default=0, low=0)
    image = tower.get("image_size")
    grid = (image // side) ** 2 if isinstance(image, int) else 0
    rows, columns = tower.integer("init_pos_emb_height", default=0), tower.integer("init_pos_emb_width", default=0)
    positions = tower.integer("num_position_embeddings", default=table or rows * columns or grid, low=0)
    tiles = tower.integer("max_num_tiles", default=0, low=0)
    if tiles:  # Llama 3.2: a position for every patch of every tile, for every shape of tiles
        shapes = 1 + sum(1 for across in range(1, tiles + 1) for down in range(1, tiles + 1) if across * down <= tiles)
        positions += shapes * tiles * (grid + 1) + 2 * shapes * tiles
    return (pixels + positions) * width


def _projector(tower: Fields, root: Fields, kind: str, width: int, hidden: int) -> int:
    """From the tower's width to that of the text layers."""
    merge = tower.get("spatial_merge_size")
    kernel = tower.get("merge_kernel_size")
    if isinstance(kernel, list) and kernel and isinstance(kernel[0], int):
        merge = kernel[0]
    if isinstance(merge, int) and merge >= 1:
        merged = merge * merge * width
        out = tower.integer("out_hidden_size", "text_hidden_size", default=hidden)
        deep = tower.get("deepstack_visual_indexes")
        times = 1 + (len(deep) if isinstance(deep, list) else 0)
        return times * merged * (merged + out)
    if kind.startswith(("siglip", "gemma")) and (root.text("model_type") or "").startswith(("gemma", "paligemma")):
        return width * hidden
    if kind.startswith("mllama"):
        return tower.integer("vision_output_dim", default=6 * width) * hidden
    if kind.startswith("llama4"):
        middle = tower.integer("projector_input_dim", default=4096)
        out = tower.integer("vision_output_dim", default=4096)
        shuffled = int(width / tower.number("pixel_shuffle_ratio", default=0.5) ** 2)
        return shuffled * middle + middle * tower.integer("projector_output_dim", default=4096) + out * hidden
    root.note("a tower is counted as a transformer of the sizes that its config gives, with two matrices behind it")
    return width * hidden + hidden * hidden
