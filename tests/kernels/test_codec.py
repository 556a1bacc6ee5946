"""Every storage format: what comes back, what stays exact, what is broken stays visible, and which bits lie where.

int8 has a file of its own. Knows nothing of pools.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from kvfolio.kernels.codec import (
    TORCH_DTYPES,
    decode,
    encode,
    pack,
    rotate,
    rotation_size,
    seal,
    unpack,
    unrotate,
    unseal,
)
from kvfolio.spec.formats import FORMAT_NAMES, PACKED_BITS, Format, find_format

VARIANTS = ("", "-rotated", "-token")
PACKED = [f"int{bits}{variant}" for bits in PACKED_BITS for variant in VARIANTS] + ["int8-rotated", "int8-token"]
SCALED = ["int8", "fp8-scaled", *PACKED]
SIDES = [True, False]


def through(x: Tensor, fmt: Format, is_key: bool) -> Tensor:
    """x [heads, tokens, width] as it comes back from its bytes."""
    codes, scales = seal(x, fmt, is_key)
    assert codes.dtype == scales.dtype == torch.uint8
    heads, tokens, width = x.shape
    assert codes.shape == (heads, tokens * fmt.code_bytes(width))
    assert scales.shape == (heads, tokens * fmt.scales_bytes(width))
    return unseal(codes, scales, fmt, is_key, width)


def block_of(seed: int, tokens: int = 32, width: int = 64, heads: int = 2) -> Tensor:
    return torch.randn(heads, tokens, width, generator=torch.Generator().manual_seed(seed))


def half_steps(x: Tensor, fmt: Format) -> Tensor:
    """What each number of x [heads, tokens, width] may move by when it is not rotated: half its step."""
    codes, scales = encode(x, fmt)
    assert scales is not None
    scales = scales.float().abs()
    steps = scales[..., 1:, :] if fmt.scale_tokens else scales[..., None]
    if codes.dtype == torch.float8_e4m3fn:  # three bits behind the first: a sixteenth of the number, or the least step
        return torch.maximum(x.abs() / 16, steps * 2.0**-10)
    return steps.expand_as(x) / 2


# ---- bytes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [*PACKED_BITS, 8])
def test_packed_codes_come_back_and_take_their_bits(bits: int) -> None:
    half = 2 ** (bits - 1)
    codes = torch.randint(-half, half, (3, 5, 48), generator=torch.Generator().manual_seed(bits), dtype=torch.int32)
    stored = pack(codes, bits)
    assert stored.shape == (3, 5, 48 * bits // 8)
    assert torch.equal(unpack(stored, bits), codes)


def test_a_pack_of_four_bits_is_two_words_of_even_and_odd_numbers() -> None:
    codes = torch.tensor([0, -8, 1, -7, 2, -6, 3, -5, 4, -4, 5, -3, 6, -2, 7, -1], dtype=torch.int32)
    assert bytes(pack(codes, 4).tolist()).hex() == "1032547698badcfe"


def test_a_pack_of_three_bits_is_a_word_of_low_bits_and_half_a_word_of_high_ones() -> None:
    codes = torch.tensor([3] + [0] * 14 + [-4], dtype=torch.int32)
    assert bytes(pack(codes, 3).tolist()).hex() == "03000000" + "0080"


@pytest.mark.parametrize("is_key", SIDES)
@pytest.mark.parametrize("name", [*FORMAT_NAMES, *PACKED])
@pytest.mark.parametrize(("tokens", "width"), [(16, 20), (64, 64), (32, 80), (16, 5), (256, 96)])
def test_what_is_sealed_comes_back_as_what_is_decoded(name: str, is_key: bool, tokens: int, width: int) -> None:
    fmt = find_format(name, is_key, tokens)
    x = block_of(1, tokens, width)
    torch.testing.assert_close(through(x, fmt, is_key), decode(*encode(x, fmt), fmt), rtol=0, atol=0)


def test_an_empty_list_of_blocks_is_empty() -> None:
    fmt = find_format("int4", True, 16)
    codes, scales = (torch.empty((0, 2, 16 * size), dtype=torch.uint8) for size in (fmt.code_bytes(8), 4))
    assert unseal(codes, scales, fmt, True, 8).shape == (0, 2, 16, 8)


# ---- QC-01 and its kind: zeros, constants, tiny and large ranges ----------------------------------------------------


@pytest.mark.parametrize("is_key", SIDES)
@pytest.mark.parametrize("name", [*FORMAT_NAMES, *PACKED])
def test_zeros_stay_zero(name: str, is_key: bool) -> None:
    x = torch.zeros(1, 16, 24)
    x[:, ::3] = -0.0
    codes, scales = seal(x, find_format(name, is_key, 16), is_key)
    if name not in FORMAT_NAMES[:6]:  # floats keep the sign of a zero
        again = seal(torch.zeros(1, 16, 24), find_format(name, is_key, 16), is_key)
        assert torch.equal(codes, again[0])
        assert torch.equal(scales, again[1])
    assert bool((through(x, find_format(name, is_key, 16), is_key) == 0).all())


@pytest.mark.parametrize("value", [100.0, -1e-4, 1.0, 65504.0, 3e36, -3e36, 1e-30])
@pytest.mark.parametrize("is_key", SIDES)
@pytest.mark.parametrize("name", SCALED)
def test_constant_vectors_come_back_exactly(name: str, is_key: bool, value: float) -> None:
    x = torch.full((2, 16, 64), value).bfloat16()  # 65,504 is beyond the f16 that others keep scales in
    assert torch.equal(through(x, find_format(name, is_key, 16), is_key), x.float())


@pytest.mark.parametrize("bits", [*PACKED_BITS, 8])
def test_a_constant_channel_among_others_comes_back_exactly(bits: int) -> None:
    x = block_of(2).bfloat16()
    x[:, :, 3], x[:, :, 7] = 8.0, -1e-4
    found = through(x, find_format(f"int{bits}-channel", True, 32), True)
    assert torch.equal(found[:, :, [3, 7]], x[:, :, [3, 7]].float())


@pytest.mark.parametrize("name", [*(name for name in SCALED if not name.endswith("-rotated")), "int8-channel"])
@pytest.mark.parametrize("scale", [1e-6, 1.0, 3e4, 1e30, 2.0**-126])
def test_no_number_of_a_key_moves_by_more_than_half_a_step(name: str, scale: float) -> None:
    fmt = find_format(name, True, 32)
    x = block_of(3) * scale
    error, allowed = (through(x, fmt, True) - x).abs(), half_steps(x, fmt)
    if not fmt.scale_tokens and fmt.is_packed and fmt.bits < 4:
        allowed = allowed * 2  # their other end is clipped
    assert bool((error <= allowed * 1.001 + 2.0**-149).all())


def test_two_numbers_one_bit_apart_stay_finite_and_near() -> None:
    x = torch.full((1, 16, 16), 0.7)
    x[:, ::2] = torch.nextafter(torch.tensor(0.7), torch.tensor(1.0))
    for name in SCALED:
        found = through(x, find_format(name, True, 16), True)
        torch.testing.assert_close(found, x, rtol=2.0**-7, atol=0)


@pytest.mark.parametrize("outlier", [1e3, -1e5, 1e20])
@pytest.mark.parametrize("bits", [4, 5, 6, 8])
def test_an_outlier_spoils_its_own_channel_alone(bits: int, outlier: float) -> None:
    x = block_of(4).bfloat16()
    spoilt = x.clone()
    spoilt[:, 5, 9] = outlier
    fmt = find_format(f"int{bits}-channel", True, 32)
    others = [channel for channel in range(64) if channel != 9]
    assert torch.equal(through(spoilt, fmt, True)[:, :, others], through(x, fmt, True)[:, :, others])


def test_rotation_spreads_an_outlier_so_that_its_neighbours_survive() -> None:
    x = block_of(5, heads=8)
    x[:, :, 9] = 30.0
    errors = {}
    for name in ("int4-rotated", "int4-token"):
        found = through(x, find_format(name, False), False)
        errors[name] = float((found - x)[:, :, 10:].square().mean())
    assert errors["int4-rotated"] < errors["int4-token"] / 3


@pytest.mark.parametrize("is_key", SIDES)
@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("broken", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_comes_back_as_nan_and_spoils_no_other_vector(
    name: str, is_key: bool, broken: float
) -> None:
    fmt = find_format(name, is_key, 16)
    x = block_of(6, 16, 32)
    x[0, 4, 7] = broken
    found = through(x, fmt, is_key)
    touched = found[0, :, 7] if fmt.scale_tokens else found[0, 4]
    assert bool(touched.isnan().all())
    assert int(found.isnan().sum()) == touched.numel()


@pytest.mark.parametrize("name", ["fp8", "fp8-e5m2"])
def test_fp8_without_scales_keeps_the_largest_in_place_of_larger_ones(name: str) -> None:
    largest = 448.0 if name == "fp8" else 57344.0
    x = torch.tensor([1e6, -1e6, largest, float("inf"), -float("inf"), float("nan"), 0.0]).view(1, 1, 7)
    found = through(x, find_format(name, True), True)[0, 0].tolist()
    assert found[:3] == [largest, -largest, largest]
    assert all(value != value for value in found[3:6])  # not a number: nothing broken turns into something sound
    assert found[6] == 0.0


# ---- any numbers ----------------------------------------------------------------------------------------------------


@settings(max_examples=200, deadline=None)
@given(
    name=st.sampled_from(SCALED),
    values=st.lists(st.floats(-(2.0**99), 2.0**99, width=32), min_size=16 * 3, max_size=16 * 3),
    dtype=st.sampled_from(["f32", "bf16"]),
)
def test_any_finite_block_comes_back_finite_and_within_its_steps(name: str, values: list[float], dtype: str) -> None:
    x = torch.tensor(values).view(1, 16, 3).to(TORCH_DTYPES[dtype]).float()
    for is_key in SIDES:
        fmt = find_format(name, is_key, 16)
        found = through(x, fmt, is_key)
        assert bool(found.isfinite().all())
        clipped = 2 if fmt.is_packed and fmt.bits < 4 and not fmt.scale_tokens else 1
        # A width of 3 is not rotated: 1 is the largest power of two in it. Subnormal steps have few bits of their own.
        assert bool(((found - x).abs() <= half_steps(x, fmt) * clipped * 1.01 + 2.0**-120).all())


@settings(max_examples=100, deadline=None)
@given(
    values=st.lists(st.floats(-1000, 1000, width=16), min_size=12, max_size=12), width=st.sampled_from([1, 3, 4, 6, 12])
)
def test_rotating_back_gives_what_was_rotated(values: list[float], width: int) -> None:
    x = torch.tensor(values).view(-1, width)
    torch.testing.assert_close(unrotate(rotate(x)), x, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(("width", "size"), [(64, 64), (80, 16), (96, 32), (20, 4), (7, 1)])
def test_the_largest_power_of_two_is_rotated_by_a_hadamard_matrix(width: int, size: int) -> None:
    assert rotation_size(width) == size
    matrix = rotate(torch.eye(width))
    assert bool(((matrix == 1) | (matrix == -1) | (matrix == 0)).all())
    assert torch.equal(matrix @ matrix.T, torch.eye(width) * size)


# ---- QC-04: scales belong to what they were computed from -----------------------------------------------------------


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.parametrize("factor", [2.0**-5, 4.0, 2.0**-20])
def test_scales_are_stored_beside_their_vectors_and_read_back_with_them(name: str, factor: float) -> None:
    # A lost scale, 1.0 in its place, would give the same numbers for every factor.
    x = block_of(7).bfloat16().float()
    for is_key in SIDES:
        fmt = find_format(name, is_key, 32)
        assert torch.equal(through(x * factor, fmt, is_key), through(x, fmt, is_key) * factor)
