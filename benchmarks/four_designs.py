"""Same body, four designs: what MHA, GQA, MQA and MLA attention cost in cache, and what they bring in quality.

    python benchmarks/four_designs.py --text FILE [FILE ...] [--out DIR] [--minutes 12] [--json]

Trains four byte-level models of equal width, depth and MLP from nothing, on the same bytes in the same order, one on
each core at a time, and saves each as a Hugging Face folder. Then, of each: its loss on text that none was trained on,
with the cache exact and stored as int8 and int4 (kvfolio's engine); its cache; and how many users of 8,192 tokens an
H100 of 80 GB holds if the body is Llama 3.1 8B's (``kvfolio.plan``).

The published table is of "Pride and Prejudice" by Jane Austen, in the public domain: Project Gutenberg's number 1342
(gutenberg.org/ebooks/1342, and github.com/GITenberg), the book alone, from its title to its last sentence. Held out are
the last 5 % of every text. Without --text the models read the language reference that ships with Python: that runs
anywhere, and its losses compare with no others.
"""

import argparse
import hashlib
import json
import math
import multiprocessing
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from pydoc_data import topics
from typing import Any

import tiny_models
import torch
from tiny_models import DESIGNS, WINDOW, Training
from transformers.utils import logging

import kvfolio
from kvfolio import LLM, KvfolioError, SamplingParams

HELD_SHARE = 0.05  # of every text, at its end
SKIP = 128  # bytes of a window before the first that is scored: int4 stores blocks of 64
NUM_WINDOWS = 64  # of the held-out text that are scored
FORMATS = ("f32", "int8", "int4")
DEVICE, CONTEXT = "h100-sxm", 8192
PROBE_STEPS = 20  # by which the speed is known before the steps are decided
OTHER_SHARE = 0.1  # of the minutes: importing, measuring
ALL_HEADS = {"mha": 32, "gqa": 8, "mqa": 1}
LARGE_BODY = {  # Llama 3.1 8B
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
}
LARGE_LATENT = {  # heads and latent of DeepSeek-V3, all MLPs dense
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_key_value_heads": 32,
    "q_lora_rank": None,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "first_k_dense_replace": LARGE_BODY["num_hidden_layers"],
    "n_routed_experts": 2,
    "n_shared_experts": 1,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 32,
    "num_nextn_predict_layers": 0,
}


@dataclass(frozen=True, slots=True)
class Text:
    """What is read, and what is kept from the models."""

    names: tuple[str, ...]
    sha256: str  # of all bytes in their order
    trained: bytes
    held: bytes


@dataclass(frozen=True, slots=True)
class Row:
    """One design. Losses are nats a byte; a text is why there is none."""

    design: str
    num_parameters: int
    cache_bytes: int  # of one token, bf16
    losses: dict[str, float | str]  # format of the cache → loss on the held-out text
    large_parameters: int  # the same design on the large body, as the next two
    large_cache_bytes: int
    large_users: int | None


def read_text(files: list[Path]) -> Text:
    """The last part of every file is held out."""
    parts = [path.read_bytes() for path in files]
    if not parts:
        parts = ["\n\n".join(topics.topics[name] for name in sorted(topics.topics)).encode()]
    cuts = [len(part) - int(len(part) * HELD_SHARE) for part in parts]
    return Text(
        tuple(path.name for path in files) or ("Python's language reference",),
        hashlib.sha256(b"".join(parts)).hexdigest(),
        b"".join(part[:cut] for part, cut in zip(parts, cuts, strict=True)),
        b"".join(part[cut:] for part, cut in zip(parts, cuts, strict=True)),
    )


# ---- training, one design a core -------------------------------------------------------------------------------------


def train_one(design: str, text: Text, training: Training, folder: Path | None) -> float:
    """Train in this process, save if there is a folder. Seconds of a step."""
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # attention becomes so sharp that its least weights would slow down every product
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    tell = (lambda line: print(line, flush=True)) if folder else (lambda line: None)
    model, step_s = tiny_models.train(design, text.trained, training, tell)
    if folder is not None:
        tiny_models.save(model, folder, card_of(design, text, training), text.held)
    return step_s


def card_of(design: str, text: Text, training: Training) -> str:
    """What lies beside the weights for people to read."""
    return (
        f"# A tiny language model with {design.upper()} attention\n\n"
        f"Reads and writes bytes, {WINDOW} at most. Made by benchmarks/four_designs.py of kvfolio, "
        f"`--steps {training.steps}`:\n\n"
        f"- text: {', '.join(text.names)}, {len(text.trained) + len(text.held):,} bytes, SHA-256 {text.sha256};\n"
        f"  the last {HELD_SHARE:.0%} were never trained on\n"
        f"- {training.steps:,} steps of {training.batch} windows, {training.tokens:,} bytes read; "
        f"Muon at {training.matrix_rate}, AdamW at {training.rate}, weight decay {training.weight_decay}, "
        f"seed {training.seed}\n"
    )


def open_pool(num_jobs: int) -> ProcessPoolExecutor:
    """Two processes of one thread each are as quick as one of two threads, and do not wait for each other."""
    return ProcessPoolExecutor(num_workers(num_jobs), multiprocessing.get_context("spawn"))


def num_workers(num_jobs: int) -> int:
    return min(num_jobs, os.cpu_count() or 1)


def train_all(designs: list[str], text: Text, training: Training, out: Path | None) -> list[float]:
    """Seconds of a step of each design."""
    with open_pool(len(designs)) as pool:
        jobs = [pool.submit(train_one, one, text, training, out / one if out else None) for one in designs]
        return [job.result() for job in jobs]


def steps_within(minutes: float, designs: list[str], text: Text) -> int:
    """Steps that every design can take so that all of them end in time, by a short run of each."""
    times = train_all(designs, text, Training(PROBE_STEPS), None)
    workers = num_workers(len(designs))
    rounds = [max(times[at : at + workers]) for at in range(0, len(times), workers)]
    return max(1, int(minutes * 60 * (1 - OTHER_SHARE) / sum(rounds)))


# ---- measuring -------------------------------------------------------------------------------------------------------


def windows_of(held: bytes) -> list[list[int]]:
    """Evenly spread over the held-out text; a byte is a token."""
    most = min(NUM_WINDOWS, len(held) // WINDOW)
    stride = (len(held) - WINDOW) // max(1, most - 1)
    return [list(held[at * stride : at * stride + WINDOW]) for at in range(most)]


def held_out_loss(folder: Path, windows: list[list[int]], kv_format: str) -> float:
    """Nats a byte, computed in f32; a query reads its own block exactly, all before it as stored."""
    llm = LLM(str(folder), dtype="f32", kv_format=kv_format, kv_memory="64MiB", prefix_cache=False, threads=1)
    params = SamplingParams(max_tokens=1, ignore_eos=True, prompt_logprobs=0)
    losses = []
    for done in llm.generate([window[:-1] for window in windows], params):
        losses += [-one for one in (done.prompt_logprobs or ())[SKIP:] if one is not None]
    return sum(losses) / len(losses)


def measure(design: str, folder: Path, windows: list[list[int]]) -> Row:
    losses: dict[str, float | str] = {}
    for kv_format in FORMATS:
        try:
            losses[kv_format] = held_out_loss(folder, windows, kv_format)
        except KvfolioError as error:
            losses[kv_format] = str(error)
    small, large = kvfolio.plan(folder), plan_large(design)
    return Row(
        design,
        small.model.num_parameters,
        round(small.kv.bytes_per_token),
        losses,
        large.model.num_parameters,
        round(large.kv.bytes_per_token),
        large.users.reserved,
    )


def plan_large(design: str) -> Any:
    """The plan of this design on the body of Llama 3.1 8B."""
    own = LARGE_LATENT if design == "mla" else {"model_type": "llama", "num_key_value_heads": ALL_HEADS[design]}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(LARGE_BODY | own))
        return kvfolio.plan(path, device=DEVICE, context=CONTEXT, kv_format="bf16")


def print_table(rows: list[Row]) -> None:
    print(f"\n{'':8}{'small':>12}{'cache':>9}{'loss, nats a byte, cache as':>33}{'':8}{'at 8B':>8}{'cache':>10}")
    names = "".join(f"{name:>11}" for name in FORMATS)
    print(f"{'design':8}{'parameters':>12}{'B/token':>9}{names}{'bits/B':>8}{'params':>8}{'B/token':>10}{'users':>7}")
    for row in rows:
        losses = [row.losses[name] for name in FORMATS]
        shown = "".join(f"{one:11.4f}" if isinstance(one, float) else f"{'-':>11}" for one in losses)
        bits = f"{losses[0] / math.log(2):8.3f}" if isinstance(losses[0], float) else f"{'-':>8}"
        users = "?" if row.large_users is None else f"{row.large_users:,}"
        print(
            f"{row.design:8}{row.num_parameters:12,}{row.cache_bytes:9,}{shown}{bits}"
            f"{row.large_parameters / 1e9:7.2f}B{row.large_cache_bytes:10,}{users:>7}"
        )
    print(f"users: of {CONTEXT:,} tokens each, bf16, on one {DEVICE}; losses of bytes with {SKIP} or more before them.")
    for row in rows:
        for name, loss in row.losses.items():
            if isinstance(loss, str):
                print(f"{row.design} in {name}: {loss}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, nargs="+", default=[], metavar="FILE")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where the four folders go; none: a temporary one")
    parser.add_argument("--minutes", type=float, default=12.0, help="for everything, on a quiet machine: %(default)s")
    parser.add_argument("--steps", type=int, help="of every design, instead of what --minutes allow")
    parser.add_argument("--designs", nargs="+", choices=DESIGNS, default=list(DESIGNS))
    parser.add_argument("--eval-only", type=Path, metavar="DIR", help="measure what an earlier run left there")
    parser.add_argument("--json", action="store_true", help="the table as JSON on the last line")
    args = parser.parse_args()
    started = time.perf_counter()
    missing = [str(path) for path in args.text if not path.is_file()]
    if args.eval_only is not None:
        missing += [str(args.eval_only / one) for one in args.designs if not (args.eval_only / one).is_dir()]
    if missing:
        parser.error(f"{', '.join(missing)}: not there; give files, and the designs that are in the folder (--designs)")
    text = read_text(args.text)
    least = round(WINDOW / HELD_SHARE)
    if len(text.held) < WINDOW:
        parser.error(f"the text is too short to hold out a window of {WINDOW} bytes; give {least:,} bytes or more")
    print(f"{', '.join(text.names)}, SHA-256 {text.sha256}:")
    print(f"{len(text.trained):,} bytes to train on, {len(text.held):,} held out", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        out = args.eval_only or args.out or Path(folder)
        training: Training | None = None
        if args.eval_only is None:
            training = Training(args.steps or steps_within(args.minutes, args.designs, text))
            print(f"{training}: {training.tokens:,} bytes read by each", flush=True)
            train_all(args.designs, text, training, out)
        windows = windows_of(text.held)
        with open_pool(len(args.designs)) as pool:
            rows = [job.result() for job in [pool.submit(measure, one, out / one, windows) for one in args.designs]]
    print_table(rows)
    print(f"{(time.perf_counter() - started) / 60:.1f} minutes in all")
    if args.json:
        told = {
            "text": text.names,
            "sha256": text.sha256,
            "training": asdict(training) if training else None,
            "rows": list(map(asdict, rows)),
        }
        print(json.dumps(told))


if __name__ == "__main__":
    main()
