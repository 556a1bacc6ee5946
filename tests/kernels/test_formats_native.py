"""The C++ kernels store the very bytes that codec.py defines, whatever the numbers, and read them back to one answer.

Any format, width, block and fill by Hypothesis; sinks; broken and extreme numbers. Knows nothing of models.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from paged import PoisonedCache, SinkCache, Step, geometry_of
from torch import Tensor

from kvfolio.kernels.codec import TORCH_DTYPES
from kvfolio.kernels.reference import ReferenceOps
from kvfolio.kernels.shapes import ChunkBlocks
from kvfolio.spec.formats import FORMAT_NAMES

native = pytest.importorskip(
    "kvfolio.kernels.native", reason="the C++ kernels are not built here", exc_type=ImportError
)
VARIANTS = [f"int{bits}-{variant}" for bits in (2, 3, 4, 5, 6, 8) for variant in ("rotated", "token")]
WIDTHS = [64, 80, 96, 128, 256]
TOLERANCES = {"f32": (1e-4, 1e-4), "bf16": (1e-2, 2.0**-6), "f16": (1e-3, 2.0**-8)}  # absolute, relative


def numbers(kind: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
    """Random ones of a kind that encoders find hard."""
    x = torch.randn(shape, generator=generator)
    if kind == "outliers":
        return torch.where(torch.rand(shape, generator=generator) < 0.02, x * 200, x)
    if kind == "channels":  # as keys of real models: some channels far from zero
        return x + 20 * torch.randn(shape[-1], generator=generator)
    if kind == "zeros":
        return torch.where(torch.rand(shape, generator=generator) < 0.8, -0.0 * x, x)
    if kind == "constant":
        return x[..., :1].expand(shape).contiguous()
    if kind == "tiny":
        return x * 1e-38
    if kind == "ties":  # halves of steps
        return (x * 4).round() / 2
    return x


@settings(max_examples=250, deadline=None)
@given(data=st.data())
def test_any_block_is_stored_bit_for_bit_and_read_to_the_same_answer(data: st.DataObject) -> None:
    k_name = data.draw(st.sampled_from([*FORMAT_NAMES, *VARIANTS, "int8-channel"]), "keys")
    v_name = data.draw(st.sampled_from([*FORMAT_NAMES, *VARIANTS]), "values")
    exact = data.draw(st.sampled_from(["f32", "bf16", "f16"]), "exact")
    width, latent = data.draw(st.sampled_from(WIDTHS), "width"), data.draw(st.booleans(), "latent")
    heads, k_width = (1, width + 16) if latent else (2, width)
    tokens = data.draw(st.sampled_from([16, 32, 64]), "block_tokens")
    kinds = [data.draw(st.sampled_from(["normal", "outliers", "channels", "zeros", "constant", "ties"])) for _ in "kv"]
    fills = data.draw(st.lists(st.integers(1, 2 * tokens + 3), min_size=1, max_size=3), "chunks")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000), "seed"))
    geometry = geometry_of(f"{k_name}/{v_name}", exact, (4, heads), (k_width, width), tokens, latent=latent)
    num_sinks = 0 if geometry.is_lossless else data.draw(st.integers(0, 2), "sinks")
    table = data.draw(st.sampled_from(native.instruction_sets()), "table")
    caches = [SinkCache(ops, geometry, 8, num_sinks) for ops in (ReferenceOps(), native.NativeOps(1, False, table))]
    start = 0
    for count in fills:
        num_blocks = (start + count) // tokens
        sinks = tuple(range(num_sinks))[::-1][:num_blocks]
        chunk = ChunkBlocks(start, count, 0, tuple(range(num_blocks)), 0, sinks)
        dtype = TORCH_DTYPES[exact]
        q = torch.randn(count, 4, k_width, generator=generator).to(dtype)
        k, v = (
            numbers(kind, (count, heads, size), generator).to(dtype)
            for kind, size in zip(kinds, (k_width, width), strict=True)
        )
        v = k[:, :, :width] if latent else v
        # As scores, not as a choice of one token: what decides between two near the top is not rounding.
        expected, found = (cache.attend(Step((chunk,), q * 0.1, k, v)) for cache in caches)
        start += count
        for mine, other in zip(caches[0].pools, caches[1].pools, strict=True):
            assert torch.equal(mine, other)
        atol, rtol = TOLERANCES[exact]
        largest = float(expected.abs().max())
        torch.testing.assert_close(found, expected, atol=atol * max(1.0, largest), rtol=rtol)


@pytest.mark.parametrize("name", [*FORMAT_NAMES, *VARIANTS, "int8-channel"])
@pytest.mark.parametrize("kind", ["tiny", "huge", "nan", "inf"])
@pytest.mark.parametrize("table", native.instruction_sets())
def test_extreme_and_broken_numbers_leave_the_same_bytes(name: str, kind: str, table: str) -> None:
    geometry = geometry_of(name, "f32", (2, 1), (48, 24), 16)
    generator = torch.Generator().manual_seed(4)
    q = torch.randn(40, 2, 48, generator=generator)
    k, v = (numbers(kind, (40, 1, width), generator) for width in (48, 24))
    if kind == "huge":
        k, v = k * 1e38, v * 1e38
    if kind in ("nan", "inf"):
        k[5, 0, 3], v[20, 0, 7] = float(kind), -float(kind)
    step = Step((ChunkBlocks(0, 40, 0, (1, 0), 0),), q, k, v)
    caches = [PoisonedCache(ops, geometry, 2, 1) for ops in (ReferenceOps(), native.NativeOps(1, False, table))]
    for cache in caches:
        cache.attend(step)
    mine, other = (cache.sealed for cache in caches)
    if name == "bf16" and kind == "nan":  # torch writes NaN in more than one way
        mine, other = (pool.view(torch.bfloat16).nan_to_num(nan=-7.0) for pool in (mine, other))
    assert torch.equal(mine, other)


@pytest.mark.parametrize("name", ["int8", "int4", "fp8"])
def test_queries_read_sinks_exactly_and_not_as_they_are_stored(name: str) -> None:
    geometry = geometry_of(name, "f32", (2, 2), (32, 32), 16)
    exact = geometry_of("f32", "f32", (2, 2), (32, 32), 16)
    generator = torch.Generator().manual_seed(8)
    q, k, v = (torch.randn(20, 2, 32, generator=generator) for _ in range(3))
    for ops in (ReferenceOps(), native.NativeOps(1)):
        step = Step((ChunkBlocks(0, 20, 0, (1,), 0, (0,)),), q, k, v)
        plain = Step((ChunkBlocks(0, 20, 0, (1,), 0),), q, k, v)
        found = SinkCache(ops, geometry, 2, 1).attend(step)
        torch.testing.assert_close(found, PoisonedCache(ops, exact, 2, 1).attend(plain), rtol=1e-5, atol=1e-6)
        assert not torch.allclose(found[16:], SinkCache(ops, geometry, 2, 1).attend(plain)[16:], rtol=1e-4)
