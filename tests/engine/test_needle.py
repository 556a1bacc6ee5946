"""The needle: where it lies in the prompts, and which answers count."""

from collections.abc import Callable

import pytest
from tiny import TinyModel

from kvfolio import LLM, OptionError
from kvfolio.engine.english import english_ids
from kvfolio.engine.needle import LEAD, NEEDLE, NUMBERS, Recall, is_recalled, make_haystacks, recall

OpenLLM = Callable[..., LLM]


@pytest.mark.parametrize(
    ("answer", "is_right"),
    [
        (" 71432", True),
        ("71432.", True),
        (' "71432" and so on', True),
        ("714325", False),
        ("7143", False),
        (" 1. 71432", False),
        ("71 432", False),
        ("", False),
    ],
)
def test_an_answer_counts_if_it_is_the_number_and_no_other(answer: str, is_right: bool) -> None:
    assert is_recalled(answer, "71432") is is_right


def test_the_needles_lie_at_even_depths_of_one_text(open_llm: OpenLLM) -> None:
    tokenizer = open_llm("llama").tokenizer
    ids = english_ids(tokenizer, 200)
    haystacks = make_haystacks(tokenizer, ids, 5)
    assert [one.number for one in haystacks] == list(NUMBERS[:5])
    frame = tokenizer.decode(haystacks[0].prompt).replace(NEEDLE.format(number=NUMBERS[0]).strip(), "")
    assert [one.depth for one in haystacks] == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9])
    for place, one in enumerate(haystacks):
        text, needle = (
            tokenizer.decode(one.prompt),
            NEEDLE.format(number=one.number).strip(),
        )  # this tokenizer has no line ends
        before = tokenizer.decode(ids[: 20 + 40 * place])
        assert before + needle in text
        assert text.endswith(LEAD)
        assert "[user]" in text  # through the template
        assert text.replace(needle, "") == frame


@pytest.mark.parametrize("depths", [0, len(NUMBERS) + 1])
def test_more_depths_than_numbers_are_refused(depths: int, open_llm: OpenLLM) -> None:
    with pytest.raises(OptionError, match="depths"):
        make_haystacks(open_llm("llama").tokenizer, (), depths)


def test_a_cache_that_shares_beginnings_answers_as_one_that_does_not(
    open_llm: OpenLLM, served_model: Callable[[str], TinyModel]
) -> None:
    haystacks = make_haystacks(open_llm("llama").tokenizer, english_ids(open_llm("llama").tokenizer, 150), 3)
    done = []
    shared = open_llm("llama", kv_format="int8")
    one = recall(shared, haystacks, done.append)
    assert one == recall(open_llm("llama", kv_format="int8", prefix_cache=False), haystacks, lambda _: None)
    assert shared.snapshot().counters.num_hit_tokens > 0
    assert done == list(haystacks)


def test_agreement_is_of_whole_answers() -> None:
    exact, other = Recall(("1", "2", "3"), (True, False, True)), Recall(("1", "2 ", "3"), (True, False, True))
    assert (exact.num_found, other.num_like(exact)) == (2, 2)
