"""Layer groups of a model and the bytes they store.

Knows nothing of how a model is read.
"""

import pytest
from small import runnable

from kvfolio.spec.formats import find_cache_format
from kvfolio.spec.layers import FullAttention, PagedLayer, SlidingWindow
from kvfolio.spec.model import Network, RunnableSpec

NETWORK = Network(
    hidden_size=640,
    num_q_heads=4,
    intermediate_size=2048,
    vocab_size=262_144,
    norm_eps=1e-6,
    activation="gelu_tanh",
    attention_scale=1 / 16,
)


def spec_of(*layers: PagedLayer) -> RunnableSpec:
    return runnable(layers, NETWORK, max_context=32_768, dtype="bf16")


def bytes_per_token(spec: RunnableSpec, fmt: str) -> int:
    return sum(group.block_bytes(1, find_cache_format(fmt)) for group in spec.groups())


WINDOW = SlidingWindow(1, 256, 256, window=512)
FULL = FullAttention(1, 256, 256)


def test_eighteen_layers_of_gemma_make_a_group_of_fifteen_and_one_of_three() -> None:
    spec = spec_of(*[FULL if (index + 1) % 6 == 0 else WINDOW for index in range(18)])
    first, second = spec.groups()
    assert (first.kind, first.num_layers) == (WINDOW, 15)
    assert (second.kind, second.layer_indices) == (FULL, (5, 11, 17))
    assert sorted(first.layer_indices + second.layer_indices) == list(range(18))


def test_groups_stand_in_the_order_in_which_their_first_layer_does() -> None:
    assert [group.kind for group in spec_of(FULL, WINDOW, FULL).groups()] == [FULL, WINDOW]
    assert [group.kind for group in spec_of(WINDOW, FULL, WINDOW).groups()] == [WINDOW, FULL]


def test_layers_that_differ_in_heads_do_not_share_a_block_table() -> None:
    assert len(spec_of(FULL, FullAttention(2, 256, 256)).groups()) == 2


@pytest.mark.parametrize(
    ("fmt", "num_bytes"),
    [
        ("bf16", 23_040),  # 30 layers * 3 heads * (64 + 64) numbers * 2 bytes
        ("f32", 46_080),
        ("int8", 12_240),  # 30 * 3 * 2 * (64 + 4)
        ("bf16/int8", 17_640),  # 30 * 3 * (128 + 68)
    ],
)
def test_a_token_of_smollm2_takes_its_bytes(fmt: str, num_bytes: int) -> None:
    assert bytes_per_token(spec_of(*[FullAttention(3, 64, 64)] * 30), fmt) == num_bytes


def test_keys_and_values_of_different_width_are_counted_each_by_its_own() -> None:
    assert bytes_per_token(spec_of(FullAttention(4, 192, 128)), "bf16") == 4 * (192 + 128) * 2


def test_a_block_is_its_tokens_over_all_layers_of_the_group() -> None:
    (group,) = spec_of(*[FullAttention(3, 64, 64)] * 30).groups()
    assert group.block_bytes(16, find_cache_format("bf16")) == 16 * 23_040
