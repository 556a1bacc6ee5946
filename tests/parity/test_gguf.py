"""Our reading of GGUF files against the gguf package and transformers: tiny files, SmolLM2 and Gemma 3 270M."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import from_gguf
import pytest
import tiny_gguf
import torch
import transformers
from doubles import Session
from gguf import GGMLQuantizationType
from real_models import assemble_gemma3, gemma3_config, needs_gemma3, needs_smollm2, smollm2_config
from tiny import TinyModel, some_tokens

from kvfolio.models.build import build_model
from kvfolio.models.weights import open_weights
from kvfolio.spec.gguf.header import read_header
from kvfolio.spec.source import ModelSource, find_default_model, open_model

CPU = torch.device("cpu")
TEXT = [504, 3575, 282, 4649, 314, 7042, 30, 657, 5345, 282, 2375, 314]  # any ids below 49,152 would do


def logits_of(source: ModelSource, text: list[int]) -> torch.Tensor:
    return Session(build_model(source.spec, open_weights(source, torch.float32, CPU))).step({0: text})[0]


def logits_of_transformers(file: Path, config: transformers.PreTrainedConfig, text: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return from_gguf.load(file, config)(torch.tensor([text])).logits[0]


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
@pytest.mark.parametrize("name", ["llama", "llama-biases", "qwen2", "qwen3", "gemma3", "gpt2"])
def test_a_tiny_gguf_file_gives_the_logits_of_transformers(
    name: str, kind: str, tiny_model: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    model, text = tiny_model(name), some_tokens(33)
    file = tiny_gguf.write(model, tmp_path / "tiny.gguf", GGMLQuantizationType[kind])
    # The spec is the folder's: a GGUF header cannot express the attention scale of this tiny gemma3.
    source = replace(open_model(model.folder), path=file, kind="gguf", header=read_header(file))
    expected = logits_of_transformers(file, model.model.config, text)
    torch.testing.assert_close(logits_of(source, text), expected, atol=1e-4, rtol=0)


def test_a_gguf_file_of_plain_floats_gives_the_logits_of_the_folder_to_the_bit(
    tiny_model: Callable[[str], TinyModel], tmp_path: Path
) -> None:
    model, text = tiny_model("mistral"), some_tokens(33)
    folder = open_model(model.folder)
    file = tiny_gguf.write(model, tmp_path / "tiny.gguf")
    source = replace(folder, path=file, kind="gguf", header=read_header(file))
    assert torch.equal(logits_of(source, text), logits_of(folder, text))


@needs_smollm2
def test_tensors_of_smollm2_are_those_of_the_gguf_package() -> None:
    file = find_default_model()
    weights = open_weights(open_model(file), torch.float32, CPU)
    stored = {tensor.name: tensor for tensor in from_gguf.read(file).tensors}
    for key, name in {
        "token_embd.weight": "model.embed_tokens.weight",  # Q8_0
        "blk.3.ffn_down.weight": "model.layers.3.mlp.down_proj.weight",  # Q4_1
        "blk.29.attn_v.weight": "model.layers.29.self_attn.v_proj.weight",
        "blk.7.ffn_norm.weight": "model.layers.7.post_attention_layernorm.weight",  # F32
    }.items():
        expected = from_gguf.dequantised(stored[key])
        assert torch.equal(weights.get(name, tuple(expected.shape)), expected), key


@needs_smollm2
def test_logits_of_smollm2_are_those_of_transformers() -> None:
    file = find_default_model()
    expected = logits_of_transformers(file, smollm2_config(), TEXT)
    torch.testing.assert_close(logits_of(open_model(file), TEXT), expected, atol=1e-3, rtol=0)


@needs_gemma3
def test_logits_of_gemma3_270m_are_those_of_transformers(tmp_path: Path) -> None:
    file = assemble_gemma3(tmp_path)
    expected = logits_of_transformers(file, gemma3_config(), TEXT)
    torch.testing.assert_close(logits_of(open_model(file), TEXT), expected, atol=1e-3, rtol=0)
