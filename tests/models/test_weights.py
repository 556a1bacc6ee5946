"""What reading weights promises, and what it says of files that are missing, cut or of another model."""

import json
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import tiny_gguf
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import load_file, save_file
from tiny import TinyModel

from kvfolio.errors import BrokenModelError, KvfolioError, UnknownModelError
from kvfolio.models import falcon, weights_gguf
from kvfolio.models.build import LanguageModel, build_model
from kvfolio.models.weights import Progress, Weights, open_weights
from kvfolio.spec.gguf.header import read_header
from kvfolio.spec.source import ModelSource, open_model

TinyModels = Callable[[str], TinyModel]
CPU = torch.device("cpu")
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
DOWN = "model.layers.1.mlp.down_proj.weight"


def opened(source: ModelSource, dtype: torch.dtype = torch.float32, on_progress: Progress | None = None) -> Weights:
    return open_weights(source, dtype, CPU, on_progress)


def built(source: ModelSource) -> LanguageModel:
    return build_model(source.spec, opened(source))


def refusal(action: Callable[[], object], kind: type[KvfolioError] = BrokenModelError) -> str:
    with pytest.raises(kind) as caught:
        action()
    message = str(caught.value)
    assert "\n" not in message
    return message


def rewritten(model: TinyModel, folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> ModelSource:
    """A folder with ``model``'s config and its tensors after ``change``."""
    tensors = load_file(model.folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_bytes((model.folder / "config.json").read_bytes())
    return open_model(folder)


def sharded(model: TinyModel, folder: Path) -> ModelSource:
    """The same tensors in two files with an index."""
    tensors = load_file(model.folder / "model.safetensors")
    keys = sorted(tensors)
    weight_map = {key: SHARDS[number * 2 // len(keys)] for number, key in enumerate(keys)}
    for shard in SHARDS:
        save_file({key: tensors[key] for key in keys if weight_map[key] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_bytes((model.folder / "config.json").read_bytes())
    return open_model(folder)


def as_gguf(model: TinyModel, file: Path, kind: str = "F32") -> ModelSource:
    tiny_gguf.write(model, file, GGMLQuantizationType[kind])
    return replace(open_model(model.folder), path=file, kind="gguf", header=read_header(file))


# ---- what is delivered ----------------------------------------------------------------------------------------------


def test_stacked_projections_lie_below_each_other(tiny_model: TinyModels) -> None:
    source, names = open_model(tiny_model("llama").folder), [f"model.layers.0.self_attn.{part}_proj" for part in "qkv"]
    stored = load_file(tiny_model("llama").folder / "model.safetensors")
    qkv = opened(source).linear(names, [64, 32, 32], 64, bias=False)
    assert torch.equal(qkv.weight, torch.cat([stored[f"{name}.weight"] for name in names]))
    assert qkv.bias is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_weights_come_in_the_compute_dtype_and_norm_scales_in_f32(dtype: torch.dtype, tiny_model: TinyModels) -> None:
    weights = opened(open_model(tiny_model("llama").folder), dtype)
    stored = load_file(tiny_model("llama").folder / "model.safetensors")
    assert torch.equal(weights.get(DOWN, (64, 96)), stored[DOWN].to(dtype))
    assert torch.equal(weights.norm_scale("model.norm.weight", 64), stored["model.norm.weight"])
    assert weights.delivered_bytes == 64 * 96 * 2 + 64 * 4


def test_a_norm_of_gemma_multiplies_directly_whichever_file_it_comes_from(
    tiny_model: TinyModels, tmp_path: Path
) -> None:
    model = tiny_model("gemma3")
    stored = load_file(model.folder / "model.safetensors")["model.norm.weight"]
    for source in (open_model(model.folder), as_gguf(model, tmp_path / "tiny.gguf")):
        assert torch.equal(opened(source).norm_scale("model.norm.weight", 64), 1 + stored)


def test_matrices_of_gpt2_are_turned_to_out_by_in(tiny_model: TinyModels, tmp_path: Path) -> None:
    model, name = tiny_model("gpt2"), "h.0.mlp.c_fc.weight"
    stored = load_file(model.folder / "model.safetensors")[f"transformer.{name}"]
    assert stored.shape == (64, 256)
    for source in (open_model(model.folder), as_gguf(model, tmp_path / "tiny.gguf")):
        assert torch.equal(opened(source).get(name, (256, 64)), stored.T)


def test_a_chunk_of_dequantised_numbers_may_have_any_size(
    tiny_model: TinyModels, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = as_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", "Q8_0")
    whole = opened(source).get(DOWN, (64, 96))
    monkeypatch.setattr(weights_gguf, "CHUNK_NUMBERS", 256)  # the last of 6,144 / 256 chunks is whole, then one is not
    assert torch.equal(opened(source).get(DOWN, (64, 96)), whole)
    monkeypatch.setattr(weights_gguf, "CHUNK_NUMBERS", 4096)
    assert torch.equal(opened(source).get(DOWN, (64, 96)), whole)


def test_rows_that_llama_cpp_interleaved_come_back_in_place() -> None:
    rows = torch.arange(2 * 8 * 3).view(16, 3)  # two heads of eight
    interleaved = torch.from_numpy(tiny_gguf.interleaved(rows.numpy(), 2))
    assert interleaved[:4].tolist() == rows[[0, 4, 1, 5]].tolist()
    assert torch.equal(weights_gguf.halves_paired(interleaved, 2), rows)


def test_progress_rises_to_the_bytes_of_all_tensors(tiny_model: TinyModels) -> None:
    source = open_model(tiny_model("llama").folder)
    calls: list[tuple[int, int]] = []
    build_model(source.spec, opened(source, on_progress=lambda done, total: calls.append((done, total))))
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert calls[-1] == (4 * source.spec.num_params, 4 * source.spec.num_params)
    assert {total for _, total in calls} == {4 * source.spec.num_params}


def test_shards_give_what_one_file_gives(tiny_model: TinyModels, tmp_path: Path) -> None:
    whole, parts = opened(open_model(tiny_model("llama").folder)), opened(sharded(tiny_model("llama"), tmp_path))
    assert torch.equal(parts.get(DOWN, (64, 96)), whole.get(DOWN, (64, 96)))
    assert built(open_model(tmp_path)).weight_bytes == built(open_model(tiny_model("llama").folder)).weight_bytes


def test_gpt2_is_read_with_and_without_its_prefix_and_its_mask_buffers(tiny_model: TinyModels, tmp_path: Path) -> None:
    def publish_as_openai_did(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            tensors[key.removeprefix("transformer.")] = tensors.pop(key)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 128, 128)

    assert built(rewritten(tiny_model("gpt2"), tmp_path, publish_as_openai_did)).weight_bytes > 0


@pytest.mark.parametrize("name", ["falcon-7b", "falcon-40b"])
def test_falcon_is_read_with_and_without_its_prefix_and_with_its_second_copy_of_the_embeddings(
    name: str, tiny_model: TinyModels, tmp_path: Path
) -> None:
    def without_prefix(tensors: dict[str, torch.Tensor]) -> None:
        for key in list(tensors):
            tensors[key.removeprefix("transformer.")] = tensors.pop(key)
        tensors["lm_head.weight"] = tensors["word_embeddings.weight"].clone()

    source = rewritten(tiny_model(name), tmp_path, without_prefix)
    assert built(source).weight_bytes == 4 * source.spec.num_params


def test_rows_of_falcon_are_brought_from_key_heads_with_their_queries_to_all_queries_first() -> None:
    rows = torch.tensor([[head, row] for head in range(8) for row in range(2)])  # two heads of q q k v, two rows each
    apart = falcon.parts_apart(rows, num_q_heads=4, num_kv_heads=2)
    assert apart[::2, 0].tolist() == [0, 1, 4, 5, 2, 6, 3, 7]
    assert apart[1::2].tolist() == [[head, 1] for head in apart[::2, 0]]
    assert torch.equal(falcon.parts_apart(rows, num_q_heads=6, num_kv_heads=1), rows)


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe"])
def test_experts_are_read_from_a_tensor_for_each_and_from_one_for_all(
    name: str, tiny_model: TinyModels, tmp_path: Path
) -> None:
    model = tiny_model(name)
    model.model.save_pretrained(tmp_path, save_original_format=False)
    stored, prefix = load_file(tmp_path / "model.safetensors"), "model.layers.1.mlp.experts"
    assert f"{prefix}.gate_up_proj" in stored  # where published folders have a tensor for each expert
    assert f"{prefix}.gate_up_proj" not in load_file(model.folder / "model.safetensors")
    for one, other in zip(experts_of(open_model(model.folder)), experts_of(open_model(tmp_path)), strict=True):
        assert torch.equal(one, other)


def experts_of(source: ModelSource) -> list[torch.Tensor]:
    """The matrices of every routed expert of the second layer."""
    part = built(source).layers[1].mlp
    return [matrix for expert in part.routed for matrix in (expert.gate_up.weight, expert.down.weight)]


def test_a_missing_expert_is_named(tiny_model: TinyModels, tmp_path: Path) -> None:
    def forget(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.block_sparse_moe.experts.5.w2.weight"]

    source = rewritten(tiny_model("mixtral"), tmp_path, forget)
    assert "'model.layers.1.mlp.experts.5.down_proj.weight' is missing" in refusal(lambda: built(source))


def test_one_tensor_for_fewer_experts_than_the_config_has_is_refused(tiny_model: TinyModels, tmp_path: Path) -> None:
    model, name = tiny_model("qwen3-moe"), "model.layers.1.mlp.experts.down_proj"
    model.model.save_pretrained(tmp_path, save_original_format=False)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[name] = tensors[name][:-1].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    message = refusal(lambda: built(open_model(tmp_path)))
    assert "'model.layers.1.mlp.experts.7.down_proj.weight' is missing" in message


def test_a_stored_copy_of_tied_embeddings_is_left_in_the_file(tiny_model: TinyModels, tmp_path: Path) -> None:
    def add_copy(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    tied = built(rewritten(tiny_model("llama-tied"), tmp_path, add_copy))
    assert tied.weight_bytes == built(open_model(tiny_model("llama-tied").folder)).weight_bytes


def test_a_stored_head_that_differs_from_the_embeddings_it_is_tied_to_is_refused(
    tiny_model: TinyModels, tmp_path: Path
) -> None:
    def add_other(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2

    message = refusal(lambda: built(rewritten(tiny_model("llama-tied"), tmp_path, add_other)))
    assert "an lm_head.weight that differs" in message and "tie_word_embeddings" in message


@pytest.mark.parametrize(
    ("name", "stored", "second"),
    [
        (
            "mixtral",
            "model.layers.1.block_sparse_moe.experts.2.w1.weight",
            "model.layers.1.mlp.experts.2.gate_proj.weight",
        ),
        (
            "qwen2-moe",
            "model.layers.1.mlp.shared_expert.up_proj.weight",
            "model.layers.1.mlp.shared_experts.up_proj.weight",
        ),
        ("falcon-7b", "transformer.h.1.mlp.dense_4h_to_h.weight", "h.1.mlp.dense_4h_to_h.weight"),
    ],
)
def test_two_tensors_for_one_place_are_refused_by_both_names(
    name: str, stored: str, second: str, tiny_model: TinyModels, tmp_path: Path
) -> None:
    def add_second(tensors: dict[str, torch.Tensor]) -> None:
        tensors[second] = tensors[stored] + 1

    message = refusal(lambda: built(rewritten(tiny_model(name), tmp_path, add_second)))
    assert repr(stored) in message and repr(second) in message


def test_a_layer_behind_the_last_may_stay_only_if_it_guesses_tokens(tiny_model: TinyModels, tmp_path: Path) -> None:
    def add_layer(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.3.input_layernorm.weight"] = torch.ones(64)

    def add_guessing(tensors: dict[str, torch.Tensor]) -> None:
        add_layer(tensors)
        tensors["model.layers.3.eh_proj.weight"] = torch.ones(64, 128)

    message = refusal(lambda: built(rewritten(tiny_model("deepseek-v3"), tmp_path, add_layer)))
    assert "'model.layers.3.input_layernorm.weight'" in message
    assert built(rewritten(tiny_model("deepseek-v3"), tmp_path, add_guessing)).weight_bytes > 0


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0, 4, 8, 200, 5000, -1])
def test_a_cut_safetensors_file_is_refused_with_both_sizes(kept: int, tiny_model: TinyModels, tmp_path: Path) -> None:
    source = rewritten(tiny_model("llama"), tmp_path, lambda tensors: None)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    file.write_bytes(whole[:kept])
    message = refusal(lambda: opened(source))
    assert str(file) in message
    assert f"{len(whole[:kept]):,}" in message
    assert "fetch it again" in message
    if kept in (5000, -1):  # the header is whole
        assert f"{len(whole):,} bytes" in message


def test_a_file_longer_than_its_header_says_is_refused(tiny_model: TinyModels, tmp_path: Path) -> None:
    source = rewritten(tiny_model("llama"), tmp_path, lambda tensors: None)
    with (tmp_path / "model.safetensors").open("ab") as file:
        file.write(b"0123")
    assert "its header says" in refusal(lambda: opened(source))


@pytest.mark.parametrize("text", [b"{nothing", b"[]", b'{"a": 3}', b'{"a": {"dtype": "F32"}}', b"\xff\xfe"])
def test_a_header_that_is_no_safetensors_header_is_refused(text: bytes, tiny_model: TinyModels, tmp_path: Path) -> None:
    source = rewritten(tiny_model("llama"), tmp_path, lambda tensors: None)
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    assert "not that of a safetensors file" in refusal(lambda: opened(source))


def test_a_missing_tensor_is_named(tiny_model: TinyModels, tmp_path: Path) -> None:
    source = rewritten(tiny_model("llama"), tmp_path, lambda tensors: tensors.pop(DOWN))
    message = refusal(lambda: built(source))
    assert repr(DOWN) in message
    assert "missing" in message


def test_a_tensor_of_another_shape_is_named_with_both_shapes(tiny_model: TinyModels, tmp_path: Path) -> None:
    def widen(tensors: dict[str, torch.Tensor]) -> None:
        tensors[DOWN] = torch.zeros(64, 97)

    message = refusal(lambda: built(rewritten(tiny_model("llama"), tmp_path, widen)))
    assert repr(DOWN) in message
    assert "[64, 97]" in message
    assert "[64, 96]" in message


def test_a_tensor_that_the_network_does_not_use_is_refused_not_ignored(tiny_model: TinyModels) -> None:
    source = open_model(tiny_model("qwen2").folder)
    without_biases = replace(source.spec, network=replace(source.spec.network, qkv_bias=False))
    message = refusal(lambda: built(replace(source, spec=without_biases)))
    assert "9 of 38 tensors" in message
    assert "_proj.bias" in message


@pytest.mark.parametrize("scale", [0.04, 0.0, -1.0, float("nan"), float("inf")])
def test_scales_for_another_engines_cache_are_refused_by_name(
    scale: float, tiny_model: TinyModels, tmp_path: Path
) -> None:  # QC-04: ours are computed from what is stored, so none can be lost; and none is ignored
    def calibrate(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.self_attn.k_scale"] = torch.tensor(scale)

    message = refusal(lambda: built(rewritten(tiny_model("llama"), tmp_path, calibrate)))
    assert "model.layers.1.self_attn.k_scale" in message


def test_a_tensor_in_an_unknown_number_format_is_refused_by_name(tiny_model: TinyModels, tmp_path: Path) -> None:
    def quantise(tensors: dict[str, torch.Tensor]) -> None:
        tensors[DOWN] = tensors[DOWN].to(torch.float8_e4m3fn)

    message = refusal(lambda: built(rewritten(tiny_model("llama"), tmp_path, quantise)), UnknownModelError)
    assert repr(DOWN) in message
    assert "F8_E4M3" in message


def test_a_shard_that_is_not_there_is_named(tiny_model: TinyModels, tmp_path: Path) -> None:
    source = sharded(tiny_model("llama"), tmp_path)
    (tmp_path / SHARDS[1]).unlink()
    message = refusal(lambda: opened(source))
    assert "names 2 files" in message
    assert repr(SHARDS[1]) in message


def test_an_index_that_points_out_of_the_folder_is_refused(tiny_model: TinyModels, tmp_path: Path) -> None:
    source = rewritten(tiny_model("llama"), tmp_path, lambda tensors: None)
    (tmp_path / "model.safetensors").rename(tmp_path.parent / "elsewhere.safetensors")
    index = {"weight_map": {DOWN: "../elsewhere.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "../elsewhere.safetensors" in refusal(lambda: opened(source))


def test_a_tensor_that_its_shard_does_not_hold_is_named(tiny_model: TinyModels, tmp_path: Path) -> None:
    source = sharded(tiny_model("llama"), tmp_path)
    path = tmp_path / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["model.extra"] = SHARDS[0]
    path.write_text(json.dumps(index))
    message = refusal(lambda: opened(source))
    assert "'model.extra'" in message
    assert SHARDS[0] in message


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": 3}'])
def test_an_index_that_is_no_index_is_refused(text: str, tiny_model: TinyModels, tmp_path: Path) -> None:
    source = sharded(tiny_model("llama"), tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    assert "weight_map" in refusal(lambda: opened(source))


def test_a_pickle_is_refused_by_name(tiny_model: TinyModels, tmp_path: Path) -> None:
    source = rewritten(tiny_model("llama"), tmp_path, lambda tensors: None)
    (tmp_path / "model.safetensors").unlink()
    assert "model.safetensors.index.json" in refusal(lambda: opened(source))
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    message = refusal(lambda: opened(source))
    assert "'pytorch_model.bin'" in message
    assert "pickle" in message


def test_a_cut_gguf_file_is_refused_with_the_tensor_it_cuts(tiny_model: TinyModels, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    source = as_gguf(tiny_model("llama"), file)
    whole = file.read_bytes()
    file.write_bytes(whole[:-4000])
    message = refusal(lambda: opened(replace(source, header=read_header(file))))
    assert f"{len(whole) - 4000:,}" in message
    assert "tensor '" in message


@pytest.mark.parametrize(("type_id", "word"), [(26, "I32"), (9, "Q8_1"), (77, "type 77")])
def test_a_gguf_tensor_that_cannot_be_dequantised_is_refused_by_name(
    type_id: int, word: str, tiny_model: TinyModels, tmp_path: Path
) -> None:
    source = as_gguf(tiny_model("llama"), tmp_path / "tiny.gguf")
    assert source.header is not None
    tensors = tuple(
        replace(tensor, type_id=type_id) if tensor.name == "blk.1.ffn_down.weight" else tensor
        for tensor in source.header.tensors
    )
    odd = replace(source, header=replace(source.header, tensors=tensors))
    message = refusal(lambda: opened(odd), UnknownModelError)
    assert "'blk.1.ffn_down.weight'" in message
    assert word in message


def test_rows_that_do_not_hold_whole_gguf_blocks_are_refused(tiny_model: TinyModels, tmp_path: Path) -> None:
    source = as_gguf(tiny_model("llama"), tmp_path / "tiny.gguf", "Q8_0")
    assert source.header is not None
    tensors = tuple(
        replace(tensor, shape=(96, 63)) if "ffn_gate" in tensor.name else tensor for tensor in source.header.tensors
    )
    message = refusal(lambda: opened(replace(source, header=replace(source.header, tensors=tensors))))
    assert "rows of 63 numbers" in message
    assert "packs 32" in message


def test_norms_of_another_shape_of_falcon_are_refused(tiny_model: TinyModels) -> None:
    source = open_model(tiny_model("falcon-40b").folder)
    network = replace(source.spec.network, num_norms=1)
    message = refusal(lambda: built(replace(source, spec=replace(source.spec, network=network))))
    assert "'h.0.input_layernorm.weight' is missing" in message


def test_a_family_without_a_network_is_refused_by_name(tiny_model: TinyModels) -> None:
    source = open_model(tiny_model("llama").folder)
    unknown = replace(source, spec=replace(source.spec, family="mamba"))
    message = refusal(lambda: built(unknown), UnknownModelError)
    assert "'mamba'" in message
    assert "llama, gemma3, gpt2, falcon" in message
