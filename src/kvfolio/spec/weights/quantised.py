"""Bytes of a checkpoint as published: quantised matrices at their packed width with scales, all else at the dtype.

Knows nothing of layers' kinds, and opens no file. A method that is not known is noted and counted at the dtype.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from math import ceil

from kvfolio.spec.fields import Fields, show
from kvfolio.spec.formats import format_of_dtype
from kvfolio.spec.weights.numbers import Weights

_LISTS = ("modules_to_not_convert", "ignore", "exclude_modules", "ignored_layers", "llm_int8_skip_modules")
_PIECES = ("mixer", "dense", "shared", "routed")
_EVERYWHERE = -1  # stands for every layer
_MATRICES_OF_MIXER, _MATRICES_OF_FEED_FORWARD = 4, 3
_LAYER = re.compile(r"(?:layers|blocks|h)\.(\d+)(.*)")
_MATRIX = re.compile(r"([a-z0-9]+_)*(proj|fc1|fc2|wqkv|w1|w2|w3)\b")


@dataclass(frozen=True, slots=True)
class LayerPieces:
    """The weights of one layer, by what a quantiser treats alike."""

    mixer: Weights
    dense: Weights
    shared: Weights
    routed: Weights

    @property
    def total(self) -> int:
        return self.mixer.total + self.dense.total + self.shared.total + self.routed.total


Packing = Mapping[str, Fraction]
"""Bits of one number in the packed matrices of a piece, its share of the scales included. No entry: not packed."""


def published_bytes(pieces: tuple[LayerPieces, ...], rest: int, fields: Fields, root: Fields) -> tuple[int, int]:
    """Bytes of all ``pieces`` and of ``rest`` further numbers; and, of these bytes, those of all routed experts.

    No quantiser packs the rest: embeddings, norms, towers.
    """
    value_bytes = _value_bytes(fields, root)
    routed = sum(piece.routed.total for piece in pieces)
    plain = rest + sum(piece.total for piece in pieces)
    config = _quantisation(fields, root)
    packing = _find_packing(config, fields) if config is not None else None
    if config is None or packing is None:
        return plain * value_bytes, routed * value_bytes
    left_out = _left_out(config)
    saved = {name: _packed(pieces, name, left_out) * (value_bytes - bits / 8) for name, bits in packing.items()}
    expert_bytes = ceil(routed * value_bytes - saved.get("routed", Fraction(0)))
    return plain * value_bytes - int(sum(saved.values())), expert_bytes


def _packed(pieces: tuple[LayerPieces, ...], name: str, left_out: dict[tuple[str, int], set[str]]) -> Fraction:
    """Numbers in packed matrices of one piece of all layers."""
    everywhere = left_out.get((name, _EVERYWHERE), set())
    packed = Fraction(0)
    for index, piece in enumerate(pieces):
        weights: Weights = getattr(piece, name)
        names = everywhere | left_out.get((name, index), set())
        if not names:
            packed += weights.matrices
        elif "" not in names:  # single matrices are named: which share they have is not looked up
            matrices = _MATRICES_OF_MIXER if name == "mixer" else _MATRICES_OF_FEED_FORWARD
            packed += weights.matrices * Fraction(max(0, matrices - len(names)), matrices)
    return packed


def _value_bytes(fields: Fields, root: Fields) -> int:
    name = fields.text("dtype", "torch_dtype") or root.text("dtype", "torch_dtype")
    if name is None:
        fields.note("dtype is absent: bfloat16 assumed")
        return 2
    fmt = format_of_dtype(name)
    if fmt is None:
        fields.note(f"dtype is {show(name)}: weights counted at 2 bytes a number")
        return 2
    return fmt.value_bytes


def _quantisation(fields: Fields, root: Fields) -> Fields | None:
    for source in (root, fields):
        for name in ("quantization_config", "quantization", "compression_config"):
            if isinstance(source.get(name), dict):
                return source.child(name)
    return None


# ---- how wide -------------------------------------------------------------------------------------------------------


def _find_packing(config: Fields, fields: Fields) -> Packing | None:
    """The packing that ``config`` names; None, noted, for methods that are not known."""
    method = (config.text("quant_method") or ("modelopt" if config.get("quant_algo") else "")).lower()
    reader = _METHODS.get(method.replace("_", "-"))
    bits = reader(config) if reader is not None else None
    if bits is None:
        named = f"by {method}" if method else "whose quant_method is absent"
        fields.note(f"the quantisation {named} is not known (quantization_config): weights counted at their dtype")
        return None
    if method == "mxfp4":
        return {"routed": bits}
    packing = _by_target(config) or dict.fromkeys(_PIECES, bits)
    if fields.get("expert_dtype") == "fp4":  # DeepSeek-V4: a scale of one byte for 32 numbers
        packing["routed"] = Fraction(4) + Fraction(8, 32)
    elif fields.usual_of == "deepseek_v4" and not fields.names("expert_dtype"):
        fields.note("expert_dtype is absent: experts counted at the width of the other matrices")
    return packing


def _fp8(config: Fields) -> Fraction:
    """One byte, and one scale for a block where there are blocks (arXiv 2412.19437, section 3.3)."""
    block = config.get("weight_block_size")
    if block is None:
        return Fraction(8)
    if not isinstance(block, list) or len(block) != 2 or not all(type(side) is int and side > 0 for side in block):
        raise config.wrong("weight_block_size", block, "a list of two whole numbers from 1, or null")
    scale = 8 if config.get("scale_fmt") == "ue8m0" else 32
    return 8 + Fraction(scale, block[0] * block[1])


def _grouped(config: Fields) -> Fraction:
    """AWQ, GPTQ and HQQ: integers with a 16-bit scale and a zero point for a group."""
    inner = config.child("weight_quant_params") or config.child("quant_config") or config
    inner = inner.child("weight_quant_params") or inner
    bits = inner.integer("bits", "w_bit", "nbits", high=16, default=4)
    group = inner.integer("group_size", "q_group_size", default=128, low=-1)
    return bits + Fraction(16 + bits, group) if group > 0 else Fraction(bits)


def _bitsandbytes(config: Fields) -> Fraction:
    """8 bits, or 4 with a scale for 64 numbers, itself in 8 bits when quantised twice (arXiv 2305.14314)."""
    if not (config.flag("load_in_4bit", False) or config.flag("_load_in_4bit", False)):
        return Fraction(8)
    twice = config.flag("bnb_4bit_use_double_quant", False)
    return Fraction(4) + (Fraction(8, 64) + Fraction(32, 64 * 256) if twice else Fraction(32, 64))


def _compressed_tensors(config: Fields) -> Fraction | None:
    """compressed-tensors: the width and group of the first group of layers."""
    groups = config.child("config_groups")
    if not config.names("ignore"):
        config.note("ignore is absent: no matrix is left out of the quantisation")
    first = next((groups.child(name) for name in groups.values), None) if groups is not None else None
    if first is None:
        config.note("config_groups is absent or empty: the widths of the quantised weights are not known")
        return None
    return _group_bits(first, config)


def _group_bits(group: Fields, config: Fields) -> Fraction | None:
    weights = group.child("weights")
    if weights is None:
        return None
    bits = weights.integer("num_bits", high=16)
    size = weights.integer("group_size", default=0, low=-1)
    if size <= 0:
        if weights.get("strategy") in ("group", "tensor_group"):
            raise weights.missing("group_size")
        if not weights.names("group_size"):
            weights.note("group_size is absent: quantised weights without scales for groups assumed")
        return Fraction(bits)
    fmt = group.text("format") or config.text("format") or ""
    if bits == 4 and not fmt and weights.get("type") is None:
        weights.note("type is absent: quantised weights of 4 bits are taken to be integers")
    small = bits == 4 and (weights.get("type") == "float" or "fp4" in fmt)
    scale = Fraction(8 if small else 16, size)
    return bits + scale + (0 if weights.flag("symmetric", True) else Fraction(bits, size))


def _by_target(config: Fields) -> dict[str, Fraction]:
    """The bits of each piece where every group has targets: the first that names a piece, else that of all matrices."""
    groups = config.child("config_groups")
    named: dict[str, Fraction] = {}
    usual: Fraction | None = None
    for name in groups.values if groups is not None else ():
        group = groups.child(name) if groups is not None else None
        bits = _group_bits(group, config) if group is not None else None
        if group is None or bits is None:
            continue
        for target in group.texts("targets") or ("Linear",):
            index, rest = _layer_of(target)
            if index != _EVERYWHERE:
                config.note("config_groups names single layers: all are counted at the width of the other targets")
            elif target.isidentifier() or not rest.strip(".*$^"):  # the class of a module, or any name
                usual = usual or bits
            else:
                for piece, _ in _pieces_of(rest, whole_layer=False):
                    named.setdefault(piece, bits)
    return named if usual is None else dict.fromkeys(_PIECES, usual) | named


def _modelopt(config: Fields) -> Fraction | None:
    if config.child("config_groups") is not None:
        return _compressed_tensors(config)
    inner = config.child("quantization") or config
    name = (inner.text("quant_algo") or "").upper()
    if "NVFP4" in name:
        return Fraction(4) + Fraction(8, 16)
    if name.startswith("W4"):
        return 4 + Fraction(16, inner.integer("group_size", default=128))
    return Fraction(8) if name.startswith(("FP8", "W8", "INT8")) else None


def _quanto(config: Fields) -> Fraction | None:
    digits = re.search(r"\d{1,3}", config.text("weights") or "")
    return Fraction(int(digits[0])) if digits and 0 < int(digits[0]) <= 16 else None


_METHODS: dict[str, Callable[[Fields], Fraction | None]] = {
    "fp8": _fp8,
    "fbgemm-fp8": _fp8,
    "awq": _grouped,
    "gptq": _grouped,
    "gptq-marlin": _grouped,
    "auto-round": _grouped,
    "hqq": _grouped,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "modelopt-fp4": _modelopt,
    "mxfp4": lambda config: Fraction(4) + Fraction(8, 32),  # OCP microscaling: a scale of one byte for 32 numbers
    "quanto": _quanto,
    "eetq": lambda config: Fraction(8),
    "bitnet": lambda config: Fraction(2),
}


# ---- what is left out -----------------------------------------------------------------------------------------------


def _left_out(config: Fields) -> dict[tuple[str, int], set[str]]:
    """What the config leaves unpacked: (piece, layer) → names of matrices, "" for all of them."""
    known: dict[tuple[str, bool], tuple[tuple[str, str], ...]] = {}
    found: dict[tuple[str, int], set[str]] = {}
    for entry in _entries(config):
        index, rest = _layer_of(entry)
        key = (rest, index != _EVERYWHERE)
        if key not in known:
            known[key] = tuple(_pieces_of(rest, whole_layer=key[1]))
        for piece, matrix in known[key]:
            found.setdefault((piece, index), set()).add(matrix)
    return found


def _entries(config: Fields) -> Iterator[str]:
    for source in (config, config.child("quantization")):
        for name in _LISTS if source is not None else ():
            value = source.get(name) if source is not None else None
            if isinstance(value, list):
                yield from (item for item in value if isinstance(item, str))


def _layer_of(entry: str) -> tuple[int, str]:
    """The layer that an entry names, or all of them, and what stands behind."""
    text = entry.removeprefix("re:").replace("\\", "")
    match = _LAYER.search(text)
    return (int(match[1]), match[2]) if match else (_EVERYWHERE, text)


def _pieces_of(text: str, whole_layer: bool) -> Iterator[tuple[str, str]]:
    """The pieces that an entry names, each with the name of one matrix or "" for all of them."""
    bare = text.strip(".*$^")
    if not bare:
        if whole_layer:
            yield from ((piece, "") for piece in _PIECES)
        return
    if re.search(r"(^|\.)(gate|router|lm_head|embed_tokens)$", bare) or re.search("vision|visual|audio|embed", bare):
        return
    match = None if "(" in bare else _MATRIX.search(bare)
    matrix = match[0] if match else ""
    if "shared_expert" in bare:
        yield "shared", matrix
    elif "experts" in bare:
        yield "routed", matrix
    elif re.search(r"attn|attention|mixer|mamba|\b[qkvo]_proj|qkv", bare):
        yield "mixer", matrix
    elif re.search(r"mlp|feed_forward|ffn|moe", bare):
        for piece in ("dense",) if "proj" in bare or matrix else ("dense", "shared", "routed"):
            yield piece, matrix
