"""Storage formats: bytes of one vector, names, refusals.

Knows nothing of layers.
"""

import pytest

from kvfolio.errors import UnknownModelError
from kvfolio.spec.formats import (
    BF16,
    DTYPE_WORDS,
    F16,
    F32,
    FORMATS,
    INT8,
    CacheFormat,
    find_cache_format,
    find_format,
    format_of_dtype,
)


@pytest.mark.parametrize(("name", "num_bytes"), [("f32", 256), ("bf16", 128), ("f16", 128), ("int8", 68)])
def test_a_vector_of_64_numbers_takes_its_bytes_with_the_scale(name: str, num_bytes: int) -> None:
    assert find_format(name).vector_bytes(64) == num_bytes


def test_only_a_format_without_scales_can_be_computed_in() -> None:
    assert [fmt.name for fmt in FORMATS.values() if fmt.is_float] == ["f32", "bf16", "f16"]


def test_every_format_is_found_under_its_own_name() -> None:
    assert [find_format(name) for name in ("f32", "bf16", "f16", "int8")] == [F32, BF16, F16, INT8]


def test_one_name_serves_keys_and_values_alike() -> None:
    assert find_cache_format("int8") == CacheFormat(INT8, INT8)
    assert find_cache_format("int8").name == "int8"


def test_keys_and_values_may_differ() -> None:
    fmt = find_cache_format("bf16/int8")
    assert fmt == CacheFormat(k=BF16, v=INT8)
    assert fmt.name == "bf16/int8"
    assert find_cache_format(fmt.name) == fmt


@pytest.mark.parametrize("name", ["int3", "", "BF16", "bf16/int3"])
def test_an_unknown_format_is_refused_with_the_known_ones(name: str) -> None:
    with pytest.raises(UnknownModelError, match="known: f32, bf16, f16, int8"):
        find_cache_format(name)


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
        ("float8_e5m2", "fp8", 1),
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
