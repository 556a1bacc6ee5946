"""Attention layers from GGUF headers alone: heads, widths, windows, shared and latent caches of any architecture.

Knows nothing of tensor data. The numbers are those of llama.cpp's own allocation.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_bytes import I32, STRING, Items, Tensor
from gguf_headers import FULL, booleans, deepseek, model, numbers, planned, window

from kvfolio.errors import BrokenModelError, UnknownModelError
from kvfolio.spec.formats import parse_cache_format
from kvfolio.spec.layers import (
    BlockSparse,
    ChunkedAttention,
    CompressedSparse,
    FullAttention,
    LatentAttention,
    NoCache,
    SharedCache,
    SlidingWindow,
)
from kvfolio.spec.model import ModelSpec

Reader = Callable[..., ModelSpec]


@pytest.fixture
def read(tmp_path: Path) -> Reader:
    return lambda metadata, *tensors: planned(tmp_path, metadata, tensors)


def test_a_plain_model_keeps_every_token_in_every_layer(read: Reader) -> None:
    spec = read(model("llama"))
    assert spec.layers == (FULL,) * 6
    assert (spec.max_context, spec.hidden_size, spec.num_q_heads, spec.model_type) == (1000, 128, 8, "llama")


@pytest.mark.parametrize(
    "architecture", ["llama", "qwen2", "qwen3moe", "falcon", "granite", "glm4", "dbrx", "mistral3"]
)
def test_architectures_that_differ_in_their_network_only_are_read_alike(read: Reader, architecture: str) -> None:
    assert read(model(architecture)).layers == (FULL,) * 6


def test_key_and_value_lengths_win_over_the_division(read: Reader) -> None:
    spec = read(model("llama", attention__key_length=192, attention__value_length=128))
    assert spec.layers[0] == FullAttention(2, 192, 128)
    assert read(model("llama", attention__key_length=32)).layers[0] == FullAttention(2, 32, 16)


def test_a_head_that_cannot_be_divided_off_needs_its_length(read: Reader) -> None:
    with pytest.raises(BrokenModelError, match=r"130 does not divide into 8 heads and llama.attention.key_length"):
        read(model("llama", embedding_length=130))
    spec = read(model("llama", embedding_length=130, attention__key_length=16, attention__value_length=16))
    assert spec.layers[0] == FULL


def test_key_value_heads_of_a_list_belong_to_their_layers(read: Reader) -> None:
    spec = read(model("llama", attention__head_count_kv=numbers(1, 2, 4, 8, 2, 1)))
    assert [layer.num_kv_heads for layer in spec.layers] == [1, 2, 4, 8, 2, 1]


def test_zero_heads_in_a_list_mean_that_attention_was_pruned_away(read: Reader) -> None:
    heads = {"attention__head_count": numbers(8, 8, 0, 8, 8, 0), "attention__head_count_kv": numbers(2, 2, 0, 1, 0, 0)}
    layers = read(model("deci", **heads)).layers
    assert layers == (FULL, FULL, NoCache(), FullAttention(1, 16, 16), NoCache(), NoCache())


def test_absent_key_value_heads_are_as_many_as_query_heads(read: Reader) -> None:
    assert read(model("gpt2", attention__head_count_kv=None)).layers[0] == FullAttention(8, 16, 16)


@pytest.mark.parametrize(
    ("key", "value", "fault"),
    [
        ("attention__head_count_kv", numbers(1, 2), "2 values"),
        ("attention__head_count_kv", booleans(True, True, True, True, True, True), "whole numbers from 0"),
        ("attention__head_count_kv", Items(I32, (2, 2, 2, 2, 2, -1)), "whole numbers from 0"),
        ("attention__head_count_kv", Items(STRING, ("a",) * 6), "whole numbers from 0"),
        ("attention__head_count_kv", 3, "8 query heads cannot share 3"),
        ("attention__head_count", 0, "a whole number from 1"),
        ("block_count", 10**6, "a whole number from 1 to 10,000"),
        ("block_count", "six", "a whole number"),
        ("attention__key_length", 0, "a whole number from 1"),
        ("nextn_predict_layers", 6, "below the 6 layers"),
        ("context_length", 0.5, "a whole number"),
        ("expert_used_count", 3, "more than expert_count 0"),
    ],
)
def test_a_wrong_value_is_refused_by_its_key(read: Reader, key: str, value: object, fault: str) -> None:
    with pytest.raises(BrokenModelError, match=fault):
        read(model("llama", **{key: value}))


# Windows


def test_gemma2_alternates_beginning_with_a_window(read: Reader) -> None:
    assert read(model("gemma2", attention__sliding_window=512)).layers == (window(512), FULL) * 3
    spec = read(model("gemma2", context_length=8192))
    assert spec.layers[0] == window(4096)
    assert "gemma2.attention.sliding_window is absent: 4,096 assumed" in spec.assumptions


@pytest.mark.parametrize(
    ("architecture", "full"),
    [
        ("gemma3", {5}),
        ("cohere2", {3}),
        ("gpt-oss", {1, 3, 5}),
        ("olmo2", {3}),
        ("exaone4", {3}),
        ("plamo3", set()),
        ("afmoe", {3}),
        ("smallthinker", {0, 4}),
        ("laguna", {0, 4}),
    ],
)
def test_the_layers_with_a_window_are_those_of_llama_cpp(read: Reader, architecture: str, full: set[int]) -> None:
    layers = read(model(architecture, attention__sliding_window=64)).layers
    assert {index for index, layer in enumerate(layers) if layer == FULL} == full
    assert {layer for index, layer in enumerate(layers) if index not in full} == {window(64)}


def test_a_list_or_a_period_in_the_header_wins(read: Reader) -> None:
    listed = read(
        model(
            "gemma3",
            attention__sliding_window=64,
            attention__sliding_window_pattern=booleans(False, True, True, False, True, True),
        )
    )
    assert listed.layers == (FULL, window(64), window(64)) * 2
    assert not any("sliding_window" in line for line in listed.assumptions)
    period = read(model("gemma3", attention__sliding_window=64, attention__sliding_window_pattern=3))
    assert period.layers == (window(64), window(64), FULL) * 2
    every = read(model("gemma3", attention__sliding_window=64, attention__sliding_window_pattern=0))
    assert every.layers == (window(64),) * 6


@pytest.mark.parametrize("architecture", ["olmo2", "exaone4", "plamo3", "llama4", "gemma3"])
def test_a_window_that_is_switched_off_is_no_window(read: Reader, architecture: str) -> None:
    assert read(model(architecture, attention__sliding_window=0)).layers == (FULL,) * 6


@pytest.mark.parametrize("architecture", ["gemma3", "cohere2", "gpt-oss", "gemma4", "mimo2"])
def test_a_window_that_the_header_must_give_is_missed(read: Reader, architecture: str) -> None:
    with pytest.raises(BrokenModelError, match=r"attention.sliding_window is missing"):
        read(model(architecture))


def test_exaone4_of_64_layers_has_the_window_that_its_first_files_left_out(read: Reader) -> None:
    assert read(model("exaone4", block_count=64, context_length=131_072)).kinds() == ((window(4096), 48), (FULL, 16))
    assert read(model("exaone4", block_count=30)).kinds() == ((FULL, 30),)


def test_llama4_cuts_the_text_in_pieces_of_8192(read: Reader) -> None:
    layers = read(model("llama4", context_length=131_072)).layers
    assert layers[:4] == (ChunkedAttention(2, 16, 16, 8192),) * 3 + (FULL,)


def test_phi3_keeps_every_token_as_llama_cpp_does(read: Reader) -> None:
    spec = read(model("phi3", attention__sliding_window=2047))
    assert spec.layers == (FULL,) * 6
    assert any(
        "gives phi3 no window: every layer counted as full, not 2,047 tokens" in line for line in spec.assumptions
    )


def test_a_window_that_llama_cpp_would_not_read_is_counted_as_full_and_said(read: Reader) -> None:
    spec = read(model("llama", attention__sliding_window=4096))
    assert spec.layers == (FULL,) * 6
    assert any("no window: every layer counted as full, not 4,096" in line for line in spec.assumptions)


def test_layers_with_a_window_may_have_heads_of_another_width(read: Reader) -> None:
    spec = read(
        model(
            "gemma4",
            attention__key_length=512,
            attention__value_length=512,
            attention__key_length_swa=256,
            attention__value_length_swa=256,
            attention__sliding_window=64,
            attention__head_count_kv=numbers(4, 4, 1, 4, 4, 1),
            attention__sliding_window_pattern=booleans(True, True, False, True, True, False),
        )
    )
    assert spec.layers == (SlidingWindow(4, 256, 256, 64),) * 2 + (FullAttention(1, 512, 512),) + spec.layers[:3]


def test_shared_layers_read_the_last_earlier_layer_of_their_kind(read: Reader) -> None:
    spec = read(model("gemma3n", block_count=30, attention__sliding_window=512))
    own, shared = spec.layers[:20], spec.layers[20:]
    assert own == ((window(512),) * 4 + (FULL,)) * 4
    assert shared == ((SharedCache(window(512)),) * 4 + (SharedCache(FULL),)) * 2
    stated = read(model("gemma3n", block_count=10, attention__sliding_window=512, attention__shared_kv_layers=5))
    assert stated.layers[4:6] == (FULL, SharedCache(window(512)))


def test_shared_layers_without_a_source_are_refused(read: Reader) -> None:
    with pytest.raises(BrokenModelError, match="leaves no layer of kind 'full'"):
        read(model("gemma3n", attention__sliding_window=512, attention__shared_kv_layers=2))
    with pytest.raises(BrokenModelError, match="a whole number below the 6 layers"):
        read(model("gemma3n", attention__sliding_window=512, attention__shared_kv_layers=6))


# Latent caches


def test_a_latent_model_keeps_512_numbers_and_64_rotary_ones_a_token(read: Reader) -> None:
    layers = read(deepseek()).layers
    assert layers == (LatentAttention(512, 64, 128, 192, 128),) * 6
    assert layers[0].token_bytes(parse_cache_format("bf16")) == 1152


def test_a_file_from_before_the_latent_keys_keeps_every_head(read: Reader) -> None:
    old = deepseek(
        attention__key_length=192,
        attention__value_length=128,
        attention__key_length_mla=None,
        attention__value_length_mla=None,
        attention__head_count_kv=128,
    )
    spec = read(old)
    assert spec.layers == (FullAttention(128, 192, 128),) * 6
    assert any("llama.cpp keeps every head expanded" in line for line in spec.assumptions)


def test_a_latent_that_contradicts_the_key_length_is_refused(read: Reader) -> None:
    with pytest.raises(BrokenModelError, match="key_length is 576, and the latent has 512 numbers and 32 rotary"):
        read(deepseek(rope__dimension_count=32))


def test_an_indexer_adds_an_index_key_and_chooses_the_tokens(read: Reader) -> None:
    indexer = {"attention__indexer__head_count": 64, "attention__indexer__key_length": 128}
    indexer |= {"attention__indexer__top_k": 2048}
    with_index = LatentAttention(512, 64, 128, 192, 128, 128, 2048)
    assert read(deepseek("deepseek32", **indexer)).layers == (with_index,) * 6
    types = {"attention__indexer__types": numbers(1, 1, 0, 0, 0, 1)}
    without = LatentAttention(512, 64, 128, 192, 128, 0, 2048)
    expected = (with_index, with_index, without, without, without, with_index)
    assert read(deepseek("glm-dsa", **indexer, **types)).layers == expected
    tensors = [Tensor(f"blk.{index}.indexer.attn_k.weight", (1, 1)) for index in (0, 1, 5)]
    assert read(deepseek("glm-dsa", **indexer), *tensors).layers == expected


def test_minimax_m3_chooses_blocks_behind_its_dense_layers(read: Reader) -> None:
    indexer = {"attention__indexer__key_length": 128, "attention__indexer__top_k": 16}
    indexer |= {"attention__indexer__block_size": 128, "attention__indexer__local_blocks": 1}
    spec = read(model("minimax-m3", leading_dense_block_count=2, **indexer))
    assert spec.layers == (FULL,) * 2 + (BlockSparse(2, 16, 16, 128, 2048),) * 4


def test_an_indexer_beside_ordinary_heads_is_refused(read: Reader) -> None:
    with pytest.raises(UnknownModelError, match=r"indexer.key_length without a latent cache"):
        read(model("llama", attention__indexer__key_length=128, attention__indexer__top_k=16))


def test_deepseek4_keeps_a_window_and_compressed_vectors(read: Reader) -> None:
    keys = {
        "attention__key_length": 512,
        "attention__sliding_window": 128,
        "attention__indexer__head_count": 64,
        "attention__indexer__key_length": 128,
        "attention__indexer__top_k": 512,
    }
    spec = read(model("deepseek4", attention__compress_ratios=numbers(0, 0, 4, 128, 4, 128, 4), **keys, block_count=7))
    light, heavy = CompressedSparse(512, 4, 128, 128, 512), CompressedSparse(512, 128, 128)
    assert spec.layers == (CompressedSparse(512, None, 128),) * 2 + (light, heavy) * 2 + (light,)
    with pytest.raises(UnknownModelError, match=r"compress_ratios holds 8; known: 0, 4 and 128"):
        read(model("deepseek4", attention__compress_ratios=numbers(0, 0, 4, 8, 4, 4), **keys))
    with pytest.raises(BrokenModelError, match="compress_ratios is missing"):
        read(model("deepseek4", **keys))


def test_layers_that_only_draft_tokens_are_not_counted(read: Reader) -> None:
    spec = read(model("glm4moe", block_count=7, nextn_predict_layers=1, attention__head_count_kv=numbers(*(2,) * 7)))
    assert spec.layers == (FULL,) * 6
    assert "the last 1 of 7 layers only draft tokens: not counted in the cache" in spec.assumptions


def test_a_window_as_long_as_the_context_is_no_window(read: Reader) -> None:
    assert read(model("gemma2", attention__sliding_window=1000)).layers == (FULL,) * 6  # of 1,000 tokens
    assert read(model("gemma2", attention__sliding_window=999)).layers == (window(999), FULL) * 3
