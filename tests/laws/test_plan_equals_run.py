"""``kvfolio plan`` and ``kvfolio run`` say the same bytes: for every family that runs, whoever reads the model.

Knows nothing of how either counts.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tiny_gguf
from served import FAMILIES, greedy
from tiny import some_tokens

import kvfolio
from kvfolio import LLM
from kvfolio.spec.source import open_model

if TYPE_CHECKING:
    from tiny import TinyModel

every_family = pytest.mark.parametrize("name", FAMILIES)


@every_family
def test_the_planner_reads_the_layers_that_the_engine_runs(
    name: str, served_model: "Callable[[str], TinyModel]"
) -> None:
    folder = served_model(name).folder
    planned, run = kvfolio.read_model(folder), open_model(folder).spec
    assert planned.layers == run.layers
    assert planned.max_context == run.max_context
    assert planned.num_params == run.num_params


@every_family
def test_the_planner_reads_the_layers_that_the_engine_runs_from_a_gguf_file_too(
    name: str, served_model: "Callable[[str], TinyModel]", tmp_path: Path
) -> None:
    file = tiny_gguf.write(served_model(name), tmp_path / "tiny.gguf")
    planned, run = kvfolio.read_model(file), open_model(file).spec
    assert planned.layers == run.layers
    assert (planned.max_context, planned.dtype, planned.num_q_heads) == (run.max_context, run.dtype, run.num_q_heads)
    assert planned.num_params == run.num_params
    if name != "mistral":  # llama.cpp has no window for it
        assert run.layers == open_model(served_model(name).folder).spec.layers


@pytest.mark.parametrize(("kv_format", "block_tokens"), [("bf16", 16), ("int8", 4), ("bf16/int8", 64)])
@every_family
def test_what_a_sequence_is_planned_to_take_is_what_it_takes(
    name: str, kv_format: str, block_tokens: int, open_llm: Callable[..., LLM]
) -> None:
    llm = open_llm(name, kv_format=kv_format, block_tokens=block_tokens, dtype="bf16", max_step_tokens=1)
    llm.generate([some_tokens(60)], greedy(41))  # 100 tokens: the last one that is sampled needs no place
    plan = kvfolio.plan(llm.spec, context=100, kv_format=kv_format, block_tokens=block_tokens)
    assert plan.kv.kvfolio_bytes_at["100"] == llm.snapshot().peak.used_bytes
    assert (
        plan.kv.bytes_per_token
        + sum(layer.num_layers * layer.bytes_per_token_held for layer in plan.kv.layers if layer.window)
        == llm.bytes_per_token
    )
