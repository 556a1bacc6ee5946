"""Bytes of a sequence, for every kind of layer: against a loop over tokens, and vLLM's own planner's numbers.

Knows nothing of devices.
"""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfolio.planner import sizes
from kvfolio.planner.memory import CacheOptions, plan_cache
from kvfolio.spec.formats import BF16, F32, INT8, CacheFormat, parse_cache_format
from kvfolio.spec.layers import (
    BlockSparse,
    ChunkedAttention,
    CombinedLayer,
    CompressedSparse,
    CrossAttention,
    FullAttention,
    LatentAttention,
    LayerKind,
    NoCache,
    RecurrentState,
    SharedCache,
    SlidingWindow,
)
from kvfolio.spec.model import ModelSpec, Network, RunnableSpec, WeightCount

FMT = CacheFormat(BF16, BF16)
STATE = RecurrentState("mamba2", 1000, F32, 30, BF16)
KINDS: tuple[LayerKind, ...] = (
    FullAttention(2, 8, 16),
    SlidingWindow(2, 8, 8, 20),
    ChunkedAttention(2, 8, 8, 32),
    BlockSparse(2, 8, 8, 4, 64),
    LatentAttention(16, 4, 4, 12, 8),
    LatentAttention(16, 4, 4, 12, 8, index_width=8, top_k=10),
    CompressedSparse(16, 4, 8, index_width=4, top_k=6),
    STATE,
    CrossAttention(2, 8, 8, 50),
    SharedCache(FullAttention(2, 8, 16)),
    NoCache(),
    CombinedLayer((FullAttention(2, 8, 8), STATE)),
)


def spec_of(*layers: LayerKind) -> ModelSpec:
    return ModelSpec("toy", "toy", layers, 4096, "bf16", 64, 4, WeightCount(100, 100, 200, "config"), ())


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
@pytest.mark.parametrize("name", ["bf16", "f32", "fp8", "int8", "int4-g32", "k8v4"])
def test_behind_every_window_bytes_are_fixed_plus_growth(kind: LayerKind, name: str) -> None:
    spec, fmt = spec_of(kind, kind), parse_cache_format(name)
    line = sizes.fixed_bytes(spec, fmt)
    for tokens in (32, 64, 4096):  # multiples of every compression ratio here, beyond every window
        assert sizes.bytes_at(spec, tokens, fmt) == line + sizes.growth(spec, fmt) * tokens


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.kind)
def test_no_layer_shrinks_with_the_text_or_reads_more_than_it_holds(kind: LayerKind) -> None:
    held = [kind.bytes_at(tokens, FMT) for tokens in range(200)]
    assert held == sorted(held)
    if not isinstance(kind, SharedCache):
        assert all(kind.bytes_read_at(tokens, FMT) <= held[tokens] for tokens in range(200))


def test_a_window_holds_its_last_tokens_and_no_more() -> None:
    kind = SlidingWindow(2, 8, 8, 20)
    assert [kind.bytes_at(tokens, FMT) for tokens in (0, 1, 19, 20, 21, 10**9)] == [0, 64, 1216, 1280, 1280, 1280]


def test_a_layer_that_shares_holds_nothing_and_reads_what_the_other_stored() -> None:
    kind = SharedCache(FullAttention(2, 8, 8))
    assert (kind.bytes_at(100, FMT), kind.bytes_read_at(100, FMT), kind.naive_token_bytes(FMT)) == (0, 6400, 64)


def test_an_index_lets_a_query_read_few_tokens_and_all_index_keys() -> None:
    kind = LatentAttention(16, 4, 4, 12, 8, index_width=8, top_k=10)
    assert kind.bytes_at(100, FMT) == 100 * (20 + 8) * 2
    assert kind.bytes_read_at(100, FMT) == 10 * 20 * 2 + 100 * 8 * 2


def test_a_compressed_layer_of_deepseek_v4_counts_whole_groups_of_tokens() -> None:
    kind = CompressedSparse(512, 4, 128, index_width=128, top_k=512)
    assert kind.bytes_at(3, FMT) == 3 * 1024
    assert kind.bytes_at(4, FMT) == 4 * 1024 + 1280
    assert kind.bytes_at(1000, FMT) == 128 * 1024 + 250 * 1280


def test_the_fp8_latent_of_vllm_takes_656_bytes_and_132_for_an_index_key() -> None:
    fmt = parse_cache_format("fp8-mla")
    assert LatentAttention(512, 64, 128, 192, 128).token_bytes(fmt) == 656
    assert LatentAttention(512, 64, 128, 192, 128, 128, 2048).token_bytes(fmt) == 656 + 132


def test_states_keep_their_own_format() -> None:
    assert STATE.bytes_at(1, FMT) == STATE.bytes_at(10**6, parse_cache_format("int4")) == 4000 + 60


# ---- what engines hold -----------------------------------------------------------------------------------------------

NETWORK = Network(64, 4, 128, 100, 1e-5, "silu", 1.0)
WEIGHTS = WeightCount(1000, 1000, 2000, "config")


@given(
    windows=st.lists(st.sampled_from([None, 5, 16, 40]), min_size=1, max_size=5),
    tokens=st.integers(0, 300),
    block_tokens=st.sampled_from([4, 16, 32]),
    fmt=st.sampled_from(["bf16", "int8", "bf16/int8"]),
)
@settings(deadline=None)
def test_what_is_planned_for_a_sequence_is_what_the_engines_layout_grants(
    windows: list[int | None], tokens: int, block_tokens: int, fmt: str
) -> None:
    layers = tuple(FullAttention(2, 8, 8) if w is None else SlidingWindow(2, 8, 8, w) for w in windows)
    spec = RunnableSpec("toy", "llama", layers, 4096, "bf16", 64, 4, WEIGHTS, (), "llama", NETWORK)
    layout = plan_cache(spec, "bf16", CacheOptions(1 << 22, block_tokens, fmt))
    open_row = sum(group.open_block_bytes for group in layout.groups)
    planned = sizes.kvfolio_bytes_at(spec, tokens, layout.fmt, layout.exact, block_tokens)
    assert planned == layout.bytes_held(tokens) + open_row


GEMMA3_27B = (*(SlidingWindow(16, 128, 128, 1024),) * 52, *(FullAttention(16, 128, 128),) * 10)
COMMAND_R7B = (*(SlidingWindow(8, 128, 128, 4096),) * 24, *(FullAttention(8, 128, 128),) * 8)
LLAMA4_SCOUT = (*(ChunkedAttention(8, 128, 128, 8192),) * 36, *(FullAttention(8, 128, 128),) * 12)
MISTRAL = (SlidingWindow(8, 128, 128, 4096),) * 32
GPT_OSS = (*(SlidingWindow(8, 64, 64, 128),) * 18, *(FullAttention(8, 64, 64),) * 18)


@pytest.mark.parametrize(
    ("layers", "tokens", "in_flight", "reserved"),
    [  # bytes a request, as vLLM 0.33's own planner says on a CPU
        (COMMAND_R7B, 4096, 2048, 538_443_776),
        (COMMAND_R7B, 32_768, 2048, 1_679_294_464),
        (COMMAND_R7B, 131_072, 8192, 5_504_499_712),
        (GEMMA3_27B, 4096, 2048, 1_853_386_360),
        (GEMMA3_27B, 131_072, 8192, 15_275_363_964),
        (LLAMA4_SCOUT, 32_768, 2048, 3_120_574_080),
        (MISTRAL, 4096, 8192, 538_968_064),
        (MISTRAL, 32_768, 8192, 1_612_709_888),
        (GPT_OSS, 4096, 2048, 231_801_716),
        ((FullAttention(8, 128, 128),) * 32, 131_072, 2048, 17_179_869_184),
    ],
)
def test_vllms_reserve_is_what_vllms_planner_says(
    layers: tuple[LayerKind, ...], tokens: int, in_flight: int, reserved: int
) -> None:
    counted = sizes.vllm_bytes_at(spec_of(*layers), tokens, FMT, 16, in_flight)
    assert counted == pytest.approx(reserved, rel=1e-4)  # it states users per memory, so its bytes are rounded


def test_a_scale_for_32_numbers_is_counted() -> None:
    layer = FullAttention(8, 128, 128)
    sizes_of = [layer.token_bytes(parse_cache_format(name)) for name in ("f16", "int8-g32", "int4-g32")]
    assert sizes_of == [4096, 2176, 1152]


def test_the_engines_int8_has_one_scale_a_head() -> None:
    assert FullAttention(8, 128, 128).token_bytes(CacheFormat(INT8, INT8)) == 8 * 2 * (128 + 4)
