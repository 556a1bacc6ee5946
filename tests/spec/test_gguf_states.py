"""States from GGUF headers alone, and files that are refused by name: no cache, no model, keys that are not known.

Knows nothing of tensor data. The numbers are those of llama.cpp's own allocation.
"""

from collections.abc import Callable
from pathlib import Path

import pytest
from gguf_bytes import STRING, Items, Tensor
from gguf_headers import FULL, booleans, deepseek, model, numbers, planned, ssm

from kvfolio.errors import BrokenModelError, UnknownModelError
from kvfolio.spec.formats import F32, parse_cache_format
from kvfolio.spec.gguf.architectures import KNOWN
from kvfolio.spec.layers import (
    CombinedLayer,
    CrossAttention,
    LatentAttention,
    NoCache,
    RecurrentState,
)
from kvfolio.spec.model import ModelSpec

Reader = Callable[..., ModelSpec]


@pytest.fixture
def read(tmp_path: Path) -> Reader:
    return lambda metadata, *tensors: planned(tmp_path, metadata, tensors)


def test_mamba_keeps_a_state_and_the_last_inputs_of_its_convolution_in_f32(read: Reader) -> None:
    spec = read(model("mamba", attention__head_count=0, attention__head_count_kv=None, **ssm(4, 256, 16)))
    state = RecurrentState("mamba", 256 * 16, F32, 3 * 256, F32)
    assert spec.layers == (state,) * 6
    assert state.fixed_bytes(parse_cache_format("int8")) == 4 * (256 * 16 + 3 * 256)
    assert "states are counted in f32, as llama.cpp keeps them" in spec.assumptions


def test_mamba2_has_groups_in_its_convolution(read: Reader) -> None:
    spec = read(model("mamba2", attention__head_count=None, attention__head_count_kv=None, **ssm(4, 256, 128, 2)))
    assert spec.layers[0] == RecurrentState("mamba2", 256 * 128, F32, 3 * (256 + 2 * 2 * 128), F32)


@pytest.mark.parametrize("architecture", ["jamba", "granitehybrid", "plamo2"])
def test_layers_without_key_value_heads_keep_a_state(read: Reader, architecture: str) -> None:
    keys = ssm(4, 256, 16, 1)
    layers = read(model(architecture, attention__head_count_kv=numbers(0, 0, 2, 0, 0, 2), **keys)).layers
    states = [index for index, layer in enumerate(layers) if isinstance(layer, RecurrentState)]
    assert states == [0, 1, 3, 4]
    assert layers[2] == layers[5] == FULL


def test_a_hybrid_without_state_layers_needs_no_state_keys(read: Reader) -> None:
    assert read(model("granitehybrid")).layers == (FULL,) * 6


def test_nemotron_h_has_layers_that_remember_nothing(read: Reader) -> None:
    heads, widths = numbers(0, 0, 2, 0, 0, 0), numbers(0, 512, 0, 512, 0, 512)
    layers = read(
        model("nemotron_h", attention__head_count_kv=heads, feed_forward_length=widths, **ssm(4, 256, 128, 8))
    ).layers
    state = RecurrentState("mamba2", 256 * 128, F32, 3 * (256 + 2 * 8 * 128), F32)
    assert layers == (state, NoCache(), FULL, NoCache(), state, NoCache())


def test_falcon_h1_keeps_attention_and_a_state_in_every_layer(read: Reader) -> None:
    layers = read(model("falcon-h1", **ssm(4, 256, 128, 1))).layers
    state = RecurrentState("mamba2", 256 * 128, F32, 3 * (256 + 2 * 128), F32)
    assert layers == (CombinedLayer((FULL, state)),) * 6


@pytest.mark.parametrize("architecture", ["qwen3next", "qwen35", "qwen35moe"])
def test_every_fourth_layer_of_the_qwen_hybrids_is_attention(read: Reader, architecture: str) -> None:
    layers = read(model(architecture, block_count=8, **ssm(4, 4096, 128, 16))).layers
    state = RecurrentState("gated_delta_net", 128 * 4096, F32, 3 * (4096 + 2 * 16 * 128), F32)
    assert layers == ((state,) * 3 + (FULL,)) * 2
    keys = ssm(4, 4096, 128, 16)
    assert read(model(architecture, full_attention_interval=2, **keys)).layers == (state, FULL) * 3
    listed = booleans(True, True, False, False, True, True)
    assert read(model(architecture, attention__recurrent_layers=listed, **keys)).layers[1:4] == (state, FULL, FULL)


def test_lfm2_keeps_the_last_inputs_of_its_short_convolutions(read: Reader) -> None:
    layers = read(model("lfm2", attention__head_count_kv=numbers(0, 0, 2, 0, 0, 2), shortconv__l_cache=3)).layers
    assert layers[:3] == (RecurrentState("short_conv", 0, F32, 2 * 128, F32),) * 2 + (FULL,)


def test_kimi_linear_keeps_states_and_latents(read: Reader) -> None:
    heads = numbers(0, 0, 0, 1, 0, 1)
    layers = read(
        deepseek(
            "kimi-linear",
            attention__head_count=32,
            attention__head_count_kv=heads,
            kda__head_dim=128,
            ssm__conv_kernel=4,
        )
    ).layers
    state = RecurrentState("kda", 128 * 128 * 32, F32, 3 * 3 * 32 * 128, F32)
    latent = LatentAttention(512, 64, 32, 192, 128)
    assert layers == (state, state, state, latent, state, latent)


@pytest.mark.parametrize(("architecture", "shifts"), [("rwkv6", None), ("rwkv7", 2), ("arwkv7", 1)])
def test_rwkv_keeps_a_matrix_a_head_and_its_last_inputs(read: Reader, architecture: str, shifts: int | None) -> None:
    spec = read(
        model(
            architecture,
            attention__head_count=0,
            attention__head_count_kv=None,
            wkv__head_size=64,
            token_shift_count=shifts,
        )
    )
    assert spec.layers == (RecurrentState("rwkv", 128 * 64, F32, (shifts or 2) * 128, F32),) * 6


# Other kinds of file


def test_t5_keeps_its_own_tokens_and_those_of_the_encoder(read: Reader) -> None:
    spec = read(model("t5", decoder_block_count=4, attention__relative_buckets_count=32))
    assert spec.layers == (CombinedLayer((FULL, CrossAttention(2, 16, 16, 0))),) * 4


@pytest.mark.parametrize("architecture", ["bert", "nomic-bert-moe", "jina-bert-v2", "modern-bert", "t5encoder"])
def test_an_encoder_keeps_no_cache(read: Reader, architecture: str) -> None:
    with pytest.raises(UnknownModelError, match=f"{architecture} is encoder-only: no KV cache"):
        read(model(architecture))


def test_a_model_that_looks_both_ways_keeps_no_cache(read: Reader) -> None:
    with pytest.raises(UnknownModelError, match="llama is encoder-only: no KV cache"):
        read(model("llama", attention__causal=False))
    with pytest.raises(UnknownModelError, match="dream is a diffusion model: no KV cache"):
        read(model("dream", attention__causal=False))


@pytest.mark.parametrize("kind", ["adapter", "mmproj", "imatrix"])
def test_a_file_of_another_type_is_called_that(read: Reader, kind: str) -> None:
    with pytest.raises(UnknownModelError, match=f"a GGUF of type '{kind}', not a model"):
        read(model("llama") | {"general.type": kind})


def test_a_vision_part_and_a_bare_vocabulary_are_called_that(read: Reader) -> None:
    with pytest.raises(UnknownModelError, match=r"the vision or audio part of a model \(mmproj\)"):
        read({"general.architecture": "clip", "clip.vision.block_count": 24})
    with pytest.raises(UnknownModelError, match="holds a vocabulary only"):
        read({"general.architecture": "llama", "tokenizer.ggml.tokens": Items(STRING, ("a",))})
    with pytest.raises(BrokenModelError, match=r"general.architecture is missing"):
        read({"general.name": "nothing"})


def test_an_architecture_that_is_not_known_is_read_by_its_keys_and_said(read: Reader) -> None:
    spec = read(model("novel", attention__head_count_kv=numbers(1, 2, 2, 2, 2, 0)))
    assert [layer.kind for layer in spec.layers] == ["full"] * 5 + ["none"]
    assert "architecture 'novel' is not known here: read by its standard keys alone" in spec.assumptions


@pytest.mark.parametrize("key", ["block_count", "context_length", "embedding_length", "attention__head_count"])
def test_an_architecture_that_is_not_known_needs_its_standard_keys(read: Reader, key: str) -> None:
    tensor = Tensor("token_embd.weight", (3, 128))
    with pytest.raises(UnknownModelError, match=r"architecture 'novel' is not supported.*missing"):
        read(model("novel", **{key: None}), tensor)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("attention__latent_length", 64),
        ("attention__compress_ratios", numbers(4, 4, 4, 4, 4, 4)),
        ("attention__key_length_mla_swa", 192),
        ("ssm__ring_length", 8),
        ("num_loops", 2),
    ],
)
@pytest.mark.parametrize("architecture", ["llama", "novel"])
def test_an_unfamiliar_key_that_may_decide_a_cache_is_refused_by_name(
    read: Reader, architecture: str, key: str, value: object
) -> None:
    with pytest.raises(UnknownModelError, match=f"{architecture}.{key.replace('__', '.')} is .*not known here"):
        read(model(architecture, **{key: value}))


def test_an_unfamiliar_factor_decides_nothing(read: Reader) -> None:
    assert read(model("llama", attention__warmth=0.5, feed_forward_twist=3)).layers == (FULL,) * 6


def test_an_architecture_that_is_not_known_may_not_hide_what_decides(read: Reader) -> None:
    with pytest.raises(UnknownModelError, match=r"novel.memory.slots is 64: not known here"):
        read(model("novel", memory__slots=64))
    with pytest.raises(UnknownModelError, match="neither the header nor an architecture known here says which layers"):
        read(model("novel", attention__sliding_window=64))
    with pytest.raises(UnknownModelError, match="does not say in which layers"):
        read(model("novel", **ssm(4, 256, 16)))
    with pytest.raises(UnknownModelError, match="the keys of novel mean something else"):
        read(model("novel"), Tensor("blk.0.attn_k.weight", (64, 128)))


def test_an_unknown_hybrid_that_says_all_is_read(read: Reader) -> None:
    spec = read(model("novel", attention__head_count_kv=numbers(0, 0, 2, 0, 0, 2), **ssm(4, 256, 16)))
    assert spec.layers[1:3] == (RecurrentState("state", 4096, F32, 768, F32), FULL)


def test_every_name_in_the_tables_of_the_gguf_package_is_known_or_refused_by_name(read: Reader) -> None:
    constants = pytest.importorskip("gguf.constants")
    for name in set(constants.MODEL_ARCH_NAMES.values()) - KNOWN:
        with pytest.raises(UnknownModelError, match=r"no KV cache|not a language model"):
            read(model(name))
