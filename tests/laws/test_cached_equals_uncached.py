"""Laws 1 and 2: what a query reads and in which order it sums depends on its position alone.

So with ``deterministic``, cached is uncached, a batch is its requests alone, and no chunking, no thread count and no
block that somebody else used before shows in a single bit. Knows nothing of other implementations (``tests/parity``).
"""

from collections.abc import Callable

import pytest
import torch
from served import FAMILIES, ODD_FAMILIES, greedy, recorded
from tiny import some_tokens
from torch import Tensor

from kvfolio import LLM

FORMATS = ["auto", "int8"]
DTYPES = ["f32", "bf16"]
NUM_TOKENS = 40

OpenLLM = Callable[..., LLM]

every_family = pytest.mark.parametrize("name", FAMILIES + ODD_FAMILIES)
every_format = pytest.mark.parametrize("kv_format", FORMATS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES)


def answers(llm: LLM, prompts: list[list[int]], num_tokens: int = NUM_TOKENS) -> list[tuple[tuple[int, ...], Tensor]]:
    """(tokens, logits [num_tokens, vocab]) of each prompt, greedy."""
    with recorded(llm) as record:
        completions = llm.generate(prompts, greedy(num_tokens))
    return [(done.token_ids, logits) for done, logits in zip(completions, record.logits(), strict=True)]


def assert_same_bits(found: tuple[tuple[int, ...], Tensor], expected: tuple[tuple[int, ...], Tensor]) -> None:
    assert found[0] == expected[0]
    different = int((found[1] != expected[1]).sum())
    worst = float((found[1] - expected[1]).abs().max())
    assert different == 0, f"{different} of {found[1].numel()} logits differ, by {worst} at most"


@every_dtype
@every_format
@every_family
def test_decoding_with_the_cache_is_computing_every_token_afresh(
    name: str, kv_format: str, dtype: str, open_llm: OpenLLM
) -> None:
    llm = open_llm(name, deterministic=True, kv_format=kv_format, dtype=dtype)
    prompt = some_tokens(27)  # + 40 tokens: past the window of 16, and over block edges
    tokens, logits = answers(llm, [prompt])[0]
    for count in range(NUM_TOKENS):
        afresh = answers(llm, [[*prompt, *tokens[:count]]], num_tokens=1)[0]
        assert_same_bits(afresh, (tokens[count : count + 1], logits[count : count + 1]))


@every_dtype
@every_format
@every_family
def test_a_batch_is_its_requests_alone(name: str, kv_format: str, dtype: str, open_llm: OpenLLM) -> None:
    llm = open_llm(name, deterministic=True, kv_format=kv_format, dtype=dtype)
    prompts = [some_tokens(length, seed=length) for length in (1, 7, 33, 120, 16, 64, 2)]
    alone = [answers(llm, [prompt])[0] for prompt in prompts]
    for found, expected in zip(answers(llm, prompts), alone, strict=True):
        assert_same_bits(found, expected)
    for found, expected in zip(answers(llm, prompts[::-1]), alone[::-1], strict=True):
        assert_same_bits(found, expected)


@every_dtype
@pytest.mark.parametrize("block_tokens", [4, 16, 64])
@every_format
@every_family
def test_chunks_of_any_size_give_the_same_bits(
    name: str, kv_format: str, block_tokens: int, dtype: str, open_llm: OpenLLM
) -> None:
    options = {"kv_format": kv_format, "block_tokens": block_tokens, "dtype": dtype, "deterministic": True}
    prompt = some_tokens(150)
    whole = answers(open_llm(name, max_step_tokens=1024, **options), [prompt], num_tokens=8)[0]
    for size in (1, 3, 16, 17, 64):
        assert_same_bits(answers(open_llm(name, max_step_tokens=size, **options), [prompt], num_tokens=8)[0], whole)


@every_family
def test_threads_do_not_show(name: str, open_llm: OpenLLM) -> None:
    num_before = torch.get_num_threads()
    prompts = [some_tokens(length, seed=length) for length in (300, 1, 20)]
    try:
        one, three = (
            answers(open_llm(name, deterministic=True, kv_format="int8", threads=threads), prompts, num_tokens=4)
            for threads in (1, 3)
        )
    finally:
        torch.set_num_threads(num_before)
    for found, expected in zip(three, one, strict=True):
        assert_same_bits(found, expected)


@every_format
@every_family
def test_what_a_longer_prompt_left_behind_does_not_show(name: str, kv_format: str, open_llm: OpenLLM) -> None:
    asked, longer = some_tokens(50, seed=1), some_tokens(70, seed=2)
    asked_next = [asked, [*asked, *some_tokens(9, seed=3)], asked[:-1]]
    options = {"deterministic": True, "kv_format": kv_format, "max_running": 1}
    used = open_llm(name, **options)
    answers(used, [asked + longer])
    for prompt in asked_next:
        assert_same_bits(answers(used, [prompt])[0], answers(open_llm(name, **options), [prompt])[0])


@pytest.mark.parametrize("block_tokens", [4, 16, 64])
@every_family
def test_a_lossy_format_shows_behind_the_first_block_and_never_in_it(
    name: str, block_tokens: int, open_llm: OpenLLM
) -> None:
    options = {"deterministic": True, "block_tokens": block_tokens}
    exact, lossy = open_llm(name, **options), open_llm(name, kv_format="int8", **options)
    for length in (1, block_tokens):  # the last token of the block still reads it exactly, though it is full by then
        prompt = some_tokens(length)
        assert_same_bits(answers(lossy, [prompt], num_tokens=1)[0], answers(exact, [prompt], num_tokens=1)[0])
    prompt = some_tokens(block_tokens + 1)
    difference = (answers(lossy, [prompt], 1)[0][1] - answers(exact, [prompt], 1)[0][1]).abs().max()
    assert 0 < difference < 0.3  # measured: 0.14 at worst, on logits that spread by 1.6


@pytest.mark.parametrize(("name", "kv_format"), [("gemma3", "auto"), ("mistral", "int8"), ("gpt2", "int8")])
def test_the_torch_kernels_keep_these_laws_too(
    name: str, kv_format: str, open_llm: OpenLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvfolio.engine.machine.NativeOps", None)  # as on a device, or without a compiler
    options = {"kv_format": kv_format, "deterministic": True}
    llm, prompt = open_llm(name, **options), some_tokens(45)
    assert llm.ops_name == "reference"
    expected = answers(llm, [prompt], num_tokens=10)[0]
    for size in (3, 16, 17):
        chunked = open_llm(name, max_step_tokens=size, **options)
        assert_same_bits(answers(chunked, [prompt], num_tokens=10)[0], expected)
    assert_same_bits(answers(llm, [some_tokens(20, seed=1), prompt], num_tokens=10)[1], expected)
    tokens, logits = expected
    assert_same_bits(answers(llm, [[*prompt, *tokens[:7]]], num_tokens=1)[0], (tokens[7:8], logits[7:8]))
