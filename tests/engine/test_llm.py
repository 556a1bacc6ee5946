"""The front door: prompts in, completions out; texts, stops, log-probabilities, streams and seeds.

Knows nothing of whether the tokens are right (``tests/parity``) or of what is left behind (``tests/laws``).
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from served import BOS, PIECES, forced, greedy, recorded
from tiny import TinyModel, some_tokens

from kvfolio import LLM, SamplingParams

OpenLLM = Callable[..., LLM]
FindModel = Callable[[str], TinyModel]

CHAT = [
    {"role": "user", "content": "hello"},
    {"role": "assistant", "content": "yes?"},
    {"role": "user", "content": "x"},
]


def ids(text: str) -> list[int]:
    """Token ids of ASCII text, and of the PIECES where the text writes them as <3>."""
    return [int(part[1:-1]) if part.startswith("<") else ord(part) for part in _parts(text)]


def _parts(text: str) -> list[str]:
    head, found, rest = text.partition("<")
    if not found:
        return list(head)
    number, _, rest = rest.partition(">")
    return [*head, f"<{number}>", *_parts(rest)]


@pytest.fixture
def llm(open_llm: OpenLLM) -> LLM:
    return open_llm("llama")


# ---- prompts and completions ----------------------------------------------------------------------------------------


def test_completions_come_in_the_order_of_the_prompts_whichever_ends_first(llm: LLM) -> None:
    prompts = [some_tokens(length, seed=length) for length in (40, 3, 9)]
    params = [greedy(20), greedy(1), greedy(7)]
    alone = [llm.generate([prompt], one)[0] for prompt, one in zip(prompts, params, strict=True)]
    together = llm.generate(prompts, params)
    assert [done.token_ids for done in together] == [done.token_ids for done in alone]
    assert [done.usage.prompt_tokens for done in together] == [40, 3, 9]
    assert [done.usage.completion_tokens for done in together] == [20, 1, 7]
    assert [done.finish_reason for done in together] == ["length"] * 3
    for done in together:
        assert 0 < done.ttft_s <= done.time_s
    assert [done.usage.cached_tokens for done in alone] == [0, 0, 0]
    assert [done.usage.cached_tokens for done in together] == [39, 2, 8]  # all but the last token


def test_a_prompt_is_a_text_a_list_of_texts_or_a_list_of_token_ids(llm: LLM) -> None:
    expected = llm.generate([[BOS, *b"hello"]], greedy(5))
    assert expected[0].usage.prompt_tokens == 6
    for prompts in ("hello", ["hello"], [torch.tensor([BOS, *b"hello"])]):
        assert [done.token_ids for done in llm.generate(prompts, greedy(5))] == [expected[0].token_ids]
    assert llm.generate([]) == []


def test_the_text_is_that_of_the_tokens(llm: LLM) -> None:
    done = llm.generate([some_tokens(9)], greedy(30))[0]
    assert done.text == llm.tokenizer.decode(done.token_ids)
    assert len(done.text) >= 30


def test_an_empty_text_runs_on_the_start_token(llm: LLM) -> None:
    assert llm.generate("", greedy(5))[0].token_ids == llm.generate([[BOS]], greedy(5))[0].token_ids


def test_a_chat_is_read_through_the_template_with_one_start_token(llm: LLM) -> None:
    with recorded(llm) as record:
        done = llm.chat(CHAT, greedy(5))
    expected = [BOS, *b"[user]hello[assistant]yes?[user]x[assistant]"]
    assert list(record.steps[0].chunks[0].token_ids) == expected
    assert done.usage.prompt_tokens == len(expected)
    *_, last = llm.stream(CHAT, greedy(5))
    assert last.completion is not None and last.completion.token_ids == done.token_ids


def test_without_parameters_256_tokens_or_the_end_token(llm: LLM) -> None:
    with forced(llm, [70] * 256, [70, 71, 2]):
        first, second = llm.generate(["a", "b"])
    assert (len(first.token_ids), first.finish_reason) == (256, "length")
    assert (second.token_ids, second.finish_reason) == ((70, 71, 2), "stop")


# ---- where an answer ends -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streams", [False, True], ids=["generate", "stream"])
@pytest.mark.parametrize(
    ("tokens", "stop", "text", "reason"),
    [
        ("ab<3>G<4>Jcd", "DEFGHIJ", "ab", "stop"),  # over four tokens
        ("ab<5>cd", "Pari", "ab", "stop"),  # inside one
        ("abcdefgh", ["cdx", "cd"], "ab", "stop"),
        ("abcdefgh", ["cd", "cde"], "ab", "stop"),  # one begins the other
        ("abcdefgh", ["h"], "abcdefg", "stop"),  # the last token
        ("a<3>G<4>K", "DEFGHIJ", "aDEFGHIK", "length"),  # a near miss
        ("abc<3>", "DEFG", "abcDEF", "length"),  # held back until the end
        ("a<6><7>b", "😀", "a", "stop"),  # over a split character
        ("a<6><7>b", "b", "a😀", "stop"),
        ("x<8><9>y", "é", "xn", "stop"),
        ("a<2>b", "b", "a", "stop"),  # the end token comes first
        ("ab", "a", "", "stop"),
    ],
)
def test_a_stop_string_ends_the_text_right_before_it(
    tokens: str, stop: str | list[str], text: str, reason: str, streams: bool, llm: LLM
) -> None:
    params = SamplingParams(max_tokens=len(ids(tokens)), stop=stop)
    with forced(llm, ids(tokens)):
        if streams:
            *_, last = pieces = list(llm.stream("q", params))
            done = last.completion
            assert done is not None
            assert "".join(piece.text for piece in pieces) == text  # not a character too many on the way
        else:
            done = llm.generate("q", params)[0]
    assert (done.text, done.finish_reason) == (text, reason)


def test_nothing_is_computed_behind_a_stop(llm: LLM) -> None:
    steps_before = llm.snapshot().counters.num_steps
    with forced(llm, ids("abcdefgh"), ids("abc<2>efgh"), ids("abcdefgh")):
        params = [SamplingParams(stop="b"), SamplingParams(), SamplingParams(stop_token_ids=[ord("d")])]
        completions = llm.generate([[70], [71], [72]], params)  # nobody waits for a beginning that another computes
    assert [len(done.token_ids) for done in completions] == [2, 4, 4]
    assert [done.text for done in completions] == ["a", "abc", "abcd"]
    assert llm.snapshot().counters.num_steps - steps_before == 4


def test_stop_tokens_join_the_end_token_and_ignore_eos_leaves_them_alone(llm: LLM) -> None:
    script = [70, 2, 71, 72, 73]
    stops = SamplingParams(max_tokens=5, stop_token_ids=[72])
    with forced(llm, script, script, script):
        completions = llm.generate(
            ["a"] * 3, [stops, replace(stops, ignore_eos=True), replace(stops, ignore_eos=True, stop_token_ids=())]
        )
    assert [len(done.token_ids) for done in completions] == [2, 4, 5]
    assert [done.finish_reason for done in completions] == ["stop", "stop", "length"]


def test_each_of_several_end_tokens_ends_an_answer(served_model: FindModel, tmp_path: Path) -> None:
    folder = served_model("llama").folder
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 90]}')
    llm = LLM(tmp_path, kv_memory="8MiB")
    with forced(llm, [70, 90, 71], [70, 71, 2]):
        first, second = llm.generate(["a", "b"])
    assert (first.token_ids, second.token_ids) == ((70, 90), (70, 71, 2))
    assert first.finish_reason == second.finish_reason == "stop"


# ---- streams --------------------------------------------------------------------------------------------------------


def test_pieces_join_to_the_text_and_never_break_a_character(llm: LLM) -> None:
    tokens = ids("a<6><7>b<8><9>c<6><7><6><7>")
    with forced(llm, tokens):
        *_, last = pieces = list(llm.stream("q", SamplingParams(max_tokens=len(tokens))))
    assert "".join(piece.text for piece in pieces) == "a😀bnéc😀😀"
    assert [piece.text for piece in pieces if "\ufffd" in piece.text] == []
    assert last.completion is not None and last.completion.text == "a😀bnéc😀😀"
    assert [piece.completion for piece in pieces[:-1]] == [None] * (len(pieces) - 1)


def test_a_character_that_stays_open_is_shown_as_broken_at_the_very_end(llm: LLM) -> None:
    with forced(llm, ids("ab<6>")):
        pieces = [piece.text for piece in llm.stream("q", SamplingParams(max_tokens=3))]
    assert pieces == ["a", "b", "\ufffd"]
    assert b"".join([b"ab", PIECES[6]]).decode(errors="replace") == "ab\ufffd"


def test_text_comes_as_it_is_generated(llm: LLM) -> None:
    stream = llm.stream(some_tokens(9), greedy(40))
    next(stream)
    assert llm.snapshot().counters.num_steps == 1
    next(stream)
    assert llm.snapshot().counters.num_steps == 2
    stream.close()


# ---- log-probabilities ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("params", [greedy(12), replace(greedy(12), temperature=2.0, seed=1)], ids=["greedy", "drawn"])
def test_logprobs_are_those_of_the_logits(params: SamplingParams, llm: LLM) -> None:
    prompts = [some_tokens(9), some_tokens(30)]
    with recorded(llm) as record:
        completions = llm.generate(prompts, [replace(params, logprobs=5), replace(params, logprobs=0)])
    for done, logits, num_top in zip(completions, record.logits(), (5, 0), strict=True):
        expected = logits.log_softmax(-1)  # [num_generated, vocab]
        assert done.logprobs is not None and done.top_logprobs is not None
        chosen = expected.gather(1, torch.tensor(done.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(torch.tensor(done.logprobs), chosen, atol=1e-3, rtol=0)
        for row, top in zip(expected, done.top_logprobs, strict=True):
            best = row.topk(num_top)
            assert [token_id for token_id, _ in top] == best.indices.tolist()
            torch.testing.assert_close(torch.tensor([value for _, value in top]), best.values, atol=1e-3, rtol=0)


def test_without_logprobs_there_are_none(llm: LLM) -> None:
    done = llm.generate("a", greedy(3))[0]
    assert (done.logprobs, done.top_logprobs) == (None, None)


# ---- seeds ----------------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_answer_alone_and_in_any_company(open_llm: OpenLLM) -> None:
    llm = open_llm("llama", deterministic=True)
    params = [replace(greedy(30), temperature=1.5, top_k=40, seed=seed) for seed in range(4)]
    prompt = some_tokens(9)
    alone = [llm.generate([prompt], one)[0].token_ids for one in params]
    assert [done.token_ids for done in llm.generate([prompt] * 4, params)] == alone
    assert [done.token_ids for done in llm.generate([prompt] * 4, params[::-1])] == alone[::-1]
    assert len(set(alone)) == 4


def test_without_a_seed_each_answer_is_another(llm: LLM) -> None:
    params = replace(greedy(30), temperature=2.0)
    answers = {llm.generate([[5]], params)[0].token_ids for _ in range(3)}
    answers |= {done.token_ids for done in llm.generate([[5], [5]], params)}
    assert len(answers) == 5
