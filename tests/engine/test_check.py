"""Checks of a tiny model: what is measured is what it says, nothing is measured twice, bad wishes end early.

Knows nothing of how a check is printed.
"""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import TinyModel

from kvfolio import LLM, BudgetError, OptionError, RequestError, SamplingParams, UnknownModelError
from kvfolio.engine import check as engine
from kvfolio.engine import logits as logits_of
from kvfolio.engine.candidate import Candidate, parse_candidates
from kvfolio.engine.check import check
from kvfolio.engine.check_options import CheckOptions
from kvfolio.engine.english import english_ids
from kvfolio.engine.loaded import load_model
from kvfolio.engine.records import Records

TOKENS, SKIP, CHUNK = 260, 64, 48
QUICK: dict[str, Any] = {"tokens": TOKENS, "skip": SKIP, "chunk": CHUNK, "needle_tokens": 0, "speed_tokens": 0}
WHOLE = QUICK | {"needle_tokens": 40, "speed_tokens": 4}


@pytest.fixture
def folder(served_model: Callable[[str], TinyModel]) -> Path:
    return served_model("llama").folder


def options(formats: str, **more: Any) -> CheckOptions:
    return CheckOptions(parse_candidates(formats), **(QUICK | more))


class Counter:
    """Counts calls of a function, and interrupts one of them."""

    def __init__(self, function: Callable[..., Any], interrupted: int | None = None) -> None:
        self.function, self.interrupted = function, interrupted
        self.num_calls = 0

    def __call__(self, *args: Any, **given: Any) -> Any:
        self.num_calls += 1
        if self.num_calls == self.interrupted:
            raise KeyboardInterrupt
        return self.function(*args, **given)


@pytest.fixture
def counters(monkeypatch: pytest.MonkeyPatch) -> dict[str, Counter]:
    """Of every function that computes."""
    found = {name: Counter(getattr(engine, name)) for name in ("text_logits", "recall", "decode_speed", "read_weights")}
    for name, counter in found.items():
        monkeypatch.setattr(engine, name, counter)
    return found


# ---- what is measured -----------------------------------------------------------------------------------------------


def test_perplexities_are_those_of_transformers_and_of_the_engines_own_scores(
    folder: Path, served_model: Callable[[str], TinyModel]
) -> None:
    result = check(folder, options("int8"))
    llm = LLM(folder, dtype="f32", kv_format="int8", kv_memory="1MiB", max_step_tokens=CHUNK)
    ids = english_ids(llm.tokenizer, TOKENS)
    quality = result.rows[0].quality
    assert quality is not None
    assert quality.num_positions == result.noise.num_positions == TOKENS - 1 - SKIP
    logprobs = torch.log_softmax(served_model("llama").logits(ids)[:-1].double(), dim=-1)
    own = logprobs.gather(1, torch.tensor(ids[1:])[:, None])[SKIP:, 0]
    assert quality.reference_perplexity == pytest.approx(math.exp(-own.mean()), rel=1e-4)
    scores = llm.generate([ids], SamplingParams(max_tokens=1, prompt_logprobs=0))[0].prompt_logprobs
    assert scores is not None
    stored = [-score for score in scores[SKIP + 1 :] if score is not None]
    assert quality.perplexity == pytest.approx(math.exp(math.fsum(stored) / len(stored)), rel=1e-5)
    assert quality.perplexity != quality.reference_perplexity


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_lossless_format_is_within_the_noise_and_a_lossy_one_is_not(
    name: str, served_model: Callable[[str], TinyModel]
) -> None:
    result = check(served_model(name).folder, options("f32,f32@64,int8"))
    exact, large, int8 = (row.quality for row in result.rows)
    assert exact is not None and large is not None and int8 is not None
    assert exact.mean_kld == 0.0  # the very same computation
    assert max(large.mean_kld, result.noise.mean_kld) < 1e-9
    assert large.top1 == exact.top1 == 1.0
    assert int8.mean_kld > 1e-7
    assert int8.p99_kld >= int8.mean_kld


def test_everything_is_measured_of_every_format(folder: Path) -> None:
    told: list[tuple[str, int, int]] = []
    formats = parse_candidates("int8,bf16/int8@32")
    result = check(folder, CheckOptions(formats, **WHOLE), on_progress=lambda *args: told.append(args))
    assert [row.name for row in result.rows] == ["int8", "bf16/int8@32"]
    assert result.reference.recall is not None
    assert result.needle_tokens is not None and result.needle_tokens > 40
    for row in result.rows:
        assert row.recall is not None and row.speed is not None and row.quality is not None
        assert len(row.recall.answers) == len(row.recall.found) == engine.NEEDLE_DEPTHS
        assert 0 <= (row.num_answers_like_exact or 0) <= engine.NEEDLE_DEPTHS
        assert row.speed.tokens_per_s > 0
        assert row.speed.limit_tokens_per_s > 0
    assert [done for _, done, _ in told] == sorted(done for _, done, _ in told)
    assert told[-1][1] == told[-1][2]  # all that was announced is done
    json.dumps(dataclasses.asdict(result))


def test_a_format_whose_logits_overflow_is_a_row_without_quality(
    folder: Path, monkeypatch: pytest.MonkeyPatch, counters: dict[str, Counter]
) -> None:
    def overflowing(loaded: object, ids: object, on_logits: Callable[..., None], **given: Any) -> None:
        def spoilt(start: int, rows: torch.Tensor) -> None:
            on_logits(start, rows / 0 if given["kv_format"] == "f16" else rows)

        logits_of.text_logits(loaded, ids, spoilt, **given)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "text_logits", overflowing)
    result = check(folder, CheckOptions(parse_candidates("f16,int8"), **WHOLE))
    broken, sound = result.rows
    assert broken.quality is None and broken.recall is None and broken.speed is None
    assert "not finite" in (broken.failure or "")
    assert sound.quality is not None and sound.recall is not None
    assert result.chosen is sound
    assert counters["recall"].num_calls == 2  # the exact cache, and int8


@pytest.mark.parametrize("what", ["recall", "decode_speed"])
def test_what_fails_behind_the_text_costs_its_own_cell_alone(
    what: str, folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    measure = getattr(engine, what)

    def failing(*given: Any, **options: Any) -> Any:
        fmt = options.get("kv_format") or given[0].options.kv_format
        if fmt == "bf16":
            raise RequestError("the logits are not finite")
        return measure(*given, **options)

    monkeypatch.setattr(engine, what, failing)
    result = check(folder, CheckOptions(parse_candidates("bf16,int8"), **WHOLE))
    broken, sound = result.rows
    missing = [row.recall if what == "recall" else row.speed for row in (broken, sound)]
    assert missing[0] is None and missing[1] is not None
    assert broken.quality is not None
    assert any("the logits are not finite" in record.getMessage() for record in caplog.records)


def test_a_model_that_overflows_by_itself_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def overflowing(loaded: object, ids: object, on_logits: Callable[..., None], **given: Any) -> None:
        logits_of.text_logits(loaded, ids, lambda start, rows: on_logits(start, rows / 0), **given)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "text_logits", overflowing)
    with pytest.raises(RequestError, match="the exact cache itself"):
        check(folder, options("int8"))


# ---- nothing is measured twice --------------------------------------------------------------------------------------


def test_what_the_file_holds_is_not_measured_again(folder: Path, tmp_path: Path, counters: dict[str, Counter]) -> None:
    path = tmp_path / "check.jsonl"
    first = check(folder, CheckOptions(parse_candidates("int8,bf16"), **WHOLE), Records(path))
    assert [counter.num_calls for counter in counters.values()] == [4, 3, 2, 1]  # f32 is published: one load
    again = check(folder, CheckOptions(parse_candidates("int8,bf16"), max_kld=1e-9, **WHOLE), Records(path))
    assert [counter.num_calls for counter in counters.values()] == [4, 3, 2, 1]
    assert dataclasses.replace(again, max_kld=first.max_kld) == first
    check(folder, CheckOptions(parse_candidates("bf16,f16"), **WHOLE), Records(path))  # the reference, and f16
    assert [counter.num_calls for counter in counters.values()] == [6, 4, 3, 2]


@pytest.mark.parametrize("changed", [{"skip": 70}, {"chunk": 50}, {"tokens": 250}, {"text": "another text " * 40}])
def test_another_question_is_measured_anew(
    changed: dict[str, Any],
    folder: Path,
    tmp_path: Path,
    counters: dict[str, Counter],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "check.jsonl"
    check(folder, options("int8"), Records(path))
    assert not caplog.messages
    check(folder, options("int8", **changed), Records(path))
    assert counters["text_logits"].num_calls == 6
    assert any("none of the 2 measurements" in message for message in caplog.messages)
    check(folder, options("int8"), Records(path))  # the first ones are still there
    assert counters["text_logits"].num_calls == 6


def test_an_interrupted_check_goes_on_where_it_was(folder: Path, tmp_path: Path, counters: dict[str, Counter]) -> None:
    path = tmp_path / "check.jsonl"
    counters["text_logits"].interrupted = 4  # the reference, the noise floor, int8 | bf16
    with pytest.raises(KeyboardInterrupt):
        check(folder, options("int8,bf16"), Records(path))
    assert [json.loads(line)["key"]["what"] for line in path.read_text().splitlines()] == ["quality", "quality"]
    result = check(folder, options("int8,bf16"), Records(path))
    assert counters["text_logits"].num_calls == 6  # the reference, and bf16
    assert all(row.quality is not None for row in result.rows)


def test_a_measurement_that_somebody_changed_is_named(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "check.jsonl"
    check(folder, options("int8"), Records(path))
    path.write_text(path.read_text().replace('"mean_kld"', '"mean"'))
    with pytest.raises(OptionError, match="a measurement of Quality is not whole"):
        check(folder, options("int8"), Records(path))


# ---- what cannot be -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"text": "  \n"}, OptionError, "the text is empty"),
        ({"text": "too short"}, OptionError, "a text of 10 tokens is too short"),
        ({"tokens": SKIP + 1}, OptionError, "too short"),
        ({"tokens": 513}, OptionError, "the model reads 512: give --tokens 512 or less"),
        ({"candidates": (Candidate("int7"),)}, UnknownModelError, "int7"),
        ({"candidates": (Candidate("int8", 24),)}, OptionError, "block_tokens is 24"),
        (
            {"candidates": (Candidate("int8", 128),)},
            OptionError,
            "skip is 64: in one of the formats no position before 128",
        ),
        ({"candidates": ()}, OptionError, "no format"),
        ({"max_kld": math.nan}, OptionError, "max_kld"),
        ({"chunk": 1}, OptionError, "chunk"),
        ({"skip": -1}, OptionError, "skip"),
        ({"device": "nowhere"}, OptionError, "nowhere"),
    ],
)
def test_what_cannot_be_measured_is_refused_before_anything_is(
    changed: dict[str, Any], error: type[Exception], words: str, folder: Path, counters: dict[str, Counter]
) -> None:
    with pytest.raises(error, match=words):
        check(folder, CheckOptions(**({"candidates": (Candidate("int8"),)} | QUICK | changed)))
    assert all(counter.num_calls == 0 for counter in counters.values())


def test_a_needle_that_no_context_holds_is_refused(served_model: Callable[[str], TinyModel], tmp_path: Path) -> None:
    made = served_model("llama").folder
    for file in made.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text()) | {"max_position_embeddings": 128}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(OptionError, match="--no-needle"):
        check(tmp_path, options("int8", tokens=120, needle_tokens=10))


def test_a_cache_that_cannot_hold_the_text_is_no_bad_format(folder: Path) -> None:
    loaded = load_model(folder, "f32")
    with pytest.raises(BudgetError, match=r"304 prompt tokens .* need"):
        logits_of.text_logits(loaded, list(range(3, 64)) * 5, lambda *_: None, kv_memory="64KiB")


def test_a_disk_without_room_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match=r"the reference's logits take .* 1,000,000,000 positions"):
        logits_of.LogitsFile(10**9, 10**6, str(tmp_path))
    with logits_of.LogitsFile(4, 3, str(tmp_path)) as file:
        file.write(torch.arange(12.0).reshape(4, 3)[:3])
        file.write(torch.arange(12.0).reshape(4, 3)[3:])
        assert file.read(2, 2).tolist() == [[6.0, 7.0, 8.0], [9.0, 10.0, 11.0]]
        assert list(tmp_path.iterdir()) == []  # it has no name
        with pytest.raises(BudgetError, match="ends early"):
            file.read(3, 2)
