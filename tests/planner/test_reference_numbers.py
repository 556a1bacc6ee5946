"""Numbers that the field knows by heart, each with the assumption it rests on, through the public door.

Knows nothing of how they are computed.
"""

from dataclasses import replace

import pytest

import kvfolio
from kvfolio.planner.report import Plan
from kvfolio.spec.formats import parse_cache_format
from kvfolio.spec.layers import FullAttention, LatentAttention
from kvfolio.spec.model import ModelSpec

GIB, KIB, MIB = 2**30, 2**10, 2**20
EIGHTY_GB = {"device": "h100-sxm", "device_memory": "80GB", "utilisation": 1.0, "weights_bytes": "16.06GB"}


def llama_with(**changes: int) -> ModelSpec:
    """Llama 3.1 8B with other key/value heads."""
    spec = kvfolio.read_model("llama-3.1-8b")
    return replace(spec, layers=tuple(replace(kind, **changes) for kind in spec.layers))  # type: ignore[type-var]


def plan_at(model: str | ModelSpec, context: int, **options: object) -> Plan:
    return kvfolio.plan(model, context=context, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "per_token"),
    [
        ("llama-3.1-8b", 131_072),  # 2 · 32 layers · 8 heads · 128 · 2 bytes
        ("deepseek-v3", 70_272),  # 61 layers · (512 + 64) · 2 bytes
        ("gpt3-175b", 4_718_592),  # 2 · 96 · 96 · 128 · 2
        ("llama-2-7b", 524_288),
        ("falcon-7b", 8_192),  # one head of 64, by multi_query
        ("falcon-40b", 122_880),  # 8 heads of 64, not the 128 that transformers stores
    ],
)
def test_a_token_takes_its_bytes_at_16_bits(model: str, per_token: int) -> None:
    kv = plan_at(model, 1024).kv
    assert (kv.bytes_per_token, kv.bytes_fixed, kv.bytes_at["1024"]) == (per_token, 0, 1024 * per_token)


@pytest.mark.parametrize(("model", "gib"), [("gpt3-175b", 576), ("llama-3.1-70b", 40), ("llama-3.1-8b", 16)])
def test_a_long_sequence_takes_its_gib(model: str, gib: int) -> None:
    assert plan_at(model, 131_072).kv.bytes_at["131072"] == gib * GIB


def test_eight_bits_halve_llamas_cache() -> None:
    kv = plan_at("llama-3.1-8b", 131_072, kv_format="fp8").kv  # without scales
    assert (kv.bytes_per_token, kv.bytes_at["131072"]) == (64 * KIB, 8 * GIB)


def test_deepseek_v3_as_plain_heads_would_take_57_times_less_and_more() -> None:
    kv = plan_at("deepseek-v3", 1000).kv  # 128 heads of 192 + 128 expanded; 3.8 MiB counts 128 + 128
    assert kv.naive_bytes_at["1000"] == 1000 * 61 * 128 * (192 + 128) * 2
    plain = FullAttention(128, 128, 128)
    per_token = 61 * plain.token_bytes(parse_cache_format("bf16"))
    assert per_token / MIB == pytest.approx(3.8, abs=0.02)
    assert per_token / kv.bytes_per_token == pytest.approx(57, abs=0.2)


def test_deepseek_v2_at_6_bits_is_93_percent_below_deepseek_67b() -> None:
    small = plan_at("deepseek-v2", 1000, kv_format="int6-g0").kv.bytes_per_token  # six bits a number and no scales
    large = plan_at("deepseek-67b", 1000).kv.bytes_per_token
    assert large == 2 * 95 * 8 * 128 * 2
    assert 1 - small / large == pytest.approx(0.933, abs=0.0005)


@pytest.mark.parametrize(("heads", "users"), [(32, 29), (8, 119), (1, 952)])
def test_users_of_4096_tokens_on_80_decimal_gb(heads: int, users: int) -> None:
    assert plan_at(llama_with(num_kv_heads=heads), 4096, **EIGHTY_GB).users.reserved == users


def test_a_latent_of_576_numbers_in_32_layers_gives_423_users() -> None:
    spec = replace(kvfolio.read_model("llama-3.1-8b"), layers=(LatentAttention(512, 64, 32, 192, 128),) * 32)
    assert plan_at(spec, 4096, **EIGHTY_GB).users.reserved == 423


def test_three_users_at_131072_tokens_and_the_step_of_one_takes_9_92_ms() -> None:
    plan = plan_at("llama-3.1-8b", 131_072, **EIGHTY_GB)  # 16.06 GB of weights and 16 GiB of cache at 3.35 TB/s
    assert plan.users.reserved == 3
    assert plan.step is not None
    assert 9.92e-3 <= plan.step.time_s <= 9.93e-3
    assert plan.step.limit == "memory"


def test_an_empty_cache_allows_208_tokens_a_second() -> None:
    plan = plan_at("llama-3.1-8b", 0, **EIGHTY_GB)
    assert plan.step is not None
    assert int(plan.step.tokens_per_s_per_user) == 208
    assert plan.users.reserved is None  # an empty cache bounds nobody


def test_a_card_of_80_gib_holds_130_users_where_80_gb_hold_119() -> None:
    whole = {name: value for name, value in EIGHTY_GB.items() if name != "device_memory"}
    assert plan_at("llama-3.1-8b", 4096, **whole).users.reserved == 130
    assert plan_at("llama-3.1-8b", 4096, **EIGHTY_GB).users.reserved == 119


def test_palm_with_multi_head_attention_takes_3_terabytes_thrice_its_weights() -> None:
    plan = plan_at("palm-540b-mha", 2048)  # Pope et al. (2211.05102), table 1: batch 512
    cache = 512 * plan.kv.bytes_at["2048"]
    assert cache / 1e12 == pytest.approx(3.04, abs=0.005)
    assert cache / plan.weights_bytes == pytest.approx(3, abs=0.25)


def test_a_cache_saves_1250_times_the_flops_of_500_tokens_behind_1000() -> None:
    flops = plan_at("llama-3.1-8b", 1500, prompt_tokens=1000, tokens=500).flops  # weights only; 499 steps
    assert flops.without_cache_ratio_decode_only == 1250.0
    assert round(flops.without_cache_ratio_with_prefill, 1) == 416.8
    assert flops.attention_per_token / 1e9 == pytest.approx(0.79, abs=0.005)  # 4 · 32 heads · 128 · 1500 · 32 layers


@pytest.mark.parametrize(
    ("kv_memory", "tokens", "paged", "each", "devices"),
    [
        ("60GiB", 8192, False, 60, 334),
        ("60GiB", 2048, True, 240, 84),
        ("60GB", 8192, False, 55, 364),
        ("60GB", 2000, True, 228, 88),
    ],
)
def test_a_fleet_for_20000_conversations(kv_memory: str, tokens: int, paged: bool, each: int, devices: int) -> None:
    length = {"mean_tokens": tokens} if paged else {"context": tokens}
    fleet = kvfolio.fleet("llama-3.1-8b", 20_000, kv_memory=kv_memory, **length)  # type: ignore[arg-type]
    assert (fleet.conversations_per_device, fleet.num_devices) == (each, devices)
    assert fleet.bytes_per_conversation == tokens * 131_072


def test_mistral_at_32k_with_8192_tokens_in_flight_makes_vllm_reserve_three_times_the_window() -> None:
    kv = plan_at("mistral-7b-v0.1", 32_768, in_flight=8192).kv
    assert kv.bytes_at["32768"] == 4096 * 131_072
    assert kv.reserved_vllm_bytes_at["32768"] / kv.bytes_at["32768"] == pytest.approx(3.0, abs=0.01)


def test_deepseek_v4_pro_takes_a_tenth_of_v3_2_at_a_million_tokens() -> None:
    million = 2**20
    new, old = plan_at("deepseek-v4-pro", million).kv, plan_at("deepseek-v3.2", million).kv
    assert new.bytes_at[str(million)] / old.bytes_at[str(million)] == pytest.approx(0.10, abs=0.02)
