"""What a cache costs, to the byte: published sizes, budgets that are never exceeded, refusals with the way out."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import layout_of, runnable

from kvfolio.errors import BudgetError, OptionError
from kvfolio.planner.memory import BLOCK_TOKENS_ALLOWED, CacheOptions, plan_cache
from kvfolio.spec.config.runnable import runnable_from_config
from kvfolio.spec.formats import FORMAT_NAMES, find_cache_format
from kvfolio.spec.layers import FullAttention, PagedLayer, SlidingWindow
from kvfolio.spec.layout import CacheLayout
from kvfolio.spec.model import LayerGroup, Network, RunnableSpec

CONFIG: dict[str, object] = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
}
QWEN3_32B = {"hidden_size": 5120, "num_attention_heads": 64, "num_hidden_layers": 64}


def spec_of_layers(*layers: PagedLayer, max_context: int = 4096) -> RunnableSpec:
    network = Network(64, 4, 128, 100, 1e-5, "silu", 1.0)
    return runnable(layers, network, max_context=max_context, dtype="bf16")


# ---- bytes of a token -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "num_bytes", "the_bug"), [({}, 147_456, 92_160), (QWEN3_32B, 262_144, 163_840)], ids=["4B", "32B"]
)
def test_a_head_width_that_the_config_states_is_priced(
    changes: dict[str, object], num_bytes: int, the_bug: int
) -> None:
    # SZ-01: hidden / heads would be 80. The planner's pools agree with the count to the byte.
    spec = runnable_from_config(CONFIG | changes, "test")
    layout = plan_cache(spec, "bf16", CacheOptions(kv_memory=1 << 30))
    assert (layout.bytes_per_token, layout.row_bytes) == (num_bytes, 16 * num_bytes)
    assert layout.bytes_per_token != the_bug


WINDOW_OFF = {"sliding_window": 131072, "use_sliding_window": False, "max_window_layers": 28}
WINDOW_ON = {"sliding_window": 4096, "use_sliding_window": True, "max_window_layers": 28}


@pytest.mark.parametrize(
    ("changes", "num_full", "num_windowed"),
    [
        ({"model_type": "qwen2", **WINDOW_OFF}, 36, 0),
        ({"model_type": "qwen2", **WINDOW_ON}, 28, 8),  # layers 28 … 35
        ({"model_type": "qwen3", "sliding_window": 2048}, 36, 0),
        ({"model_type": "mistral", "sliding_window": 4096}, 0, 36),
        ({"model_type": "mistral", "sliding_window": None}, 36, 0),
    ],
)
def test_a_long_sequence_is_priced_by_the_windows_that_are_switched_on(
    changes: dict[str, object], num_full: int, num_windowed: int
) -> None:
    # SZ-05, at 16,384 tokens: a windowed layer holds 4,096 of them.
    spec = runnable_from_config(CONFIG | changes, "test")
    layout = plan_cache(spec, "bf16", CacheOptions(kv_memory=8 << 30))
    of_a_layer = 2 * 8 * 128 * 2
    assert layout.bytes_held(16384) == of_a_layer * (num_full * 16384 + num_windowed * 4096)


@pytest.mark.parametrize(("name", "num_bytes"), [("f16", 4096), ("int8", 2112), ("f16/int8", 3104), ("f32", 8192)])
def test_one_layer_of_eight_heads_of_128_takes_its_bytes_with_the_scales(name: str, num_bytes: int) -> None:
    # QC-06. int8 here has one f32 scale a token and head: 2 * 8 * (128 + 4). Forgotten scales would give 2,048.
    spec = spec_of_layers(FullAttention(8, 128, 128))
    layout = plan_cache(spec, "f16", CacheOptions(kv_memory=1 << 20, kv_format=name))
    assert layout.bytes_per_token == num_bytes
    assert layout.groups[0].block_bytes == 16 * num_bytes
    assert layout.groups[0].open_block_bytes == 16 * 4096  # open blocks are exact whatever the format
    assert layout.groups[0].num_blocks == layout.budget_bytes // (16 * num_bytes)


# ---- a budget is a promise ------------------------------------------------------------------------------------------


@st.composite
def specs(draw: st.DrawFn) -> RunnableSpec:
    def kind() -> PagedLayer:
        heads, k_width, v_width = draw(st.integers(1, 4)), draw(st.integers(1, 40)), draw(st.integers(1, 40))
        if draw(st.booleans()):
            return SlidingWindow(heads, k_width, v_width, draw(st.integers(1, 3000)))
        return FullAttention(heads, k_width, v_width)

    kinds = [kind() for _ in range(draw(st.integers(1, 3)))]
    layers = draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=6))
    return spec_of_layers(*layers, max_context=draw(st.integers(1, 10_000)))


@st.composite
def planned(draw: st.DrawFn) -> tuple[RunnableSpec, str, CacheOptions]:
    """A model, its compute dtype and options; three budgets of four are large enough for a block."""
    spec = draw(specs())
    dtype = draw(st.sampled_from(["f32", "bf16", "f16"]))
    block_tokens = draw(st.sampled_from(BLOCK_TOKENS_ALLOWED))
    names = [name for name in FORMAT_NAMES if block_tokens >= 16 or not find_cache_format(name).k.is_packed]
    k_name, v_name = draw(st.sampled_from(names)), draw(st.sampled_from(names))
    row = sum(group.block_bytes(block_tokens, find_cache_format("f32")) for group in spec.groups())
    options = CacheOptions(
        kv_memory=draw(st.integers(1, row) if draw(st.integers(0, 3)) == 0 else st.integers(row, 300 * row)),
        block_tokens=block_tokens,
        kv_format=draw(st.sampled_from(["auto", f"{k_name}/{v_name}"])),
        max_running=draw(st.integers(1, 70)),
        split=draw(st.booleans()),
        kv_layers=draw(st.sampled_from(["", "", "0=int8", "0=exact", f"{len(spec.layers) - 1}=f16"])),
        sink_blocks=draw(st.sampled_from([0, 0, 1, 3])),
    )
    return spec, dtype, options


def plan_or_none(spec: RunnableSpec, dtype: str, options: CacheOptions) -> CacheLayout | None:
    try:
        return plan_cache(spec, dtype, options)
    except BudgetError:
        return None


@settings(max_examples=400, deadline=None)
@given(given_=planned())
def test_a_plan_never_takes_more_than_the_memory_given(given_: tuple[RunnableSpec, str, CacheOptions]) -> None:
    spec, dtype, options = given_
    layout = plan_or_none(spec, dtype, options)
    if layout is None:
        return
    assert layout.planned_bytes <= options.kv_memory
    assert layout.planned_bytes == layout.budget_bytes + sum(group.open_bytes for group in layout.groups)
    assert 1 <= layout.num_open_blocks <= options.max_running
    assert layout.num_open_blocks == 1 or sum(group.open_bytes for group in layout.groups) * 4 <= options.kv_memory
    for group in layout.groups:
        num_layers, kind = group.group.num_layers, group.group.kind
        of_token = kind.num_kv_heads * (group.fmt.k.vector_bytes(kind.k_width) + group.fmt.v.vector_bytes(kind.v_width))
        assert group.block_bytes == num_layers * layout.block_tokens * of_token
        assert (group.num_sinks is None) or (group.fmt, group.open_block_bytes) == (layout.exact, 0)
        assert group.num_open_blocks == layout.num_open_blocks
        assert group.num_blocks >= 1
        assert group.sealed_bytes <= layout.budget_bytes  # no pool has addresses beyond the budget
    whole = [group.group for group in layout.groups if group.num_sinks is None]
    assert sorted(index for group in whole for index in group.layer_indices) == list(range(len(spec.layers)))
    sealed = sum(group.sealed_bytes for group in layout.groups)
    if options.split:
        assert sealed == layout.budget_bytes  # a fixed share each
    else:
        assert sealed >= layout.budget_bytes  # any group may use what the others do not
        assert options.kv_memory - layout.planned_bytes < min(group.block_bytes for group in layout.groups)


@settings(max_examples=200, deadline=None)
@given(given_=planned())
def test_the_memory_that_a_refusal_asks_for_is_the_least_that_works(
    given_: tuple[RunnableSpec, str, CacheOptions],
) -> None:
    spec, dtype, options = given_
    with pytest.raises(BudgetError) as refused:
        plan_cache(spec, dtype, replace(options, kv_memory=1))
    need = int(str(refused.value).split("give at least ")[1].split(" B")[0].replace(",", ""))
    layout = plan_cache(spec, dtype, replace(options, kv_memory=need))
    assert (layout.planned_bytes, layout.num_open_blocks) == (need, 1)
    assert plan_or_none(spec, dtype, replace(options, kv_memory=need - 1)) is None


def test_a_budget_below_one_block_is_refused_with_have_need_and_the_way_out() -> None:
    spec = spec_of_layers(FullAttention(1, 8, 8), SlidingWindow(1, 8, 8, 32))
    with pytest.raises(BudgetError) as refused:
        plan_cache(spec, "f32", CacheOptions(kv_memory=2800, kv_format="int8"))
    assert str(refused.value) == (
        "kv_memory 2.73 KiB (2,800 B) is smaller than one block: 16 tokens take 768 B sealed and 2,048 B open; "
        "give at least 2,816 B, or fewer block_tokens"
    )


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"block_tokens": 12}, "block_tokens is 12; accepted: (4, 8, 16"),
        ({"block_tokens": 512}, "block_tokens is 512"),
        ({"max_running": 0}, "max_running is 0; at least 1"),
        ({"kv_memory": 0}, "kv_memory is 0 bytes; give a positive size"),
        ({"kv_memory": -5}, "kv_memory is -5 bytes"),
    ],
)
def test_options_out_of_range_are_refused_where_they_are_made(changes: dict[str, int], words: str) -> None:
    with pytest.raises(OptionError) as refused:
        CacheOptions(**({"kv_memory": 1 << 20} | changes))  # type: ignore[arg-type]
    assert words in str(refused.value)


def test_a_split_follows_what_sequences_of_half_the_context_hold() -> None:
    # Half of 4,096 tokens in the full layer, 64 in the window: 32 to 1.
    spec = spec_of_layers(FullAttention(1, 8, 8), SlidingWindow(1, 8, 8, 64))
    layout = plan_cache(spec, "f32", CacheOptions(kv_memory=8 << 20, max_running=1, split=True))
    full, window = (group.num_blocks for group in layout.groups)
    assert full / window == pytest.approx(32, rel=0.1)


# ---- how much a sequence holds --------------------------------------------------------------------------------------


def blocks_of(window: int | None, block_tokens: int, num_tokens: int) -> int:
    """The most blocks that a sequence grown token by token ever holds: counted, not calculated."""
    group = LayerGroup(FullAttention(1, 1, 1) if window is None else SlidingWindow(1, 1, 1, window), (0,))
    most, held = 0, set[int]()
    for position in range(num_tokens):
        if (position + 1) % block_tokens == 0:
            held.add(position // block_tokens)
        most = max(most, len(held))
        first = group.kind.first_token_needed(position + 1)
        held = {block for block in held if (block + 1) * block_tokens > first}
    return most


@settings(max_examples=200, deadline=None)
@given(
    window=st.one_of(st.none(), st.integers(1, 40)),
    block_tokens=st.sampled_from([4, 8]),
    num_tokens=st.integers(0, 120),
)
def test_a_growing_sequence_never_holds_more_blocks_than_planned(
    window: int | None, block_tokens: int, num_tokens: int
) -> None:
    layout = layout_of((window, 1), block_tokens=block_tokens)
    assert layout.blocks_held(layout.groups[0], num_tokens) == blocks_of(window, block_tokens, num_tokens)


@settings(max_examples=100, deadline=None)
@given(
    budget=st.integers(96, 3000),
    windows=st.sampled_from([(None,), (5,), (None, 9), (3, 12), (None, 1, 30)]),
    limit=st.integers(0, 200),
    is_split=st.booleans(),
)
def test_the_longest_sequence_is_the_last_that_fits(
    budget: int, windows: tuple[int | None, ...], limit: int, is_split: bool
) -> None:
    counts = [1 + (budget // 32 - len(windows)) // len(windows)] * len(windows) if is_split else None
    layout = layout_of(*((window, 1) for window in windows), budget_bytes=budget, counts=counts)
    fitting = [
        num_tokens
        for num_tokens in range(limit + 1)
        if sum(32 * blocks_of(window, 4, num_tokens) for window in windows) <= budget
        and (counts is None or all(blocks_of(window, 4, num_tokens) <= counts[0] for window in windows))
    ]
    assert layout.longest_sequence(limit) == max(fitting)
    assert all(layout.fits(num_tokens) is (num_tokens in fitting) for num_tokens in range(limit + 1))


@given(
    spec=specs(),
    tokens=st.integers(1, 3000),
    block_tokens=st.sampled_from([4, 16, 64]),
    fmt=st.sampled_from(["auto", "int8"]),
    layers=st.sampled_from(["", "0=f32"]),
    sinks=st.sampled_from([0, 1, 5, 100]),
)
def test_the_kv_memory_that_is_called_enough_is_enough(
    spec: RunnableSpec, tokens: int, block_tokens: int, fmt: str, layers: str, sinks: int
) -> None:
    options = CacheOptions(1 << 40, block_tokens, fmt, kv_layers=layers, sink_blocks=sinks)
    enough = plan_cache(spec, "bf16", options).kv_memory_for(tokens)
    for max_running in (1, 3, 64):
        layout = plan_cache(spec, "bf16", replace(options, kv_memory=enough, max_running=max_running))
        assert layout.fits(tokens)
