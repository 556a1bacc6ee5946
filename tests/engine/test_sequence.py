"""A text that grows, forks and rolls back, as bookkeeping: its tokens, what it refuses, what it asks to compute.

Knows nothing of whether its answers are right (``tests/laws/test_forks.py``).
"""

from collections.abc import Callable

import pytest
from served import BOS, greedy
from tiny import some_tokens

from kvfolio import LLM, RequestError
from kvfolio.engine.params import CacheParams
from kvfolio.errors import OptionError

OpenLLM = Callable[..., LLM]
CHAT = [{"role": "user", "content": "hello"}]


@pytest.fixture
def llm(open_llm: OpenLLM) -> LLM:
    return open_llm("llama")


def test_a_sequence_begins_with_a_text_with_token_ids_or_with_a_conversation(llm: LLM) -> None:
    assert llm.sequence("hello").token_ids == (BOS, *b"hello")
    assert llm.sequence([5, 6]).token_ids == (5, 6)
    assert llm.sequence(CHAT).token_ids == llm.prompt_ids(CHAT)
    assert llm.sequence().token_ids == ()


def test_text_is_appended_as_it_is_and_tokens_too(llm: LLM) -> None:
    text = llm.sequence("hello")
    text.append(" you")
    text.append([5])
    text.append([])
    text.append("")
    assert text.token_ids == (BOS, *b"hello you", 5)  # no second start token
    assert text.text.endswith("hello youParis")


def test_a_rollback_takes_the_last_tokens(llm: LLM) -> None:
    text = llm.sequence([5, 6, 7, 8])
    text.rollback(0)
    assert text.token_ids == (5, 6, 7, 8)
    text.rollback(1)
    assert text.token_ids == (5, 6, 7)
    text.rollback(3)
    assert text.token_ids == ()
    text.rollback(0)
    with pytest.raises(OptionError, match=r"^k is 1; .*0 to 0, the tokens there are"):
        text.rollback(1)


@pytest.mark.parametrize("k", [-1, 5, 1.0, True, None, "1"])
def test_a_rollback_of_what_is_not_there_is_refused_and_changes_nothing(k: object, llm: LLM) -> None:
    text = llm.sequence([5, 6, 7, 8])
    with pytest.raises(OptionError, match=r"^k is .*accepted: a whole number, 0 to 4"):
        text.rollback(k)  # type: ignore[arg-type]
    assert text.token_ids == (5, 6, 7, 8)


def test_forks_go_their_own_ways(llm: LLM) -> None:
    trunk = llm.sequence([5, 6, 7])
    one, two = trunk.fork(2)
    assert one.token_ids == two.token_ids == trunk.token_ids
    one.append([8])
    two.rollback(2)
    trunk.append([9])
    assert [text.token_ids for text in (trunk, one, two)] == [(5, 6, 7, 9), (5, 6, 7, 8), (5,)]
    (only,) = one.fork()
    assert only.token_ids == (5, 6, 7, 8)


@pytest.mark.parametrize("n", [0, -1, 1.0, True, None, "2", (1 << 16) + 1])
def test_a_number_of_forks_that_makes_no_sense_is_refused(n: object, llm: LLM) -> None:
    with pytest.raises(OptionError, match=r"^n is "):
        llm.sequence([5]).fork(n)  # type: ignore[arg-type]


@pytest.mark.parametrize("k", [0, 21, 1.0, True, None])
def test_a_number_of_next_tokens_that_makes_no_sense_is_refused(k: object, llm: LLM) -> None:
    with pytest.raises(OptionError, match=r"^k is .*1 to 20"):
        llm.sequence([5]).next_tokens(k)  # type: ignore[arg-type]


def test_an_empty_sequence_has_nothing_to_go_on_from(llm: LLM) -> None:
    text = llm.sequence()
    with pytest.raises(RequestError, match="prompt is empty"):
        text.generate(greedy(1))
    with pytest.raises(RequestError, match="prompt is empty"):
        text.next_tokens()


@pytest.mark.parametrize("more", [None, 5, b"ab", {"a": 1}, [1.5], [None], ["a"]])
def test_what_is_no_text_and_no_token_ids_is_refused_and_changes_nothing(more: object, llm: LLM) -> None:
    text = llm.sequence([5, 6])
    with pytest.raises(RequestError, match="accepted: a text or a list of token ids"):
        text.append(more)  # type: ignore[arg-type]
    assert text.token_ids == (5, 6)


def test_only_generate_and_next_tokens_compute(llm: LLM) -> None:
    text = llm.sequence(some_tokens(20))
    text.append("abc")
    text.rollback(1)
    text.fork(3)
    assert text.text
    assert llm.snapshot().counters.num_steps == 0
    best = text.next_tokens()
    assert len(best) == 5
    assert [logprob for _, logprob in best] == sorted((logprob for _, logprob in best), reverse=True)
    assert llm.snapshot().counters.num_tokens_computed == 22
    done = text.generate(greedy(3))
    assert done.token_ids[0] == best[0][0]
    assert text.token_ids[-3:] == done.token_ids
    assert llm.snapshot().counters.num_tokens_computed == 22 + 3  # the last token of the prompt, and two behind it


def test_a_sequence_and_its_forks_stay_in_their_namespace(llm: LLM) -> None:
    prompt = some_tokens(40)
    text = llm.sequence(prompt, CacheParams("a"))
    assert text.generate(greedy(1)).usage.cached_tokens == 0
    assert llm.sequence(prompt).fork()[0].generate(greedy(1)).usage.cached_tokens == 0
    assert llm.sequence(prompt, CacheParams("a")).fork()[0].generate(greedy(1)).usage.cached_tokens == 39
