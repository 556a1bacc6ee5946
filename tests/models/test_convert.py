"""What converting heads promises of numbers and files, and what it refuses.

Knows nothing of logits (``tests/parity/test_converted.py``).
"""

import json
import os
import resource
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_gguf
import torch
import transformers
from safetensors.torch import load_file, save_file
from tiny import TinyModel

from kvfolio.errors import BrokenModelError, KvfolioError, OptionError, UnknownModelError
from kvfolio.models import rewrite
from kvfolio.models.convert import config_with, convert, regroup
from kvfolio.spec.source import open_model

FindModel = Callable[[str], TinyModel]
K_PROJ = "model.layers.1.self_attn.k_proj"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama of 8 query heads and 4 key/value heads with biases, in bf16, beside what folders hold otherwise."""
    folder = tmp_path_factory.mktemp("wide")
    sizes = tiny.SIZES | {"num_attention_heads": 8, "num_key_value_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, attention_bias=True))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            tiny._fill(key, parameter, "llama", generator)
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    (folder / "LICENSE").write_text("as it is")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "rag.jinja").write_text("{{ rag }}")
    (folder / "pytorch_model.bin").write_bytes(b"weights of another format")
    (folder / "original").mkdir()
    (folder / "original" / "params.json").write_text("{}")
    return folder


@pytest.fixture
def sharded(wide: Path, tmp_path: Path) -> Path:
    """The same in shards with an index, as transformers writes them."""
    model = transformers.AutoModelForCausalLM.from_pretrained(wide)
    model.save_pretrained(tmp_path / "sharded", max_shard_size="60KB")
    return tmp_path / "sharded"


def refusal(action: Callable[[], object], kind: type[KvfolioError]) -> str:
    with pytest.raises(kind) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    return message


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {key: value for file in folder.glob("*.safetensors") for key, value in load_file(file).items()}


def changed(folder: Path, out: Path, **fields: Any) -> Path:
    """A copy of ``folder`` with fields of its config set."""
    shutil.copytree(folder, out)
    config = json.loads((folder / "config.json").read_text()) | fields
    (out / "config.json").write_text(json.dumps(config))
    return out


# ---- numbers --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_new", [1, 2])
def test_a_joined_head_is_the_mean_of_those_side_by_side_and_nothing_else_changes(
    num_new: int, wide: Path, tmp_path: Path
) -> None:
    convert(wide, tmp_path / "out", num_new)
    before, after = tensors_of(wide), tensors_of(tmp_path / "out")
    assert list(before) == list(after)
    width, size = 8, 4 // num_new  # of a head, of a group
    for name, tensor in before.items():
        if ".k_proj." not in name and ".v_proj." not in name:
            assert torch.equal(after[name], tensor)
            continue
        assert after[name].dtype == torch.bfloat16
        assert after[name].shape == (num_new * width, *tensor.shape[1:])
        for head in range(num_new):
            for row in range(width):
                joined = [tensor[(head * size + other) * width + row].double() for other in range(size)]
                mean = sum(joined[1:], joined[0]) / size
                assert torch.equal(after[name][head * width + row], mean.to(torch.bfloat16))


def test_a_copied_head_lies_beside_its_original(wide: Path, tmp_path: Path) -> None:
    convert(wide, tmp_path / "out", 8)
    old, new = tensors_of(wide)[f"{K_PROJ}.bias"], tensors_of(tmp_path / "out")[f"{K_PROJ}.bias"]
    assert torch.equal(new.view(8, 8), old.view(4, 8)[[0, 0, 1, 1, 2, 2, 3, 3]])


def test_every_query_head_reads_a_mean_of_which_its_own_head_is_part() -> None:
    num_q, num_old, num_new = 12, 6, 2
    marks = torch.eye(num_old)  # [num_old heads of width 1, num_old]
    shares = regroup(marks, num_old, num_new)  # which old heads are in which new one
    for head in range(num_q):
        assert shares[head // (num_q // num_new), head // (num_q // num_old)] == pytest.approx(1 / 3)
        copied = regroup(marks, num_old, num_q)[head]
        assert copied[head // (num_q // num_old)] == 1


def test_a_mean_of_f16_is_taken_in_f32() -> None:
    rows = torch.full((4, 2), 60000.0, dtype=torch.float16)  # the sum of two is beyond f16
    assert torch.equal(regroup(rows, 4, 2), rows[:2])


def test_as_many_heads_as_before_are_the_same_files(wide: Path, sharded: Path, tmp_path: Path) -> None:
    for number, folder in enumerate((wide, sharded)):
        result = convert(folder, tmp_path / f"out{number}", 4)
        assert (result.before, result.needs_training) == (result.after, False)
        kept = {name: text for name, text in files_of(folder).items() if not name.startswith(("pytorch", "original"))}
        assert files_of(tmp_path / f"out{number}") == kept


def test_what_was_written_is_counted(wide: Path, tmp_path: Path) -> None:
    result = convert(wide, tmp_path / "out", 1)
    assert (result.num_q_heads, result.dtype, result.needs_training) == (8, "bf16", True)
    assert (result.before.num_kv_heads, result.after.num_kv_heads) == (4, 1)
    assert result.before.cache_bytes_per_token == 3 * 2 * 4 * 8 * 2  # layers, k and v, heads, width, bf16
    assert result.after.cache_bytes_per_token == 3 * 2 * 1 * 8 * 2
    for heads, folder in ((result.before, wide), (result.after, tmp_path / "out")):
        assert heads.weights_bytes == sum(tensor.nbytes for tensor in tensors_of(folder).values())


# ---- files ----------------------------------------------------------------------------------------------------------


def test_shards_stay_and_their_index_tells_the_new_totals(sharded: Path, tmp_path: Path) -> None:
    result = convert(sharded, tmp_path / "out", 1)
    assert files_of(sharded).keys() == files_of(tmp_path / "out").keys()
    before, after = (
        json.loads((folder / "model.safetensors.index.json").read_text()) for folder in (sharded, tmp_path / "out")
    )
    assert len(set(before["weight_map"].values())) > 3
    assert after["weight_map"] == before["weight_map"]
    tensors = tensors_of(tmp_path / "out").values()
    assert after["metadata"]["total_size"] == result.after.weights_bytes == sum(tensor.nbytes for tensor in tensors)
    assert after["metadata"]["total_parameters"] == sum(tensor.numel() for tensor in tensors)


def test_tokenizer_licence_and_templates_go_along_and_other_weights_do_not(wide: Path, tmp_path: Path) -> None:
    convert(wide, tmp_path / "out", 2)
    assert files_of(tmp_path / "out").keys() == {
        *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "LICENSE"),
        "additional_chat_templates/rag.jinja",
    }


def test_files_may_be_links_as_in_the_cache_of_the_hub(wide: Path, tmp_path: Path) -> None:
    (tmp_path / "snapshot").mkdir()
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        (tmp_path / "snapshot" / name).symlink_to(wide / name)
    convert(tmp_path / "snapshot", tmp_path / "out", 2)
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


def test_tensors_longer_than_a_chunk_are_copied_whole(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rewrite, "CHUNK_BYTES", 1000)
    convert(wide, tmp_path / "small", 1)
    monkeypatch.undo()
    convert(wide, tmp_path / "large", 1)
    assert files_of(tmp_path / "small") == files_of(tmp_path / "large")


def test_progress_rises_to_the_bytes_that_were_written(wide: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []
    convert(wide, tmp_path / "out", 1, lambda done, total: calls.append((done, total)))
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert {total for _, total in calls} == {done[-1]} == {sum(map(len, files_of(tmp_path / "out").values()))}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('{"a": 1.50, "num_key_value_heads":  8}', '{"a": 1.50, "num_key_value_heads":  2}'),
        ('{"num_key_value_heads": null,\n\t"x": 8}', '{"num_key_value_heads": 2,\n\t"x": 8}'),
        (
            '{"x": {"num_key_value_heads": 8}, "num_key_value_heads": 8}',
            '{"x": {"num_key_value_heads": 8}, "num_key_value_heads": 2}',
        ),
        (
            '{\n  "num_attention_heads": 8,\n  "é": 1\n}',
            '{\n  "num_attention_heads": 8,\n  "num_key_value_heads": 2,\n  "é": 1\n}',
        ),
        ('{"num_key_value_heads": [8, 8]}', '{\n  "num_key_value_heads": 2\n}\n'),
        ('{"hidden_size": 8}', '{\n  "hidden_size": 8,\n  "num_key_value_heads": 2\n}\n'),
    ],
)
def test_of_a_config_only_the_number_changes(text: str, expected: str) -> None:
    found = config_with(text.encode(), 2).decode()
    assert found == expected
    assert json.loads(found) == json.loads(text) | {"num_key_value_heads": 2}


def test_a_config_without_the_field_is_one_head_each_and_gets_the_field(wide: Path, tmp_path: Path) -> None:
    convert(wide, tmp_path / "mha", 8)
    config = json.loads((tmp_path / "mha" / "config.json").read_text())
    del config["num_key_value_heads"]
    (tmp_path / "mha" / "config.json").write_text(json.dumps(config | {"head_dim": None, "unknown": [1]}))
    assert convert(tmp_path / "mha", tmp_path / "out", 2).before.num_kv_heads == 8
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written == config | {"head_dim": None, "unknown": [1], "num_key_value_heads": 2}
    assert open_model(tmp_path / "out").spec.layers[0].k_width == 8


# ---- whole or not at all --------------------------------------------------------------------------------------------


def test_an_interrupt_in_the_middle_leaves_nothing(wide: Path, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        assert not (tmp_path / "out").exists()
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(wide, tmp_path / "out", 2, interrupt)
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_conversion_left_is_named_and_not_touched(wide: Path, tmp_path: Path) -> None:
    def die(done: int, total: int) -> None:
        if done > total / 2:
            os._exit(9)

    child = os.fork()
    if child == 0:
        convert(wide, tmp_path / "out", 2, die)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    assert [path.name for path in tmp_path.iterdir()] == [".out.partial"]
    said = refusal(lambda: convert(wide, tmp_path / "out", 2), OptionError)
    assert ".out.partial is there: another conversion is writing out, or one was killed" in said
    shutil.rmtree(tmp_path / ".out.partial")
    convert(wide, tmp_path / "out", 2)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.fixture
def largest_file() -> Iterator[Callable[[int], None]]:
    """Sets the largest file that the system lets us write."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    yield lambda num_bytes: resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_write_that_the_system_refuses_leaves_nothing(
    wide: Path, tmp_path: Path, largest_file: Callable[[int], None]
) -> None:
    largest_file(50_000)
    said = refusal(lambda: convert(wide, tmp_path / "out", 2), OptionError)
    assert said.startswith(f"{tmp_path / 'out'} cannot be written: File too large")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_too_small_is_refused_with_numbers_before_anything_is_written(
    wide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    convert(wide, tmp_path / "first", 2)
    needed = sum(map(len, files_of(tmp_path / "first").values()))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    said = refusal(lambda: convert(wide, tmp_path / "out", 2), OptionError)
    assert f"({needed:,} bytes)" in said and f"({needed - 1:,} bytes) are free" in said
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed))
    convert(wide, tmp_path / "out", 2)


def test_a_file_that_shrinks_meanwhile_is_named(wide: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(wide, tmp_path / "in"))

    def shrink(done: int, total: int) -> None:
        os.truncate(folder / "model.safetensors", 20_000)

    said = refusal(lambda: convert(folder, tmp_path / "out", 2, shrink), BrokenModelError)
    assert "model.safetensors cannot be read: it ends too early" in said
    assert [path.name for path in tmp_path.iterdir()] == ["in"]


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [-1, 0, 3, 6, 16])
def test_a_number_that_does_not_fit_is_refused_with_those_that_do(number: int, wide: Path, tmp_path: Path) -> None:
    said = refusal(lambda: convert(wide, tmp_path / "out", number), OptionError)
    assert f"--kv-heads is {number}; " in said
    assert said.endswith("8 query heads and 4 key/value heads, so accepted: 1, 2, 4 (means, or as it is); 8 (copies)")


def test_a_place_that_is_taken_is_refused_and_an_empty_folder_is_not(wide: Path, tmp_path: Path) -> None:
    for name in ("file", "folder/file"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    for name in ("file", "folder"):
        assert "is there already" in refusal(lambda name=name: convert(wide, tmp_path / name, 2), OptionError)
    assert "is there already" in refusal(lambda: convert(wide, wide, 2), OptionError)
    said = refusal(lambda: convert(wide, tmp_path / "missing" / "out", 2), OptionError)
    assert "cannot be written: No such file or directory" in said
    (tmp_path / "empty").mkdir()
    convert(wide, tmp_path / "empty", 2)
    assert (tmp_path / "empty" / "model.safetensors").is_file()


def test_a_gguf_file_is_refused(tiny_model: FindModel, tmp_path: Path) -> None:
    tiny_gguf.write(tiny_model("llama"), tmp_path / "a.gguf", tiny_gguf.GGMLQuantizationType.F32)
    said = refusal(lambda: convert(tmp_path / "a.gguf", tmp_path / "out", 1), UnknownModelError)
    assert "is a GGUF file" in said and "give the Hugging Face folder" in said


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gpt2", "model_type gpt2, whose format has a key/value head for each query head"),
        ("falcon-40b", "model_type falcon, whose format has queries, keys and values in one matrix"),
        ("deepseek-v3", "model_type deepseek_v3, whose heads share one latent"),
    ],
)
def test_a_format_that_cannot_say_it_is_refused(name: str, why: str, tiny_model: FindModel, tmp_path: Path) -> None:
    said = refusal(lambda: convert(tiny_model(name).folder, tmp_path / "out", 1), UnknownModelError)
    assert why in said and "accepted: model_type llama" in said


def test_a_file_in_place_of_a_folder_is_refused(wide: Path, tmp_path: Path) -> None:
    said = refusal(lambda: convert(wide / "config.json", tmp_path / "out", 2), OptionError)
    assert "give the folder" in said


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_key_value_heads": [4, 2, 4]}, "has layers of 2, 4 key/value heads"),
        ({"num_key_value_heads_per_layer": [4, 4, 4]}, "another field than num_key_value_heads decides"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config"),
        ({"model_type": "deepseek_v3"}, "deepseek_v3"),
        ({"vision_config": {}}, "reads more than text"),
    ],
)
def test_a_model_that_cannot_be_expressed_is_refused_by_name(
    fields: dict[str, Any], said: str, wide: Path, tmp_path: Path
) -> None:
    folder = changed(wide, tmp_path / "in", **fields)
    assert said in refusal(lambda: convert(folder, tmp_path / "out", 2), UnknownModelError)
    assert not (tmp_path / "out").exists()


def test_an_adapter_is_refused(wide: Path, tmp_path: Path) -> None:
    folder = changed(wide, tmp_path / "in")
    (folder / "adapter_config.json").write_text("{}")
    assert "merge it" in refusal(lambda: convert(folder, tmp_path / "out", 2), UnknownModelError)


def test_weights_that_do_not_fit_their_config_are_refused_before_anything_is_written(
    wide: Path, tmp_path: Path
) -> None:
    folder = changed(wide, tmp_path / "in", num_key_value_heads=2)
    said = refusal(lambda: convert(folder, tmp_path / "out", 1), BrokenModelError)
    assert "k_proj.weight' has shape [32, 64], and the configuration needs [16, 64]" in said
    tensors = tensors_of(wide)
    save_file(tensors | {f"{K_PROJ}.weight": tensors[f"{K_PROJ}.weight"].to(torch.int8)}, folder / "model.safetensors")
    folder = changed(folder, tmp_path / "packed", num_key_value_heads=4)
    said = refusal(lambda: convert(folder, tmp_path / "out", 1), UnknownModelError)
    assert "is stored as I8" in said and "use an unquantised copy" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in", "packed"]
