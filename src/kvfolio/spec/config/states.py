"""How much a recurrent layer remembers: the numbers of its state and of the short convolution in front of it.

Does not know which layers of a model are recurrent, nor attention: ``layers.py`` asks for one layer.
"""

from collections.abc import Callable
from dataclasses import dataclass

from kvfolio.errors import BrokenModelError, UnknownModelError
from kvfolio.spec.fields import Fields, show
from kvfolio.spec.formats import BF16, COMPUTE_FORMATS, DTYPE_WORDS, F16, F32, Format, format_of_dtype
from kvfolio.spec.layers import RecurrentState


@dataclass(frozen=True, slots=True)
class _State:
    """What a reader found: sizes, and where engines differ. A format that is None is the model's own."""

    mechanism: str
    numbers: int
    conv_channels: int = 0
    conv_columns: int = 0  # of one sequence, as counted
    format: Format | None = None  # where the config does not choose
    config_chooses: bool = False  # whether mamba_ssm_dtype or mamba_ssm_cache_dtype is heeded
    counted_as: str = "vLLM"
    transformers_format: Format | None = F32
    transformers_columns: int | None = None  # None: transformers has no such layer


def state_layer(fields: Fields, model_type: str) -> RecurrentState:
    """The memory of one recurrent layer of the model that ``fields`` describes (its text part), for one sequence.

    The mechanism is that of ``model_type``, or of a field that only one mechanism has (noted). Sizes and formats are
    those of vLLM (``vllm/model_executor/layers/mamba/mamba_utils.py``): the last kernel - 1 inputs of a convolution,
    and a state in the model's own dtype, but in f32 for KDA, Nemotron-H and Qwen3.5. RG-LRU, RWKV, xLSTM and CCA are
    counted as transformers stores them. The convention is noted, with the bytes in that of transformers.

    Raises UnknownModelError for a mechanism or dtype that is not known, BrokenModelError for sizes that are missing
    or contradict one another.
    """
    state = _reader(fields, model_type)(fields, model_type)
    model_format = _model_format(fields)
    chosen = _chosen_format(fields, model_format) if state.config_chooses else None
    layer = RecurrentState(
        state.mechanism,
        state.numbers,
        chosen or state.format or model_format,
        state.conv_channels * state.conv_columns,
        model_format,
    )
    fields.note(_convention(state, layer))
    return layer


# ---- formats --------------------------------------------------------------------------------------------------------


def _model_format(fields: Fields) -> Format:
    """The dtype that the model is served in: its own, or bf16 where that is not a 16-bit float, as in vLLM."""
    name = fields.text("dtype", "torch_dtype")
    if name is None:
        fields.note("dtype is absent: recurrent states counted as those of a bf16 model")
        return BF16
    fmt = format_of_dtype(name)
    if fmt in (BF16, F16):
        return fmt
    fields.note(f"dtype is {name}: recurrent states counted as those of a bf16 model")
    return BF16


def _chosen_format(fields: Fields, model_format: Format) -> Format | None:
    """The state's dtype as the config writes it: a name, or "auto" for the model's own. None: not written."""
    name = fields.text("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
    if name is None:
        return None
    if name == "auto":
        return model_format
    fmt = format_of_dtype(name)
    if fmt is None or fmt.name not in COMPUTE_FORMATS:
        raise UnknownModelError(
            f"{fields.where}: the dtype of recurrent states is {show(name)}; known: auto, {', '.join(DTYPE_WORDS)}"
        )
    return fmt


def _convention(state: _State, layer: RecurrentState) -> str:
    """One line: as whom the layer was counted, its bytes, and what transformers keeps instead."""
    counted = _bytes(layer.state_format, state.numbers, layer.conv_format, layer.conv_numbers)
    how = _how(layer.state_format if state.numbers else None, layer.conv_format, state.conv_columns)
    line = f"a {state.mechanism} layer is counted as {state.counted_as} stores it ({how}): {counted:,} B a sequence"
    if state.counted_as == "transformers" or state.transformers_columns is None:
        return line
    fmt = state.transformers_format or layer.conv_format
    columns = state.transformers_columns
    kept = _bytes(fmt, state.numbers, layer.conv_format, state.conv_channels * columns)
    how = _how(fmt if state.numbers else None, layer.conv_format, columns)
    return f"{line}; transformers keeps " + ("the same" if kept == counted else f"{kept:,} B ({how})")


def _bytes(state_format: Format, numbers: int, conv_format: Format, conv_numbers: int) -> int:
    return state_format.value_bytes * numbers + conv_format.value_bytes * conv_numbers


def _how(state_format: Format | None, conv_format: Format, columns: int) -> str:
    parts = [f"state in {state_format.name}"] if state_format else []
    if columns:
        parts.append(f"{columns} conv columns in {conv_format.name}")
    return ", ".join(parts) or "nothing"


# ---- the mechanisms -------------------------------------------------------------------------------------------------


def _mamba1(fields: Fields, model_type: str) -> _State:
    """Mamba (arXiv 2312.00752): a state of state_size numbers a channel, behind a convolution of every channel.

    Falcon-Mamba writes an expand that its intermediate_size contradicts; the latter is what the network has.
    """
    inner = fields.integer("intermediate_size", default=0) or _expanded(fields, "expand")
    return _mamba1_state(inner, fields.integer("state_size", assume=16), fields.integer("conv_kernel", assume=4))


def _mamba1_hybrid(fields: Fields, model_type: str) -> _State:
    """Jamba and Zamba; intermediate_size is that of their MLPs."""
    inner = _expanded(fields, "mamba_expand")
    return _mamba1_state(inner, fields.integer("mamba_d_state", assume=16), fields.integer("mamba_d_conv", assume=4))


def _mamba1_state(inner: int, state_size: int, kernel: int) -> _State:
    return _State("mamba", inner * state_size, inner, kernel - 1, config_chooses=True, transformers_columns=kernel)


@dataclass(frozen=True, slots=True)
class _Mamba2Sizes:
    inner: int  # heads * head_dim
    groups: int  # of heads that share one B and one C
    state_size: int
    kernel: int


def _mamba2_state(sizes: _Mamba2Sizes, fmt: Format | None = None) -> _State:
    """Mamba-2 (arXiv 2405.21060): state_size numbers a channel; x, B and C all pass through the convolution."""
    channels = sizes.inner + 2 * sizes.groups * sizes.state_size
    numbers = sizes.inner * sizes.state_size
    return _State("mamba2", numbers, channels, sizes.kernel - 1, fmt, True, transformers_columns=sizes.kernel)


def _mamba2(fields: Fields, model_type: str) -> _State:
    """Mamba-2 alone: Codestral-Mamba."""
    inner = _expanded(fields, "expand")
    _check_heads(fields, inner, "num_heads", "head_dim", 128)
    groups, state_size = fields.integer("n_groups", assume=8), fields.integer("state_size", assume=128)
    return _mamba2_state(_Mamba2Sizes(inner, groups, state_size, fields.integer("conv_kernel", assume=4)))


def _mamba2_hybrid(fields: Fields, model_type: str) -> _State:
    """Bamba, Granite 4 and Falcon-H1, whose mamba_d_ssm is the inner width where it is set."""
    inner = fields.integer("mamba_d_ssm", default=0) or _expanded(fields, "mamba_expand")
    _check_heads(fields, inner, "mamba_n_heads", "mamba_d_head", 128)
    groups, state_size = fields.integer("mamba_n_groups", assume=1), fields.integer("mamba_d_state", assume=256)
    return _mamba2_state(_Mamba2Sizes(inner, groups, state_size, fields.integer("mamba_d_conv", assume=4)))


def _zamba2(fields: Fields, model_type: str) -> _State:
    inner = _expanded(fields, "mamba_expand")
    _check_heads(fields, inner, "n_mamba_heads", "mamba_headdim", 8)
    groups, state_size = fields.integer("mamba_ngroups", assume=1), fields.integer("mamba_d_state", assume=64)
    return _mamba2_state(_Mamba2Sizes(inner, groups, state_size, fields.integer("mamba_d_conv", assume=4)))


def _nemotron_h(fields: Fields, model_type: str) -> _State:
    """Nemotron-H: expand is written and not heeded. vLLM keeps the state in f32 where the config does not choose."""
    inner = fields.integer("mamba_num_heads", assume=128) * fields.integer("mamba_head_dim", assume=64)
    groups, state_size = fields.integer("n_groups", assume=8), fields.integer("ssm_state_size", assume=128)
    return _mamba2_state(_Mamba2Sizes(inner, groups, state_size, fields.integer("conv_kernel", assume=4)), F32)


def _plamo2(fields: Fields, model_type: str) -> _State:
    """PLaMo 2: B and C are made behind the convolution, from what it returns. Not in transformers."""
    inner = fields.integer("mamba_num_heads") * fields.integer("hidden_size_per_head")
    columns = fields.integer("mamba_d_conv") - 1
    return _State("mamba2", inner * fields.integer("mamba_d_state"), inner, columns, config_chooses=True)


@dataclass(frozen=True, slots=True)
class _DeltaSizes:
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    kernel: int


def _delta_state(sizes: _DeltaSizes, fmt: Format | None = None) -> _State:
    """Gated delta net (arXiv 2412.06464): a key_dim * value_dim matrix a value head; q, k and v are convolved."""
    channels = 2 * sizes.key_heads * sizes.key_dim + sizes.value_heads * sizes.value_dim
    numbers = sizes.value_heads * sizes.key_dim * sizes.value_dim
    return _State("gated_delta_net", numbers, channels, sizes.kernel - 1, fmt, True, transformers_columns=sizes.kernel)


def _gated_delta_net(fields: Fields, model_type: str) -> _State:
    """Qwen3-Next and Qwen3.5, whose published configs all write mamba_ssm_dtype float32."""
    fields.refuse_if_set("ple_layer_ids", "the convolutions of per-layer embeddings are not counted yet")
    qwen = model_type.startswith("qwen")
    sizes = _DeltaSizes(
        key_heads=fields.integer("linear_num_key_heads", assume=16 if qwen else None),
        key_dim=fields.integer("linear_key_head_dim", assume=128),
        value_heads=fields.integer("linear_num_value_heads", assume=32 if qwen else None),
        value_dim=fields.integer("linear_value_head_dim", assume=128),
        kernel=fields.integer("linear_conv_kernel_dim", assume=4),
    )
    if not model_type.startswith("qwen3_5"):
        return _delta_state(sizes)
    if fields.text("mamba_ssm_cache_dtype", "mamba_ssm_dtype") is None:
        fields.note("mamba_ssm_dtype is absent: float32 assumed, as published Qwen3.5 models have it")
    return _delta_state(sizes, F32)


def _olmo_hybrid(fields: Fields, model_type: str) -> _State:
    """OLMo hybrid: sizes that are null follow from the others."""
    heads = fields.integer("num_attention_heads", assume=30)
    key_heads = fields.integer("linear_num_key_heads", default=heads)
    key_dim = fields.integer("linear_key_head_dim", default=3 * fields.integer("hidden_size") // (4 * key_heads))
    value_heads = fields.integer("linear_num_value_heads", default=heads)
    value_dim = fields.integer("linear_value_head_dim", default=2 * key_dim)
    kernel = fields.integer("linear_conv_kernel_dim", assume=4)
    return _delta_state(_DeltaSizes(key_heads, key_dim, value_heads, value_dim, kernel))


def _kda(fields: Fields, model_type: str) -> _State:
    """Kimi delta attention (arXiv 2510.26692): a head_dim * head_dim matrix a head, always f32; q, k, v convolved."""
    group = fields.child("linear_attn_config")
    if group is not None:  # Kimi-Linear, Kimi-K3
        heads, head_dim = group.integer("num_heads"), group.integer("head_dim")
        return _kda_state(heads, head_dim, group.integer("short_conv_kernel_size", assume=4))
    heads, head_dim = fields.integer("linear_num_heads"), fields.integer("linear_head_dim", assume=128)
    return _kda_state(heads, head_dim, fields.integer("linear_conv_kernel_dim", assume=4))


def _kda_state(heads: int, head_dim: int, kernel: int) -> _State:
    width = heads * head_dim
    return _State("kda", width * head_dim, 3 * width, kernel - 1, F32, transformers_columns=kernel)


def _bailing(fields: Fields, model_type: str) -> _State:
    """One name for two families: Ling and Ring 2.5 have lightning attention, Ling 3 has KDA and fields of its own."""
    if fields.get("linear_num_heads") is not None:  # written by transformers, where head_dim means another width
        return _kda(fields, model_type)
    if not (fields.names("short_conv_kernel_size") or fields.names("kda_lower_bound")):
        return _lightning(fields, model_type)
    heads, head_dim = fields.integer("num_attention_heads"), fields.integer("head_dim", assume=128)
    return _kda_state(heads, head_dim, fields.integer("short_conv_kernel_size", assume=4))


def _lightning(fields: Fields, model_type: str) -> _State:
    """Lightning attention (arXiv 2501.08313): a head_dim * head_dim matrix a head, no convolution."""
    heads = fields.integer("num_attention_heads")
    head_dim = fields.integer("head_dim", default=0) or _divided(fields, fields.integer("hidden_size"), heads)
    columns = 0 if model_type.startswith("minimax") else None
    return _State("lightning", heads * head_dim * head_dim, transformers_format=None, transformers_columns=columns)


def _rg_lru(fields: Fields, model_type: str) -> _State:
    """RG-LRU (arXiv 2402.19427): one number a channel, in f32. vLLM does not run it."""
    width = fields.integer("lru_width", default=0) or fields.integer("hidden_size")
    kernel = fields.integer("conv1d_width", assume=4)
    return _State("rg_lru", width, width, kernel - 1, F32, counted_as="transformers")


def _short_conv(fields: Fields, model_type: str) -> _State:
    """LFM2: a gated convolution is the whole layer; its width is hidden_size, whatever conv_dim says."""
    kernel = fields.integer("conv_L_cache", assume=7 if model_type == "lfm3" else 3)
    return _State("short_conv", 0, fields.integer("hidden_size"), kernel - 1, transformers_columns=kernel)


def _cca(fields: Fields, model_type: str) -> _State:
    """ZAYA's compressed convolutional attention (arXiv 2510.04476): two convolutions of q and k, a delayed half of v.

    This stands beside the keys and values of the same layer.
    """
    kv_width = fields.integer("num_key_value_heads") * fields.integer("head_dim", assume=128)
    channels = kv_width + fields.integer("num_attention_heads") * fields.integer("head_dim", assume=128)
    columns = fields.integer("cca_time0", assume=2) + fields.integer("cca_time1", assume=2) - 2
    return _State("cca", kv_width // 2, channels, columns, counted_as="transformers")


def _rwkv(fields: Fields, model_type: str) -> _State:
    """RWKV-4 (arXiv 2305.13048): numerator, denominator and maximum in f32; the last input of both mixes."""
    hidden = fields.integer("hidden_size")
    return _State("rwkv", 3 * hidden, hidden, 2, F32, counted_as="transformers")


def _xlstm(fields: Fields, model_type: str) -> _State:
    """xLSTM (arXiv 2503.13427): a head keeps a matrix key_dim * value_dim, a normaliser and a maximum."""
    hidden = fields.integer("hidden_size", "embedding_dim")
    heads = fields.integer("num_heads", assume=8)
    key_dim = _rounded_up(hidden * fields.number("qk_dim_factor", assume=0.5)) // heads
    value_dim = _rounded_up(hidden * fields.number("v_dim_factor", assume=1.0)) // heads
    return _State("xlstm", heads * (key_dim * value_dim + key_dim + 1), counted_as="transformers")


# ---- which reader ---------------------------------------------------------------------------------------------------

_Reader = Callable[[Fields, str], _State]

_BY_TYPE: dict[str, _Reader] = {
    "mamba": _mamba1,
    "falcon_mamba": _mamba1,
    "mamba2": _mamba2,
    "jamba": _mamba1_hybrid,
    "zamba": _mamba1_hybrid,
    "zamba2": _zamba2,
    "bamba": _mamba2_hybrid,
    "falcon_h1": _mamba2_hybrid,
    "granitemoehybrid": _mamba2_hybrid,
    "nemotron_h": _nemotron_h,
    "plamo2": _plamo2,
    "lara_mini": _gated_delta_net,
    "olmo_hybrid": _olmo_hybrid,
    "qwen3_next": _gated_delta_net,
    "qwen3_5": _gated_delta_net,
    "qwen3_5_text": _gated_delta_net,
    "qwen3_5_moe": _gated_delta_net,
    "qwen3_5_moe_text": _gated_delta_net,
    "qwen4_exp_text": _gated_delta_net,
    "kimi_linear": _kda,
    "kimi_k3": _kda,
    "glm5_next_text": _kda,
    "bailing_hybrid": _bailing,
    "bailing_moe_linear": _lightning,
    "minimax": _lightning,
    "minimax_text_01": _lightning,
    "minimax_m1": _lightning,
    "recurrent_gemma": _rg_lru,
    "lfm2": _short_conv,
    "lfm2_moe": _short_conv,
    "lfm3": _short_conv,
    "zaya": _cca,
    "rwkv": _rwkv,
    "xlstm": _xlstm,
}
# For other families: a field that only one mechanism has, in the order in which they are looked for.
_TELLING: tuple[tuple[str, _Reader], ...] = (
    ("linear_attn_config", _kda),
    ("linear_num_heads", _kda),
    ("linear_num_value_heads", _gated_delta_net),
    ("mamba_ngroups", _zamba2),
    ("mamba_n_heads", _mamba2_hybrid),
    ("mamba_head_dim", _nemotron_h),
    ("mamba_d_state", _mamba1_hybrid),
    ("lru_width", _rg_lru),
    ("conv_L_cache", _short_conv),
)


def _reader(fields: Fields, model_type: str) -> _Reader:
    if model_type in _BY_TYPE:
        return _BY_TYPE[model_type]
    for name, reader in _TELLING:
        if fields.get(name) is not None:
            fields.note(f"model_type {show(model_type)} is not known: its recurrent layers are read by their {name}")
            return reader
    telling = ", ".join(name for name, _ in _TELLING)
    raise UnknownModelError(
        f"{fields.where}: the recurrent layers of model_type {show(model_type)} are not known; "
        f"known: {', '.join(_BY_TYPE)}, and models with one of the fields {telling}"
    )


def _expanded(fields: Fields, name: str) -> int:
    """The inner width of a Mamba layer: hidden_size times the factor ``name``."""
    return fields.integer("hidden_size") * fields.integer(name, assume=2)


def _check_heads(fields: Fields, inner: int, heads_name: str, width_name: str, assume: int) -> None:
    """Raise BrokenModelError unless heads times head width is the inner width; "auto" or absent: it is."""
    heads = fields.integer(heads_name, assume=assume)
    width = fields.get(width_name)
    width = _divided(fields, inner, heads) if width is None or width == "auto" else fields.integer(width_name)
    if heads * width != inner:
        raise BrokenModelError(
            f"{fields.where}: {heads_name} {heads} times {width_name} {width} is not the inner width {inner} of the "
            "Mamba layers; take a config in which they agree"
        )


def _divided(fields: Fields, whole: int, heads: int) -> int:
    if whole % heads:
        raise BrokenModelError(
            f"{fields.where}: a width of {whole} does not divide into {heads} heads; correct one of them"
        )
    return whole // heads


def _rounded_up(width: float) -> int:
    """To a multiple of 64, in the floating-point steps of the xLSTM code."""
    return int((width + 63) // 64 * 64)
