"""Models with another number of key/value heads: what is written runs here and in transformers, with equal logits.

Knows nothing of refusals or of how files are written (``tests/models/test_convert.py``).
"""

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
import transformers
from doubles import Session
from served import greedy
from tiny import TinyModel, some_tokens

from kvfolio import LLM, read_model
from kvfolio.models.build import build_model
from kvfolio.models.convert import convert
from kvfolio.models.weights import open_weights
from kvfolio.spec.formats import find_cache_format
from kvfolio.spec.source import open_model

TOLERANCE = 1e-4  # as in test_networks.py
NUM_Q, NUM_KV = 4, 2  # of every tiny model, but for gemma3: 1
FAMILIES = [name for name in tiny.BUILDERS if not name.startswith(("gpt2", "falcon", "deepseek"))]
FindModel = Callable[[str], TinyModel]


def ours(folder: Path, prompt: list[int]) -> torch.Tensor:
    """[num_tokens, vocab] f32."""
    source = open_model(folder)
    weights = open_weights(source, torch.float32, torch.device("cpu"))
    return Session(build_model(source.spec, weights)).step({0: prompt})[0]


def theirs(folder: Path, prompt: list[int]) -> torch.Tensor:
    """[num_tokens, vocab] f32; every tensor of the folder has found its place."""
    model, info = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    with torch.inference_mode():
        return model.eval()(torch.tensor([prompt])).logits[0]


@pytest.mark.parametrize("name", FAMILIES)
def test_copied_heads_change_no_logit_here_and_none_in_transformers(
    name: str, tiny_model: FindModel, tmp_path: Path
) -> None:
    model, prompt = tiny_model(name), some_tokens(33)
    convert(model.folder, tmp_path / "mha", NUM_Q)
    assert {layer.num_kv_heads for layer in open_model(tmp_path / "mha").spec.layers} == {NUM_Q}
    # A product with more rows may add in another order; attention itself reads the same numbers.
    torch.testing.assert_close(ours(tmp_path / "mha", prompt), ours(model.folder, prompt), atol=1e-5, rtol=0)
    torch.testing.assert_close(theirs(tmp_path / "mha", prompt), model.logits(prompt), atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gemma3"])
def test_joined_heads_give_the_logits_of_transformers(name: str, tiny_model: FindModel, tmp_path: Path) -> None:
    model, prompt = tiny_model(name), some_tokens(33)
    convert(model.folder, tmp_path / "mqa", 1)
    logits = ours(tmp_path / "mqa", prompt)
    torch.testing.assert_close(logits, theirs(tmp_path / "mqa", prompt), atol=TOLERANCE, rtol=0)
    assert not torch.allclose(logits, model.logits(prompt), atol=0.1)  # it is another model


@pytest.mark.parametrize("name", ["llama-biases", "qwen2", "gemma3"])
def test_joining_copies_gives_back_the_bytes_of_the_model(name: str, tiny_model: FindModel, tmp_path: Path) -> None:
    folder = tiny_model(name).folder
    num_kv = open_model(folder).spec.layers[0].num_kv_heads
    convert(folder, tmp_path / "more", NUM_Q)
    convert(tmp_path / "more", tmp_path / "back", num_kv)
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "back" / file).read_bytes() == (folder / file).read_bytes()


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_converted_model_is_served_from_the_cache_that_was_announced(
    name: str, served_model: FindModel, tmp_path: Path
) -> None:
    result = convert(served_model(name).folder, tmp_path / "mqa", 1)
    llm = LLM(tmp_path / "mqa", kv_memory="8MiB")
    (completion,) = llm.generate([some_tokens(20)], greedy(8))
    assert len(completion.token_ids) == 8
    assert result.before.cache_bytes_per_token == NUM_KV * result.after.cache_bytes_per_token
    spec = read_model(tmp_path / "mqa")  # as the planner sees it
    assert sum(kind.token_bytes(find_cache_format("f32")) for kind in spec.layers) == result.after.cache_bytes_per_token
    assert spec.weights.num_bytes == result.after.weights_bytes
