"""Attention where numbers or sizes are extreme: a broken number is passed on, a window beyond the context is none."""

import pytest
import torch
from torch import Tensor

from kvfolio.kernels.reference import ReferenceOps
from kvfolio.kernels.shapes import ChunkBlocks, LayerGeometry, LayerMemory
from kvfolio.spec.formats import find_cache_format
from kvfolio.store.view import MAX_WINDOW

native = pytest.importorskip("kvfolio.kernels.native", reason="the extension is not built")
F32 = find_cache_format("f32")
NUM_TOKENS = 300  # two runs


def attend(ops: object, window: int | None, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    geometry = LayerGeometry(2, 1, 16, 16, 16, window, F32, F32)
    size = geometry.layer_bytes(F32)
    pool = torch.full((20, size), 255, dtype=torch.uint8)
    memory = LayerMemory(pool, 0, torch.full((1, size), 255, dtype=torch.uint8), 0)
    chunk = ChunkBlocks(0, NUM_TOKENS, 0, tuple(range(NUM_TOKENS // 16)), 0)
    plan = ops.plan(geometry, (chunk,))  # type: ignore[attr-defined]
    out: Tensor = ops.attend(plan, memory, q, k, v, 0.25)  # type: ignore[attr-defined]
    return out


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return tuple(torch.randn(NUM_TOKENS, heads, 16, generator=generator) for heads in (2, 1, 1))  # type: ignore[return-value]


@pytest.mark.parametrize("place", [0, 5, 255, 256, 299])
@pytest.mark.parametrize("instruction_set", native.instruction_sets())
def test_a_key_that_is_nan_spoils_every_query_that_reads_it_and_no_other(place: int, instruction_set: str) -> None:
    q, k, v = inputs()
    k[place] = float("nan")
    out = attend(native.NativeOps(1, instruction_set=instruction_set), None, q, k, v)
    assert bool(out[place:].isnan().all())
    assert bool(out[:place].isfinite().all())


@pytest.mark.parametrize("instruction_set", native.instruction_sets())
def test_a_window_beyond_the_context_changes_no_bit(instruction_set: str) -> None:
    ops = native.NativeOps(1, instruction_set=instruction_set)
    full = attend(ops, None, *inputs())
    for window in (NUM_TOKENS, 100_000, MAX_WINDOW):
        assert torch.equal(attend(ops, window, *inputs()), full)
    assert torch.equal(attend(ReferenceOps(), MAX_WINDOW, *inputs()), attend(ReferenceOps(), None, *inputs()))
