"""What all engines' command lines share: the plan behind one, its numbers as comments, what no engine can do.

Knows nothing of any engine's flags (``emit.py``).
"""

from dataclasses import dataclass, field, replace
from pathlib import Path

from kvfolio.errors import BudgetError, OptionError
from kvfolio.planner import sizes
from kvfolio.planner.options import PlanOptions
from kvfolio.planner.parallel import DeviceShare, divides_evenly
from kvfolio.planner.report import Plan, make_plan
from kvfolio.planner.scene import make_scene
from kvfolio.spec.layers import parts_of
from kvfolio.spec.model import ModelSpec
from kvfolio.units import format_bytes


@dataclass(frozen=True, slots=True)
class Job:
    """One command line while it is written."""

    spec: ModelSpec
    options: PlanOptions
    plan: Plan
    share: DeviceShare
    context: int
    users: int
    source: str
    memory: int  # bytes for caches on one device, where the fewest sequences fit
    is_least_memory: bool  # no pipeline stage has less
    beyond_model: bool  # the context asked for is more than the model was made for
    flags: list[tuple[str, ...]] = field(default_factory=list)
    comments: list[str] = field(default_factory=list)

    def flag(self, *words: str | int) -> None:
        self.flags.append(tuple(str(word) for word in words))

    def say(self, comment: str) -> None:
        self.comments.append(comment)

    @property
    def each(self) -> int:
        """Tokens that a user is counted at."""
        return self.context if self.options.mean_tokens is None else self.options.mean_tokens

    @property
    def prefix(self) -> int:
        """Of these, the tokens that are counted once for all users."""
        blocks = min(self.options.prefix_tokens, self.each - 1) // self.options.chosen_block_tokens
        return 0 if self.options.mean_tokens is None else blocks * self.options.chosen_block_tokens

    def fraction(self) -> str:
        """The share of a device's memory that may be used: as asked, or with the reserve taken off and rounded down."""
        if not self.options.reserve:
            return str(self.options.utilisation)
        total, digits = self.plan.device.memory_bytes, 4
        usable = self.options.usable_bytes
        while usable * 10**digits < total:  # a share is never 0
            digits += 1
        return f"{usable * 10**digits // total / 10**digits:.{digits}f}".rstrip("0")

    def has(self, *kinds: str) -> bool:
        return any(part.kind in kinds for kind in self.spec.layers for part in parts_of(kind))

    def window(self) -> int | None:
        """The widest window; None where no layer has one."""
        parts = (part for kind in self.spec.layers for part in parts_of(kind))
        return max((part.window for part in parts if part.window is not None and part.horizon()), default=None)


def check_heads(spec: ModelSpec, devices: int, engine: str) -> None:
    """Both engines cut query heads evenly, and key/value heads too or else copy each equally often."""
    if spec.num_q_heads and not divides_evenly(spec, devices):
        taken = [str(count) for count in range(1, spec.num_q_heads + 1) if divides_evenly(spec, count)]
        parts = (part for kind, _ in spec.kinds() for part in parts_of(kind))
        kv_heads = sorted({part.num_kv_heads for part in parts if part.num_kv_heads})
        told = " or ".join([", ".join(taken[:-1]), taken[-1]] if len(taken) > 1 else taken)
        uneven = spec.num_q_heads % devices == 0  # the key/value heads are what does not divide
        own = f" with {' and '.join(map(str, kv_heads))} key/value heads" if uneven else ""
        raise OptionError(
            f"{spec.num_q_heads} attention heads{own} cannot be cut into {devices}; {engine} takes {told}; change "
            "--devices, or cut layers with --pipeline"
        )


def make_job(spec: ModelSpec, options: PlanOptions, source: str, pad: int = 1) -> Job:
    """The plan behind the flags, with its numbers as the first comments; BudgetError where it does not fit.

    ``pad``: the engine rounds a context up to a multiple of this, so the plan is made for that many tokens.
    """
    plan = make_plan(spec, options)
    asked = plan.contexts[0]
    if asked.context < 1:
        raise OptionError("a context of 0 tokens cannot be served; give --context, such as 4096 or 32k")
    context = sizes.rounded_up(asked.context, pad)
    if context != asked.context:
        plan = make_plan(spec, replace(options, contexts=(context,)))
    if not plan.weights_bytes:
        raise OptionError(
            f"the bytes of {spec.name}'s weights are not known, and with them the room: give --weights-bytes"
        )
    scene = make_scene(spec, options, [])
    share = scene.binding(context)
    if plan.short_bytes:
        raise BudgetError(
            f"the weights do not fit: {format_bytes(share.weights_bytes)} a device, short by "
            f"{format_bytes(plan.short_bytes)}; take more --devices, a larger device or a smaller checkpoint"
        )
    memory = scene.memory(share)
    job = Job(
        spec=spec,
        options=options,
        plan=plan,
        share=share,
        context=context,
        users=_users(options, plan, memory),
        source=source,
        memory=memory,
        is_least_memory=memory == min(map(scene.memory, scene.shares)),
        beyond_model=asked.beyond_model,
    )
    _say_numbers(job)
    if context != asked.context:
        job.say(f"{asked.context:,} tokens became {context:,}: the engine rounds a context up to {pad}")
    return job


def _users(options: PlanOptions, plan: Plan, memory: int) -> int:
    row = plan.contexts[0]
    paged = options.mean_tokens is not None
    fit = plan.users.paged if paged else plan.users.reserved
    if fit is None:
        return options.users
    have = f"{format_bytes(memory)} of cache memory a device"
    one = f"one of {row.context:,} tokens takes {format_bytes(row.device_bytes)}"
    ways = "a shorter context, more --devices or a smaller --kv-format"
    if fit < 1 or not row.users:
        raise BudgetError(f"no sequence fits in {have}: {one}; take {ways}")
    if fit < options.users:
        each = f"{plan.users.mean_tokens if paged else row.context:,} tokens"
        raise BudgetError(
            f"{options.users:,} sequences of {each} do not fit: {fit:,} do in {have}, and {one}; "
            f"take fewer users, {ways}"
        )
    return options.users if options.users > 1 else fit


def _say_numbers(job: Job) -> None:
    plan, options = job.plan, job.options
    held = "at a mean of" if options.mean_tokens is not None else "each set aside whole:"
    common = f", {job.prefix:,} of them one prefix of all, held once" if job.prefix else ""
    reserve = f" - reserve {format_bytes(options.reserve)}" if options.reserve else ""
    each = plan.contexts[0].device_bytes
    job.say(f"{job.spec.name} on {plan.device.name}, cache in {plan.kv.format}")
    job.say(
        f"for caches {job.memory:,} B a device = {options.utilisation:g} * {format_bytes(plan.device.memory_bytes)}"
        f"{reserve} - weights {format_bytes(job.share.weights_bytes)}"
    )
    job.say(f"users: {job.users:,}, {held} {job.each:,} tokens{common}; {each:,} B a device at {job.context:,} tokens")
    if plan.users.reserved is None:
        job.say("no cache bounds the number of users: --users says how many")
    if not options.contexts:
        job.say(f"no --context was given: {job.context:,} tokens are planned; --context says else")
    if options.weights_bytes is not None:
        job.say(f"the weights were given as {options.weights_bytes:,} B: name the checkpoint that has them")
    if job.beyond_model:
        job.say(f"{job.context:,} tokens is more than the {plan.model.max_context:,} that the model was made for")


def written(job: Job, start: tuple[str, ...]) -> str:
    from shlex import quote

    comments = ["# " + " ".join(comment.split()) for comment in job.comments]
    lines = [" ".join(map(quote, words)) for words in (start, *job.flags)]
    return "\n".join([*comments, " \\\n  ".join(lines)])


def model_name(job: Job) -> str:
    """What the engine is to call the model: a path, or its repository on the hub."""
    source = job.source
    path = Path(source)
    if path.exists():
        folder = path.parent if path.name == "config.json" else path
        return f"./{folder}" if str(folder).startswith("-") else str(folder)
    if "/" in source:
        return source
    from kvfolio.spec.catalogue import find_entry

    entry = find_entry(source)
    if entry is not None and entry.repo is not None:
        return entry.repo
    job.say(f"{source} has no repository that kvfolio knows: put the path of its weights in its place")
    return source
