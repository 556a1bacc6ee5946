"""Headers of safetensors files and folders: exact sizes, what is packed, and files that are cut, absurd or absent.

Knows nothing of models beyond a count of weights that is to be replaced.
"""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvfolio.errors import BrokenModelError
from kvfolio.spec.model import WeightCount
from kvfolio.spec.safetensors import (
    INDEX,
    SINGLE,
    StoredTensor,
    exact_weights,
    holds_safetensors,
    parse_header,
    read_safetensors_header,
)

COUNTED = WeightCount(1000, 1000, 2000, "config")
Tensors = dict[str, tuple[str, tuple[int, ...], int]]  # name: dtype, shape, bytes


def described(tensors: Tensors) -> dict[str, object]:
    """The JSON object of a header, its tensors side by side."""
    end, header = 0, {}
    for name, (dtype, shape, num_bytes) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + num_bytes]}
        end += num_bytes
    return header


def file_bytes(tensors: Tensors) -> bytes:
    text = json.dumps({"__metadata__": {"format": "pt"}} | described(tensors)).encode()
    return len(text).to_bytes(8, "little") + text + bytes(sum(num_bytes for _, _, num_bytes in tensors.values()))


TWO: Tensors = {"a.weight": ("BF16", (10, 30), 600), "a.bias": ("F32", (30,), 120)}


def test_a_file_says_what_it_stores_to_the_byte(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(file_bytes(TWO))
    header = read_safetensors_header(tmp_path / SINGLE)
    assert header.tensors == {
        "a.weight": StoredTensor("BF16", (10, 30), 600),
        "a.bias": StoredTensor("F32", (30,), 120),
    }
    assert (header.num_values, header.num_params, header.num_bytes, header.is_packed) == (330, 330, 720, False)
    assert read_safetensors_header(tmp_path).tensors == header.tensors


def test_an_empty_tensor_and_a_single_number_are_tensors_too(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(file_bytes({"none": ("F32", (0, 7), 0), "one": ("F16", (), 2)}))
    header = read_safetensors_header(tmp_path / SINGLE)
    assert (header.num_values, header.num_bytes) == (1, 2)


def test_shards_of_an_index_are_one_model(tmp_path: Path) -> None:
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(file_bytes({"a": ("BF16", (8,), 16)}))
    (tmp_path / "model-00002-of-00002.safetensors").write_bytes(file_bytes({"b": ("BF16", (4,), 8)}))
    assert read_safetensors_header(tmp_path).num_params == 12  # by their names alone
    write_index(tmp_path, {"a": 1, "b": 2}, 24)
    (tmp_path / "consolidated.safetensors").write_bytes(file_bytes({"copy": ("BF16", (12,), 24)}))
    header = read_safetensors_header(tmp_path)
    assert (header.num_params, header.num_bytes, header.missing, header.stated_bytes) == (12, 24, (), 24)


def write_index(folder: Path, shards: dict[str, int], total: object) -> None:
    weight_map = {name: f"model-{number:05}-of-00002.safetensors" for name, number in shards.items()}
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}))


def test_an_absent_shard_is_named_and_the_index_gives_the_bytes(tmp_path: Path) -> None:
    write_index(tmp_path, {"a": 1, "b": 2}, 24.0)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(file_bytes({"a": ("BF16", (8,), 16)}))
    header = read_safetensors_header(tmp_path)
    assert header.missing == ("model-00002-of-00002.safetensors",)
    weights, notes = exact_weights(COUNTED, header)
    assert (weights.num_params, weights.num_bytes, weights.source) == (1000, 24, "safetensors")
    assert "1 weight files are absent (model-00002-of-00002.safetensors)" in notes[0]
    assert "total_size" in notes[1]


@pytest.mark.parametrize("total", [None, "24", -1, True, 1e300])
def test_without_a_total_an_absent_shard_leaves_the_count(tmp_path: Path, total: object) -> None:
    write_index(tmp_path, {"a": 1}, total)
    weights, notes = exact_weights(COUNTED, read_safetensors_header(tmp_path))
    assert weights == COUNTED
    assert "weights are counted from the config" in notes[-1]


def test_a_shard_is_never_looked_for_outside_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "secret.safetensors").write_bytes(file_bytes(TWO))
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    assert read_safetensors_header(folder).missing == ("../secret.safetensors",)


def test_plain_weights_replace_the_count(tmp_path: Path) -> None:
    (tmp_path / SINGLE).write_bytes(file_bytes(TWO))
    weights, notes = exact_weights(COUNTED, read_safetensors_header(tmp_path))
    assert weights == WeightCount(330, 330, 720, "safetensors")
    assert notes == ()


def test_experts_keep_their_count() -> None:
    counted = WeightCount(1000, 400, 2000, "config", 800, 8, 2)
    weights, _ = exact_weights(counted, header_of(TWO))
    assert (weights.num_params, weights.num_active_params, weights.expert_params, weights.num_experts) == (
        330,
        400,
        800,
        8,
    )


SPARSE = WeightCount(1000, 400, 2000, "config", 800, 8, 2, 1600)
NOWHERE_SPARSE = WeightCount(1000, 1000, 2000, "config", 0, 8, 2)  # experts are named, and no layer has them
NO_EXPERTS: Tensors = {
    "model.layers.0.mlp.shared_experts.up_proj.weight": ("BF16", (10, 10), 200),
    "model.layers.0.mlp.gate.weight": ("BF16", (8, 10), 160),
    "model.encoder.layers.0.ffn.experts.expert_0.fc1.weight": ("BF16", (10,), 20),
}


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.experts.7.up_proj.weight",
        "model.layers.0.block_sparse_moe.experts.0.w1.weight",
        "model.layers.0.feed_forward.experts.gate_up_proj",
        "transformer.blocks.0.ffn.experts.mlp.w1",
        "model.decoder.layers.3.ffn.experts.expert_7.fc1.weight",
        "layers.0.ffn.experts.3.w1.weight",
    ],
)
def test_bytes_of_experts_are_known_by_their_names(name: str) -> None:
    weights, notes = exact_weights(SPARSE, header_of(NO_EXPERTS | {name: ("BF16", (300,), 600)}))
    assert (weights.expert_bytes, weights.num_bytes) == (600, 980)
    assert (weights.expert_params, weights.num_params) == (300, 490)
    assert notes == ()


def test_experts_for_images_are_not_among_those_a_token_of_text_may_choose() -> None:
    names = {f"model.layers.0.mlp.experts.{index}.up_proj.weight": ("BF16", (5,), 10) for index in range(16)}
    weights, _ = exact_weights(SPARSE, header_of(names))
    assert (weights.expert_bytes, weights.expert_params, weights.num_bytes) == (80, 40, 160)


def test_of_packed_experts_scales_are_bytes_and_the_number_is_counted() -> None:
    packed: Tensors = {
        "model.layers.0.mlp.experts.gate_up_proj_blocks": ("U8", (64,), 64),
        "model.layers.0.mlp.experts.gate_up_proj_scales": ("U8", (4,), 4),
        "model.layers.0.mlp.experts.gate_up_proj_bias": ("BF16", (8,), 16),
        "model.norm.weight": ("BF16", (8,), 16),
    }
    weights, _ = exact_weights(SPARSE, header_of(packed))
    assert (weights.expert_bytes, weights.num_bytes) == (84, 100)
    assert (weights.expert_params, weights.num_params) == (800, 1000)


def test_scales_of_fp8_experts_are_bytes_but_no_weights() -> None:
    fp8: Tensors = {
        "model.layers.0.mlp.experts.0.up_proj.weight": ("F8_E4M3", (300,), 300),
        "model.layers.0.mlp.experts.0.up_proj.weight_scale_inv": ("F32", (3,), 12),
        "model.norm.weight": ("BF16", (8,), 16),
    }
    weights, _ = exact_weights(SPARSE, header_of(fp8))
    assert (weights.expert_bytes, weights.expert_params) == (312, 300)


def test_experts_without_a_name_keep_their_share_of_the_bytes() -> None:
    weights, _ = exact_weights(SPARSE, header_of(TWO))
    assert (weights.num_bytes, weights.expert_bytes) == (720, 720 * 1600 // 2000)


def test_where_a_shard_is_absent_experts_keep_their_share_of_the_total(tmp_path: Path) -> None:
    write_index(tmp_path, {"model.layers.0.mlp.experts.0.up_proj.weight": 1, "b": 2}, 5000)
    (tmp_path / "model-00001-of-00002.safetensors").write_bytes(
        file_bytes({"model.layers.0.mlp.experts.0.up_proj.weight": ("BF16", (8,), 16)})
    )
    weights, _ = exact_weights(SPARSE, read_safetensors_header(tmp_path))
    assert (weights.num_bytes, weights.expert_bytes) == (5000, 4000)


@pytest.mark.parametrize("counted", [COUNTED, NOWHERE_SPARSE], ids=["dense", "nowhere"])
def test_names_of_experts_in_a_model_counted_as_dense_are_no_experts(counted: WeightCount) -> None:
    named: Tensors = {"model.layers.0.mlp.experts.0.up_proj.weight": ("BF16", (300,), 600)}
    weights, _ = exact_weights(counted, header_of(named))
    assert (weights.num_bytes, weights.expert_bytes, weights.expert_params) == (600, 0, 0)


NAMES = st.sampled_from([*NO_EXPERTS, *(f"layers.0.mlp.experts.{part}.weight" for part in (0, 7, 8, "9" * 5000, "up"))])
STORED = st.sampled_from([("BF16", (10,), 20), ("F8_E4M3", (10,), 10), ("U8", (10,), 10), ("F32", (0,), 0)])


@given(
    tensors=st.dictionaries(NAMES, STORED),
    counted=st.sampled_from([COUNTED, SPARSE, NOWHERE_SPARSE, WeightCount(0, 0, 0, "config")]),
)
def test_bytes_of_experts_are_a_part_of_the_exact_ones(tensors: Tensors, counted: WeightCount) -> None:
    weights, _ = exact_weights(counted, header_of(tensors))
    assert 0 <= weights.expert_bytes <= weights.num_bytes
    assert (weights.expert_params > 0) == (counted.expert_params > 0)
    if weights.num_bytes > 0:
        assert (weights.expert_bytes > 0) == (weights.expert_params > 0)


def header_of(tensors: Tensors):  # type: ignore[no-untyped-def]
    from kvfolio.spec.safetensors import SafetensorsHeader

    return SafetensorsHeader("toy", parse_header(json.dumps(described(tensors)).encode(), "toy", None))


@pytest.mark.parametrize(
    "tensors",
    [
        {"q.qweight": ("I32", (16, 8), 512), "q.scales": ("F16", (8,), 16)},  # GPTQ: eight weights in a number
        {"w.blocks": ("U8", (64,), 64), "w.scale": ("F8_E8M0", (4,), 4), "norm": ("BF16", (4,), 8)},  # MXFP4
        {"w": ("F4", (128,), 64)},
        {"w": ("NEW_7", (64,), 100)},  # a format of the future: its bytes are known all the same
    ],
)
def test_of_packed_weights_the_bytes_are_exact_and_the_number_is_counted(tensors: Tensors) -> None:
    header = header_of(tensors)
    weights, notes = exact_weights(COUNTED, header)
    assert header.is_packed
    assert (weights.num_params, weights.num_bytes) == (1000, sum(num_bytes for _, _, num_bytes in tensors.values()))
    assert notes == ()


def test_scales_masks_and_tables_are_bytes_but_no_weights() -> None:
    header = header_of(
        {
            "w.weight": ("F8_E4M3", (100, 100), 10_000),
            "w.weight_scale_inv": ("F32", (1, 1), 4),
            "h.0.attn.bias": ("F32", (1, 1, 8, 8), 256),  # GPT-2's causal mask
            "h.0.attn.masked_bias": ("F32", (), 4),
            "rotary_emb.inv_freq": ("F32", (4,), 16),
            "ids": ("I64", (2,), 16),
            "c.attn.bias": ("BF16", (100,), 200),  # a bias
        }
    )
    assert not header_of({"w": ("F8_E4M3", (100,), 100)}).is_packed
    assert (header.is_packed, header.num_params, header.num_bytes) == (False, 10_100, 10_496)


def test_the_only_file_of_a_folder_counts_whatever_its_name(tmp_path: Path) -> None:
    assert not holds_safetensors(tmp_path)
    (tmp_path / "adapter_model.safetensors").write_bytes(file_bytes(TWO))
    assert not holds_safetensors(tmp_path)
    (tmp_path / "weights.safetensors").write_bytes(file_bytes(TWO))
    assert holds_safetensors(tmp_path)
    assert read_safetensors_header(tmp_path).num_params == 330
    (tmp_path / "other.safetensors").write_bytes(file_bytes(TWO))
    assert not holds_safetensors(tmp_path)  # which of them is the model is not known
    with pytest.raises(BrokenModelError, match=r"holds neither model\.safetensors nor"):
        read_safetensors_header(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "too few for its header"),
        (b"\x05\0\0", "too few for its header"),
        (file_bytes(TWO)[:40], "too few for its header of .*; it was cut"),
        (file_bytes(TWO)[:-1], "describes 720 bytes of tensors, the file has 719; it was cut"),
        (file_bytes(TWO) + b"\0", "the file has 721"),
        (b"\xff" * 8 + b"{}", r"a header of 18,446,744,073,709,551,615 bytes, at most 100,000,000"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "git-lfs pointer.*git lfs pull"),
        ((8).to_bytes(8, "little") + b"not json", "not that of a safetensors file"),
        ((4).to_bytes(8, "little") + b"[{}]", "not that of a safetensors file"),
    ],
)
def test_a_broken_file_is_refused_with_its_path(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / SINGLE
    path.write_bytes(content)
    with pytest.raises(BrokenModelError, match=message) as raised:
        read_safetensors_header(path)
    assert str(raised.value).startswith(str(path))


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [2]}, "data_offsets"),
        ({"dtype": 4, "shape": [2], "data_offsets": [0, 8]}, "needs dtype, shape and two data_offsets"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}, "whole numbers from 0"),
        ({"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}, "whole numbers from 0"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}, "whole numbers from 0, in order"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [0]}, "two data_offsets"),
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, "of 3 F32 numbers takes 8 bytes"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}, "overlap or leave holes at byte 0"),
        ("F32", "not that of a safetensors file"),
    ],
)
def test_a_wrong_tensor_is_refused(entry: object, message: str) -> None:
    with pytest.raises(BrokenModelError, match=message):
        parse_header(json.dumps({"a": entry}).encode(), "toy", None)


@pytest.mark.parametrize("content", ["{", "[]", '{"weight_map": 3}', "[" * 10_000])
def test_a_broken_index_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / INDEX).write_text(content)
    with pytest.raises(BrokenModelError, match=r"index\.json: no table 'weight_map'"):
        read_safetensors_header(tmp_path)


@given(st.binary(max_size=200))
def test_no_bytes_bring_the_parser_down(content: bytes) -> None:
    try:
        tensors = parse_header(content, "noise", None)
    except BrokenModelError:
        return
    assert all(isinstance(tensor, StoredTensor) for tensor in tensors.values())


def test_the_numbers_are_those_of_the_safetensors_package(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    save_file = pytest.importorskip("safetensors.torch").save_file
    tensors = {
        "a": torch.zeros(3, 5, dtype=torch.bfloat16),
        "b": torch.zeros(7, dtype=torch.float8_e4m3fn),
        "c": torch.zeros(2, 2, dtype=torch.float32),
    }
    save_file(tensors, tmp_path / SINGLE)
    header = read_safetensors_header(tmp_path)
    assert {name: tensor.shape for name, tensor in header.tensors.items()} == {"a": (3, 5), "b": (7,), "c": (2, 2)}
    assert (header.num_params, header.num_bytes) == (26, 30 + 7 + 16)
