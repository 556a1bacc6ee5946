"""The picture of storage formats: mean KL divergence against bits a number, the Pareto front, noise and limit.

Knows nothing of how the numbers were measured, nor of files.
"""

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

from kvfolio.planner.page.picture import Dot, Line, Picture, Shape, Words, svg_text, text_width

WIDTH, HEIGHT = 900, 560
LEFT, RIGHT, TOP, BOTTOM = 84, 24, 64, 62  # margins around the plot
RADIUS = 5.5
LABEL = 13.0  # font size

_INK, _MUTED, _GRID = "#1b2430", "#596473", "#e3e7ec"
_FRONT, _OTHER, _CHOSEN, _LIMIT = "#0067a3", "#b4bcc6", "#008a5e", "#b03a00"

# Where a label may stand, the better place first: (steps away, x, y from the dot, which part of it stands there).
_PLACES = tuple(
    (far, x * far, y * far, anchor)
    for far in (1.0, 1.6, 2.4, 3.4, 5.0)
    for x, y, anchor in (
        (9, -12, "start"),
        (11, 0, "start"),
        (9, 12, "start"),
        (-11, 0, "end"),
        (-9, -12, "end"),
        (-9, 12, "end"),
        (0, -15, "middle"),
        (0, 15, "middle"),
    )
)
_OVER_LINE, _OVER_WORDS = 1.5, 50.0  # what it costs to cover a line, or a dot or a word, in steps away
_Box = tuple[float, float, float, float]  # left, top, right, bottom


@dataclass(frozen=True, slots=True)
class Point:
    """One format."""

    name: str
    bits: float  # of one stored number
    kld: float  # mean, in nats; 0 is drawn on the lower edge


@dataclass(frozen=True, slots=True)
class ParetoPlot:
    """What is drawn."""

    title: str
    subtitle: str
    points: Sequence[Point]
    front: frozenset[str]  # names of points
    chosen: str | None
    noise: float  # mean KL divergence of the exact cache with another chunk size
    max_kld: float


def pareto_page(plot: ParetoPlot, columns: Sequence[str], rows: Sequence[Sequence[str]], notes: Sequence[str]) -> str:
    """One HTML page that needs no network: the picture, the table of ``rows``, a paragraph for each note."""
    head = "".join(f"<th>{html.escape(column)}</th>" for column in columns)
    body = "\n".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    said = "\n".join(f"<p>{html.escape(note)}</p>" for note in notes)
    return f"""<!DOCTYPE html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{html.escape(plot.title)}</title>
<style>
body {{ margin: 0 auto; padding: 20px; max-width: 1100px; background: #f4f5f7; color: {_INK};
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Liberation Sans", Arial, sans-serif; }}
svg {{ display: block; width: 100%; height: auto; border: 1px solid #d5dae1; border-radius: 8px; }}
div {{ overflow-x: auto; }}
table {{ border-collapse: collapse; margin: 20px 0; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 4px 12px; text-align: right; border-bottom: 1px solid #d5dae1; white-space: nowrap; }}
th:first-child, td:first-child {{ text-align: left; }}
</style>
<h1>{html.escape(plot.title)}</h1>
{svg_text(pareto_picture(plot))}
<div><table><thead><tr>{head}</tr></thead>
<tbody>
{body}
</tbody></table></div>
{said}
</html>
"""


def pareto_picture(plot: ParetoPlot) -> Picture:
    """The picture alone."""
    axes = _Axes(plot)
    shapes: list[Shape] = [
        Words(LEFT, 20, plot.title, _INK, 17.0),
        Words(LEFT, 43, plot.subtitle, _MUTED, 12.0),
        *_grid(axes),
        *_levels(plot, axes),
    ]
    ordered = sorted((point for point in plot.points if point.name in plot.front), key=lambda one: one.bits)
    if ordered:
        shapes.append(Line(_steps([(axes.x(one.bits), axes.y(one.kld)) for one in ordered], axes), _FRONT, 1.8))
    dots = [Dot(axes.x(one.bits), axes.y(one.kld), RADIUS, *_colours(one, plot), _words(one)) for one in plot.points]
    lines = [box for one in shapes if isinstance(one, Line) and one.colour != _GRID for box in _stretches(one)]
    taken = [(dot.x - 7, dot.y - 7, dot.x + 7, dot.y + 7) for dot in dots]
    taken += [_box(shape) for shape in shapes if isinstance(shape, Words) and not shape.upright]
    leaders, labels = [], []
    for point, dot in sorted(zip(plot.points, dots, strict=True), key=lambda pair: pair[1].x):
        far, words = _label(point.name, dot, taken, lines, axes)
        taken.append(_box(words))
        labels.append(words)
        if far > 1:
            below = {"middle": LABEL * 0.65}.get(words.anchor, 0.0)  # to the edge of the word, not into it
            end = words.y + (below if words.y < dot.y else -below)
            leaders.append(Line(((dot.x, dot.y), (words.x, end)), _MUTED, 0.7))
    shapes += [*leaders, *dots, *labels]
    return Picture(WIDTH, HEIGHT, f"{plot.title}: mean KL divergence against bits a number", shapes)


class _Axes:
    """Bits and divergences to places. Divergences below the lowest decade drawn stand on the lower edge."""

    def __init__(self, plot: ParetoPlot) -> None:
        self.max_bits = max([*(point.bits for point in plot.points), 4.0]) * 1.06
        shown = [point.kld for point in plot.points if point.kld > 0] + [plot.max_kld]
        positive = [kld for kld in shown if kld > 0] or [1e-3]
        # The noise floor is often many decades below: it has one decade of its own, and is named where it is lower.
        self.low = math.floor(math.log10(min(positive))) - 1
        self.high = max(math.ceil(math.log10(max(*positive, plot.noise)) + 0.1), self.low + 2)
        self.bottom, self.right = HEIGHT - BOTTOM, WIDTH - RIGHT

    def x(self, bits: float) -> float:
        return LEFT + (self.right - LEFT) * bits / self.max_bits

    def y(self, kld: float) -> float:
        level = math.log10(kld) if kld > 0 else self.low
        share = (max(level, self.low) - self.low) / (self.high - self.low)
        return self.bottom - (self.bottom - TOP) * share


def _grid(axes: _Axes) -> list[Shape]:
    shapes: list[Shape] = []
    decades = axes.high - axes.low
    for level in range(axes.low, axes.high + 1):
        y = axes.y(10.0**level)
        shapes.append(Line(((LEFT, y), (axes.right, y)), _GRID))
        if (level - axes.low) % max(1, decades // 8) == 0:
            shapes.append(Words(LEFT - 8, y, f"1e{level}" if level else "1", _MUTED, 12.0, "end"))
    step = next(one for one in (1, 2, 4, 8) if axes.max_bits / one <= 18 or one == 8)
    for bits in range(0, int(axes.max_bits) + 1, step):
        x = axes.x(bits)
        shapes.append(Line(((x, TOP), (x, axes.bottom)), _GRID))
        shapes.append(Words(x, axes.bottom + 15, str(bits), _MUTED, 12.0, "middle"))
    middle = (TOP + axes.bottom) / 2
    return [
        *shapes,
        Line(((LEFT, TOP), (LEFT, axes.bottom), (axes.right, axes.bottom)), _MUTED, 1.2),
        Words((LEFT + axes.right) / 2, HEIGHT - 18, "bits a stored number, everything counted", _INK, 13.0, "middle"),
        Words(20, middle, "mean KL divergence (nats)", _INK, 13.0, "middle", upright=True),
    ]


def _levels(plot: ParetoPlot, axes: _Axes) -> list[Shape]:
    """The noise floor, named at the left, where no format has so little divergence; the limit, named at the right."""
    shapes: list[Shape] = []
    is_below = plot.noise < 10.0**axes.low
    noise_words = f"noise floor {plot.noise:.2g}" + (", below this axis" if is_below else "")
    y = axes.y(plot.noise)
    shapes.append(Line(((LEFT, y), (axes.right, y)), _MUTED, 1.4, 2.5))
    shapes.append(Words(LEFT + 6, y - 10, noise_words, _MUTED, 12.0))
    if plot.max_kld > 0:
        y = axes.y(plot.max_kld)
        shapes.append(Line(((LEFT, y), (axes.right, y)), _LIMIT, 1.4, 6.0))
        shapes.append(Words(axes.right - 4, y - 10, f"limit {plot.max_kld:g}", _LIMIT, 12.0, "end"))
    return shapes


def _steps(places: list[tuple[float, float]], axes: _Axes) -> tuple[tuple[float, float], ...]:
    """The front as stairs: what is possible with so many bits."""
    corners = [(places[0][0], float(TOP))]
    for (x, y), following in zip(places, [*places[1:], (axes.right, 0.0)], strict=True):
        corners += [(x, y), (following[0], y)]
    return tuple(corners)


def _colours(point: Point, plot: ParetoPlot) -> tuple[str, str]:
    if point.name == plot.chosen:
        return _CHOSEN, _INK
    return (_FRONT, "#ffffff") if point.name in plot.front else (_OTHER, _MUTED)


def _words(point: Point) -> str:
    return f"{point.name}: {point.bits:.2f} bits, mean KL divergence {point.kld:.2g}"


def _label(name: str, dot: Dot, taken: Sequence[_Box], lines: Sequence[_Box], axes: _Axes) -> tuple[float, Words]:
    """(steps away, the name beside its dot) at the place that is near and covers least."""
    best = (math.inf, 1.0, Words(dot.x, dot.y, name, _INK, LABEL))
    for far, x, y, anchor in _PLACES:
        words = Words(dot.x + x, dot.y + y, name, _INK, LABEL, anchor)
        left, top, right, bottom = box = _box(words)
        is_outside = left < LEFT or right > axes.right or top < TOP or bottom > axes.bottom
        covered = is_outside + sum(_overlap(box, other) for other in taken)
        cost = far + _OVER_WORDS * covered + _OVER_LINE * sum(_overlap(box, other) for other in lines)
        if cost < best[0]:
            best = (cost, far, words)
    return best[1:]


def _box(words: Words) -> _Box:
    width = text_width(words.text, words.size)
    left = words.x - width * {"start": 0.0, "middle": 0.5, "end": 1.0}[words.anchor]
    return left, words.y - words.size * 0.6, left + width, words.y + words.size * 0.6


def _stretches(line: Line) -> list[_Box]:
    """The places of an upright or level line's pieces."""
    return [
        (min(x, to_x) - 1, min(y, to_y) - 1, max(x, to_x) + 1, max(y, to_y) + 1)
        for (x, y), (to_x, to_y) in zip(line.points, line.points[1:], strict=False)
    ]


def _overlap(one: _Box, other: _Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
