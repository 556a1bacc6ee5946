"""Several devices, and the time of a step: each against a sum written out here.

Knows nothing of options or reports.
"""

import pytest

from kvfolio.errors import OptionError
from kvfolio.planner.parallel import device_share
from kvfolio.planner.steptime import Speeds, experts_read_share, prefill_flops, prefill_time, step_time
from kvfolio.spec.formats import BF16, F32, CacheFormat
from kvfolio.spec.layers import (
    CombinedLayer,
    FullAttention,
    LatentAttention,
    LayerKind,
    NoCache,
    RecurrentState,
    SharedCache,
    SlidingWindow,
)
from kvfolio.spec.model import ModelSpec, WeightCount

FMT = CacheFormat(BF16, BF16)
SPEEDS = Speeds(10**12, 10**14)
DENSE = WeightCount(10**9, 10**9, 2 * 10**9, "config")
STATE = RecurrentState("mamba2", 1001, F32, 30, BF16)


def spec_of(*layers: LayerKind, weights: WeightCount = DENSE, num_q_heads: int = 32) -> ModelSpec:
    return ModelSpec("toy", "toy", layers, None, "bf16", 64, num_q_heads, weights, ())


@pytest.mark.parametrize(
    ("heads", "devices", "each"), [(8, 1, 8), (8, 2, 4), (8, 8, 1), (8, 16, 1), (1, 8, 1), (6, 4, 2)]
)
def test_heads_are_divided_and_copied_where_there_are_too_few(heads: int, devices: int, each: int) -> None:
    share = device_share(spec_of(FullAttention(heads, 64, 64)), 10**9, devices)
    assert share.spec.layers == (FullAttention(each, 64, 64),)
    assert share.weights_bytes == -(-(10**9) // devices)


def test_one_head_on_eight_devices_is_stored_eight_times_and_that_is_said() -> None:
    assert (
        "1 key/value heads on 8 devices: each is stored 8 times"
        in device_share(spec_of(FullAttention(1, 64, 64)), 1, 8).notes
    )


def test_a_latent_lies_whole_on_every_device() -> None:
    latent = LatentAttention(512, 64, 128, 192, 128)
    share = device_share(spec_of(latent, num_q_heads=128), 1, 8)
    assert share.spec.layers == (latent,)
    assert share.spec.num_q_heads == 16
    assert any("latent" in note for note in share.notes)


def test_states_shares_and_combined_layers_are_cut_too() -> None:
    full = FullAttention(8, 64, 64)
    share = device_share(spec_of(CombinedLayer((full, STATE)), SharedCache(full)), 1, 4)
    cut = FullAttention(2, 64, 64)
    state = RecurrentState("mamba2", 251, F32, 8, BF16)  # rounded up
    assert share.spec.layers == (CombinedLayer((cut, state)), SharedCache(cut))


def test_the_fullest_pipeline_stage_is_counted() -> None:
    full = FullAttention(8, 64, 64)
    share = device_share(spec_of(*(NoCache(),) * 4, *(full,) * 3), 7000, 1, 2)
    assert share.spec.layers == (full, full, full)
    assert share.weights_bytes == 3000


@pytest.mark.parametrize(("tensor", "pipeline"), [(0, 1), (1, 0), (1, 3)])
def test_devices_that_make_no_sense_are_refused(tensor: int, pipeline: int) -> None:
    with pytest.raises(OptionError):
        device_share(spec_of(NoCache(), NoCache()), 1, tensor, pipeline)


def test_a_step_reads_the_weights_once_and_every_users_cache() -> None:
    share = device_share(spec_of(*(FullAttention(8, 64, 64),) * 4), 2 * 10**9, 1)
    step = step_time(share, FMT, 1000, 5, SPEEDS)
    cache = 5 * 4 * 1000 * 8 * 128 * 2
    assert (step.weights_bytes_read, step.cache_bytes_read, step.limit) == (2 * 10**9, cache, "memory")
    assert step.time_s == pytest.approx((2 * 10**9 + cache) / 10**12)
    assert step.tokens_per_s_total == pytest.approx(5 * step.tokens_per_s_per_user)
    assert step.flops == 5 * (2 * 10**9 + 4 * 4 * 32 * 64 * 1000)


def test_many_users_make_a_step_compute_bound() -> None:
    share = device_share(spec_of(SlidingWindow(1, 8, 8, 4)), 2 * 10**9, 1)
    step = step_time(share, FMT, 1000, 1000, SPEEDS)
    assert step.limit == "compute"
    assert step.time_s == pytest.approx(step.flops / 10**14)


def test_two_devices_halve_the_step_of_a_model_with_enough_heads() -> None:
    spec = spec_of(*(FullAttention(8, 64, 64),) * 4)
    one, two = (step_time(device_share(spec, 2 * 10**9, n), FMT, 1000, 4, SPEEDS).time_s for n in (1, 2))
    assert two == pytest.approx(one / 2)


def test_a_token_passes_every_pipeline_stage() -> None:
    spec = spec_of(*(FullAttention(8, 64, 64),) * 4)
    one = step_time(device_share(spec, 2 * 10**9, 1), FMT, 1000, 1, SPEEDS)
    two = step_time(device_share(spec, 2 * 10**9, 1, 2), FMT, 1000, 1, SPEEDS)
    assert two.time_s == pytest.approx(one.time_s)  # alone: as long as before
    both = step_time(device_share(spec, 2 * 10**9, 1, 2), FMT, 1000, 2, SPEEDS)
    assert both.time_s == pytest.approx(two.time_s)  # the second user fills the other stage


def test_a_batch_reads_the_experts_that_its_tokens_reach() -> None:
    moe = WeightCount(100, 20, 200, "config", expert_params=90, num_experts=9, experts_per_token=1)
    assert experts_read_share(moe, 1) == pytest.approx(0.20)  # the dense tenth and one expert in nine
    assert experts_read_share(moe, 2) == pytest.approx(0.10 + 0.90 * (1 - (8 / 9) ** 2))
    assert experts_read_share(moe, 1000) == pytest.approx(1.0)
    assert experts_read_share(DENSE, 1) == 1.0


@pytest.mark.parametrize("tokens", [1, 100, 256, 257, 5000])
def test_a_prompts_flops_are_the_sum_over_its_tokens(tokens: int) -> None:
    spec = spec_of(FullAttention(8, 64, 64), SlidingWindow(8, 64, 64, 50))
    attention = sum(2 * 32 * 128 * (n + min(n, 50)) for n in range(1, tokens + 1))
    assert prefill_flops(spec, tokens) == pytest.approx(2 * 10**9 * tokens + attention, rel=1e-4)


def test_a_short_prompt_waits_for_the_weights_and_a_long_one_for_the_products() -> None:
    share = device_share(spec_of(FullAttention(8, 64, 64)), 2 * 10**9, 1)
    assert prefill_time(share, 1, SPEEDS) == pytest.approx(2 * 10**9 / 10**12)
    assert prefill_time(share, 10_000, SPEEDS) == pytest.approx(prefill_flops(share.spec, 10_000) / 10**14)
    assert prefill_time(share, 1, Speeds(10**12, None)) is None
