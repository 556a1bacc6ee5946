"""A promise is an allocation, and what a request took it gives back: however it ends, nothing of it is left.

Knows nothing of what the answers are. Every test of a folder that uses ``open_llm`` ends by looking for leftovers, too.
"""

import gc
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest

import pytest
import torch
from served import FAMILIES, WINDOW, assert_idle, failing, forced, greedy, kv_memory_for, recorded
from tiny import some_tokens

from kvfolio import LLM, KvfolioError, RequestError, SamplingParams
from kvfolio.planner.memory import BLOCK_TOKENS_ALLOWED

OpenLLM = Callable[..., LLM]

every_family = pytest.mark.parametrize("name", FAMILIES)


# ---- promise = allocation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kv_format",
    [
        *("auto", "f32", "bf16", "f16", "int8", "bf16/int8", "int8/f16", "fp8", "fp8-scaled"),
        *("int6", "int5", "int4", "int3", "int2", "k8v4", "int4-rotated/int3-token"),
    ],
)
@every_family
def test_what_is_planned_is_allocated_to_the_byte(name: str, kv_format: str, open_llm: OpenLLM) -> None:
    is_packed = kv_format != "int8" and ("int" in kv_format.replace("int8", "") or kv_format == "k8v4")
    for block_tokens in [tokens for tokens in BLOCK_TOKENS_ALLOWED if tokens >= 16 or not is_packed]:
        for kv_memory in ("4MiB", 4_000_037):
            llm = open_llm(name, kv_format=kv_format, block_tokens=block_tokens, kv_memory=kv_memory)
            snapshot, store = llm.snapshot(), llm.engine._store
            assert snapshot.planned_bytes == snapshot.allocated_bytes <= 4 << 20
            assert sum(pool.nbytes for pool in store.open) == snapshot.planned_bytes - llm.layout.budget_bytes
            for pool, group in zip(store.sealed, llm.layout.groups, strict=True):
                assert llm.layout.budget_bytes - group.block_bytes < pool.nbytes <= llm.layout.budget_bytes
            assert llm.layout.row_bytes == llm.bytes_per_token * block_tokens


@pytest.mark.parametrize(
    ("name", "kv_format", "expected"),
    [
        ("llama", "f32", 3 * 2 * (16 + 16) * 4),
        ("llama", "bf16", 3 * 2 * (16 + 16) * 2),
        ("llama", "int8", 3 * 2 * (16 + 4 + 16 + 4)),  # a scale of 4 bytes beside each vector
        ("llama", "bf16/int8", 3 * 2 * (16 * 2 + 16 + 4)),
        ("llama", "int4", 3 * 2 * (8 + 1 + 8 + 2)),  # 16 channels * 4 bytes for 64 tokens; 2 bytes beside each value
        ("gemma3", "k8v4", 7 * 1 * (24 + 4 + 16 + 2)),  # 24 numbers are padded to 32
        ("qwen3", "f32", 3 * 2 * (24 + 24) * 4),  # stated head width
        ("gemma3", "f32", 7 * 1 * (24 + 24) * 4),
        ("gpt2", "int8", 3 * 4 * (16 + 4 + 16 + 4)),
    ],
)
def test_a_token_costs_what_its_layers_keep_of_it(name: str, kv_format: str, expected: int, open_llm: OpenLLM) -> None:
    assert open_llm(name, kv_format=kv_format).bytes_per_token == expected


@pytest.mark.parametrize("block_tokens", [4, 16, 64])
@every_family
def test_a_lone_request_takes_at_its_peak_what_was_promised(name: str, block_tokens: int, open_llm: OpenLLM) -> None:
    llm = open_llm(name, block_tokens=block_tokens, max_step_tokens=1)
    llm.generate([some_tokens(60)], greedy(41))  # 100 tokens: the last one that is sampled needs no place
    open_bytes = sum(group.open_block_bytes for group in llm.layout.groups)
    assert llm.snapshot().peak.used_bytes == open_bytes + llm.layout.bytes_held(100)


@pytest.mark.parametrize("name", ["mistral", "gemma3"])
def test_window_layers_hold_a_window_and_no_more(name: str, open_llm: OpenLLM) -> None:
    llm = open_llm(name, block_tokens=4)
    with recorded(llm) as record:
        llm.generate([some_tokens(120)], greedy(60))
    kinds = [group.group.kind for group in llm.layout.groups]
    assert any(kind.window == WINDOW for kind in kinds)
    for step in record.steps[1:]:
        (chunk,) = step.chunks
        for kind, table in zip(kinds, chunk.tables, strict=True):
            num_full = (chunk.start + 1) // 4
            assert table.first_block + len(table.sealed) == num_full
            assert len(table.sealed) == (num_full if kind.window is None else WINDOW // 4)


# ---- requests that cannot be served ---------------------------------------------------------------------------------


def test_a_request_larger_than_the_pool_is_refused_at_once_and_the_small_one_behind_it_is_served(
    open_llm: OpenLLM,
) -> None:
    kv_memory = kv_memory_for(open_llm("llama"), num_running=4, num_rows=12)
    llm = open_llm("llama", kv_memory=kv_memory, max_running=4)  # 12 blocks of 16 tokens and an open one: 207 tokens
    engine = llm.engine
    with pytest.raises(RequestError, match=r"208 prompt tokens \+ max_tokens 1 need .* which holds 207 tokens"):
        engine.submit(tuple(some_tokens(208)), greedy(1))
    engine.submit(tuple(some_tokens(20)), greedy(3))
    assert sum(len(engine.step()) for _ in range(3)) == 3
    assert len(llm.generate([some_tokens(207)], greedy(1))[0].token_ids) == 1
    with pytest.raises(RequestError, match=r"207 prompt tokens \+ max_tokens 2 need"):
        llm.generate([some_tokens(207)], greedy(2))


@pytest.mark.parametrize("bad", [[], [5, 256], [-1], some_tokens(512)], ids=["empty", "unknown", "negative", "long"])
def test_one_refused_prompt_refuses_the_call_and_leaves_nothing(bad: list[int], open_llm: OpenLLM) -> None:
    llm = open_llm("llama")
    with recorded(llm) as record, pytest.raises(RequestError):
        llm.generate([some_tokens(20), bad, some_tokens(9)], greedy(5))
    assert record.steps == []
    assert_idle(llm)
    assert len(llm.generate([some_tokens(20)], greedy(5))[0].token_ids) == 5


# ---- requests that end early ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_pieces", [0, 1, 2, 20])
@every_family
def test_a_stream_left_midway_gives_everything_back_at_once(name: str, num_pieces: int, open_llm: OpenLLM) -> None:
    llm = open_llm(name, max_step_tokens=16)
    stream = llm.stream(some_tokens(50), greedy(60))
    for _ in range(num_pieces):
        next(stream)
    assert (llm.snapshot().usage.num_blocks_used > 0) is (num_pieces > 0)
    stream.close()
    assert_idle(llm)


def test_streams_left_midway_give_everything_back_those_that_wait_too(open_llm: OpenLLM) -> None:
    llm = open_llm("gemma3", max_running=3)
    pieces = llm.stream_many([some_tokens(length) for length in (3, 30, 9, 100, 8)], greedy(30))
    for _ in range(25):
        next(pieces)
    assert (llm.snapshot().num_running, llm.snapshot().num_waiting) == (3, 2)
    pieces.close()
    assert_idle(llm)


@pytest.mark.parametrize("max_running", [1, 2])
@every_family
def test_two_streams_read_in_turns_give_the_text_of_each_alone(name: str, max_running: int, open_llm: OpenLLM) -> None:
    llm = open_llm(name, deterministic=True, max_running=max_running)
    requests = [(some_tokens(40, seed=1), greedy(25)), (some_tokens(7, seed=2), greedy(50))]
    alone = [llm.generate([prompt], params)[0].text for prompt, params in requests]
    first, second = (llm.stream(prompt, params) for prompt, params in requests)
    pairs = [(one and one.text, other and other.text) for one, other in zip_longest(first, second)]
    assert ["".join(filter(None, column)) for column in zip(*pairs, strict=True)] == alone


def test_a_stream_left_midway_does_not_disturb_the_other(open_llm: OpenLLM) -> None:
    llm = open_llm("llama", deterministic=True)
    prompts = [some_tokens(40, seed=1), some_tokens(7, seed=2)]
    alone = llm.generate([prompts[1]], greedy(50))[0]
    left, kept = (llm.stream(prompt, greedy(50)) for prompt in prompts)
    texts = [next(kept).text]
    next(left)
    texts.append(next(kept).text)
    left.close()
    assert llm.snapshot().num_running == 1
    *_, last = pieces = list(kept)
    assert "".join([*texts, *(piece.text for piece in pieces)]) == alone.text
    assert last.completion is not None and last.completion.token_ids == alone.token_ids


@pytest.mark.parametrize(
    ("params", "token_ids", "reason"),
    [
        (SamplingParams(max_tokens=3), [70, 71, 72], "length"),
        (SamplingParams(max_tokens=9), [70, 71, 2], "stop"),  # the end token
        (SamplingParams(max_tokens=9, stop_token_ids=[71]), [70, 71], "stop"),
        (SamplingParams(max_tokens=9, stop="GH"), [70, 71, 72], "stop"),
        (SamplingParams(max_tokens=3, stop="GH"), [70, 71, 72], "stop"),  # both at once
    ],
    ids=["length", "end token", "stop token", "stop string", "stop string at the length"],
)
def test_however_a_request_ends_nothing_is_left(
    params: SamplingParams, token_ids: list[int], reason: str, open_llm: OpenLLM
) -> None:
    llm = open_llm("gemma3", block_tokens=4)
    with forced(llm, token_ids):
        completion = llm.generate([some_tokens(50)], params)[0]
    assert (list(completion.token_ids), completion.finish_reason) == (token_ids, reason)
    assert_idle(llm)


# ---- errors in the middle of a step ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_steps", [1, 3, 12])
@every_family
def test_an_error_in_the_middle_of_a_step_ends_what_runs_and_nothing_else(
    name: str, num_steps: int, open_llm: OpenLLM
) -> None:
    llm = open_llm(name, deterministic=True, max_step_tokens=32, max_running=2)
    prompts = [some_tokens(length, seed=length) for length in (70, 9, 33)]
    expected = llm.generate(prompts, greedy(20))
    with failing(llm, RuntimeError("out of memory"), num_steps), pytest.raises(RuntimeError, match="out of memory"):
        llm.generate(prompts, greedy(20))
    assert_idle(llm)
    assert [done.token_ids for done in llm.generate(prompts, greedy(20))] == [done.token_ids for done in expected]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_in_one_stream_never_shows_as_other_text_in_another(
    error: type[BaseException], open_llm: OpenLLM
) -> None:
    llm = open_llm("llama", deterministic=True)
    alone = llm.generate([some_tokens(7, seed=2)], greedy(20))[0].text
    first, second = llm.stream(some_tokens(40, seed=1), greedy(20)), llm.stream(some_tokens(7, seed=2), greedy(20))
    text = next(second).text
    next(first)
    with failing(llm, error(), num_steps=1), pytest.raises(error):
        list(first)
    with pytest.raises(error):  # what was computed for this one is lost as well
        for piece in second:
            text += piece.text
            assert alone.startswith(text)


def test_logits_that_are_no_numbers_end_the_request_and_nothing_else(open_llm: OpenLLM) -> None:
    llm = open_llm("llama")
    embedding = llm.engine._runner._model.embedding
    with torch.inference_mode():
        before, embedding[5] = embedding[5].clone(), float("nan")
        with pytest.raises(KvfolioError, match="NaN"):
            llm.generate([[5]], greedy(4))
        assert_idle(llm)
        embedding[5] = before
    assert len(llm.generate([[5]], greedy(4))[0].token_ids) == 4


# ---- nothing grows --------------------------------------------------------------------------------------------------


def test_thousands_of_requests_leave_no_memory_behind(open_llm: OpenLLM) -> None:
    llm = open_llm("llama", block_tokens=4, kv_memory="1MiB", max_running=8)
    some_params = [
        greedy(1),
        greedy(2, logprobs=3),
        SamplingParams(max_tokens=2, temperature=1.0, seed=7, stop="Jv"),
        replace(greedy(3), temperature=1.0, top_p=0.9),
    ]

    def serve(num_requests: int, first: int) -> None:
        for number in range(first, first + num_requests, 20):
            prompts = [some_tokens(20, seed=seed) for seed in range(number, number + 20)]
            llm.generate(prompts, [some_params[seed % 4] for seed in range(20)])

    def num_objects() -> int:
        gc.collect()
        return sys.getallocatedblocks()

    serve(500, first=0)
    before = num_objects()
    serve(1500, first=500)
    assert num_objects() - before < 500  # one left by each request would be 1,500; measured 300, then ever fewer
    assert llm.snapshot().counters.num_finished == 2000
    assert_idle(llm)
