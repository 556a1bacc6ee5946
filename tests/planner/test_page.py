"""The HTML page: one file that needs nothing else, says nothing but what is escaped, and draws without an error."""

import contextlib
import dataclasses
import html
import json
import re
import shlex
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

import kvfolio
from kvfolio.cli import main
from kvfolio.errors import OptionError
from kvfolio.planner.hardware import Device
from kvfolio.planner.options import PlanOptions, read_options
from kvfolio.planner.page.figures import PLOTS
from kvfolio.planner.page.grids import make_grid
from kvfolio.planner.page.page import FILES, SCRIPTS, page_text, write_page
from kvfolio.planner.report import make_plan
from kvfolio.spec.formats import BF16, F32
from kvfolio.spec.layers import FullAttention, LatentAttention, LayerKind, NoCache, RecurrentState, SlidingWindow
from kvfolio.spec.model import ModelSpec, WeightCount
from kvfolio.spec.source import read_model

pytest.importorskip("plotly")

HOSTILE = "</script><img src=x onerror=alert(1)> @@grid@@ <b>&\"'"


def model(name: str, *layers: LayerKind, max_context: int | None = 131_072, notes: tuple[str, ...] = ()) -> ModelSpec:
    weights = WeightCount(8_030_261_248, 8_030_261_248, 16_060_522_496, "config")
    return ModelSpec(name, "test", layers, max_context, "bf16", 4096, 32, weights, notes)


LLAMA = model("llama-3.1-8b", *(FullAttention(8, 128, 128),) * 32)
LATENT = model("latents", *(LatentAttention(512, 64, 32, 192, 128),) * 61, max_context=163_840)
WINDOWS = model(
    HOSTILE, *(SlidingWindow(8, 128, 128, 1024), FullAttention(8, 128, 128)) * 8, notes=(f"note {HOSTILE}",)
)
STATES = model("states", *(RecurrentState("mamba2", 100_000, F32, 3000, BF16),) * 24, max_context=None)
EMPTY = model("empty", NoCache())
OPTIONS = read_options(context="32k", users=16, device="h100-sxm", kv_format="fp8")
CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "tie_word_embeddings": False,
}


class Seen(HTMLParser):
    """Every element of a page, with its attributes, and the texts of scripts by their id."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: dict[str | None, str] = {}
        self.script: str | None = None
        self.words = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        tag, attributes = self.elements[-1] if self.elements else ("", {})
        if self.cdata_elem == "script" and tag == "script":
            self.scripts[attributes.get("id")] = data
        else:
            self.words += data

    def ids(self) -> set[str | None]:
        return {attributes.get("id") for _, attributes in self.elements}


@pytest.fixture(scope="module")
def page() -> str:
    return page_text([LLAMA, LATENT, WINDOWS], OPTIONS, version="1.2.3", date="2026-01-31")


@pytest.fixture(scope="module")
def seen(page: str) -> Seen:
    return Seen(page)


# ---- one file, nothing from elsewhere -------------------------------------------------------------------------------


def test_no_element_fetches_anything(seen: Seen) -> None:
    for tag, attributes in seen.elements:
        assert tag not in {"link", "iframe", "img", "object", "embed", "base"}
        assert not {"src", "href", "srcset", "action", "data"} & attributes.keys(), (tag, attributes)


def test_the_style_fetches_nothing() -> None:
    style = (FILES / "style.css").read_text(encoding="utf-8")
    assert "url(" not in style
    assert "@import" not in style


def test_the_page_forbids_itself_the_network(seen: Seen) -> None:
    policies = [a["content"] for tag, a in seen.elements if tag == "meta" and a.get("http-equiv")]
    assert policies == [
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
    ]


# ---- what users name is text ----------------------------------------------------------------------------------------


def test_names_and_notes_never_become_elements(page: str, seen: Seen) -> None:
    assert [tag for tag, _ in seen.elements].count("script") == 4
    assert "img" not in {tag for tag, _ in seen.elements}
    assert "b" not in {tag for tag, _ in seen.elements}
    assert "<img src=x" not in page
    assert HOSTILE in seen.words
    assert f"note {HOSTILE}" in seen.words


def test_a_name_is_not_taken_for_a_place_of_the_frame(page: str) -> None:
    assert page.count(html.escape("@@grid@@")) >= 1
    assert json.loads(Seen(page).scripts["grid"] or "")["models"][2]["name"] == HOSTILE


def test_a_name_that_is_no_unicode_is_written_all_the_same(tmp_path: Path) -> None:
    write_page([dataclasses.replace(LLAMA, name="a\udcffb")], OPTIONS, tmp_path / "page.html")
    assert "a\\udcffb" in (tmp_path / "page.html").read_text(encoding="utf-8")


# ---- its numbers ----------------------------------------------------------------------------------------------------


def test_the_numbers_in_the_page_are_the_grid(seen: Seen) -> None:
    grid = dataclasses.asdict(make_grid([LLAMA, LATENT, WINDOWS], OPTIONS))
    assert json.loads(seen.scripts["grid"]) == json.loads(json.dumps(grid))


def test_without_scripts_the_plan_as_asked_is_there(seen: Seen) -> None:
    at = make_plan(LLAMA, OPTIONS).contexts[0]
    assert at.step is not None
    for text in ("32,768", "2.00 GiB", f"{at.users}", f"{at.step.tokens_per_s_total:,.1f}"):
        assert text in seen.words


def test_the_command_line_signs_its_page_with_its_version(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    monkeypatch.setattr(sys, "argv", ["kvfolio", "plan", "gpt2", "--html", str(page)])
    with contextlib.suppress(SystemExit):
        main()
    assert f"Made by kvfolio {kvfolio.__version__} on " in page.read_text(encoding="utf-8")


def test_it_says_when_and_by_what_it_was_made_and_what_is_assumed(seen: Seen) -> None:
    assert "kvfolio 1.2.3 · 2026-01-31" in seen.words
    for assumption in make_plan(LLAMA, OPTIONS).assumptions:
        assert assumption in seen.words
    assert OPTIONS.device.source in seen.words


def test_the_command_has_the_options_that_no_control_sets() -> None:
    options = dataclasses.replace(OPTIONS, utilisation=0.8, block_tokens=32, weights_bytes=10**10)
    frame = json.loads(Seen(page_text([LLAMA], options)).scripts["frame"])
    assert frame["arguments"] == "--utilisation 0.8 --block-tokens 32 --weights-bytes 10000000000"
    assert json.loads(Seen(page_text([LLAMA], OPTIONS)).scripts["frame"])["arguments"] == ""


def test_the_command_names_what_was_typed_as_one_word_of_a_shell() -> None:
    typed = ["./it's mine/config.json", "org/model"]
    frame = json.loads(Seen(page_text([LLAMA, LATENT], OPTIONS, typed)).scripts["frame"])
    assert [shlex.split(word) for word in frame["sources"]] == [[word] for word in typed]
    assert json.loads(Seen(page_text([LLAMA], OPTIONS)).scripts["frame"])["sources"] == [LLAMA.name]


# ---- script and frame fit together ----------------------------------------------------------------------------------


def test_every_id_that_the_script_looks_up_is_in_the_page(seen: Seen) -> None:
    script = (FILES / "page.js").read_text(encoding="utf-8")
    asked = set(re.findall(r'(?:one|read)\("([\w-]+)"\)', script)) | {"table-contexts", "table-models"}
    asked |= {f"tile-{key}" for key in re.findall(r'tile\("([\w-]+)"', script)}
    assert len(asked) > 15
    assert asked <= seen.ids()
    assert {f"plot-{plot.key}" for plot in PLOTS} <= seen.ids()


def test_every_control_has_a_label(seen: Seen) -> None:
    labelled = {attributes.get("for") for tag, attributes in seen.elements if tag == "label"}
    controls = {attributes["id"] for tag, attributes in seen.elements if tag in {"select", "input"}}
    assert controls == {"model", "context", "users", "format", "device", "count", "theme"}
    assert controls <= labelled


def test_every_word_of_a_caption_is_one_that_the_page_fills_in() -> None:
    script = (FILES / "page.js").read_text(encoding="utf-8")
    filled = re.search(r"const filled = \{(.*?)\};", script, re.DOTALL)
    assert filled is not None
    known = set(re.findall(r"(\w+):", filled[1]))
    for plot in PLOTS:
        assert set(re.findall(r"\{(\w+)\}", plot.caption)) <= known


def test_the_scripts_open_with_what_they_do() -> None:
    for name in SCRIPTS:
        assert (FILES / name).read_text(encoding="utf-8").startswith("// ")


# ---- writing --------------------------------------------------------------------------------------------------------


def test_a_page_is_written_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"
    path.write_text("old")
    write_page([LLAMA], OPTIONS, path)
    assert path.read_text(encoding="utf-8").endswith("</html>\n")
    assert list(tmp_path.iterdir()) == [path]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "real.html").write_text("old")
    (tmp_path / "link.html").symlink_to(tmp_path / "real.html")
    write_page([LLAMA], OPTIONS, tmp_path / "link.html")
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "real.html").read_text(encoding="utf-8").startswith("<!doctype html>")


@pytest.mark.parametrize("name", ["", "missing/plan.html", "file/plan.html", "x" * 300, "nul\0.html"])
def test_a_place_that_cannot_be_written_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("a file, not a folder")
    with pytest.raises(OptionError, match="cannot be written"):
        write_page([LLAMA], OPTIONS, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_failed_write_leaves_the_page_that_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "plan.html"
    path.write_text("old")
    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OptionError, match=r"plan.html cannot be written: No space left"):
        write_page([LLAMA], OPTIONS, path)
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_something_that_is_no_file_is_written_to_and_not_replaced() -> None:
    write_page([LLAMA], OPTIONS, Path("/dev/null"))
    assert not Path("/dev/null").is_file()


def test_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="no model"):
        write_page([], OPTIONS, tmp_path / "plan.html")


UNKNOWN = dataclasses.replace(LLAMA, name="no-weights", weights=WeightCount(0, 0, 0, "config"))


@pytest.mark.parametrize(
    ("specs", "more", "message"),
    [
        ([LLAMA], {"pipeline": 2}, "--html shows tensor parallel only; leave --pipeline out"),
        ([LLAMA, UNKNOWN], {}, "the weights of no-weights are not known; give --weights-bytes"),
        ([LATENT, LLAMA], {"kv_format": "fp8-mla"}, "fp8-mla stores latents, and llama-3.1-8b has none"),
    ],
    ids=["pipeline", "weights", "format"],
)
def test_what_no_page_can_show_is_refused_and_nothing_is_written(
    specs: list[ModelSpec], more: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(OptionError, match=message):
        write_page(specs, dataclasses.replace(OPTIONS, **more), tmp_path / "plan.html")
    assert not list(tmp_path.iterdir())


def test_weights_that_are_given_make_a_page_of_a_model_that_names_none(tmp_path: Path) -> None:
    write_page([UNKNOWN], dataclasses.replace(OPTIONS, weights_bytes=10**10), tmp_path / "plan.html")
    assert "9.31 GiB" in (tmp_path / "plan.html").read_text(encoding="utf-8")


# ---- in a browser ---------------------------------------------------------------------------------------------------

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-component-update"),
    *("--disable-background-networking", "--disable-sync", "--virtual-time-budget=20000", "--window-size=1280,1000"),
    *("--enable-logging=stderr", "--v=0", "--dump-dom"),
)


def drawn(path: Path, address: str, folder: Path) -> tuple[str, list[str]]:
    """The page after its script has run, and what it wrote to the console."""
    done = subprocess.run(
        [str(BROWSER), *QUIET, f"--user-data-dir={folder}", f"{path.as_uri()}#{address}"],
        capture_output=True,
        text=True,
        timeout=180,
        check=True,
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


def text_of(dom: str, tile: str) -> str:
    found = re.search(rf'id="tile-{tile}".*?class="value">([^<]*)<', dom)
    assert found is not None
    return found[1]


UNKNOWN_SPEED = read_options(device=Device("card", "", 80 << 30, None, None, None, None, "", ""))


@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
@pytest.mark.parametrize(
    ("specs", "options", "address", "plots"),
    [
        ([LLAMA, LATENT, WINDOWS], OPTIONS, "model=2&context=131072&users=8&format=int4&device=l4&theme=dark", 6),
        ([STATES, EMPTY], OPTIONS, "model=1", 5),  # nothing is held: any number of users fits, and no line shows it
        ([LLAMA], UNKNOWN_SPEED, "", 4),  # no bandwidth, so no speeds
        ([LLAMA], read_options(device="l4", weights_bytes="700GB"), "", 4),  # no user fits, no step to split
        ([LATENT], read_options(device="h200-sxm", kv_format="fp8-mla"), "", 6),  # a ladder of one design
    ],
    ids=["chosen", "nothing-held", "no-speeds", "too-large", "latents-only"],
)
def test_the_page_draws_without_a_word_on_the_console(
    specs: list[ModelSpec], options: PlanOptions, address: str, plots: int, tmp_path: Path
) -> None:
    write_page(specs, options, tmp_path / "page.html")
    dom, console = drawn(tmp_path / "page.html", address, tmp_path / "profile")
    assert console == []
    told = re.search(r'data-drawn="(\d)"', dom)
    assert told is not None
    assert int(told[1]) == plots


@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
def test_the_tiles_show_the_planners_numbers_for_what_is_chosen(tmp_path: Path) -> None:
    write_page([LLAMA, LATENT], OPTIONS, tmp_path / "page.html")
    address = "model=1&context=65536&users=64&format=int8&device=h200-sxm&devices=2"
    dom, _ = drawn(tmp_path / "page.html", address, tmp_path / "profile")
    asked: dict[str, Any] = {"context": 65536, "users": 64, "kv_format": "int8", "device": "h200-sxm", "devices": 2}
    plan = make_plan(LATENT, read_options(**asked))
    assert plan.step is not None
    assert text_of(dom, "fit") == f"{plan.users.reserved:,}"
    assert text_of(dom, "total-speed") == f"{plan.step.tokens_per_s_total:,.0f}"
    assert text_of(dom, "break-even") == f"{plan.break_even_context:,}"
    assert text_of(dom, "conversation") == f"{plan.contexts[0].bytes / 2**30:.2f} GiB"
    assert "--context 65536 --users 64 --device h200-sxm --devices 2 --kv-format int8" in dom


@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
def test_the_command_on_the_page_gives_the_numbers_on_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "it's mine" / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(CONFIG))
    options = read_options(device="l4", device_memory="20GB", context=5000, users=3, reserve="1GiB", block_tokens=32)
    write_page([read_model(path)], options, tmp_path / "page.html", [str(path)])
    dom, console = drawn(tmp_path / "page.html", "format=int4&devices=2", tmp_path / "profile")
    assert console == []
    command = re.search(r'id="command">([^<]*)<', dom)
    assert command is not None
    monkeypatch.setattr(sys, "argv", [*shlex.split(html.unescape(command[1])), "--json"])
    with contextlib.suppress(SystemExit):
        main()
    (plan,) = json.loads(capsys.readouterr().out)
    assert (plan["kv"]["format"], plan["step"]["users"], plan["step"]["context"]) == ("int4", 3, 5000)
    assert text_of(dom, "fit") == f"{plan['users']['reserved']:,}"
    assert text_of(dom, "total-speed") == f"{plan['step']['tokens_per_s_total']:,.0f}"


def test_a_mean_and_a_prefix_need_not_fit_every_context_of_the_page(tmp_path: Path) -> None:
    options = read_options(context="8k", device="l4", mean_tokens=3000, prefix_tokens=2000)
    write_page([LLAMA], options, tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size > 10**6
