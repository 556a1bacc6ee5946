"""Vectors to stored bytes and back, in torch: the definition of every storage format.

The C++ kernels write the same bytes. ``encode`` and ``decode`` are between numbers and codes, ``seal`` and ``unseal``
between a block of one layer and its bytes. Knows nothing of pools or layers.

Codes of packed formats lie in packs of 16 numbers, 2 * bits bytes each, in two's complement. A pack holds, one behind
the other, the planes of its codes, low bits first: of 4 bits (two words of 32 bits; nibble j of word 0 is of number 2j,
of word 1 of number 2j + 1), of 2 bits (one word) and of 1 bit (half a word), as needed. 8 bits are bytes.
"""

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvfolio.spec.formats import PACK, Format

TORCH_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}  # that are computed in
STORED_DTYPES = TORCH_DTYPES | {
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
    "fp8-scaled": torch.float8_e4m3fn,
    "fp8-e5m2": torch.float8_e5m2,
}
"""What a number is stored as, in formats of whole bytes."""
LARGEST_FP8 = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
_FP8_STEPS = 256.0  # what the largest number of a scaled fp8 vector becomes: a power of two, so that it stays exact
_PLANES = {2: (2,), 3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}  # bits of a code, low ones first


# ---- numbers and codes ----------------------------------------------------------------------------------------------


def encode(x: Tensor, fmt: Format) -> tuple[Tensor, Tensor | None]:
    """(codes like ``x``, scales) of vectors ``x`` [..., width]; of a block [..., tokens, width] where channels share.

    Scales: f32 or bf16 [...], one a vector; bf16 [..., 2, width] (least values, steps) where channels share them; or
    None. A vector, or a channel of a block, with a number that is not finite gets a scale that is NaN: all of it
    comes back as NaN. (Float formats keep every number; fp8 without scales keeps what is infinite as NaN.)

    int8: scale = max |x| / levels, code = round_half_even(x / scale); ``levels`` is 127, or a few less where
    127 * scale would not give max |x| back exactly. fp8-scaled: max |x| becomes 256.
    Packed formats: see ``_vector_scales`` and ``_encode_channels``. Zeros stay zero; in bf16 constant vectors and
    channels come back exactly.
    """
    if fmt.is_float:
        return x.to(STORED_DTYPES[fmt.name]), None
    values = x.to(torch.float32)
    if fmt.scale_tokens:
        return _encode_channels(values, fmt)
    if fmt.is_packed:
        values = rotate(values) if fmt.is_rotated else values
        scales = _vector_scales(values, fmt.bits)
        half = 2 ** (fmt.bits - 1)
        return _rounded(values, scales.to(torch.float32)[..., None], -half, half - 1).to(torch.int8), scales
    if fmt.name == "int8":
        scales = _finite_or_nan(_int8_scales(values.abs().amax(dim=-1)))
        return _rounded(values, scales[..., None], -127, 127).to(torch.int8), scales
    if fmt.scale_bytes == 0:
        return _to_fp8(values, STORED_DTYPES[fmt.name]), None
    scales = _finite_or_nan(values.abs().amax(dim=-1) / _FP8_STEPS)
    ratios = torch.where(scales[..., None] > 0, values / scales[..., None], 0.0)
    return _to_fp8(ratios, torch.float8_e4m3fn), scales


def decode(codes: Tensor, scales: Tensor | None, fmt: Format) -> Tensor:
    """The f32 vectors [..., width] that ``encode`` stored."""
    values = codes.to(torch.float32)
    if scales is None:
        return values
    if fmt.scale_tokens:
        least, steps = scales.to(torch.float32).unbind(dim=-2)
        return least[..., None, :] + values * steps[..., None, :]
    values = values * scales.to(torch.float32)[..., None]
    return unrotate(values) if fmt.is_rotated else values


def _rounded(values: Tensor, scales: Tensor, low: int, high: int) -> Tensor:
    """round_half_even(values / scales) within [low, high]; 0 where the scale is 0 or NaN."""
    return torch.where(scales.abs() > 0, values / scales, 0.0).round().clamp(low, high)


def _finite_or_nan(scales: Tensor) -> Tensor:
    return torch.where(scales.isfinite(), scales, torch.nan)


def _int8_scales(largest: Tensor) -> Tensor:
    """[...] f32: largest / levels, for the most levels from which it comes back exactly; from 64 it always does."""
    scales = largest / 64.0
    for levels in range(121, 128):
        candidate = largest / levels
        scales = torch.where(candidate * levels == largest, candidate, scales)
    return scales


def _vector_scales(values: Tensor, bits: int) -> Tensor:
    """[...] bf16 steps of symmetric codes -half … half - 1: negative where the largest number is positive.

    So the largest becomes -half steps, exactly where it is a bf16 number. From 4 bits on the step is also large enough
    for the other end: no number moves by more than half a step. With fewer bits that end is clipped: its finer steps
    are worth more (docs/lab.md).
    """
    half = 2 ** (bits - 1)
    high, low = values.amax(dim=-1), -values.amin(dim=-1)
    is_high = high > low
    most, least = torch.where(is_high, high, low), torch.where(is_high, low, high)
    steps = most / half
    if bits >= 4:
        steps = torch.maximum(steps, least / (half - 0.5))
    steps = _bf16_up(steps + 0.0)  # zeros have no sign
    return _to_bf16(_finite_or_nan(torch.where(is_high, -steps, steps)))


def _encode_channels(values: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """Codes 0 … 2^bits - 1, kept less half of them in two's complement, of channels: value = least + code * step."""
    levels = 2**fmt.bits - 1
    least = -_bf16_up(-values.amin(dim=-2)) + 0.0  # zeros have no sign
    spans = values.amax(dim=-2) - least + 0.0
    steps = _bf16_up(spans / levels)
    is_finite = spans.isfinite() & steps.isfinite()
    least, steps = torch.where(is_finite, least, torch.nan), torch.where(is_finite, steps, torch.nan)
    codes = _rounded(values - least[..., None, :], steps[..., None, :], 0, levels)
    return codes.to(torch.uint8), _to_bf16(torch.stack((least, steps), dim=-2))


def _bf16_up(x: Tensor) -> Tensor:
    """The least bf16 numbers not below ``x`` f32, as f32."""
    bits = x.view(torch.int32)
    up = torch.where(bits >= 0, bits + 0xFFFF, bits) & -0x10000
    return torch.where(x.isfinite(), up.view(torch.float32), x)


def _to_bf16(x: Tensor) -> Tensor:
    """Of f32 numbers that are bf16 numbers, or NaN: that has one form here, and two in torch."""
    return (x.view(torch.int32) >> 16).to(torch.int16).view(torch.bfloat16)


def _to_fp8(values: Tensor, dtype: torch.dtype) -> Tensor:
    largest = LARGEST_FP8[dtype]
    return torch.where(values.isfinite(), values.clamp(-largest, largest), torch.nan).to(dtype)


# ---- rotation -------------------------------------------------------------------------------------------------------


def rotation_size(width: int) -> int:
    """Numbers that are rotated together: the largest power of two that divides ``width``."""
    return width & -width


def rotate(x: Tensor) -> Tensor:
    """x [..., width] f32 times a Hadamard matrix of ±1, for each ``rotation_size`` numbers: what outliers they have
    spreads over all of them. Sums in the order of the fast Walsh-Hadamard transform."""
    *rows, width = x.shape
    size, half = rotation_size(width), 1
    while half < size:
        pairs = x.reshape(*rows, width // (2 * half), 2, half)
        first, second = pairs.unbind(dim=-2)
        x = torch.stack((first + second, first - second), dim=-2).reshape(*rows, width)
        half *= 2
    return x


def unrotate(x: Tensor) -> Tensor:
    """What was rotated, back again: the matrix is its own inverse but for a power of two."""
    return rotate(x) / rotation_size(x.shape[-1])


# ---- codes and bytes ------------------------------------------------------------------------------------------------


def seal(x: Tensor, fmt: Format, is_key: bool) -> tuple[Tensor, Tensor]:
    """(codes, scales) of a block x [heads, tokens, width]: uint8 [heads, bytes] each, as they lie in a pool."""
    heads, tokens, width = x.shape
    codes, scales = encode(x, fmt)
    pads = (0, fmt.padded(width) - width)
    if fmt.is_packed:
        signed = codes.to(torch.int32) - (2 ** (fmt.bits - 1) if fmt.scale_tokens else 0)
        signed = pad(signed, pads)
        stored = pack(signed.transpose(1, 2) if is_key else signed, fmt.bits)
    else:
        stored = _bytes_of(codes.transpose(1, 2) if is_key else codes)
    if scales is None:
        return stored.flatten(1), stored.new_empty((heads, 0))
    beside = _bytes_of(pad(scales, pads) if fmt.scale_tokens else scales).flatten(1)
    return stored.flatten(1), pad(beside, (0, tokens * fmt.scales_bytes(width) - beside.shape[1]))


def unseal(codes: Tensor, scales: Tensor, fmt: Format, is_key: bool, width: int) -> Tensor:
    """The f32 vectors [..., tokens, width] of blocks that ``seal`` stored; codes and scales uint8 [..., bytes]."""
    *rows, num_bytes = codes.shape
    tokens, padded = num_bytes // fmt.code_bytes(width), fmt.padded(width)
    shape = (padded, tokens) if is_key else (tokens, padded)
    if fmt.is_packed:
        numbers = unpack(codes.reshape(*rows, shape[0], num_bytes // shape[0]), fmt.bits)
        numbers = numbers + (2 ** (fmt.bits - 1) if fmt.scale_tokens else 0)
    else:
        numbers = codes.contiguous().view(STORED_DTYPES[fmt.name]).reshape(*rows, *shape)
    numbers = (numbers.transpose(-2, -1) if is_key else numbers)[..., :width]
    if fmt.scale_bytes == 0:
        return decode(numbers, None, fmt)
    if fmt.scale_tokens:
        pairs = scales[..., : padded * fmt.scale_bytes].contiguous().view(torch.bfloat16)
        return decode(numbers, pairs.reshape(*rows, 2, padded)[..., :width], fmt)
    return decode(numbers, scales.contiguous().view(torch.float32 if fmt.scale_bytes == 4 else torch.bfloat16), fmt)


def pack(codes: Tensor, bits: int) -> Tensor:
    """uint8 [..., n / 16 * 2 * bits] of codes int32 [..., n], n a multiple of 16, in two's complement."""
    *rows, n = codes.shape
    rest = codes.reshape(*rows, n // PACK, PACK)
    planes = []
    for width in _PLANES[bits]:
        part = rest & (2**width - 1)
        rest = rest >> width
        if width == 4:  # word 0 has the even numbers, word 1 the odd ones
            part = part.reshape(*rows, n // PACK, PACK // 2, 2).transpose(-2, -1).reshape(*rows, n // PACK, PACK)
        each = 8 // width  # numbers a byte
        shifts = torch.arange(each, dtype=torch.int32, device=codes.device) * width
        planes.append((part.reshape(*rows, n // PACK, PACK // each, each) << shifts).sum(dim=-1))
    return torch.cat(planes, dim=-1).to(torch.uint8).reshape(*rows, -1)


def unpack(stored: Tensor, bits: int) -> Tensor:
    """The codes int32 [..., n] of uint8 [..., n / 16 * 2 * bits]."""
    *rows, num_bytes = stored.shape
    packs = stored.reshape(*rows, num_bytes // (2 * bits), 2 * bits).to(torch.int32)
    codes, at, done = None, 0, 0
    for width in _PLANES[bits]:
        each, size = 8 // width, 2 * width
        shifts = torch.arange(each, dtype=torch.int32, device=stored.device) * width
        part = ((packs[..., at : at + size, None] >> shifts) & (2**width - 1)).flatten(-2)
        if width == 4:
            part = part.reshape(*part.shape[:-1], 2, PACK // 2).transpose(-2, -1).flatten(-2)
        codes = part if codes is None else codes | part << done
        at, done = at + size, done + width
    assert codes is not None
    half = 2 ** (bits - 1)
    signed: Tensor = (codes ^ half) - half
    return signed.flatten(-2)


def _bytes_of(x: Tensor) -> Tensor:
    """The bytes of ``x`` [..., n]: uint8 [..., n * itemsize]."""
    return x.contiguous().view(torch.uint8)
