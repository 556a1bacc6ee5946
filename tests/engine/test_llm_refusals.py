"""What LLM refuses: every bad argument is an error of kvfolio that names what was given and what is accepted.

Knows nothing of what is right in an answer.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from served import greedy
from tiny import TinyModel, some_tokens

from kvfolio import LLM, BrokenModelError, BudgetError, KvfolioError, OptionError, RequestError, SamplingParams

OpenLLM = Callable[..., LLM]
FindModel = Callable[[str], TinyModel]


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"colour": 1}, OptionError, "'colour'; known: kv_memory, kv_format, block_tokens"),
        ({"dtype": "f8"}, OptionError, "dtype is 'f8'; accepted: f32, bf16, f16, auto"),
        ({"dtype": None}, OptionError, "dtype is None"),
        ({"device": "gpu"}, OptionError, "device 'gpu' cannot be used .* try cpu"),
        ({"device": "meta"}, OptionError, "device 'meta' cannot be used .* try cpu"),
        ({"device": None}, OptionError, "device is None"),
        ({"threads": 0}, OptionError, "threads is 0; accepted: a whole number, 1 to 1024"),
        ({"threads": 10**9}, OptionError, "threads is 1000000000"),  # the OpenMP runtime would end the process
        ({"threads": "2"}, OptionError, "threads is '2'"),
        ({"kv_format": "int7"}, KvfolioError, "unknown format 'int7' of keys; known: f32, bf16, f16, fp8, fp8-scaled"),
        ({"kv_format": "int8/int4-channel"}, KvfolioError, "unknown format 'int4-channel' of values"),
        (
            {"kv_format": "k8v4", "block_tokens": 8},
            KvfolioError,
            "block_tokens is 8; int4 packs 16 tokens: at least 16",
        ),
        ({"kv_format": "bf16/"}, KvfolioError, "unknown format ''"),
        ({"kv_format": 8}, OptionError, "kv_format is 8"),
        ({"block_tokens": 5}, OptionError, r"block_tokens is 5; accepted: \(4, 8, 16"),
        ({"block_tokens": 16.0}, OptionError, "block_tokens is 16.0"),
        ({"kv_layers": 3}, OptionError, "kv_layers is 3"),
        ({"kv_layers": "0-3=int8"}, OptionError, "layers 0 to 3, but the model has 3 layers: 0 to 2"),
        ({"kv_layers": "2-0=int8"}, OptionError, "give 0-2"),
        ({"kv_layers": "2=int9"}, KvfolioError, "kv_layers, layer 2: unknown format 'int9'"),
        ({"sink_blocks": -1}, OptionError, "sink_blocks is -1; accepted: a whole number, 0 or more"),
        ({"sink_blocks": None}, OptionError, "sink_blocks is None"),
        ({"max_running": 0}, OptionError, "max_running is 0"),
        ({"max_running": "4"}, OptionError, "max_running is '4'"),
        ({"max_step_tokens": 0}, OptionError, "max_step_tokens is 0"),
        ({"max_step_tokens": None}, OptionError, "max_step_tokens is None"),
        ({"deterministic": "yes"}, OptionError, "deterministic is 'yes'; accepted: True or False"),
        ({"kv_memory": "lots"}, OptionError, "'lots' is not a size; write a number with a unit"),
        ({"kv_memory": 1.5e6}, OptionError, "kv_memory is 1500000.0"),
        ({"kv_memory": -1}, OptionError, "-1"),
        ({"kv_memory": 0}, OptionError, "kv_memory is 0 bytes"),
        # 3 layers, 2 heads, 16 + 16 numbers of 4 bytes: a block of 16 tokens takes 12,288 B, sealed or open
        ({"kv_memory": 24_575}, BudgetError, r"24,575 B\) is smaller than one block: .* give at least 24,576 B"),
        ({"kv_memory": "64TiB"}, BudgetError, r"64.00 TiB of kv_memory .* kv_memory can be at most [\d.]+ [GT]iB"),
    ],
)
def test_a_bad_option_is_refused_with_what_is_accepted(
    options: dict[str, Any], error: type[KvfolioError], message: str, served_model: FindModel
) -> None:
    with pytest.raises(error, match=message):
        LLM(served_model("llama").folder, **options)


def test_the_smallest_pool_that_is_named_works(open_llm: OpenLLM) -> None:
    llm = open_llm("llama", kv_memory=24_576)
    assert len(llm.generate([some_tokens(31)], greedy(1))[0].token_ids) == 1
    with pytest.raises(RequestError, match="which holds 31 tokens"):
        llm.generate([some_tokens(31)], greedy(2))


def test_a_model_that_can_only_be_planned_is_not_said_to_be_unknown() -> None:
    with pytest.raises(BrokenModelError, match="can be planned by its name, but its weights are not here"):
        LLM("gpt-oss-20b")


def test_a_model_that_is_not_there_is_refused_by_its_path(tmp_path: Path, served_model: FindModel) -> None:
    with pytest.raises(BrokenModelError, match="/nowhere/at/all does not exist; give a folder"):
        LLM("/nowhere/at/all")
    with pytest.raises(BrokenModelError, match="downloads from the hub are not supported"):
        LLM("somebody/a-model")
    with pytest.raises(BrokenModelError, match=r"has no config\.json"):
        LLM(tmp_path)
    for file in served_model("llama").folder.iterdir():
        if "token" not in file.name:
            (tmp_path / file.name).write_bytes(file.read_bytes())
    with pytest.raises(BrokenModelError, match="holds no tokenizer"):
        LLM(tmp_path)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([], "the prompt is empty: it needs at least 1 token"),
        ([5, 256], "token id 256 is outside the model's vocabulary of 256"),
        ([-1], "token id -1 is outside"),
        ([10**30], "is outside the model's vocabulary of 256"),
        (some_tokens(512), "the prompt has 512 tokens; .* is 512, .* shorten the prompt to at most 511"),
        (some_tokens(500), "500 prompt tokens .* max_tokens 20 exceed .* context of 512: ask for at most 12"),
        ([1.5], r"a prompt is \[1.5\]; accepted: a text or a list of token ids"),
        (["a"], r"a prompt is \['a'\]"),
        (None, "a prompt is None"),
        (7, "a prompt is 7"),
        ({"role": "user", "content": "x"}, "a prompt is {'role'"),
        ("\ud800", "cannot be encoded; accepted: a string of valid Unicode"),
    ],
    ids=str,
)
def test_a_prompt_that_cannot_be_served_is_refused_with_numbers(prompt: Any, message: str, open_llm: OpenLLM) -> None:
    llm = open_llm("llama")
    with pytest.raises(RequestError, match=message):
        llm.generate([prompt], greedy(20))
    with pytest.raises(RequestError, match=message):
        list(llm.stream(prompt, greedy(20)))


@pytest.mark.parametrize("prompts", [None, 7])
def test_what_is_no_list_of_prompts_is_refused(prompts: Any, open_llm: OpenLLM) -> None:
    with pytest.raises(RequestError, match=f"prompts is {prompts}; accepted: a text, or a list"):
        open_llm("llama").generate(prompts)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([greedy(1)], "2 prompts but 1 params: give one for all or one for each"),
        ([greedy(1)] * 3, "2 prompts but 3 params"),
        ({"max_tokens": 3}, "params is {'max_tokens': 3}; accepted: SamplingParams, or a list of them"),
        ([greedy(1), None], "accepted: SamplingParams"),
        (5, "params is 5"),
    ],
)
def test_parameters_that_do_not_match_the_prompts_are_refused(params: Any, message: str, open_llm: OpenLLM) -> None:
    with pytest.raises(RequestError, match=message):
        open_llm("llama").generate(["a", "b"], params)


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "messages is"),
        ("hello", "messages is 'hello'"),
        ([{"role": "user"}], r"messages\[0\] is given as \['role'\]"),
        ([{"role": "user", "content": None}], r"messages\[0\].content is None"),
    ],
)
def test_a_chat_that_is_none_is_refused(messages: Any, message: str, open_llm: OpenLLM) -> None:
    with pytest.raises(RequestError, match=message):
        open_llm("llama").chat(messages, SamplingParams(max_tokens=1))


@pytest.mark.parametrize("prompts", [b"abc", {"role": "user"}, [b"abc"], [{"a": 1}]])
def test_bytes_and_mappings_are_no_prompts(prompts: object, open_llm: "Callable[..., LLM]") -> None:
    llm = open_llm("llama")
    with pytest.raises(RequestError, match="accepted"):
        llm.generate(prompts)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="accepted"):
        list(llm.stream_many(prompts))  # type: ignore[arg-type]
