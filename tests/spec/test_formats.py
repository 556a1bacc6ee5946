"""Storage formats: bytes of one vector, names, refusals.

Knows nothing of layers.
"""

import pytest

from kvfolio.errors import OptionError, UnknownModelError
from kvfolio.spec.formats import (
    BF16,
    COMPUTE_FORMATS,
    DTYPE_WORDS,
    F16,
    F32,
    FORMAT_NAMES,
    INT8,
    CacheFormat,
    find_cache_format,
    find_format,
    format_of_dtype,
    parse_cache_format,
)


@pytest.mark.parametrize(
    ("name", "key_bytes", "value_bytes"),
    [
        ("f32", 256, 256),
        ("bf16", 128, 128),
        ("f16", 128, 128),
        ("int8", 68, 68),  # one f32 scale
        ("fp8", 64, 64),
        ("fp8-scaled", 68, 68),
        ("fp8-e5m2", 64, 64),
        ("int6", 52, 50),  # keys: 64 channels * 4 B for 64 tokens; values: one bf16 step
        ("int5", 44, 42),
        ("int4", 36, 34),
        ("int3", 28, 26),
        ("int2", 20, 18),
        ("int4-rotated", 34, 34),
        ("int4-token", 34, 34),
        ("int8-rotated", 66, 66),
        ("int8-channel/int8-token", 68, 66),
    ],
)
def test_a_vector_of_64_numbers_takes_its_bytes_with_the_scales(name: str, key_bytes: int, value_bytes: int) -> None:
    fmt = find_cache_format(name, 64)
    assert (fmt.k.vector_bytes(64), fmt.v.vector_bytes(64)) == (key_bytes, value_bytes)


@pytest.mark.parametrize(("tokens", "num_bytes"), [(16, 32 + 16), (32, 32 + 8), (64, 32 + 4), (128, 32 + 2), (256, 33)])
def test_keys_share_the_scales_of_their_channels_along_a_block(tokens: int, num_bytes: int) -> None:
    assert find_format("int4", True, tokens).vector_bytes(64) == num_bytes


def test_rows_are_padded_to_whole_packs_and_shares_of_scales_rounded_up() -> None:
    assert find_format("int4", False).vector_bytes(20) == 32 * 4 // 8 + 2
    assert find_format("int3", True, 128).vector_bytes(20) == 32 * 3 // 8 + 1  # 32 * 4 B for 128 tokens
    assert find_format("int3", True, 256).vector_bytes(20) == 32 * 3 // 8 + 1  # half a byte, rounded up
    assert find_format("int4", True).vector_bytes(0) == 0


def test_only_a_format_without_scales_can_be_computed_in() -> None:
    floats = [name for name in FORMAT_NAMES if find_format(name, True).is_float]
    assert floats == list(COMPUTE_FORMATS) == ["f32", "bf16", "f16"]


def test_every_format_is_found_under_its_own_name() -> None:
    assert [find_format(name, True) for name in ("f32", "bf16", "f16", "int8")] == [F32, BF16, F16, INT8]
    assert [find_format(name, is_key).name for name in FORMAT_NAMES for is_key in (True, False)] == [
        name for name in FORMAT_NAMES for _ in range(2)
    ]


def test_one_name_serves_keys_and_values_alike() -> None:
    assert find_cache_format("int8") == CacheFormat(INT8, INT8)
    assert find_cache_format("int8").name == "int8"
    fmt = find_cache_format("int4", 32)
    assert (fmt.name, fmt.k.scale_tokens, fmt.v.scale_tokens, fmt.v.is_rotated) == ("int4", 32, 0, True)


def test_keys_and_values_may_differ() -> None:
    fmt = find_cache_format("bf16/int8")
    assert fmt == CacheFormat(k=BF16, v=INT8)
    assert fmt.name == "bf16/int8"
    assert find_cache_format(fmt.name) == fmt


@pytest.mark.parametrize(("short", "name"), [("k8v4", "int8/int4"), ("k16v8", "bf16/int8"), ("k5v3", "int5/int3")])
def test_bits_of_keys_and_values_have_a_short_name(short: str, name: str) -> None:
    assert find_cache_format(short, 32) == find_cache_format(name, 32) == parse_cache_format(short, 32)
    assert find_cache_format(short).name == name


def test_the_usual_variant_needs_no_name() -> None:
    assert find_cache_format("int4-channel/int4-rotated") == find_cache_format("int4")
    assert find_cache_format("int4-rotated/int4-token").name == "int4-rotated/int4-token"
    assert find_cache_format("int8-channel/int8-rotated").name == "int8-channel"  # int8 is none of them
    assert find_cache_format("int8-channel") == find_cache_format("int8-channel/int8-rotated")
    assert find_cache_format("int8-channel/int8").name == "int8-channel/int8"


@pytest.mark.parametrize(
    "name", ["int7", "", "BF16", "bf16/int7", "k7v8", "int4-", "int8-", "int7-token", "fp8-rotated"]
)
def test_an_unknown_format_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(UnknownModelError, match="known: f32, bf16, f16, fp8, fp8-scaled, fp8-e5m2, int8, int6"):
        find_cache_format(name)


def test_values_have_no_scales_of_channels() -> None:
    with pytest.raises(UnknownModelError, match=r"'int4-channel' of values; .* -token \(-channel is for keys"):
        find_cache_format("int8/int4-channel")


@pytest.mark.parametrize("name", ["int4", "int8/int4", "int3-token/bf16"])
def test_blocks_smaller_than_a_pack_are_refused(name: str) -> None:
    fmt = find_cache_format(name)
    fmt.check_block_tokens(16)
    with pytest.raises(OptionError, match=r"block_tokens is 8; int\S+ packs 16 tokens: at least 16"):
        fmt.check_block_tokens(8)


def test_keys_that_share_scales_wish_for_long_blocks() -> None:
    wishes = [find_cache_format(name).default_block_tokens for name in ("int4", "int4/bf16", "k8v4", "int4-token")]
    assert wishes == [64, 64, None, None]


@pytest.mark.parametrize("prefix", ["", "torch."])
@pytest.mark.parametrize(
    ("word", "name", "value_bytes"),
    [
        ("float32", "f32", 4),
        ("float", "f32", 4),
        ("bfloat16", "bf16", 2),
        ("float16", "f16", 2),
        ("half", "f16", 2),
        ("float64", "f64", 8),
        ("double", "f64", 8),
        ("float8_e4m3fn", "fp8", 1),
        ("float8_e5m2", "fp8-e5m2", 1),
    ],
)
def test_a_dtype_is_read_as_torch_and_configs_write_it(prefix: str, word: str, name: str, value_bytes: int) -> None:
    fmt = format_of_dtype(prefix + word)
    assert fmt is not None
    assert (fmt.name, fmt.value_bytes, fmt.scale_bytes) == (name, value_bytes, 0)


@pytest.mark.parametrize("word", ["", "auto", "BF16", "int8", "torch.", "torch.torch.half"])
def test_a_word_that_is_no_dtype_of_numbers_is_none(word: str) -> None:
    assert format_of_dtype(word) is None


def test_the_words_that_errors_list_are_those_of_formats_that_the_engine_stores() -> None:
    assert DTYPE_WORDS == ("float32", "bfloat16", "float16", "float", "half")


@pytest.mark.parametrize("name", ["int4-g64", "int8-g32", "fp8-mla", "int4-head"])
def test_a_format_that_is_only_counted_is_refused_as_that(name: str) -> None:
    with pytest.raises(UnknownModelError, match="kvfolio plan alone counts it"):
        find_cache_format(name)
