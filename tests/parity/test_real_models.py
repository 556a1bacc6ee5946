"""LLM on real models against transformers, greedy in f32: SmolLM2 135M, and Gemma 3 270M far past its window.

Knows nothing of speed. Both models are installed as packages; without one its tests are skipped.
"""

from pathlib import Path
from pydoc_data.topics import topics

import from_gguf
import torch
import transformers
from real_models import (
    GEMMA_WINDOW,
    assemble_gemma3,
    gemma3_config,
    needs_gemma3,
    needs_smollm2,
    smollm2_config,
)
from served import greedy, recorded
from torch import Tensor

from kvfolio import LLM
from kvfolio.spec.source import find_default_model

QUESTIONS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "1, 1, 2, 3, 5, 8,",
    "Once upon a time, in a village by the sea,",
]
CHAT = [{"role": "user", "content": "What is a ledger? Answer in one sentence."}]


def assert_greedy(
    model: transformers.PreTrainedModel, prompt: list[int], tokens: tuple[int, ...], ours: Tensor
) -> None:
    """Transformers, without a cache, generates ``tokens`` greedily, from logits ``ours`` [num_generated, vocab]."""
    ids = torch.tensor([[*prompt, *tokens[:-1]]])
    with torch.inference_mode():
        theirs = model(ids, use_cache=False, logits_to_keep=len(tokens)).logits[0]
    assert theirs.argmax(-1).tolist() == list(tokens)
    torch.testing.assert_close(ours, theirs, atol=1e-3, rtol=0)  # measured: 1e-4 at worst


@needs_smollm2
def test_smollm2_generates_the_tokens_of_transformers() -> None:
    smollm2 = LLM(dtype="f32", kv_memory="64MiB")
    model = from_gguf.load(find_default_model(), smollm2_config())
    tokenizer = smollm2.tokenizer
    prompts = [*(tokenizer.encode(text) for text in QUESTIONS), tokenizer.encode_chat(CHAT)]
    with recorded(smollm2) as record:
        completions = smollm2.generate(prompts, greedy(64))
    for prompt, done, logits in zip(prompts, completions, record.logits(), strict=True):
        assert len(done.token_ids) == 64
        assert_greedy(model, prompt, done.token_ids, logits)


@needs_gemma3
def test_gemma3_far_past_its_window_generates_the_tokens_of_transformers_and_holds_a_window(tmp_path: Path) -> None:
    file = assemble_gemma3(tmp_path)
    gemma3 = LLM(file, dtype="f32", kv_memory="64MiB")
    text = "".join(topics[name] for name in ("assert", "class", "with", "function", "import"))
    prompt = gemma3.tokenizer.encode(text)[:1500]
    assert len(prompt) == 1500
    layers = {group.group.kind.window: group.group.num_layers for group in gemma3.layout.groups}
    assert layers == {GEMMA_WINDOW: 15, None: 3}
    windows, engine, tokens = [group.group.kind.window for group in gemma3.layout.groups], gemma3.engine, []
    with recorded(gemma3) as record:
        engine.submit(tuple(prompt), greedy(20))
        while engine.has_work:
            tokens += [output.sampled.token_id for output in engine.step()]
            if tokens and engine.has_work:
                num_full = (len(prompt) + len(tokens) - 1) // 16  # the token just sampled is not in the cache yet
                for window, num_held in zip(windows, engine.snapshot().usage.sealed_by_group, strict=True):
                    assert num_held == num_full if window is None else num_held <= GEMMA_WINDOW // 16
    assert len(tokens) == 20
    assert_greedy(from_gguf.load(file, gemma3_config()), prompt, tuple(tokens), record.logits()[0])
