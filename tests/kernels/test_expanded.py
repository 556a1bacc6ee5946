"""Latent attention in the expanded form against the absorbed one, on the same pools: one answer, the same bytes.

Knows nothing of networks: projections are random.
"""

from dataclasses import replace

import pytest
import torch
from paged import SinkCache, geometry_of, grant_chunk, layout_for, text_of
from torch import Tensor

from kvfolio.cache.holding import SequenceId
from kvfolio.cache.ledger import Ledger
from kvfolio.kernels import expanded
from kvfolio.kernels.reference import ReferenceOps

native = pytest.importorskip(
    "kvfolio.kernels.native", reason="the C++ kernels are not built here", exc_type=ImportError
)
OPS = {"reference": ReferenceOps, "native": lambda: native.NativeOps(1)}


class Projections:
    """Random W_UK and W_UV."""

    def __init__(self, num_heads: int, plain_width: int, v_width: int, rank: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.keys = torch.randn(num_heads, rank, plain_width, generator=generator) * rank**-0.5
        self.values = torch.randn(num_heads, rank, v_width, generator=generator) * rank**-0.5

    def expand(self, latents: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
        return latents @ self.keys[heads], latents @ self.values[heads]


@pytest.mark.parametrize("ops_name", OPS)
@pytest.mark.parametrize(("most_numbers", "num_sinks"), [(1 << 26, 0), (1 << 26, 2), (4000, 1)])
@pytest.mark.parametrize("stored", ["f32", "int8", "int4", "bf16/int3", "fp8"])
def test_expanded_attention_is_absorbed_attention(
    ops_name: str, stored: str, most_numbers: int, num_sinks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expanded, "_MOST_NUMBERS", most_numbers)  # few: one head at a time
    geometry = geometry_of(stored, "f32", (6, 1), (40, 32), 16, latent=True)
    ops, exact = OPS[ops_name](), ReferenceOps()
    projections = Projections(6, 12, 20, 32)
    text = text_of(geometry, 90, seed=1)
    plain, turned = torch.randn(90, 6, 12, generator=torch.Generator().manual_seed(2)), text.q[:, :, 32:]
    caches = [SinkCache(exact, geometry, 6, num_sinks) for _ in "ae"]
    ledger = Ledger(layout_for(geometry, 6, 1))
    ledger.admit(SequenceId(0))
    for num_tokens in (20, 1, 45, 24):
        chunk = grant_chunk(ledger, SequenceId(0), num_tokens)
        chunk = replace(chunk, sinks=tuple(range(num_sinks))[: chunk.stop // 16])
        rows = slice(chunk.start, chunk.stop)
        absorbed = torch.einsum("nhp,hrp->nhr", plain[rows], projections.keys)
        q = torch.cat((absorbed, turned[rows]), dim=-1)
        memory = caches[0]._memory
        sums = exact.attend(exact.plan(geometry, (chunk,)), memory, q, text.k[rows], text.v[rows], 0.3)
        expected = torch.einsum("nhr,hrv->nhv", sums, projections.values)
        whole = torch.cat((plain[rows], turned[rows]), dim=-1)
        found = expanded.attend_expanded(ops, geometry, chunk, caches[1]._memory, whole, text.k[rows], projections, 0.3)
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
        for mine, other in zip(caches[0].pools, caches[1].pools, strict=True):
            assert torch.equal(mine, other)
        ledger.commit(SequenceId(0))
