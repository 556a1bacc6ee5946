"""Samples, forks, rollbacks and beams share blocks and answer as cold runs; a fork takes no bytes until it generates.

Knows nothing of which blocks are shared.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cold import SETTINGS, Cold, Setting, Warm, spelled
from served import greedy, recorded
from tiny import some_tokens

from kvfolio.engine.sequence import TextSequence

OpenWarm = Callable[..., Warm]

every_setting = pytest.mark.parametrize("setting", SETTINGS, ids=spelled)
WIDTH, DEPTH = 3, 6


@every_setting
def test_samples_are_those_of_separate_cold_runs_and_the_prompt_is_computed_once(
    setting: Setting, open_warm: OpenWarm
) -> None:
    warm, prompt = open_warm(setting), some_tokens(42, seed=90)
    params = replace(greedy(12), temperature=1.5, seed=7)
    with recorded(warm.llm) as record:
        samples = warm.llm.samples(prompt, 4, params)
    for index, (sample, logits) in enumerate(zip(samples, record.logits(), strict=True)):
        tokens, expected = warm.cold.answer(prompt, replace(params, seed=7 + index))
        assert list(sample.token_ids) == tokens
        assert torch.equal(logits, expected)
    assert len({sample.token_ids for sample in samples}) == 4
    assert [sample.usage.cached_tokens for sample in samples] == [0, 41, 41, 41]  # the open block is copied
    assert warm.llm.snapshot().counters.num_tokens_computed == 42 + 3 + 4 * 11


def test_a_fork_takes_no_bytes_until_it_generates(open_warm: OpenWarm) -> None:
    warm = open_warm(SETTINGS[0])
    text = warm.llm.sequence(some_tokens(41, seed=91))
    text.generate(greedy(5))
    before = warm.llm.snapshot()
    forks = text.fork(50)
    for fork in forks:
        fork.append([7, 8])
        fork.rollback(5)
    after = warm.llm.snapshot()
    assert after.usage == before.usage
    assert after.counters == before.counters
    cached = before.usage.cached_by_group[0]
    forks[0].generate(greedy(1))
    assert warm.llm.snapshot().usage.cached_by_group[0] == cached  # all its whole blocks are those of the text


@every_setting
def test_a_text_that_grows_forks_and_rolls_back_answers_as_cold_runs(setting: Setting, open_warm: OpenWarm) -> None:
    warm = open_warm(setting)

    def generate(text: TextSequence, num_tokens: int) -> None:
        before = text.token_ids
        with recorded(warm.llm) as record:
            completion = text.generate(greedy(num_tokens))
        tokens, logits = warm.cold.answer(before, greedy(num_tokens))
        assert text.token_ids == (*before, *tokens) == (*before, *completion.token_ids)
        assert torch.equal(record.logits()[0], logits)

    trunk = warm.llm.sequence(some_tokens(30, seed=92))
    generate(trunk, 9)
    left, right = trunk.fork(2)
    left.append([7, 8, 9])
    generate(left, 6)
    right.rollback(5)
    generate(right, 12)
    generate(trunk, 3)
    for k in (1, 2, 5, 8, 10, 17):  # WO-05, QC-08: also behind windows of 16 that have passed
        fork = trunk.fork()[0]
        fork.rollback(k)
        generate(fork, 4)
        fork.rollback(4)
        fork.append([11, 12])
        generate(fork, 2)
    trunk.rollback(len(trunk.token_ids) - 1)
    generate(trunk, 2)


@pytest.mark.parametrize("setting", [one for one in SETTINGS if one.name in ("gemma3", "mistral")], ids=spelled)
def test_a_rollback_behind_a_window_whose_blocks_are_gone_computes_them_again(
    setting: Setting, open_warm: OpenWarm
) -> None:  # WO-05, QC-08
    warm = open_warm(setting, rows=96 // setting.block_tokens)
    text = warm.llm.sequence(some_tokens(60, seed=93))
    text.generate(greedy(8))
    whole = text.token_ids
    for index in range(6):  # others take the memory of what the window has left behind
        warm.ask([some_tokens(30 if setting.block_tokens == 4 else 75, seed=94 + index)], greedy(2))
    assert warm.llm.snapshot().usage.num_evicted > 0
    for k in (1, 2, 5, 8, 10, 40):
        fork = text.fork()[0]
        fork.rollback(k)
        assert list(fork.generate(greedy(4)).token_ids) == warm.cold.answer(whole[: len(whole) - k], greedy(4))[0]


@every_setting
def test_next_tokens_are_those_of_a_cold_run(setting: Setting, open_warm: OpenWarm) -> None:
    warm, prompt = open_warm(setting), some_tokens(38, seed=100)
    text = warm.llm.sequence(prompt)
    for more in ([], [9]):
        text.append(more)
        prompt += more
        expected = best_cold(warm.cold, prompt, 20)
        for k in (1, 5, 20):
            found = text.next_tokens(k)
            assert [token for token, _ in found] == [token for token, _ in expected[:k]]
            assert [logprob for _, logprob in found] == pytest.approx([one for _, one in expected[:k]], abs=1e-5)
        assert text.token_ids == tuple(prompt)


@every_setting
def test_a_beam_search_by_forks_is_that_of_cold_runs(setting: Setting, open_warm: OpenWarm) -> None:
    warm, prompt = open_warm(setting), some_tokens(27, seed=101)
    beams = [(0.0, warm.llm.sequence(prompt))]
    cold = [(0.0, tuple(prompt))]
    for _ in range(DEPTH):
        grown = []
        for score, text in beams:
            for token, logprob in text.next_tokens(WIDTH):
                fork = text.fork()[0]
                fork.append([token])
                grown.append((score + logprob, fork))
        beams = sorted(grown, key=lambda beam: -beam[0])[:WIDTH]
        branches = [
            (score + logprob, (*ids, token))
            for score, ids in cold
            for token, logprob in best_cold(warm.cold, ids, WIDTH)
        ]
        cold = sorted(branches, key=lambda beam: -beam[0])[:WIDTH]
        assert [text.token_ids for _, text in beams] == [ids for _, ids in cold]
        assert [score for score, _ in beams] == pytest.approx([score for score, _ in cold], abs=1e-4)
    computed = warm.llm.snapshot().counters.num_tokens_computed
    assert computed <= len(prompt) + (DEPTH - 1) * WIDTH * (1 if setting.is_lossless else 4)


def best_cold(cold: Cold, ids: tuple[int, ...] | list[int], k: int) -> tuple[tuple[int, float], ...]:
    """The ``k`` most likely tokens behind ``ids`` and their log-probabilities, from the logits of a cold run."""
    logits = cold.answer(ids, greedy(1, logprobs=20))[1][0].float().double()
    order = sorted(range(len(logits)), key=lambda token: (-float(logits[token]), token))[:k]
    total = math.log(float((logits - logits.max()).exp().sum()))
    return tuple((token, float(logits[token] - logits.max()) - total) for token in order)
