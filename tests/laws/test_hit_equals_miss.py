"""Hit = miss: whatever of a request was in the cache, shared, or copied, its answer is that of a cold run.

To the bit of every logit. Knows nothing of how a hit is found; memory is never short here.
"""

from collections.abc import Callable

import pytest
from cold import FEW, SETTINGS, Setting, Warm, spelled
from served import failing, greedy
from tiny import some_tokens

from kvfolio.engine.params import CacheParams

OpenWarm = Callable[..., Warm]

every_setting = pytest.mark.parametrize("setting", SETTINGS, ids=spelled)
few_settings = pytest.mark.parametrize("setting", FEW, ids=spelled)
every_setting_and_size = pytest.mark.parametrize(
    ("setting", "block_tokens"),
    [*((setting, setting.block_tokens) for setting in SETTINGS), *((setting, 16) for setting in FEW)],
    ids=lambda given: spelled(given) if isinstance(given, Setting) else str(given),
)
few_settings_of_both_sizes = pytest.mark.parametrize(
    ("setting", "block_tokens"),
    [(setting, size) for setting in FEW for size in (4, 16)],
    ids=lambda given: spelled(given) if isinstance(given, Setting) else str(given),
)


# ---- where a hit ends -----------------------------------------------------------------------------------------------


@every_setting_and_size
def test_a_prompt_asked_again_is_all_there_but_its_last_token(
    setting: Setting, block_tokens: int, open_warm: OpenWarm
) -> None:
    warm, prompt = open_warm(setting, block_tokens), some_tokens(45)
    assert warm.cached(prompt, greedy(8)) == 0
    # In a lossy format a hit may end inside the text's open block, not inside a sealed one.
    expected = 44 if setting.is_lossless or block_tokens == 4 else 32
    assert warm.cached(prompt, greedy(8)) == expected
    assert warm.cached(prompt, greedy(8)) == expected


@every_setting_and_size
def test_a_text_stored_beyond_the_prompt_leaves_no_trace(
    setting: Setting, block_tokens: int, open_warm: OpenWarm
) -> None:  # WO-03
    warm = open_warm(setting, block_tokens)
    asked, more, other = some_tokens(22, seed=1), some_tokens(26, seed=2), some_tokens(26, seed=3)
    assert more[0] != other[0]
    warm.ask([asked + more], greedy(8))
    for prompt in (asked, asked + other, asked[:-1], asked + more, asked + more[:1]):
        assert warm.cached(prompt, greedy(8)) >= min(len(asked), len(prompt) - 1) // block_tokens * block_tokens


@pytest.mark.parametrize("beyond", [-1, 0, 1, 2])
@every_setting_and_size
def test_a_hit_ends_where_the_texts_part(setting: Setting, block_tokens: int, beyond: int, open_warm: OpenWarm) -> None:
    warm, common = open_warm(setting, block_tokens), 2 * block_tokens + beyond
    text = some_tokens(4 * block_tokens, seed=4)  # all sealed
    fork = text[:common] + [3 + (token - 2) % 200 for token in text[common:]] + [5, 6]
    warm.ask([text], greedy(1))
    assert warm.cached(fork, greedy(6)) == (common if setting.is_lossless else common // block_tokens * block_tokens)
    last = common - 1  # of a prompt that ends there; it is computed
    expected = last if setting.is_lossless else last // block_tokens * block_tokens
    assert warm.cached(text[:common], greedy(6)) == expected


@every_setting
def test_a_hit_ends_inside_the_open_block_of_a_text_that_has_ended(setting: Setting, open_warm: OpenWarm) -> None:
    warm, text = open_warm(setting, 16), some_tokens(41, seed=5)
    warm.ask([text], greedy(3))  # 43 tokens are written, 11 of them in the open block
    for common in (33, 36, 41):
        assert warm.cached([*text[:common], 7, 8, 9], greedy(5)) == common
    whole = text + warm.cold.answer(text, greedy(3))[0]
    assert warm.cached([*whole[:43], 7], greedy(5)) == 43


@every_setting
def test_a_hit_ends_inside_the_open_block_of_a_text_that_goes_on(setting: Setting, open_warm: OpenWarm) -> None:
    warm, text = open_warm(setting, 16), some_tokens(35, seed=6)
    said = warm.cold.answer(text, greedy(40))[0]
    stream = warm.llm.stream_many([text], greedy(40))
    taken = [next(stream) for _ in range(8)]
    assert len(taken) == 8
    forks = [[*text[:34], 7, 8], [*text, *said[:4], 9], [*text, *said[:6]]]
    assert warm.ask(forks, greedy(20)).cached == [34, 39, 40]
    done = [piece.completion for _, piece in stream if piece.completion is not None]
    assert list(done[0].token_ids) == said


# ---- together -------------------------------------------------------------------------------------------------------


@every_setting_and_size
def test_equal_prompts_in_one_step_are_computed_once(setting: Setting, block_tokens: int, open_warm: OpenWarm) -> None:
    warm, prompt = open_warm(setting, block_tokens), some_tokens(41, seed=7)
    answers = warm.ask([prompt] * 3, greedy(9))
    edge = 40 // block_tokens * block_tokens
    assert answers.cached[0] == 0
    assert all(cached >= edge for cached in answers.cached[1:])
    assert warm.llm.snapshot().counters.num_waits == 2


@pytest.mark.parametrize("step", [5, 1024])
@few_settings_of_both_sizes
def test_eight_requests_with_one_beginning_arrive_together(
    setting: Setting, block_tokens: int, step: int, open_warm: OpenWarm
) -> None:
    warm, beginning = open_warm(setting, block_tokens, max_step_tokens=step, max_running=8), some_tokens(33, seed=8)
    prompts = [beginning + some_tokens(1 + 3 * index, seed=20 + index) for index in range(8)]
    answers = warm.ask(prompts, greedy(12))
    assert all(cached >= 32 for cached in answers.cached[1:])
    warm.ask(prompts[::-1], greedy(12))


@every_setting_and_size
def test_a_conversation_reads_its_own_answers_again(setting: Setting, block_tokens: int, open_warm: OpenWarm) -> None:
    warm, talk, written = open_warm(setting, block_tokens), [], 0
    for turn in range(4):
        talk += some_tokens(9 + turn, seed=30 + turn)
        answers = warm.ask([talk], greedy(11))
        assert answers.cached == [written]  # lossy too: a talk goes on behind the last token written
        talk += answers.tokens[0]
        written = len(talk) - 1  # the last token was never read


@few_settings
def test_a_step_that_fails_when_it_has_written_leaves_nothing_wrong_to_be_found(
    setting: Setting, open_warm: OpenWarm
) -> None:
    warm, prompt = open_warm(setting, 16, max_step_tokens=20), some_tokens(70, seed=9)
    with failing(warm.llm, RuntimeError("a test"), num_steps=2), pytest.raises(RuntimeError, match="a test"):
        warm.llm.generate([prompt], greedy(3))  # its open block held tokens 16 to 19, and then 32 to 39
    assert warm.cached([*prompt[:19], 7], greedy(3)) == 16
    assert warm.cached(prompt, greedy(3)) >= 16


# ---- those who share and those who do not ---------------------------------------------------------------------------


@few_settings
def test_a_request_that_asks_for_no_reuse_computes_everything_and_leaves_it_to_others(
    setting: Setting, open_warm: OpenWarm
) -> None:
    warm, prompt = open_warm(setting), some_tokens(41, seed=40)
    for _ in range(2):
        assert warm.cached(prompt, greedy(5), CacheParams(reuse=False)) == 0
    assert warm.llm.snapshot().counters.num_tokens_computed == 2 * 45
    assert warm.cached(prompt, greedy(5)) == 40


@few_settings
def test_namespaces_never_share_and_answer_alike(setting: Setting, open_warm: OpenWarm) -> None:
    warm, prompt = open_warm(setting), some_tokens(41, seed=41)
    tenants = [CacheParams(name) for name in (None, "", "a", "b")]
    for number, tenant in enumerate(tenants, 1):
        assert warm.cached(prompt, greedy(5), tenant) == 0
        counters = warm.llm.snapshot().counters
        assert (counters.num_tokens_computed, counters.num_hit_tokens) == (number * 45, 0)
    for tenant in tenants:
        assert warm.cached(prompt, greedy(5), tenant) == 40
    assert warm.llm.snapshot().counters.num_hit_tokens == 4 * 40


@few_settings
def test_without_a_prefix_cache_nothing_is_ever_there(setting: Setting, open_warm: OpenWarm) -> None:
    warm, prompt = open_warm(setting, prefix_cache=False), some_tokens(41, seed=42)
    assert warm.ask([prompt, prompt], greedy(5)).cached == [0, 0]
    assert warm.cached(prompt, greedy(5)) == 0
    counters, usage = warm.llm.snapshot().counters, warm.llm.snapshot().usage
    assert (counters.num_tokens_computed, usage.cached_by_group) == (3 * 45, (0,) * len(usage.cached_by_group))
