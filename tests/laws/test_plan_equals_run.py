"""``kvfolio plan`` and ``kvfolio run`` say the same bytes: for every family that runs, whoever reads the model.

Knows nothing of how either counts.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tiny_gguf
from served import FAMILIES, SPARSE, greedy
from tiny import some_tokens

import kvfolio
from kvfolio import LLM
from kvfolio.spec.formats import find_cache_format
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


@pytest.mark.parametrize("name", [name for name in FAMILIES if name not in SPARSE])  # GGUF's experts are not run
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


@pytest.mark.parametrize(
    ("kv_format", "block_tokens"),
    [("bf16", 16), ("int8", 4), ("bf16/int8", 64), ("int4", 64), ("k5v3", 16), ("fp8-scaled/int6-token", 32)],
)
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


@pytest.mark.parametrize(
    "options",
    [
        {"kv_format": "int8", "kv_layers": "0=exact"},
        {"kv_layers": "1-2=int8", "kv_format": "bf16/int8"},
        {"kv_format": "int8", "sink_blocks": 2},
        {"kv_format": "int8", "kv_layers": "2=f32", "sink_blocks": 3, "block_tokens": 4},
        {"kv_format": "auto", "sink_blocks": 2},  # exact anyhow
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@every_family
def test_exceptions_and_sinks_take_what_the_layout_says(
    name: str, options: dict[str, object], open_llm: Callable[..., LLM]
) -> None:
    llm = open_llm(name, dtype="bf16", max_step_tokens=1, swap_memory="1MiB", **options)
    snapshot, layout = llm.snapshot(), llm.layout
    assert snapshot.planned_bytes == snapshot.allocated_bytes
    assert snapshot.host_planned_bytes == snapshot.host_allocated_bytes <= 1 << 20
    llm.generate([some_tokens(60)], greedy(41))
    usage = llm.snapshot().peak
    assert usage.used_bytes == layout.bytes_held(100) + sum(group.open_block_bytes for group in layout.groups)
    assert usage.sealed_by_group == tuple(layout.blocks_held(group, 100) for group in layout.groups)
    assert usage.used_bytes == counted(llm, 100)
    assert layout.is_lossless is (options["kv_format"] == "auto")


def counted(llm: LLM, num_tokens: int) -> int:
    """Bytes of a sequence, layer by layer: full blocks, an open one, and sinks where a layer reads all and is lossy."""
    options, tokens, num_bytes = llm.options, llm.layout.block_tokens, 0
    exact, default = find_cache_format("bf16"), options.kv_format.replace("auto", "bf16")
    exceptions = {}
    for part in filter(None, options.kv_layers.split(",")):
        layers, fmt = part.replace("exact", "bf16").split("=")
        first, _, last = layers.partition("-")
        exceptions |= dict.fromkeys(range(int(first), int(last or first) + 1), fmt)
    for index, kind in enumerate(llm.spec.layers):
        fmt, sealed = find_cache_format(exceptions.get(index, default)), num_tokens // tokens
        held = sealed if kind.window is None else min(sealed, -(-kind.window // tokens))
        num_bytes += tokens * (held * kind.token_bytes(fmt) + kind.token_bytes(exact))
        if fmt != exact and kind.window is None:
            num_bytes += tokens * min(sealed, options.sink_blocks) * kind.token_bytes(exact)
    return num_bytes
