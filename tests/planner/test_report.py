"""Plans as wholes: what they promise whatever is asked, and each part against a sum written out here.

Knows nothing of how a plan is shown.
"""

import dataclasses
import json
import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvfolio
from kvfolio.errors import OptionError, UnknownModelError
from kvfolio.planner.hardware import Device
from kvfolio.planner.options import PlanOptions, read_options
from kvfolio.planner.parallel import device_shares
from kvfolio.planner.report import Plan, make_plan
from kvfolio.spec.formats import F32
from kvfolio.spec.layers import (
    CombinedLayer,
    CrossAttention,
    FullAttention,
    LatentAttention,
    LayerKind,
    NoCache,
    RecurrentState,
    SlidingWindow,
)
from kvfolio.spec.model import ModelSpec, WeightCount

CARD = Device("card", "maker", 80 * 10**9, 2 * 10**12, 500e12, None, None, "a test", "")
FULL = FullAttention(8, 128, 128)
WINDOW = SlidingWindow(8, 128, 128, 1000)
LATENT = LatentAttention(512, 64, 32, 192, 128)
STATE = RecurrentState("mamba2", 100_000, F32, 3000, F32)


def spec_of(*layers: LayerKind, weights: WeightCount | None = None, max_context: int | None = 131_072) -> ModelSpec:
    counted = weights or WeightCount(10**9, 10**9, 2 * 10**9, "config")
    return ModelSpec("toy", "toy", layers, max_context, "bf16", 4096, 32, counted, ())


def plan_of(*layers: LayerKind, **options: object) -> Plan:
    return make_plan(spec_of(*layers), PlanOptions(**({"device": CARD, "contexts": (4096,)} | options)))  # type: ignore[arg-type]


def numbers_in(value: object) -> Iterator[float]:
    if isinstance(value, dict):
        for item in value.values():
            yield from numbers_in(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from numbers_in(item)
    elif isinstance(value, int | float):
        yield value


layer_kinds = st.sampled_from([FULL, WINDOW, LATENT, STATE, NoCache(), CrossAttention(4, 64, 64, 0)])


@given(
    layers=st.lists(layer_kinds, min_size=1, max_size=8),
    contexts=st.lists(st.integers(0, 10**7), min_size=1, max_size=3, unique=True),
    users=st.integers(1, 10**6),
    memory=st.integers(1, 10**13),
    devices=st.sampled_from([1, 2, 3, 8, 64]),
    pipeline=st.integers(1, 2),
    kv_format=st.sampled_from(["auto", "fp8", "int4", "int6-g64", "k8v4", "fp8-g128"]),
    mean=st.none() | st.integers(1, 10**6),
    prefix=st.integers(0, 10**5),
)
@settings(deadline=None, max_examples=150)
def test_no_plan_has_a_negative_number_or_one_that_is_none(
    layers: list[LayerKind],
    contexts: list[int],
    users: int,
    memory: int,
    devices: int,
    pipeline: int,
    kv_format: str,
    mean: int | None,
    prefix: int,
) -> None:
    pipeline = min(pipeline, len(layers))
    mean = None if mean is None or not contexts[0] else min(mean, contexts[0])
    prefix = min(prefix, contexts[0] if mean is None else mean)
    options = PlanOptions(
        replace(CARD, memory_bytes=memory),
        contexts=tuple(contexts),
        users=users,
        devices=devices,
        pipeline=pipeline,
        kv_format=kv_format,
        mean_tokens=mean,
        prefix_tokens=prefix,
    )
    plan = make_plan(spec_of(*layers), options)
    values = dataclasses.asdict(plan)
    assert all(number >= 0 and math.isfinite(number) for number in numbers_in(values))
    assert json.loads(json.dumps(values))["kv"]["bytes_at"] == plan.kv.bytes_at
    assert plan.short_bytes == 0 or plan.users.reserved in (0, None)


def test_the_layers_of_a_plan_add_up_to_its_whole() -> None:
    kv = plan_of(*(FULL,) * 3, *(WINDOW,) * 5, STATE, LATENT, NoCache()).kv
    assert sum(layer.num_layers * layer.bytes_per_token for layer in kv.layers) == kv.bytes_per_token
    assert sum(layer.num_layers * layer.bytes_fixed for layer in kv.layers) == kv.bytes_fixed
    assert kv.bytes_at["4096"] == kv.bytes_fixed + kv.bytes_per_token * 4096
    assert [layer.num_layers for layer in kv.layers] == [3, 5, 1, 1, 1]


def test_memory_that_weights_leave_is_for_caches() -> None:
    plan = plan_of(*(FULL,) * 32, utilisation=0.5, reserve=10**9)
    assert plan.kv_memory_bytes == 40 * 10**9 - 10**9 - 2 * 10**9
    assert plan.users.reserved == plan.kv_memory_bytes // (32 * 4096 * 4096)


def test_weights_that_do_not_fit_are_short_by_a_number_and_nobody_fits() -> None:
    plan = plan_of(FULL, weights_bytes=100 * 10**9, utilisation=1.0)
    assert (plan.short_bytes, plan.kv_memory_bytes, plan.users.reserved, plan.users.paged) == (20 * 10**9, 0, 0, 0)


def test_a_context_counts_in_whole_blocks_of_memory() -> None:
    exact, over = plan_of(FULL, contexts=(4096,)), plan_of(FULL, contexts=(4097,))
    assert over.kv.bytes_at["4097"] - exact.kv.bytes_at["4096"] == 4096
    assert over.contexts[0].device_bytes - exact.contexts[0].device_bytes == 16 * 4096


def test_a_prefix_that_all_share_is_stored_once() -> None:
    alone = plan_of(*(FULL,) * 32, mean_tokens=2048)
    shared = plan_of(*(FULL,) * 32, mean_tokens=2048, prefix_tokens=1024)
    each = 32 * 4096
    memory = alone.kv_memory_bytes
    assert alone.users.paged == memory // (each * 2048)
    assert shared.users.paged == (memory - each * 1024) // (each * 1024)
    assert shared.users.prefix_saving_bytes == each * 1024 * (shared.users.paged - 1)


def test_a_window_is_no_prefix_to_share() -> None:
    assert plan_of(WINDOW, mean_tokens=2048, prefix_tokens=1024).users.prefix_saving_bytes == 0


def test_contexts_beyond_what_the_model_reads_are_marked() -> None:
    plan = plan_of(FULL, contexts=(131_072, 131_073))
    assert [row.beyond_model for row in plan.contexts] == [False, True]


def test_no_context_asked_for_means_usual_ones_that_the_model_can_read() -> None:
    def contexts(limit: int | None) -> list[int]:
        plan = make_plan(spec_of(FULL, max_context=limit), PlanOptions(CARD))
        return [row.context for row in plan.contexts]

    assert contexts(131_072) == contexts(None) == [4096, 32_768, 131_072]
    assert contexts(40_960) == [4096, 32_768]
    assert contexts(2048) == [2048]


def test_the_cache_outweighs_the_weights_where_the_plan_says() -> None:
    plan = plan_of(*(FULL,) * 32, WINDOW, users=3)
    at = plan.break_even_context
    assert at is not None
    spec = spec_of(*(FULL,) * 32, WINDOW)
    held = [3 * make_plan(spec, PlanOptions(CARD, (n,))).contexts[0].bytes for n in (at - 1, at)]
    assert held[0] <= plan.weights_bytes < held[1]


def test_a_cache_that_does_not_grow_never_outweighs_and_is_never_too_long() -> None:
    plan = plan_of(WINDOW, STATE)
    assert (plan.break_even_context, plan.largest_context) == (None, None)


def test_the_largest_context_fits_and_one_block_more_does_not() -> None:
    plan = plan_of(*(FULL,) * 32, WINDOW, users=7)
    largest = plan.largest_context
    assert largest is not None
    users = [plan_of(*(FULL,) * 32, WINDOW, contexts=(n,)).users.reserved for n in (largest, largest + 1)]
    assert users[0] is not None and users[1] is not None
    assert users[0] >= 7 > users[1]


def test_weights_published_in_f32_are_counted_in_16_bits_and_that_is_said() -> None:
    spec = replace(spec_of(FULL, weights=WeightCount(10**9, 10**9, 4 * 10**9, "config")), dtype="f32")
    plan = make_plan(spec, PlanOptions(CARD))
    assert plan.weights_bytes == 2 * 10**9
    assert any("f32" in sentence for sentence in plan.assumptions)


def test_an_open_encoder_takes_the_tokens_that_are_given() -> None:
    cross = CrossAttention(4, 64, 64, 0)
    assert plan_of(FULL, cross).kv.bytes_fixed == 0
    assert plan_of(FULL, cross, encoder_tokens=100).kv.bytes_fixed == 100 * 4 * 128 * 2


def test_a_device_without_a_known_bandwidth_gives_bytes_and_no_speeds() -> None:
    plan = plan_of(FULL, device=replace(CARD, bandwidth_bytes_per_s=None))
    assert plan.step is None
    assert plan.users.reserved
    assert any("bandwidth" in sentence for sentence in plan.assumptions)


# ---- options as people give them ------------------------------------------------------------------------------------


def test_sizes_contexts_and_devices_are_read_as_people_write_them() -> None:
    options = read_options(
        context="4096, 32k,1M", device="H100 SXM", device_memory="80GB", mean_tokens="2k", reserve="1GiB"
    )
    assert options.contexts == (4096, 32_768, 2**20)
    assert (options.device.name, options.device.memory_bytes) == ("h100-sxm", 80 * 10**9)
    assert (options.mean_tokens, options.reserve) == (2048, 2**30)
    assert read_options(device_memory="80GiB").device.memory_bytes == 80 * 2**30


def test_a_device_of_ones_own_needs_memory_and_bandwidth_and_no_name() -> None:
    device = read_options(device_memory="24GB", bandwidth="1TB", flops=1e14).device
    assert (device.name, device.bandwidth_bytes_per_s, device.bf16_flops) == ("custom", 10**12, 1e14)


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"context": -1}, "-1 is no number of tokens"),
        ({"context": "many"}, "'many' is no number of tokens"),
        ({"context": ""}, "is no number of tokens"),
        ({"context": 10**12 + 1}, "contexts must be"),
        ({"users": 0}, "users is 0; accepted: 1 to"),
        ({"utilisation": 0.0}, "utilisation is 0.0"),
        ({"utilisation": 1.1}, "utilisation is 1.1"),
        ({"utilisation": math.nan}, "utilisation is nan"),
        ({"devices": 0}, "devices is 0"),
        ({"block_tokens": 5}, "block_tokens is 5"),
        ({"device": "h1000"}, "h1000"),
        ({"device_memory": "80 parsecs"}, "unknown unit"),
        ({"tokens": 1}, "tokens is 1; accepted: 2"),
        ({"colour": "red"}, "unknown option 'colour'"),
    ],
)
def test_options_outside_their_range_are_refused_by_name(given: dict[str, object], fault: str) -> None:
    with pytest.raises(OptionError, match=fault):
        read_options(**given)  # type: ignore[arg-type]


def test_an_unknown_format_is_refused_with_the_known_ones() -> None:
    with pytest.raises(UnknownModelError, match="unknown format 'int7' of keys; known: f32"):
        read_options(kv_format="int7")


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(OptionError, match="3 pipeline stages for 2 layers"):
        plan_of(FULL, FULL, pipeline=3)


def test_the_python_front_door_takes_a_name_a_spec_or_a_path() -> None:
    by_name = kvfolio.plan("llama-3.1-8b", context=4096)
    assert kvfolio.plan(kvfolio.read_model("llama-3.1-8b"), context=[4096]) == by_name
    with pytest.raises(dataclasses.FrozenInstanceError):
        by_name.weights_bytes = 1  # type: ignore[misc]


def test_weights_that_are_not_known_give_no_speed_and_are_named() -> None:
    plan = make_plan(spec_of(FULL, weights=WeightCount(0, 0, 0, "config")), PlanOptions(CARD))
    assert (plan.step, plan.contexts[0].ttft_s) == (None, None)
    assert any("weights are not known" in sentence for sentence in plan.assumptions)
    stated = make_plan(spec_of(FULL, weights=WeightCount(0, 0, 0, "config")), PlanOptions(CARD, weights_bytes=10**9))
    assert stated.step is not None
    assert stated.step.weights_bytes_read == 10**9


# ---- several devices, shared prefixes, what does not fit -------------------------------------------------------------


def test_the_fullest_stage_bounds_the_users_not_the_one_with_most_layers() -> None:
    wide = FullAttention(8, 128, 128)
    layers = (*(WINDOW,) * 6, *(wide,) * 4)  # two stages of five: the second holds four layers that grow
    plan = plan_of(*layers, contexts=(100_000,), pipeline=2, weights_bytes=10**10)
    held = 4 * 100_000 * 4096 + 1000 * 4096
    assert plan.users.reserved == (int(80e9 * 0.9) - 5 * 10**9) // held
    assert plan.contexts[0].device_bytes == held
    assert plan.device.weights_bytes == 5 * 10**9


@given(
    layers=st.lists(layer_kinds, min_size=2, max_size=9),
    context=st.integers(1, 10**6),
    pipeline=st.integers(1, 9),
    devices=st.sampled_from([1, 2, 4]),
)
@settings(deadline=None, max_examples=60)
def test_all_users_fit_on_every_stage(layers: list[LayerKind], context: int, pipeline: int, devices: int) -> None:
    spec = spec_of(*layers)
    options = PlanOptions(CARD, (context,), pipeline=min(pipeline, len(layers)), devices=devices)
    users = make_plan(spec, options).users.reserved
    if users is None:
        return
    for share in device_shares(spec, spec.weights.num_bytes, devices, options.pipeline):
        tokens = -(-context // 16) * 16
        held = sum(count * kind.bytes_at(tokens, options.cache_format) for kind, count in share.spec.kinds())
        assert share.weights_bytes + users * held <= int(80e9 * 0.9)


def test_a_state_beside_attention_is_no_prefix_to_share() -> None:
    both = CombinedLayer((FULL, STATE))
    plan = plan_of(both, mean_tokens=4096)
    assert plan.users.prefix_saving_bytes == 0
    assert plan.users.paged == plan.users.reserved
    assert plan_of(both, mean_tokens=4096, prefix_tokens=1600).users.prefix_saving_bytes == 1600 * 4096 * (
        (plan_of(both, mean_tokens=4096, prefix_tokens=1600).users.paged or 0) - 1
    )


def test_a_prefix_as_long_as_the_sequence_leaves_each_a_block_of_its_own() -> None:
    plan = plan_of(FULL, mean_tokens=2048, prefix_tokens=2048)
    assert plan.users.paged == (plan.kv_memory_bytes - 4096 * 2032) // (4096 * 16)


def test_a_prefix_that_does_not_fit_lets_nobody_in() -> None:
    assert plan_of(*(FULL,) * 32, contexts=(2**20,), mean_tokens=2**20, prefix_tokens=2**20).users.paged == 0


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"mean_tokens": 8192}, "mean_tokens is 8,192, more than the context of 4,096"),
        ({"mean_tokens": 1024, "prefix_tokens": 2048}, "prefix_tokens is 2,048, more than a sequence of 1,024"),
        ({"prefix_tokens": 8192}, "prefix_tokens is 8,192, more than a sequence of 4,096"),
        ({"kv_format": "fp8-mla"}, "fp8-mla stores latents, and toy has none"),
    ],
)
def test_lengths_and_formats_at_odds_with_each_other_are_refused(options: dict[str, object], fault: str) -> None:
    with pytest.raises(OptionError, match=fault):
        plan_of(FULL, **options)


def test_more_users_than_fit_are_marked() -> None:
    plan = plan_of(*(FULL,) * 32, users=1000)
    assert plan.step is not None
    assert not plan.step.fits
    assert plan_of(*(FULL,) * 32, users=2).step.fits  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "given",
    [
        {"context": True},
        {"context": b"4096"},
        {"context": 4096.5},
        {"context": []},
        {"users": 1.5},
        {"users": "5"},
        {"devices": 2.5},
        {"utilisation": "0.9"},
        {"flops": "989e12"},
        {"flops": 1e-300},
        {"device": 5},
        {"device_memory": True},
        {"bandwidth": 0},
        {"kv_format": 5},
    ],
)
def test_options_of_another_type_are_refused_and_never_rounded(given: dict[str, object]) -> None:
    with pytest.raises(OptionError, match=f"{next(iter(given))} is|no number of tokens"):
        read_options(**given)  # type: ignore[arg-type]


def test_floats_without_a_fraction_are_whole_numbers() -> None:
    options = read_options(context=4096.0, device_memory=80e9, users=2.0)  # type: ignore[arg-type]
    assert (options.contexts, options.device.memory_bytes, options.users) == ((4096,), 80 * 10**9, 2)
