"""Vectors to stored bytes and back, in torch: the definition of every storage format.

The C++ kernels produce the same codes bit for bit. Knows nothing of blocks or layers.
"""

import torch
from torch import Tensor

from kvfolio.spec.formats import Format

TORCH_DTYPES = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16, "int8": torch.int8}


def encode(x: Tensor, fmt: Format) -> tuple[Tensor, Tensor | None]:
    """(codes like ``x`` in the stored dtype, scales [...] f32 or None) of vectors ``x`` [..., width].

    int8: scale = max |x| / levels, code = round_half_even(x / scale); a row of zeros has scale 0 and codes 0.
    ``levels`` is 127, or a few less where 127 * scale would not give max |x| back exactly: constant rows stay exact.
    """
    if fmt.is_float:
        return x.to(TORCH_DTYPES[fmt.name]), None
    values = x.to(torch.float32)
    scales = _int8_scales(values.abs().amax(dim=-1))
    codes = torch.where(scales[..., None] > 0, values / scales[..., None], 0.0).round().clamp(-127.0, 127.0)
    return codes.to(torch.int8), scales


def _int8_scales(largest: Tensor) -> Tensor:
    """[...] f32: largest / levels, for the most levels from which it comes back exactly; from 64 it always does."""
    scales = largest / 64.0
    for levels in range(121, 128):
        candidate = largest / levels
        scales = torch.where(candidate * levels == largest, candidate, scales)
    return scales


def decode(codes: Tensor, scales: Tensor | None) -> Tensor:
    """The f32 vectors [..., width] that ``encode`` stored."""
    values = codes.to(torch.float32)
    return values if scales is None else values * scales[..., None]
