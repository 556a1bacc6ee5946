"""Sizes are parsed with the unit they were given in and printed with the right label."""

import pytest

from kvfolio.errors import OptionError
from kvfolio.units import (
    enough_bytes,
    format_bytes,
    format_count,
    format_decimal_bytes,
    format_params,
    format_seconds,
    format_tokens,
    parse_bytes,
    parse_tokens,
)


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("80GB", 80 * 10**9),
        ("80 gb", 80 * 10**9),
        ("80GiB", 80 * 2**30),
        ("80G", 80 * 2**30),  # a bare letter is binary
        ("0.5TiB", 2**39),
        ("85899345920", 80 * 2**30),
        (85899345920, 80 * 2**30),
        (" 1 KiB ", 1024),
        ("0", 0),
    ],
)
def test_a_size_means_what_its_unit_says(text: str | int, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "lots", "-1", "1e9", "1 XiB", "GiB", "1GiB2", -1, "nan", "inf", "1.2.3"])
def test_what_is_no_size_is_refused_by_name(text: str | int) -> None:
    with pytest.raises(OptionError, match=r"size|unit"):
        parse_bytes(text)


def test_a_printed_size_has_a_binary_label_and_value() -> None:
    assert format_bytes(141_107_412_992) == "131.42 GiB"
    assert format_bytes(23_040) == "22.50 KiB"
    assert format_bytes(512) == "512 B"
    assert format_bytes(2**50) == "1024.00 TiB"


@pytest.mark.parametrize("num_bytes", [1, 1023, 1025, 2**20 - 1, 2**20, 2**20 + 1, 5 * 2**30 + 7])
def test_an_enough_size_can_be_typed_and_is_enough(num_bytes: int) -> None:
    assert num_bytes <= parse_bytes(enough_bytes(num_bytes)) < num_bytes + 2**20


def test_seconds_and_counts_keep_three_figures() -> None:
    assert [format_seconds(seconds) for seconds in (2e-5, 0.0123, 1.234)] == ["20 µs", "12.3 ms", "1.23 s"]
    assert [format_count(count) for count in (999, 134_515_008, 2.1e12)] == ["999", "134.52 M", "2.10 T"]


def test_parameters_are_printed_with_the_letters_of_model_names() -> None:
    counts = (0, 999, 42_000, 134_515_008, 8_030_261_248, 999_999_999, 1_029_173_256_720)
    assert [format_params(count) for count in counts] == [
        *("0", "999", "42.00 K", "134.52 M", "8.03 B", "1.00 B", "1.03 T"),
    ]


def test_weights_on_a_card_are_named_in_both_units_each_with_its_own_label() -> None:
    assert format_decimal_bytes(141_107_412_992) == "141.1 GB"  # UI-01
    assert format_bytes(80 * 10**9) == "74.51 GiB"
    assert [format_decimal_bytes(size) for size in (0, 999, 80 * 10**9, 3_350_000_000_000)] == [
        "0 B",
        "999 B",
        "80.0 GB",
        "3.4 TB",
    ]


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("4096", 4096), ("32k", 32_768), ("128K", 131_072), ("1M", 2**20), (" 7 ", 7), (0, 0)],
)
def test_tokens_are_read_as_context_lengths_are_named(text: str | int, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "-1", "1.5k", "32 kk", "many", "1e6", "٣", -1, 10**13])
def test_what_is_no_number_of_tokens_is_refused(text: str | int) -> None:
    with pytest.raises(OptionError, match="no number of tokens"):
        parse_tokens(text)


@pytest.mark.parametrize(("count", "text"), [(0, "0"), (1000, "1,000"), (4096, "4K"), (131_072, "128K"), (2**20, "1M")])
def test_context_lengths_are_printed_as_they_are_named(count: int, text: str) -> None:
    assert format_tokens(count) == text


def test_a_decimal_size_is_exact() -> None:
    assert parse_bytes("16.06GB") == 16_060_000_000
    assert parse_bytes("0.1TiB") == 2**40 // 10
