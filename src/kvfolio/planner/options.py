"""What a plan is asked: numbers checked where they are made, and the friendly forms in which people give them.

Knows nothing of models or of how a plan is made.
"""

import dataclasses
import math
import operator
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypedDict, Unpack

from kvfolio.errors import OptionError
from kvfolio.planner.hardware import Device, devices, find_device
from kvfolio.planner.memory import check_block_tokens, default_block_tokens
from kvfolio.planner.sizes import DEFAULT_IN_FLIGHT
from kvfolio.spec.formats import CacheFormat, parse_cache_format
from kvfolio.units import parse_bytes, parse_tokens

DEFAULT_DEVICE = "h100-sxm"
CUSTOM = "custom"  # a device that is its numbers
DEFAULT_UTILISATION = 0.9
# What a device can have, in bytes, bytes a second and FLOP a second; beyond is a slip of the finger.
_MEMORY, _BANDWIDTH, _FLOPS = (10**6, 10**18), (10**6, 10**18), (1e6, 1e24)
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
    block_tokens: int | None = None  # None: what the format likes best
    weights_bytes: int | None = None  # None: as published
    mean_tokens: int | None = None  # of a sequence, for paged memory; None: ``report.mean_tokens``
    prefix_tokens: int = 0  # that all sequences share
    prompt_tokens: int = 1000  # for FLOPs with and without a cache
    tokens: int = 500
    in_flight: int = DEFAULT_IN_FLIGHT  # tokens in one step, by which vLLM widens its windows
    encoder_tokens: int = 0  # of cross-attention layers whose length the input decides
    device_assumed: bool = False  # nobody named the device
    assumptions: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        _check_counts(self)
        check_block_tokens(self.block_tokens)
        if not (math.isfinite(self.utilisation) and 0 < self.utilisation <= 1):
            raise OptionError(
                f"utilisation is {self.utilisation}; accepted: above 0, at most 1 (0.9: 90 % of the memory)"
            )
        self.cache_format.check_block_tokens(self.chosen_block_tokens)  # an unknown format is refused here, too

    @property
    def usable_bytes(self) -> int:
        """Bytes of one device for weights and caches; below 0 where the reserve is larger than the memory."""
        return int((self.device.memory_bytes or 0) * self.utilisation) - self.reserve

    @property
    def cache_format(self) -> CacheFormat:
        return parse_cache_format(self._format_name, self.block_tokens)

    @property
    def chosen_block_tokens(self) -> int:
        """Tokens of a block: as asked for, or the format's own."""
        return self.block_tokens or default_block_tokens(parse_cache_format(self._format_name))

    def in_format(self, kv_format: str) -> "PlanOptions":
        """The same in another format: in its own blocks where those that were asked for are too small for it."""
        is_small = self.chosen_block_tokens < parse_cache_format(kv_format).least_block_tokens
        return replace(self, kv_format=kv_format, block_tokens=None if is_small else self.block_tokens)

    @property
    def _format_name(self) -> str:
        return "bf16" if self.kv_format == "auto" else self.kv_format


def _check_counts(options: PlanOptions) -> None:
    bounds = {
        "users": (options.users, 1),
        "devices": (options.devices, 1),
        "pipeline": (options.pipeline, 1),
        "prompt_tokens": (options.prompt_tokens, 1),
        "tokens": (options.tokens, 2),  # the prompt's pass already gives the first
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
    _check_lengths(options)
    if len(options.contexts) > 100 or any(not 0 <= context <= MAX_COUNT for context in options.contexts):
        raise OptionError(f"contexts must be at most 100 numbers of 0 to {MAX_COUNT:,} tokens")


def _check_lengths(options: PlanOptions) -> None:
    """Refuse a mean or a prefix that is longer than the sequences it is of."""
    first = options.contexts[0] if options.contexts else None
    mean, prefix = options.mean_tokens, options.prefix_tokens
    if first is not None and mean is not None and mean > first:
        raise OptionError(f"mean_tokens is {mean:,}, more than the context of {first:,}; give a longer context")
    longest = mean if mean is not None else first
    if longest is not None and prefix > longest:
        raise OptionError(
            f"prefix_tokens is {prefix:,}, more than a sequence of {longest:,} tokens has; give a shorter prefix"
        )


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
_COUNTS = ("users", "devices", "pipeline", "block_tokens")
_TOKENS = ("mean_tokens", "prefix_tokens", "prompt_tokens", "tokens", "in_flight", "encoder_tokens")


def read_options(**given: Unpack[PlanArguments]) -> PlanOptions:
    """``given`` as PlanOptions; raises OptionError that names the option and what it accepts."""
    unknown = given.keys() - PlanArguments.__annotations__.keys()
    if unknown:
        known = ", ".join(PlanArguments.__annotations__)
        raise OptionError(f"unknown option {min(unknown)!r}; known: {known}")
    values: dict[str, Any] = {}
    for name, value in given.items():
        if value is None:
            continue
        if name in _SIZES:
            values[name] = _size(name, value)
        elif name in _TOKENS:
            values[name] = _tokens(name, value)
        elif name in _COUNTS:
            values[name] = whole_number(name, value)
        elif name == "utilisation":
            values[name] = _rate(name, value)
        elif name == "kv_format":
            values[name] = _text(name, value)
    notes: list[str] = []
    device = _device(given, notes)
    assumed = given.get("device") is None and device.name != CUSTOM
    contexts = _contexts(given.get("context"))
    return PlanOptions(device, contexts, device_assumed=assumed, assumptions=tuple(notes), **values)


def whole_number(name: str, value: object) -> int:
    """``value`` as an int: any kind of integer, or a float without a fraction; nothing is rounded."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise OptionError(f"{name} is {value!r}; accepted: a whole number")
    return operator.index(value)


def _size(name: str, value: object) -> int:
    return _named(name, parse_bytes, value)


def _tokens(name: str, value: object) -> int:
    return _named(name, parse_tokens, value)


def _named(name: str, parse: Callable[[str | int], int], value: object) -> int:
    try:
        return parse(value if isinstance(value, str) else whole_number(name, value))
    except OptionError as error:
        raise error if name in str(error) else OptionError(f"{name}: {error}") from None


def _text(name: str, value: object) -> str:
    if not isinstance(value, str):
        raise OptionError(f"{name} is {value!r}; accepted: a text")
    return value


def _rate(name: str, value: object) -> float:
    if isinstance(value, bool) or not hasattr(value, "__float__") or isinstance(value, str):
        raise OptionError(f"{name} is {value!r}; accepted: a number")
    return float(value)


def _contexts(given: object) -> tuple[int, ...]:
    if given is None:
        return ()
    if isinstance(given, str):
        parts: list[object] = list(given.split(","))
    elif isinstance(given, Iterable) and not isinstance(given, bytes):
        parts = list(given)
        if not parts:
            raise OptionError("context is empty; give at least one number of tokens")
    else:
        parts = [given]
    return tuple(dict.fromkeys(_tokens("context", part) for part in parts))


def _device(given: PlanArguments, notes: list[str]) -> Device:
    """The device that is asked for, with the numbers that were given in place of the table's."""
    name, memory = given.get("device"), given.get("device_memory")
    bandwidth, flops = given.get("bandwidth"), given.get("flops")
    if name is None and memory is not None and bandwidth is not None:
        device = Device(CUSTOM, "", None, None, None, None, None, "", "")
    elif name is None:
        device = find_device(DEFAULT_DEVICE)
        notes.append(f"no device given: {device.name} assumed; --device names another (see: kvfolio devices)")
    else:
        device = name if isinstance(name, Device) else find_device(_text("device", name))
    memory_bytes = device.memory_bytes if memory is None else _size("device_memory", memory)
    if memory_bytes is None:
        raise OptionError(f"{device.name} has no memory size; give one with device_memory, such as 80GB or 80GiB")
    speed = device.bandwidth_bytes_per_s if bandwidth is None else _size("bandwidth", bandwidth)
    rate = device.bf16_flops if flops is None else _rate("flops", flops)
    for what, value, (low, high) in (
        ("device_memory", memory_bytes, _MEMORY),
        ("bandwidth", speed, _BANDWIDTH),
        ("flops", rate, _FLOPS),
    ):
        if value is not None and not low <= value <= high:
            raise OptionError(f"{what} is {value:g}; accepted: {low:g} to {high:g}")
    return replace(device, memory_bytes=memory_bytes, bandwidth_bytes_per_s=speed, bf16_flops=rate)


def command_line(models: Sequence[str], options: PlanOptions, contexts: Sequence[int]) -> str:
    """The command that makes the same plan again, whatever the defaults will be then."""
    lengths = ",".join(map(str, contexts))
    words = ["kvfolio", "plan", *models, "--context", lengths, *device_arguments(options.device)]
    words += ["--utilisation", repr(options.utilisation), *changed_arguments(options, PlanArguments.__annotations__)]
    return shlex.join(words)


def device_arguments(device: Device) -> list[str]:
    """The words that name a device and its numbers; a device that the table does not have is its numbers."""
    words = ["--device", device.name] if any(device.name == known.name for known in devices()) else []
    words += ["--device-memory", str(device.memory_bytes)]
    if device.bandwidth_bytes_per_s is not None:
        words += ["--bandwidth", str(device.bandwidth_bytes_per_s)]
    return [*words, "--flops", repr(device.bf16_flops)] if device.bf16_flops is not None else words


def changed_arguments(options: PlanOptions, names: Iterable[str]) -> list[str]:
    """The words for those of the options ``names`` that are not as usual; device and utilisation are not among them."""
    words = []
    for field in dataclasses.fields(PlanOptions):
        if field.name in names and field.name not in ("device", "utilisation"):
            value = getattr(options, field.name)
            if value != field.default:
                words += [f"--{field.name.replace('_', '-')}", str(value)]
    return words
