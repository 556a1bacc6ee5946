"""The front door: a model by name, text in, text out. Loads, sizes and joins what the other rooms provide.

Knows nothing of how a step is decided or computed.
"""

import math
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from kvfolio.cache.eviction import POLICIES
from kvfolio.cache.ledger import Ledger, LedgerOptions
from kvfolio.engine.answer import Answer, Completion, Piece
from kvfolio.engine.engine import Engine, Output, Snapshot
from kvfolio.engine.explain import Explanation, explain
from kvfolio.engine.fingerprint import model_fingerprint
from kvfolio.engine.loaded import LoadedModel, check_latent_form, find_source, read_weights, resolve_dtype
from kvfolio.engine.machine import (
    check_swap_memory,
    choose_ops,
    find_device,
    machine_costs,
    tell_unscaled,
    usable_kv_memory,
)
from kvfolio.engine.params import MAX_THREADS, CacheParams, Retention, SamplingParams, check_int, each, refusal
from kvfolio.engine.runner import Runner
from kvfolio.engine.sequence import TextSequence, checked_ids
from kvfolio.engine.text import StopMatcher, TextStream
from kvfolio.errors import BudgetError, OptionError, RequestError
from kvfolio.models.weights import Progress
from kvfolio.planner.compute import weight_bytes
from kvfolio.planner.memory import (
    BLOCK_TOKENS_ALLOWED,
    DEFAULT_MAX_RUNNING,
    CacheOptions,
    plan_cache,
)
from kvfolio.sched.options import DEFAULT_MAX_PREEMPTIONS, DEFAULT_MAX_STEP_TOKENS, SchedulerOptions
from kvfolio.sched.request import RequestId
from kvfolio.sched.scheduler import Scheduler
from kvfolio.spec.layout import CacheLayout
from kvfolio.spec.model import RunnableSpec
from kvfolio.spec.source import ModelSource
from kvfolio.store.pools import CacheStore
from kvfolio.store.view import StoreViews
from kvfolio.units import parse_bytes

Messages = Sequence[dict[str, str]]
Prompt = str | Sequence[int] | Messages  # a text as it is, token ids, or a conversation for the chat template
MAX_SAMPLES = 1 << 16


@dataclass(frozen=True, slots=True)
class LLMOptions:
    """What a user chooses about a loaded model."""

    kv_memory: str | int | None = None  # bytes or text such as "1GiB"; None: 1 GiB, or less on a small machine
    kv_format: str = "auto"  # auto: the compute dtype
    block_tokens: int | None = None  # None: 16, or 64 where keys share scales along a block: int6 … int2
    kv_layers: str = ""  # layers that are stored otherwise, such as 0-1=bf16,29=int8; exact: as computed
    sink_blocks: int = 0  # first blocks of every sequence that lossy full-attention layers keep exact
    max_running: int = DEFAULT_MAX_RUNNING
    max_step_tokens: int = DEFAULT_MAX_STEP_TOKENS
    dtype: str = "auto"  # f32, bf16, f16; auto: as the model was published
    device: str = "cpu"
    threads: int | None = None  # None: torch's own choice
    deterministic: bool = False  # the same bits alone and in any batch, with any chunking
    latent_form: str = "absorbed"  # how latent layers compute prompts: absorbed, or expanded: quicker in large steps
    prefix_cache: bool = True  # requests share the blocks of equal beginnings
    eviction: str = "lru"  # which cached block goes first: lru, lfu, slru, s3fifo, gdsf
    preemption: str = "auto"  # how a request gives up its blocks when memory is short: auto, recompute, swap
    max_preemptions: int = DEFAULT_MAX_PREEMPTIONS  # of one request; then it waits for room that nobody can take
    swap_memory: str | int = 0  # bytes of the host pool that preempted requests are swapped to
    debug: bool = False  # broken invariants raise, and blocks are poisoned before they are written anew

    def __post_init__(self) -> None:
        """Types, and the ranges that no other room checks."""
        if self.block_tokens is not None:
            check_int("block_tokens", self.block_tokens, 1, math.inf, f"one of {BLOCK_TOKENS_ALLOWED}")
        check_int("sink_blocks", self.sink_blocks, 0, math.inf, "0 or more; 0: every full block is stored alike")
        check_int("max_running", self.max_running, 1, math.inf, f"1 or more; leave it out for {DEFAULT_MAX_RUNNING}")
        check_int("max_step_tokens", self.max_step_tokens, 1, math.inf, f"1 or more, such as {DEFAULT_MAX_STEP_TOKENS}")
        if self.threads is not None:
            check_int("threads", self.threads, 1, MAX_THREADS, f"1 to {MAX_THREADS}; leave it out for torch's choice")
        if self.kv_memory is not None and not isinstance(self.kv_memory, str | int):
            raise refusal("kv_memory", self.kv_memory, "bytes, or text such as '1GiB'")
        for name in ("kv_format", "dtype", "device", "kv_layers"):
            if not isinstance(getattr(self, name), str):
                raise refusal(name, getattr(self, name), "text, such as auto; cpu for the device, 0=bf16 for kv_layers")
        check_int("max_preemptions", self.max_preemptions, 0, math.inf, "0 or more; 0: room for all it may need")
        for name in ("deterministic", "prefix_cache", "debug"):
            if not isinstance(getattr(self, name), bool):
                raise refusal(name, getattr(self, name), "True or False")
        if self.eviction not in POLICIES:
            raise refusal("eviction", self.eviction, f"one of {', '.join(POLICIES)}")
        if isinstance(self.swap_memory, bool) or not isinstance(self.swap_memory, str | int):
            raise refusal("swap_memory", self.swap_memory, "bytes, or text such as '1GiB'; 0: no host pool")


class LLM:
    """A language model on a paged cache.

    ``model``: a Hugging Face folder or GGUF file; None is the embedded SmolLM2; or one that is loaded already, whose
    dtype and device the options have to name. Further arguments: see LLMOptions.
    Raises errors of kvfolio.errors for anything that cannot be loaded, sized or served.
    """

    def __init__(
        self, model: str | Path | LoadedModel | None = None, on_progress: Progress | None = None, **options: object
    ) -> None:
        started = time.monotonic()
        try:
            self.options = LLMOptions(**options)  # type: ignore[arg-type]
        except TypeError as error:
            raise OptionError(f"{error}; known: {', '.join(LLMOptions.__dataclass_fields__)}") from error
        loaded = model if isinstance(model, LoadedModel) else None
        if self.options.threads is not None:
            torch.set_num_threads(self.options.threads)
        source = model.source if isinstance(model, LoadedModel) else find_source(model)
        self.spec: RunnableSpec = source.spec
        check_latent_form(self.options.latent_form, self.spec, self.options.deterministic)
        self.dtype = resolve_dtype(self.options.dtype, self.spec)
        self.device = device = find_device(self.options.device)
        if loaded:
            loaded.check(self.dtype, device)
        self.threads = torch.get_num_threads()
        ops = choose_ops(device, self.options.deterministic)
        self.ops_name = ops.name
        kv_memory = None if self.options.kv_memory is None else parse_bytes(self.options.kv_memory)
        weights = 0 if loaded else weight_bytes(self.spec, self.dtype)  # still to be put into memory
        cache_options = CacheOptions(
            kv_memory=usable_kv_memory(kv_memory, weights, device),
            block_tokens=self.options.block_tokens,
            kv_format=self.options.kv_format,
            max_running=self.options.max_running,
            split=device.type != "cpu",
            kv_layers=self.options.kv_layers,
            sink_blocks=self.options.sink_blocks,
        )
        self.layout = plan_cache(self.spec, self.dtype, cache_options)
        if loaded is None:  # whoever loads a model once for many caches has said what they are
            tell_unscaled(self.layout)
        scheduling = SchedulerOptions(
            self.spec.max_context,
            self.options.max_step_tokens,
            self.options.preemption,
            self.options.max_preemptions,
        )
        host = self._host_layout(cache_options, weights)
        loaded = loaded or read_weights(source, self.dtype, device, on_progress)
        self.tokenizer = loaded.tokenizer
        store = CacheStore(self.layout, device, host)
        views = StoreViews(store, self.spec.network.num_q_heads, ops)
        is_weighed = self.options.eviction == "gdsf" or (host is not None and self.options.preemption == "auto")
        costs = machine_costs(self.spec, device) if is_weighed else None
        ledger = Ledger(self.layout, LedgerOptions(self.options.eviction, host, costs, self.options.debug))
        self.engine = Engine(
            self.spec,
            Scheduler(ledger, scheduling),
            store,
            Runner(loaded.network, ops, views, device, self.options.latent_form == "expanded"),
            fingerprint=self._fingerprint(source, ops.name) if self.options.prefix_cache else None,
        )
        self._answers: dict[RequestId, Answer] = {}
        self._owned: set[RequestId] = set()  # requests that we submitted; once without an answer they are cancelled
        self._lock = threading.RLock()  # one thread at a time decides and computes; the others' tokens come along
        self.load_s = time.monotonic() - started

    def _host_layout(self, options: CacheOptions, weights: int) -> CacheLayout | None:
        """The host pool, cut as the cache is, with a fixed share for each group; None without swap_memory."""
        num_bytes = parse_bytes(self.options.swap_memory)
        if num_bytes == 0:
            if self.options.preemption == "swap":
                raise OptionError("preemption 'swap' needs a host pool: give swap_memory, such as 1GiB")
            return None
        if self.options.preemption == "recompute":
            raise OptionError("preemption 'recompute' has no use for swap_memory: leave one of them out")
        check_swap_memory(num_bytes, self.device, weights + options.kv_memory)
        try:
            return plan_cache(self.spec, self.dtype, replace(options, kv_memory=num_bytes, split=True))
        except BudgetError as error:
            raise BudgetError(str(error).replace("kv_memory", "swap_memory")) from error

    def _fingerprint(self, source: ModelSource, ops_name: str) -> bytes:
        place = f"{ops_name} on {self.device.type}"
        if self.options.latent_form != "absorbed":
            place += f", prompts {self.options.latent_form}"
        return model_fingerprint(source, self.dtype, self.layout, place, self.options.deterministic)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of cache that one token takes, as planned; the first ones take those of their sink blocks beside it."""
        return self.layout.bytes_per_token

    def snapshot(self) -> Snapshot:
        """Usage, peak and counters of the engine."""
        with self._lock:
            return self.engine.snapshot()

    def generate(
        self,
        prompts: str | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        caching: CacheParams | Sequence[CacheParams] | None = None,
    ) -> list[Completion]:
        """Complete ``prompts`` (texts, token ids or conversations), batched as they fit; answers come in their order.

        ``params``, ``caching``: one for all, or one for each. Raises RequestError, and computes nothing, if one prompt
        can never be served.
        """
        if not isinstance(prompts, Iterable) or isinstance(prompts, bytes | dict):
            raise RequestError(f"prompts is {prompts!r}; accepted: a text, or a list of texts or of lists of token ids")
        listed: list[Prompt] = [prompts] if isinstance(prompts, str) else list(prompts)
        chosen = each(len(listed), "params", params, SamplingParams())
        cached = each(len(listed), "caching", caching, CacheParams())
        ids = [self.prompt_ids(prompt) for prompt in listed]
        done: list[Completion | None] = [None] * len(ids)
        for index, piece in self._run(ids, chosen, cached):
            if piece.completion is not None:
                done[index] = piece.completion
        return [completion for completion in done if completion is not None]

    def samples(
        self,
        prompt: Prompt,
        n: int,
        params: SamplingParams | None = None,
        caching: CacheParams | None = None,
    ) -> list[Completion]:
        """``n`` answers to one prompt, side by side: it is computed once and its blocks are shared.

        With a seed, answer i draws with seed + i.
        """
        check_int("n", n, 1, MAX_SAMPLES, f"1 to {MAX_SAMPLES:,}")
        (chosen,) = each(1, "params", params, SamplingParams())
        return self.generate([self.prompt_ids(prompt)] * n, chosen.samples(n), caching)

    def chat(
        self, messages: Messages, params: SamplingParams | None = None, caching: CacheParams | None = None
    ) -> Completion:
        """Answer a conversation, a list of {"role", "content"}, through the model's own chat template."""
        return self.generate([self.tokenizer.encode_chat(messages)], params, caching)[0]

    def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        caching: CacheParams | None = None,
    ) -> Iterator[Piece]:
        """Complete a text, token ids or a conversation; yields text as it comes. Leaving early frees its blocks."""
        with closing(self.stream_many([self.prompt_ids(prompt)], params, caching)) as pieces:
            for _, piece in pieces:
                yield piece

    def sequence(self, prompt: Prompt = (), caching: CacheParams | None = None) -> TextSequence:
        """A text that grows, forks and rolls back on shared blocks. Nothing is computed until it has to be."""
        (cached,) = each(1, "caching", caching, CacheParams())
        ids = self.prompt_ids(prompt)
        unknown = self.engine.unknown_token(ids)
        if unknown is not None:
            raise RequestError(unknown)
        return TextSequence(self.generate, self.tokenizer, ids, cached)

    def explain(self, prompt: Prompt, caching: CacheParams | None = None) -> Explanation:
        """What of ``prompt`` a request would find in the cache now, and why not more. Changes nothing."""
        (cached,) = each(1, "caching", caching, CacheParams())
        with self._lock:
            return explain(self.engine, self.tokenizer, self.prompt_ids(prompt), cached)

    def retain(
        self,
        prompt: Prompt,
        retention: Retention | Sequence[Retention],
        namespace: str | None = None,
    ) -> int:
        """Set how long the cached blocks of a text are kept from now on; returns how many of its blocks there are."""
        caching = CacheParams(namespace, retention=retention)  # type: ignore[arg-type]
        ids = self.prompt_ids(prompt)
        with self._lock:
            return self.engine.retain(ids, caching)

    def prompt_ids(self, prompt: Prompt) -> tuple[int, ...]:
        """The token ids of a text, of token ids or, through the chat template, of a conversation."""
        if isinstance(prompt, list | tuple) and prompt and isinstance(prompt[0], dict):
            return tuple(self.tokenizer.encode_chat(prompt))
        return self._token_ids(prompt)  # type: ignore[arg-type]

    def stream_many(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        caching: CacheParams | Sequence[CacheParams] | None = None,
    ) -> Generator[tuple[int, Piece], None, None]:
        """Complete many prompts together; yields (index of the prompt, piece) as they come."""
        if not isinstance(prompts, Iterable) or isinstance(prompts, str | bytes | dict):
            raise RequestError(f"prompts is {repr(prompts)[:60]}; accepted: a list of texts or of lists of token ids")
        ids = [self.prompt_ids(prompt) for prompt in prompts]
        chosen = each(len(ids), "params", params, SamplingParams())
        yield from self._run(ids, chosen, each(len(ids), "caching", caching, CacheParams()))

    def _token_ids(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(prompt)) if isinstance(prompt, str) else checked_ids(prompt)

    def _run(
        self,
        prompts: Sequence[tuple[int, ...]],
        params: Sequence[SamplingParams],
        caching: Sequence[CacheParams],
    ) -> Iterator[tuple[int, Piece]]:
        """Submit and yield (index, piece). Several of these may be under way at once; each step serves them all."""
        mine: dict[RequestId, Answer] = {}
        try:
            with self._lock:
                try:
                    for index, (ids, chosen, cached) in enumerate(zip(prompts, params, caching, strict=True)):
                        self._owned.add(self.engine.next_id)  # before it is there: an interrupt leaves no orphan
                        request_id = self.engine.submit(ids, chosen, cached)
                        stream, stops = TextStream(self.tokenizer, after=ids), StopMatcher(chosen.stop)
                        answer = Answer(index, len(ids), chosen, stream, stops, self.engine.clock())
                        mine[request_id] = self._answers[request_id] = answer
                except BaseException:
                    self._let_go(mine)
                    raise
            while mine:
                with self._lock:  # another thread's step may have served us while we waited
                    self._tell_lost(mine)
                    if not any(answer.pieces or answer.error for answer in mine.values()):
                        self._step()
                for request_id, answer in list(mine.items()):
                    if not answer.pieces and answer.error is None:
                        continue
                    if answer.error is not None:
                        raise answer.error
                    piece = answer.pieces.popleft()
                    if piece.completion is not None:
                        del mine[request_id]
                    yield answer.index, piece
        finally:  # the caller left early, or something failed: what is still under way gives its blocks back
            with self._lock:
                self._let_go(mine)

    def _let_go(self, mine: dict[RequestId, Answer]) -> None:
        """Nobody waits for these answers any more: their requests end, and so do those that an interrupt orphaned."""
        for request_id in list(mine):
            self._answers.pop(request_id, None)
        mine.clear()
        for request_id in self._owned - self._answers.keys():
            self.engine.cancel(request_id)
            self._owned.discard(request_id)
        self.engine.settle()

    def _tell_lost(self, mine: dict[RequestId, Answer]) -> None:
        """An interrupt in another thread may have cost requests of ours."""
        for request_id, answer in mine.items():
            if not answer.pieces and answer.error is None and not self.engine.knows(request_id):
                answer.error = RequestError("the engine was interrupted in the midst of a decision: ask again")

    def _step(self) -> None:
        """One step of the engine; its tokens go to the answers they belong to."""
        try:
            for output in self.engine.step():
                self._take(output)
        except BaseException as error:  # Ctrl-C too: a step cut short is booked for nobody
            for answer in self._answers.values():
                answer.error = error
            self._answers.clear()
            self.engine.abandon()
            raise

    def _take(self, output: Output) -> None:
        """Turn one token into text for the answer it belongs to."""
        answer = self._answers.get(output.request_id)
        if answer is None:
            return  # somebody else submitted it to the engine
        text, reason = answer.push(output)
        if reason is None:
            if text:
                answer.pieces.append(Piece(text))
            return
        del self._answers[output.request_id]
        if output.finish_reason is None:  # a stop string: the scheduler does not know yet
            self.engine.cancel(output.request_id)
        answer.pieces.append(Piece(text, answer.completion(reason)))
