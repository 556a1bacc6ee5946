"""Hit = miss on pools that are too small: behind evictions, preemptions by recompute and by swap, and all at once.

Blocks are poisoned before they are written anew, so that nothing old can pass for new. Knows nothing of who should be
evicted or preempted.
"""

import random
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from cold import FEW, SETTINGS, Cold, Setting, Warm, preempt_often, spelled
from served import greedy, kv_memory_for, recorded
from tiny import TinyModel, some_tokens

from kvfolio import LLM, SamplingParams
from kvfolio.cache.eviction import POLICIES
from kvfolio.engine import machine
from kvfolio.engine.params import CacheParams, Retention

OpenLLM = Callable[..., LLM]
OpenWarm = Callable[..., Warm]

every_setting = pytest.mark.parametrize("setting", SETTINGS, ids=spelled)
few_settings = pytest.mark.parametrize("setting", FEW, ids=spelled)
WINDOWED = [setting for setting in SETTINGS if setting.name in ("gemma3", "mistral")]


def num_evicted(llm: LLM) -> int:
    return llm.snapshot().usage.num_evicted


def teach_that_answers_are_short(llm: LLM) -> None:
    """From now on more requests are let in than will fit in the end: some will be preempted."""
    llm.generate([[3 + index] for index in range(4)], greedy(1))


def open_short(open_warm: OpenWarm, setting: Setting, **options: object) -> Warm:
    """Room for a request alone, and for all as they begin."""
    rows = {"mistral": 12, "gemma3": 14}.get(setting.name, 18 if setting.is_lossless else 14)
    warm = open_warm(setting, rows=rows, max_running=4, max_step_tokens=24, **options)
    teach_that_answers_are_short(warm.llm)
    return warm


# ---- eviction -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("eviction", POLICIES)
@few_settings
def test_what_is_left_of_an_evicted_prefix_is_exact(setting: Setting, eviction: str, open_warm: OpenWarm) -> None:
    warm = open_warm(setting, rows=20, eviction=eviction)
    texts = [some_tokens(48, seed=50 + index) for index in range(4)]
    cached = []
    for turn in (0, 1, 0, 2, 3, 1, 0):
        cached.append(warm.cached(texts[turn], greedy(4)))
        cached.append(warm.cached([*texts[turn][:30], 9, 8, 7], greedy(4)))
    assert num_evicted(warm.llm) > 0
    assert 0 < sum(cached) < 39 * len(cached)


@pytest.mark.parametrize("num_others", [1, 2, 4, 6])
@pytest.mark.parametrize("setting", WINDOWED, ids=spelled)
def test_a_hit_needs_only_the_window_before_it(setting: Setting, num_others: int, open_warm: OpenWarm) -> None:
    warm, text = open_warm(setting, rows=24), some_tokens(60, seed=60)
    warm.ask([text], greedy(2))
    for index in range(num_others):  # of a text, the last blocks go first
        warm.ask([some_tokens(21, seed=61 + index)], greedy(2))
    for stop in (60, 53, 34, 21, 18, 60):
        warm.ask([[*text[:stop], 5]], greedy(3))


@pytest.mark.parametrize("eviction", POLICIES)
def test_retention_that_is_changed_and_changed_back_keeps_the_queue_whole(eviction: str, open_warm: OpenWarm) -> None:
    warm, text = open_warm(FEW[0], rows=20, eviction=eviction), some_tokens(40, seed=68)
    warm.ask([text], greedy(1))
    assert [warm.llm.retain(text, Retention(priority)) for priority in (60, 50, 60, 50)] == [10] * 4
    for seed in range(3):
        warm.ask([some_tokens(70, seed=seed)], greedy(2))
    assert num_evicted(warm.llm) >= 20


# ---- preemption -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@few_settings
def test_requests_that_share_and_run_dry_resume_with_the_same_bits(
    setting: Setting, preemption: str, open_warm: OpenWarm
) -> None:
    swap_memory = {"swap_memory": "1MiB"} if preemption == "swap" else {}
    warm = open_short(open_warm, setting, preemption=preemption, **swap_memory)
    beginning = some_tokens(18, seed=70)
    prompts = [beginning + some_tokens(1 + index, seed=71 + index) for index in range(6)]
    warm.ask(prompts, greedy(40))
    counters = warm.llm.snapshot().counters
    assert counters.num_preemptions > 0
    assert counters.num_swaps == (counters.num_preemptions if preemption == "swap" else 0)
    assert counters.num_swaps_refused == 0
    warm.ask(prompts[::-1], greedy(9))


@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize(
    ("setting", "block_tokens"),
    [*((setting, setting.block_tokens) for setting in SETTINGS), *((setting, 16) for setting in FEW[:2])],
    ids=lambda given: spelled(given) if isinstance(given, Setting) else str(given),
)
def test_requests_preempted_at_any_time_resume_with_the_same_bits(
    setting: Setting, block_tokens: int, preemption: str, open_warm: OpenWarm
) -> None:
    swap_memory = {"swap_memory": "1MiB"} if preemption == "swap" else {}
    options = {"max_running": 4, "max_step_tokens": 20, "preemption": preemption, **swap_memory}
    warm = open_warm(setting, block_tokens, rows=40, **options)
    preempt_often(warm.llm, random.Random(spelled(setting)))
    beginning = some_tokens(18, seed=72)
    prompts = [beginning + some_tokens(1 + 5 * index, seed=73 + index) for index in range(6)]
    warm.ask(prompts, greedy(24))
    counters = warm.llm.snapshot().counters
    assert counters.num_preemptions > 3
    assert (counters.num_swaps > 3) is (preemption == "swap")


@pytest.mark.parametrize("setting", [one for one in FEW if one.name != "mistral"], ids=spelled)
def test_a_host_pool_that_is_full_makes_the_others_compute_again(setting: Setting, open_warm: OpenWarm) -> None:
    layout = open_warm(setting).cold.llm.layout
    memory = 2 * sum(group.open_block_bytes for group in layout.groups) + 16 * layout.row_bytes
    warm = open_warm(setting, rows=64, max_running=4, preemption="swap", swap_memory=memory)
    preempt_often(warm.llm, random.Random(3))
    warm.ask([some_tokens(30 + index, seed=80 + index) for index in range(6)], greedy(30))
    counters = warm.llm.snapshot().counters
    assert 0 < counters.num_swaps < counters.num_preemptions
    assert counters.num_swaps_refused > 0


# ---- all at once ----------------------------------------------------------------------------------------------------


def mix(warm: Warm, draw: random.Random, num_requests: int) -> None:
    """Requests that share beginnings come and go, some of them cancelled; every token and logit is checked."""
    engine, cold = warm.llm.engine, warm.cold
    roots = [some_tokens(40, seed=draw.randint(0, 10**6)) for _ in range(3)]
    asked: dict[int, tuple[tuple[int, ...], SamplingParams]] = {}
    said: dict[int, list[int]] = defaultdict(list)
    teach_that_answers_are_short(warm.llm)
    with recorded(warm.llm) as record:
        while len(asked) < num_requests or engine.has_work:
            if len(asked) < num_requests and draw.random() < 0.5:
                prompt, params = another(draw, roots, asked, said), greedy(draw.choice([1, 3, 12, 30]))
                if draw.random() < 0.3:
                    params = replace(params, temperature=2.0, seed=len(asked))
                retention = Retention(draw.randint(0, 100), draw.choice([None, 1e-6, 1e3]), pin=draw.random() < 0.2)
                caching = CacheParams(
                    draw.choice([None, None, None, "a"]),
                    reuse=draw.random() < 0.9,
                    retention=[retention] if draw.random() < 0.3 else [],
                )
                asked[engine.submit(prompt, params, caching)] = prompt, params
            if asked and draw.random() < 0.05:
                engine.cancel(draw.choice(list(asked)))
            for output in engine.step():
                said[output.request_id].append(output.sampled.token_id)
            engine.ledger.check()
    num_whole = 0
    for request_id, (prompt, params) in asked.items():
        tokens, logits = cold.answer(prompt, params)
        num_said = len(said[request_id])
        assert said[request_id] == tokens[:num_said]
        if num_said:
            assert torch.equal(torch.stack(record.rows[request_id]), logits[:num_said])
        num_whole += num_said == params.max_tokens
    assert num_whole > num_requests / 2


def another(
    draw: random.Random,
    roots: list[list[int]],
    asked: dict[int, tuple[tuple[int, ...], SamplingParams]],
    said: dict[int, list[int]],
) -> tuple[int, ...]:
    """A root's beginning, or an earlier request with what it said so far; alone, or with something behind it."""
    if asked and draw.random() < 0.4:
        earlier = draw.choice(list(asked))
        text = [*asked[earlier][0], *said[earlier]][:60]
    else:
        text = draw.choice(roots)[: draw.randint(1, 40)]
    return (*text, *some_tokens(draw.choice([0, 0, 1, 5, 17]), seed=draw.randint(0, 10**6)))


@pytest.mark.parametrize("seed", range(2))
@every_setting
def test_random_mixes_on_a_tight_pool_answer_as_cold_runs(setting: Setting, seed: int, open_warm: OpenWarm) -> None:
    draw = random.Random(f"{spelled(setting)} {seed}")
    block_tokens = draw.choice([setting.block_tokens, 16])
    options = {
        "eviction": draw.choice(list(POLICIES)),
        "preemption": draw.choice(["recompute", "swap"]),
        "max_step_tokens": draw.choice([5, 16, 60]),
        "max_preemptions": draw.choice([0, 1, 3]),
    }
    swap = {"swap_memory": draw.choice(["64KiB", "1MiB"])} if options["preemption"] == "swap" else {}
    warm = open_warm(setting, block_tokens, rows=112 // block_tokens, max_running=4, **options, **swap)
    mix(warm, draw, 24)
    if block_tokens == 4:  # few texts fill seven long blocks
        assert num_evicted(warm.llm) > 0
    assert warm.llm.snapshot().counters.num_hit_tokens > 0


@pytest.mark.parametrize("setting", FEW[:2], ids=spelled)
def test_a_random_mix_on_the_torch_kernels_too(
    setting: Setting, open_llm: OpenLLM, served_model: Callable[[str], TinyModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "NativeOps", None)
    monkeypatch.setattr(machine, "_native_error", ImportError("a test"), raising=False)
    options = {"deterministic": True, "debug": True, "block_tokens": 4, **setting.options}
    kv_memory = kv_memory_for(open_llm(setting.name, **options), num_running=4, num_rows=28)
    tight = {"kv_memory": kv_memory, "max_running": 4, "preemption": "swap", "swap_memory": "1MiB"}
    llm = open_llm(setting.name, **options, **tight)
    assert "native" not in llm.ops_name
    cold = Cold(served_model(setting.name).folder, block_tokens=4, **setting.options)
    mix(Warm(llm, cold), random.Random(1), 10)
