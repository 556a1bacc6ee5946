"""Fleets, what-if ladders and advice.

Knows nothing of how they are shown.
"""

from dataclasses import replace

import pytest

import kvfolio
from kvfolio.errors import BudgetError, OptionError
from kvfolio.planner.advice import advise
from kvfolio.planner.options import read_options
from kvfolio.planner.report import make_plan
from kvfolio.planner.whatif import what_if

LLAMA = kvfolio.read_model("llama-3.1-8b")


def test_a_promised_speed_can_bound_a_fleet_before_memory_does() -> None:
    free = kvfolio.fleet(LLAMA, 1000, device="h100-sxm", context=4096)
    promised = kvfolio.fleet(LLAMA, 1000, device="h100-sxm", context=4096, tokens_per_s=100)
    assert (free.limit, promised.limit) == ("memory", "speed")
    assert promised.tokens_per_s_per_user is not None
    assert promised.tokens_per_s_per_user >= 100
    assert promised.conversations_per_replica < free.conversations_per_replica
    more = kvfolio.plan(LLAMA, device="h100-sxm", context=4096, users=promised.conversations_per_replica + 1).step
    assert more is not None
    assert more.tokens_per_s_per_user < 100


def test_a_fleets_price_is_that_of_its_devices() -> None:
    fleet = kvfolio.fleet(LLAMA, 1000, device="h100-sxm", context=4096, price_per_hour=2.5)
    assert fleet.price_per_hour == 2.5 * fleet.num_devices
    assert fleet.price_per_million_tokens is not None
    assert fleet.tokens_per_s_total is not None
    assert fleet.price_per_million_tokens == pytest.approx(fleet.price_per_hour / (fleet.tokens_per_s_total * 3.6e-3))


def test_replicas_on_several_devices_count_all_of_them() -> None:
    fleet = kvfolio.fleet("llama-3.1-70b", 100, device="h100-sxm", devices=4, context=8192)
    assert fleet.num_devices == 4 * fleet.num_replicas
    assert fleet.num_replicas * fleet.conversations_per_replica >= 100


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        ({"kv_memory": "1MiB"}, "one conversation of 8,192 tokens takes 1.00 GiB"),
        ({"device_memory": "10GB"}, "the weights take 14.96 GiB on each of 1 devices"),
        ({"tokens_per_s": 10_000.0}, "10000 tokens/s cannot be kept: a single user gets"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused_with_the_numbers(options: dict[str, object], fault: str) -> None:
    with pytest.raises(BudgetError, match=fault):
        kvfolio.fleet(LLAMA, 10, device="h100-sxm", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "options", [{"conversations": 0}, {"kv_memory": 0}, {"tokens_per_s": 0.0}, {"price_per_hour": float("nan")}]
)
def test_fleet_options_outside_their_range_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(OptionError):
        kvfolio.fleet(LLAMA, **({"conversations": 1} | options))  # type: ignore[arg-type]


def test_the_ladder_has_the_same_body_in_four_designs_and_four_formats() -> None:
    ladder = what_if(LLAMA, read_options(context=4096, device="h100-sxm"))
    rows = {row.name: row for row in ladder}
    assert list(rows) == ["as published", "MHA", "GQA-8", "MQA", "MLA", "bf16", "int8", "int6", "int4"]
    assert [rows[name].plan.kv.bytes_per_token for name in ("MHA", "GQA-8", "MQA", "MLA")] == [
        524_288,
        131_072,
        16_384,
        36_864,  # 32 · (4 · 128 + 64) · 2
    ]
    assert rows["as published"].ratio == rows["GQA-8"].ratio == rows["bf16"].ratio == 1.0
    assert len({row.plan.weights_bytes for row in ladder}) == 1


def test_a_model_without_heads_has_no_other_designs() -> None:
    ladder = what_if(kvfolio.read_model("mamba-2.8b"), read_options(context=4096, device="h100-sxm"))
    assert [row.name for row in ladder] == ["as published", "bf16", "int8", "int6", "int4"]


def test_advice_names_the_devices_that_would_hold_the_weights() -> None:
    spec, options = kvfolio.read_model("llama-3.1-70b"), read_options(device="h100-sxm", context=8192)
    plan = make_plan(spec, options)
    (sentence,) = advise(spec, options, plan)
    assert sentence.startswith("the weights do not fit: short by ")
    assert sentence.endswith("--devices 2 holds them and a cache")
    assert make_plan(spec, replace(options, devices=2)).users.reserved


def test_advice_names_formats_with_the_users_that_they_would_give() -> None:
    options = read_options(
        device="h100-sxm", device_memory="80GB", utilisation=1.0, weights_bytes="16.06GB", context=4096
    )
    assert "--kv-format fp8: 119 → 238 users at 4K" in advise(LLAMA, options, make_plan(LLAMA, options))


@pytest.mark.parametrize(
    ("name", "mqa"),
    [
        ("falcon-h1-0.5b", 36 * 2 * 64 * 2),  # attention beside a state in every layer
        ("deepseek-v4-flash", 43 * 2 * 512 * 2),  # compressed layers, windows and all
        ("llama-3.2-11b-vision", 32 * 2 * 128 * 2),  # cross-attention stays
    ],
)
def test_designs_reach_into_every_layer_that_attends_to_the_text(name: str, mqa: int) -> None:
    rows = {row.name: row for row in what_if(kvfolio.read_model(name), read_options(context=4096, device="h100-sxm"))}
    assert rows["MQA"].plan.kv.bytes_per_token == mqa
    assert rows["as published"].plan.weights_bytes == rows["MLA"].plan.weights_bytes


def test_a_fleet_whose_weights_and_caches_exceed_a_named_device_is_refused() -> None:
    with pytest.raises(
        BudgetError, match=r"60\.00 GiB for caches and 958\.\d+ GiB of weights do not fit on one h100-sxm"
    ):
        kvfolio.fleet("kimi-k2", 100, kv_memory="60GiB", device="h100-sxm")


def test_a_fleet_has_one_context_and_no_options_that_mean_nothing_to_it() -> None:
    with pytest.raises(OptionError, match="one context, 2 were given"):
        kvfolio.fleet(LLAMA, 10, context="4k,8k")
    with pytest.raises(OptionError, match="users has no meaning for a fleet"):
        kvfolio.fleet(LLAMA, 10, users=3)
    with pytest.raises(OptionError, match=r"conversations is 2\.5"):
        kvfolio.fleet(LLAMA, 2.5)  # type: ignore[arg-type]


def test_a_prefix_that_no_device_holds_is_refused() -> None:
    with pytest.raises(BudgetError, match=r"one conversation of 1,048,576 tokens takes 128\.00 GiB"):
        kvfolio.fleet(LLAMA, 100, mean_tokens="1M", prefix_tokens="1M", device="h100-sxm")


def test_advice_does_not_promise_what_the_plan_denies() -> None:
    spec = kvfolio.read_model("kimi-k2")
    options = read_options(device="h100-sxm", context=0)
    assert "--devices 2 " not in advise(spec, options, make_plan(spec, options))[0]
    one = read_options(device="h100-sxm", context="1M", users=100)
    sentence = advise(LLAMA, one, make_plan(LLAMA, one))[0]
    longest = int(sentence.rpartition("the longest that fits has ")[2].split(" ")[0].replace(",", ""))
    assert make_plan(LLAMA, replace(one, contexts=(longest,))).users.reserved == 1


def test_a_format_for_latents_has_one_other_design() -> None:
    options = read_options(context=4096, device="h100-sxm", devices=16, kv_format="fp8-mla")
    names = [row.name for row in what_if(kvfolio.read_model("deepseek-v3"), options)]
    assert names == ["as published", "MLA", "bf16", "int8", "int6", "int4"]


def test_memory_that_was_given_is_short_on_the_stage_with_the_largest_cache() -> None:
    with pytest.raises(BudgetError, match=r"takes 2\.03 GiB .* 1\.86 GiB for caches: short by 169\.\d\d MiB"):
        kvfolio.fleet("kimi-k3", 1, kv_memory=2 * 10**9, pipeline=2, context="128k")  # the other stage would have room
