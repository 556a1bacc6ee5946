"""A pool that runs dry costs time, never a token: preempted requests resume with the same bits, text and counts.

Knows nothing of who should be preempted (``tests/sched``).
"""

import random
import re
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch
from scheduled import CarelessForecast
from served import FAMILIES, Recorder, greedy, kv_memory_for, recorded
from tiny import some_tokens

from kvfolio import LLM, SamplingParams
from kvfolio.engine.answer import Completion

OpenLLM = Callable[..., LLM]

LENGTHS = [5, 21, 40, 1, 13, 30, 8, 17]  # eight requests, four at a time
NUM_TOKENS = 40
PROMPTS = [some_tokens(length, seed=length) for length in LENGTHS]
DRAWN = [replace(greedy(NUM_TOKENS), temperature=2.0, top_p=0.95, seed=seed) for seed in range(len(PROMPTS))]
WARNING = (
    r"the cache ran dry: request \d+ gave up its blocks to an older one and will be {} "
    r"\(now [\d.]+ (B|KiB) of [\d.]+ KiB free, \d+ running, \d+ waiting, \d+ preemptions so far\); "
    r"more kv_memory avoids this"
)


@dataclass(frozen=True)
class Run:
    """What a workload gave, and what it took."""

    completions: list[Completion]
    record: Recorder
    num_preemptions: int


def run(llm: LLM, params: list[SamplingParams]) -> Run:
    with recorded(llm) as record:
        completions = llm.generate(PROMPTS, params)
    return Run(completions, record, llm.snapshot().counters.num_preemptions)


def open_tight(open_llm: OpenLLM, name: str, num_rows: int | None = None, **options: object) -> LLM:
    """Room for the longest request alone, and for four as they begin, but not for all that four will hold.

    The scheduler is made to expect nothing of that, so that it admits the four.
    """
    options = {"block_tokens": 4, "deterministic": True, **options}
    num_rows = num_rows or (12 if name in ("mistral", "gemma3") else 20)  # windows hold less
    kv_memory = kv_memory_for(open_llm(name, **options), num_running=4, num_rows=num_rows)
    llm = open_llm(name, kv_memory=kv_memory, max_running=4, **options)
    llm.engine.scheduler._forecast = CarelessForecast()
    return llm


def assert_same(found: Run, expected: Run) -> None:
    assert expected.num_preemptions == 0 < found.num_preemptions == len(found.record.preempted)
    for one, other in zip(found.completions, expected.completions, strict=True):
        assert one.token_ids == other.token_ids
        assert one.text == other.text
        assert (one.finish_reason, one.usage, one.logprobs) == (other.finish_reason, other.usage, other.logprobs)
        assert one.usage.completion_tokens == len(one.token_ids)
    for found_logits, expected_logits in zip(found.record.logits(), expected.record.logits(), strict=True):
        assert torch.equal(found_logits, expected_logits)


@pytest.mark.parametrize("params", [[greedy(NUM_TOKENS, logprobs=0)] * len(PROMPTS), DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_pool_that_runs_dry_gives_the_answers_of_one_that_never_does(
    name: str, params: list[SamplingParams], open_llm: OpenLLM, caplog: pytest.LogCaptureFixture
) -> None:
    # ME-04: eight seeded requests.
    roomy = run(open_llm(name, deterministic=True, block_tokens=4), params)
    assert not caplog.messages
    tight = run(open_tight(open_llm, name), params)
    assert_same(tight, roomy)
    assert [completion.usage.prompt_tokens for completion in tight.completions] == LENGTHS
    assert len(caplog.messages) == tight.num_preemptions
    for message in caplog.messages:
        assert re.fullmatch(WARNING.replace("{}", "computed again"), message), message


@pytest.mark.parametrize("name", FAMILIES)
def test_blocks_that_were_swapped_out_come_back_as_they_were(
    name: str, open_llm: OpenLLM, caplog: pytest.LogCaptureFixture
) -> None:
    roomy = run(open_llm(name, deterministic=True, block_tokens=4), DRAWN)
    llm = open_tight(open_llm, name, preemption="swap", swap_memory="1MiB")
    assert_same(run(llm, DRAWN), roomy)
    counters = llm.snapshot().counters
    assert (counters.num_swaps, counters.num_swaps_refused) == (counters.num_preemptions, 0)
    assert counters.num_tokens_computed == sum(length + NUM_TOKENS - 1 for length in LENGTHS)  # none of them twice
    for message in caplog.messages:
        assert re.fullmatch(WARNING.replace("{}", "copied back from the host pool"), message), message


@pytest.mark.parametrize("name", FAMILIES)
def test_preempted_text_streams_without_a_repeat(name: str, open_llm: OpenLLM) -> None:
    roomy = open_llm(name, deterministic=True, block_tokens=4)
    expected = [completion.text for completion in roomy.generate(PROMPTS, DRAWN)]
    tight = open_tight(open_llm, name)
    pieces: dict[int, list[str]] = defaultdict(list)
    for index, piece in tight.stream_many(PROMPTS, DRAWN):
        pieces[index].append(piece.text)
        if piece.completion is not None:
            assert piece.completion.text == expected[index]
    assert ["".join(pieces[index]) for index in range(len(PROMPTS))] == expected
    assert tight.snapshot().counters.num_preemptions > 0


# Prompts take several steps, so that some requests lose their blocks in the midst of theirs.
@pytest.mark.parametrize(
    ("name", "step", "rows"), [("llama", 6, 20), ("qwen2", 6, 20), ("qwen3", 6, 20), ("gemma3", 6, 8), ("gpt2", 6, 20)]
)
def test_before_the_first_token_after_several_and_twice(name: str, step: int, rows: int, open_llm: OpenLLM) -> None:
    roomy = run(open_llm(name, deterministic=True, block_tokens=4), DRAWN)
    tight = run(open_tight(open_llm, name, rows, max_step_tokens=step), DRAWN)
    assert_same(tight, roomy)
    caught = tight.record.preempted
    victims = [request_id for request_id, _ in caught]
    assert any(num_generated == 0 for _, num_generated in caught)
    assert any(num_generated > 3 for _, num_generated in caught)
    assert any(victims.count(request_id) > 1 for request_id in victims)


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2"])
def test_lossy_blocks_are_computed_again_to_the_same_bits(name: str, open_llm: OpenLLM) -> None:
    options = {"deterministic": True, "block_tokens": 4, "kv_format": "int8", "dtype": "bf16"}
    kv_memory = kv_memory_for(open_llm(name, **options), num_running=4, num_rows=21)
    roomy, tight = open_llm(name, **options), open_llm(name, kv_memory=kv_memory, max_running=4, **options)
    tight.engine.scheduler._forecast = CarelessForecast()
    assert_same(run(tight, DRAWN), run(roomy, DRAWN))


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3"])
def test_what_was_lost_is_computed_again_from_the_prompt_on_and_nothing_else_is(name: str, open_llm: OpenLLM) -> None:
    llm = open_tight(open_llm, name)
    steps = run(llm, DRAWN).record.steps
    num_done: dict[int, int] = defaultdict(int)  # tokens of each request that the cache holds
    num_lost = num_found = 0
    for step in steps:
        for request_id in step.preempted:
            num_lost += num_done.pop(request_id, 0)
        for admission in step.admitted:
            num_done[admission.request_id] = admission.num_hit_tokens
            num_found += admission.num_hit_tokens
        for chunk in step.chunks:
            assert chunk.start == num_done[chunk.request_id]
            num_done[chunk.request_id] += len(chunk.token_ids)
    num_needed = sum(length + NUM_TOKENS - 1 for length in LENGTHS)
    assert sum(num_done.values()) == num_needed
    counters = llm.snapshot().counters
    assert counters.num_tokens_computed == num_needed + num_lost - num_found
    assert counters.num_tokens_lost == num_lost >= num_found  # what is still there is not computed again


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FAMILIES)
def test_random_comings_and_goings_on_a_tight_pool_change_no_answer(name: str, seed: int, open_llm: OpenLLM) -> None:
    draw = random.Random(f"{name} {seed}")
    llm = open_tight(open_llm, name, max_step_tokens=draw.choice([5, 16, 40]))
    engine, asked, answers, cancelled = llm.engine, {}, defaultdict(list), set()
    while len(asked) < 25 or engine.has_work:
        if len(asked) < 25 and draw.random() < 0.7:
            prompt = some_tokens(draw.randint(1, 40), seed=draw.randint(0, 10**6))
            params = replace(greedy(draw.randint(1, 40)), temperature=draw.choice([0.0, 2.0]), seed=len(asked))
            asked[engine.submit(tuple(prompt), params)] = prompt, params
        if asked and draw.random() < 0.03:
            cancelled.add(request_id := draw.choice(list(asked)))
            engine.cancel(request_id)
        for output in engine.step():
            answers[output.request_id].append(output.sampled.token_id)
        engine.ledger.check()
    assert llm.snapshot().counters.num_preemptions > 0
    roomy = open_llm(name, deterministic=True, block_tokens=4)
    for request_id, (prompt, params) in asked.items():
        expected = list(roomy.generate([prompt], params)[0].token_ids)
        if request_id in cancelled:
            expected = expected[: len(answers[request_id])]
        assert answers[request_id] == expected
