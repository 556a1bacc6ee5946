"""Storage formats: how many bytes one stored vector takes, scales included.

Knows nothing of layers or tensors; the encoders and decoders live in ``kernels/codec.py``. ``find_*`` know what the
engine stores; ``plan`` counts more (``parse_*``).
"""

import re
from dataclasses import dataclass

from kvfolio.errors import OptionError, UnknownModelError

PACK = 16  # numbers that are packed together: rows are padded to whole packs
PACKED_BITS = (2, 3, 4, 5, 6)  # and 8, where a variant is named: int8 itself is not packed
DEFAULT_PACKED_TOKENS = 64  # a block's tokens where keys share scales along it: docs/lab.md
_KEY_SCALE_BYTES = 4  # of one channel of a block: its least value and its step, bf16 each


@dataclass(frozen=True, slots=True)
class Format:
    """How vectors (one token's key or value of one head) are stored.

    Scales lie beside each vector or, with ``scale_tokens``, beside each channel of a block of so many tokens.
    """

    name: str
    bits: int  # of one stored number
    scale_bytes: int  # of one scale; 0: no scales, plain numbers
    group: int = 0  # numbers that share one scale; 0: the whole vector
    is_packed: bool = False  # several numbers share bytes, PACK of them at a time
    is_rotated: bool = False  # vectors are rotated by a Hadamard matrix before they are rounded
    scale_tokens: int = 0  # tokens of a block that share the scale of a channel; 0: scales are of vectors

    def code_bytes(self, width: int) -> int:
        """Bytes of the numbers of one vector of ``width`` numbers."""
        return self.padded(width) * self.bits // 8 if self.is_packed else -(-width * self.bits // 8)

    def scales_bytes(self, width: int) -> int:
        """Bytes of the scales of one vector; of its share, rounded up, where a block's tokens have them together."""
        if self.scale_tokens:
            return -(-self.padded(width) * self.scale_bytes // self.scale_tokens)
        return (-(-width // self.group) if self.group else int(width > 0)) * self.scale_bytes

    def vector_bytes(self, width: int) -> int:
        """Bytes of one stored vector of ``width`` numbers, its scales and pads included, rounded up."""
        return self.code_bytes(width) + self.scales_bytes(width)

    def padded(self, width: int) -> int:
        """Numbers of one vector as they are stored: in whole packs."""
        return -(-width // PACK) * PACK if self.is_packed else width

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
# Without scales: what vLLM and SGLang store by default. Larger values become the largest, 448 and 57,344.
FP8 = Format("fp8", 8, 0)  # e4m3
FP8_E5M2 = Format("fp8-e5m2", 8, 0)
FP8_SCALED = Format("fp8-scaled", 8, 4)  # e4m3 with one f32 scale a token and head

COMPUTE_FORMATS = {fmt.name: fmt for fmt in (F32, BF16, F16)}
_WHOLE_BYTES = COMPUTE_FORMATS | {fmt.name: fmt for fmt in (FP8, FP8_SCALED, FP8_E5M2, INT8)}
FORMAT_NAMES = (*_WHOLE_BYTES, *(f"int{bits}" for bits in reversed(PACKED_BITS)))
"""What the engine stores, by the names that errors list; packed formats have variants, see ``find_format``."""

F64 = Format("f64", 64, 0)  # of published weights and measured states; no cache is planned in it
# 4 bits and one f32 scale a vector, as vLLM stores int4_per_token_head; the engine stores better ones.
INT4_HEAD = Format("int4-head", 4, 4)
_PACKED = re.compile(r"int(?:([2-6])|([2-68])-(channel|rotated|token))")
_GROUPED = re.compile(r"(fp8|int8|int6|int4)-g(0|[1-9][0-9]{0,3})")
_SHORT = re.compile(r"k(16|[2-68])v(16|[2-68])")
# What engines call the same: llama.cpp's blocks of 32 numbers and one f16 scale; fp8 without scales of its own.
_ENGINES_NAMES = {
    "q8_0": "int8-g32",
    "q4_0": "int4-g32",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8-e5m2",
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
    "float8_e5m2": FP8_E5M2,
}
DTYPE_WORDS = tuple(word for word, fmt in _DTYPES.items() if fmt.name in COMPUTE_FORMATS)
"""Dtypes as configs write them, of the formats that the engine computes in."""
# vLLM's and SGLang's fp8_ds_mla: the latent in fp8 with one f32 scale for 128 numbers, the rotary key exact. 656 B a
# token for DeepSeek's 512 + 64; the index key of V3.2 takes 128 + 4.
_LATENT_FP8 = "fp8-mla"
_ONLY_PLANNED = (_LATENT_FP8, INT4_HEAD.name)


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """The formats of one cache: keys and values may differ."""

    k: Format  # of the rotary keys and index keys of latent layers, too
    v: Format  # of latents, too
    rope: Format | None = None  # of the rotary keys of latent layers, where it is another than that of keys

    @property
    def name(self) -> str:
        if self.rope is not None:
            return _LATENT_FP8
        if self.v.name in (self.k.name, _usual_values(self.k.name)):
            return self.k.name
        return f"{self.k.name}/{self.v.name}"

    @property
    def default_block_tokens(self) -> int | None:
        """Tokens of a block that suit the format; None: it has no wish."""
        return DEFAULT_PACKED_TOKENS if self.k.scale_tokens else None

    @property
    def least_block_tokens(self) -> int:
        """Tokens of the smallest block that can be stored."""
        return PACK if self.k.is_packed or self.v.is_packed else 1

    def check_block_tokens(self, block_tokens: int) -> None:
        """Raise OptionError where blocks of so many tokens cannot be stored."""
        for fmt in (self.k, self.v):
            if fmt.is_packed and block_tokens < PACK:
                raise OptionError(f"block_tokens is {block_tokens}; {fmt.name} packs {PACK} tokens: at least {PACK}")


def find_format(name: str, is_key: bool, block_tokens: int | None = None) -> Format:
    """The format called ``name`` that the engine stores; raises UnknownModelError that lists the known ones.

    int6 to int2 are, for keys, ``int4-channel``: a least value and a step for each channel of a block of
    ``block_tokens``; for values ``int4-rotated``: a step for each token, rotated; ``int4-token``: not rotated.
    int8 is none of these, but has them, too: ``int8-channel``.
    """
    fmt = _WHOLE_BYTES.get(name) or _packed(name, is_key, block_tokens or DEFAULT_PACKED_TOKENS)
    if fmt is None:
        variants = "-rotated, -token" + (", -channel" if is_key else " (-channel is for keys)")
        planned = " (kvfolio plan alone counts it)" if _GROUPED.fullmatch(name) or name in _ONLY_PLANNED else ""
        raise UnknownModelError(
            f"unknown format {name!r} of {'keys' if is_key else 'values'}{planned}; known: {', '.join(FORMAT_NAMES)}, "
            f"the last {len(PACKED_BITS) + 1} also with {variants}"
        )
    return fmt


def _packed(name: str, is_key: bool, block_tokens: int) -> Format | None:
    match = _PACKED.fullmatch(name)
    if match is None:
        return None
    usual = "channel" if is_key else "rotated"
    bits, variant = int(match[1] or match[2]), match[3] or usual
    canonical = f"int{bits}" if variant == usual and bits < 8 else f"int{bits}-{variant}"
    if variant != "channel":
        return Format(canonical, bits, 2, is_packed=True, is_rotated=variant == "rotated")
    if not is_key:
        return None
    return Format(canonical, bits, _KEY_SCALE_BYTES, is_packed=True, scale_tokens=block_tokens)


def find_cache_format(name: str, block_tokens: int | None = None) -> CacheFormat:
    """The cache format called ``name`` that the engine stores.

    One format for both (``int8``), ``keys/values`` (``bf16/int8``), or short ``k8v4`` (int8 keys, int4 values);
    ``int8-channel`` alone is ``int8-channel/int8-rotated``.
    ``block_tokens``: of the blocks it is for; keys of packed formats share scales along a block.
    """
    k_name, v_name = _two_names(name)
    return CacheFormat(find_format(k_name, True, block_tokens), find_format(v_name, False, block_tokens))


def _two_names(name: str) -> tuple[str, str]:
    short = _SHORT.fullmatch(name)
    if short is not None:
        k_name, v_name = ("bf16" if bits == "16" else f"int{bits}" for bits in short.groups())
        return k_name, v_name
    k_name, slash, v_name = name.partition("/")
    return k_name, v_name if slash else _usual_values(k_name)


def _usual_values(k_name: str) -> str:
    """The name of the values' format where one name is given: channels share scales in keys alone."""
    return k_name.replace("-channel", "-rotated")


def format_of_dtype(word: str) -> Format | None:
    """The format of numbers whose dtype configs and torch call ``word``, with or without ``torch.``; None: not known.

    Weights have more dtypes than caches: the format may be none of ``COMPUTE_FORMATS`` (float64, float8).
    """
    return _DTYPES.get(word.removeprefix("torch."))


def parse_format(name: str, is_key: bool = False, block_tokens: int | None = None) -> Format:
    """The format called ``name`` that can be counted: those the engine stores, and groups as other engines have them.

    ``int4-g64`` has one f16 scale for 64 numbers, ``int4-g0`` none at all: the bare numbers, a lower bound.
    """
    name = _ENGINES_NAMES.get(name, name)
    if name == INT4_HEAD.name:
        return INT4_HEAD
    match = _GROUPED.fullmatch(name)
    if match is not None:
        code, group = match[1], int(match[2])
        return Format(name, int(code.lstrip("fpint")), 2 if group else 0, group)
    try:
        return find_format(name, is_key, block_tokens)
    except UnknownModelError as error:
        raise UnknownModelError(
            f"{error}; plan also counts int4-g64 (one f16 scale for 64 numbers, -g0: none) and int4-head (vLLM's)"
        ) from error


def parse_cache_format(name: str, block_tokens: int | None = None) -> CacheFormat:
    """The cache format called ``name`` that can be counted: as ``find_cache_format``, and groups, and ``fp8-mla``."""
    if name in (_LATENT_FP8, "fp8_ds_mla"):
        fp8 = Format("fp8-g128", 8, 4, 128)
        return CacheFormat(fp8, fp8, BF16)
    k_name, v_name = _two_names(name)
    return CacheFormat(parse_format(k_name, True, block_tokens), parse_format(v_name, False, block_tokens))
