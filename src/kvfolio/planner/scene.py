"""One model on its devices: what each of them holds, what is left for caches, how quick a step is.

Plans, fleets and flags ask it. Knows nothing of how answers are put together or shown.
"""

from dataclasses import dataclass, replace

from kvfolio.errors import OptionError
from kvfolio.planner import capacity
from kvfolio.planner.hardware import Device, nominal_bytes
from kvfolio.planner.options import PlanOptions
from kvfolio.planner.parallel import DeviceShare, device_shares, fullest
from kvfolio.planner.steptime import Speeds, StepTime, prefill_time, step_time
from kvfolio.spec.formats import CacheFormat
from kvfolio.spec.layers import CrossAttention, LatentAttention, SingleKind, parts_of, with_parts
from kvfolio.spec.model import ModelSpec
from kvfolio.units import format_bytes


@dataclass(frozen=True, slots=True)
class Scene:
    """What every number of a plan is computed from."""

    spec: ModelSpec
    options: PlanOptions
    fmt: CacheFormat
    shares: tuple[DeviceShare, ...]
    weights_bytes: int
    usable: int  # bytes of one device for weights and caches
    kv_memory: int | None  # bytes of one device for caches, where they are given
    speeds: Speeds | None  # None: bandwidth or weights are not known

    def memory(self, share: DeviceShare) -> int:
        """Bytes for caches on a device with ``share``."""
        return max(0, self._left(share))

    def _left(self, share: DeviceShare) -> int:
        """As ``memory``; below 0 where the weights do not fit."""
        return self.usable - share.weights_bytes if self.kv_memory is None else self.kv_memory

    @property
    def short_bytes(self) -> int:
        """What the device with the most weights lacks for them; 0 where they fit."""
        return max(0, *(share.weights_bytes - self.usable for share in self.shares))

    @property
    def total_memory(self) -> int:
        """Bytes for caches on all devices."""
        return sum(self.memory(share) * share.num_stages for share in self.shares) * self.options.devices

    def binding(self, num_tokens: int) -> DeviceShare:
        """The share on which the fewest sequences of ``num_tokens`` fit."""
        return fullest(self.shares, self._left, lambda spec: self.sequence_bytes(spec, num_tokens))

    def sequence_bytes(self, spec: ModelSpec, num_tokens: int) -> int:
        """Bytes of one sequence in whole blocks, with the layers of ``spec``."""
        return capacity.sequence_bytes(spec, num_tokens, self.fmt, self.options.chosen_block_tokens)

    def shared_bytes(self, spec: ModelSpec, num_tokens: int) -> int:
        """Of a sequence of ``num_tokens``, the bytes of the prefix that all share; a block of its own remains."""
        prefix = min(self.options.prefix_tokens, max(0, num_tokens - 1))
        return capacity.shared_prefix_bytes(spec, prefix, self.fmt, self.options.chosen_block_tokens)

    def users_at(self, num_tokens: int, shares_prefix: bool = False) -> int | None:
        """Sequences of ``num_tokens`` that fit on every device; None: the cache bounds nothing."""
        if self.short_bytes and self.kv_memory is None:
            return 0
        counts = []
        for share in self.shares:
            shared = self.shared_bytes(share.spec, num_tokens) if shares_prefix else 0
            counts.append(
                capacity.users_that_fit(self.memory(share), self.sequence_bytes(share.spec, num_tokens), shared)
            )
        return min((count for count in counts if count is not None), default=None)

    def largest_context(self, users: int) -> int | None:
        """The most tokens that each of ``users`` can have; None: no text is too long."""
        fmt, block = self.fmt, self.options.chosen_block_tokens
        lengths = [
            capacity.largest_context(share.spec, self.memory(share) // users, fmt, block) for share in self.shares
        ]
        return min((length for length in lengths if length is not None), default=None)

    def step(self, context: int, users: int) -> StepTime | None:
        """One decode step of ``users``; None where speeds are not known."""
        if self.speeds is None or users < 1:
            return None
        return step_time(self.shares, self.fmt, context, users, self.speeds)

    def first_token_s(self, num_tokens: int) -> float | None:
        """Seconds until a prompt has its first token; None where speeds are not known."""
        return None if self.speeds is None else prefill_time(self.shares, num_tokens, self.speeds)


def make_scene(spec: ModelSpec, options: PlanOptions, notes: list[str], kv_memory: int | None = None) -> Scene:
    """The scene of ``spec`` under ``options``; what is assumed on the way is added to ``notes``."""
    notes += [*spec.assumptions, *options.assumptions]
    fmt = options.cache_format
    _check_fits_model(spec, options, fmt, notes)
    spec = with_encoder(spec, options.encoder_tokens)
    weights_bytes = published_weights_bytes(spec, options, notes)
    shares = device_shares(spec, weights_bytes, options.devices, options.pipeline)
    notes += shares[0].notes
    device = options.device
    _note_driver(device, notes)
    speeds = None
    if not weights_bytes:
        notes.append("the weights are not known: users are counted as if they took nothing; give --weights-bytes")
    elif device.bandwidth_bytes_per_s is None:
        notes.append(f"the bandwidth of {device.name} is not known: no speeds; give one with --bandwidth")
    else:
        speeds = Speeds(device.bandwidth_bytes_per_s, device.bf16_flops)
    return Scene(spec, options, fmt, shares, weights_bytes, options.usable_bytes, kv_memory, speeds)


def _check_fits_model(spec: ModelSpec, options: PlanOptions, fmt: CacheFormat, notes: list[str]) -> None:
    parts = [part for kind, _ in spec.kinds() for part in parts_of(kind)]
    if fmt.rope is not None and not any(isinstance(part, LatentAttention) for part in parts):
        raise OptionError(f"kv_format {fmt.name} stores latents, and {spec.name} has none; try fp8 or int8")
    is_open = any(isinstance(part, CrossAttention) and not part.encoder_tokens for part in parts)
    if options.encoder_tokens and not is_open:
        notes.append("encoder_tokens has no effect: no layer's length is left to an encoder's input")


def _note_driver(device: Device, notes: list[str]) -> None:
    """Vendors sell 24 GB and drivers show less; which of the two is counted is said."""
    shown, memory = device.driver_bytes, device.memory_bytes
    if shown is not None and memory is not None and shown < memory == nominal_bytes(device.name):
        notes.append(
            f"{device.name} is counted with its {format_bytes(memory)}; its driver shows {format_bytes(shown)}: "
            f"--device-memory {shown} counts that"
        )


def with_encoder(spec: ModelSpec, encoder_tokens: int) -> ModelSpec:
    """``spec`` with the length of its encoder where the config leaves it to the input."""
    if not encoder_tokens:
        return spec

    def filled(part: SingleKind) -> SingleKind:
        if isinstance(part, CrossAttention) and not part.encoder_tokens:
            return replace(part, encoder_tokens=encoder_tokens)
        return part

    return replace(spec, layers=tuple(with_parts(kind, filled) for kind in spec.layers))


def published_weights_bytes(spec: ModelSpec, options: PlanOptions, notes: list[str]) -> int:
    """Bytes of all weights: as given, else as published; what is assumed is added to ``notes``."""
    if options.weights_bytes is not None:
        return options.weights_bytes
    if spec.dtype == "f32" and spec.weights.num_bytes >= 4 * spec.weights.num_params > 0:
        notes.append("the weights are published in f32: counted in 16 bits, as engines load them; see --weights-bytes")
        return spec.weights.num_bytes // 2
    return spec.weights.num_bytes
