"""What to change next: the levers that a plan leaves, each with the number it would give.

Knows nothing of quality or price: it compares plans.
"""

from collections.abc import Iterator
from dataclasses import replace

from kvfolio.planner.options import MAX_COUNT, PlanOptions
from kvfolio.planner.parallel import divides_evenly
from kvfolio.planner.report import Plan
from kvfolio.planner.scene import make_scene
from kvfolio.spec.model import ModelSpec
from kvfolio.units import format_bytes, format_decimal_bytes, format_tokens

MOST_DEVICES = 1024
MOST_SENTENCES = 5


def advise(spec: ModelSpec, options: PlanOptions, plan: Plan) -> tuple[str, ...]:
    """Sentences, most useful first."""
    if plan.short_bytes:
        return (_devices_needed(spec, options, plan),)
    if plan.users.reserved is None:
        return ("the cache does not bound the number of users",)
    return tuple(_levers(spec, options, plan, plan.users.reserved))[:MOST_SENTENCES]


def _levers(spec: ModelSpec, options: PlanOptions, plan: Plan, users: int) -> Iterator[str]:
    first = plan.contexts[0]
    at = f"at {format_tokens(first.context)}"
    if users == 0:
        fitting = make_scene(spec, options, []).largest_context(1) or 0
        yield (
            f"not one sequence of {format_tokens(first.context)} tokens fits: short by "
            f"{format_bytes(first.device_bytes - plan.device.kv_memory_bytes)} a device; "
            f"the longest that fits has {fitting:,} tokens"
        )
    elif options.users > users:
        yield f"{options.users:,} users do not fit {at}: at most {users:,} do; their speed is that of a larger memory"
    if plan.kv.format in ("bf16", "f16", "f32"):
        has_latents = any(layer.kind.startswith("latent") for layer in plan.kv.layers)
        for fmt in ("fp8",) if has_latents else ("fp8", "int4"):  # no engine keeps latents in 4 bits
            asked = options.in_format(fmt)
            if asked.block_tokens != options.block_tokens:
                continue  # it is not for blocks so small
            count = _users_with(spec, asked, first.context) or 0
            if count > users:
                yield f"--kv-format {fmt}: {users:,} → {count:,} users {at}"
    yield from _smaller_weights(spec, options, plan, users)
    paged = plan.users.paged
    if paged is not None and options.mean_tokens is not None and paged > users:
        how = "blocks and one copy of the prefix" if options.prefix_tokens else "blocks"
        yield f"{how} instead of whole contexts: {users:,} → {paged:,} users of {plan.users.mean_tokens:,} tokens"
    yield from _more_devices(spec, options, plan, users)


def _smaller_weights(spec: ModelSpec, options: PlanOptions, plan: Plan, users: int) -> Iterator[str]:
    """Weights of 16 bits in 8."""
    params = spec.weights.num_params
    if options.weights_bytes is not None or plan.weights_bytes < 2 * params or not params:
        return
    context = plan.contexts[0].context
    count = _users_with(spec, replace(options, weights_bytes=params), context) or 0
    if count > users:
        told = f"weights in 8 bits ({format_decimal_bytes(params)} of them)"
        yield f"{told}: {users:,} → {count:,} users at {format_tokens(context)}"


def _more_devices(spec: ModelSpec, options: PlanOptions, plan: Plan, users: int) -> Iterator[str]:
    """Twice the devices, where that is better than a second replica."""
    doubled, context = 2 * options.devices, plan.contexts[0].context
    if not divides_evenly(spec, doubled) or doubled > MAX_COUNT:
        return
    more = _users_with(spec, replace(options, devices=doubled), context)
    if more is not None and more > 2 * users:
        at = f"at {format_tokens(context)}"
        yield f"--devices {doubled}: {users:,} → {more:,} users {at}; two replicas would hold {2 * users:,}"


def _users_with(spec: ModelSpec, options: PlanOptions, context: int) -> int | None:
    """Sequences of ``context`` tokens that fit under ``options``; 0 where the weights do not, None: unbounded."""
    return make_scene(spec, options, []).users_at(context)


def _devices_needed(spec: ModelSpec, options: PlanOptions, plan: Plan) -> str:
    """The fewest devices, by doubling, that hold the weights and a sequence, and that the heads can be cut for."""
    short = f"the weights do not fit: short by {format_bytes(plan.short_bytes)} on each device"
    devices, context = 1, plan.contexts[0].context
    while devices < MOST_DEVICES:
        devices *= 2
        if devices > options.devices and (_users_with(spec, replace(options, devices=devices), context) or 0) > 0:
            if not divides_evenly(spec, devices):
                return f"{short}; {devices} devices would hold them, but the heads do not divide: see --pipeline"
            return f"{short}; --devices {devices} holds them and a cache"
    return f"{short}, and {MOST_DEVICES} devices do not hold them and a cache: name a larger device"
