"""What a plan is asked: numbers checked where they are made, and the friendly forms in which people give them.

Knows nothing of models or of how a plan is made.
"""

import dataclasses
import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypedDict, Unpack

from kvfolio.errors import OptionError
from kvfolio.planner.hardware import Device, devices, find_device
from kvfolio.planner.memory import BLOCK_TOKENS_ALLOWED, DEFAULT_BLOCK_TOKENS
from kvfolio.planner.sizes import DEFAULT_IN_FLIGHT
from kvfolio.spec.formats import CacheFormat, parse_cache_format
from kvfolio.units import parse_bytes, parse_tokens

DEFAULT_DEVICE = "h100-sxm"
DEFAULT_UTILISATION = 0.9
MAX_COUNT = 10**12  # users, tokens of a context, conversations: beyond it is a slip of the finger


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Everything a plan depends on beside the model. Bytes, tokens and seconds are plain numbers here."""

    device: Device
    contexts: tuple[int, ...] = ()  # tokens; empty: usual steps up to what the model can read
    users: int = 1  # sequences in one decode step
    utilisation: float = DEFAULT_UTILISATION  # share of a device's memory that may be used
    reserve: int = 0  # bytes of each device kept free beside that
    devices: int = 1  # tensor parallel: heads and weights divided
    pipeline: int = 1  # pipeline stages: layers divided
    kv_format: str = "auto"  # auto: 16 bits
    block_tokens: int = DEFAULT_BLOCK_TOKENS
    weights_bytes: int | None = None  # None: as published
    mean_tokens: int | None = None  # of a sequence, for paged memory; None: half of the first context
    prefix_tokens: int = 0  # that all sequences share
    prompt_tokens: int = 1000  # for FLOPs with and without a cache
    tokens: int = 500
    in_flight: int = DEFAULT_IN_FLIGHT  # tokens in one step, by which vLLM widens its windows
    encoder_tokens: int = 0  # of cross-attention layers whose length the input decides
    assumptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_counts(self)
        if self.block_tokens not in BLOCK_TOKENS_ALLOWED:
            raise OptionError(f"block_tokens is {self.block_tokens}; accepted: {BLOCK_TOKENS_ALLOWED}")
        if not (math.isfinite(self.utilisation) and 0 < self.utilisation <= 1):
            raise OptionError(
                f"utilisation is {self.utilisation}; accepted: above 0, at most 1 (0.9: 90 % of the memory)"
            )
        if self.tokens < 2:
            raise OptionError("tokens is 1; at least 2, since the prompt's pass already gives the first")
        self.cache_format  # noqa: B018 - an unknown format is refused here

    @property
    def cache_format(self) -> CacheFormat:
        return parse_cache_format("bf16" if self.kv_format == "auto" else self.kv_format)


def _check_counts(options: PlanOptions) -> None:
    bounds = {
        "users": (options.users, 1),
        "devices": (options.devices, 1),
        "pipeline": (options.pipeline, 1),
        "prompt_tokens": (options.prompt_tokens, 1),
        "tokens": (options.tokens, 1),
        "prefix_tokens": (options.prefix_tokens, 0),
        "in_flight": (options.in_flight, 1),
        "encoder_tokens": (options.encoder_tokens, 0),
        "reserve": (options.reserve, 0),
    }
    if options.mean_tokens is not None:
        bounds["mean_tokens"] = (options.mean_tokens, 1)
    if options.weights_bytes is not None:
        bounds["weights_bytes"] = (options.weights_bytes, 0)
    for name, (value, low) in bounds.items():
        high = MAX_COUNT * (10**6 if name in ("reserve", "weights_bytes") else 1)
        if not low <= value <= high:
            raise OptionError(f"{name} is {value:,}; accepted: {low} to {high:,}")
    if len(options.contexts) > 100 or any(not 0 <= context <= MAX_COUNT for context in options.contexts):
        raise OptionError(f"contexts must be at most 100 numbers of 0 to {MAX_COUNT:,} tokens")


class PlanArguments(TypedDict, total=False):
    """The options as people give them: sizes and contexts also as text (``80GB``, ``"4096,128k"``)."""

    context: int | str | Sequence[int]
    users: int
    device: str | Device
    device_memory: int | str
    bandwidth: int | str
    flops: float
    utilisation: float
    reserve: int | str
    devices: int
    pipeline: int
    kv_format: str
    block_tokens: int
    weights_bytes: int | str
    mean_tokens: int | str
    prefix_tokens: int | str
    prompt_tokens: int | str
    tokens: int | str
    in_flight: int | str
    encoder_tokens: int | str


_SIZES = ("reserve", "weights_bytes")
_TOKENS = ("mean_tokens", "prefix_tokens", "prompt_tokens", "tokens", "in_flight", "encoder_tokens")
_DEVICE = ("context", "device", "device_memory", "bandwidth", "flops")


def read_options(**given: Unpack[PlanArguments]) -> PlanOptions:
    """``given`` as PlanOptions; raises OptionError that names the option and what it accepts."""
    unknown = given.keys() - PlanArguments.__annotations__.keys()
    if unknown:
        known = ", ".join(PlanArguments.__annotations__)
        raise OptionError(f"unknown option {sorted(unknown)[0]!r}; known: {known}")
    values: dict[str, object] = {
        name: parse_bytes(value) if name in _SIZES else parse_tokens(value) if name in _TOKENS else value  # type: ignore[arg-type]
        for name, value in given.items()
        if value is not None and name not in _DEVICE
    }
    notes: list[str] = []
    device = _device(given, notes)
    return PlanOptions(device, _contexts(given.get("context")), assumptions=tuple(notes), **values)  # type: ignore[arg-type]


def _contexts(given: "int | str | Sequence[int] | None") -> tuple[int, ...]:
    if given is None:
        return ()
    parts = given.split(",") if isinstance(given, str) else [given] if isinstance(given, int) else given
    return tuple(dict.fromkeys(parse_tokens(part) for part in parts))


def _device(given: PlanArguments, notes: list[str]) -> Device:
    """The device that is asked for, with the numbers that were given in place of the table's."""
    name = given.get("device")
    memory = given.get("device_memory")
    bandwidth, flops = given.get("bandwidth"), given.get("flops")
    if name is None and memory is not None and bandwidth is not None:
        device = Device("custom", "", None, None, None, None, None, "", "")
    elif name is None:
        device = find_device(DEFAULT_DEVICE)
        notes.append(f"no device given: {device.name} assumed; --device names another (see: kvfolio devices)")
    else:
        device = name if isinstance(name, Device) else find_device(name)
    memory_bytes = device.memory_bytes if memory is None else parse_bytes(memory)
    if memory_bytes is None or memory_bytes < 1:
        raise OptionError(f"{device.name} has no memory size; give one with device_memory, such as 80GB or 80GiB")
    bytes_per_s = device.bandwidth_bytes_per_s if bandwidth is None else parse_bytes(bandwidth)
    if bytes_per_s is not None and bytes_per_s < 1:
        raise OptionError("bandwidth is 0; give bytes a second, such as 3.35TB")
    if flops is not None and not (math.isfinite(flops) and flops > 0):
        raise OptionError(f"flops is {flops}; give a rate above 0, such as 989e12")
    return Device(
        name=device.name,
        vendor=device.vendor,
        memory_bytes=memory_bytes,
        bandwidth_bytes_per_s=bytes_per_s,
        bf16_flops=device.bf16_flops if flops is None else flops,
        fp8_flops=device.fp8_flops,
        tdp_w=device.tdp_w,
        source=device.source,
        notes=device.notes,
    )


def command_line(models: Sequence[str], options: PlanOptions, contexts: Sequence[int]) -> str:
    """The command that makes the same plan again, whatever the defaults will be then."""
    device = options.device
    words = [
        "kvfolio",
        "plan",
        *models,
        "--context",
        ",".join(map(str, contexts)),
        "--device-memory",
        str(device.memory_bytes),
    ]
    if any(device.name == known.name for known in devices()):
        words += ["--device", device.name]
    if device.bandwidth_bytes_per_s is not None:
        words += ["--bandwidth", str(device.bandwidth_bytes_per_s)]
    if device.bf16_flops is not None:
        words += ["--flops", f"{device.bf16_flops:g}"]
    words += ["--utilisation", f"{options.utilisation:g}"]
    usual = {field.name: field.default for field in dataclasses.fields(PlanOptions)}
    for name in PlanArguments.__annotations__:
        if name not in usual or name in ("device", "utilisation"):
            continue
        value = getattr(options, name)
        if value != usual[name]:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)
