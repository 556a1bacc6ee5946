"""Models of the hub, on a server of this machine that speaks as the hub does: sizes, closed doors, silence, the cache.

Knows nothing of layers: what is fetched is a config and what the weight files say of sizes.
"""

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from kvfolio.errors import BrokenModelError, KvfolioError, UnknownModelError
from kvfolio.spec import hub
from kvfolio.spec.hub import HubModel, fetch_model

pytest.importorskip("huggingface_hub")

CONFIG = {"model_type": "llama", "hidden_size": 64}
COMMIT = "0123456789012345678901234567890123456789"
Fetch = Callable[..., HubModel]


@dataclass
class FakeHub:
    """Files by ``organisation/name/file``; a repository may instead have a status and a word for its refusal."""

    files: dict[str, bytes] = field(default_factory=dict)
    refusals: dict[str, tuple[int, str]] = field(default_factory=dict)
    silent_s: float = 0.0
    ranges: list[str] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    endpoint: str = ""

    def answer(self, request: BaseHTTPRequestHandler, with_body: bool) -> None:
        time.sleep(self.silent_s)
        organisation, name, _, _, filename = request.path.split("?")[0].lstrip("/").split("/", 4)
        repo = f"{organisation}/{name}"
        self.tokens.append(request.headers.get("authorization", ""))
        content, status, word = self.files.get(f"{repo}/{filename}"), 200, ""
        if repo in self.refusals:
            status, word = self.refusals[repo]
        elif content is None:
            is_known = any(path.startswith(f"{repo}/") for path in self.files)
            status, word = 404, "EntryNotFound" if is_known else "RepoNotFound"
        body = content if content is not None and status == 200 else b""
        asked = request.headers.get("range")
        if asked and body:
            self.ranges.append(asked)
            first, last = map(int, asked.removeprefix("bytes=").split("-"))
            body, status = body[first : last + 1], 206
        request.send_response(status)
        for key, value in (("X-Error-Code", word), ("X-Repo-Commit", COMMIT), ("ETag", f'"{filename}{len(body)}"')):
            if value:
                request.send_header(key, value)
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        if with_body:
            request.wfile.write(body)


@pytest.fixture
def fake() -> Iterator[FakeHub]:
    fake = FakeHub()

    class Answer(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            fake.answer(self, with_body=False)

        def do_GET(self) -> None:
            fake.answer(self, with_body=True)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    fake.endpoint = f"http://127.0.0.1:{server.server_port}"
    yield fake
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def fetch(fake: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fetch:
    monkeypatch.setenv("HF_TOKEN", "hf_of_the_user")
    return lambda repo, **more: fetch_model(repo, **({"endpoint": fake.endpoint, "cache_dir": tmp_path} | more))


def header_bytes(num_numbers: int) -> bytes:
    text = json.dumps({"w": {"dtype": "BF16", "shape": [num_numbers], "data_offsets": [0, 2 * num_numbers]}}).encode()
    return len(text).to_bytes(8, "little") + text


def test_a_config_comes_with_the_header_of_its_only_weight_file(fake: FakeHub, fetch: Fetch) -> None:
    fake.files = {"org/small/config.json": json.dumps(CONFIG).encode()}
    fake.files["org/small/model.safetensors"] = header_bytes(10**6) + bytes(2 * 10**6)
    model = fetch("org/small")
    assert (model.repo, model.config, model.notes) == ("org/small", CONFIG, ())
    assert model.weights is not None
    assert (model.weights.num_params, model.weights.num_bytes) == (10**6, 2 * 10**6)
    assert fake.ranges == ["bytes=0-100000"]  # the weights themselves stay where they are
    assert "Bearer hf_of_the_user" in fake.tokens


def test_a_sharded_model_says_its_bytes_in_its_index(fake: FakeHub, fetch: Fetch) -> None:
    index = {"metadata": {"total_size": 16_060_522_496}, "weight_map": {"a": "model-00001-of-00004.safetensors"}}
    fake.files = {"org/big/config.json": json.dumps(CONFIG).encode()}
    fake.files["org/big/model.safetensors.index.json"] = json.dumps(index).encode()
    weights = fetch("org/big").weights
    assert weights is not None
    assert (weights.stated_bytes, weights.tensors) == (16_060_522_496, {})


def test_a_model_without_safetensors_has_no_sizes(fake: FakeHub, fetch: Fetch) -> None:
    fake.files = {"org/old/config.json": json.dumps(CONFIG).encode()}
    assert fetch("org/old") == HubModel("org/old", CONFIG, None)


def test_broken_weight_files_are_noted_and_the_config_still_read(fake: FakeHub, fetch: Fetch) -> None:
    fake.files = {"org/odd/config.json": json.dumps(CONFIG).encode(), "org/odd/model.safetensors.index.json": b"{"}
    model = fetch("org/odd")
    assert (model.config, model.weights) == (CONFIG, None)
    assert "sizes of the weight files could not be read" in model.notes[0]


@pytest.mark.parametrize(
    ("refusal", "error", "words"),
    [
        (
            (403, "GatedRepo"),
            BrokenModelError,
            "is gated: accept the licence at https://huggingface.co/org/llama-3.1-7b",
        ),
        ((401, "GatedRepo"), BrokenModelError, "log in (hf auth login), or give a local config.json"),
        ((403, ""), BrokenModelError, "is gated"),
        ((401, "RepoNotFound"), UnknownModelError, "does not exist, or is private and needs a login"),
        ((404, "RepoNotFound"), UnknownModelError, "nearest in the catalogue: llama-3.1-70b, llama-3.1-8b"),
        ((503, ""), BrokenModelError, "the hub answered 503; try again later"),
        ((429, ""), BrokenModelError, "the hub answered 429; try again later"),
    ],
)
def test_a_closed_door_is_one_line_that_says_what_to_do(
    fake: FakeHub, fetch: Fetch, refusal: tuple[int, str], error: type[KvfolioError], words: str
) -> None:
    fake.refusals["org/llama-3.1-7b"] = refusal
    started = time.monotonic()
    with pytest.raises(error) as raised:
        fetch("org/llama-3.1-7b")
    assert time.monotonic() - started < 2
    assert words in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_repository_without_a_config_is_told_from_one_that_is_absent(fake: FakeHub, fetch: Fetch) -> None:
    fake.files["org/gguf-only/model.gguf"] = b"GGUF"
    with pytest.raises(UnknownModelError, match=r"has no config\.json; if it holds \.gguf files, download one"):
        fetch("org/gguf-only")


@pytest.mark.parametrize("content", [b"{", b"[1]", b"\xff", b"[" * 100_000])
def test_a_config_that_is_no_object_is_refused(fake: FakeHub, fetch: Fetch, content: bytes) -> None:
    fake.files["org/bad/config.json"] = content
    with pytest.raises(
        BrokenModelError, match=r"org/bad: its config\.json .*; (remove .* and try|give a local folder)"
    ):
        fetch("org/bad")


def test_a_name_that_the_hub_does_not_allow_is_refused(fetch: Fetch) -> None:
    with pytest.raises(UnknownModelError, match="cannot be the name of a repository"):
        fetch("org/a--b..c")


def closed_port() -> str:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{one.getsockname()[1]}"


def test_without_a_network_the_cache_answers(fake: FakeHub, fetch: Fetch) -> None:
    fake.files["org/kept/config.json"] = json.dumps(CONFIG).encode()
    fetch("org/kept")
    started = time.monotonic()
    model = fetch("org/kept", endpoint=closed_port())
    assert (model.config, model.notes) == (CONFIG, ("the hub did not answer: read from the local cache",))
    assert time.monotonic() - started < 2


def test_without_network_and_cache_the_way_out_is_named(fetch: Fetch) -> None:
    started = time.monotonic()
    with pytest.raises(BrokenModelError, match=r"cannot be reached \(.*\) and its cache does not hold it; connect"):
        fetch("org/absent", endpoint=closed_port())
    assert time.monotonic() - started < 2


def test_a_hub_that_never_answers_is_given_up(fake: FakeHub, fetch: Fetch) -> None:
    fake.files["org/kept/config.json"] = json.dumps(CONFIG).encode()
    fetch("org/kept")
    fake.silent_s = 3
    started = time.monotonic()
    with pytest.raises(BrokenModelError, match="cannot be reached"):
        fetch("org/absent", total_s=0.3)
    model = fetch("org/kept", total_s=0.3)
    assert time.monotonic() - started < 2
    assert (model.config, model.notes) == (CONFIG, ("the hub did not answer: read from the local cache",))


@pytest.fixture
def bars() -> Iterator[Any]:
    """huggingface_hub's switch of progress bars, left as it was."""
    switch = import_module("huggingface_hub.utils")
    if switch.are_progress_bars_disabled():
        pytest.skip("progress bars are off for good here")
    yield switch
    switch.enable_progress_bars()


def test_progress_bars_are_off_while_the_hub_is_asked_and_then_as_before(
    fake: FakeHub, fetch: Fetch, bars: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.files["org/kept/config.json"] = json.dumps(CONFIG).encode()
    seen = []
    answer = fake.answer

    def watch(request: BaseHTTPRequestHandler, with_body: bool) -> None:
        seen.append(bars.are_progress_bars_disabled())
        answer(request, with_body)

    monkeypatch.setattr(fake, "answer", watch)
    fetch("org/kept")
    assert seen
    assert all(seen)
    assert not bars.are_progress_bars_disabled()


def test_a_hub_that_is_given_up_leaves_the_progress_bars_as_they_were(fake: FakeHub, fetch: Fetch, bars: Any) -> None:
    fake.silent_s = 1
    with pytest.raises(BrokenModelError, match="cannot be reached"):
        fetch("org/absent", total_s=0.1)
    assert not bars.are_progress_bars_disabled()  # though the thread still waits for an answer
    bars.disable_progress_bars()  # the user's own wish, from now on
    for thread in threading.enumerate():
        if thread.name == "kvfolio-hub":
            thread.join()
    assert bars.are_progress_bars_disabled()


def test_without_huggingface_hub_the_way_to_install_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(hub, "import_module", refuse)
    with pytest.raises(BrokenModelError, match=r"pip install 'kvfolio\[hub\]', or download its config\.json"):
        fetch_model("org/any")


def test_the_package_is_imported_for_a_hub_id_only() -> None:
    code = (
        "import sys; import kvfolio.spec.hub; from kvfolio import read_model; read_model('gpt2'); "
        "print('huggingface_hub' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == "False\n"
