"""Every miss has a position and a reason, and the words beside it: what broke a prefix shows before it is paid for.

Knows nothing of how a hit is found.
"""

from collections.abc import Callable

import pytest
from served import BOS, forced, greedy, kv_memory_for
from tiny import some_tokens

from kvfolio import LLM
from kvfolio.engine.params import CacheParams
from kvfolio.errors import RequestError

OpenLLM = Callable[..., LLM]
PROMPT = some_tokens(200, seed=1)


@pytest.fixture
def llm(open_llm: OpenLLM) -> LLM:
    return open_llm("llama")


def hit_reason_position(llm: LLM, prompt: list[int] | str, **caching: object) -> tuple[int, str | None, int | None]:
    """What is explained; when it is asked, exactly that happens."""
    asked = CacheParams(**caching)
    found = llm.explain(prompt, asked)
    usage = llm.snapshot().usage
    assert llm.explain(prompt, asked).hit_tokens == found.hit_tokens
    assert llm.snapshot().usage == usage
    return found.hit_tokens, found.reason, found.position


def asked(llm: LLM, prompt: list[int] | str, **caching: object) -> tuple[int, str | None, int | None]:
    """The same from the record of a request that asks."""
    done = llm.generate([prompt], greedy(1), CacheParams(**caching))[0]
    miss = done.cache.miss
    assert done.cache.num_hit_tokens == done.usage.cached_tokens
    return done.usage.cached_tokens, miss and miss.reason, miss and miss.position


def num_common(one: tuple[int, ...], other: tuple[int, ...]) -> int:
    """Tokens that two texts begin with alike."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


def test_tokens_that_nobody_wrote_were_never_seen(llm: LLM) -> None:
    assert hit_reason_position(llm, PROMPT) == asked(llm, PROMPT) == (0, "never seen", 0)


def test_of_a_prompt_asked_again_only_the_last_token_is_computed(llm: LLM) -> None:
    llm.generate([PROMPT], greedy(1))
    assert hit_reason_position(llm, PROMPT) == asked(llm, PROMPT) == (199, None, None)
    found = llm.explain(PROMPT)
    assert (found.before, found.after, found.evicted_ago_s) == ("", "", None)
    assert (found.prompt_tokens, found.is_computed_now) == (200, False)


@pytest.mark.parametrize("share", [0.10, 0.50, 0.95])
@pytest.mark.parametrize("kv_format", ["auto", "int8"])
def test_a_changed_token_is_where_the_hit_ends(share: float, kv_format: str, open_llm: OpenLLM) -> None:  # WO-13
    llm, changed_at = open_llm("llama", kv_format=kv_format), round(share * 200) - 7  # inside a block
    llm.generate([PROMPT], greedy(1))
    changed = [*PROMPT[:changed_at], (PROMPT[changed_at] + 1) % 200 + 3, *PROMPT[changed_at + 1 :]]
    lossless = kv_format == "auto" or changed_at >= 192  # the last block is open: exact in any format
    expected = changed_at if lossless else changed_at // 16 * 16
    found = llm.explain(changed)
    assert hit_reason_position(llm, changed) == (expected, "never seen", expected)
    assert found.before == llm.tokenizer.decode(changed[max(0, expected - 12) : expected])
    assert found.after == llm.tokenizer.decode(changed[expected : expected + 12])
    assert asked(llm, changed) == (expected, "never seen", expected)


def test_a_clock_in_the_system_prompt_shows_beside_the_place_where_the_hit_ends(llm: LLM) -> None:  # WO-13
    def chat(clock: str) -> list[dict[str, str]]:
        system = f"You are a ledger. It is {clock}. Answer in one line."
        return [{"role": "system", "content": system}, {"role": "user", "content": "How many blocks are there?"}]

    llm.chat(chat("09:41"), greedy(1))
    found = llm.explain(chat("09:42"))
    assert found.reason == "never seen"
    assert found.before.endswith("It is 09:4")
    assert found.after.startswith("2. Answer")
    ids = llm.prompt_ids(chat("09:42"))
    common = next(
        at for at, pair in enumerate(zip(ids, llm.prompt_ids(chat("09:41")), strict=True)) if pair[0] != pair[1]
    )
    assert found.hit_tokens == found.position == common
    assert llm.chat(chat("09:42"), greedy(1)).usage.cached_tokens == common
    assert llm.explain(chat("09:42")).reason is None


@pytest.mark.parametrize("keeps_all", [True, False])
def test_a_chat_is_found_again_up_to_where_its_template_rewrites_it(keeps_all: bool, llm: LLM) -> None:  # WO-13
    answers = ["<think>hm</think>one", "<think>ah</think>two", "<think>so</think>three"]
    messages: list[dict[str, str]] = []
    before: tuple[int, ...] = ()
    for answer in answers:
        messages.append({"role": "user", "content": "and then?"})
        ids = llm.prompt_ids(messages)
        common = num_common(ids, before)
        with forced(llm, list(answer.encode())):
            done = llm.chat(messages, greedy(len(answer)))
        assert done.text == answer
        assert done.usage.cached_tokens == common
        before = (*ids, *done.token_ids[:-1])  # the last token was never read
        messages.append({"role": "assistant", "content": answer if keeps_all else answer.rpartition(">")[2]})
    assert llm.explain(messages).hit_tokens == (len(before) if keeps_all else len(ids))


def test_what_was_evicted_was_so_seconds_ago(open_llm: OpenLLM) -> None:
    kv_memory = kv_memory_for(open_llm("llama", block_tokens=4), num_running=2, num_rows=12)
    llm = open_llm("llama", block_tokens=4, kv_memory=kv_memory, max_running=2)
    clock = [1000.0]
    llm.engine.clock = lambda: clock[0]
    llm.generate([PROMPT[:36]], greedy(1))
    clock[0] = 1005.0
    llm.generate([some_tokens(32, seed=2)], greedy(1))
    clock[0] = 1012.5
    found = llm.explain(PROMPT[:36])
    num_left = found.hit_tokens
    assert 0 < num_left < 32
    assert (found.reason, found.position, found.evicted_ago_s) == ("evicted", num_left, 7.5)
    assert asked(llm, PROMPT[:36]) == (num_left, "evicted", num_left)
    assert llm.explain(PROMPT[:36]).evicted_ago_s is None
    assert llm.snapshot().counters.misses == {"never seen": 2, "evicted": 1}


def test_another_namespace_is_named_as_such_but_not_which(llm: LLM) -> None:
    llm.generate([PROMPT], greedy(1), CacheParams("a"))
    for namespace in (None, "", "b"):
        expected = (0, "other namespace", 0)
        assert hit_reason_position(llm, PROMPT, namespace=namespace) == expected
        assert asked(llm, PROMPT, namespace=namespace) == expected
    assert hit_reason_position(llm, PROMPT, namespace="a") == (199, None, None)


def test_other_tokens_at_the_end_were_never_seen_though_they_fill_no_block(llm: LLM) -> None:
    llm.generate([PROMPT[:100]], greedy(1))
    llm.generate([[*PROMPT[:96], 7, 8, 9], [5] * 20], greedy(1))
    expected = (96, "never seen", 96)
    assert hit_reason_position(llm, [*PROMPT[:96], 11, 12, 13]) == asked(llm, [*PROMPT[:96], 11, 12, 13]) == expected
    assert asked(llm, [9, 9]) == (0, "never seen", 0)


def test_a_lossy_block_cannot_be_entered_in_its_middle(open_llm: OpenLLM) -> None:
    llm = open_llm("llama", kv_format="int8")
    llm.generate([PROMPT], greedy(1))
    expected = (32, "tail of a block", 32)
    assert hit_reason_position(llm, PROMPT[:48]) == asked(llm, PROMPT[:48]) == expected


def test_without_a_prefix_cache_that_is_the_reason(open_llm: OpenLLM) -> None:
    llm = open_llm("llama", prefix_cache=False)
    for _ in range(2):
        assert hit_reason_position(llm, PROMPT) == asked(llm, PROMPT) == (0, "prefix cache off", 0)
    assert llm.snapshot().counters.misses == {"prefix cache off": 2}


def test_a_request_that_asks_for_no_reuse_gets_that_reason(llm: LLM) -> None:
    llm.generate([PROMPT], greedy(1))
    expected = (0, "reuse not asked", 0)
    assert hit_reason_position(llm, PROMPT, reuse=False) == asked(llm, PROMPT, reuse=False) == expected


def test_a_prompt_of_one_token_misses_nothing(llm: LLM) -> None:
    for caching in ({}, {"reuse": False}):
        assert hit_reason_position(llm, [BOS], **caching) == asked(llm, [BOS], **caching) == (0, None, None)


def test_every_group_says_how_far_its_own_blocks_reach(open_llm: OpenLLM) -> None:
    kv_memory = kv_memory_for(open_llm("gemma3", block_tokens=4), num_running=2, num_rows=30)
    llm = open_llm("gemma3", block_tokens=4, kv_memory=kv_memory, max_running=2)
    llm.generate([PROMPT[:61]], greedy(1))
    assert {
        (group.kind, group.window, group.num_layers, group.tokens) for group in llm.explain(PROMPT[:61]).groups
    } == {
        ("full", None, 2, 60),
        ("sliding_window", 16, 5, 60),
    }
    for seed in (3, 4, 5):
        llm.generate([some_tokens(61, seed=seed)], greedy(1))
    found = llm.explain(PROMPT[:61])
    assert found.reason == "evicted"
    assert found.hit_tokens <= min(group.tokens for group in found.groups) < 60


def test_what_another_request_computes_now_is_worth_waiting_for(open_llm: OpenLLM) -> None:
    llm = open_llm("llama", max_step_tokens=32)
    llm.engine.submit(tuple(PROMPT), greedy(1))
    llm.engine.step()
    found = llm.explain(PROMPT)
    assert (found.hit_tokens, found.is_computed_now) == (32, True)
    while llm.engine.has_work:
        llm.engine.step()
    assert llm.explain(PROMPT).is_computed_now is False


@pytest.mark.parametrize("prompt", [None, 5, b"ab", [1.5]])
def test_what_is_no_prompt_is_refused(prompt: object, llm: LLM) -> None:
    with pytest.raises(RequestError, match="accepted: a text or a list of token ids"):
        llm.explain(prompt)  # type: ignore[arg-type]


@pytest.mark.parametrize("prompt", [[], [-1] * 20, [5, 10**30]])
def test_what_no_request_could_ask_is_refused_alike(llm: LLM, prompt: list[int]) -> None:
    with pytest.raises(RequestError) as refused:
        llm.explain(prompt)
    with pytest.raises(RequestError) as asked_for_real:
        llm.generate([prompt])
    assert str(refused.value)[:20] == str(asked_for_real.value)[:20]


@pytest.mark.parametrize("given", ["tenant", [], {}, 3])
def test_parameters_of_another_kind_are_refused(llm: LLM, given: object) -> None:
    with pytest.raises(RequestError, match="caching"):
        llm.explain([5, 6], given)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="caching"):
        llm.sequence([5, 6], given)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="params"):
        llm.samples([5, 6], 2, given)  # type: ignore[arg-type]


def test_groups_are_told_with_their_formats_and_sinks(open_llm: OpenLLM) -> None:
    llm = open_llm("gemma3", kv_format="int8", kv_layers="5=exact", sink_blocks=1, block_tokens=4)
    llm.generate([PROMPT], greedy(1))
    told = [(one.kind, one.num_layers, one.format, one.num_sinks, one.tokens) for one in llm.explain(PROMPT).groups]
    assert told == [
        ("sliding_window", 5, "int8", None, 196),
        ("full", 1, "int8", None, 196),
        ("full", 1, "f32", 1, 196),
        ("full", 1, "f32", None, 196),
    ]
