"""Plans on a terminal: where the bytes go, users, speed, what to change next.

Knows nothing of arithmetic.
"""

import sys
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from kvfolio.cli.options import printable
from kvfolio.planner.report import LayerReport, LengthReport, Plan
from kvfolio.planner.whatif import WhatIf
from kvfolio.planner.words import KIND_WORDS
from kvfolio.units import (
    format_bytes,
    format_count,
    format_decimal_bytes,
    format_params,
    format_seconds,
    format_tokens,
)

BAR = 20  # letters of a full bar
PIPE_WIDTH = 160  # columns where nobody watches: nothing is cut


def show_one(plan: Plan, advice: Sequence[str], command: str) -> None:
    """Everything about one model; ``command`` makes the same plan again."""
    console = _console()
    _show_head(console, plan)
    for table in (_layers_table(plan), _memory_table(plan), _contexts_table(plan)):
        _print_whole(console, table)
    for line in _facts(plan):
        console.print(line, soft_wrap=True)
    if advice:
        console.print("\n[bold]Change next[/]")
        for sentence in advice:
            console.print(f"  · {escape(printable(sentence))}", soft_wrap=True)
    _show_assumptions(console, plan.assumptions)
    console.print(f"\n[dim]Again: {escape(printable(command))}[/]", soft_wrap=True)


def show_several(plans: Sequence[Plan]) -> None:
    """Models side by side: bytes of one sequence over contexts."""
    console = _console()
    table = _table(f"KV cache of one sequence, {plans[0].kv.format}", "model", "params", "a token", "fixed")
    for row in plans[0].contexts:
        table.add_column(format_tokens(row.context), justify="right")
    table.add_column("users", justify="right")
    for plan in plans:
        fixed = format_bytes(plan.kv.bytes_fixed) if plan.kv.bytes_fixed else "–"
        cells = [f"{format_bytes(row.bytes)}{' *' if row.beyond_model else ''}" for row in plan.contexts]
        params = format_params(plan.model.num_parameters)
        users = "does not fit" if plan.short_bytes else _count(plan.users.reserved)
        token = _bytes(plan.kv.bytes_per_token)
        table.add_row(escape(printable(plan.model.name)), params, token, fixed, *cells, users)
    _print_whole(console, table)
    device = _device_line(plans[0])
    console.print(
        f"users: sequences of {format_tokens(plans[0].contexts[0].context)} tokens beside the weights on {device}"
    )
    if any(row.beyond_model for plan in plans for row in plan.contexts):
        console.print("* more than the model was made to read")
    common = [sentence for sentence in plans[0].assumptions if all(sentence in plan.assumptions for plan in plans)]
    for plan in plans:
        own = [sentence for sentence in plan.assumptions if sentence not in common]
        _show_assumptions(console, own, f" for {plan.model.name}")
    _show_assumptions(console, common, " for all")


def show_ladder(ladder: Sequence[WhatIf]) -> None:
    """The rows of one what-if, one line each."""
    console = _console()
    first = ladder[0].plan
    context = format_tokens(first.contexts[0].context)
    title = f"{escape(printable(first.model.name))} · the same body with other attention, and in other formats"
    table = _table(title, "", "a token", f"at {context}", "of published", "", "users", "tokens/s")
    largest = max(row.ratio for row in ladder)
    for row in ladder:
        table.add_row(
            escape(row.name),
            _bytes(row.plan.kv.bytes_per_token),
            format_bytes(row.plan.contexts[0].bytes),
            f"{row.ratio:.1%}",
            _bar(row.ratio / largest, 12),
            "does not fit" if row.plan.short_bytes else _count(row.plan.users.reserved),
            f"{row.plan.step.tokens_per_s_per_user:,.1f}" if row.plan.step else "?",
        )
    _print_whole(console, table)
    console.print(
        f"on {_device_line(first)}; weights of {format_bytes(first.weights_bytes)} left as they are", soft_wrap=True
    )
    _show_assumptions(console, first.assumptions)


def _print_whole(console: Console, table: Table) -> None:
    """A table of its own width, whatever the terminal's: a number that wraps can be read, one that is cut cannot."""
    width = max(console.width, console.measure(table, options=console.options.update(max_width=PIPE_WIDTH)).maximum)
    console.print(table, width=width, crop=False, soft_wrap=width > console.width)


def _console() -> Console:
    width = None if sys.stdout is not None and sys.stdout.isatty() else PIPE_WIDTH
    return Console(highlight=False, width=width)


def _show_head(console: Console, plan: Plan) -> None:
    model = plan.model
    params = f"{format_params(model.num_parameters)} parameters" if model.num_parameters else "parameters not known"
    if model.num_active_parameters != model.num_parameters:
        params += f", {format_params(model.num_active_parameters)} for a token"
    reads = f"reads {model.max_context:,} tokens" if model.max_context else "context not stated"
    name, kind = escape(printable(model.name)), escape(printable(model.model_type))
    console.print(f"[bold]{name}[/] · {kind} · {params} · {reads}", soft_wrap=True)
    console.print(f"on {_device_line(plan)}\n", soft_wrap=True)


def _device_line(plan: Plan) -> str:
    device = plan.device
    count = f"{device.num_devices} × " if device.num_devices > 1 else ""
    each = " each" if device.num_devices > 1 else ""
    memory = f"{format_bytes(device.memory_bytes)} ({format_decimal_bytes(device.memory_bytes)}){each}"
    return f"{count}{escape(printable(device.name))}: {memory}" + _speed(device.bandwidth_bytes_per_s)


def _speed(bytes_per_s: int | None) -> str:
    if bytes_per_s is None:
        return ""
    return f", {bytes_per_s / 1e12:.2f} TB/s" if bytes_per_s >= 10**12 else f", {bytes_per_s / 1e9:.1f} GB/s"


def _layers_table(plan: Plan) -> Table:
    """Where one sequence's bytes go at the first context."""
    context = plan.contexts[0].context
    total = max(1, plan.kv.bytes_at[str(context)])
    title = f"KV cache, {plan.kv.format}: {_bytes(plan.kv.bytes_per_token)} a token"
    title += f" + {format_bytes(plan.kv.bytes_fixed)} fixed" if plan.kv.bytes_fixed else ""
    table = _table(title, "layers", "", "a token each", f"all at {format_tokens(context)}", "")
    for layer in plan.kv.layers:
        held = layer.num_layers * _layer_bytes(layer, context)
        table.add_row(
            f"{layer.num_layers} {KIND_WORDS[layer.kind].short}",
            _geometry(layer),
            format_bytes(layer.bytes_per_token_held) if layer.bytes_per_token_held else "–",
            format_bytes(held),
            _bar(held / total),
        )
    return table


def _layer_bytes(layer: LayerReport, context: int) -> int:
    window = min(context, layer.window) * layer.bytes_per_token_held if layer.window else layer.bytes_fixed
    return window + int(layer.bytes_per_token * context)


def _geometry(layer: LayerReport) -> str:
    if layer.detail:
        return layer.detail
    if not layer.num_kv_heads:
        return ""
    width = str(layer.head_dim) if layer.head_dim == layer.v_head_dim else f"{layer.head_dim}/{layer.v_head_dim}"
    if layer.kind.startswith(("latent", "compressed")):
        text = f"{width} numbers"
    else:
        text = f"{layer.num_kv_heads} kv head{'s' if layer.num_kv_heads > 1 else ''} × {width}"
    return f"{text}, window {layer.window:,}" if layer.window else text


def _memory_table(plan: Plan) -> Table:
    """Where one device's bytes go."""
    device = plan.device
    weights, caches = device.weights_bytes, device.kv_memory_bytes
    rest = max(0, device.memory_bytes - weights - caches)
    which = "the fullest" if device.pipeline_stages > 1 else "one"
    table = _table(f"Memory of {which} device", "", "GiB", "GB", "")
    for name, value in (("weights", weights), ("caches", caches), ("left free", rest)):
        share = min(1.0, value / device.memory_bytes)
        table.add_row(name, f"{value / 2**30:,.2f}", f"{value / 1e9:,.2f}", _bar(share))
    return table


def _contexts_table(plan: Plan) -> Table:
    asked = plan.step.users if plan.step else 1
    alone = "one alone" if asked == 1 else f"{asked:,} users"
    columns = ("context", "one sequence", "users", f"tokens/s: {alone}", "each of all", "in all", "first token")
    table = _table("Users and speed, at best", *columns)
    for row in plan.contexts:
        table.add_row(*_context_cells(row, bool(plan.short_bytes)))
    return table


def _context_cells(row: LengthReport, does_not_fit: bool) -> Iterator[str]:
    yield format_tokens(row.context) + (" *" if row.beyond_model else "")
    yield format_bytes(row.bytes)
    yield "do not fit" if does_not_fit else _count(row.users)
    yield "–" if does_not_fit else _speed_of(row)
    yield f"{row.full_step.tokens_per_s_per_user:,.1f}" if row.full_step else "–"
    yield f"{row.full_step.tokens_per_s_total:,.0f}" if row.full_step else "–"
    yield "–" if does_not_fit else format_seconds(row.ttft_s) if row.ttft_s is not None else "?"


def _speed_of(row: LengthReport) -> str:
    if row.step is None:
        return "?"
    return f"{row.step.tokens_per_s_per_user:,.1f}" + ("" if row.step.fits else " (too many)")


def _facts(plan: Plan) -> Iterator[str]:
    if any(row.beyond_model for row in plan.contexts):
        yield "* more than the model was made to read"
    if plan.step and plan.contexts[0].ttft_s is None:
        yield "first token: the device's rate is not known; give --flops"
    users = plan.users
    if users.paged is not None and not plan.short_bytes:
        line = f"Paged, {users.mean_tokens:,} tokens each on average: {users.paged:,} users"
        if users.prefix_saving_bytes:
            line += (
                f"; a shared prefix of {users.prefix_tokens:,} tokens saves {format_bytes(users.prefix_saving_bytes)}"
            )
        yield line
    step = plan.step
    if step is not None and not plan.short_bytes:
        yield (
            f"A step of {step.users:,} at {format_tokens(step.context)} takes {format_seconds(step.time_s)}: "
            f"{step.limit}-bound, each device reads {format_bytes(step.weights_bytes_read)} of weights "
            f"and {format_bytes(step.cache_bytes_read)} of cache"
        )
    if plan.break_even_context is not None:
        yield f"The cache outweighs the weights from {plan.break_even_context:,} tokens"
    ratio = plan.flops.without_cache_ratio_decode_only
    flops = f"{format_count(plan.flops.per_token)}FLOP a token" if plan.flops.per_token else "FLOPs not known"
    yield (
        f"{flops}; without a cache {ratio:,.1f}× as many for "
        f"{plan.flops.tokens:,} tokens behind a prompt of {plan.flops.prompt_tokens:,}"
    )


def _show_assumptions(console: Console, assumptions: Sequence[str], name: str = "") -> None:
    if assumptions:
        console.print(f"\n[dim]Assumed{escape(printable(name))}[/]")
        for sentence in assumptions:
            console.print(f"[dim]  · {escape(printable(sentence))}[/]", soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for index, name in enumerate(columns):
        table.add_column(name, justify="left" if index == 0 or not name else "right", no_wrap=True)
    return table


def _bar(share: float, width: int = BAR) -> str:
    """A bar in eighths of a letter."""
    eighths = round(max(0.0, min(1.0, share)) * width * 8)
    return "█" * (eighths // 8) + ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")[eighths % 8]


def _count(users: int | None) -> str:
    return "unbounded" if users is None else f"{users:,}"


def _bytes(value: float) -> str:
    return format_bytes(int(value)) if value == int(value) else f"{value:,.1f} B"
