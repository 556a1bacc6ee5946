"""Tiny models that LLM opens: those of tiny.py with a longer context and a tokenizer. Ways to look into their engines.

Knows nothing of what is claimed about them.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import tiny
import torch
import transformers
from tiny import TinyModel
from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from kvfolio import LLM, SamplingParams
from kvfolio.sched.request import RequestId, Step

GGUF_FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gemma3", "gpt2"]  # those that run from a GGUF file, too
SPARSE = ["mixtral", "qwen2-moe", "qwen3-moe", "gpt-oss"]
LATENT = ["deepseek-v2", "deepseek-v3"]
FAMILIES = [*GGUF_FAMILIES, "falcon-7b", "falcon-40b", *SPARSE, *LATENT]  # mistral: windows; gemma3, gpt-oss: both
CONTEXT = 512
ODD_FAMILIES = ["llama-odd", "gpt2-odd"]  # widths that fill no vector register
WINDOW = 16  # of mistral, gemma3 and gpt-oss
BOS = 1
TOLERANCE = 1e-4  # measured: 5e-5 at worst, on logits that spread by 1.6

# Tokens of several bytes or of parts of a character. Other ids are printing ASCII, or else two letters: "Ab", "Jv".
PIECES = {
    3: b"DEF",
    4: b"HI",
    5: b"Paris",
    6: "😀".encode()[:2],
    7: "😀".encode()[2:],
    8: "né".encode()[:2],
    9: "é".encode()[1:],
}
TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def make(name: str, folder: Path) -> TinyModel:
    """The tiny model ``name`` for CONTEXT tokens, saved in ``folder`` with a tokenizer."""
    made = _make_odd(name, folder) if name in ODD_FAMILIES else tiny.make(name, folder)
    made.model.config.max_position_embeddings = CONTEXT
    if name.startswith("gpt2"):  # positions are weights
        positions = torch.nn.Embedding(CONTEXT, made.model.config.n_embd)
        with torch.no_grad():
            positions.weight.normal_(0.0, 0.2, generator=torch.Generator().manual_seed(0))
        made.model.transformer.wpe = positions
    made.model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return made


def _make_odd(name: str, folder: Path) -> TinyModel:
    if name == "gpt2-odd":
        sizes = {"n_embd": 60, "n_layer": 3, "n_head": 3, "n_inner": 90, "vocab_size": tiny.VOCAB}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=BOS, eos_token_id=2))
    else:
        odd = {"hidden_size": 60, "intermediate_size": 90, "num_attention_heads": 3, "num_key_value_heads": 1}
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**tiny.SIZES | odd, attention_bias=True))
    generator = torch.Generator().manual_seed(len(name))
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            tiny._fill(key, parameter, name, generator)
    return TinyModel(name, folder, model.eval())


def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE without merges: a character of ASCII is its code; PIECES and pairs come by id only."""
    special = {"<pad>": 0, "<s>": BOS, "</s>": 2}
    vocab = {_spelled(_piece(token_id)): token_id for token_id in range(3, tiny.VOCAB)}
    backend = Backend(models.BPE(vocab={**special, **vocab}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(word) for word in special])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=TEMPLATE, bos_token="<s>", eos_token="</s>", pad_token="<pad>"
    )


def _piece(token_id: int) -> bytes:
    pair = f"{chr(ord('A') + token_id // 26)}{chr(ord('a') + token_id % 26)}"
    return PIECES.get(token_id) or (chr(token_id) if chr(token_id).isprintable() and token_id < 127 else pair).encode()


def _spelled(piece: bytes) -> str:
    """Bytes as letters (GPT-2): a byte that prints is itself, the others follow from U+0100 on."""
    printing = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printing]
    return "".join(chr(byte) if byte in printing else chr(0x100 + others.index(byte)) for byte in piece)


class Recorder:
    """Stands before an engine's runner: keeps every step, the logits of every sampled token and all preemptions."""

    def __init__(self, runner: object) -> None:
        self.runner = runner
        self.steps: list[Step] = []
        self.rows: dict[RequestId, list[Tensor]] = defaultdict(list)  # each [vocab]
        self.preempted: list[tuple[RequestId, int]] = []  # and how many tokens it had generated by then

    def run(self, step: Step) -> Tensor:
        self.preempted += [(request_id, len(self.rows[request_id])) for request_id in step.preempted]
        logits: Tensor = self.runner.run(step)
        self.steps.append(step)
        sampling = [chunk.request_id for chunk in step.chunks if chunk.samples]
        for request_id, row in zip(sampling, logits, strict=True):
            self.rows[request_id].append(row)
        return logits

    def logits(self) -> list[Tensor]:
        """[num_generated, vocab] of each request, in the order in which they were submitted."""
        return [torch.stack(self.rows[request_id]) for request_id in sorted(self.rows) if self.rows[request_id]]


class Script:
    """Stands in for an engine's runner: request after request, the tokens given become the most likely ones."""

    def __init__(self, first_id: int, tokens: Sequence[Sequence[int]]) -> None:
        self.left = {RequestId(first_id + place): list(row) for place, row in enumerate(tokens)}

    def run(self, step: Step) -> Tensor:
        chosen = [self.left[chunk.request_id].pop(0) for chunk in step.chunks if chunk.samples]
        return 9.0 * torch.nn.functional.one_hot(torch.tensor(chosen, dtype=torch.int64), tiny.VOCAB).float()


class Failing:
    """Stands before an engine's runner: its steps end as they should, but one of them raises in the middle."""

    def __init__(self, runner: object, error: BaseException, num_steps: int) -> None:
        self.runner, self.error, self.num_steps = runner, error, num_steps

    def run(self, step: Step) -> Tensor:
        logits: Tensor = self.runner.run(step)
        self.num_steps -= 1
        if self.num_steps == 0:
            raise self.error
        return logits


@contextmanager
def _in_place_of_the_runner(llm: LLM, runner: object) -> Iterator[None]:
    before, llm.engine._runner = llm.engine._runner, runner
    try:
        yield
    finally:
        llm.engine._runner = before


@contextmanager
def recorded(llm: LLM) -> Iterator[Recorder]:
    """Record what ``llm`` computes in the block."""
    recorder = Recorder(llm.engine._runner)
    with _in_place_of_the_runner(llm, recorder):
        yield recorder


@contextmanager
def forced(llm: LLM, *tokens: Sequence[int]) -> Iterator[None]:
    """The next requests generate ``tokens``, a row each, where they are greedy."""
    with _in_place_of_the_runner(llm, Script(llm.engine._next_id, tokens)):
        yield


@contextmanager
def failing(llm: LLM, error: BaseException, num_steps: int) -> Iterator[None]:
    """Step number ``num_steps`` from now raises ``error`` when it has computed and before it has booked anything."""
    with _in_place_of_the_runner(llm, Failing(llm.engine._runner, error, num_steps)):
        yield


def assert_idle(llm: LLM) -> None:
    """Nothing runs and nothing of the requests that ran is left."""
    engine = llm.engine
    engine.ledger.check()
    usage = engine.ledger.usage()
    assert (usage.num_blocks_used, usage.used_bytes, usage.wasted_bytes, usage.num_open_used) == (0, 0, 0, 0)
    assert usage.free_bytes == llm.layout.budget_bytes
    assert not engine.has_work
    assert (engine._params, engine._events, engine._sampler.num_requests, llm._answers) == ({}, [], 0, {})
    assert (engine._uses, engine._prompts, engine._scores) == ({}, {}, {})


def kv_memory_for(llm: LLM, num_running: int, num_rows: int) -> int:
    """kv_memory with which a model like ``llm`` runs ``num_running`` requests on ``num_rows`` blocks in each group.

    Of sinks there are as many as that many requests have.
    A plan gives open blocks a quarter at most: below 3 * num_running rows of lossless blocks, fewer requests run.
    """
    open_row = sum(group.open_block_bytes for group in llm.layout.groups)
    sinks = llm.layout.num_sinks * (llm.layout.first_row_bytes - llm.layout.row_bytes)
    return num_running * (open_row + sinks) + num_rows * llm.layout.row_bytes


def greedy(num_tokens: int, **more: object) -> SamplingParams:
    """Exactly ``num_tokens`` tokens, each the most likely."""
    return SamplingParams(max_tokens=num_tokens, ignore_eos=True, **more)


def assert_greedy(model: TinyModel, prompt: list[int], tokens: Sequence[int], logits: Tensor) -> float:
    """``tokens`` is what transformers generates greedily after ``prompt``; logits [num_generated, vocab] are its own.

    One forward of transformers over prompt and tokens shows both: where every token is the most likely one after
    those before it, they are its greedy answer. Returns the largest difference of a logit.
    """
    expected = model.logits([*prompt, *tokens[:-1]])[len(prompt) - 1 :]
    assert list(tokens) == expected.argmax(-1).tolist()
    torch.testing.assert_close(logits, expected, atol=TOLERANCE, rtol=0)
    return float((logits - expected).abs().max())
