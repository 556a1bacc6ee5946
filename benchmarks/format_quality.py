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

from kvfolio.engine.candidate import DEFAULT_FORMATS, Candidate, parse_candidates
from kvfolio.engine.check import DEFAULT_TOKENS, CheckOptions, check
from kvfolio.engine.english import english_ids
from kvfolio.engine.quality import Quality, QualityMeter
from kvfolio.engine.text import Tokenizer
from kvfolio.spec.source import find_default_model, open_model

FORMATS = (*DEFAULT_FORMATS, "int8@128")  # the last one holds as many tokens exact as the peers' residual window
FIRST = 128  # the first position that is scored: the peers' first chunk reads no cache
ENGINES = ("kvfolio", "transformers", "openvino", "llama.cpp")
EXACT_BITS = 16  # what a number that is kept exactly is counted as, in every engine
PEER = Path(__file__).with_name("peer_quant_caches.py")
CACHES = ["quanto4", "hqq4", "hqq8", "quanto2", "fp8"]
EARLIER_KINDS = {"llama.cpp": ("q8_0", "q4_1", "q4_0"), "openvino": ("u8", "u4")}


@dataclass(frozen=True, slots=True)
class Size:
    """What one number takes; None: not known."""

    quantised: float | None = None  # bits in the quantised part as held in this run, scales and zero points included
    exact: float | None = None  # tokens that a sequence holds unquantised
    total: float | None = None  # bits over all tokens of the text, those held exactly included
    total_16: float | None = None  # the same where the model computes in 16 bits and scales are kept so


@dataclass(frozen=True, slots=True)
class Row:
    """One cache format of one engine."""

    engine: str
    cache: str
    size: Size
    perplexity: float
    reference_perplexity: float | None
    mean_kld: float
    p99_kld: float
    top1: float


def peer_size(told: dict[str, Any], num_tokens: int) -> Size:
    """Out of what the peer file measured; a sequence that decodes, on average."""
    if "bits_f32" not in told:
        return Size()
    exact = told["decode_exact_mean"]
    totals = [
        (told[name] * (num_tokens - exact) + EXACT_BITS * exact) / num_tokens for name in ("bits_f32", "bits_bf16")
    ]
    return Size(told["bits_f32"], exact, *totals)


def quality_row(engine: str, cache: str, size: Size, found: Quality) -> Row:
    numbers = (found.perplexity, found.reference_perplexity, found.mean_kld, found.p99_kld, found.top1)
    return Row(engine, cache, size, *numbers)


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


def ours(candidates: tuple[Candidate, ...], num_tokens: int) -> Iterator[Row]:
    """kvfolio's formats. A query reads its own block exactly, all before it as stored."""
    options = CheckOptions(candidates, tokens=num_tokens, skip=FIRST, needle_tokens=0, speed_tokens=0)
    found = check(options=options)
    numbers = found.reference.size.bytes_per_token / 4  # that a token is remembered by
    for row in found.rows:
        if row.quality is None:
            print(f"left out: {row.name}: {row.failure}")
            continue
        bits, exact = 8 * row.size.bytes_per_token / numbers, float(row.size.block_tokens)
        yield quality_row("kvfolio", row.name, Size(bits, exact, row.size.bits, row.size.bits), row.quality)


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
        options = ("--chunk", str(chunk), "--first", str(FIRST), "--threads", str(torch.get_num_threads()))
        told = ask_peer(python, "run", str(folder), str(ids), kind, str(out), *options)
        if kind == kinds[0]:
            print(f"{kind} of {python}: {told}", flush=True)
            continue
        print(f"{kind}: {told}", flush=True)
        engine, _, cache = kind.rpartition("-")
        size = peer_size(told, len(passage.ids))
        yield quality_row(engine or "transformers", cache, size, passage.quality(kinds[0], kind))
        out.unlink()
    (passage.folder / kinds[0]).unlink()


def transformers_rows(passage: Passage, python: str, chunk: int, caches: list[str]) -> Iterator[Row]:
    kinds = [kind for kind in ask_peer(python, "list") if kind in ("exact", *caches)]
    missing = [name for name in caches if name not in kinds]
    if missing:
        print(f"left out: {', '.join(missing)} of transformers, not installed for {python}; name one with --peers")
    if len(kinds) < 2:
        return
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        load_smollm2(torch.float32).save_pretrained(folder)
        yield from peer_rows(passage, python, Path(folder), kinds, chunk)


def openvino_rows(passage: Passage, python: str, model: Path, chunk: int) -> Iterator[Row]:
    kinds = [kind for kind in ask_peer(python, "list") if kind.startswith("openvino")]
    yield from peer_rows(passage, python, model, kinds, chunk)


def llama_size(kind: str) -> Size:
    """Its caches write a token in their format and read it back at once: none is held exactly."""
    return Size(BITS[kind], 0.0, BITS[kind], BITS[kind]) if kind in BITS else Size()


def llama_rows(passage: Passage, programs: Path, text: str) -> Iterator[Row]:
    caches = LlamaCaches(programs, passage.folder, torch.get_num_threads(), len(passage.ids))
    for kind, found in caches.measure(find_default_model(), text, list(EARLIER_KINDS["llama.cpp"])).items():
        numbers = (found["perplexity"], found["reference_perplexity"], found["mean_kld"], found["p99_kld"])
        yield Row("llama.cpp, own half", kind, llama_size(kind), *numbers, found["top1_percent"] / 100)


def earlier_rows(engine: str, option: str, results: Path | None) -> Iterator[Row]:
    """What another run on another machine found, if its results are given."""
    if results is None:
        print(f"left out: {engine}; give {option}")
        return
    print(f"{engine}: rows of {results}, another run, machine and text, bf16 or fp16 weights; {option} runs it here")
    rows = {row["workload"]: row for row in json.loads(results.read_text()) if row["peer"].startswith(engine)}
    for kind in EARLIER_KINDS[engine]:
        row = rows.get(f"W6-{kind}")
        if row is None or "mean_kl" not in row:
            continue
        top1 = row["top1_same"] if "top1_same" in row else row["top1_same_pct"] / 100
        numbers = (row["ppl"], None, row["mean_kl"], row["p99_kl"])
        yield Row(f"{engine}, elsewhere", kind, llama_size(kind), *numbers, top1)


def announced(rows: Iterator[Row]) -> list[Row]:
    """All of them, each said when it is there: a run takes minutes."""
    found = []
    for row in rows:
        print(
            f"{row.engine} {row.cache}: KLD {row.mean_kld:.6f}, p99 {row.p99_kld:.5f}, top-1 {row.top1:.2%}, "
            f"perplexity {row.perplexity:.4f}",
            flush=True,
        )
        found.append(row)
    return found


def print_table(rows: list[Row]) -> None:
    def number(value: float | None, width: int, digits: int) -> str:
        return f"{'?':>{width}}" if value is None else f"{value:{width}.{digits}f}"

    print(f"\n{'':36}{'quantised':>9}{'exact':>7}{'bits in all':>13}")
    print(f"{'engine':22}{'cache':14}{'bits':>9}{'tokens':>7}{'f32':>6}{'bf16':>7}", end="")
    print(f"{'mean KLD':>11}{'p99 KLD':>10}{'top-1':>9}{'perplexity':>12}{'of exact':>10}")
    for row in rows:
        size = row.size
        bits = number(size.quantised, 9, 2) + number(size.exact, 7, 1)
        print(
            f"{row.engine:22}{row.cache:14}{bits}{number(size.total, 6, 2)}{number(size.total_16, 7, 2)}"
            f"{row.mean_kld:11.6f}{row.p99_kld:10.5f}{row.top1:9.2%}"
            f"{row.perplexity:12.4f}{number(row.reference_perplexity, 10, 4)}"
        )
    print(
        "bits: of a number in the quantised part, scales and zero points included. exact tokens: the open block of "
        f"kvfolio,\nthe residual window of transformers on average while it decodes. bits in all: over the whole text, "
        f"exact numbers at\n{EXACT_BITS} bits, scales as an f32 (this run) and as a bf16 model keeps them."
    )


def rows_of(engine: str, passage: Passage, text: str, args: argparse.Namespace) -> Iterator[Row]:
    """Measured where the engine is given, else out of earlier results."""
    if engine == "kvfolio":
        return ours(args.formats, args.tokens)
    if engine == "transformers":
        return transformers_rows(passage, args.peers, args.chunk, args.caches)
    if engine == "openvino" and args.openvino and args.openvino_model:
        return openvino_rows(passage, args.openvino, args.openvino_model, args.chunk)
    if engine == "llama.cpp" and args.llama_bin:
        return llama_rows(passage, args.llama_bin, text)
    option = "--llama-bin" if engine == "llama.cpp" else "--openvino and --openvino-model"
    return earlier_rows(engine, option, args.earlier)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=DEFAULT_TOKENS)
    parser.add_argument(
        "--formats", type=parse_candidates, default=",".join(FORMATS), help="as `kvfolio check` has them"
    )
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--chunk", type=int, default=128, help="tokens a peer is fed at a time, and keeps exact")
    parser.add_argument("--peers", metavar="PYTHON", default=sys.executable)
    parser.add_argument("--caches", nargs="+", default=CACHES, metavar="CACHE", help="of transformers: %(default)s")
    parser.add_argument("--openvino", metavar="PYTHON")
    parser.add_argument("--openvino-model", type=Path, metavar="DIR")
    parser.add_argument("--llama-bin", type=Path, metavar="DIR")
    parser.add_argument("--earlier", type=Path, metavar="FILE", help="rows of another run, for engines not run here")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="1 where others compute beside")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    source = open_model(find_default_model())
    tokenizer = Tokenizer.load(source.path)
    text = tokenizer.decode(english_ids(tokenizer, args.tokens * 2 + FIRST))
    print(f"{args.tokens:,} tokens; scored: positions {FIRST} to {args.tokens - 2}; f32 weights", flush=True)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        passage = Passage(english_ids(tokenizer, args.tokens), source.spec.network.vocab_size, Path(folder))
        for engine in ENGINES:
            if engine in args.engines:
                rows += announced(rows_of(engine, passage, text, args))
    print_table(rows)


if __name__ == "__main__":
    main()
