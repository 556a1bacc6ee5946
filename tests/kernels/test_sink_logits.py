"""Attention with a learned sink logit per head: one more term in every softmax's denominator, which carries no value.

Knows nothing of models; pools and steps are those of ``builders/paged.py``.
"""

import pytest
import torch
from paged import PoisonedCache, geometry_of, grant_chunk, layout_for, random_steps, step_of, text_of
from torch import Tensor

from kvfolio.cache.holding import SequenceId
from kvfolio.cache.ledger import Ledger
from kvfolio.errors import OptionError
from kvfolio.kernels.reference import ReferenceOps
from kvfolio.kernels.shapes import LayerGeometry

native = pytest.importorskip(
    "kvfolio.kernels.native", reason="the C++ kernels are not built here", exc_type=ImportError
)

LOGITS = torch.tensor([2.5, -1.0, 80.0, -300.0])  # two like scores, one that swallows them all, one that is nothing
TOLERANCES = {"f32": (1e-4, 1e-5), "bf16": (1e-4, 2.0**-7), "f16": (1e-4, 2.0**-10)}  # as in test_attention.py
EVERY_OPS = [*(f"native-{name}" for name in native.instruction_sets()), "reference"]


def ops_named(name: str) -> "native.NativeOps | ReferenceOps":
    if name == "reference":
        return ReferenceOps(deterministic=True)
    return native.NativeOps(1, deterministic=True, instruction_set=name.removeprefix("native-"))


def chunked(ops_name: str, geometry: LayerGeometry, sizes: list[int], sink_logits: Tensor | None) -> Tensor:
    """[num_tokens, num_q_heads, v_width] of a lone sequence computed in chunks of these sizes."""
    text = text_of(geometry, sum(sizes), seed=11)
    ledger = Ledger(layout_for(geometry, 24, 1))
    ledger.admit(SequenceId(0))
    cache = PoisonedCache(ops_named(ops_name), geometry, 24, 1)
    out = []
    for size in sizes:
        out.append(cache.attend(step_of([(grant_chunk(ledger, SequenceId(0), size), text)]), sink_logits))
        ledger.commit(SequenceId(0))
    return torch.cat(out)


@pytest.mark.parametrize("ops_name", EVERY_OPS)
@pytest.mark.parametrize("window", [None, 20])
def test_a_sink_logit_weighs_in_the_denominator_alone(ops_name: str, window: int | None) -> None:
    geometry = geometry_of(window=window, block_tokens=16)
    num_tokens = 280  # two runs
    text = text_of(geometry, num_tokens, seed=11)
    out = chunked(ops_name, geometry, [num_tokens], LOGITS)
    for position in (0, 5, 16, 255, 256, 279):
        first = 0 if window is None else max(0, position - window + 1)
        for head in range(4):
            keys, values = text.k[first : position + 1, head // 2].double(), text.v[first : position + 1, head // 2]
            scores = (keys @ text.q[position, head].double()) * geometry.k_width**-0.5
            total = scores.exp().sum() + LOGITS[head].double().exp()
            expected = (scores.exp() / total) @ values.double()
            torch.testing.assert_close(out[position, head].double(), expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize(
    ("stored", "exact"), [("f32", "f32"), ("bf16", "bf16"), ("int8", "f16"), ("int4-rotated/int6-token", "f32")]
)
@pytest.mark.parametrize("window", [None, 7])
def test_every_table_of_kernels_agrees_with_the_reference(stored: str, exact: str, window: int | None) -> None:
    geometry = geometry_of(stored, exact, (4, 2), (64, 32), 16, window)
    layout = layout_for(geometry, 24, 3)
    reference = PoisonedCache(ReferenceOps(), geometry, 24, 3)
    tables = [
        PoisonedCache(native.NativeOps(1, instruction_set=name), geometry, 24, 3) for name in native.instruction_sets()
    ]
    atol, rtol = TOLERANCES[exact]
    for step in random_steps(geometry, layout, seed=3, num_steps=5):
        expected = reference.attend(step, LOGITS)
        assert bool(expected.isfinite().all())
        for table in tables:
            torch.testing.assert_close(table.attend(step, LOGITS), expected, atol=atol, rtol=rtol)
            assert torch.equal(table.sealed, reference.sealed)


@pytest.mark.parametrize("ops_name", EVERY_OPS)
@pytest.mark.parametrize("window", [None, 40])
def test_no_chunking_changes_a_bit(ops_name: str, window: int | None) -> None:
    geometry = geometry_of("int8", "bf16", (4, 2), (24, 20), 16, window)
    expected = chunked(ops_name, geometry, [280], LOGITS)  # over the edge of a run at 256
    for sizes in ([7] * 40, [255, 1, 1, 23]):
        assert torch.equal(chunked(ops_name, geometry, sizes, LOGITS), expected)


@pytest.mark.parametrize("ops_name", EVERY_OPS[:-1])  # torch cuts a softmax of one more term in another way
def test_a_sink_logit_without_weight_changes_no_bit(ops_name: str) -> None:
    geometry = geometry_of(block_tokens=16)
    nothing = torch.full((4,), -torch.inf)
    assert torch.equal(chunked(ops_name, geometry, [280], nothing), chunked(ops_name, geometry, [280], None))


@pytest.mark.parametrize("wrong", [LOGITS[:3], LOGITS.bfloat16(), LOGITS.repeat_interleave(2)[::2]])
def test_sink_logits_of_another_shape_dtype_or_stride_are_refused(wrong: Tensor) -> None:
    with pytest.raises(OptionError, match=r"attend: sink_logits is .*; expected dense f32 \[4\]"):
        chunked(EVERY_OPS[0], geometry_of(), [5], wrong)
