"""MXFP4: numbers of four bits, 32 of which share a power of two; decoded to floats when weights are read.

Knows nothing of files or networks. Source: OCP Microscaling Formats 1.0, sec. 5.3.3 (e2m1) and 5.4.1 (e8m0).
"""

import torch
from torch import Tensor

from kvfolio.errors import BrokenModelError

GROUP = 32  # numbers a scale
BLOCK_BYTES = GROUP // 2  # two numbers a byte, the first one in its lower half
_BIAS = 127  # of the scales' exponents
_NAN = 255
_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # sign, two bits of exponent, one of mantissa


def decode_mxfp4(blocks: Tensor, scales: Tensor, out: Tensor, where: str) -> None:
    """Write into ``out`` [count, rows, groups * 32], any float dtype, what the codes stand for.

    blocks uint8 [count, rows, groups, 16], scales uint8 [count, rows, groups]. A 16-bit ``out`` takes 3.8 times the
    bytes of codes and scales: of gpt-oss-20b 10 GB become 38 (42 with its other weights), of gpt-oss-120b 61 become 229
    (234). Beside it, one of the ``count`` matrices lies there in f32. ``where``: file and tensor, for messages.
    Raises BrokenModelError for a scale that stands for no number.
    """
    numbers = torch.tensor([*_MAGNITUDES, *(-size for size in _MAGNITUDES)], dtype=torch.float32)
    codes = torch.arange(256)
    pairs = torch.stack([numbers[codes % 16], numbers[codes // 16]], dim=1)  # [256, 2]
    pairs = pairs.view(torch.int64)[:, 0]  # [256], two numbers in each: one look-up a byte
    powers = torch.tensor([2.0 ** (exponent - _BIAS) for exponent in range(_NAN)])  # exact, f32
    for one_blocks, one_scales, one_out in zip(blocks, scales, out, strict=True):
        if bool((one_scales == _NAN).any()):
            raise BrokenModelError(f"{where} holds a scale of {_NAN}, which stands for no number; fetch it again")
        values = pairs.index_select(0, one_blocks.flatten().to(torch.int32)).view(torch.float32)
        factors = powers[one_scales.to(torch.int32)]  # [rows, groups]
        one_out.copy_(values.view(*one_scales.shape, GROUP).mul_(factors[..., None]).flatten(1))
