"""kvfolio check: what each storage format of the cache costs in quality, on a model and a text of one's own.

Knows nothing of how it is measured.
"""

import dataclasses
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import compress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvfolio.cli.options import Device, Json, Model, Threads, needs_torch, printable
from kvfolio.errors import OptionError
from kvfolio.units import format_bytes

if TYPE_CHECKING:
    from kvfolio.engine.checked import Check, Row
    from kvfolio.engine.needle import Recall
    from kvfolio.planner.page.pareto import ParetoPlot

COLUMNS = (
    *("format", "bits", "bytes/token", "perplexity", "mean KLD", "99% KLD", "same top-1"),
    *("needle", "like exact", "tokens/s", "limit"),
)


def check(
    model: Model = None,
    text: Annotated[
        Path | None, typer.Option(help="Measure on this UTF-8 text. Left out: the text that ships with Python.")
    ] = None,
    tokens: Annotated[
        int | None, typer.Option(help="Tokens of the text, at most. Left out: 5000, or the model's context if shorter.")
    ] = None,
    formats: Annotated[
        str | None,
        typer.Option(
            help="Formats, a comma between them; int8@64: with 64 block_tokens; int4@sink_blocks=1, "
            "int4@kv_layers=0=int8. Left out: a choice from bf16 to int3."
        ),
    ] = None,
    max_kld: Annotated[
        float, typer.Option(help="Mean KL divergence, in nats, that the chosen format may have.")
    ] = 0.01,
    skip: Annotated[int, typer.Option(help="Tokens before the first position that counts.")] = 128,
    chunk: Annotated[int, typer.Option(help="Tokens of one step.")] = 512,
    needle: Annotated[bool, typer.Option("--needle/--no-needle", help="Ask for a number hidden in the text.")] = True,
    needle_tokens: Annotated[int, typer.Option(help="Tokens of the text around that number, at most.")] = 1500,
    speed: Annotated[bool, typer.Option("--speed/--no-speed", help="Measure decoding at the end of the text.")] = True,
    html: Annotated[Path | None, typer.Option(help="Write a page with plot and table to this file.")] = None,
    png: Annotated[
        Path | None, typer.Option(help="Write the plot to this file (needs Pillow: the extra plot).")
    ] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Keep each finished measurement in this file, and take those that it has.")
    ] = None,
    device: Device = "cpu",
    threads: Threads = None,
    as_json: Json = False,
) -> None:
    """What does each cache format cost in quality, on your model and text? Status 1: none is within --max-kld."""
    _check_faces(html, png, resume)
    with needs_torch():
        from kvfolio.engine.candidate import parse_candidates
        from kvfolio.engine.check import check as check_formats
        from kvfolio.engine.check_options import DEFAULT_SPEED_TOKENS, CheckOptions
        from kvfolio.engine.records import Records
    options = CheckOptions(
        candidates=CheckOptions().candidates if formats is None else parse_candidates(formats),
        text=None if text is None else _read_text(text),
        tokens=tokens,
        max_kld=max_kld,
        skip=skip,
        chunk=chunk,
        needle_tokens=needle_tokens if needle else 0,
        speed_tokens=DEFAULT_SPEED_TOKENS if speed else 0,
        device=device,
        threads=threads,
    )
    with _progress(is_quiet=as_json) as on_progress:
        result = check_formats(model, options, Records(resume), on_progress)
    if as_json:
        print(json.dumps(_fields(result)))
    else:
        _print_table(result)
    _write_faces(result, html, png)
    if result.chosen is None:
        raise typer.Exit(1)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:  # ValueError: not UTF-8, or a NUL in the name
        raise OptionError(f"{path} cannot be read: {error}; give a UTF-8 text file") from error


@contextmanager
def _progress(is_quiet: bool) -> Iterator[Any]:
    """A bar on standard error; where that is no terminal, a line for each measurement that begins."""
    if sys.stderr is None or (is_quiet and not sys.stderr.isatty()):
        yield None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task("")
            yield lambda words, done, total: bar.update(task, description=words, completed=done, total=total)
    else:
        told: list[str] = []

        def tell(words: str, done: int, total: int) -> None:
            if [words] != told:
                told[:] = [words]
                print(f"{done / max(1, total):4.0%}  {words}", file=sys.stderr, flush=True)

        yield tell


# ---- the faces ------------------------------------------------------------------------------------------------------


def _fields(result: "Check") -> dict[str, Any]:
    chosen = result.chosen
    return {**dataclasses.asdict(result), "front": result.front, "chosen": None if chosen is None else chosen.name}


def _print_table(result: "Check") -> None:
    from rich.console import Console
    from rich.table import Table

    for line in _headlines(result):
        print(line)
    table = Table(box=None, pad_edge=False)
    columns, rows = _table(result)
    for column in columns:
        table.add_column(column, justify="left" if column == "format" else "right", no_wrap=True)
    for cells in rows:
        table.add_row(*cells)
    console = Console(highlight=False)
    # A table that is cut says nothing: rather let the terminal wrap it.
    console.width = console.measure(table, options=console.options.update(max_width=10_000)).maximum
    console.print(table)
    for line in _conclusions(result):
        print(line)


def _headlines(result: "Check") -> list[str]:
    num_positions = result.noise.num_positions
    return [
        f"{printable(result.model)}: {num_positions:,} positions of {result.num_tokens:,} tokens, "
        f"the first {result.skip} not counted; computed in f32, in chunks of {result.chunk}",
        f"noise floor (the exact cache in chunks of {result.noise_chunk}): mean KLD {result.noise.mean_kld:.2g}, "
        f"99% {result.noise.p99_kld:.2g}, same top-1 {_percent(result.noise.top1)}",
    ]


def _table(result: "Check") -> tuple[list[str], list[list[str]]]:
    """(columns, rows); what was measured of no row has no column."""
    rows = [_row_cells(row, result) for row in (result.reference, *result.rows)]
    shown = [any(cell != "-" for cell in cells) for cells in zip(*rows, strict=True)]
    return list(compress(COLUMNS, shown)), [list(compress(cells, shown)) for cells in rows]


def _row_cells(row: "Row", result: "Check") -> tuple[str, ...]:
    start = (row.name, f"{row.size.bits:.2f}", f"{row.size.bytes_per_token:,}")
    if row.failure is not None:
        quality = ("not finite", "-", "-", "-")
    elif row.quality is None:
        quality = (f"{result.noise.reference_perplexity:.4g}", "0", "0", _percent(1.0))
    else:
        found = row.quality
        quality = (
            f"{found.perplexity_change:+.3%}",
            f"{found.mean_kld:.2g}",
            f"{found.p99_kld:.2g}",
            _percent(found.top1),
        )
    like = row.num_answers_like_exact
    needle = (_found(row.recall), "-" if like is None or row.recall is None else f"{like}/{len(row.recall.answers)}")
    speed = ("-", "-")
    if row.speed is not None:
        speed = (f"{row.speed.tokens_per_s:.1f}", f"{row.speed.limit_tokens_per_s:.1f}")
    return (*start, *quality, *needle, *speed)


def _found(recall: "Recall | None") -> str:
    return "-" if recall is None else f"{recall.num_found}/{len(recall.answers)}"


def _percent(share: float) -> str:
    """Never 100 % for less than all."""
    return f"{share:.2%}" if share == 1 or share < 0.99995 else f"{int(share * 1e6) / 1e4:.4f}%"


def _conclusions(result: "Check") -> list[str]:
    lines = [
        f"bits: all bytes of one sequence of {result.num_tokens:,} tokens over its numbers; scales, pads and open "
        f"blocks counted, exact tokens in {result.dtype}"
    ]
    if result.needle_tokens is not None:
        lines.append(f"needle: a number in a text of {result.needle_tokens:,} tokens, recalled exactly")
    if any(row.speed is not None for row in result.rows):
        lines.append(
            f"tokens/s: decoding alone in {result.dtype} behind {result.num_tokens:,} tokens; limit: memory bandwidth"
        )
    lines += [f"{row.name}: {printable(row.failure)}" for row in result.rows if row.failure is not None]
    return [*lines, _choice(result)]


def _choice(result: "Check") -> str:
    chosen = result.chosen
    if chosen is not None and chosen.quality is not None:
        return (
            f"smallest format with mean KLD <= {result.max_kld:g}: {chosen.name} ({chosen.size.bits:.2f} bits, "
            f"{format_bytes(chosen.size.bytes_per_token)} a token, mean KLD {chosen.quality.mean_kld:.2g})"
        )
    measured = [(row.quality.mean_kld, row.name) for row in result.rows if row.quality is not None]
    if not measured:
        return f"no format has mean KLD <= {result.max_kld:g}: none could be measured"
    kld, name = min(measured)
    return f"no format has mean KLD <= {result.max_kld:g}: the closest is {name} with {kld:.2g}"


def _check_faces(html: Path | None, png: Path | None, resume: Path | None) -> None:
    """Refuse now what could not be written after minutes of measuring."""
    given = [path.absolute() for path in (html, png, resume) if path is not None]
    if len(set(given)) < len(given):
        raise OptionError("--html, --png and --resume name one file twice; name one for each")
    from kvfolio.planner.page.picture import check_png
    from kvfolio.planner.page.written import check_writable

    if png is not None:
        check_png()
    for path in (html, png):
        if path is not None:
            check_writable(path)


def _write_faces(result: "Check", html: Path | None, png: Path | None) -> None:
    from kvfolio.planner.page.pareto import pareto_page, pareto_picture
    from kvfolio.planner.page.picture import png_bytes
    from kvfolio.planner.page.written import write_file

    if html is not None:
        notes = [*_headlines(result), *_conclusions(result)]
        write_file(pareto_page(_plot(result), *_table(result), notes), html)
        print(f"wrote {html}: open it in a browser", file=sys.stderr)
    if png is not None:
        write_file(png_bytes(pareto_picture(_plot(result))), png)
        print(f"wrote {png}", file=sys.stderr)


def _plot(result: "Check") -> "ParetoPlot":
    from kvfolio.planner.page.pareto import ParetoPlot, Point

    chosen = result.chosen
    return ParetoPlot(
        f"{printable(result.model)}: formats of the KV cache",
        f"{result.noise.num_positions:,} positions of {result.num_tokens:,} tokens against an exact cache in f32; "
        "blue: Pareto front, green: the smallest within the limit",
        [Point(row.name, row.size.bits, row.quality.mean_kld) for row in result.rows if row.quality is not None],
        frozenset(result.front),
        None if chosen is None else chosen.name,
        result.noise.mean_kld,
        result.max_kld,
    )
