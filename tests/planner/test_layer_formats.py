"""Layers that are stored otherwise: read as people write them, refused by name, cut into groups of their own."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small import runnable

from kvfolio.errors import KvfolioError, OptionError, UnknownModelError
from kvfolio.planner.layer_formats import LayerFormat, names_by_layer, parse_layer_formats
from kvfolio.planner.memory import CacheOptions, plan_cache
from kvfolio.planner.options import read_options
from kvfolio.planner.report import make_plan
from kvfolio.spec.layers import FullAttention, PagedLayer, SlidingWindow
from kvfolio.spec.layout import CacheLayout
from kvfolio.spec.model import Network, RunnableSpec

FULL, WINDOW = FullAttention(2, 16, 16), SlidingWindow(2, 16, 16, 32)


def spec_of(*layers: PagedLayer) -> RunnableSpec:
    return runnable(layers, Network(64, 4, 128, 100, 1e-5, "silu", 1.0), max_context=4096, dtype="bf16")


def planned(*layers: PagedLayer, **options: object) -> CacheLayout:
    return plan_cache(spec_of(*layers), "bf16", CacheOptions(1 << 20, **options))  # type: ignore[arg-type]


def groups_of(layout: CacheLayout) -> list[tuple[str, tuple[int, ...], int | None]]:
    return [(group.fmt.name, group.group.layer_indices, group.num_sinks) for group in layout.groups]


# ---- the text -------------------------------------------------------------------------------------------------------


def test_exceptions_are_read_as_people_write_them() -> None:
    found = parse_layer_formats(" 29=int8, 0-1=bf16 ,5=bf16/int8,7-7=exact")
    assert [str(one) for one in found] == ["layers 0 to 1", "layer 5", "layer 7", "layer 29"]
    assert found[0] == LayerFormat(0, 1, "bf16")
    names = names_by_layer(found, 30, "int8", "f32")
    assert names == ["bf16"] * 2 + ["int8"] * 3 + ["bf16/int8", "int8", "f32"] + ["int8"] * 22
    assert parse_layer_formats("") == parse_layer_formats("  ") == ()


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("0", OptionError, "kv_layers has '0'; accepted: exceptions with commas between them, such as 0-1=bf16"),
        ("0=", OptionError, "kv_layers has '0='"),
        ("=int8", OptionError, "kv_layers has '=int8'"),
        ("0-=int8", OptionError, "kv_layers has '0-=int8'"),
        ("-1=int8", OptionError, "kv_layers has '-1=int8'"),
        ("1.5=int8", OptionError, "kv_layers has '1.5=int8'"),
        ("0=int8,", OptionError, "kv_layers has ''"),
        (",", OptionError, "kv_layers has ''"),
        ("first=int8", OptionError, "kv_layers has 'first=int8'"),
        ("³=int8", OptionError, "kv_layers has '³=int8'"),
        ("0=in t8", OptionError, "kv_layers has '0=in t8'"),
        ("5-3=int8", OptionError, "kv_layers has the layers 5-3, which are none; give 3-5"),
        ("0-3=int8,3=bf16", OptionError, "kv_layers names layer 3 twice, in int8 and in bf16"),
        ("4=int8,0-9=int8", OptionError, "kv_layers names layer 4 twice, in int8 and in int8"),
        ("0=int7", UnknownModelError, "kv_layers, layer 0: unknown format 'int7' of keys; known: f32"),
        ("0-2=bf16/int7", UnknownModelError, "kv_layers, layers 0 to 2: unknown format 'int7' of values"),
    ],
)
def test_what_is_no_list_of_layers_is_refused_where_it_is_made(text: str, kind: type[KvfolioError], words: str) -> None:
    with pytest.raises(kind) as refused:
        CacheOptions(1 << 20, kv_layers=text)
    assert words in str(refused.value)


def test_a_layer_that_the_model_does_not_have_is_refused_with_those_it_has() -> None:
    with pytest.raises(OptionError, match="kv_layers has layer 3, but the model has 3 layers: 0 to 2"):
        planned(FULL, FULL, FULL, kv_layers="3=int8")
    with pytest.raises(OptionError, match="kv_layers has layers 2 to 9, but the model has 3 layers"):
        planned(FULL, FULL, FULL, kv_layers="2-9=int8")


@settings(deadline=None)
@given(st.lists(st.sampled_from(["int8", "bf16", "f32", "exact", ""]), min_size=1, max_size=12))
def test_every_layer_has_the_format_that_was_given_to_it(wanted: list[str]) -> None:
    text = ",".join(f"{layer}={name}" for layer, name in enumerate(wanted) if name)
    layout = planned(*[FULL, WINDOW] * len(wanted), kv_format="f16", kv_layers=text)
    names = [name.replace("exact", "bf16") or "f16" for name in wanted] + ["f16"] * len(wanted)
    for group in layout.groups:
        for layer in group.group.layer_indices:
            assert group.fmt.name == names[layer]
            assert group.group.kind == (FULL, WINDOW)[layer % 2]
    assert len({(group.group.kind, group.fmt) for group in layout.groups}) == len(layout.groups)


# ---- groups ---------------------------------------------------------------------------------------------------------


def test_layers_of_one_kind_and_format_are_one_group() -> None:
    layout = planned(WINDOW, FULL, WINDOW, FULL, FULL, kv_format="int8", kv_layers="0=exact,3=bf16")
    assert groups_of(layout) == [
        ("bf16", (0,), None),
        ("int8", (1, 4), None),
        ("int8", (2,), None),
        ("bf16", (3,), None),
    ]
    assert layout.bytes_per_token == 2 * 128 + 3 * 2 * 2 * (16 + 4)
    assert layout.format_name == "bf16 + int8"
    assert (layout.fmt.name, layout.is_lossless) == ("int8", False)


def test_exceptions_that_change_nothing_are_no_exceptions() -> None:
    assert planned(FULL, WINDOW, kv_format="int8", kv_layers="0=int8") == planned(FULL, WINDOW, kv_format="int8")
    assert planned(FULL, kv_layers="0=exact") == planned(FULL) == planned(FULL, kv_format="bf16")


def test_a_cache_whose_exceptions_leave_nothing_coded_is_lossless() -> None:
    assert planned(FULL, WINDOW, kv_format="int8", kv_layers="0-1=exact").is_lossless
    assert not planned(FULL, WINDOW, kv_layers="1=int8").is_lossless


# ---- sinks ----------------------------------------------------------------------------------------------------------


def test_sinks_stand_behind_each_group_that_is_coded_and_reads_all_tokens() -> None:
    layout = planned(WINDOW, FULL, FULL, kv_format="int8", kv_layers="2=bf16/int8", sink_blocks=3, block_tokens=8)
    assert groups_of(layout) == [
        ("int8", (0,), None),
        ("int8", (1,), None),
        ("bf16", (1,), 3),
        ("bf16/int8", (2,), None),
        ("bf16", (2,), 3),
    ]
    assert [layout.sinks_of(place) for place in range(5)] == [None, 2, None, 4, None]
    assert [(group.block_bytes, group.open_block_bytes) for group in layout.groups] == [
        (8 * 80, 8 * 128),
        (8 * 80, 8 * 128),
        (8 * 128, 0),
        (8 * 104, 8 * 128),
        (8 * 128, 0),
    ]
    assert (layout.num_sinks, layout.format_name) == (3, "int8 + bf16/int8")
    assert layout.row_bytes == 8 * (80 + 80 + 104)
    assert layout.first_row_bytes == layout.row_bytes + 2 * 8 * 128
    assert layout.bytes_per_token == 80 + 80 + 104
    assert layout.bytes_held(15) == layout.first_row_bytes
    assert layout.bytes_held(8 * 20) == 8 * (4 * 80 + 20 * 80 + 3 * 128 + 20 * 104 + 3 * 128)


def test_sinks_change_nothing_where_everything_is_exact_or_passed_by_windows() -> None:
    assert planned(FULL, WINDOW, sink_blocks=4) == planned(FULL, WINDOW)
    assert planned(WINDOW, kv_format="int8", sink_blocks=4) == planned(WINDOW, kv_format="int8")


def test_a_budget_that_is_split_gives_sinks_to_all_that_can_run_within_a_quarter() -> None:
    options = {"kv_format": "int8", "sink_blocks": 2, "split": True, "max_running": 8}
    roomy, tight = (
        plan_cache(spec_of(FULL, WINDOW), "bf16", CacheOptions(memory, **options)) for memory in (4 << 20, 100_000)
    )
    assert roomy.groups[1].num_blocks >= 8 * 2
    assert 1 < tight.groups[1].num_blocks < tight.num_open_blocks * 2 + 1
    assert tight.groups[1].sealed_bytes <= tight.budget_bytes / 3
    for layout in (roomy, tight):
        assert sum(group.sealed_bytes for group in layout.groups) == layout.budget_bytes
        assert layout.groups[0].num_blocks > layout.groups[1].num_blocks


def test_a_negative_number_of_sinks_is_refused() -> None:
    with pytest.raises(OptionError, match="sink_blocks is -1; accepted: 0"):
        CacheOptions(1 << 20, sink_blocks=-1)


# ---- the tokens of a block ------------------------------------------------------------------------------------------


def test_a_block_has_the_tokens_asked_for_or_those_of_the_formats() -> None:
    assert planned(FULL).block_tokens == planned(FULL, kv_format="int8", kv_layers="0=f32").block_tokens == 16
    assert planned(FULL, block_tokens=64, kv_format="int8").block_tokens == 64


def test_a_block_that_nobody_sized_is_as_large_as_the_format_that_wants_most() -> None:
    assert [planned(FULL, kv_format=name).block_tokens for name in ("auto", "k8v4", "int4/bf16")] == [16, 16, 64]
    assert planned(FULL, FULL, kv_layers="1=int4").block_tokens == 64
    assert planned(FULL, kv_format="int4", kv_layers="0=exact").block_tokens == 16  # no layer is stored in int4
    assert planned(FULL, kv_format="int4", block_tokens=16).block_tokens == 16

    def held(**asked: object) -> int:
        plan = make_plan(spec_of(FULL), read_options(context=65, **asked))  # type: ignore[arg-type]
        return plan.kv.kvfolio_bytes_at["65"]

    # A token's key takes 8 bytes in int4 and 4 / T for each of 16 channels, its value 8 + 2; in an open block 64 both.
    assert held(kv_format="int4") == 64 * 2 * (8 + 1 + 10) + 64 * 128
    assert held(kv_format="int4", block_tokens=16) == 64 * 2 * (8 + 4 + 10) + 16 * 128
    assert held(kv_format="f32") == 64 * 256 + 16 * 256
