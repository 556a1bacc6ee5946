"""The small operations: C++ against torch in every format, odd widths and strided rows; no row sees another."""

import pytest
import torch
from torch import Tensor

from kvfolio.errors import OptionError
from kvfolio.kernels.reference import ReferenceOps

native = pytest.importorskip(
    "kvfolio.kernels.native", reason="the C++ kernels are not built here", exc_type=ImportError
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
WIDTHS = [1, 7, 16, 33, 100, 576]
REFERENCE = ReferenceOps()
# One rounding of the result: half a unit in the last place, and the other half for sums in another order.
RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
every_table = pytest.mark.parametrize("name", native.instruction_sets())


def ops_of(name: str, deterministic: bool = False) -> "native.NativeOps":
    return native.NativeOps(1, deterministic=deterministic, instruction_set=name)


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def strided(x: Tensor) -> Tensor:
    """The same numbers as a slice of wider rows, as one part of a stacked product is."""
    wide = torch.full((x.shape[0], x[0].numel() + 11), float("nan"), dtype=x.dtype)
    wide[:, 4 : 4 + x[0].numel()] = x.flatten(1)
    return wide[:, 4 : 4 + x[0].numel()].unflatten(1, x.shape[1:])


def assert_close(found: Tensor, expected: Tensor, atol: float = 1e-6) -> None:
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=RELATIVE[found.dtype], atol=atol)


# ---- products -------------------------------------------------------------------------------------------------------


@every_table
@every_dtype
@pytest.mark.parametrize("width", WIDTHS)
def test_a_product_is_the_exact_sum_rounded_once(name: str, dtype: torch.dtype, width: int) -> None:
    ops = ops_of(name, deterministic=True)
    for num_rows in (1, 2, 3, 5, 9, 40):
        for num_out in (1, 3, 8, 13):
            x, weight = randn(num_rows, width, dtype=dtype), randn(num_out, width, dtype=dtype, seed=1)
            bias = randn(num_out, dtype=dtype, seed=2)
            for given in (None, bias):
                exact = x.double() @ weight.double().T + (0 if given is None else given.double())
                found = ops.linear(x, weight, given)
                assert (found.shape, found.dtype) == ((num_rows, num_out), dtype)
                # Terms are of size 1: a sum of n of them is off by less than n rounding errors of f32.
                error = (found.double() - exact).abs()
                assert bool((error <= exact.abs() * RELATIVE[dtype] / 2 + width * 2.0**-22).all())


@every_table
@every_dtype
@pytest.mark.parametrize("width", [7, 33, 576])
def test_no_number_of_rows_changes_a_single_bit_of_one(name: str, dtype: torch.dtype, width: int) -> None:
    ops = ops_of(name, deterministic=True)
    x, weight, bias = randn(70, width, dtype=dtype), randn(13, width, dtype=dtype, seed=1), randn(13, dtype=dtype)
    alone = torch.cat([ops.linear(x[row : row + 1], weight, bias) for row in range(70)])
    for num_rows in (2, 3, 4, 5, 6, 7, 8, 9, 31, 32, 33, 70):
        for first in (0, 70 - num_rows):
            found = ops.linear(x[first : first + num_rows], weight, bias)
            assert torch.equal(found, alone[first : first + num_rows]), num_rows


@every_dtype
def test_no_number_of_threads_changes_a_single_bit_of_a_product(dtype: torch.dtype) -> None:
    x, weight = randn(40, 100, dtype=dtype), randn(50, 100, dtype=dtype, seed=1)
    one, two, five = (native.NativeOps(threads, deterministic=True).linear(x, weight) for threads in (1, 2, 5))
    assert torch.equal(one, two)
    assert torch.equal(one, five)


@every_table
def test_few_rows_keep_their_bits_without_deterministic_too(name: str) -> None:
    ops = ops_of(name)
    x, weight = randn(native.FEW_ROWS, 100), randn(13, 100, seed=1)
    alone = torch.cat([ops.linear(row, weight) for row in torch.split(x, 1)])
    assert torch.equal(ops.linear(x, weight), alone)
    assert_close(ops.linear(randn(native.FEW_ROWS + 1, 100), weight)[:3], alone[:3], atol=1e-4)


def test_a_product_takes_rows_that_are_a_slice() -> None:
    x, weight = randn(5, 33), randn(8, 33, seed=1)
    ops = native.NativeOps(1)
    assert torch.equal(ops.linear(strided(x), weight), ops.linear(x, weight))


# ---- norms ----------------------------------------------------------------------------------------------------------


@every_table
@every_dtype
@pytest.mark.parametrize("width", WIDTHS)
def test_a_norm_agrees_with_torch(name: str, dtype: torch.dtype, width: int) -> None:
    ops, weight = ops_of(name), randn(width, seed=1)
    for x in (randn(5, width, dtype=dtype), randn(4, 3, width, dtype=dtype) * 30, torch.zeros(2, width, dtype=dtype)):
        expected = REFERENCE.rms_norm(x, weight, 1e-5)
        assert_close(ops.rms_norm(x, weight, 1e-5), expected)
        assert torch.equal(ops.rms_norm(strided(x), weight, 1e-5), ops.rms_norm(x, weight, 1e-5))


@every_table
@every_dtype
@pytest.mark.parametrize("width", WIDTHS)
def test_a_sum_is_rounded_before_it_is_normed(name: str, dtype: torch.dtype, width: int) -> None:
    ops, weight = ops_of(name), randn(width, seed=1)
    x, residual = randn(6, width, dtype=dtype), randn(6, width, dtype=dtype, seed=2) * 10
    normed, total = ops.add_rms_norm(x, residual, weight, 1e-6)
    assert torch.equal(total, x + residual)
    assert_close(normed, REFERENCE.add_rms_norm(x, residual, weight, 1e-6)[0])
    again, total_again = ops.add_rms_norm(strided(x), strided(residual), weight, 1e-6)
    assert torch.equal(again, normed)
    assert torch.equal(total_again, total)


# ---- rotary positions -----------------------------------------------------------------------------------------------


@every_table
@every_dtype
@pytest.mark.parametrize(("width", "half"), [(2, 1), (20, 10), (64, 32), (80, 16), (66, 33), (256, 128)])
def test_heads_are_rotated_as_torch_does_and_the_rest_of_a_head_stays(
    name: str, dtype: torch.dtype, width: int, half: int
) -> None:
    x, angles = randn(7, 3, width, dtype=dtype), randn(7, half, seed=1) * 100
    expected = REFERENCE.rope(x, angles.cos(), angles.sin())
    assert_close(ops_of(name).rope(x.clone(), angles.cos(), angles.sin()), expected)
    part = strided(x)
    found = ops_of(name).rope(part, angles.cos(), angles.sin())
    assert_close(found, expected)
    assert torch.equal(found[..., 2 * half :], x[..., 2 * half :])
    around = part.as_strided((7, 3 * width + 11), (3 * width + 11, 1), 0)
    assert bool(around[:, :4].isnan().all())  # nothing beside the slice is written
    assert bool(around[:, 4 + 3 * width :].isnan().all())


# ---- activations ----------------------------------------------------------------------------------------------------


@every_table
@every_dtype
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "gelu"])
@pytest.mark.parametrize("width", [1, 17, 100])
def test_a_gated_activation_agrees_with_torch(name: str, dtype: torch.dtype, activation: str, width: int) -> None:
    gate_up = randn(5, 2 * width, dtype=dtype) * 4
    expected = REFERENCE.gated(gate_up, activation)
    # The activation is rounded before the product, so two roundings may differ.
    found = ops_of(name).gated(gate_up, activation)
    torch.testing.assert_close(found, expected, rtol=2 * RELATIVE[dtype], atol=1e-6)
    assert torch.equal(ops_of(name).gated(strided(gate_up), activation), found)


@every_table
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_no_gate_is_too_large_or_too_small(name: str, activation: str) -> None:
    gates = torch.tensor([[-1e6, -1000.0, -100.0, -89.0, -87.5, 0.0, 87.5, 100.0, 1000.0, 1e6]])
    found = ops_of(name).gated(torch.cat((gates, torch.ones_like(gates)), dim=1), activation)
    assert bool(found.isfinite().all())
    torch.testing.assert_close(found, REFERENCE.activate(gates, activation), rtol=1e-5, atol=1e-30)


# ---- the door -------------------------------------------------------------------------------------------------------

F32 = randn(4, 16)
WEIGHT = randn(8, 16)


@pytest.mark.parametrize(
    "call",
    [
        lambda ops: ops.linear(F32.double(), WEIGHT.double()),
        lambda ops: ops.linear(F32, WEIGHT.bfloat16()),
        lambda ops: ops.linear(F32, WEIGHT[:, :8]),
        lambda ops: ops.linear(F32, randn(16, 8).T),
        lambda ops: ops.linear(F32, WEIGHT, randn(8).bfloat16()),
        lambda ops: ops.rms_norm(F32, randn(16).bfloat16(), 1e-5),
        lambda ops: ops.rms_norm(F32, randn(15), 1e-5),
        lambda ops: ops.rms_norm(F32.double(), randn(16), 1e-5),
        lambda ops: ops.rms_norm(F32.T, randn(4), 1e-5),
        lambda ops: ops.add_rms_norm(F32, randn(4, 15), randn(16), 1e-5),
        lambda ops: ops.add_rms_norm(F32, randn(4, 16).half(), randn(16), 1e-5),
        lambda ops: ops.rope(randn(4, 2, 8), randn(4, 4).double(), randn(4, 4).double()),
        lambda ops: ops.rope(randn(4, 2, 8), randn(3, 4), randn(3, 4)),
        lambda ops: ops.rope(randn(4, 2, 8), randn(4, 5), randn(4, 5)),
        lambda ops: ops.rope(randn(4, 2, 8).double(), randn(4, 4), randn(4, 4)),
        lambda ops: ops.rope(randn(4, 8, 2).transpose(1, 2), randn(4, 4), randn(4, 4)),
        lambda ops: ops.gated(F32.double(), "silu"),
        lambda ops: ops.gated(F32, "swish"),
    ],
)
def test_what_the_kernels_cannot_compute_is_refused(call: "object") -> None:
    with pytest.raises(OptionError):
        call(native.NativeOps(1, deterministic=True))  # type: ignore[operator]


def test_a_product_without_deterministic_is_checked_as_well() -> None:
    with pytest.raises(OptionError, match="does not meet weight"):
        native.NativeOps(1).linear(F32, WEIGHT.bfloat16())
