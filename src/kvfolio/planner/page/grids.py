"""Every number that the HTML page can show, counted once: tables over context, users, format, devices and models.

Knows nothing of how they are drawn. The page looks numbers up and joins them by ``files/formulas.js`` alone:
users = ⌊memory / bytes⌋, time = max(bytes / bandwidth, FLOPs / peak). Fields become the keys of the page's JSON.
"""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from kvfolio.planner import capacity, sizes
from kvfolio.planner.hardware import Device, devices
from kvfolio.planner.options import PlanOptions
from kvfolio.planner.parallel import DeviceShare, device_shares
from kvfolio.planner.report import Plan, make_plan, plain
from kvfolio.planner.scene import published_weights_bytes, with_encoder
from kvfolio.planner.steptime import Speeds, prefill_work, step_time
from kvfolio.planner.whatif import what_if
from kvfolio.planner.words import long_words
from kvfolio.spec.formats import CacheFormat
from kvfolio.spec.layers import parts_of
from kvfolio.spec.model import ModelSpec

FORMATS = ("bf16", "fp8", "int8", "k8v4", "int6", "int4")
COUNTS = (1, 2, 4, 8)
DEVICES = (
    *("l4", "l40s", "rtx-4090", "rtx-5090", "a100-sxm-80gb", "h100-sxm", "h200-sxm", "b200-sxm", "mi300x", "mi355x"),
    *("tpu-v6e", "apple-m4-max-40c", "gb10-dgx-spark"),
)
SHORTEST, LONGEST = 1024, 1 << 20  # tokens, of the context slider
MOST_USERS = 4096  # of the users slider
_COUNTING = Speeds(1.0, None)  # where only bytes and FLOPs are asked for


@dataclass(frozen=True, slots=True)
class DeviceRow:
    """One device of the menu."""

    name: str
    arguments: str  # of the command line that gives this device
    memory_bytes: int
    usable_bytes: int  # what the options leave of it to weights and caches
    bandwidth_bytes_per_s: int | None
    bf16_flops: float | None
    source: str
    notes: str


@dataclass(frozen=True, slots=True)
class FormatGrid:
    """One model in one format, on all devices together."""

    bytes_per_token: float
    bytes_fixed: int
    bytes_at: tuple[int, ...]  # [context] of one sequence
    break_even: tuple[int | None, ...]  # [users] tokens
    ladder: tuple[tuple[int, ...] | None, ...]  # [design][context] bytes of one sequence; None: not in this format


@dataclass(frozen=True, slots=True)
class ShareCache:
    """One sequence's cache on one device, in one format, whole blocks."""

    device_bytes: tuple[int, ...]  # [context]
    read_bytes: tuple[int, ...]  # [context] by one decode step
    by_kind: tuple[tuple[int, ...], ...]  # [layer kind][context]; the sum is ``device_bytes``


@dataclass(frozen=True, slots=True)
class ShareGrid:
    """One device's share of a model cut into so many."""

    weights_bytes: int
    weights_read: tuple[int, ...]  # [users] by one decode step
    decode_flops: tuple[int, ...]  # [context] of one token
    prefill_flops: tuple[int, ...]  # [context] of a whole prompt
    prefill_read: tuple[int, ...]  # [context] bytes of weights that a whole prompt's pass reads
    caches: tuple[ShareCache, ...]  # [format]


@dataclass(frozen=True, slots=True)
class ModelGrid:
    """One model: what does not depend on the device beyond how many there are."""

    name: str
    max_context: int | None
    num_parameters: int
    num_active_parameters: int
    weights_bytes: int
    kinds: tuple[str, ...]  # layer kinds that hold a cache, in words
    designs: tuple[str, ...]  # "as published", "MHA", …
    format_ladder: Mapping[str, tuple[int, ...]]  # format → [context] bytes of one sequence
    formats: tuple[FormatGrid, ...]  # [format]
    shares: tuple[ShareGrid, ...]  # [count]


@dataclass(frozen=True, slots=True)
class Grid:
    """All of it. The chosen values are indices into the lists: where the page's controls stand at first."""

    contexts: tuple[int, ...]
    users: tuple[int, ...]
    formats: tuple[str, ...]
    counts: tuple[int, ...]  # devices, tensor parallel
    devices: tuple[DeviceRow, ...]
    models: tuple[ModelGrid, ...]
    chosen: Mapping[str, int]


def make_grid(specs: Sequence[ModelSpec], options: PlanOptions) -> Grid:
    """The numbers of ``specs`` under ``options``, which also say where the controls stand at first."""
    first = max(1, options.contexts[0] if options.contexts else make_plan(specs[0], options).contexts[0].context)
    limits = [spec.max_context for spec in specs if spec.max_context]
    contexts = _stops(SHORTEST, LONGEST, [first, *(max(1, context) for context in options.contexts), *limits])
    users = _stops(1, MOST_USERS, [options.users])
    asked = "bf16" if options.kv_format == "auto" else options.kv_format
    formats = FORMATS if asked in FORMATS else (asked, *FORMATS)
    counts = tuple(sorted({*COUNTS, options.devices}))
    rows, device = _device_rows(options)
    chosen = {
        "context": contexts.index(first),
        "users": users.index(options.users),
        "format": formats.index(asked),
        "count": counts.index(options.devices),
        "device": device,
    }
    parsed = tuple(options.in_format(name).cache_format for name in formats)
    axes = _Axes(options, contexts, users, parsed, formats, counts)
    models = tuple(_model_grid(spec, axes) for spec in specs)
    return Grid(contexts, users, formats, counts, rows, models, chosen)


@dataclass(frozen=True, slots=True)
class _Axes:
    options: PlanOptions
    contexts: tuple[int, ...]
    users: tuple[int, ...]
    formats: tuple[CacheFormat, ...]
    format_names: tuple[str, ...]
    counts: tuple[int, ...]

    def over_contexts(self, value: Callable[[int], int]) -> tuple[int, ...]:
        return tuple(value(context) for context in self.contexts)

    def block(self, fmt: CacheFormat) -> int:
        """Tokens of a block in ``fmt``."""
        return self.options.in_format(self.format_names[self.formats.index(fmt)]).chosen_block_tokens


def _stops(low: int, high: int, more: Sequence[int]) -> tuple[int, ...]:
    """Two stops an octave, 1 and 1.5 times a power of two, and ``more``."""
    stops = {*more}
    while low <= high:
        stops |= {low, low * 3 // 2} if low < high else {low}
        low *= 2
    return tuple(sorted(stops))


def _device_rows(options: PlanOptions) -> tuple[tuple[DeviceRow, ...], int]:
    """The menu, and where the device of ``options`` stands in it: first, unless the table's numbers are meant."""
    known = {device.name: device for device in devices()}
    menu = [known[name] for name in DEVICES]
    if options.device not in menu:
        menu.insert(0, options.device)
    rows = tuple(
        DeviceRow(
            name=device.name if device == known.get(device.name, device) else f"{device.name} (as given)",
            arguments=_device_arguments(device, known.get(device.name)),
            memory_bytes=device.memory_bytes or 0,
            usable_bytes=replace(options, device=device).usable_bytes,
            bandwidth_bytes_per_s=device.bandwidth_bytes_per_s,
            bf16_flops=device.bf16_flops,
            source=device.source,
            notes=device.notes,
        )
        for device in menu
    )
    return rows, menu.index(options.device)


def _device_arguments(device: Device, known: Device | None) -> str:
    is_measured = device.source.startswith("measured")  # "this", whose own numbers only a measurement tells
    words = ["--device this"] if is_measured else [f"--device {shlex.quote(device.name)}"] if known else []
    own = known or Device(device.name, "", None, None, None, None, None, "", "")
    if device.memory_bytes != own.memory_bytes:
        words.append(f"--device-memory {device.memory_bytes}")
    if device.bandwidth_bytes_per_s != own.bandwidth_bytes_per_s:
        words.append(f"--bandwidth {device.bandwidth_bytes_per_s}")
    if device.bf16_flops is not None and device.bf16_flops != own.bf16_flops:
        words.append(f"--flops {device.bf16_flops:.12g}")
    return " ".join(words)


# ---- one model ------------------------------------------------------------------------------------------------------


def _model_grid(spec: ModelSpec, axes: _Axes) -> ModelGrid:
    options = axes.options
    spec = with_encoder(spec, options.encoder_tokens)
    one_of_each = {kind: kind for kind in spec.layers}  # equal layers as one object are counted far quicker
    spec = replace(spec, layers=tuple(one_of_each[kind] for kind in spec.layers))
    weights_bytes = published_weights_bytes(spec, options, [])
    designs, ladders, format_ladder = _ladders(spec, axes)
    parts = dict.fromkeys(long_words(part) for kind, _ in spec.kinds() for part in parts_of(kind))
    shares = [device_shares(spec, weights_bytes, count)[0] for count in axes.counts]
    held = tuple(words for words in parts if any(_kind_bytes(spec, words, SHORTEST, fmt) for fmt in axes.formats))
    return ModelGrid(
        name=spec.name,
        max_context=spec.max_context,
        num_parameters=spec.weights.num_params,
        num_active_parameters=spec.weights.num_active_params,
        weights_bytes=weights_bytes,
        kinds=held,
        designs=designs,
        format_ladder=format_ladder,
        formats=tuple(
            FormatGrid(
                bytes_per_token=plain(sizes.growth(spec, fmt)),
                bytes_fixed=sizes.fixed_bytes(spec, fmt),
                bytes_at=axes.over_contexts(lambda n, fmt=fmt: sizes.bytes_at(spec, n, fmt)),  # type: ignore[misc]
                break_even=tuple(capacity.break_even_context(spec, weights_bytes, users, fmt) for users in axes.users),
                ladder=ladder,
            )
            for fmt, ladder in zip(axes.formats, ladders, strict=True)
        ),
        shares=tuple(_share_grid(share, held, axes) for share in shares),
    )


def _share_grid(share: DeviceShare, kinds: tuple[str, ...], axes: _Axes) -> ShareGrid:
    """Bytes and FLOPs of one device's share."""
    fmt = axes.formats[0]
    prefills = [prefill_work(share, context) for context in axes.contexts]
    return ShareGrid(
        weights_bytes=share.weights_bytes,
        weights_read=tuple(
            step_time((share,), fmt, SHORTEST, users, _COUNTING).weights_bytes_read for users in axes.users
        ),
        decode_flops=axes.over_contexts(lambda n: step_time((share,), fmt, n, 1, _COUNTING).flops),
        prefill_flops=tuple(flops for flops, _ in prefills),
        prefill_read=tuple(read for _, read in prefills),
        caches=tuple(_share_cache(share.spec, fmt, kinds, axes) for fmt in axes.formats),
    )


def _share_cache(spec: ModelSpec, fmt: CacheFormat, kinds: tuple[str, ...], axes: _Axes) -> ShareCache:
    block = axes.block(fmt)
    return ShareCache(
        device_bytes=axes.over_contexts(lambda n: capacity.sequence_bytes(spec, n, fmt, block)),
        read_bytes=axes.over_contexts(lambda n: sizes.bytes_read_at(spec, n, fmt)),
        by_kind=tuple(
            axes.over_contexts(lambda n, words=words: _kind_bytes(spec, words, sizes.rounded_up(n, block), fmt))  # type: ignore[misc]
            for words in kinds
        ),
    )


def _kind_bytes(spec: ModelSpec, words: str, num_tokens: int, fmt: CacheFormat) -> int:
    return sum(
        count * part.bytes_at(num_tokens, fmt)
        for kind, count in spec.kinds()
        for part in parts_of(kind)
        if long_words(part) == words
    )


def _ladders(
    spec: ModelSpec, axes: _Axes
) -> tuple[tuple[str, ...], list[tuple[tuple[int, ...] | None, ...]], dict[str, tuple[int, ...]]]:
    """Names of the designs; their bytes [format][design][context]; and format → bytes [context] of the model itself."""
    silent = replace(axes.options.device, bandwidth_bytes_per_s=None)  # no speeds are asked for
    bare = replace(axes.options, mean_tokens=None, prefix_tokens=0)  # they need not fit every context of the page
    quiet = replace(bare, device=silent, devices=1, contexts=axes.contexts)
    asked = {name: quiet.in_format(name) for name in axes.format_names}
    of_latents = {name for name, fmt in zip(axes.format_names, axes.formats, strict=True) if fmt.rope is not None}
    found = {name: what_if(spec, options) for name, options in asked.items() if name not in of_latents}
    rows = found[FORMATS[-1]]  # which is for any design
    designs = tuple(row.name for row in rows if row.sort != "format")
    no_others = (None,) * (len(designs) - 1)  # a format of latents says nothing of other designs
    ladders: list[tuple[tuple[int, ...] | None, ...]] = [
        (_bytes_over(make_plan(spec, options)), *no_others)
        if name in of_latents
        else tuple(_bytes_over(row.plan) for row in found[name] if row.sort != "format")
        for name, options in asked.items()
    ]
    return designs, ladders, {row.name: _bytes_over(row.plan) for row in rows if row.sort == "format"}


def _bytes_over(plan: Plan) -> tuple[int, ...]:
    return tuple(at.bytes for at in plan.contexts)
