"""What each engine's cache format costs in quality, beside the bits it stores: kvfolio's formats and its peers'.

One text, the same token ids, f32 weights; every cache is held against the exact cache of its own engine by one meter
(llama.cpp, which takes no token ids, measures itself). Peers run where they are installed, and are said to be left
out elsewhere:

    python benchmarks/format_quality.py [--peers PYTHON] [--openvino PYTHON --openvino-model DIR] [--llama-bin DIR]

PYTHON is an interpreter that has transformers with optimum-quanto and hqq, or openvino; DIR an f32 export of the
embedded model by optimum-intel, or the folder of llama-perplexity and llama-quantize.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from peer_llama_quality import BITS, LlamaCaches
from peer_transformers import load_smollm2

from kvfolio import LLM, CacheParams, SamplingParams
from kvfolio.engine.compare import _english
from kvfolio.engine.quality import Quality, QualityMeter
from kvfolio.planner.memory import DEFAULT_BLOCK_TOKENS, bytes_per_token
from kvfolio.sched.request import Step
from kvfolio.spec.formats import FORMATS, find_cache_format
from kvfolio.spec.source import find_default_model

FIRST = 128  # the first position that is scored: the peers' first chunk reads no cache
EXACT_BITS = 16  # what a number that is kept exactly is counted as, in every engine
PEER = Path(__file__).with_name("peer_quant_caches.py")
EARLIER = Path(__file__).parents[2] / "shared" / "peers" / "results.json"  # of another machine; need not be there
EARLIER_KINDS = {"llama.cpp": ("q8_0", "q4_1", "q4_0"), "openvino": ("u8", "u4")}


@dataclass(frozen=True, slots=True)
class Row:
    """One cache format of one engine."""

    engine: str
    cache: str
    bits: float | None  # of one number in the quantised part, as held in this run: scales and zero points included
    bits_16: float | None  # the same where the model computes in 16 bits and scales are kept so
    exact: float | None  # tokens that a sequence keeps exactly, on average while it decodes
    perplexity: float
    reference_perplexity: float | None
    mean_kld: float
    p99_kld: float
    top1: float

    def overall(self, bits: float | None, num_tokens: int) -> float | None:
        """Bits a number of ``num_tokens`` tokens, those kept exactly included."""
        if bits is None or self.exact is None:
            return None
        return (bits * (num_tokens - self.exact) + EXACT_BITS * self.exact) / num_tokens


def row_of(engine: str, cache: str, bits: tuple[float, float, float] | None, found: Quality) -> Row:
    return Row(
        engine,
        cache,
        *(bits or (None, None, None)),
        found.perplexity,
        found.reference_perplexity,
        found.mean_kld,
        found.p99_kld,
        found.top1,
    )


@dataclass(frozen=True, slots=True)
class Passage:
    """What all read, and where logits are kept meanwhile."""

    ids: list[int]
    vocab: int
    folder: Path

    def logits(self, name: str) -> torch.Tensor:
        """[scored positions, vocab] as a file holds them."""
        num_rows = len(self.ids) - FIRST
        path = str(self.folder / name)
        return torch.from_file(path, size=num_rows * self.vocab, dtype=torch.float32).view(num_rows, self.vocab)

    def quality(self, reference: str, found: str) -> Quality:
        """Of all positions from FIRST on that have a token behind them."""
        meter = QualityMeter()
        targets = torch.tensor(self.ids[FIRST + 1 :])
        one, other = self.logits(reference), self.logits(found)
        for at in range(0, len(targets), 256):
            rows = slice(at, min(at + 256, len(targets)))
            meter.add(one[rows], other[rows], targets[rows])
        return meter.result()


class Recorder:
    """Stands before an engine's runner and writes the logits of every prompt token to a file."""

    def __init__(self, runner: Any, path: Path) -> None:
        self.runner = runner
        self.path = path
        self.num_seen = 0

    def run(self, step: Step) -> torch.Tensor:
        logits: torch.Tensor = self.runner.run(step)
        with open(self.path, "ab") as out:
            logits[max(FIRST - self.num_seen, 0) :].float().numpy().tofile(out)
        self.num_seen += len(logits)
        return logits


def our_logits(passage: Passage, kv_format: str, block_tokens: int) -> float:
    """kvfolio over the passage, logits into the file of that name; bits a number."""
    llm = LLM(dtype="f32", kv_format=kv_format, block_tokens=block_tokens, prefix_cache=False)
    llm.engine._runner = Recorder(llm.engine._runner, passage.folder / kv_format)  # type: ignore[assignment]
    llm.generate([passage.ids], SamplingParams(max_tokens=1, prompt_logprobs=0, ignore_eos=True), CacheParams())
    numbers = bytes_per_token(llm.spec, find_cache_format("bf16")) // 2
    return llm.layout.bytes_per_token * 8 / numbers


def ours(passage: Passage, formats: list[str], block_tokens: int) -> Iterator[Row]:
    """kvfolio's formats. A query reads its own block exactly, all before it as stored."""
    our_logits(passage, "f32", block_tokens)
    for kv_format in formats:
        bits = our_logits(passage, kv_format, block_tokens)
        exact = 0.0 if find_cache_format(kv_format).k.is_float else (block_tokens - 1) / 2
        yield row_of("kvfolio", kv_format, (bits, bits, exact), passage.quality("f32", kv_format))
        (passage.folder / kv_format).unlink()


def ask_peer(python: str, *arguments: str) -> Any:
    """What the peer file prints under another interpreter; raises RuntimeError with its words if it fails."""
    done = subprocess.run([python, str(PEER), *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{python} {PEER.name} {' '.join(arguments[:1])} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def peer_rows(passage: Passage, python: str, folder: Path, kinds: list[str], chunk: int) -> Iterator[Row]:
    """The quantised caches of another interpreter against its exact one, the first of ``kinds``."""
    ids = passage.folder / "ids.json"
    ids.write_text(json.dumps(passage.ids))
    for kind in kinds:
        out = passage.folder / kind
        options = ("--chunk", str(chunk), "--first", str(FIRST))
        told = ask_peer(python, "run", str(folder), str(ids), kind, str(out), *options)
        if kind == kinds[0]:
            print(f"{kind} of {python}: {told}")
            between = passage.quality("f32", kind)
            print(f"{kind} against kvfolio's f32: mean KLD {between.mean_kld:.2g}, top-1 {between.top1:.2%}")
            continue
        print(f"{kind}: {told}", flush=True)
        engine, _, cache = kind.rpartition("-")
        bits = (told["bits_f32"], told["bits_bf16"], told["decode_exact_mean"]) if "bits_f32" in told else None
        yield row_of(engine or "transformers", cache, bits, passage.quality(kinds[0], kind))
        out.unlink()
    (passage.folder / kinds[0]).unlink()


def transformers_rows(passage: Passage, python: str, chunk: int) -> Iterator[Row]:
    kinds = [kind for kind in ask_peer(python, "list") if not kind.startswith("openvino")]
    missing = [name for name in ("hqq4", "quanto4") if name not in kinds]
    if missing:
        print(f"left out: {', '.join(missing)} of transformers, not installed for {python}; name one with --peers")
    if len(kinds) < 2:
        return
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        load_smollm2(torch.float32).save_pretrained(folder)
        yield from peer_rows(passage, python, Path(folder), kinds, chunk)


def openvino_rows(passage: Passage, python: str | None, model: Path | None, chunk: int) -> Iterator[Row]:
    if python is None or model is None:
        yield from earlier_rows("openvino", "--openvino and --openvino-model")
        return
    kinds = [kind for kind in ask_peer(python, "list") if kind.startswith("openvino")]
    yield from peer_rows(passage, python, model, kinds, chunk)


def llama_rows(passage: Passage, programs: Path | None, llm_text: str) -> Iterator[Row]:
    if programs is None:
        yield from earlier_rows("llama.cpp", "--llama-bin")
        return
    caches = LlamaCaches(programs, passage.folder, torch.get_num_threads(), len(passage.ids))
    for kind, found in caches.measure(find_default_model(), llm_text, list(EARLIER_KINDS["llama.cpp"])).items():
        numbers = (found["perplexity"], found["reference_perplexity"], found["mean_kld"], found["p99_kld"])
        yield Row("llama.cpp, own half", kind, BITS[kind], BITS[kind], 0.0, *numbers, found["top1_percent"] / 100)


def earlier_rows(engine: str, option: str) -> Iterator[Row]:
    """What another run on another machine found, if its results lie beside this repository."""
    if not EARLIER.is_file():
        print(f"left out: {engine}; give {option}")
        return
    print(f"{engine}: rows of {EARLIER}, another run, machine and text, bf16 or fp16 weights; {option} runs it here")
    rows = {row["workload"]: row for row in json.loads(EARLIER.read_text()) if row["peer"].startswith(engine)}
    for kind in EARLIER_KINDS[engine]:
        row = rows.get(f"W6-{kind}")
        if row is None or "mean_kl" not in row:
            continue
        top1 = row["top1_same"] if "top1_same" in row else row["top1_same_pct"] / 100
        bits = (BITS[kind], BITS[kind], 0.0) if kind in BITS else (None, None, None)
        yield Row(f"{engine}, elsewhere", kind, *bits, row["ppl"], None, row["mean_kl"], row["p99_kl"], top1)


def print_table(rows: list[Row], num_tokens: int) -> None:
    def number(value: float | None, width: int, digits: int) -> str:
        return f"{'?':>{width}}" if value is None else f"{value:{width}.{digits}f}"

    print(f"\n{'':44}bits with exact")
    print(f"{'engine':22}{'cache':12}{'bits':>6}{'exact':>7}{'f32':>8}{'bf16':>7}", end="")
    print(f"{'mean KLD':>11}{'p99 KLD':>10}{'top-1':>9}{'perplexity':>12}{'of exact':>10}")
    for row in rows:
        bits = number(row.bits, 6, 2) + number(row.exact, 7, 1)
        overall = number(row.overall(row.bits, num_tokens), 8, 2) + number(row.overall(row.bits_16, num_tokens), 7, 2)
        print(
            f"{row.engine:22}{row.cache:12}{bits}{overall}{row.mean_kld:11.6f}{row.p99_kld:10.5f}{row.top1:9.2%}"
            f"{row.perplexity:12.4f}{number(row.reference_perplexity, 10, 4)}"
        )
    print(
        "bits: of a number in the quantised part, scales and zero points included. exact: tokens that a sequence keeps"
        f"\nunquantised on average while it decodes; with those at {EXACT_BITS} bits, {num_tokens:,} tokens take the "
        "bits on the right,\nwhere scales are kept as an f32 and as a bf16 model keeps them."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--formats", nargs="+", default=[name for name in FORMATS if name != "f32"])
    parser.add_argument("--block-tokens", type=int, default=DEFAULT_BLOCK_TOKENS)
    parser.add_argument("--chunk", type=int, default=128, help="tokens a peer is fed at a time, and keeps exact")
    parser.add_argument("--peers", metavar="PYTHON", default=sys.executable)
    parser.add_argument("--openvino", metavar="PYTHON")
    parser.add_argument("--openvino-model", type=Path, metavar="DIR")
    parser.add_argument("--llama-bin", type=Path, metavar="DIR")
    args = parser.parse_args()
    llm = LLM(dtype="f32")
    with tempfile.TemporaryDirectory() as folder:
        passage = Passage(_english(llm, args.tokens), llm.spec.network.vocab_size, Path(folder))
        text = llm.tokenizer.decode(_english(llm, args.tokens * 2 + FIRST))
        del llm
        print(f"{args.tokens:,} tokens; scored: positions {FIRST} to {args.tokens - 2}; f32 weights", flush=True)
        rows = list(ours(passage, args.formats, args.block_tokens))
        rows += transformers_rows(passage, args.peers, args.chunk)
        rows += openvino_rows(passage, args.openvino, args.openvino_model, args.chunk)
        rows += llama_rows(passage, args.llama_bin, text)
    print_table(rows, args.tokens)


if __name__ == "__main__":
    main()
