"""How quickly the ledger serves requests: look-up, admission, grants, commits and release, hashing included, no model.

4,096-token requests, half of each shared by all, 16-token blocks; then one more token at a time; then the look-up of a
50,000-token prompt. With --peer PYTHON (an interpreter that has vLLM) its KV-cache manager does the same in turn.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path

from kvfolio.cache.digest import NATIVE
from kvfolio.cache.holding import SequenceId
from kvfolio.cache.ledger import Ledger
from kvfolio.cache.prefix import Scope, TokenChain
from kvfolio.spec.formats import CacheFormat, find_format
from kvfolio.spec.layers import FullAttention
from kvfolio.spec.layout import CacheLayout, GroupLayout
from kvfolio.spec.model import LayerGroup

TOKENS, BLOCK_TOKENS, VOCAB, LONG = 4096, 16, 49152, 50_000
APPENDED = 16  # tokens, one at a time, by every request
PEER = Path(__file__).with_name("peer_vllm_ledger.py")


def layout_for(num_blocks: int) -> CacheLayout:
    """SmolLM2's cache in bf16."""
    fmt = CacheFormat(find_format("bf16"), find_format("bf16"))
    group = LayerGroup(FullAttention(3, 64, 64), tuple(range(30)))
    size = group.block_bytes(BLOCK_TOKENS, fmt)
    return CacheLayout(
        (GroupLayout(group, fmt, size, size, num_blocks, 4096),), BLOCK_TOKENS, fmt, fmt, num_blocks * size
    )


def prompts(num_requests: int, draw: random.Random) -> list[list[int]]:
    shared = [draw.randrange(VOCAB) for _ in range(TOKENS // 2)]
    return [shared + [draw.randrange(VOCAB) for _ in range(TOKENS // 2)] for _ in range(num_requests)]


def cycle(num_requests: int, seed: int) -> dict[str, float]:
    """One pass on a fresh ledger; seconds a request, unless said otherwise."""
    texts = prompts(num_requests, random.Random(seed))
    ledger = Ledger(layout_for(num_requests * TOKENS // BLOCK_TOKENS + 1024))
    clock, spent = time.perf_counter, {"lookup": 0.0, "grant": 0.0, "commit": 0.0}
    chains = []
    for number, text in enumerate(texts):
        begin = clock()
        chain = TokenChain(text, Scope(), BLOCK_TOKENS)
        hit = ledger.lookup(chain, TOKENS - 1)
        looked_up = clock()
        sequence = SequenceId(number)
        ledger.admit(sequence, chain, hit)
        grant = ledger.extend(sequence, TOKENS - hit.num_tokens)
        granted = clock()
        ledger.commit(sequence)
        spent["commit"] += clock() - granted
        spent["lookup"] += looked_up - begin
        spent["grant"] += granted - looked_up
        assert grant is not None and hit.num_tokens == (TOKENS // 2 if number else 0)
        chains.append(chain)
    begin = clock()
    for step in range(APPENDED):
        for number, chain in enumerate(chains):
            chain.append(step)
            ledger.extend(SequenceId(number), 1)
            ledger.commit(SequenceId(number))
    appended = clock() - begin
    begin = clock()
    for number in range(num_requests):
        ledger.release(SequenceId(number))
    spent["release"] = clock() - begin
    ledger.check()
    return {name: time_s / num_requests for name, time_s in spent.items()} | {
        "append_token": appended / num_requests / APPENDED
    }


def long_lookup(seed: int) -> float:
    """Seconds to look up a prompt of 50,000 tokens that is there, digests included."""
    draw = random.Random(seed)
    text = [draw.randrange(VOCAB) for _ in range(LONG)]
    ledger = Ledger(layout_for(LONG // BLOCK_TOKENS + 64))
    chain = TokenChain(text, Scope(), BLOCK_TOKENS)
    ledger.admit(SequenceId(0), chain)
    assert ledger.extend(SequenceId(0), LONG) is not None
    ledger.commit(SequenceId(0))
    begin = time.perf_counter()
    hit = ledger.lookup(TokenChain(text, Scope(), BLOCK_TOKENS), LONG - 1)
    time_s = time.perf_counter() - begin
    assert hit.num_tokens == LONG - 1
    return time_s


def peer_cycle(python: str, num_requests: int, seed: int) -> dict[str, float]:
    """The same by vLLM's manager, in a process of its own."""
    done = subprocess.run(
        [python, str(PEER), str(num_requests), str(seed)], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{python} {PEER.name} failed:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--peer", metavar="PYTHON", help="an interpreter that can import vLLM")
    args = parser.parse_args()
    print(f"digests: {'native' if NATIVE else 'the Python twin'}")
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    for round_number in range(args.rounds + 1):  # the first one warms up
        ours.append(cycle(args.requests, round_number))
        if args.peer:
            theirs.append(peer_cycle(args.peer, args.requests, round_number))
    rates = []
    for name, rounds in (("kvfolio", ours), ("vLLM", theirs)):
        if not rounds:
            continue
        medians = {part: statistics.median(one[part] for one in rounds[1:]) for part in rounds[0]}
        request_s = sum(time_s for part, time_s in medians.items() if part != "append_token")
        rates.append(1 / request_s)
        parts = ", ".join(f"{part} {time_s * 1e6:.1f}" for part, time_s in medians.items())
        print(f"{name}: {1 / request_s:,.0f} requests/s; µs a request: {parts} (a token)")
    if len(rates) == 2:
        print(f"ratio: {rates[0] / rates[1]:.2f}")
    long_s = statistics.median(long_lookup(seed) for seed in range(args.rounds))
    print(f"look-up of {LONG:,} tokens, digests included: {long_s * 1e3:.2f} ms")


if __name__ == "__main__":
    main()
