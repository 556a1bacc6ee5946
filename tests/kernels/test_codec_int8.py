"""int8 vectors: finite, zero stays zero, a constant comes back, and no number moves by more than half a step."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvfolio.kernels.codec import TORCH_DTYPES, decode, encode
from kvfolio.spec.formats import BF16, F16, F32, INT8, Format

TINY = 2.0**-126  # the smallest normal f32: below it a scale has few bits, or none
LARGE = 2.0**127  # 127 steps of the very last f32s, up to 2^128, can round to infinity


def stored(*values: float) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scale, what comes back) of one vector."""
    codes, scales = encode(torch.tensor([values]), INT8)
    assert scales is not None
    assert (codes.dtype, scales.dtype, scales.shape) == (torch.int8, torch.float32, (1,))
    return codes[0], scales[0], decode(codes, scales, INT8)[0]


def assert_within_half_a_step(x: Tensor, codes: Tensor, scales: Tensor, found: Tensor) -> None:
    """x, found [..., width] f32. Computed in f64; quotient and product are rounded to f32, so a little is added."""
    error = (found.double() - x.double()).abs()
    assert bool(found.isfinite().all())
    assert int(codes.abs().max()) <= 127  # -128 has no counterpart
    assert bool((error <= scales.double()[..., None] * 0.5001 + TINY).all())


def test_a_vector_of_zeros_stays_zero() -> None:
    codes, scale, found = stored(0.0, -0.0, 0.0)
    assert codes.tolist() == [0, 0, 0]
    assert float(scale) == 0.0
    assert found.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("value", [100.0, -1e-4, 1.0, 65504.0, 3e38, -3e38, 1e-30])
def test_a_constant_vector_comes_back_to_the_last_bit(value: float) -> None:
    codes, _, found = stored(value, value, value)
    assert all(abs(code) >= 121 and math.copysign(1, code) == math.copysign(1, value) for code in codes.tolist())
    assert found.tolist() == [float(torch.tensor(value))] * 3


def test_every_largest_value_comes_back_to_the_last_bit() -> None:
    mantissas = torch.linspace(1.0, 2.0, 200_001)[:-1]
    for exponent in (-100, -7, 0, 3, 127):
        x = torch.stack((-mantissas * 2.0**exponent, mantissas * 2.0 ** (exponent - 3)), dim=1)
        codes, scales = encode(x, INT8)
        assert torch.equal(decode(codes, scales, INT8)[:, 0], x[:, 0])
        assert bool((codes[:, 0] <= -121).logical_or(codes[:, 0] == -64).all())


def test_one_constant_channel_among_others_comes_back_within_half_a_step() -> None:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    x[:, 3] = 8.0
    codes, scales = encode(x, INT8)
    assert scales is not None
    assert_within_half_a_step(x, codes, scales, decode(codes, scales, INT8))


def test_two_values_one_bit_apart_stay_finite_and_get_the_same_code() -> None:
    value = torch.tensor(0.7)
    next_value = torch.nextafter(value, torch.tensor(1.0))
    codes, _, found = stored(float(value), float(next_value))
    assert codes.tolist() == [127, 127]
    assert found.tolist() == pytest.approx([0.7, 0.7], rel=2.0**-22)


@pytest.mark.parametrize("scale", [1e-6, 1e-20, TINY, 1e-39, 2.0**-149])
def test_a_tiny_range_is_finite_and_never_larger_than_it_was(scale: float) -> None:
    x = torch.tensor([[1.0, -0.5, 0.25, 0.0]]) * scale
    codes, scales = encode(x, INT8)
    assert scales is not None
    assert_within_half_a_step(x, codes, scales, decode(codes, scales, INT8))
    assert float(decode(codes, scales, INT8).abs().max()) <= float(x.abs().max()) * (1 + 2.0**-23)


def test_codes_round_half_to_even() -> None:
    # The largest is 127 steps of 1, so a value is its own number of steps.
    codes, scale, _ = stored(127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 2.500001)
    assert float(scale) == 1.0
    assert codes.tolist() == [127, 0, 2, 2, 0, -2, 3]


def test_every_vector_has_its_own_scale() -> None:
    x = torch.tensor([[[127.0, 1.0], [1.27, 0.01]], [[0.0, 0.0], [-254.0, 2.0]]])
    codes, scales = encode(x, INT8)
    assert scales is not None
    torch.testing.assert_close(scales, torch.tensor([[1.0, 0.01], [0.0, 2.0]]))
    assert codes.tolist() == [[[127, 1], [127, 1]], [[0, 0], [-127, 1]]]


@settings(max_examples=300, deadline=None)
@given(
    values=st.lists(st.floats(-LARGE, LARGE, width=32), min_size=1, max_size=20),
    dtype=st.sampled_from(["f32", "bf16", "f16"]),
)
def test_any_finite_vector_comes_back_within_half_a_step(values: list[float], dtype: str) -> None:
    x = torch.tensor([values]).to(TORCH_DTYPES[dtype])
    x = torch.where(x.isfinite(), x, 0.0)  # f16 turns what is too large into infinity
    codes, scales = encode(x, INT8)
    assert scales is not None
    assert bool(scales.isfinite().all())
    assert_within_half_a_step(x.float(), codes, scales, decode(codes, scales, INT8))


@settings(max_examples=100, deadline=None)
@given(values=st.lists(st.floats(-1000, 1000, width=16), min_size=2, max_size=16))
def test_encoding_what_was_decoded_changes_nothing(values: list[float]) -> None:
    codes, scales = encode(torch.tensor([values]), INT8)
    again, _ = encode(decode(codes, scales, INT8), INT8)
    assert torch.equal(codes, again)


@pytest.mark.parametrize("fmt", [F32, BF16, F16], ids=lambda fmt: fmt.name)
def test_a_float_format_has_no_scale_and_rounds_as_torch_does(fmt: Format) -> None:
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(2))
    codes, scales = encode(x, fmt)
    assert scales is None
    assert torch.equal(codes, x.to(TORCH_DTYPES[fmt.name]))
    assert torch.equal(decode(codes, None, fmt), codes.float())
