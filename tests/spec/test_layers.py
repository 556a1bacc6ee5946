"""Kinds of layer memory: what a query still needs, and when two layers are the same kind.

Knows nothing of formats or models.
"""

import pytest

from kvfolio.spec.layers import FullAttention, SlidingWindow


@pytest.mark.parametrize("position", [0, 1, 100_000])
def test_a_full_layer_needs_every_token_for_ever(position: int) -> None:
    layer = FullAttention(num_kv_heads=2, k_width=8, v_width=8)
    assert layer.first_token_needed(position) == 0
    assert (layer.kind, layer.window) == ("full", None)


@pytest.mark.parametrize(("position", "first"), [(0, 0), (2, 0), (3, 0), (4, 1), (10, 7)])
def test_a_window_of_four_needs_the_query_and_the_three_tokens_before_it(position: int, first: int) -> None:
    layer = SlidingWindow(num_kv_heads=2, k_width=8, v_width=8, window=4)
    assert layer.first_token_needed(position) == first
    assert layer.kind == "sliding_window"


def test_layers_of_equal_numbers_are_one_kind_and_others_are_not() -> None:
    window = SlidingWindow(2, 8, 8, window=4)
    assert len({window, SlidingWindow(2, 8, 8, 4), SlidingWindow(2, 8, 8, 5), FullAttention(2, 8, 8)}) == 3
