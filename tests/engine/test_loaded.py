"""One model in memory under several caches: the same answers as each with its own, and no dtype or device by accident.

Knows nothing of how weights are read.
"""

from collections.abc import Callable

import pytest
from served import greedy
from tiny import TinyModel, some_tokens

from kvfolio import LLM, OptionError
from kvfolio.engine.loaded import LoadedModel, load_model

PROMPT = some_tokens(90, seed=5)


@pytest.fixture
def loaded(served_model: Callable[[str], TinyModel]) -> LoadedModel:
    return load_model(served_model("llama").folder, "f32")


def test_caches_that_share_a_model_answer_as_those_with_a_model_of_their_own(
    loaded: LoadedModel, served_model: Callable[[str], TinyModel]
) -> None:
    formats = ("f32", "int8")
    shared = [LLM(loaded, dtype="f32", kv_format=fmt, kv_memory="1MiB") for fmt in formats]
    assert shared[0].tokenizer is shared[1].tokenizer
    for fmt, llm in zip(formats, shared, strict=True):
        alone = LLM(served_model("llama").folder, dtype="f32", kv_format=fmt, kv_memory="1MiB")
        assert llm.generate([PROMPT], greedy(9))[0].token_ids == alone.generate([PROMPT], greedy(9))[0].token_ids


def test_another_dtype_than_the_loaded_one_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(OptionError, match="loaded in f32 on cpu, not in bf16 on cpu"):
        LLM(loaded, dtype="bf16")


def test_a_model_that_is_no_path_is_refused() -> None:
    with pytest.raises(OptionError, match="model"):
        load_model(7)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="f64"):
        load_model(None, "f64")
