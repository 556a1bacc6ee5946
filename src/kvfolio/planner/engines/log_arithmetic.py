"""What the numbers of a start-up log would be: the arithmetic of vLLM and SGLang, assumption by assumption.

Knows nothing of how a log is written or how the outcome is told. vLLM: v1/core/kv_cache_utils.py and
kv_cache_interface.py; SGLang: mem_cache/memory_pool.py.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction

from kvfolio.planner import sizes
from kvfolio.planner.engines.log_lines import LogFacts
from kvfolio.planner.options import PlanOptions
from kvfolio.planner.parallel import DeviceShare, device_shares, fullest
from kvfolio.planner.scene import published_weights_bytes
from kvfolio.spec.formats import CacheFormat, parse_cache_format
from kvfolio.spec.layers import CrossAttention, LatentAttention, RecurrentState, SingleKind, parts_of
from kvfolio.spec.model import ModelSpec

_USUAL_TOKENS = 8192  # by which stages are compared where the log has no length
_USUAL_IN_FLIGHT = (2048, 8192, 16384)  # vLLM's own choices of max_num_batched_tokens
_DTYPES = {  # an engine's name of a storage format → kvfolio's
    "bfloat16": "bf16",
    "bf16": "bf16",
    "torch.bfloat16": "bf16",
    "float16": "f16",
    "torch.float16": "f16",
    "fp8": "fp8",
    "fp8_e4m3": "fp8",
    "fp8_e5m2": "fp8",
    "fp8_inc": "fp8",
    "torch.uint8": "fp8",
    "torch.float8_e4m3fn": "fp8",
    "torch.float8_e5m2": "fp8",
    "fp8_ds_mla": "fp8-mla",
    "fp8_per_token_head": "fp8-scaled",
    "int8_per_token_head": "int8",
    "int4_per_token_head": "int4-head",
}


@dataclass(frozen=True, slots=True)
class LogScene:
    """The plan with the log's settings in place of the options."""

    facts: LogFacts
    spec: ModelSpec  # one device's part
    share: DeviceShare
    fmt: CacheFormat
    fmt_name: str
    block: int
    in_flight: tuple[int, ...]  # as logged, else as planned and then the usual ones
    context: int | None
    usable: int  # bytes of one device for weights and caches
    pool: float | None  # bytes of all caches, as logged
    notes: tuple[str, ...]  # where the log's settings are not the options'

    @property
    def room(self) -> int:
        """Bytes for caches by the plan."""
        return max(0, self.usable - self.share.weights_bytes)


@dataclass(frozen=True, slots=True)
class Guess:
    """What a number would be, and under which assumption."""

    value: float
    assumption: str


def tokens_of(count: float) -> str:
    """``count`` with its word: 1 token, 2,048 tokens."""
    return f"{count:,.0f} token{'' if round(count) == 1 else 's'}"


def read_scene(facts: LogFacts, spec: ModelSpec, options: PlanOptions) -> LogScene:
    """The plan of ``spec`` under ``options``, with what the log says of the settings."""
    notes: list[str] = []
    settings = facts.settings

    def count(name: str, planned: int) -> int:
        found = settings.get(name)
        if not isinstance(found, int) or found == planned:
            return planned
        notes.append(f"{name} is {found:,} in the log, {planned:,} in the plan: the log's counts")
        return found

    tensor, pipeline = count("tensor_parallel", options.devices), count("pipeline", options.pipeline)
    weights = published_weights_bytes(spec, options, [])
    total = facts.device_memory or options.device.memory_bytes or 0
    usable = max(0, int(total * float(settings.get("gpu_memory_utilization", options.utilisation))) - options.reserve)
    context = settings.get("max_model_len")
    tokens = context if isinstance(context, int) else _USUAL_TOKENS

    def fullest_of(heads: int) -> DeviceShare:
        shares = device_shares(spec, weights, heads, pipeline)
        return fullest(
            shares,
            lambda part: usable - part.weights_bytes,
            lambda part: sizes.bytes_at(part, tokens, options.cache_format),
        )

    share = fullest_of(tensor)
    own, replicas = share.spec, settings.get("data_parallel")
    if "dp_attention" in settings and isinstance(replicas, int):
        own = fullest_of(max(1, tensor // replicas)).spec
    fmt_name = _format_name(facts, options, notes)
    block = (
        settings.get("block_size", 1) if facts.engine == "sglang" else count("block_size", options.chosen_block_tokens)
    )
    logged = settings.get("max_num_batched_tokens")
    in_flight = (logged,) if isinstance(logged, int) else tuple(dict.fromkeys((options.in_flight, *_USUAL_IN_FLIGHT)))
    pools = [found.value for found in facts.numbers if found.quantity == "pool"]
    memory = next((found.value for found in facts.numbers if found.quantity == "KV cache memory"), None)
    return LogScene(
        facts=facts,
        spec=own,
        share=share,
        fmt=parse_cache_format(fmt_name),
        fmt_name=fmt_name,
        block=int(block),
        in_flight=in_flight,
        context=context if isinstance(context, int) else None,
        usable=usable,
        pool=sum(pools) if pools else memory if memory is not None and memory > 0 else None,
        notes=tuple(notes),
    )


def _format_name(facts: LogFacts, options: PlanOptions, notes: list[str]) -> str:
    planned = "bf16" if options.kv_format == "auto" else options.kv_format
    logged = facts.settings.get("kv_dtype", "auto")
    if logged == "auto":
        return planned
    found = _DTYPES.get(str(logged))
    if found is None:
        notes.append(f"a cache in {logged} is not counted; {planned}, the plan's, is taken")
        return planned
    # Both are fp8 to the engine's flag; the plan may know better which.
    if found == "fp8" and planned in ("fp8", "fp8-mla"):
        return planned
    if found != planned:
        notes.append(f"the cache is {found} in the log, {planned} in the plan: the log's counts")
    return found


# ---- what a number would be -----------------------------------------------------------------------------------------


def _parts(spec: ModelSpec) -> "Counter[SingleKind]":
    """The memories of one device that hold tokens, each with its number."""
    parts: Counter[SingleKind] = Counter()
    for kind, count in spec.kinds():
        for part in parts_of(kind):
            if not isinstance(part, RecurrentState | CrossAttention):
                parts[part] += count
    return parts


def _in_groups(parts: "Counter[SingleKind]", fmt: CacheFormat) -> "Counter[SingleKind]":
    """The layers that hold tokens, grouped as vLLM does."""
    return sizes.in_groups(Counter({part: count for part, count in parts.items() if part.token_bytes(fmt)}))


def per_token(spec: ModelSpec, fmt: CacheFormat) -> Iterator[tuple[Fraction, str]]:
    """Bytes that one token of a pool may stand for, the plainest first."""
    parts = _parts(spec)
    every = sum(count * part.token_bytes(fmt) for part, count in parts.items())
    growth = sizes.growth(spec, fmt)
    windows = any(part.horizon() is not None for part in parts)
    yield Fraction(every), "every layer holds every token" if windows else "a token of all layers"
    grouped = _in_groups(parts, fmt)
    padded = sum(count * part.token_bytes(fmt) for part, count in grouped.items())
    widest = max((part.token_bytes(fmt) for part in grouped), default=0) * sum(grouped.values())
    yield Fraction(padded), "every layer holds every token, layers padded to groups of equal size"
    yield Fraction(widest), "every layer is given the page of the widest, in groups of equal size"
    states = _state_layers(spec, fmt)
    if states and grouped:
        each = max(part.token_bytes(fmt) for part in grouped)
        yield Fraction(widest + states * each), "layers with a state are given pages of tokens, too"
    yield growth, "only the layers that keep every token count"
    yield every - growth, "only the layers with a window count"


def _state_layers(spec: ModelSpec, fmt: CacheFormat) -> int:
    """Layers with a recurrent state, padded to groups as large as the rarest kind of layer."""
    states: Counter[SingleKind] = Counter()
    for kind, count in spec.kinds():
        for part in parts_of(kind):
            if isinstance(part, RecurrentState):
                states[part] += count
    group = min([*states.values(), *_in_groups(_parts(spec), fmt).values()], default=1)
    return sum(-(-count // group) * group for count in states.values())


def variants(scene: LogScene) -> Iterator[tuple[ModelSpec, CacheFormat, str]]:
    """The plan's part of a device, then the same with one thing changed that a log may not say."""
    yield scene.spec, scene.fmt, ""
    for name in ("bf16", "fp8", "fp8-mla"):
        if parse_cache_format(name) != scene.fmt:
            yield scene.spec, parse_cache_format(name), f" with the cache in {name}, not {scene.fmt_name}"
    bare = _without_index(scene.spec)
    if bare != scene.spec:
        for fmt in dict.fromkeys((scene.fmt, parse_cache_format("fp8-mla"))):
            yield bare, fmt, f" in {fmt.name}, index keys not counted, as SGLang did until October 2025"
    if scene.facts.draft:
        more = replace(scene.spec, layers=(*scene.spec.layers, scene.spec.layers[-1]))
        yield more, scene.fmt, " with one more layer, that of a draft (MTP) model"
    if "tensor_parallel" not in scene.facts.settings:
        for devices in (2, 4, 8):
            yield device_shares(scene.spec, 0, devices)[0].spec, scene.fmt, f" with {devices} times the devices"


def _without_index(spec: ModelSpec) -> ModelSpec:
    layers = (replace(kind, index_width=0) if isinstance(kind, LatentAttention) else kind for kind in spec.layers)
    return replace(spec, layers=tuple(layers))


def request_bytes(scene: LogScene, spec: ModelSpec, fmt: CacheFormat, tokens: int) -> Iterator[tuple[Fraction, str]]:
    """Bytes that vLLM may count for one request of ``tokens``."""
    whole = sizes.rounded_up(tokens, scene.block)
    if any(part.horizon() is not None for part in _parts(spec)):
        for flight in scene.in_flight if not scene.facts.windows_whole else ():
            counted = sizes.vllm_bytes_at(spec, tokens, fmt, scene.block, flight)
            yield Fraction(counted), f"windows widened by {tokens_of(flight)} in flight, in blocks of {scene.block}"
        for each, assumption in per_token(spec, fmt):
            yield each * whole, assumption
    else:
        pages = (
            _state_layers(spec, fmt) * scene.block * max((part.token_bytes(fmt) for part in _parts(spec)), default=0)
        )
        tokens_alone = next(per_token(spec, fmt))[0] * whole
        for copies in (1, 2, 3) if pages else ():
            yield (
                tokens_alone + copies * pages,
                f"states in whole pages of {tokens_of(scene.block)}, {copies} a request",
            )
        counted = sizes.vllm_bytes_at(spec, tokens, fmt, scene.block)
        yield Fraction(counted), f"{counted:,} B for {tokens_of(tokens)} in blocks of {scene.block}"


def token_guesses(scene: LogScene, unit: int) -> Iterator[Guess]:
    """Tokens that the cache holds, in pieces of ``unit``: of all, and of one pool where there are several."""
    pools = [found.tokens for found in scene.facts.numbers if found.quantity == "pool"]
    if len(pools) > 1:
        yield from (Guess(tokens / unit, f"the pool of {tokens_of(tokens)}") for tokens in pools)
    memory = scene.pool if scene.pool is not None else scene.room
    source = "logged memory" if scene.pool is not None else "planned memory"
    for spec, fmt, changed in variants(scene):
        for each, assumption in per_token(spec, fmt):
            if each:
                yield Guess(float(memory / each / unit), f"{source} / {float(each):,.10g} B: {assumption}{changed}")
        if scene.context:
            for request, assumption in request_bytes(scene, spec, fmt, scene.context):
                if request:
                    value = float(memory / request * scene.context / unit)
                    of = f"one request of {tokens_of(scene.context)}"
                    yield Guess(value, f"{source} / {of}: {assumption}{changed}")


def concurrency_guesses(scene: LogScene, tokens: int) -> Iterator[Guess]:
    logged = {found.quantity: found.value for found in scene.facts.numbers}
    windows = any(part.horizon() is not None for part in _parts(scene.spec))
    if "blocks" in logged and not windows:
        need = -(-tokens // scene.block)
        yield Guess(
            logged["blocks"] / need, f"blocks / {need:,}, so many of {tokens_of(scene.block)} each a request needs"
        )
    held = logged.get("KV cache tokens")
    if held is not None and (scene.pool is None or not windows):
        newer = ": vLLM since 0.20 logs concurrency * context as its tokens" if windows else ""
        yield Guess(held / tokens, f"{tokens_of(held)} / {tokens:,}{newer}")
    memories = [(scene.pool, "logged memory")] if scene.pool is not None else []
    if held is not None and scene.pool is None:
        # Older vLLM: tokens = blocks / groups * block size, which counts each layer with every token.
        memories = [
            (held * float(each), f"tokens * {float(each):,.0f} B") for each, _ in per_token(scene.spec, scene.fmt)
        ]
    for spec, fmt, changed in variants(scene):
        for memory, source in memories or [(float(scene.room), "planned memory")]:
            for request, assumption in request_bytes(scene, spec, fmt, tokens):
                if memory and request:
                    yield Guess(memory / float(request), f"{source} / {float(request):,.0f} B: {assumption}{changed}")


def pool_guesses(scene: LogScene, tokens: int) -> Iterator[Guess]:
    slots = tokens + scene.block  # one page more, for padding
    for spec, fmt, changed in variants(scene):
        for each, assumption in per_token(spec, fmt):
            if each:
                yield Guess(float(slots * each), f"{slots:,} slots * {float(each):,.10g} B: {assumption}{changed}")
    for part in _parts(scene.spec):
        one = part.token_bytes(scene.fmt)
        yield Guess(
            float(slots * one), f"{slots:,} slots * {one:,} B: one {part.kind} layer, as a draft (MTP) model has"
        )


def request_guesses(scene: LogScene, tokens: int) -> Iterator[Guess]:
    """Bytes that vLLM wants for one request of ``tokens``."""
    for spec, fmt, changed in variants(scene):
        for request, assumption in request_bytes(scene, spec, fmt, tokens):
            if request:
                yield Guess(float(request), f"{assumption}{changed}")


def nearest(logged: float, guesses: Iterator[Guess], slack: float) -> Guess | None:
    """The first guess that is as near as ``slack``, else the nearest of all."""
    best, distance = None, float("inf")
    for guess in guesses:
        off = abs(logged / guess.value - 1) if guess.value else float("inf")
        if off <= slack:
            return guess
        if off < distance:
            best, distance = guess, off
    return best
