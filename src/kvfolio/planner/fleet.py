"""How many devices a number of conversations needs: by memory, by a speed promised to each user, and what it costs.

Knows nothing of traffic: conversations are all there at once, as many tokens long as is said. Field names are the
stable keys of ``kvfolio fleet --json``.
"""

import math
from dataclasses import dataclass
from typing import Literal

from kvfolio.errors import BudgetError, OptionError
from kvfolio.planner.capacity import last_that_holds
from kvfolio.planner.options import MAX_COUNT, PlanOptions
from kvfolio.planner.scene import Scene, make_scene
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
        if len(self.plan.contexts) != 1:
            raise OptionError(f"a fleet has one context, {len(self.plan.contexts)} were given")
        if not 1 <= self.conversations <= MAX_COUNT:
            raise OptionError(f"conversations is {self.conversations:,}; accepted: 1 to {MAX_COUNT:,}")
        if self.kv_memory is not None and self.kv_memory < 1:
            raise OptionError("kv_memory is 0; give the bytes for caches on one device, such as 60GiB")
        for name, value in (("tokens_per_s", self.tokens_per_s), ("price_per_hour", self.price_per_hour)):
            if isinstance(value, bool | str):
                raise OptionError(f"{name} is {value!r}; accepted: a number above 0")
            if value is not None and not (math.isfinite(value) and 0 < value <= MAX_COUNT):
                raise OptionError(f"{name} is {value}; accepted: a number above 0, up to {MAX_COUNT:,}")


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
    asked, notes = options.plan, list[str]()
    scene = make_scene(spec, asked, notes, options.kv_memory)
    reserved = asked.mean_tokens is None
    tokens = asked.contexts[0] if asked.mean_tokens is None else asked.mean_tokens
    _check_weights_fit(scene, options)
    by_memory = scene.users_at(tokens, shares_prefix=not reserved)
    by_memory = MOST_USERS if by_memory is None else by_memory
    if by_memory < 1:
        share = scene.binding(tokens)
        each, memory = scene.sequence_bytes(share.spec, tokens), scene.memory(share)
        raise BudgetError(
            f"one conversation of {tokens:,} tokens takes {format_bytes(each)} on each device, which has "
            f"{format_bytes(memory)} for caches: short by {format_bytes(each - memory)}; "
            "use more devices, a smaller format or a shorter context"
        )
    by_speed = _users_at_speed(scene, options.tokens_per_s, tokens, by_memory)
    per_replica = min(by_memory, by_speed)
    devices = asked.devices * asked.pipeline
    replicas = -(-options.conversations // per_replica)
    step = scene.step(tokens, min(per_replica, options.conversations))
    price = None if options.price_per_hour is None else options.price_per_hour * replicas * devices
    total = None if step is None else step.tokens_per_s_per_user * options.conversations
    notes.append("all conversations decode at once, in full replicas; the work of prompts is not counted")
    if spec.max_context is not None and tokens > spec.max_context:
        notes.append(f"{tokens:,} tokens are more than the {spec.max_context:,} that the model was made to read")
    if asked.prefix_tokens and reserved:
        notes.append("contexts set aside whole share no prefix: give --mean-tokens to count the prefix once a replica")
    elif asked.prefix_tokens:
        notes.append(f"a prefix of {asked.prefix_tokens:,} tokens is stored once in each replica")
    if options.kv_memory is not None:
        notes.append("the memory for caches was given: --utilisation is not used")
    return Fleet(
        model=spec.name,
        device=asked.device.name,
        conversations=options.conversations,
        tokens_per_conversation=tokens,
        reserved=reserved,
        bytes_per_conversation=scene.sequence_bytes(scene.spec, tokens),
        kv_memory_bytes=scene.memory(scene.binding(tokens)),
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
        assumptions=tuple(dict.fromkeys(notes)),
    )


def _check_weights_fit(scene: Scene, options: FleetOptions) -> None:
    """Refuse weights that do not fit, alone or beside the memory that was given for caches."""
    asked, weights = options.plan, max(share.weights_bytes for share in scene.shares)
    if options.kv_memory is None:
        if scene.short_bytes:
            devices = asked.devices * asked.pipeline
            raise BudgetError(
                f"the weights take {format_bytes(weights)} on each of {devices} devices, "
                f"{asked.device.name} has {format_bytes(max(0, scene.usable))} usable: "
                f"short by {format_bytes(scene.short_bytes)}; use more devices or smaller weights"
            )
        return
    memory = asked.device.memory_bytes or 0
    if weights + options.kv_memory + asked.reserve > memory and not asked.device_assumed:
        kept = f", {format_bytes(asked.reserve)} of reserve" if asked.reserve else ""
        raise BudgetError(
            f"{format_bytes(options.kv_memory)} for caches{kept} and {format_bytes(weights)} of weights do not fit on "
            f"one {asked.device.name} of {format_bytes(memory)}; give less kv_memory, more devices or a larger one"
        )


def _users_at_speed(scene: Scene, promise: float | None, tokens: int, most: int) -> int:
    """The most users of a replica for which a step is still quick enough, at most ``most``."""
    if promise is None:
        return most
    alone = scene.step(tokens, 1)
    if alone is None:
        raise OptionError(
            f"a speed cannot be promised: the bandwidth of {scene.options.device.name} or the weights are not known; "
            "give bandwidth and weights_bytes"
        )
    if alone.tokens_per_s_per_user < promise:
        raise BudgetError(
            f"{promise:g} tokens/s cannot be kept: a single user gets {alone.tokens_per_s_per_user:.1f} at {tokens:,} "
            "tokens at best; use more or faster devices, a smaller format or a shorter context"
        )

    def is_kept(users: int) -> bool:
        step = scene.step(tokens, users)
        return step is not None and step.tokens_per_s_per_user >= promise

    return last_that_holds(is_kept, 1, most)
