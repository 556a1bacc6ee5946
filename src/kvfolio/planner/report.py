"""The plan of one model on one kind of device, as plain data: every number that a face shows.

Knows nothing of how it is shown. Field names are the stable keys of ``kvfolio plan --json``.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from kvfolio.planner import capacity, sizes
from kvfolio.planner.options import PlanOptions
from kvfolio.planner.scene import Scene, make_scene
from kvfolio.spec.formats import BF16, CacheFormat
from kvfolio.spec.layers import HeadLayer, LayerKind, RecurrentState, parts_of
from kvfolio.spec.model import ModelSpec

USUAL_CONTEXTS = (4096, 32768, 131072)
_EXACT = CacheFormat(BF16, BF16)


@dataclass(frozen=True, slots=True)
class ModelReport:
    name: str
    model_type: str
    num_parameters: int
    num_active_parameters: int
    max_context: int | None


@dataclass(frozen=True, slots=True)
class LayerReport:
    """Equal layers. Bytes are those of one of them; ``bytes_fixed`` holds full windows, states, encoder tokens."""

    kind: str
    num_layers: int
    num_kv_heads: int
    head_dim: int  # of keys, or numbers of a latent vector with its rotary key
    v_head_dim: int
    window: int | None
    bytes_per_token: float  # one more token, once every window is full
    bytes_fixed: int
    bytes_per_token_held: int  # one token that is held: in a window, too
    detail: str  # for people: what the numbers above do not say


@dataclass(frozen=True, slots=True)
class KvReport:
    """The cache of one sequence: bytes_at(n) → bytes_fixed + bytes_per_token · n once every window is full."""

    format: str
    bytes_per_token: float
    bytes_fixed: int
    bytes_at: Mapping[str, int]  # context → bytes needed
    naive_bytes_at: Mapping[str, int]  # every head's key and value of every token
    kvfolio_bytes_at: Mapping[str, int]  # whole blocks, and an open block
    reserved_vllm_bytes_at: Mapping[str, int]
    layers: tuple[LayerReport, ...]


@dataclass(frozen=True, slots=True)
class DeviceReport:
    name: str
    memory_bytes: int  # of one
    bandwidth_bytes_per_s: int | None
    bf16_flops: float | None
    num_devices: int  # all of them: tensor parallel · pipeline stages
    tensor_parallel: int
    pipeline_stages: int
    weights_bytes: int  # on the device where the fewest sequences fit
    kv_memory_bytes: int  # for caches there


@dataclass(frozen=True, slots=True)
class UsersReport:
    """Sequences that fit. None: the cache does not bound them."""

    reserved: int | None  # the whole context set aside for each
    paged: int | None  # each at the mean, in blocks
    mean_tokens: int
    prefix_tokens: int
    prefix_saving_bytes: int  # with all paged users: what sharing the prefix saves


@dataclass(frozen=True, slots=True)
class StepReport:
    """One decode step at the first context, at best; tokens a second beside it."""

    time_s: float
    tokens_per_s_per_user: float
    tokens_per_s_total: float
    limit: str  # "memory" or "compute"
    fits: bool  # whether so many users fit; a speed is given either way
    users: int
    context: int
    weights_bytes_read: int  # by one device
    cache_bytes_read: int


@dataclass(frozen=True, slots=True)
class FlopsReport:
    """FLOPs of one token: 2 for each active weight; beside it q·k and p·v at the first context."""

    per_token: int
    attention_per_token: int
    prompt_tokens: int
    tokens: int
    without_cache_ratio_decode_only: float
    without_cache_ratio_with_prefill: float


@dataclass(frozen=True, slots=True)
class LengthReport:
    """One row of the table of contexts."""

    context: int
    beyond_model: bool  # more than the model was made to read
    bytes: int  # of one sequence
    device_bytes: int  # its part on the fullest device
    users: int | None
    step: StepReport | None  # with ``users`` of the options
    full_step: StepReport | None  # with all the users that fit
    ttft_s: float | None  # a prompt of that length, at best


@dataclass(frozen=True, slots=True)
class Plan:
    """What a model's cache costs on a device, and what that allows."""

    model: ModelReport
    assumptions: tuple[str, ...]
    kv: KvReport
    weights_bytes: int
    device: DeviceReport
    kv_memory_bytes: int  # of all devices together; 0 where the weights do not fit
    short_bytes: int  # that one device lacks for its weights; 0 where they fit
    users: UsersReport
    step: StepReport | None  # None: the device's bandwidth is not known
    flops: FlopsReport
    break_even_context: int | None  # where the users' caches outweigh the weights
    largest_context: int | None  # that the users asked for can have; None: unbounded
    contexts: tuple[LengthReport, ...]


def make_plan(spec: ModelSpec, options: PlanOptions) -> Plan:
    """The plan of ``spec`` under ``options``. Never negative, never NaN: what does not fit is 0 and ``short_bytes``.

    Raises OptionError for options at odds with each other or with the model.
    """
    notes: list[str] = []
    scene = make_scene(spec, options, notes)
    spec = scene.spec
    contexts = options.contexts or _usual_contexts(spec.max_context)
    _general_notes(scene, contexts[0], notes)
    weights, first = spec.weights, contexts[0]
    rows = tuple(_length_report(scene, context) for context in contexts)
    break_even = None
    if scene.weights_bytes:
        break_even = capacity.break_even_context(spec, scene.weights_bytes, options.users, scene.fmt)
    return Plan(
        model=ModelReport(spec.name, spec.model_type, weights.num_params, weights.num_active_params, spec.max_context),
        assumptions=tuple(dict.fromkeys(notes)),
        kv=_kv_report(spec, options, contexts),
        weights_bytes=scene.weights_bytes,
        device=_device_report(scene, first),
        kv_memory_bytes=scene.total_memory,
        short_bytes=scene.short_bytes,
        users=_users_report(scene, rows[0]),
        step=rows[0].step,
        flops=_flops_report(spec, options, first),
        break_even_context=break_even,
        largest_context=scene.largest_context(options.users),
        contexts=rows,
    )


def _usual_contexts(max_context: int | None) -> tuple[int, ...]:
    if max_context is None:
        return USUAL_CONTEXTS
    return tuple(context for context in USUAL_CONTEXTS if context <= max_context) or (max_context,)


def _general_notes(scene: Scene, context: int, notes: list[str]) -> None:
    options = scene.options
    if options.kv_format == "auto" and scene.spec.dtype == "f32":
        notes.append("the cache is counted at 16 bits, as engines serve; --kv-format f32 counts 32")
    if options.mean_tokens is None:
        mean = mean_tokens(options, context)
        notes.append(f"no mean length given: paged users are counted at {mean:,} tokens; --mean-tokens says else")
    if options.utilisation < 1:
        left = f"{100 * (1 - options.utilisation):.3g}"
        notes.append(f"{left}% of each device's memory is left to activations and the runtime")
    if scene.spec.weights.num_experts:
        notes.append("experts are chosen evenly and independently: a step reads those that its tokens reach")
    if options.devices * options.pipeline > 1:
        notes.append("time on the links between devices is not counted")


def mean_tokens(options: PlanOptions, context: int) -> int:
    """The mean length of a sequence: as given, else a shared prefix and half of what the first context adds to it."""
    if options.mean_tokens is not None:
        return options.mean_tokens
    prefix = min(options.prefix_tokens, context)
    return max(1, prefix + (context - prefix) // 2)


def _device_report(scene: Scene, context: int) -> DeviceReport:
    options, share = scene.options, scene.binding(context)
    device = options.device
    return DeviceReport(
        name=device.name,
        memory_bytes=device.memory_bytes or 0,
        bandwidth_bytes_per_s=device.bandwidth_bytes_per_s,
        bf16_flops=device.bf16_flops,
        num_devices=options.devices * options.pipeline,
        tensor_parallel=options.devices,
        pipeline_stages=options.pipeline,
        weights_bytes=share.weights_bytes,
        kv_memory_bytes=scene.memory(share),
    )


def _kv_report(spec: ModelSpec, options: PlanOptions, contexts: tuple[int, ...]) -> KvReport:
    fmt, block = options.cache_format, options.chosen_block_tokens
    exact = fmt if fmt.k.is_float and fmt.v.is_float else _EXACT
    return KvReport(
        format=fmt.name,
        bytes_per_token=plain(sizes.growth(spec, fmt)),
        bytes_fixed=sizes.fixed_bytes(spec, fmt),
        bytes_at={str(n): sizes.bytes_at(spec, n, fmt) for n in contexts},
        naive_bytes_at={str(n): sizes.naive_bytes_at(spec, n, fmt) for n in contexts},
        kvfolio_bytes_at={str(n): sizes.kvfolio_bytes_at(spec, n, fmt, exact, block) for n in contexts},
        reserved_vllm_bytes_at={str(n): sizes.vllm_bytes_at(spec, n, fmt, block, options.in_flight) for n in contexts},
        layers=tuple(_layer_report(part, count, fmt) for kind, count in spec.kinds() for part in parts_of(kind)),
    )


def _layer_report(kind: LayerKind, count: int, fmt: CacheFormat) -> LayerReport:
    detail = ""
    if isinstance(kind, RecurrentState):
        detail = f"{kind.mechanism}: {kind.state_numbers:,} {kind.state_format.name}"
        detail += f" and {kind.conv_numbers:,} {kind.conv_format.name}" if kind.conv_numbers else ""
    return LayerReport(
        kind=kind.kind,
        num_layers=count,
        num_kv_heads=kind.num_kv_heads,
        head_dim=kind.head_dim,
        v_head_dim=kind.v_width if isinstance(kind, HeadLayer) else kind.head_dim,
        window=kind.window,
        bytes_per_token=plain(kind.growth(fmt)),
        bytes_fixed=kind.fixed_bytes(fmt),
        bytes_per_token_held=kind.token_bytes(fmt),
        detail=detail,
    )


def _users_report(scene: Scene, first: LengthReport) -> UsersReport:
    mean = mean_tokens(scene.options, first.context)
    paged = scene.users_at(mean, shares_prefix=True)
    saving = scene.shared_bytes(scene.spec, mean) * max(0, (paged or 1) - 1)
    return UsersReport(first.users, paged, mean, scene.options.prefix_tokens, saving)


def _flops_report(spec: ModelSpec, options: PlanOptions, context: int) -> FlopsReport:
    """With a cache one pass a token; without, a pass over all tokens so far. Both pay the prompt's pass."""
    prompt, steps = options.prompt_tokens, options.tokens - 1
    without = steps * prompt + steps * (steps + 1) // 2  # Σ (prompt + i), i = 1 … steps
    return FlopsReport(
        per_token=2 * spec.weights.num_active_params,
        attention_per_token=sizes.attention_flops_at(spec, context),
        prompt_tokens=prompt,
        tokens=options.tokens,
        without_cache_ratio_decode_only=without / steps,
        without_cache_ratio_with_prefill=(prompt + without) / (prompt + steps),
    )


def _length_report(scene: Scene, context: int) -> LengthReport:
    users, limit = scene.users_at(context), scene.spec.max_context
    return LengthReport(
        context=context,
        beyond_model=limit is not None and context > limit,
        bytes=sizes.bytes_at(scene.spec, context, scene.fmt),
        device_bytes=scene.sequence_bytes(scene.binding(context).spec, context),
        users=users,
        step=_step_report(scene, context, scene.options.users, users),
        full_step=_step_report(scene, context, users or 0, users),
        ttft_s=scene.first_token_s(context),
    )


def _step_report(scene: Scene, context: int, users: int, most: int | None) -> StepReport | None:
    """The step of ``users``, of whom ``most`` fit."""
    step = scene.step(context, users)
    if step is None:
        return None
    return StepReport(
        time_s=step.time_s,
        tokens_per_s_per_user=step.tokens_per_s_per_user,
        tokens_per_s_total=step.tokens_per_s_total,
        limit=step.limit,
        fits=most is None or users <= most,
        users=users,
        context=context,
        weights_bytes_read=step.weights_bytes_read,
        cache_bytes_read=step.cache_bytes_read,
    )


def plain(value: Fraction) -> float:
    """A whole number where it is one, else the nearest float."""
    return value.numerator if value.denominator == 1 else float(value)
