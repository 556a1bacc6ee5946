"""The HTML page of a plan: one file with its numbers, its plots and their script, which needs no network.

Knows nothing of formulas: ``grids`` counts, ``figures`` names the plots, ``files`` has the page's own script and
style. Whatever a user or a file may have named is escaped here.
"""

import dataclasses
import html
import json
import re
import shlex
from collections.abc import Iterable, Sequence
from pathlib import Path

from kvfolio.errors import OptionError
from kvfolio.planner.options import DEFAULT_UTILISATION, PlanOptions, changed_arguments
from kvfolio.planner.page.figures import PLOTS, Plot, plotly_script
from kvfolio.planner.page.grids import DeviceRow, make_grid
from kvfolio.planner.page.written import write_file
from kvfolio.planner.report import LayerReport, Plan, make_plan
from kvfolio.planner.words import KIND_WORDS
from kvfolio.spec.model import ModelSpec
from kvfolio.units import format_bytes, format_count, format_decimal_bytes, format_params

FILES = Path(__file__).with_name("files")
SCRIPTS = ("formulas.js", "words.js", "plots.js", "page.js")  # in the order in which they need each other

_TILES = (
    ("token", "Cache of one token"),
    ("conversation", "One conversation"),
    ("fit", "Users that fit"),
    ("user-speed", "Tokens/s per user"),
    ("total-speed", "Tokens/s in all"),
    ("break-even", "Cache > weights from"),
)
_ARGUMENTS = (  # options that the page has no control for; a mean and a prefix change nothing that it shows
    *("pipeline", "reserve", "block_tokens", "weights_bytes"),
    *("prompt_tokens", "tokens", "in_flight", "encoder_tokens"),
)


def write_page(
    specs: Sequence[ModelSpec],
    options: PlanOptions,
    path: Path,
    sources: Sequence[str] | None = None,
    version: str = "",
) -> None:
    """Write the page of ``specs`` under ``options`` to ``path``; a file that was there stays whole until then.

    ``sources``: what each model was read from, as typed, for the command that the page shows; None: their names.
    ``version``: of kvfolio, as it is to be printed.
    Raises OptionError for pipeline stages, weights that are not known, options at odds with a model, a missing plotly
    and a file that cannot be written.
    """
    write_file(page_text(specs, options, sources, version), path)


def page_text(
    specs: Sequence[ModelSpec],
    options: PlanOptions,
    sources: Sequence[str] | None = None,
    version: str = "",
    date: str | None = None,
) -> str:
    """The whole page. ``date``: as it is to be printed; None: today's. The rest, and errors, as in ``write_page``."""
    plans = _plans(specs, options)
    script = plotly_script()
    grid = make_grid(specs, options)
    names = [spec.name for spec in specs]
    own = "\n".join((FILES / name).read_text(encoding="utf-8") for name in SCRIPTS)
    parts = {
        "title": _escaped(
            f"KV cache plan: {', '.join(names[:3])}" + (f" and {len(names) - 3} more" if names[3:] else "")
        ),
        "maker": _escaped(f"kvfolio {version}".rstrip()),
        "date": _escaped(date or _today()),
        "style": (FILES / "style.css").read_text(encoding="utf-8"),
        "plans": "\n".join(_plan_table(plan) for plan in plans),
        "tiles": "\n".join(_tile(key, name) for key, name in _TILES),
        "plots": "\n".join(_plot(plot) for plot in PLOTS),
        "facts": "\n".join(_facts(index, plan) for index, plan in enumerate(plans)),
        "usable": _escaped(_usable_words(options)),
        "devices": _device_table(grid.devices),
        "plotly": script,
        "grid": _json(dataclasses.asdict(grid)),
        "frame": _json(
            {
                "plots": [dataclasses.asdict(plot) for plot in PLOTS],
                "sources": [shlex.quote(source) for _, source in zip(specs, sources or names, strict=True)],
                "arguments": _arguments(options),
            }
        ),
        "scripts": own,
    }
    frame = (FILES / "frame.html").read_text(encoding="utf-8")
    return re.sub(r"@@(\w+)@@", lambda match: parts[match[1]], frame)  # one pass: what is put in is not looked at again


def _plans(specs: Sequence[ModelSpec], options: PlanOptions) -> list[Plan]:
    """The plans as asked for, or why no page can show them."""
    if not specs:
        raise OptionError("no model is given; name at least one")
    if options.pipeline > 1:
        raise OptionError("--html shows tensor parallel only; leave --pipeline out")
    plans = [make_plan(spec, options) for spec in specs]
    for plan in plans:
        if not plan.weights_bytes:
            raise OptionError(f"the weights of {plan.model.name} are not known; give --weights-bytes")
    return plans


# ---- words and data -------------------------------------------------------------------------------------------------


def _today() -> str:
    import datetime  # only where a page is written

    return datetime.date.today().isoformat()


def _escaped(text: str) -> str:
    return html.escape(text, quote=True)


def _json(value: object) -> str:
    """JSON that may stand inside a script element: no ``<`` that could end it."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _arguments(options: PlanOptions) -> str:
    """The options that no control sets, as the command line writes them."""
    utilisation = options.utilisation != DEFAULT_UTILISATION
    stated = ["--utilisation", repr(options.utilisation)] if utilisation else []
    return " ".join([*stated, *changed_arguments(options, _ARGUMENTS)])


def _usable_words(options: PlanOptions) -> str:
    kept = f", less {format_bytes(options.reserve)}" if options.reserve else ""
    return f"Of it, {options.utilisation:.0%}{kept} is counted as usable for weights and caches."


# ---- pieces of HTML -------------------------------------------------------------------------------------------------


def _tile(key: str, name: str) -> str:
    return (
        f'<div class="card tile" id="tile-{key}"><div class="name">{_escaped(name)}</div>'
        '<div class="value">–</div><div class="detail"></div></div>'
    )


def _plot(plot: Plot) -> str:
    return (
        f'<figure class="card" style="margin: 0"><h3 id="title-{plot.key}">{_escaped(plot.title)}</h3>'
        f'<p class="caption" id="caption-{plot.key}"></p><div class="plot" id="plot-{plot.key}" role="img" '
        f'aria-labelledby="title-{plot.key}" aria-describedby="caption-{plot.key}" style="min-height: {plot.height}px">'
        "</div></figure>"
    )


def _table(heads: Sequence[str], rows: Iterable[Sequence[str]], texts: Sequence[int] = ()) -> str:
    """A table; the columns ``texts`` hold words, the others numbers."""
    kind = ['class="text"' if index in texts else "" for index in range(len(heads))]
    head = "".join(f'<th scope="col" {kind[index]}>{_escaped(text)}</th>' for index, text in enumerate(heads))
    body = "\n".join(
        "<tr>"
        + f'<th scope="row">{_escaped(row[0])}</th>'
        + "".join(f"<td {kind[index]}>{_escaped(text)}</td>" for index, text in enumerate(row[1:], 1))
        + "</tr>"
        for row in rows
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _plan_table(plan: Plan) -> str:
    rows = [
        (
            f"{at.context:,}" + (" *" if at.beyond_model else ""),
            format_bytes(at.bytes),
            "no bound" if at.users is None else f"{at.users:,}",
            "–" if at.step is None else f"{at.step.tokens_per_s_per_user:,.1f}",
            "–" if at.step is None else f"{at.step.tokens_per_s_total:,.1f}",
        )
        for at in plan.contexts
    ]
    heads = ("context (tokens)", "one conversation", "users that fit", "tokens/s per user", "tokens/s in all")
    where = f"{plan.model.name}, {plan.kv.format}, on {plan.device.num_devices} × {plan.device.name}"
    return f"<h3>{_escaped(where)}</h3>{_table(heads, rows)}"


def _facts(index: int, plan: Plan) -> str:
    """Layers and assumptions of one model; the page shows those of the model that is chosen."""
    model = plan.model
    reads = "not said" if model.max_context is None else f"{model.max_context:,} tokens"
    notes = "".join(f"<li>{_escaped(note)}</li>" for note in plan.assumptions) or "<li>none</li>"
    sizes = (
        f"{format_params(model.num_parameters)} parameters, {format_params(model.num_active_parameters)} active; "
        f"weights {format_bytes(plan.weights_bytes)} ({format_decimal_bytes(plan.weights_bytes)}); "
        f"longest context: {reads}"
    )
    return (
        f'<section class="card" data-model="{index}"><h3>{_escaped(model.name)}</h3>'
        f'<p class="muted">{_escaped(sizes)}</p><div class="scroll" tabindex="0" role="region" aria-label="Layers">'
        f"{_layer_table(plan.kv.layers, plan.kv.format)}</div>"
        f'<h3 style="margin-top: 14px">Assumed</h3><ul>{notes}</ul></section>'
    )


def _layer_table(layers: Sequence[LayerReport], fmt: str) -> str:
    heads = (
        "layers",
        "kind",
        "key/value heads",
        "width",
        "window",
        f"one more token ({fmt})",
        f"fixed ({fmt})",
        "detail",
    )
    rows = [
        (
            f"{layer.num_layers}",
            KIND_WORDS[layer.kind].long,
            f"{layer.num_kv_heads}" if layer.num_kv_heads else "–",
            _width(layer),
            "–" if layer.window is None else f"{layer.window:,}",
            f"{layer.bytes_per_token * layer.num_layers:,.10g} B",
            f"{layer.bytes_fixed * layer.num_layers:,} B",
            layer.detail,
        )
        for layer in layers
    ]
    return _table(heads, rows, texts=(1, 7))


def _width(layer: LayerReport) -> str:
    if not layer.head_dim:
        return "–"
    return f"{layer.head_dim}" if layer.v_head_dim == layer.head_dim else f"{layer.head_dim} / {layer.v_head_dim}"


def _device_table(rows: Sequence[DeviceRow]) -> str:
    heads = ("device", "memory", "bandwidth", "16-bit arithmetic", "source", "notes")
    return _table(
        heads,
        [
            (
                row.name,
                f"{format_bytes(row.memory_bytes)} ({format_decimal_bytes(row.memory_bytes)})",
                "–" if row.bandwidth_bytes_per_s is None else f"{format_decimal_bytes(row.bandwidth_bytes_per_s)}/s",
                "–" if row.bf16_flops is None else f"{format_count(row.bf16_flops)}FLOP/s",
                row.source,
                row.notes,
            )
            for row in rows
        ],
        texts=(4, 5),
    )
