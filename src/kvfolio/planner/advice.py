"""What to change next: the levers that a plan leaves, each with the number it would give.

Knows nothing of quality or price: it compares plans.
"""

from dataclasses import replace

from kvfolio.planner.options import PlanOptions
from kvfolio.planner.report import Plan, make_plan
from kvfolio.spec.model import ModelSpec
from kvfolio.units import format_bytes, format_tokens

MOST_DEVICES = 1024


def advise(spec: ModelSpec, options: PlanOptions, plan: Plan) -> tuple[str, ...]:
    """Sentences, most useful first."""
    if plan.short_bytes:
        return (_devices_needed(spec, options, plan),)
    context, users = plan.contexts[0].context, plan.users
    advice = []
    if users.reserved == 0:
        fitting = plan.largest_context or 0
        advice.append(
            f"not one sequence of {format_tokens(context)} tokens fits: short by "
            f"{format_bytes(plan.contexts[0].device_bytes - _memory_each(plan))} a device; "
            f"the longest that fits has {fitting:,} tokens"
        )
    if users.reserved is None:
        return (*advice, "the cache does not bound the number of users")
    if plan.kv.format in ("bf16", "f16", "f32"):
        for fmt in ("fp8", "int4"):
            count = make_plan(spec, replace(options, kv_format=fmt)).users.reserved
            if count is not None and count > users.reserved:
                advice.append(f"--kv-format {fmt}: {users.reserved:,} → {count:,} users at {format_tokens(context)}")
    if users.paged is not None and options.mean_tokens is not None and users.paged > users.reserved:
        advice.append(
            f"blocks instead of whole contexts: {users.reserved:,} → {users.paged:,} users "
            f"of {users.mean_tokens:,} tokens"
        )
    doubled = replace(options, devices=2 * options.devices)
    more = make_plan(spec, doubled).users.reserved
    if more:
        advice.append(f"--devices {doubled.devices}: {users.reserved:,} → {more:,} users, weights cut in two")
    return tuple(advice[:4])


def _memory_each(plan: Plan) -> int:
    return plan.kv_memory_bytes // plan.device.num_devices


def _devices_needed(spec: ModelSpec, options: PlanOptions, plan: Plan) -> str:
    """The fewest devices, a power of two, that hold the weights and one sequence."""
    short = f"the weights do not fit: short by {format_bytes(plan.short_bytes)} on each device"
    devices = options.devices
    while devices < MOST_DEVICES:
        devices *= 2
        if make_plan(spec, replace(options, devices=devices)).users.reserved != 0:
            return f"{short}; --devices {devices} holds them and a cache"
    return f"{short}; {MOST_DEVICES} devices do not hold them either: name a larger device"
