"""Rotary positions in both spellings, and the context they reach (SZ-11).

Knows nothing of frequencies: ``models/parts.py`` computes those.
"""

import math

import pytest
from published import GEMMA3_270M, GPT2, LLAMA31_8B, MISTRAL_7B, QWEN2_7B, QWEN3_06B, SMOLLM2, Config, read, without

from kvfolio.errors import BrokenModelError, UnknownModelError
from kvfolio.spec.model import Rope
from kvfolio.spec.ropes import llama3_rope_from_factors

PLAIN = without(SMOLLM2, "rope_theta", "rope_scaling")
YARN: Config = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}


def test_the_old_and_the_new_spelling_mean_the_same() -> None:
    expected = Rope(500_000.0, 128, "llama3", 8.0, 8192, 1.0, 4.0)
    assert read(LLAMA31_8B).network.rope == expected
    scaling = LLAMA31_8B["rope_scaling"]
    assert isinstance(scaling, dict)
    parameters = scaling | {"rope_theta": 500_000.0}
    spec = read(without(LLAMA31_8B, "rope_scaling", "rope_theta"), rope_parameters=parameters)
    assert (spec.network.rope, spec.network.rope_local) == (expected, None)


def test_the_type_may_be_called_type() -> None:
    rope = read(PLAIN, rope_theta=5e5, rope_scaling={"type": "linear", "factor": 2}).network.rope
    assert rope == Rope(5e5, 64, "linear", 2.0)


@pytest.mark.parametrize("parameters", [None, {}, {"rope_type": "default"}])
def test_without_a_base_the_usual_one_is_assumed_and_said(parameters: Config | None) -> None:
    spec = read(PLAIN, rope_parameters=parameters)
    assert spec.network.rope == Rope(10_000.0, 64)
    assert spec.assumptions == ("rope_theta is absent: 10,000 assumed",)


def test_learned_positions_have_no_rope() -> None:
    assert read(GPT2).network.rope is None


def test_gemma3_turns_its_two_kinds_of_layer_at_two_speeds() -> None:
    network = read(GEMMA3_270M).network
    assert (network.rope, network.rope_local) == (Rope(1_000_000.0, 256), Rope(10_000.0, 256))


def test_gemma3s_scaling_concerns_the_global_layers_only_in_both_spellings() -> None:
    scaled = Rope(1_000_000.0, 256, "linear", 8.0)
    old = read(GEMMA3_270M, rope_scaling={"rope_type": "linear", "factor": 8.0})
    plain = without(GEMMA3_270M, "rope_theta", "rope_local_base_freq", "rope_scaling")
    new = read(
        plain,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    )
    assert (old.network.rope, old.network.rope_local) == (scaled, Rope(10_000.0, 256))
    assert old == new
    assumed = read(plain)
    assert assumed.network == read(GEMMA3_270M).network
    assert "rope_local_base_freq is absent: 10,000 assumed" in assumed.assumptions


def test_gemma3_refuses_parameters_that_do_not_say_for_which_layers() -> None:
    with pytest.raises(BrokenModelError, match="one entry each for full_attention and sliding_attention"):
        read(GEMMA3_270M, rope_parameters={"rope_type": "default", "rope_theta": 1e6})


def test_the_llama_family_may_nest_them_too() -> None:
    mixed = without(QWEN3_06B, "rope_theta") | {
        "layer_types": ["full_attention", "sliding_attention"] * 14,
        "sliding_window": 64,
    }
    both = {"full_attention": {"rope_theta": 2e6}, "sliding_attention": {"rope_theta": 3e4}}
    network = read(mixed, rope_parameters=both).network
    assert (network.rope, network.rope_local) == (Rope(2e6, 128), Rope(3e4, 128))
    same = {"full_attention": {"rope_theta": 2e6}, "sliding_attention": {"rope_theta": 2e6}}
    assert read(mixed, rope_parameters=same).network.rope_local is None
    full = read(without(QWEN3_06B, "rope_theta"), rope_parameters=both).network
    assert (full.rope, full.rope_local) == (Rope(2e6, 128), None)
    windowed = read(without(MISTRAL_7B, "rope_theta"), rope_parameters=both).network
    assert (windowed.rope, windowed.rope_local) == (Rope(3e4, 128), None)


def test_parameters_that_would_be_read_for_no_kind_of_layer_are_refused() -> None:
    both = {"rope_type": "yarn", "factor": 4.0, "full_attention": {"rope_type": "default"}}
    with pytest.raises(BrokenModelError, match="factor stands beside entries"):
        read(QWEN3_06B, rope_parameters=both)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beta_slow": 32.0}, "beta_slow is 32.0.*below beta_fast"),
        ({"beta_fast": 0.5}, "beta_slow is 1.0.*below beta_fast, which is 0.5"),
        ({"original_max_position_embeddings": 6}, "original_max_position_embeddings is 6.*7 or more"),
        ({"truncate": None}, "truncate is None.*true or false"),
    ],
)
def test_a_yarn_without_a_ramp_is_refused(changes: Config, message: str) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 4096}
    with pytest.raises(BrokenModelError, match=message):
        read(QWEN3_06B, rope_parameters=yarn | changes)


@pytest.mark.parametrize("entry", [{}, {"full_attention": None}])
def test_a_kind_of_layer_without_an_entry_is_named(entry: Config) -> None:
    with pytest.raises(BrokenModelError, match="rope_parameters: full_attention is missing"):
        read(QWEN3_06B, rope_parameters={"sliding_attention": {"rope_theta": 2e6}} | entry)


def test_yarn_is_read_with_its_defaults_and_its_own_numbers() -> None:
    plain = read(QWEN2_7B, rope_scaling=YARN).network.rope
    assert plain == Rope(1e6, 128, "yarn", 4.0, 8192, beta_fast=32.0, beta_slow=1.0, attention_factor=None)
    own = YARN | {"beta_fast": 16, "beta_slow": 2, "attention_factor": 1.5}
    assert read(QWEN2_7B, rope_scaling=own).network.rope == Rope(
        1e6, 128, "yarn", 4.0, 8192, beta_fast=16.0, beta_slow=2.0, attention_factor=1.5
    )


def test_yarn_may_leave_the_ends_of_its_ramp_as_they_are() -> None:
    rope = read(QWEN2_7B, rope_scaling=YARN | {"truncate": False}).network.rope
    assert rope == Rope(1e6, 128, "yarn", 4.0, 8192, truncate=False)
    assert read(QWEN2_7B, rope_scaling=YARN | {"truncate": True}).network.rope == Rope(1e6, 128, "yarn", 4.0, 8192)
    with pytest.raises(BrokenModelError, match="truncate is 0; accepted: true or false"):
        read(QWEN2_7B, rope_scaling=YARN | {"truncate": 0})


def test_yarns_two_magnitudes_become_one_factor() -> None:
    rope = read(QWEN2_7B, rope_scaling=YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}).network.rope
    assert rope is not None
    assert rope.attention_factor == pytest.approx((0.07 * math.log(4) + 1) / (0.13 * math.log(4) + 1))


def test_yarn_without_a_factor_stretches_to_the_stored_context() -> None:
    spec = read(QWEN2_7B, rope_scaling=YARN | {"factor": None})
    assert spec.network.rope is not None
    assert spec.network.rope.factor == 131072 / 8192
    assert any("yarn's factor is absent: 16" in line for line in spec.assumptions)


def test_an_original_context_at_the_top_of_the_config_wins() -> None:
    rope = read(QWEN2_7B, rope_scaling=YARN, original_max_position_embeddings=4096).network.rope
    assert rope is not None
    assert rope.original_context == 4096


@pytest.mark.parametrize(
    ("stored", "parameters", "context"),
    [
        (32_768, YARN | {"original_max_position_embeddings": 32_768}, 131_072),  # switched on by hand
        (131_072, YARN | {"original_max_position_embeddings": 32_768}, 131_072),
        (40_960, YARN | {"original_max_position_embeddings": 32_768}, 40_960),
        (32_768, {"rope_type": "yarn", "factor": 4.0}, 131_072),
        (131_072, LLAMA31_8B["rope_scaling"], 131_072),
        (131_072, {"rope_type": "linear", "factor": 8.0}, 131_072),
        (32_768, None, 32_768),
    ],
)
def test_the_stored_context_is_multiplied_only_for_a_yarn_that_starts_at_it(
    stored: int, parameters: Config | None, context: int
) -> None:
    assert read(QWEN2_7B, max_position_embeddings=stored, rope_scaling=parameters).max_context == context


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "rope type 'dynamic' is not supported; known: default, linear"),
        ({"rope_type": "longrope", "factor": 2.0}, "rope type 'longrope' is not supported"),
        ({"rope_type": "default", "mrope_section": [1, 2]}, "rope parameter 'mrope_section' is not known"),
        ({"rope_type": "default", "partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5: partly rotated"),
    ],
)
def test_a_scaling_that_cannot_be_expressed_is_refused_by_name(parameters: Config, message: str) -> None:
    with pytest.raises(UnknownModelError, match=message):
        read(SMOLLM2, rope_scaling=parameters)


def test_partly_rotated_heads_are_refused_unless_the_part_is_the_whole() -> None:
    assert read(SMOLLM2, partial_rotary_factor=1.0) == read(SMOLLM2)
    with pytest.raises(UnknownModelError, match=r"partial_rotary_factor is 0\.25"):
        read(SMOLLM2, partial_rotary_factor=0.25)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rope_type": "linear"}, "rope_scaling: factor is missing"),
        ({"rope_type": "linear", "factor": 0.5}, "factor is 0.5; accepted: a number of 1 or more"),
        ({"rope_type": "llama3", "factor": 8.0}, "low_freq_factor is missing"),
        (
            {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 4, "high_freq_factor": 4},
            "high_freq_factor is 4.0; accepted: a number above low_freq_factor, which is 4",
        ),
        ({"rope_theta": 1}, "rope_theta is 1; accepted: a number above 1"),
    ],
)
def test_a_scaling_with_wrong_numbers_is_refused_with_the_field(parameters: Config, message: str) -> None:
    with pytest.raises(BrokenModelError, match=message):
        read(SMOLLM2, rope_scaling=parameters)


def llama3_divisors(factor: float, low: float, high: float, original: int) -> list[float]:
    """As llama.cpp's converter writes them for heads of 64 and base 500,000, in the order of its three cases."""
    divisors = []
    for index in range(0, 64, 2):
        wavelength = 2 * math.pi * 500_000.0 ** (index / 64)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(factor)
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return divisors


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_the_divisors_in_a_gguf_file_give_back_llama3s_parameters(factor: float) -> None:
    rope = llama3_rope_from_factors(500_000.0, llama3_divisors(factor, 1.0, 4.0, 8192), "file")
    assert rope == Rope(500_000.0, 64, "llama3", factor, 8192, 1.0, 4.0)


@pytest.mark.parametrize(
    "divisors", [llama3_divisors(8.0, 1.0, 2.0, 8192), llama3_divisors(8.0, 1.0, 4.0, 4096), [2.0] * 32, []]
)
def test_divisors_that_are_not_llama3s_are_refused(divisors: list[float]) -> None:
    with pytest.raises(UnknownModelError, match=r"rope_freqs\.weight .*use the Hugging Face folder"):
        llama3_rope_from_factors(500_000.0, divisors, "file")
