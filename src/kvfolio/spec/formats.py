"""Storage formats: how many bytes one stored vector takes, scales included.

Knows nothing of layers or tensors; the encoders live in ``store/quant.py``, the decoders in ``kernels``.
"""

from dataclasses import dataclass

from kvfolio.errors import UnknownModelError


@dataclass(frozen=True, slots=True)
class Format:
    """How one vector (one token's key or value of one head) is stored."""

    name: str
    value_bytes: int  # bytes of one stored number
    scale_bytes: int  # bytes of scales beside one vector; 0 for plain floats

    def vector_bytes(self, width: int) -> int:
        """Bytes of one stored vector of ``width`` numbers, its scale included."""
        return width * self.value_bytes + self.scale_bytes

    @property
    def is_float(self) -> bool:
        """Whether values are stored as plain floats (such a format can be a compute dtype, too)."""
        return self.scale_bytes == 0


F32 = Format("f32", 4, 0)
BF16 = Format("bf16", 2, 0)
F16 = Format("f16", 2, 0)
INT8 = Format("int8", 1, 4)  # one f32 scale a token and head: value = code * scale, codes -127…127

FORMATS = {fmt.name: fmt for fmt in (F32, BF16, F16, INT8)}


@dataclass(frozen=True, slots=True)
class CacheFormat:
    """The formats of one cache: keys and values may differ."""

    k: Format
    v: Format

    @property
    def name(self) -> str:
        return self.k.name if self.k == self.v else f"{self.k.name}/{self.v.name}"


def find_format(name: str) -> Format:
    """The format called ``name``; raises UnknownModelError that lists the known ones."""
    if name not in FORMATS:
        raise UnknownModelError(f"unknown format {name!r}; known: {', '.join(FORMATS)}")
    return FORMATS[name]


def find_cache_format(name: str) -> CacheFormat:
    """The cache format called ``name``: one format for both (``int8``) or ``keys/values`` (``bf16/int8``)."""
    k_name, slash, v_name = name.partition("/")
    return CacheFormat(find_format(k_name), find_format(v_name if slash else k_name))
