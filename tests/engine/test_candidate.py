"""Formats as typed, and the bytes of their caches, counted by hand."""

from collections.abc import Callable

import pytest
from tiny import TinyModel

from kvfolio import OptionError
from kvfolio.engine.candidate import DEFAULT_FORMATS, Candidate, parse_candidates, stored_size
from kvfolio.spec.source import open_model


def test_formats_are_read_and_written_alike() -> None:
    typed = "int8, bf16/int8,int8@64"
    parsed = parse_candidates(typed)
    assert parsed == (Candidate("int8"), Candidate("bf16/int8"), Candidate("int8", 64))
    assert ",".join(one.name for one in parsed) == typed.replace(" ", "")
    assert parse_candidates("int8@block_tokens=64") == (Candidate("int8", 64),)
    assert tuple(one.name for one in parse_candidates(",".join(DEFAULT_FORMATS))) == DEFAULT_FORMATS


@pytest.mark.parametrize(
    ("typed", "words"),
    [
        ("", "names no format"),
        ("int8,,bf16", "names no format"),
        ("@64", "names no format"),
        ("auto", "names no format"),
        ("int8,int8", "int8 is given twice"),
        ("int8@64,int8@block_tokens=64", "int8@64 is given twice"),
        ("int8@", "no option of a format"),
        ("int8@colour=red", "'colour=red' in .* is no option"),
        ("int8@kv_format=int4", "no option"),
        ("int8@many", "block_tokens is 'many'"),
        ("int8@-4", "block_tokens is '-4'"),
        ("int8@" + "9" * 5000, "block_tokens is '9"),
        ("int8@8@16", "'int8@8@16' has block_tokens twice"),
    ],
)
def test_what_is_no_format_is_refused(typed: str, words: str) -> None:
    with pytest.raises(OptionError, match=words):
        parse_candidates(typed)


def test_stored_bits_count_scales_and_open_blocks_and_exact_tokens_in_their_dtype(
    served_model: Callable[[str], TinyModel],
) -> None:
    spec = open_model(served_model("llama").folder).spec
    numbers = 3 * 2 * (16 + 16)  # layers, heads, key and value: of one token
    row_bytes = 3 * 2 * 2 * (16 + 4)  # int8 and an f32 scale for each vector
    found = stored_size(Candidate("int8"), spec, "f32", 300)
    assert found.bytes_per_token == row_bytes
    assert found.num_bytes == 288 * row_bytes + 16 * numbers * 4  # 18 sealed blocks, and an open one in f32
    assert found.bits == pytest.approx(8 * found.num_bytes / (300 * numbers))
    published = stored_size(Candidate("int8"), spec, "bf16", 300)
    assert published.num_bytes == 288 * row_bytes + 16 * numbers * 2
    large = stored_size(Candidate("int8", 64), spec, "f32", 300)
    assert (large.block_tokens, large.num_bytes) == (64, 256 * row_bytes + 64 * numbers * 4)


def test_a_window_layer_is_counted_over_what_it_remembers(served_model: Callable[[str], TinyModel]) -> None:
    spec = open_model(served_model("mistral").folder).spec  # windows of 16 alone
    found = stored_size(Candidate("f32"), spec, "f32", 300)
    assert found.bits == pytest.approx(2 * 32)  # one sealed block and one open block of 16 tokens each
