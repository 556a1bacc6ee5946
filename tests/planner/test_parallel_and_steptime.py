"""Several devices, and the time of a step: each against a sum written out here.

Knows nothing of options or reports.
"""

import itertools

import pytest

from kvfolio.errors import OptionError
from kvfolio.planner.parallel import DeviceShare, device_shares, fullest
from kvfolio.planner.steptime import Speeds, prefill_flops, prefill_time, step_time, weights_read_share
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


def device_share(spec: ModelSpec, weights_bytes: int, tensor: int) -> DeviceShare:
    (share,) = device_shares(spec, weights_bytes, tensor)
    return share


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


def test_stages_are_runs_of_layers_equal_to_one() -> None:
    full, window = FullAttention(8, 64, 64), SlidingWindow(8, 64, 64, 4)
    shares = device_shares(spec_of(*(full,) * 4, *(window,) * 3), 7000, 1, 3)
    held = {(share.spec.layers, share.weights_bytes, share.num_stages) for share in shares}
    assert held == {((full,) * 3, 3000, 1), ((full, window), 2000, 1), ((window,) * 2, 2000, 1)}


def test_stages_that_look_alike_are_one_share() -> None:
    (share,) = device_shares(spec_of(*(FullAttention(8, 64, 64),) * 8), 8000, 1, 4)
    assert (share.num_stages, len(share.spec.layers), share.weights_bytes) == (4, 2, 2000)
    assert sum(share.num_stages for share in device_shares(spec_of(*(NoCache(),) * 32), 1, 1, 31)) == 31


def test_the_stage_on_which_the_fewest_sequences_fit_binds() -> None:
    full = FullAttention(8, 64, 64)
    shares = device_shares(spec_of(*(NoCache(),) * 4, *(full,) * 3), 7000, 1, 2)

    def bytes_each(spec: ModelSpec) -> int:
        return sum(count * kind.bytes_at(10, FMT) for kind, count in spec.kinds())

    assert fullest(shares, lambda share: 10**6 - share.weights_bytes, bytes_each).spec.layers == (full,) * 3


@pytest.mark.parametrize(("tensor", "pipeline"), [(0, 1), (1, 0), (1, 3)])
def test_devices_that_make_no_sense_are_refused(tensor: int, pipeline: int) -> None:
    with pytest.raises(OptionError):
        device_shares(spec_of(NoCache(), NoCache()), 1, tensor, pipeline)


def test_a_step_reads_the_weights_once_and_every_users_cache() -> None:
    shares = device_shares(spec_of(*(FullAttention(8, 64, 64),) * 4), 2 * 10**9, 1)
    step = step_time(shares, FMT, 1000, 5, SPEEDS)
    cache = 5 * 4 * 1000 * 8 * 128 * 2
    assert (step.weights_bytes_read, step.cache_bytes_read, step.limit) == (2 * 10**9, cache, "memory")
    assert step.time_s == pytest.approx((2 * 10**9 + cache) / 10**12)
    assert step.tokens_per_s_total == pytest.approx(5 * step.tokens_per_s_per_user)
    assert step.flops == 5 * (2 * 10**9 + 4 * 4 * 32 * 64 * 1000)


def test_many_users_make_a_step_compute_bound() -> None:
    shares = device_shares(spec_of(SlidingWindow(1, 8, 8, 4)), 2 * 10**9, 1)
    step = step_time(shares, FMT, 1000, 1000, SPEEDS)
    assert step.limit == "compute"
    assert step.time_s == pytest.approx(step.flops / 10**14)


def test_two_devices_halve_the_step_of_a_model_with_enough_heads() -> None:
    spec = spec_of(*(FullAttention(8, 64, 64),) * 4)
    one, two = (step_time(device_shares(spec, 2 * 10**9, n), FMT, 1000, 4, SPEEDS).time_s for n in (1, 2))
    assert two == pytest.approx(one / 2)


def test_a_token_passes_every_pipeline_stage() -> None:
    spec = spec_of(*(FullAttention(8, 64, 64),) * 5)

    def time_s(pipeline: int, users: int) -> float:
        return step_time(device_shares(spec, 2 * 10**9, 1, pipeline), FMT, 1000, users, SPEEDS).time_s

    assert time_s(5, 1) == time_s(2, 1) == pytest.approx(time_s(1, 1))  # alone: as long as on one device
    assert time_s(5, 5) == pytest.approx(time_s(5, 1))  # four more users fill the other stages
    assert time_s(2, 2) == pytest.approx(2 * time_s(1, 1) * 3 / 5)  # the stage of three layers is the slower


@pytest.mark.parametrize("context", [1, 1000, 10**6])
@pytest.mark.parametrize("pipeline", [1, 3, 5])
def test_one_user_more_never_makes_anybody_quicker(pipeline: int, context: int) -> None:
    shares = device_shares(spec_of(*(FullAttention(8, 64, 64),) * 5), 2 * 10**9, 1, pipeline)
    times = [step_time(shares, FMT, context, users, SPEEDS).time_s for users in range(1, 40)]
    assert all(more >= fewer * (1 - 1e-9) for fewer, more in itertools.pairwise(times))


def test_a_batch_reads_the_experts_that_its_tokens_reach() -> None:
    moe = WeightCount(100, 20, 200, "config", 90, 9, 1, expert_bytes=180)
    assert weights_read_share(moe, 1) == pytest.approx(0.20)  # the dense tenth and one expert in nine
    assert weights_read_share(moe, 2) == pytest.approx(0.10 + 0.90 * (1 - (8 / 9) ** 2))
    assert weights_read_share(moe, 1000) == pytest.approx(1.0)
    assert weights_read_share(DENSE, 1) == 1.0


def test_experts_in_fewer_bits_are_read_as_fewer_bytes() -> None:
    moe = WeightCount(100, 20, 65, "config", 90, 9, 1, expert_bytes=45)  # 2 bytes a number, experts half of one
    assert weights_read_share(moe, 1) * 65 == pytest.approx(20 + 45 / 9)


def test_a_tower_that_no_text_token_passes_is_not_read() -> None:
    assert weights_read_share(WeightCount(100, 80, 200, "config"), 1) == pytest.approx(0.8)
    assert weights_read_share(WeightCount(0, 0, 0, "config"), 1) == 1.0  # not counted: whatever is given is read


@pytest.mark.parametrize("tokens", [1, 100, 256, 257, 5000])
def test_a_prompts_flops_are_the_sum_over_its_tokens(tokens: int) -> None:
    spec = spec_of(FullAttention(8, 64, 64), SlidingWindow(8, 64, 64, 50))
    attention = sum(2 * 32 * 128 * (n + min(n, 50)) for n in range(1, tokens + 1))
    assert prefill_flops(spec, tokens) == pytest.approx(2 * 10**9 * tokens + attention, rel=1e-4)


def test_a_short_prompt_waits_for_the_weights_and_a_long_one_for_the_products() -> None:
    spec = spec_of(*(FullAttention(8, 64, 64),) * 2)
    shares = device_shares(spec, 2 * 10**9, 1)
    assert prefill_time(shares, 1, SPEEDS) == pytest.approx(2 * 10**9 / 10**12)
    assert prefill_time(shares, 10_000, SPEEDS) == pytest.approx(prefill_flops(spec, 10_000) / 10**14)
    assert prefill_time(device_shares(spec, 2 * 10**9, 1, 2), 10_000, SPEEDS) == pytest.approx(
        prefill_flops(spec, 10_000) / 10**14
    )
    assert prefill_time(shares, 1, Speeds(10**12, None)) is None


def test_a_short_prompt_does_not_read_the_experts_that_it_does_not_reach() -> None:
    moe = WeightCount(10**9, 2 * 10**8, 2 * 10**9, "config", 9 * 10**8, 9, 1, expert_bytes=18 * 10**8)
    shares = device_shares(spec_of(FullAttention(8, 64, 64), weights=moe), 2 * 10**9, 1)
    assert prefill_time(shares, 1, SPEEDS) == pytest.approx(4 * 10**8 / 10**12)
