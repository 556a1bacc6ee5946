"""FLOPs and bytes: every formula against a loop that counts one product at a time, and against the textbook."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import Shape, layout_of, runnable, shapes, spec_of

from kvfolio.planner.compute import (
    attention_flops,
    decode_flops,
    textbook_flops,
    weight_bytes,
    weight_bytes_read,
    weight_flops,
)
from kvfolio.planner.memory import CacheOptions, plan_cache
from kvfolio.spec.layers import FullAttention, SlidingWindow
from kvfolio.spec.model import Network, RunnableSpec, WeightCount

NETWORK = Network(8, 4, 16, 50, 1e-5, "silu", 1.0)


def model(*, tied: bool = False, num_params: int = 1000) -> RunnableSpec:
    """Keys of 6, values of 10; two full layers and one of window 3."""
    network = Network(8, 4, 16, 50, 1e-5, "silu", 1.0, tie_embeddings=tied)
    layers = (FullAttention(2, 6, 10), SlidingWindow(2, 6, 10, 3), FullAttention(2, 6, 10))
    return runnable(layers, network, max_context=64, dtype="bf16", num_params=num_params)


def tokens_read(spec: RunnableSpec, layer: int, position: int) -> int:
    """Tokens that a query at ``position`` reads in ``layer``, its own included."""
    return position + 1 - spec.layers[layer].first_token_needed(position)


def counted_attention(spec: RunnableSpec, position: int) -> int:
    """FLOPs of one query, a multiplication and an addition at a time."""
    flops = 0
    for kind in spec.layers:
        for token in range(position + 1):
            if kind.window is not None and token <= position - kind.window:
                continue
            for _ in range(spec.network.num_q_heads):
                flops += 2 * kind.k_width  # q · k
                flops += 2 * kind.v_width  # p · v
    return flops


def test_one_query_reads_by_layer_what_its_window_lets_it_read() -> None:
    assert [tokens_read(model(), 0, position) for position in (0, 2, 3, 9)] == [1, 3, 4, 10]
    assert [tokens_read(model(), 1, position) for position in (0, 2, 3, 9)] == [1, 3, 3, 3]


@pytest.mark.parametrize("position", [0, 1, 2, 3, 4, 17])
def test_attention_costs_what_a_loop_counts(position: int) -> None:
    assert attention_flops(model(), position) == counted_attention(model(), position)


def test_attention_at_ten_tokens_by_hand() -> None:
    # 4 heads * 2 (6 + 10) = 128 a token read; layers read 10, 3 and 10.
    assert attention_flops(model(), 9) == 128 * (10 + 3 + 10)


def test_weights_cost_two_each_and_a_table_that_is_only_looked_up_nothing() -> None:
    assert weight_flops(model(tied=True)) == 2 * 1000
    assert weight_flops(model(tied=False)) == 2 * (1000 - 50 * 8)


def test_weights_take_their_bytes_and_a_step_reads_all_but_the_looked_up_table() -> None:
    assert weight_bytes(model(), "bf16") == 2000
    assert weight_bytes(model(), "f32") == 4000
    assert weight_bytes_read(model(tied=True), "bf16", 1) == 2000
    assert weight_bytes_read(model(tied=False), "bf16", 7) == 2 * 600


def test_experts_that_no_token_chose_cost_nothing_and_are_not_read() -> None:
    """10 experts of 60 weights each, 2 for a token, beside 400 weights for all tokens."""
    count = WeightCount(1000, 400 + 2 * 60, 2000, "config", 600, 10, 2, 1200)
    spec = replace(model(tied=True), weights=count)
    assert weight_flops(spec) == 2 * 520
    assert weight_bytes_read(spec, "bf16", 1) == 2 * 520
    assert weight_bytes_read(spec, "bf16", 2) == 2 * (400 + round(600 * (1 - 0.8**2)))
    assert weight_bytes_read(spec, "bf16", 1000) == 2000


@settings(max_examples=60, deadline=None)
@given(chosen=shapes(), num_prompt=st.integers(1, 20), num_tokens=st.integers(1, 12), heads=st.integers(1, 3))
def test_decoding_with_and_without_a_cache_costs_what_loops_count(
    chosen: tuple[Shape, ...], num_prompt: int, num_tokens: int, heads: int
) -> None:
    spec = spec_of(*chosen, num_q_heads=heads)

    def one_pass(num_positions: int) -> int:
        return sum(weight_flops(spec) + counted_attention(spec, position) for position in range(num_positions))

    flops = decode_flops(spec, num_prompt, num_tokens)
    with_cache = without_cache = 0
    for known in range(num_prompt + 1, num_prompt + num_tokens):  # the prompt's pass yields the first token
        with_cache += weight_flops(spec) + counted_attention(spec, known - 1)
        without_cache += one_pass(known)
    assert flops.prefill == one_pass(num_prompt)
    assert flops.decode_with_cache == with_cache
    assert flops.decode_without_cache == without_cache
    assert flops.ratio_with_prefill == (flops.prefill + without_cache) / (flops.prefill + with_cache)
    if num_tokens > 1:
        assert flops.ratio_decode_only == without_cache / with_cache


def test_where_weights_outweigh_attention_the_exact_ratio_is_the_textbooks() -> None:
    # P + G / 2 (docs/arithmetic.md): 100 prompt tokens and 51 generated, of which the prompt's pass yields the first.
    spec = model(tied=True, num_params=10**12)
    with_cache, without = textbook_flops(spec.num_params, 100, 50)
    assert without / with_cache == 100 + 25
    assert decode_flops(spec, 100, 51).ratio_decode_only == pytest.approx(125.5, rel=1e-6)
    assert with_cache == 2 * 10**12 * 50


@settings(max_examples=60, deadline=None)
@given(chosen=shapes(), position=st.integers(0, 60))
def test_a_decode_step_reads_every_token_that_a_loop_visits(chosen: tuple[Shape, ...], position: int) -> None:
    spec = spec_of(*chosen)
    visited = sum(tokens_read(spec, layer, position) for layer in range(len(spec.layers)))
    assert layout_of(*chosen).bytes_read(position, position + 1) == 8 * visited


def test_cache_bytes_are_read_in_the_storage_format() -> None:
    # 2 heads: keys int8 6 + 4, values bf16 20: 60 a layer and token; at position 9 the layers read 10, 3 and 10.
    layout = plan_cache(model(), "bf16", CacheOptions(1 << 20, kv_format="int8/bf16"))
    assert layout.bytes_read(9, 10) == 60 * (10 + 3 + 10)
    exception = plan_cache(model(), "bf16", CacheOptions(1 << 20, kv_format="int8/bf16", kv_layers="0=exact"))
    assert exception.bytes_read(9, 10) == 64 * 10 + 60 * (3 + 10)
    # Of the full layers the first 4 tokens are read exactly: 64 in place of 60.
    sinks = plan_cache(model(), "bf16", CacheOptions(1 << 20, 4, "int8/bf16", sink_blocks=1))
    assert sinks.bytes_read(9, 10) == 60 * (6 + 3 + 6) + 64 * (4 + 4)
    assert sinks.bytes_read(2, 3) == 60 * 3 + 64 * (3 + 3)
