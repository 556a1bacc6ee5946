"""What changes a model's fingerprint and what does not (TI-01).

Knows nothing of blocks: a fingerprint is compared with another, and that is all.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path

import pytest
import tiny_gguf
from safetensors.torch import load_file, save_file
from tiny import TinyModel

from kvfolio.engine import fingerprint
from kvfolio.engine.fingerprint import NOT_COMPUTED_WITH, model_fingerprint
from kvfolio.errors import BrokenModelError
from kvfolio.planner.memory import CacheOptions, plan_cache
from kvfolio.spec.layers import ChunkedAttention, FullAttention, SlidingWindow
from kvfolio.spec.model import Experts, Network, Rope, RunnableSpec
from kvfolio.spec.source import ModelSource, open_model

SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
NORM = "model.norm.weight"


def print_of(
    model: Path | ModelSource,
    dtype: str = "f32",
    ops_name: str = "reference",
    deterministic: bool = False,
    **cache: object,
) -> bytes:
    source = open_model(model) if isinstance(model, Path) else model
    layout = plan_cache(source.spec, dtype, CacheOptions(**{"kv_memory": 8 << 20, **cache}))
    return model_fingerprint(source, dtype, layout, ops_name, deterministic)


def edit(file: Path, change: Callable[[dict], None]) -> None:
    values = json.loads(file.read_text())
    change(values)
    file.write_text(json.dumps(values))


def add_to_one_weight(file: Path, amount: float = 1e-3) -> None:
    """Adds to the first number of the last norm; name, shape and the bytes of the file stay as many."""
    tensors, before = load_file(file), file.stat().st_size
    tensors[NORM][0] += amount
    save_file(tensors, file, metadata={"format": "pt"})
    assert file.stat().st_size == before


def split(folder: Path) -> None:
    """Puts the tensors of model.safetensors into two files with an index; the last norm is in the second."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    keys = sorted(tensors)
    weight_map = {key: SHARDS[number * 2 // len(keys)] for number, key in enumerate(keys)}
    assert weight_map[NORM] == SHARDS[1]
    for shard in SHARDS:
        held = {key: tensors[key] for key in keys if weight_map[key] == shard}
        save_file(held, folder / shard, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


@pytest.fixture
def llama(served_model: Callable[[str], TinyModel], tmp_path: Path) -> Path:
    """A folder that may be edited."""
    return Path(shutil.copytree(served_model("llama").folder, tmp_path / "llama"))


@pytest.fixture
def gguf_file(tiny_model: Callable[[str], TinyModel], tmp_path: Path) -> Path:
    return tiny_gguf.write(tiny_model("llama"), tmp_path / "tiny.gguf")


# ---- what stays equal -----------------------------------------------------------------------------------------------


def test_a_fingerprint_is_32_bytes_and_the_same_each_time(llama: Path) -> None:
    assert len(print_of(llama)) == 32
    assert print_of(llama) == print_of(llama)


def test_a_copy_in_another_folder_is_the_same_model(llama: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(llama, tmp_path / "elsewhere" / "another-name")
    assert print_of(Path(copy)) == print_of(llama)
    assert print_of(Path(copy) / "config.json") == print_of(llama)


def test_a_gguf_file_copied_to_another_name_is_the_same_model(gguf_file: Path, tmp_path: Path) -> None:
    copy = shutil.copy(gguf_file, tmp_path / "other.gguf")
    assert print_of(Path(copy)) == print_of(gguf_file)


def test_links_to_the_files_are_the_same_model(llama: Path, tmp_path: Path) -> None:
    linked = tmp_path / "snapshot"  # as the hub's cache has them
    linked.mkdir()
    for number, file in enumerate(llama.iterdir()):
        blob = shutil.copy(file, tmp_path / f"blob-{number}")
        (linked / file.name).symlink_to(blob)
    assert print_of(linked) == print_of(llama)


def test_another_process_computes_the_same(llama: Path) -> None:
    program = """
import sys
from pathlib import Path
from kvfolio.engine.fingerprint import model_fingerprint
from kvfolio.planner.memory import CacheOptions, plan_cache
from kvfolio.spec.source import open_model
source = open_model(Path(sys.argv[1]))
layout = plan_cache(source.spec, "f32", CacheOptions(8 << 20))
print(model_fingerprint(source, "f32", layout, "reference", False).hex())
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(llama)],
        env={**os.environ, "PYTHONHASHSEED": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == print_of(llama).hex()


def test_files_that_are_no_part_of_the_model_change_nothing(llama: Path) -> None:
    before = print_of(llama)
    (llama / "README.md").write_text("# a model")
    (llama / ".git").mkdir()
    (llama / ".git" / "HEAD").write_text("ref: refs/heads/main")
    (llama / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    for name in ("optimizer.pt", "pytorch_model.bin", "model-00001-of-00001.safetensors", "consolidated.safetensors"):
        (llama / name).write_bytes(bytes(64))
    (llama / "model.safetensors.index.json").write_text('{"weight_map": {}}')  # passed over beside the single file
    assert print_of(llama) == before


def test_memory_and_the_number_of_sequences_change_nothing(llama: Path) -> None:
    assert print_of(llama, kv_memory=16 << 20, max_running=3) == print_of(llama)
    assert print_of(llama, split=True) == print_of(llama)


def test_an_explicit_format_is_the_same_as_the_one_that_auto_finds(llama: Path) -> None:
    assert print_of(llama, kv_format="f32") == print_of(llama)


# ---- weights --------------------------------------------------------------------------------------------------------


def test_one_weight_of_a_folder_changes_it(llama: Path) -> None:
    before = print_of(llama)
    add_to_one_weight(llama / "model.safetensors")
    assert print_of(llama) != before


def test_one_byte_of_a_gguf_file_changes_it(gguf_file: Path) -> None:
    before, content = print_of(gguf_file), bytearray(gguf_file.read_bytes())
    content[-1] ^= 1
    gguf_file.write_bytes(content)
    assert print_of(gguf_file) != before


def test_one_weight_of_any_shard_changes_it(llama: Path) -> None:
    split(llama)
    before = print_of(llama)
    add_to_one_weight(llama / SHARDS[1])
    assert print_of(llama) != before


def test_shards_are_known_by_what_they_hold(llama: Path, tmp_path: Path) -> None:
    split(llama)
    copy = Path(shutil.copytree(llama, tmp_path / "copy"))
    edit(copy / "model.safetensors.index.json", lambda index: index.update(metadata={"total_size": 1}))
    shutil.copy(copy / SHARDS[0], copy / "model-00003-of-00003.safetensors")  # which the index does not name
    assert print_of(copy) == print_of(llama)


def test_pieces_of_a_large_file_count_where_they_stand(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "PIECE_BYTES", 4096)
    monkeypatch.setattr(fingerprint, "READ_BYTES", 1000)
    before, file = print_of(llama), llama / "model.safetensors"
    content = file.read_bytes()
    assert len(content) > 20 * 4096
    assert len(content) % 4096 != 0
    swapped = (content[: 8 * 4096], content[9 * 4096 : 10 * 4096], content[8 * 4096 : 9 * 4096], content[10 * 4096 :])
    file.write_bytes(b"".join(swapped))
    assert print_of(llama) != before
    file.write_bytes(content)
    assert print_of(llama) == before
    monkeypatch.setattr(fingerprint, "MAX_THREADS", 1)
    assert print_of(llama) == before


@pytest.mark.parametrize("place", [0, 4095, 4096, 8191, 8192, -1])
def test_every_byte_of_a_file_is_hashed(place: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fingerprint, "PIECE_BYTES", 4096)
    file, content = tmp_path / "file", bytearray(2 * 4096 + 100)
    file.write_bytes(content)
    before = fingerprint._file_digests([file])
    content[place] = 1
    file.write_bytes(content)
    assert fingerprint._file_digests([file]) != before


# ---- what is computed with them -------------------------------------------------------------------------------------


def test_every_dtype_is_another(llama: Path) -> None:
    assert len({print_of(llama, dtype) for dtype in ("f32", "bf16", "f16")}) == 3
    assert len({print_of(llama, dtype, kv_format="f16") for dtype in ("f32", "bf16", "f16")}) == 3


def test_every_storage_format_is_another(llama: Path) -> None:
    formats = ("f32", "f16", "bf16", "int8", "f32/int8", "int8/f32")
    assert len({print_of(llama, kv_format=name) for name in formats}) == len(formats)


def test_every_layer_with_a_format_of_its_own_is_another(llama: Path) -> None:
    exceptions = ("", "0=f16", "1=f16", "0-1=f16", "0=bf16", "0=f16,1=bf16")
    assert len({print_of(llama, kv_format="int8", kv_layers=text) for text in exceptions}) == len(exceptions)
    # What counts is how each layer is stored, not how it was asked for.
    assert print_of(llama, kv_format="int8", kv_layers="0-1=f32") == print_of(llama, kv_layers="2=int8")
    assert print_of(llama, kv_format="int8", kv_layers="0-2=exact") == print_of(llama, kv_layers="1=f32")


def test_every_number_of_sinks_is_another_where_there_are_any(llama: Path) -> None:
    assert len({print_of(llama, kv_format="int8", sink_blocks=count) for count in range(4)}) == 4
    assert len({print_of(llama, sink_blocks=count) for count in range(4)}) == 1


def test_every_block_size_is_another(llama: Path) -> None:
    assert len({print_of(llama, block_tokens=tokens) for tokens in (4, 8, 16, 32, 256)}) == 5


def test_kernels_and_determinism_are_part_of_it(llama: Path) -> None:
    names = ("reference", "native-plain", "native-avx2", "native-avx512")
    assert len({print_of(llama, ops_name=name, deterministic=flag) for name in names for flag in (False, True)}) == 8


def test_another_layout_version_changes_it(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = print_of(llama)
    monkeypatch.setattr(fingerprint, "LAYOUT_VERSION", fingerprint.LAYOUT_VERSION + 1)
    assert print_of(llama) != before


def test_another_torch_changes_it(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = print_of(llama)
    monkeypatch.setattr("torch.__version__", "2.99.0")
    assert print_of(llama) != before


# ---- the spec -------------------------------------------------------------------------------------------------------


def test_rope_scaling_in_the_config_changes_it(llama: Path) -> None:
    prints = [print_of(llama)]
    ropes: list[dict[str, object]] = [
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "default", "rope_theta": 10000.0000000001},
    ]
    for rope in ropes:
        edit(llama / "config.json", lambda config, rope=rope: config.update(rope_parameters=rope))
        prints.append(print_of(llama))
    assert len(set(prints)) == len(prints)


def test_a_config_that_says_the_same_in_other_words_changes_nothing(llama: Path) -> None:
    before = print_of(llama)
    edit(llama / "config.json", lambda config: config.update(_name_or_path="/home/me", transformers_version="5.99"))
    edit(llama / "config.json", lambda config: config.update(rope_theta=config.pop("rope_parameters")["rope_theta"]))
    assert print_of(llama) == before


EXPERTS = Experts(8, 2, 96, (0, 1))


def other(value: object) -> object:
    """A value of the same type, the nearest there is."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, float):
        return value * (1 + 2**-52)
    return value + 1 if isinstance(value, int) else f"{value}-other"


@pytest.mark.parametrize("name", [field.name for field in fields(Network)])
def test_every_number_of_the_network_counts(name: str, llama: Path) -> None:
    source = open_model(llama)
    network, rope = source.spec.network, Rope(10000.0, 16, "linear", 2.0)
    given = {"rope": rope, "rope_local": rope, "experts": EXPERTS}
    changed = replace(network, **{name: given[name] if name in given else other(getattr(network, name))})
    assert print_of(replace(source, spec=replace(source.spec, network=changed))) != print_of(source)


@pytest.mark.parametrize("name", [field.name for field in fields(Rope)])
def test_every_number_of_a_rope_counts(name: str, llama: Path) -> None:
    source = open_model(llama)
    rope = replace(source.spec.network.rope, attention_factor=1.25)
    changed = replace(rope, **{name: other(getattr(rope, name))})
    one, two = (
        replace(source, spec=replace(source.spec, network=replace(source.spec.network, rope=each)))
        for each in (rope, changed)
    )
    assert print_of(one) != print_of(two)


@pytest.mark.parametrize("name", [field.name for field in fields(Experts)])
def test_every_number_of_the_experts_counts(name: str, llama: Path) -> None:
    source = open_model(llama)
    changed = replace(EXPERTS, **{name: (0, 2) if name == "layers" else other(getattr(EXPERTS, name))})
    one, two = (
        replace(source, spec=replace(source.spec, network=replace(source.spec.network, experts=each)))
        for each in (EXPERTS, changed)
    )
    assert print_of(one) != print_of(two)


def test_what_the_network_does_not_compute_with_does_not_count(llama: Path) -> None:
    source = open_model(llama)
    spec = replace(source.spec, name="x", dtype="f16", assumptions=("y",), eos_token_ids=(99,), weights=None)
    assert print_of(replace(source, spec=spec)) == print_of(source)
    assert {field.name for field in fields(RunnableSpec)} >= NOT_COMPUTED_WITH


def test_every_kind_and_order_of_layers_is_another(llama: Path) -> None:
    source = open_model(llama)
    full, window, chunked = FullAttention(2, 16, 16), SlidingWindow(2, 16, 16, 32), ChunkedAttention(2, 16, 16, 32)
    models = [(full, full, window), (full, window, full), (full, full, full), (full, window, window)]
    models += [(full, full, chunked), (full, full, replace(window, window=33)), (full, full)]
    assert len({print_of(replace(source, spec=replace(source.spec, layers=layers))) for layers in models}) == 7


# ---- the tokenizer --------------------------------------------------------------------------------------------------


def test_an_edited_tokenizer_changes_it(llama: Path) -> None:
    prints = [print_of(llama)]
    edit(llama / "tokenizer.json", lambda values: values.update(normalizer={"type": "Lowercase"}))
    prints.append(print_of(llama))
    edit(llama / "tokenizer_config.json", lambda values: values.update(add_bos_token=False))
    prints.append(print_of(llama))
    edit(llama / "config.json", lambda values: values.update(tokenizer_class="LlamaTokenizer"))
    prints.append(print_of(llama))
    assert len(set(prints)) == len(prints)


@pytest.mark.parametrize(
    "name",
    ["tokenizer.model", "spiece.model", "vocab.json", "merges.txt", "added_tokens.json", "special_tokens_map.json"],
)
def test_a_file_that_tokenizers_read_changes_it_when_it_comes_and_when_it_differs(name: str, llama: Path) -> None:
    prints = [print_of(llama)]
    for content in ("", "{}", "{ }"):
        (llama / name).write_text(content)
        prints.append(print_of(llama))
    assert len(set(prints)) == len(prints)


# ---- files that cannot be read --------------------------------------------------------------------------------------


def test_a_gguf_file_that_vanished_is_named(gguf_file: Path) -> None:
    source = open_model(gguf_file)
    gguf_file.unlink()
    with pytest.raises(BrokenModelError, match=r"tiny\.gguf cannot be read: No such file"):
        print_of(source)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json"])
def test_a_link_to_a_file_that_is_gone_is_named(name: str, llama: Path) -> None:
    (llama / name).unlink()
    (llama / name).symlink_to("nowhere")
    with pytest.raises(BrokenModelError, match=name.replace(".", r"\.")):
        print_of(llama)


def test_a_shard_that_vanished_is_named(llama: Path) -> None:
    split(llama)
    (llama / SHARDS[1]).unlink()
    with pytest.raises(BrokenModelError, match=f"'{SHARDS[1]}', is not in the folder"):
        print_of(llama)


def test_a_file_that_cannot_be_read_is_named(llama: Path) -> None:
    source = open_model(llama)
    (llama / "vocab.json").symlink_to(llama)  # a folder opens as no file, whoever asks
    with pytest.raises(BrokenModelError, match=r"vocab\.json cannot be read: Is a directory"):
        print_of(source)


def test_a_folder_that_vanished_is_named(llama: Path) -> None:
    source = open_model(llama)
    shutil.rmtree(llama)
    with pytest.raises(BrokenModelError, match="llama"):
        print_of(source)


def test_a_file_that_is_cut_while_it_is_read_is_named(tmp_path: Path) -> None:
    file = tmp_path / "cut.safetensors"
    file.write_bytes(bytes(100))
    with pytest.raises(BrokenModelError, match=r"cut\.safetensors became shorter while it was read"):
        fingerprint._piece_digest(file, 50, 51)
