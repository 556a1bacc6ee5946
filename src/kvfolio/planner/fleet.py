"""How many devices a number of conversations needs: by memory, by a speed promised to each user, and what it costs.

Knows nothing of traffic: conversations are all there at once, as many tokens long as is said. Field names are the
stable keys of ``kvfolio fleet --json``.
"""

import math
from dataclasses import dataclass
from typing import Literal

from kvfolio.errors import BudgetError, OptionError
from kvfolio.planner import capacity
from kvfolio.planner.options import MAX_COUNT, PlanOptions
from kvfolio.planner.parallel import DeviceShare, device_share
from kvfolio.planner.report import published_weights_bytes
from kvfolio.planner.steptime import Speeds, step_time
from kvfolio.spec.model import ModelSpec
from kvfolio.units import format_bytes

MOST_USERS = 1 << 30  # of one device, where nothing else bounds them


@dataclass(frozen=True, slots=True)
class FleetOptions:
    """What a fleet is asked for. ``plan.contexts[0]`` is the length reserved for each conversation."""

    plan: PlanOptions
    conversations: int
    kv_memory: int | None = None  # bytes for caches on each device; None: what the weights leave of its memory
    tokens_per_s: float | None = None  # promised to every user; None: only memory bounds
    price_per_hour: float | None = None  # of one device, in any currency

    def __post_init__(self) -> None:
        if not 1 <= self.conversations <= MAX_COUNT:
            raise OptionError(f"conversations is {self.conversations:,}; accepted: 1 to {MAX_COUNT:,}")
        if self.kv_memory is not None and self.kv_memory < 1:
            raise OptionError("kv_memory is 0; give the bytes for caches on one device, such as 60GiB")
        for name, value in (("tokens_per_s", self.tokens_per_s), ("price_per_hour", self.price_per_hour)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise OptionError(f"{name} is {value}; accepted: a number above 0")


@dataclass(frozen=True, slots=True)
class Fleet:
    """A number of equal replicas, each on ``devices_per_replica`` devices."""

    model: str
    device: str
    conversations: int
    tokens_per_conversation: int
    reserved: bool  # True: the whole context is set aside; False: paged at the mean
    bytes_per_conversation: int  # on all devices of a replica, whole blocks
    kv_memory_bytes: int  # for caches on one device
    conversations_per_device: int
    conversations_per_replica: int
    devices_per_replica: int
    num_replicas: int
    num_devices: int
    limit: Literal["memory", "speed"]
    tokens_per_s_per_user: float | None  # of a full replica, at best; None: bandwidth not known
    tokens_per_s_total: float | None
    price_per_hour: float | None  # of the whole fleet
    price_per_million_tokens: float | None
    assumptions: tuple[str, ...]


def make_fleet(spec: ModelSpec, options: FleetOptions) -> Fleet:
    """The devices that ``options.conversations`` need at once.

    Raises BudgetError when a device cannot hold one conversation, or cannot keep the promised speed for one.
    """
    asked, notes = options.plan, [*spec.assumptions, *options.plan.assumptions]
    weights_bytes = published_weights_bytes(spec, asked, notes)
    share = device_share(spec, weights_bytes, asked.devices, asked.pipeline)
    notes += share.notes
    reserved = asked.mean_tokens is None
    tokens = asked.contexts[0] if asked.mean_tokens is None else asked.mean_tokens
    memory = options.kv_memory if options.kv_memory is not None else _left_for_caches(asked, share)
    fmt, block = asked.cache_format, asked.block_tokens
    bytes_each = capacity.sequence_bytes(share.spec, tokens, fmt, block)
    shared = capacity.shared_prefix_bytes(share.spec, min(asked.prefix_tokens, tokens), fmt, block)
    by_memory = capacity.users_that_fit(memory, bytes_each, shared)
    by_memory = MOST_USERS if by_memory is None else by_memory
    if by_memory < 1:
        raise BudgetError(
            f"one conversation of {tokens:,} tokens takes {format_bytes(bytes_each)} on each device, which has "
            f"{format_bytes(memory)} for caches: short by {format_bytes(bytes_each - memory)}; "
            "use more devices, a smaller format or a shorter context"
        )
    speeds = _speeds(asked)
    by_speed = _users_at_speed(share, options, tokens, by_memory, speeds)
    per_replica = min(by_memory, by_speed)
    devices = asked.devices * asked.pipeline
    replicas = -(-options.conversations // per_replica)
    step = step_time(share, fmt, tokens, min(per_replica, options.conversations), speeds) if speeds else None
    price = None if options.price_per_hour is None else options.price_per_hour * replicas * devices
    total = None if step is None else step.tokens_per_s_per_user * options.conversations
    return Fleet(
        model=spec.name,
        device=asked.device.name,
        conversations=options.conversations,
        tokens_per_conversation=tokens,
        reserved=reserved,
        bytes_per_conversation=capacity.sequence_bytes(spec, tokens, fmt, block),
        kv_memory_bytes=memory,
        conversations_per_device=per_replica // devices,
        conversations_per_replica=per_replica,
        devices_per_replica=devices,
        num_replicas=replicas,
        num_devices=replicas * devices,
        limit="memory" if by_memory <= by_speed else "speed",
        tokens_per_s_per_user=None if step is None else step.tokens_per_s_per_user,
        tokens_per_s_total=total,
        price_per_hour=price,
        price_per_million_tokens=price / (total * 3600) * 1e6 if price is not None and total else None,
        assumptions=tuple(dict.fromkeys([*notes, "all conversations decode at once, in full replicas"])),
    )


def _left_for_caches(asked: PlanOptions, share: DeviceShare) -> int:
    usable = int((asked.device.memory_bytes or 0) * asked.utilisation) - asked.reserve
    if usable <= share.weights_bytes:
        devices = asked.devices * asked.pipeline
        raise BudgetError(
            f"the weights take {format_bytes(share.weights_bytes)} on each of {devices} devices; "
            f"{asked.device.name} has {format_bytes(max(0, usable))} usable: "
            f"short by {format_bytes(share.weights_bytes - usable)}; use more devices or smaller weights"
        )
    return usable - share.weights_bytes


def _speeds(asked: PlanOptions) -> Speeds | None:
    device = asked.device
    return Speeds(device.bandwidth_bytes_per_s, device.bf16_flops) if device.bandwidth_bytes_per_s else None


def _users_at_speed(share: DeviceShare, options: FleetOptions, tokens: int, most: int, speeds: Speeds | None) -> int:
    """The most users of a replica for which a step is still quick enough, at most ``most``."""
    promise = options.tokens_per_s
    if promise is None:
        return most
    if speeds is None:
        raise OptionError(f"the bandwidth of {options.plan.device.name} is not known; give one with bandwidth")

    def speed(users: int) -> float:
        return step_time(share, options.plan.cache_format, tokens, users, speeds).tokens_per_s_per_user

    if speed(1) < promise:
        raise BudgetError(
            f"{promise:g} tokens/s cannot be kept: a single user gets {speed(1):.1f} at {tokens:,} tokens at best; "
            "use more or faster devices, a smaller format or a shorter context"
        )
    low, high = 1, most
    while low < high:
        middle = (low + high + 1) // 2
        if speed(middle) >= promise:
            low = middle
        else:
            high = middle - 1
    return low
