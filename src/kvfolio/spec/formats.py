"""Storage formats: how many bytes one stored vector takes, scales included.

Knows nothing of layers or tensors; the encoders and decoders live in ``kernels``. ``FORMATS`` are those that the
engine stores; ``plan`` counts more of them (``parse_format``).
"""

import re
from dataclasses import dataclass

from kvfolio.errors import UnknownModelError


@dataclass(frozen=True, slots=True)
class Format:
    """How one vector (one token's key or value of one head) is stored."""

    name: str
    bits: int  # of one stored number
    scale_bytes: int  # of one scale; 0: no scales, plain numbers
    group: int = 0  # numbers that share one scale; 0: the whole vector

    def vector_bytes(self, width: int) -> int:
        """Bytes of one stored vector of ``width`` numbers, its scales included, rounded up."""
        scales = -(-width // self.group) if self.group else int(width > 0)
        return -(-width * self.bits // 8) + scales * self.scale_bytes

    @property
    def value_bytes(self) -> int:
        """Bytes of one stored number, in a format of whole bytes."""
        return self.bits // 8

    @property
    def is_float(self) -> bool:
        """Whether values are stored as plain floats (such a format can be a compute dtype, too)."""
        return self.scale_bytes == 0 and self.bits >= 16


F32 = Format("f32", 32, 0)
BF16 = Format("bf16", 16, 0)
F16 = Format("f16", 16, 0)
INT8 = Format("int8", 8, 4)  # one f32 scale a token and head: value = code * scale, codes -127…127

FORMATS = {fmt.name: fmt for fmt in (F32, BF16, F16, INT8)}

F64 = Format("f64", 64, 0)  # of published weights and measured states; no cache is planned in it
# One scale for a whole tensor or layer, as vLLM and SGLang keep fp8 by default: no bytes beside a vector.
FP8 = Format("fp8", 8, 0)
_PLANNED = FORMATS | {
    "fp8": FP8,
    "fp8-scaled": Format("fp8-scaled", 8, 4),  # one f32 scale a token and head
    "int6": Format("int6", 6, 4),
    "int4": Format("int4", 4, 4),
}
_GROUPED = re.compile(r"(fp8|int8|int6|int4)-g(0|[1-9][0-9]{0,3})")
_SHORT = re.compile(r"k(16|8|6|4)v(16|8|6|4)")
_SHORT_NAMES = {"16": "bf16", "8": "int8", "6": "int6", "4": "int4"}
# What engines call the same: llama.cpp's blocks of 32 numbers and one f16 scale; fp8 without scales of its own.
_ENGINES_NAMES = {
    "q8_0": "int8-g32",
    "q4_0": "int4-g32",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "bfloat16": "bf16",
    "float16": "f16",
}
_DTYPES = {
    "float32": F32,
    "bfloat16": BF16,
    "float16": F16,
    "float": F32,
    "half": F16,
    "float64": F64,
    "double": F64,
    "float8_e4m3fn": FP8,
    "float8_e5m2": FP8,
}
DTYPE_WORDS = tuple(word for word, fmt in _DTYPES.items() if fmt.name in FORMATS)
"""Dtypes as configs write them, of the formats that the engine stores."""
# vLLM's and SGLang's fp8_ds_mla: the latent in fp8 with one f32 scale for 128 numbers, the rotary key exact. 656 B a
# token for DeepSeek's 512 + 64; the index key of V3.2 takes 128 + 4.
_LATENT_FP8 = "fp8-mla"


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """The formats of one cache: keys and values may differ."""

    k: Format  # of latent vectors and index keys, too
    v: Format
    rope: Format | None = None  # of the rotary key of a latent layer; None: one vector with the latent

    @property
    def name(self) -> str:
        if self.rope is not None:
            return _LATENT_FP8
        return self.k.name if self.k == self.v else f"{self.k.name}/{self.v.name}"


def find_format(name: str) -> Format:
    """The format called ``name`` that the engine stores; raises UnknownModelError that lists the known ones."""
    if name not in FORMATS:
        raise UnknownModelError(f"unknown format {name!r}; known: {', '.join(FORMATS)}")
    return FORMATS[name]


def find_cache_format(name: str) -> CacheFormat:
    """The cache format called ``name``: one format for both (``int8``) or ``keys/values`` (``bf16/int8``)."""
    k_name, slash, v_name = name.partition("/")
    return CacheFormat(find_format(k_name), find_format(v_name if slash else k_name))


def format_of_dtype(word: str) -> Format | None:
    """The format of numbers whose dtype configs and torch call ``word``, with or without ``torch.``; None: not known.

    Weights have more dtypes than caches: the format may be none of ``FORMATS`` (float64, float8).
    """
    return _DTYPES.get(word.removeprefix("torch."))


def parse_format(name: str) -> Format:
    """The format called ``name`` that can be counted: those the engine stores, fp8, int6, int4 and groups.

    ``int4-g64`` has one f16 scale for 64 numbers, ``int4-g0`` none at all: the bare numbers, a lower bound.
    """
    name = _ENGINES_NAMES.get(name, name)
    if name in _PLANNED:
        return _PLANNED[name]
    match = _GROUPED.fullmatch(name)
    if match is None:
        raise UnknownModelError(
            f"unknown format {name!r}; known: {', '.join(_PLANNED)}, and fp8, int8, int6 or int4 with -g and the "
            "numbers that share one f16 scale (int4-g64; -g0: no scales)"
        )
    code, group = match[1], int(match[2])
    return Format(name, int(code.lstrip("fpint")), 2 if group else 0, group)


def parse_cache_format(name: str) -> CacheFormat:
    """The cache format called ``name`` that can be counted.

    One format for both, ``keys/values``, the short ``k8v4`` (int8 keys, int4 values) or ``fp8-mla``.
    """
    if name in (_LATENT_FP8, "fp8_ds_mla"):
        fp8 = Format("fp8-g128", 8, 4, 128)
        return CacheFormat(fp8, fp8, BF16)
    short = _SHORT.fullmatch(name)
    if short is not None:
        return CacheFormat(parse_format(_SHORT_NAMES[short[1]]), parse_format(_SHORT_NAMES[short[2]]))
    k_name, slash, v_name = name.partition("/")
    return CacheFormat(parse_format(k_name), parse_format(v_name if slash else k_name))
