"""The page's tables hold the planner's numbers at every stop, and its few formulas give its answers."""

import dataclasses
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvfolio.errors import OptionError
from kvfolio.planner import capacity, sizes
from kvfolio.planner.hardware import Device, find_device
from kvfolio.planner.options import PlanOptions, read_options
from kvfolio.planner.page.figures import PLOTS, plotly_script
from kvfolio.planner.page.grids import COUNTS, DEVICES, FORMATS, make_grid
from kvfolio.planner.page.page import FILES
from kvfolio.planner.parallel import device_shares
from kvfolio.planner.report import Plan, make_plan
from kvfolio.planner.steptime import Speeds, step_time
from kvfolio.planner.whatif import what_if
from kvfolio.spec.formats import BF16, F32, parse_cache_format
from kvfolio.spec.layers import (
    CombinedLayer,
    CompressedSparse,
    CrossAttention,
    FullAttention,
    LatentAttention,
    LayerKind,
    NoCache,
    RecurrentState,
    SlidingWindow,
)
from kvfolio.spec.model import ModelSpec, WeightCount

STATE = RecurrentState("gated_delta_net", 524_288, F32, 24_576, BF16)


def model(*layers: LayerKind, max_context: int | None = 131_072, experts: int = 0) -> ModelSpec:
    weights = WeightCount(
        *(8_030_261_248, 8_030_261_248 if not experts else 8_030_261_248 * 19 // 64, 16_060_522_496, "config"),
        *(8_030_261_248 * 3 // 4 if experts else 0, experts, experts // 16),
        expert_bytes=16_060_522_496 * 3 // 4 if experts else 0,
    )
    return ModelSpec("mixed", "test", layers, max_context, "bf16", 4096, 32, weights, ())


LLAMA = model(*(FullAttention(8, 128, 128),) * 32)
# One of everything: a window, a latent, a state beside attention, compressed vectors, an encoder, experts.
MIXED = model(
    *(FullAttention(8, 128, 128), SlidingWindow(8, 128, 128, 1024), LatentAttention(512, 64, 32, 192, 128)),
    *(CombinedLayer((STATE, FullAttention(2, 256, 256))), CompressedSparse(512, 4, 128, 128, 512), NoCache()),
    CrossAttention(8, 128, 128, 0),
    experts=64,
)
MEASURED = Device("cpu", "", 8 << 30, 20 * 10**9, 1e12, None, None, "measured 2026-01-31", "")
OPTIONS = read_options(context="32k", users=16, device="h100-sxm", utilisation=0.85, reserve="1GiB")


def grid_of(spec: ModelSpec, options: PlanOptions = OPTIONS) -> dict[str, Any]:
    """What the page reads: the grid after its way through JSON."""
    read: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(make_grid([spec], options))))
    return read


# ---- the page's formulas once more, in Python (files/formulas.js) -----------------------------------------------


def cache_memory(device: dict[str, Any], share: dict[str, Any]) -> int:
    return max(0, device["usable_bytes"] - share["weights_bytes"])


def users_that_fit(device: dict[str, Any], share: dict[str, Any], bytes_each: int) -> int | None:
    if share["weights_bytes"] > device["usable_bytes"]:
        return 0
    return math.floor(cache_memory(device, share) / bytes_each) if bytes_each > 0 else None


def step_seconds(
    grid: dict[str, Any], share: dict[str, Any], cache: dict[str, Any], device: dict[str, Any], *at: int
) -> float:
    context, u = at
    users = grid["users"][u]
    moved = share["weights_read"][u] + users * cache["read_bytes"][context]
    compute = users * share["decode_flops"][context] / device["bf16_flops"] if device["bf16_flops"] else 0.0
    return float(max(moved / device["bandwidth_bytes_per_s"], compute))


def first_token(share: dict[str, Any], device: dict[str, Any], context: int) -> float | None:
    if not device["bf16_flops"]:
        return None
    compute = share["prefill_flops"][context] / device["bf16_flops"]
    return float(max(compute, share["prefill_read"][context] / device["bandwidth_bytes_per_s"]))


def corners(grid: dict[str, Any]) -> Iterator[tuple[int, int, int]]:
    for count in range(len(grid["counts"])):
        for fmt in range(len(grid["formats"])):
            for device in range(len(grid["devices"])):
                yield count, fmt, device


# ---- the numbers are the planner's ----------------------------------------------------------------------------------


def plan_at(spec: ModelSpec, options: PlanOptions, grid: dict[str, Any], corner: tuple[int, int, int]) -> Plan:
    count, fmt, device = corner
    row = grid["devices"][device]
    asked = dataclasses.replace(
        options,
        contexts=tuple(grid["contexts"]),
        devices=grid["counts"][count],
        kv_format=grid["formats"][fmt],
        device=options.device if row["name"].endswith(" (as given)") else find_device(row["name"]),
    )
    return make_plan(spec, asked)


def test_every_device_format_count_and_context_gives_the_users_and_speeds_of_the_plan() -> None:
    options = dataclasses.replace(OPTIONS, encoder_tokens=1500)
    grid = grid_of(MIXED, options)
    body, u = grid["models"][0], grid["chosen"]["users"]
    for corner in corners(grid):
        count, fmt, device = corner
        plan, row, share = plan_at(MIXED, options, grid, corner), grid["devices"][device], body["shares"][count]
        cache, memory = share["caches"][fmt], cache_memory(row, share)
        assert memory * grid["counts"][count] == plan.kv_memory_bytes
        for c, at in enumerate(plan.contexts):
            assert users_that_fit(row, share, cache["device_bytes"][c]) == at.users
            assert sum(kind[c] for kind in cache["by_kind"]) == cache["device_bytes"][c] == at.device_bytes
            assert body["formats"][fmt]["bytes_at"][c] == at.bytes
            assert at.step is not None
            assert math.isclose(step_seconds(grid, share, cache, row, c, u), at.step.time_s, rel_tol=1e-14)
            first = first_token(share, row, c)
            assert first is at.ttft_s is None or math.isclose(first or 0, at.ttft_s or 0, rel_tol=1e-14)
        assert body["formats"][fmt]["bytes_per_token"] == plan.kv.bytes_per_token
        assert body["formats"][fmt]["bytes_fixed"] == plan.kv.bytes_fixed
        assert body["formats"][fmt]["break_even"][u] == plan.break_even_context


def test_a_step_is_the_roofline_of_the_planner_at_every_point_of_the_grid() -> None:
    grid = grid_of(MIXED)
    for count, fmt, device in corners(grid):
        shares = device_shares(MIXED, MIXED.weights.num_bytes, grid["counts"][count])
        row, own = grid["devices"][device], grid["models"][0]["shares"][count]
        speeds = Speeds(row["bandwidth_bytes_per_s"], row["bf16_flops"])
        parsed = parse_cache_format(grid["formats"][fmt])
        for u, users in enumerate(grid["users"]):
            for c, context in enumerate(grid["contexts"]):
                told = step_seconds(grid, own, own["caches"][fmt], row, c, u)
                assert math.isclose(told, step_time(shares, parsed, context, users, speeds).time_s, rel_tol=1e-14)


def test_where_the_cache_outweighs_the_weights_is_the_planners_for_every_format_and_number_of_users() -> None:
    grid = grid_of(LLAMA)
    for fmt, own in zip(grid["formats"], grid["models"][0]["formats"], strict=True):
        for users, told in zip(grid["users"], own["break_even"], strict=True):
            expected = capacity.break_even_context(LLAMA, LLAMA.weights.num_bytes, users, parse_cache_format(fmt))
            assert told == expected


@pytest.mark.parametrize("spec", [LLAMA, MIXED], ids=["llama", "mixed"])
def test_the_ladder_is_what_if_at_every_context_and_format(spec: ModelSpec) -> None:
    grid = grid_of(spec)
    body = grid["models"][0]
    for c in (0, 7, len(grid["contexts"]) - 1):
        for fmt, own in zip(grid["formats"], body["formats"], strict=True):
            asked = dataclasses.replace(OPTIONS, contexts=(grid["contexts"][c],), kv_format=fmt)
            told = {name: row[c] for name, row in zip(body["designs"], own["ladder"], strict=True)}
            told |= {name: row[c] for name, row in body["format_ladder"].items()}
            assert told == {row.name: row.plan.contexts[0].bytes for row in what_if(spec, asked)}


NODE = shutil.which("node")
RUN = """
const formulas = require(process.argv[1]);
const grid = JSON.parse(require("fs").readFileSync(0, "utf8"));
const told = [];
for (const share of grid.models[0].shares) for (const cache of share.caches) for (const device of grid.devices)
  for (let c = 0; c < grid.contexts.length; c += 1) {
    told.push(formulas.usersThatFit(device, share, cache.device_bytes[c]));
    told.push(formulas.firstToken(share, device, c));
    for (let u = 0; u < grid.users.length; u += 1) told.push(formulas.step(grid, share, cache, device, c, u).seconds);
  }
console.log(JSON.stringify(told));
"""


@pytest.mark.skipif(NODE is None, reason="node is not installed")
def test_the_page_computes_what_its_formulas_say_in_python_at_every_point_of_the_grid() -> None:
    grid = grid_of(MIXED)
    done = subprocess.run(
        [str(NODE), "-e", RUN, str(FILES / "formulas.js")],
        input=json.dumps(grid),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    told = iter(json.loads(done.stdout))
    for count, fmt, device in corners(grid):
        share, row = grid["models"][0]["shares"][count], grid["devices"][device]
        cache = share["caches"][fmt]
        for c in range(len(grid["contexts"])):
            assert next(told) == users_that_fit(row, share, cache["device_bytes"][c])
            assert next(told) == first_token(share, row, c)
            for u in range(len(grid["users"])):
                seconds = step_seconds(grid, share, cache, row, c, u)
                assert math.isclose(next(told), seconds, rel_tol=1e-15)
    assert next(told, None) is None


# ---- what fits no usual case ----------------------------------------------------------------------------------------


def test_the_first_token_of_a_short_prompt_does_not_wait_for_experts_that_nothing_reaches() -> None:
    grid = grid_of(MIXED, read_options(context="1,64k", device="h100-sxm"))
    share = grid["models"][0]["shares"][0]
    one, many = share["prefill_read"][0], share["prefill_read"][-1]
    assert one == pytest.approx(MIXED.weights.num_bytes * (1 - 0.75 * 15 / 16))  # 4 of 64 experts
    assert many == pytest.approx(MIXED.weights.num_bytes)
    row = grid["devices"][grid["chosen"]["device"]]
    asked = read_options(context=1, device="h100-sxm")
    assert first_token(share, row, 0) == make_plan(MIXED, asked).contexts[0].ttft_s


def test_where_the_weights_do_not_fit_no_user_does_even_if_nothing_is_cached() -> None:
    spec = model(NoCache())
    grid = grid_of(spec, read_options(context=1024, device="l4", weights_bytes="700GB"))
    share, row = grid["models"][0]["shares"][0], grid["devices"][grid["chosen"]["device"]]
    bytes_each = share["caches"][0]["device_bytes"][0]
    assert bytes_each == 0
    plan = make_plan(spec, read_options(context=1024, device="l4", weights_bytes="700GB"))
    assert users_that_fit(row, share, bytes_each) == plan.users.reserved == 0


def test_a_format_of_latents_has_the_model_as_published_on_its_ladder_and_no_design_without_latents() -> None:
    spec = model(*(LatentAttention(512, 64, 32, 192, 128),) * 8)
    options = read_options(context="32k", device="h100-sxm", kv_format="fp8-mla")
    grid = grid_of(spec, options)
    (body,), c = grid["models"], grid["chosen"]["context"]
    assert grid["formats"] == ["fp8-mla", *FORMATS]
    ladder = dict(zip(body["designs"], body["formats"][0]["ladder"], strict=True))
    assert ladder["as published"][c] == make_plan(spec, options).contexts[0].bytes
    assert {name for name, row in ladder.items() if row is None} == {"MHA", "GQA-8", "MQA", "MLA"}
    assert all(row is not None for own in body["formats"][1:] for row in own["ladder"])


# ---- the axes -------------------------------------------------------------------------------------------------------


def test_the_sliders_hold_what_was_asked_and_what_the_models_can_read() -> None:
    options = read_options(context="5000,70k", users=17, device="l4", devices=3, kv_format="int4-g64")
    grid = make_grid([LLAMA, dataclasses.replace(LLAMA, max_context=40_960)], options)
    assert {5000, 70 * 1024, 131_072, 40_960, 1024, 1 << 20} <= set(grid.contexts)
    assert list(grid.contexts) == sorted(set(grid.contexts))
    assert grid.contexts[grid.chosen["context"]] == 5000
    assert grid.users[grid.chosen["users"]] == 17
    assert grid.counts[grid.chosen["count"]] == 3
    assert grid.formats[grid.chosen["format"]] == "int4-g64"
    assert grid.devices[grid.chosen["device"]].name == "l4"
    assert set(COUNTS) < set(grid.counts)
    assert set(FORMATS) < set(grid.formats)


def test_auto_stands_on_16_bits_and_an_empty_context_on_the_least_that_a_slider_has() -> None:
    grid = make_grid([LLAMA], read_options(context=0, device="h100-sxm"))
    assert grid.formats[grid.chosen["format"]] == "bf16"
    assert grid.contexts[grid.chosen["context"]] == 1


def test_the_menu_has_well_known_devices_with_the_numbers_of_the_table() -> None:
    grid = make_grid([LLAMA], OPTIONS)
    assert [row.name for row in grid.devices] == list(DEVICES)
    assert all(row.memory_bytes == find_device(row.name).memory_bytes for row in grid.devices)


@pytest.mark.parametrize(
    ("given", "name", "arguments"),
    [
        ({"device": "a100-pcie-40gb"}, "a100-pcie-40gb", "--device a100-pcie-40gb"),
        ({"device": "h100-sxm", "device_memory": "64GiB"}, "h100-sxm (as given)", "--device-memory 68719476736"),
        ({"device": "l4", "flops": 1e14}, "l4 (as given)", "--flops 1e+14"),
        ({"device_memory": "24GB", "bandwidth": "1TB"}, "custom", "--device-memory 24000000000"),
        ({"device": MEASURED}, "cpu", "--device this --device-memory 8589934592 --bandwidth 20000000000"),
    ],
)
def test_a_device_that_is_not_in_the_menu_stands_first_with_its_own_arguments(
    given: dict[str, Any], name: str, arguments: str
) -> None:
    grid = make_grid([LLAMA], read_options(**given))
    assert grid.chosen["device"] == 0
    assert grid.devices[0].name == name
    assert arguments in grid.devices[0].arguments
    assert [row.name for row in grid.devices[1:]] == list(DEVICES)


def test_layer_kinds_are_named_for_people_and_those_without_a_cache_left_out() -> None:
    held = make_grid([MIXED], dataclasses.replace(OPTIONS, encoder_tokens=1500)).models[0].kinds
    assert held == (
        *("full attention", "sliding windows", "latents (MLA)", "states (gated_delta_net)", "compressed vectors"),
        "cross-attention",
    )
    assert sizes.bytes_at(model(NoCache()), 1024, parse_cache_format("bf16")) == 0
    assert make_grid([model(NoCache())], OPTIONS).models[0].kinds == ()


# ---- the plots ------------------------------------------------------------------------------------------------------


def test_every_layout_is_one_that_plotly_accepts() -> None:
    layout = pytest.importorskip("plotly.graph_objects").Layout
    for plot in PLOTS:
        assert layout(plot.layout).to_plotly_json() == plot.layout


def test_every_axis_of_numbers_has_a_title() -> None:
    for plot in PLOTS:
        for name, axis in plot.layout.items():
            if "axis" in name and isinstance(axis, dict) and axis.get("type") != "category":
                assert axis["title"]["text"], (plot.key, name)


def test_plotlys_script_is_whole_and_cannot_end_its_element() -> None:
    pytest.importorskip("plotly")
    script = plotly_script()
    assert len(script) > 1_000_000
    assert "</script" not in script


def test_a_missing_plotly_is_named_with_the_way_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "plotly"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "plotly", None)
    with pytest.raises(OptionError, match=r"pip install 'kvfolio\[page\]'"):
        plotly_script()


def test_every_plot_has_its_traces_in_the_pages_script() -> None:
    script = (Path(FILES) / "plots.js").read_text(encoding="utf-8")
    for plot in PLOTS:
        assert f"\n  {plot.key}(view) {{" in script
