"""Four tiny language models that read bytes and differ in their attention alone, and how one of them is trained.

For ``four_designs.py``, which reads their text, trains them side by side and measures them. Knows nothing of kvfolio.
"""

import json
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

DESIGNS = ("mha", "gqa", "mqa", "mla")
HEAD_WIDTH, NUM_HEADS = 32, 4
WINDOW = 512  # bytes that a model is trained to read, and its context
BODY: dict[str, Any] = {
    "vocab_size": 256,  # the bytes; no start, end or padding
    "max_position_embeddings": WINDOW,
    "hidden_size": HEAD_WIDTH * NUM_HEADS,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": NUM_HEADS,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
}
NUM_KV_HEADS = {"mha": 4, "gqa": 2, "mqa": 1}
LATENT: dict[str, Any] = {
    "num_key_value_heads": NUM_HEADS,
    "q_lora_rank": None,
    "kv_lora_rank": 64,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": HEAD_WIDTH,
    "v_head_dim": HEAD_WIDTH,
    "rope_interleave": True,
    "first_k_dense_replace": BODY["num_hidden_layers"],  # every MLP is dense; the numbers of experts mean nothing
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 32,
    "num_mtp_layers": 0,
}
WARM_UP, LAST_RATE = 50, 0.05  # steps; share of the learning rate at the end
TELL_EVERY_S = 15.0
SAMPLE_BYTES = 8 * WINDOW  # of held-out text that lie beside a saved model, so that it can be checked
SAMPLE, CARD = "held_out.txt", "README.md"


@dataclass(frozen=True, slots=True)
class Training:
    """Everything that a trained model depends on beside its design and the text."""

    steps: int
    batch: int = 4  # windows a step
    matrix_rate: float = 2e-2  # of Muon
    rate: float = 1e-2  # of AdamW
    weight_decay: float = 0.1
    seed: int = 0

    @property
    def tokens(self) -> int:
        """Bytes that are read, some of them more than once."""
        return self.steps * self.batch * WINDOW


def make_model(design: str, seed: int) -> PreTrainedModel:
    """An untrained model, f32."""
    torch.manual_seed(seed)
    if design == "mla":
        return DeepseekV3ForCausalLM(DeepseekV3Config(**BODY, **LATENT))
    return LlamaForCausalLM(LlamaConfig(**BODY, num_key_value_heads=NUM_KV_HEADS[design], head_dim=HEAD_WIDTH))


def byte_tokenizer() -> Tokenizer:
    """One token for each byte, whose id is the byte."""
    letters = byte_letters()
    tokenizer = Tokenizer(models.BPE(vocab={letters[byte]: byte for byte in range(256)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def byte_letters() -> list[str]:
    """How byte-level tokenizers spell each byte: one that prints is itself, the others are letters from U+0100 on."""
    printing = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte if byte in printing else next(others)) for byte in range(256)]


def save(model: PreTrainedModel, folder: Path, card: str, held: bytes) -> None:
    """A Hugging Face folder: weights in bf16, as models are published, tokenizer, card, and the end of ``held``.

    The card says which loss the model, as saved and computed in f32, has on that end.
    """
    model.to(torch.bfloat16).save_pretrained(folder)
    saved = type(model).from_pretrained(folder, dtype=torch.float32)  # ``model`` has its rotary angles in bf16 now
    sample = held[-SAMPLE_BYTES:].decode("utf-8", "ignore")  # a character that is cut is left out
    (folder / SAMPLE).write_bytes(sample.encode())
    loss = loss_of(saved, sample.encode())
    (folder / CARD).write_text(f"{card}\nLoss on {SAMPLE}, by transformers in f32: {loss:.4f} nats a byte.\n")
    byte_tokenizer().save(str(folder / "tokenizer.json"))
    told = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(told, indent=2) + "\n")


@torch.inference_mode()
def loss_of(model: PreTrainedModel, text: bytes) -> float:
    """Nats a byte over whole windows of ``text``, all bytes of a window but the first."""
    windows = as_ids(text)[: len(text) // WINDOW * WINDOW].view(-1, WINDOW)
    logits = model(input_ids=windows).logits[:, :-1]
    return float(functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten()))


def as_ids(text: bytes) -> Tensor:
    """[num_bytes] int64."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8).long()


# ---- training --------------------------------------------------------------------------------------------------------


def batches(text: Tensor, training: Training) -> Iterator[Tensor]:
    """Windows of ``text`` [num_bytes] and the byte behind each: [batch, WINDOW + 1], the same for every design."""
    draw = torch.Generator().manual_seed(training.seed)
    reach = torch.arange(WINDOW + 1)
    for _ in range(training.steps):
        starts = torch.randint(len(text) - WINDOW, (training.batch, 1), generator=draw)
        yield text[starts + reach]


def rate_share(step: int, steps: int) -> float:
    """Of the learning rate: up in a line, down in a cosine."""
    cosine = 0.5 * (1 + math.cos(math.pi * step / steps))
    return min(1.0, (step + 1) / WARM_UP) * (LAST_RATE + (1 - LAST_RATE) * cosine)


def make_optimisers(model: PreTrainedModel, training: Training) -> list[torch.optim.Optimizer]:
    """Muon for the matrices of the layers, AdamW for the embedding, the output and the norms.

    AdamW alone needs twice as many steps here. Muon is in torch since 2.9.
    """
    matrices: list[Tensor] = []
    others: list[Tensor] = []
    for name, weight in model.named_parameters():
        (matrices if weight.dim() == 2 and ".layers." in name else others).append(weight)
    rate, decay = training.matrix_rate, training.weight_decay
    return [
        torch.optim.Muon(matrices, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=training.rate, betas=(0.9, 0.95), weight_decay=0.0, fused=True),
    ]


def train(design: str, text: bytes, training: Training, tell: Callable[[str], None]) -> tuple[PreTrainedModel, float]:
    """A trained model in f32, and the seconds of a median step."""
    model = make_model(design, training.seed).train()
    optimisers = make_optimisers(model, training)
    schedules = [LambdaLR(one, lambda step: rate_share(step, training.steps)) for one in optimisers]
    losses, times, told = [], [], 0.0
    limit = product_flops()
    for step, batch in enumerate(batches(as_ids(text), training), 1):
        started = time.perf_counter()
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        loss = functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimiser, schedule in zip(optimisers, schedules, strict=True):
            optimiser.step()
            schedule.step()
            optimiser.zero_grad()
        losses.append(loss.item())
        times.append(time.perf_counter() - started)
        if sum(times) - told > TELL_EVERY_S or step == training.steps:
            told = sum(times)
            speed = step * training.batch * WINDOW / told
            flops = 6 * model.num_parameters() * speed
            tell(
                f"{design}: step {step:,} of {training.steps:,}, loss {statistics.mean(losses[-50:]):.3f} nats a byte, "
                f"{speed:,.0f} bytes/s ({flops / 1e9:.0f} GFLOP/s in weights; a large product: {limit / 1e9:.0f})"
            )
    return model.eval(), statistics.median(times)


def product_flops() -> float:
    """FLOP/s of a product of 1,024 × 1,024 matrices here: what no training can pass."""
    size, times = 1024, []
    one, other = torch.randn(size, size), torch.randn(size, size)
    for _ in range(5):
        started = time.perf_counter()
        one @ other
        times.append(time.perf_counter() - started)
    return 2 * size**3 / min(times)
