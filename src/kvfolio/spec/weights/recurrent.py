"""Counts the weights of layers with a recurrent state: Mamba, gated delta net, KDA, lightning, RG-LRU, short conv.

Knows nothing of attention or of what the state takes in memory.
"""

from kvfolio.spec.fields import Fields
from kvfolio.spec.layers import RecurrentState
from kvfolio.spec.weights.numbers import Weights
from kvfolio.spec.weights.traits import bare_type

_STATE = ("mamba_d_state", "ssm_state_size", "state_size")
_CONV = ("mamba_d_conv", "conv_kernel", "conv1d_width", "linear_conv_kernel_dim")
_ALONE = ("mamba", "falcon_mamba")  # whose intermediate size is that of the state, whatever ``expand`` says


def recurrent_weights(kind: RecurrentState, fields: Fields, hidden: int, heads: int) -> Weights:
    """Weights of one such layer without its norm. ``heads``: those of the model's attention."""
    count = {
        "mamba": _mamba,
        "mamba2": _mamba2,
        "gated_delta_net": _gated_delta_net,
        "kda": _kda,
        "rg_lru": _rg_lru,
        "rwkv": _rwkv,
        "short_conv": _short_conv,
    }.get(kind.mechanism)
    if count is not None:
        return count(fields, hidden)
    if kind.mechanism == "lightning":
        return _lightning(fields, hidden, heads)
    fields.note(f"the weights of {kind.mechanism} layers are not counted: their matrices are not known")
    return Weights()


def _size(fields: Fields, *names: str) -> int | None:
    """A whole number; None where it is absent or left to the class ("auto")."""
    for name in names:
        value = fields.get(name)
        if value is not None and value != "auto":
            return fields.integer(name)
    return None


def _mamba(fields: Fields, hidden: int) -> Weights:
    """Mamba (arXiv 2312.00752): input and output, the projections of the step and of B and C, and A, D."""
    own = ("intermediate_size",) if bare_type(fields.text("model_type") or "") in _ALONE else ("mamba_d_inner",)
    inner = _size(fields, *own) or fields.integer("mamba_expand", "expand", default=2) * hidden
    state = fields.integer(*_STATE, default=16)
    rank = _size(fields, "mamba_dt_rank", "time_step_rank") or -(-hidden // 16)
    kernel = fields.integer(*_CONV, default=4)
    matrices = hidden * 2 * inner + inner * (rank + 2 * state) + rank * inner + inner * hidden
    norms = rank + 2 * state if fields.text("model_type") == "jamba" else 0
    return Weights(matrices, inner * (kernel + state + 3) + norms)


def _mamba2(fields: Fields, hidden: int) -> Weights:
    """Mamba-2 (arXiv 2405.21060): one projection for gate, input, B, C and step; a norm before the output."""
    heads = _size(fields, "mamba_n_heads", "mamba_num_heads", "num_heads", "n_mamba_heads")
    inner = _size(fields, "mamba_d_ssm", "mamba_d_inner")
    width = _size(fields, "mamba_d_head", "mamba_head_dim", "mamba_headdim")
    if width is None and inner is None:
        width = _size(fields, "head_dim") if fields.text("model_type") == "mamba2" else None
    expanded = fields.integer("mamba_expand", "expand", default=2) * hidden
    if inner is None:
        inner = heads * width if heads and width else expanded
    heads = heads or inner // (width or 64)
    groups = fields.integer("mamba_n_groups", "n_groups", "mamba_ngroups", default=1)
    state = fields.integer(*_STATE, default=128)
    kernel = fields.integer(*_CONV, default=4)
    mixed = inner + 2 * groups * state
    norm = inner * fields.flag("mamba_rms_norm", True)
    return Weights(hidden * (inner + mixed + heads) + inner * hidden, mixed * (kernel + 1) + norm + 3 * heads)


def _gated_delta_net(fields: Fields, hidden: int) -> Weights:
    """Gated delta net (arXiv 2412.06464): queries, keys, values, output gate, and two numbers a head."""
    heads = fields.integer("linear_num_value_heads")
    width = fields.integer("linear_value_head_dim")
    key, value = fields.integer("linear_num_key_heads") * fields.integer("linear_key_head_dim"), heads * width
    kernel = fields.integer(*_CONV, default=4)
    matrices = hidden * (2 * key + 2 * value + 2 * heads) + value * hidden
    return Weights(matrices, (2 * key + value) * kernel + width + 2 * heads)


def _kda(fields: Fields, hidden: int) -> Weights:
    """Kimi delta attention (arXiv 2510.26692): a decay for every channel in low rank, an output gate in low or full."""
    linear = fields.child("linear_attn_config")
    if linear is not None:
        heads, width = linear.integer("num_heads"), linear.integer("head_dim")
        kernel, full = linear.integer("short_conv_kernel_size", default=4), linear.flag("use_full_rank_gate", False)
    else:
        heads = fields.integer("linear_num_heads", "num_attention_heads")
        width = fields.integer("linear_head_dim", "head_dim", default=128)
        kernel, full = fields.integer("linear_conv_kernel_dim", "short_conv_kernel_size", default=4), False
    inner = heads * width
    low = width * (hidden + inner)
    gate = hidden * inner if full else low
    matrices = 4 * hidden * inner + low + gate + hidden * heads
    return Weights(matrices, 3 * inner * kernel + inner + heads + width)


def _lightning(fields: Fields, hidden: int, heads: int) -> Weights:
    """Lightning attention of MiniMax-01 (arXiv 2501.08313): queries, keys, values, output, output gate."""
    inner = heads * fields.integer("head_dim", default=hidden // heads)
    return Weights(5 * hidden * inner, inner)


def _rg_lru(fields: Fields, hidden: int) -> Weights:
    """RG-LRU of Griffin (arXiv 2402.19427): two ways in, one out, and two gates that are block-diagonal by heads."""
    width = fields.integer("lru_width", default=hidden)
    gates = 2 * width * (width // fields.integer("num_attention_heads"))
    kernel = fields.integer(*_CONV, default=4)
    return Weights(3 * hidden * width, gates + width * (kernel + 1) + 2 * width + width + 2 * width + hidden)


def _rwkv(fields: Fields, hidden: int) -> Weights:
    """RWKV-4 (arXiv 2305.13048): time mixing in four matrices, channel mixing in three."""
    inner = fields.integer("attention_hidden_size", default=hidden)
    wide = fields.integer("intermediate_size", default=4 * hidden)
    return Weights(4 * hidden * inner + 2 * hidden * wide + hidden * hidden, 2 * inner + 5 * hidden)


def _short_conv(fields: Fields, hidden: int) -> Weights:
    """The gated short convolution of LFM2."""
    return Weights(4 * hidden * hidden, hidden * fields.integer("conv_L_cache", default=3))
