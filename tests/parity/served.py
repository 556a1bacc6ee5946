"""Tiny models that LLM opens: those of tiny.py with a longer context and a tokenizer; what their engines compute, recorded.

Knows nothing of what is claimed about them.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import tiny
import torch
from tiny import TinyModel
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kvfolio import LLM, SamplingParams
from kvfolio.sched.request import RequestId, Step

FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma3", "gpt2"]  # mistral: windows only; gemma3: windows and full
CONTEXT = 512
WINDOW = 16  # of mistral and gemma3
BOS = 1
TOLERANCE = 1e-4  # measured: 3e-5 at worst, on logits that spread by 1.6

# Tokens of several bytes, in the place of control characters: decoded as they are, never made by encoding text.
PIECES = {
    3: b"DEF",
    4: b"HI",
    5: b"Paris",
    6: "😀".encode()[:2],
    7: "😀".encode()[2:],
    8: "né".encode()[:2],
}
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def make(name: str, folder: Path) -> TinyModel:
    """The tiny model ``name`` for CONTEXT tokens, saved in ``folder`` with a tokenizer whose ids are bytes."""
    made = tiny.make(name, folder)
    made.model.config.max_position_embeddings = CONTEXT
    if name == "gpt2":  # positions are weights
        positions = torch.nn.Embedding(CONTEXT, 64)
        with torch.no_grad():
            positions.weight.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(0))
        made.model.transformer.wpe = positions
    made.model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return made


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE without merges: the id of a byte is its value, but for three special tokens and PIECES."""
    letters = {letter: byte for byte, letter in _letters().items()}
    vocab = {letter: byte for letter, byte in letters.items() if byte > 2 and byte not in PIECES}
    for token_id, piece in PIECES.items():
        vocab["".join(_letters()[byte] for byte in piece)] = token_id
    special = {"<pad>": 0, "<s>": BOS, "</s>": 2}
    backend = Backend(models.BPE(vocab={**special, **vocab}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(word) for word in special])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=TEMPLATE, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def _letters() -> dict[int, str]:
    """Byte → its letter in byte-level BPE (GPT-2): printing bytes are themselves, others follow from U+0100 on."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printing]
    return {byte: chr(byte) for byte in printing} | {byte: chr(0x100 + place) for place, byte in enumerate(others)}


class Recorder:
    """Stands before an engine's runner: keeps every step and the logits of every sampled token."""

    def __init__(self, runner: object) -> None:
        self.runner = runner
        self.steps: list[Step] = []
        self.rows: dict[RequestId, list[Tensor]] = defaultdict(list)  # each [vocab]

    def run(self, step: Step) -> Tensor:
        logits: Tensor = self.runner.run(step)
        self.steps.append(step)
        sampling = [chunk.request_id for chunk in step.chunks if chunk.samples]
        for request_id, row in zip(sampling, logits, strict=True):
            self.rows[request_id].append(row)
        return logits

    def logits(self) -> list[Tensor]:
        """[num_generated, vocab] of each request, in the order in which they were submitted."""
        return [torch.stack(self.rows[request_id]) for request_id in sorted(self.rows)]


@contextmanager
def recorded(llm: LLM) -> Iterator[Recorder]:
    """Record what ``llm`` computes in the block."""
    runner = llm.engine._runner
    recorder = Recorder(runner)
    llm.engine._runner = recorder
    try:
        yield recorder
    finally:
        llm.engine._runner = runner


def assert_idle(llm: LLM) -> None:
    """Nothing runs and nothing of the requests that ran is left."""
    engine = llm.engine
    engine.ledger.check()
    usage = engine.ledger.usage()
    assert (usage.num_blocks_used, usage.used_bytes, usage.wasted_bytes, usage.num_open_used) == (0, 0, 0, 0)
    assert usage.free_bytes == llm.layout.budget_bytes
    assert not engine.has_work
    assert (engine._params, engine._events, engine._sampler.num_requests, llm._answers) == ({}, [], 0, {})


def greedy(num_tokens: int, **more: object) -> SamplingParams:
    """Exactly ``num_tokens`` tokens, each the most likely."""
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True, **more)


def assert_greedy(model: TinyModel, prompt: list[int], tokens: Sequence[int], logits: Tensor) -> float:
    """``tokens`` is what transformers generates greedily after ``prompt``, and logits [num_generated, vocab] are its own.

    One forward of transformers over prompt and tokens shows both: where every token is the most likely one after
    those before it, they are its greedy answer. Returns the largest difference of a logit.
    """
    expected = model.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    assert list(tokens) == expected.argmax(-1).tolist()
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    return float((logits - expected).abs().max())
