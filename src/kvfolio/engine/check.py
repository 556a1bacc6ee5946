"""What each storage format of the cache costs in quality, on one model and one text; and the smallest that is allowed.

The reference is the model in f32 with an exact cache. Candidates compute in f32, too, and store sealed blocks in their
format. All of them go through the engine in the same chunks; the reference in other chunks is the noise floor. Measured
are the positions from ``skip`` on, the first that read a sealed block in every candidate, to the last with a successor.

Knows nothing of how a measurement is taken (``quality``, ``logits``, ``needle``) or kept (``records``).
"""

import dataclasses
import logging
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvfolio.engine.candidate import ENOUGH, EXACT, Candidate, StoredSize, stored_size
from kvfolio.engine.check_options import DEFAULT_TOKENS, CheckOptions
from kvfolio.engine.checked import Check, Row
from kvfolio.engine.english import english_ids
from kvfolio.engine.fingerprint import model_fingerprint
from kvfolio.engine.llm import LLM
from kvfolio.engine.loaded import LoadedModel, find_source, read_weights
from kvfolio.engine.logits import LogitsFile, text_logits
from kvfolio.engine.machine import choose_ops, find_device, usable_kv_memory
from kvfolio.engine.needle import ANSWER_TOKENS, Haystack, Recall, make_haystacks, recall
from kvfolio.engine.progress import OnProgress, TokenProgress
from kvfolio.engine.quality import Quality, QualityMeter
from kvfolio.engine.records import Records
from kvfolio.engine.speed import DecodeSpeed, decode_speed
from kvfolio.engine.text import Tokenizer
from kvfolio.errors import OptionError, RequestError
from kvfolio.kernels.profile import machine_identity
from kvfolio.planner.compute import weight_bytes
from kvfolio.spec.model import RunnableSpec

logger = logging.getLogger("kvfolio")
NEEDLE_DEPTHS = 5
_Result = TypeVar("_Result", Quality, Recall, DecodeSpeed)


def check(
    model: str | Path | None = None,
    options: CheckOptions | None = None,
    records: Records | None = None,
    on_progress: OnProgress | None = None,
) -> Check:
    """Measure every candidate of ``options`` on the model at a path, None for the embedded one.

    What ``records`` holds is not measured again. Raises OptionError for a text that is too short, too long or empty,
    UnknownModelError for a format that is not known, BudgetError when memory or the disk does not suffice.
    """
    records = Records() if records is None else records  # an empty one is false
    session = _Session(model, options or CheckOptions(), records, on_progress or (lambda *_: None))
    session.tell_foreign()
    session.measure_quality()
    session.measure_recall()
    session.measure_speed()
    return session.result()


class _Session:
    """One check under way."""

    def __init__(
        self, model: str | Path | None, options: CheckOptions, records: Records, on_progress: OnProgress
    ) -> None:
        self.options, self._records = options, records
        self._source = find_source(model)
        self.spec: RunnableSpec = self._source.spec
        self._device = find_device(options.device)
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        self._loaded: LoadedModel | None = None
        self._tokenizer = Tokenizer.load(self._source.path)
        self._ids = _text_ids(self._tokenizer, options, self.spec.max_context)
        self._exact_size = stored_size(EXACT, self.spec, "f32", len(self._ids))
        self._exact = dataclasses.replace(EXACT, block_tokens=self._exact_size.block_tokens)
        # Sizes are those in the published dtype, in which users will run it. It also decides, once, what
        # ``block_tokens=None`` means: that may depend on the dtype.
        self._sizes = [stored_size(one, self.spec, self.spec.dtype, len(self._ids)) for one in options.candidates]
        self._candidates = [
            dataclasses.replace(candidate, block_tokens=size.block_tokens)
            for candidate, size in zip(options.candidates, self._sizes, strict=True)
        ]
        self._names = {one: typed.name for one, typed in zip(self._candidates, options.candidates, strict=True)}
        self._check_counts()
        self._haystacks = self._make_haystacks()
        self._common = {"model": self._fingerprint().hex(), "text": _digest(self._ids)}
        self._failed: set[Candidate] = set()
        self._progress = TokenProgress(on_progress, self._num_tokens_missing())

    def _check_counts(self) -> None:
        """Refuse now what would fail after minutes."""
        pairs = zip(self._candidates, self._sizes, strict=True)
        lossy = [size.block_tokens * (1 + (one.sink_blocks or 0)) for one, size in pairs]
        first = max(self._exact_size.block_tokens, *lossy)
        if self.options.skip < first:
            raise OptionError(
                f"skip is {self.options.skip}: in one of the formats no position before {first} reads a block "
                f"that is stored so; give --skip {first} or more, or smaller blocks"
            )
        caches = [self._exact, *self._names]
        most = max(one.kv_memory(self.spec, "f32", len(self._ids)) for one in caches)
        usable_kv_memory(most, weight_bytes(self.spec, "f32"), self._device)

    def _make_haystacks(self) -> tuple[Haystack, ...]:
        """As long as asked for, as the text is, or as the model can read."""
        if not self.options.needle_tokens:
            return ()
        frame = max(len(one.prompt) for one in make_haystacks(self._tokenizer, (), NEEDLE_DEPTHS)) + ANSWER_TOKENS
        room = self.spec.max_context - frame - 2 * NEEDLE_DEPTHS  # where the text is cut it may take a token more
        if room < 1:
            raise OptionError(
                f"the question for the needle alone takes {frame} of {self.spec.max_context} tokens of context; "
                "leave it out: --no-needle"
            )
        num_tokens = min(self.options.needle_tokens, len(self._ids), room)
        haystacks = make_haystacks(self._tokenizer, self._ids[:num_tokens], NEEDLE_DEPTHS)
        longest = max(len(one.prompt) for one in haystacks) + ANSWER_TOKENS
        if longest > self.spec.max_context:
            raise OptionError(
                f"the text around the needle takes {longest:,} tokens, the model reads {self.spec.max_context:,}; "
                "give fewer --needle-tokens"
            )
        return haystacks

    def _fingerprint(self) -> bytes:
        place = f"{choose_ops(self._device, False).name} on {self._device.type}"
        return model_fingerprint(self._source, "f32", self._exact.layout(self.spec, "f32", ENOUGH), place, False)

    def _model(self, dtype: str) -> LoadedModel:
        """The model in ``dtype``; read once, and the other dtype's weights are let go."""
        if self._loaded is None or self._loaded.dtype != dtype:
            self._loaded = None
            self._progress.tell(f"reading weights in {dtype}")
            self._loaded = read_weights(self._source, dtype, self._device, tokenizer=self._tokenizer)
        return self._loaded

    # ---- what a measurement is kept under ----------------------------------------------------------------------------

    def _key(self, what: str, candidate: Candidate, **settings: object) -> dict[str, object]:
        layout = candidate.layout(self.spec, "f32", ENOUGH)
        return {
            **self._common,
            "what": what,
            "candidate": candidate.options(),
            "block_bytes": [group.block_bytes for group in layout.groups],
            **settings,
        }

    def _quality_key(self, candidate: Candidate, chunk: int) -> dict[str, object]:
        return self._key("quality", candidate, chunk=chunk, reference_chunk=self.options.chunk, skip=self.options.skip)

    def _recall_key(self, candidate: Candidate) -> dict[str, object]:
        asked = [number for one in self._haystacks for number in (*one.prompt, int(one.number))]
        return self._key(
            "recall", candidate, chunk=self.options.chunk, prompts=_digest(asked), answer_tokens=ANSWER_TOKENS
        )

    def _speed_key(self, candidate: Candidate) -> dict[str, object]:
        return self._key(
            "speed",
            candidate,
            dtype=self.spec.dtype,
            tokens=self.options.speed_tokens,
            machine=machine_identity(),
            threads=torch.get_num_threads(),
        )

    def _qualities(self) -> list[tuple[Candidate, int]]:
        """(cache, chunk) of every measurement of quality, the noise floor first."""
        own = [(candidate, self.options.chunk) for candidate in self._names]
        return [(self._exact, self.options.noise_chunk), *own]

    def _asked(self) -> list[Candidate]:
        """The caches that are asked for the needle, the exact one first."""
        return list(dict.fromkeys([self._exact, *self._names])) if self._haystacks else []

    def _timed(self) -> list[Candidate]:
        """The caches whose speed is measured."""
        return list(self._names) if self.options.speed_tokens else []

    def _num_tokens_missing(self) -> int:
        """Tokens that have to be computed: what progress is counted in."""
        compared = [one for one in self._qualities() if not self._records.has(self._quality_key(*one))]
        asked = [one for one in self._asked() if not self._records.has(self._recall_key(one))]
        timed = [one for one in self._timed() if not self._records.has(self._speed_key(one))]
        read = (len(compared) + bool(compared)) * (len(self._ids) - 1)  # the last token is only a target
        prompts = sum(len(one.prompt) for one in self._haystacks)
        return read + len(asked) * prompts + len(timed) * len(self._ids)

    def tell_foreign(self) -> None:
        """A file that holds nothing for this check may be the wrong one: say so. It will hold both."""
        own = [self._quality_key(*one) for one in self._qualities()]
        own += [self._recall_key(one) for one in self._asked()] + [self._speed_key(one) for one in self._timed()]
        if len(self._records) and not any(self._records.has(key) for key in own):
            logger.warning(
                "none of the %d measurements in %s is of this model, text and settings: they stay, unused",
                len(self._records),
                self._records.path,
            )

    # ---- measuring ---------------------------------------------------------------------------------------------------

    def measure_quality(self) -> None:
        """The reference's logits once, if anything is missing; then every cache that is."""
        missing = [one for one in self._qualities() if not self._records.has(self._quality_key(*one))]
        for candidate, chunk in self._qualities():
            if "failure" in (self._records.find(self._quality_key(candidate, chunk)) or {}):
                self._failed.add(candidate)
        if not missing:
            return
        skip, vocab = self.options.skip, self.spec.network.vocab_size
        with LogitsFile(len(self._ids) - 1 - skip, vocab) as file:

            def keep(start: int, logits: Tensor) -> None:
                file.write(logits[max(0, skip - start) :])
                self._progress.add(len(logits))

            self._model("f32")  # read under its own name
            self._progress.tell("reference")
            self._compute(self._exact, self.options.chunk, keep)
            for candidate, chunk in missing:
                is_noise = chunk != self.options.chunk
                self._progress.tell("noise floor" if is_noise else f"{self._names[candidate]}: quality")
                result = self._quality(candidate, chunk, file)
                if "failure" in result:
                    if is_noise:
                        raise RequestError(f"the exact cache itself cannot be measured: {result['failure']}")
                    self._failed.add(candidate)
                self._records.add(self._quality_key(candidate, chunk), result)

    def _quality(self, candidate: Candidate, chunk: int, file: LogitsFile) -> dict[str, Any]:
        meter, skip = QualityMeter(), self.options.skip
        targets = torch.tensor(self._ids[1:], dtype=torch.int64)

        def compare(start: int, logits: Tensor) -> None:
            first, end = max(start, skip), start + len(logits)
            if first < end:
                found = logits[first - start :].cpu()
                meter.add(file.read(first - skip, end - first), found, targets[first:end])
            self._progress.add(len(logits))

        try:
            self._compute(candidate, chunk, compare)
        except RequestError as error:  # logits that are not finite: the others may still be measured
            return {"failure": str(error)}
        return dataclasses.asdict(meter.result())

    def _compute(self, candidate: Candidate, chunk: int, on_logits: Callable[[int, Tensor], None]) -> None:
        memory = candidate.kv_memory(self.spec, "f32", len(self._ids))
        options = {**candidate.options(), "kv_memory": memory, "max_step_tokens": chunk}
        text_logits(self._model("f32"), self._ids, on_logits, **options)

    def measure_recall(self) -> None:
        """Every cache that is missing, the exact one first."""
        longest = max((len(one.prompt) for one in self._haystacks), default=0) + ANSWER_TOKENS
        for candidate in self._asked():
            if candidate in self._failed or self._records.has(self._recall_key(candidate)):
                continue
            loaded = self._model("f32")
            self._progress.tell(f"{self._names.get(candidate, EXACT.name)}: needle")
            memory = candidate.kv_memory(self.spec, "f32", 2 * longest)  # the prompt before stays, for its beginning
            options = {**candidate.options(), "kv_memory": memory, "max_step_tokens": self.options.chunk}
            llm = LLM(loaded, dtype="f32", device=self.options.device, max_running=1, **options)
            try:
                found = recall(llm, self._haystacks, lambda one: self._progress.add(len(one.prompt)))
            except RequestError as error:  # logits that are not finite here, though they were in the text
                self._tell_failed(candidate, "needle", error)
                continue
            self._records.add(self._recall_key(candidate), dataclasses.asdict(found))

    def measure_speed(self) -> None:
        """In the dtype that the model was published in, once weights in f32 are no longer needed."""
        for candidate in self._timed():
            if candidate in self._failed or self._records.has(self._speed_key(candidate)):
                continue
            loaded = self._model(self.spec.dtype)
            self._progress.tell(f"{self._names[candidate]}: speed")
            memory = candidate.kv_memory(self.spec, loaded.dtype, len(self._ids))
            options = {**candidate.options(), "kv_memory": memory, "max_step_tokens": self.options.chunk}
            try:
                speed = decode_speed(loaded, self._ids, self.options.speed_tokens, **options)
            except RequestError as error:  # not finite in this dtype
                self._tell_failed(candidate, "speed", error)
                continue
            self._records.add(self._speed_key(candidate), dataclasses.asdict(speed))
            self._progress.add(len(self._ids))

    def _tell_failed(self, candidate: Candidate, what: str, error: RequestError) -> None:
        """One measurement less; the others go on."""
        logger.warning("%s: no %s: %s", self._names.get(candidate, EXACT.name), what, error)

    # ---- the answer --------------------------------------------------------------------------------------------------

    def result(self) -> Check:
        """All rows, out of the records."""
        options = self.options
        exact_recall = self._recall(self._exact)
        reference = Row("f32 (exact)", "f32", self._exact_size, None, exact_recall, None, None, None)
        noise = self._records.find(self._quality_key(self._exact, options.noise_chunk)) or {}
        return Check(
            self.spec.name,
            self.spec.dtype,
            len(self._ids),
            options.skip,
            options.chunk,
            options.noise_chunk,
            options.max_kld,
            max((len(one.prompt) for one in self._haystacks), default=None),
            reference,
            _restored(Quality, noise),
            tuple(
                self._row(typed, candidate, size, exact_recall)
                for typed, candidate, size in zip(options.candidates, self._candidates, self._sizes, strict=True)
            ),
        )

    def _row(self, typed: Candidate, candidate: Candidate, size: StoredSize, exact: Recall | None) -> Row:
        found = self._records.find(self._quality_key(candidate, self.options.chunk)) or {}
        failure = found.get("failure")
        recalled = self._recall(candidate)
        speed = self._records.find(self._speed_key(candidate)) if self.options.speed_tokens else None
        return Row(
            typed.name,
            candidate.kv_format,
            size,
            _restored(Quality, found) if failure is None else None,
            recalled,
            recalled.num_like(exact) if recalled is not None and exact is not None else None,
            _restored(DecodeSpeed, speed) if speed is not None else None,
            failure,
        )

    def _recall(self, candidate: Candidate) -> Recall | None:
        found = self._records.find(self._recall_key(candidate)) if self._haystacks else None
        return None if found is None else _restored(Recall, found)


def _restored(kind: type[_Result], found: dict[str, Any]) -> _Result:
    """A result out of a record."""
    fields: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in found.items()}
    try:
        return kind(**fields)
    except TypeError as error:
        raise OptionError(f"a measurement of {kind.__name__} is not whole ({error}): take its line out") from error


# ---- the text -------------------------------------------------------------------------------------------------------


def _text_ids(tokenizer: Tokenizer, options: CheckOptions, max_context: int) -> tuple[int, ...]:
    """The token ids that are measured."""
    asked = options.tokens if options.tokens is not None else min(DEFAULT_TOKENS, max_context)
    if asked > max_context:
        raise OptionError(f"{asked:,} tokens, but the model reads {max_context:,}: give --tokens {max_context} or less")
    ids = english_ids(tokenizer, asked) if options.text is None else tokenizer.encode(options.text)[:asked]
    if len(ids) < options.skip + 2:
        raise OptionError(
            f"a text of {len(ids):,} tokens is too short: the first {options.skip:,} do not count (--skip), and at "
            f"least 2 more are needed"
        )
    return tuple(ids)


def _digest(numbers: Any) -> str:
    return blake2b(torch.tensor(numbers, dtype=torch.int64).numpy().tobytes(), digest_size=16).hexdigest()
