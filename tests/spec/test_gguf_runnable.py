"""GGUF headers become the right model, or are refused by name.

Knows nothing of tensor data, but for the rotary divisors of Llama 3.
"""

import math
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_bytes import BOOL, F32, I32, STRING, U32, Items, Tensor, Typed, gguf, tiny_llama
from hypothesis import given, settings
from hypothesis import strategies as st
from published import growing_bytes, windows

from kvfolio.errors import BrokenModelError, KvfolioError, UnknownModelError
from kvfolio.spec.gguf.header import read_header
from kvfolio.spec.gguf.runnable import runnable_from_header
from kvfolio.spec.layers import FullAttention, SlidingWindow
from kvfolio.spec.model import Rope, RunnableSpec

Metadata = dict[str, object]
Reader = Callable[..., RunnableSpec]


@pytest.fixture
def read(tmp_path: Path) -> Reader:
    def read_file(metadata: Metadata, *tensors: Tensor) -> RunnableSpec:
        path = tmp_path / "toy.gguf"
        path.write_bytes(gguf(metadata, tensors))
        return runnable_from_header(read_header(path))

    return read_file


def renamed(architecture: str, **changes: object) -> Metadata:
    """``tiny_llama`` under another architecture; ``changes`` spell dots as double underscores, None removes."""
    metadata = {key.replace("llama.", f"{architecture}."): value for key, value in tiny_llama().items()}
    metadata["general.architecture"] = architecture
    for name, value in changes.items():
        key = f"{architecture}.{name.replace('__', '.')}"
        if value is None:
            del metadata[key]
        else:
            metadata[key] = value
    return metadata


def gemma3(**changes: object) -> Metadata:
    return renamed("gemma3", block_count=12, attention__sliding_window=16, **changes)


def gpt2(**changes: object) -> Metadata:
    norm = {"attention__layer_norm_epsilon": 1e-5, "attention__layer_norm_rms_epsilon": None}
    return renamed("gpt2", attention__head_count_kv=None, **norm, **changes)


def matrix(name: str, rows: int, columns: int, type_id: int = 0) -> Tensor:
    return Tensor(name, (rows, columns), type_id)


# ---- what is read ---------------------------------------------------------------------------------------------------


def test_llama_is_read_in_full(read: Reader) -> None:
    spec = read(tiny_llama())
    assert (spec.name, spec.family, spec.model_type) == ("toy", "llama", "llama")
    assert spec.layers == (FullAttention(2, 8, 8),) * 2
    assert (spec.max_context, spec.eos_token_ids) == (64, (2,))
    network = spec.network
    assert (network.hidden_size, network.num_q_heads, network.intermediate_size) == (32, 4, 48)
    assert (network.vocab_size, network.activation, network.attention_scale) == (3, "silu", 8**-0.5)
    assert network.norm_eps == pytest.approx(1e-5)
    assert (network.rope, network.rope_local) == (Rope(10_000.0, 8), None)
    assert spec.assumptions == (
        "the file lists no tensors: tied embeddings, the usual biases and bf16 assumed",
        "llama.rope.freq_base is absent: 10,000 assumed",
    )


def test_the_weights_are_counted_from_the_numbers(read: Reader) -> None:
    # embedding, 2 layers (q and o, k and v, gated product, 2 norms), last norm
    assert read(tiny_llama()).num_params == 3 * 32 + 2 * (2 * 32 * 32 + 2 * 16 * 32 + 3 * 32 * 48 + 64) + 32
    # 4 norms and 2 head norms a layer
    assert read(gemma3()).num_params == 3 * 32 + 12 * (3 * 1024 + 3 * 32 * 48 + 128 + 16) + 32
    # position table, biases everywhere
    assert read(gpt2()).num_params == 3 * 32 + 64 * 32 + 2 * (4 * (1024 + 32) + 2 * 32 * 48 + 80 + 128) + 64


def test_other_words_and_tensors_make_other_networks(read: Reader) -> None:
    qwen2, qwen3, gpt = read(renamed("qwen2")), read(renamed("qwen3")), read(gpt2())
    assert (qwen2.network.qkv_bias, qwen2.network.o_bias, qwen2.network.qk_norm) == (True, False, False)
    assert (qwen3.network.qkv_bias, qwen3.network.qk_norm) == (False, True)
    assert (gpt.family, gpt.network.rope, gpt.network.activation) == ("gpt2", None, "gelu_tanh")
    assert (gpt.network.qkv_bias, gpt.network.o_bias, gpt.network.mlp_bias) == (True, True, True)
    assert gpt.layers == (FullAttention(4, 8, 8),) * 2


def test_biases_and_the_output_are_seen_in_the_tensor_table(read: Reader) -> None:
    names = ("blk.0.attn_q.bias", "blk.0.attn_output.bias", "blk.0.ffn_up.bias")
    bare = read(tiny_llama(), matrix("token_embd.weight", 3, 32)).network
    assert (bare.qkv_bias, bare.o_bias, bare.mlp_bias, bare.tie_embeddings) == (False, False, False, True)
    full = read(tiny_llama(), matrix("output.weight", 3, 32), *(Tensor(name, (1,)) for name in names)).network
    assert (full.qkv_bias, full.o_bias, full.mlp_bias, full.tie_embeddings) == (True, True, True, False)


def test_an_array_of_equal_heads_is_one_number(read: Reader) -> None:
    spec = read(renamed("llama", attention__head_count_kv=Items(I32, (2, 2))))
    assert spec.layers == read(tiny_llama()).layers


def test_stated_key_and_value_lengths_win_over_the_division(read: Reader) -> None:
    spec = read(renamed("llama", attention__key_length=24, attention__value_length=16, rope__dimension_count=24))
    assert spec.layers == (FullAttention(2, 24, 16),) * 2
    assert growing_bytes(spec) == 2 * 2 * (24 + 16) * 2
    assert spec.network.attention_scale == 24**-0.5


def test_without_key_value_heads_each_query_head_has_its_own(read: Reader) -> None:
    assert read(renamed("llama", attention__head_count_kv=None)).layers[0] == FullAttention(4, 8, 8)


def test_an_unknown_tensor_type_does_not_hinder_the_plan(read: Reader) -> None:
    spec = read(tiny_llama(), matrix("token_embd.weight", 3, 32, type_id=42))
    assert growing_bytes(spec) == 2 * 2 * 16 * 2
    assert "weights are stored as type 42: computed in bf16" in spec.assumptions


@pytest.mark.parametrize(
    ("types", "dtype", "is_assumed"),
    [
        ((0, 0), "f32", False),
        ((0, 1), "f16", False),
        ((30,), "bf16", False),
        ((3,), "bf16", True),
        ((1, 30), "bf16", 1),
    ],
)
def test_the_dtype_is_that_of_the_matrices(read: Reader, types: tuple[int, ...], dtype: str, is_assumed: bool) -> None:
    matrices = [matrix(f"blk.0.ffn_{index}.weight", 2, 32, type_id) for index, type_id in enumerate(types)]
    spec = read(tiny_llama(), *matrices, Tensor("output_norm.weight", (32,), 0))
    assert spec.dtype == dtype
    assert any("computed in bf16" in line for line in spec.assumptions) == bool(is_assumed)


@pytest.mark.parametrize(("stated", "size"), [({"llama.vocab_size": 5}, 5), ({}, 3)])
def test_the_vocabulary_is_as_stated_or_as_long_as_the_tokens(read: Reader, stated: Metadata, size: int) -> None:
    assert read(tiny_llama() | stated).network.vocab_size == size


def test_without_tokens_the_embedding_says_how_large_the_vocabulary_is(read: Reader) -> None:
    metadata = {key: value for key, value in tiny_llama().items() if key != "tokenizer.ggml.tokens"}
    assert read(metadata, matrix("token_embd.weight", 9, 32)).network.vocab_size == 9
    with pytest.raises(BrokenModelError, match=r"llama\.vocab_size is missing"):
        read(metadata)


def test_end_of_turn_is_an_end_token_too(read: Reader) -> None:
    assert read(tiny_llama() | {"tokenizer.ggml.eot_token_id": 1}).eos_token_ids == (2, 1)
    assert read(tiny_llama() | {"tokenizer.ggml.eot_token_id": 2}).eos_token_ids == (2,)


# ---- Gemma 3 --------------------------------------------------------------------------------------------------------


def test_every_sixth_layer_of_gemma3_is_global(read: Reader) -> None:
    spec = read(gemma3())
    assert windows(spec) == ([16] * 5 + [None]) * 2
    assert spec.layers[0] == SlidingWindow(2, 8, 8, window=16)
    assert "gemma3.attention.sliding_window_pattern is absent: the last of every 6 layers is full" in spec.assumptions


def test_gemma3s_own_pattern_wins_as_a_period_or_as_a_list(read: Reader) -> None:
    assert windows(read(gemma3(attention__sliding_window_pattern=3))) == ([16] * 2 + [None]) * 4
    listed = Items(BOOL, (True, False) * 6)
    assert windows(read(gemma3(attention__sliding_window_pattern=listed))) == [16, None] * 6
    with pytest.raises(BrokenModelError, match="is '3 values'; accepted: one value, or 12 of them"):
        read(gemma3(attention__sliding_window_pattern=Items(BOOL, (True,) * 3)))


def test_gemma3s_scaling_concerns_the_global_layers_only(read: Reader) -> None:
    scaled = {"rope__freq_base": 1e6, "rope__scaling__type": "linear", "rope__scaling__factor": 8.0}
    network = read(gemma3(**scaled)).network
    assert (network.rope, network.rope_local) == (Rope(1e6, 8, "linear", 8.0), Rope(1e4, 8))
    assert read(gemma3(rope__freq_base_swa=2e4)).network.rope_local == Rope(2e4, 8)


def test_gemma3_scales_attention_by_its_heads_width_but_the_27b_by_hidden_over_heads(read: Reader) -> None:
    width = {"attention__key_length": 16, "attention__value_length": 16}
    assert read(gemma3(**width)).network.attention_scale == 16**-0.5
    largest = read(gemma3(**width) | {"gemma3.block_count": 62})
    assert largest.network.attention_scale == 8**-0.5  # 32 hidden / 4 heads
    assert any("query_pre_attn_scalar is not in the file: 8 assumed" in line for line in largest.assumptions)


# ---- rotary positions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "rope", "context"),
    [
        ({"rope__freq_base": 5e5}, Rope(5e5, 8), 64),
        ({"rope__dimension_count": 6}, Rope(1e4, 6), 64),
        ({"rope__scale_linear": 4.0}, Rope(1e4, 8, "linear", 4.0), 64),
        ({"rope__scaling__factor": 0.0}, Rope(1e4, 8), 64),
        ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, Rope(1e4, 8), 64),
        (
            {
                "rope__scaling__type": "yarn",
                "rope__scaling__factor": 4.0,
                "rope__scaling__original_context_length": 16,
                "rope__scaling__attn_factor": 1.0,
            },
            Rope(1e4, 8, "yarn", 4.0, 16),
            64,
        ),
        ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0}, Rope(1e4, 8, "yarn", 4.0, 64), 256),
    ],
)
def test_scalings_are_read_as_llama_cpp_does(read: Reader, changes: Metadata, rope: Rope, context: int) -> None:
    spec = read(renamed("llama", **changes))
    assert (spec.network.rope, spec.max_context) == (rope, context)


def test_a_magnitude_of_the_files_own_multiplies_yarns(read: Reader) -> None:
    yarn = {"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__attn_factor": 2.0}
    rope = read(renamed("llama", **yarn)).network.rope
    assert rope is not None
    assert rope.attention_factor == pytest.approx(2 * (0.1 * math.log(4) + 1))


def divisors(*values: float) -> Tensor:
    return Tensor("rope_freqs.weight", (len(values),), 0, struct.pack(f"<{len(values)}f", *values))


def test_llama3s_divisors_become_its_parameters(read: Reader) -> None:
    # base 500,000 and width 8: wavelengths 6, 167, 4,443 and 118,144; bands end at 2,048 and 8,192
    smooth = (8192 / (2 * math.pi * 500_000**0.5) - 1) / 3
    stored = divisors(1.0, 1.0, 1 / ((1 - smooth) / 8 + smooth), 8.0)
    network = read(renamed("llama", rope__freq_base=5e5), stored).network
    assert network.rope == Rope(5e5, 8, "llama3", 8.0, 8192, 1.0, 4.0)


def test_divisors_of_one_change_nothing(read: Reader) -> None:
    assert read(tiny_llama(), divisors(1.0, 1.0, 1.0, 1.0)).network.rope == Rope(1e4, 8)


@pytest.mark.parametrize(
    ("metadata", "stored"),
    [
        (tiny_llama(), divisors(1.0, 2.0, 3.0, 4.0)),
        (tiny_llama(), divisors(1.0, 8.0)),
        (renamed("llama", rope__scaling__factor=2.0), divisors(1.0, 1.0, 8.0, 8.0)),
    ],
)
def test_other_divisors_are_refused(read: Reader, metadata: Metadata, stored: Tensor) -> None:
    with pytest.raises(UnknownModelError, match=r"rope_freqs\.weight .*use the Hugging Face folder"):
        read(metadata, stored)


# ---- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (renamed("qwen3moe"), r"architecture 'qwen3moe' is not supported; known: llama, qwen2, qwen3, gemma3, gpt2"),
        (renamed("falcon"), r"architecture 'falcon' is not supported; known: llama"),  # from a folder it runs
        (renamed("llama", expert_count=8), r"llama\.expert_count is 8: mixtures of experts are not supported"),
        (renamed("qwen3", pooling_type=3), "pooling_type is 3: embedding models"),
        (renamed("llama", attention__causal=False), "attention.causal is false: llama is encoder-only: no KV cache"),
        (renamed("llama", attention__sliding_window=64), "sliding_window is 64: the header does not say which layers"),
        (gemma3(final_logit_softcapping=30.0), "final_logit_softcapping is 30.0: capped logits"),
        (renamed("llama", logit_scale=0.5), "logit_scale is 0.5"),
        (renamed("llama", rope__scaling__type="longrope"), "rope scaling 'longrope' is not supported; known: none"),
        (renamed("llama", rope__scaling__yarn_log_multiplier=0.1), "this kind of rotary scaling is not supported"),
        (
            renamed("llama", attention__head_count_kv=Items(U32, (2, 4))),
            r"llama\.attention\.head_count_kv differs between layers, \[2, 4\]; known: one number for all layers",
        ),
        (tiny_llama() | {"general.type": "adapter"}, "GGUF of type 'adapter', not a model"),
    ],
)
def test_what_would_change_the_result_is_refused_by_name(read: Reader, metadata: Metadata, message: str) -> None:
    with pytest.raises(UnknownModelError, match=message):
        read(metadata)


@pytest.mark.parametrize(
    ("name", "message"),
    [("blk.0.ffn_gate_exps.weight", "holds expert tensors"), ("rope_factors_long.weight", "longrope.* not supported")],
)
def test_tensors_of_another_kind_of_network_are_refused(read: Reader, name: str, message: str) -> None:
    with pytest.raises(UnknownModelError, match=message):
        read(tiny_llama(), Tensor(name, (2, 2)))


@pytest.mark.parametrize(
    "key", ["block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"]
)
def test_a_missing_key_is_named(read: Reader, key: str) -> None:
    metadata = tiny_llama()
    del metadata[f"llama.{key}"]
    with pytest.raises(BrokenModelError, match=f"llama.{key} is missing"):
        read(metadata, Tensor("output_norm.weight", (32,)))  # without any, the file would be a vocabulary


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"a": 1}, r"general\.architecture is missing"),
        (renamed("llama", block_count="two"), "block_count is 'two'; accepted: a whole number from 1 to 10,000"),
        (renamed("llama", embedding_length=33), "embedding_length 33 does not divide into 4 heads"),
        (renamed("llama", attention__head_count_kv=3), "4 query heads cannot share 3 key/value heads"),
        (
            renamed("llama", attention__head_count=Items(U32, (4, 4, 4))),
            "head_count is '3 values'; accepted: one value, or 2 of them, one for each layer",
        ),
        (
            renamed("llama", attention__head_count_kv=Items(STRING, ("2", "2"))),
            r"head_count_kv is \['2', '2'\]; accepted: whole numbers",
        ),
        (renamed("llama", rope__scaling__factor=0.5), "factor is 0.5; accepted: 0 for none, or a number of 1"),
        (renamed("llama", rope__scaling__attn_factor=2.0), "attn_factor is 2.0; accepted: 1, unless"),
        (renamed("llama", rope__dimension_count=10), "10 rotated numbers in a head of 8"),
        (tiny_llama() | {"tokenizer.ggml.eos_token_id": Typed(F32, 2.0)}, "eos_token_id is 2.0; accepted: a token id"),
        (tiny_llama() | {"general.architecture": 5}, "general.architecture is 5; accepted: a text"),
    ],
)
def test_a_wrong_value_is_refused_with_key_and_what_is_accepted(read: Reader, metadata: Metadata, message: str) -> None:
    with pytest.raises(BrokenModelError, match=message):
        read(metadata)


def test_tensors_that_contradict_the_metadata_are_refused(read: Reader) -> None:
    with pytest.raises(BrokenModelError, match=r"'blk.0.attn_k.weight' is \[32, 32\], the metadata says 16 rows"):
        read(tiny_llama(), matrix("blk.0.attn_k.weight", 32, 32))
    with pytest.raises(BrokenModelError, match=r"'blk.0.attn_q.weight' is \[16, 32\], the metadata says \[32, 32\]"):
        read(tiny_llama(), matrix("blk.0.attn_q.weight", 16, 32))


@settings(max_examples=300, deadline=None)
@given(
    key=st.sampled_from(sorted(tiny_llama())),
    value=st.integers(0, 2**32 - 1) | st.booleans() | st.floats(width=32) | st.text(max_size=5),
)
def test_no_value_of_any_key_ends_in_anything_but_a_model_or_our_error(
    tmp_path_factory: pytest.TempPathFactory, key: str, value: object
) -> None:
    path = tmp_path_factory.getbasetemp() / "odd.gguf"
    path.write_bytes(gguf(tiny_llama() | {key: value}))
    try:
        assert runnable_from_header(read_header(path)).num_params > 0
    except KvfolioError as error:
        assert "odd" in str(error)
