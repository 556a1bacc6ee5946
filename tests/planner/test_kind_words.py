"""Every kind of layer memory has its words, so that no face meets one that it cannot name."""

import typing

from kvfolio.planner.words import KIND_WORDS, long_words
from kvfolio.spec.formats import BF16, F32
from kvfolio.spec.layers import (
    BlockSparse,
    ChunkedAttention,
    CompressedSparse,
    CrossAttention,
    FullAttention,
    LatentAttention,
    NoCache,
    RecurrentState,
    SharedCache,
    SingleKind,
    SlidingWindow,
)

FULL = FullAttention(8, 128, 128)
KINDS: tuple[SingleKind, ...] = (
    FULL,
    SlidingWindow(8, 128, 128, 1024),
    ChunkedAttention(8, 128, 128, 8192),
    BlockSparse(4, 128, 128, 128, 2048),
    LatentAttention(512, 64, 32, 192, 128),
    LatentAttention(512, 64, 32, 192, 128, 128, 2048),
    CompressedSparse(512, 4, 128, 128, 512),
    RecurrentState("rg_lru", 2560, F32, 7680, BF16),
    CrossAttention(8, 128, 128, 1500),
    SharedCache(FULL),
    NoCache(),
)


def test_every_kind_of_layer_has_words_and_every_words_a_kind() -> None:
    assert {type(part) for part in KINDS} == set(typing.get_args(SingleKind))  # so that a new one is not forgotten here
    assert {part.kind for part in KINDS} == set(KIND_WORDS)


def test_no_two_kinds_are_called_alike() -> None:
    assert len({words.short for words in KIND_WORDS.values()}) == len(KIND_WORDS)
    assert len({words.long for words in KIND_WORDS.values()}) == len(KIND_WORDS)


def test_a_state_is_named_with_its_mechanism() -> None:
    assert long_words(RecurrentState("rg_lru", 2560, F32, 7680, BF16)) == "states (rg_lru)"
    assert long_words(FULL) == "full attention"
