"""A picture of lines, dots and words, drawn as SVG text or as PNG bytes.

Knows nothing of what it shows. Pillow is asked for only when a PNG is drawn; its own font comes with it.
"""

import html
import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvfolio.errors import OptionError

PNG_SCALE = 2  # pixels of the PNG for one of the picture
_FINER = 2  # drawn so much larger still, then made smaller: smooth edges
_FONT = "system-ui, 'Liberation Sans', Arial, sans-serif"


@dataclass(frozen=True, slots=True)
class Line:
    """Through all of its points; ``dash``: length of the pieces, 0 for one whole line."""

    points: tuple[tuple[float, float], ...]
    colour: str
    width: float = 1.0
    dash: float = 0.0


@dataclass(frozen=True, slots=True)
class Dot:
    """A filled circle with an edge. ``words``: shown when a pointer rests on it, in the SVG."""

    x: float
    y: float
    radius: float
    fill: str
    edge: str
    words: str = ""


@dataclass(frozen=True, slots=True)
class Words:
    """One line of text. ``anchor``: start, middle or end, which part of it stands at x; y is its middle's height."""

    x: float
    y: float
    text: str
    colour: str
    size: float = 13.0
    anchor: str = "start"
    upright: bool = False  # read from below to above


Shape = Line | Dot | Words


@dataclass(frozen=True, slots=True)
class Picture:
    """Shapes on white, in the order in which they are drawn. x to the right, y downwards."""

    width: int
    height: int
    title: str  # for those who cannot see it
    shapes: Sequence[Shape]


def text_width(text: str, size: float) -> float:
    """About how wide ``text`` is: rather more, whatever the font."""
    return 0.6 * size * len(text)


def svg_text(picture: Picture) -> str:
    """The picture as an <svg> element."""
    body = "\n".join(_svg_shape(shape) for shape in picture.shapes)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {picture.width} {picture.height}" role="img" '
        f'font-family="{_FONT}"><title>{html.escape(picture.title)}</title>\n'
        f'<rect width="{picture.width}" height="{picture.height}" fill="#ffffff"/>\n{body}\n</svg>'
    )


def _svg_shape(shape: Shape) -> str:
    if isinstance(shape, Line):
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in shape.points)
        dash = f' stroke-dasharray="{shape.dash:g}"' if shape.dash else ""
        return f'<polyline points="{points}" fill="none" stroke="{shape.colour}" stroke-width="{shape.width:g}"{dash}/>'
    if isinstance(shape, Dot):
        words = f"<title>{html.escape(shape.words)}</title>" if shape.words else ""
        return (
            f'<circle cx="{shape.x:.1f}" cy="{shape.y:.1f}" r="{shape.radius:g}" fill="{shape.fill}" '
            f'stroke="{shape.edge}" stroke-width="1.5">{words}</circle>'
        )
    turn = f' transform="rotate(-90 {shape.x:.1f} {shape.y:.1f})"' if shape.upright else ""
    return (
        f'<text x="{shape.x:.1f}" y="{shape.y:.1f}" font-size="{shape.size:g}" fill="{shape.colour}" '
        f'text-anchor="{shape.anchor}" dominant-baseline="central"{turn}>{html.escape(shape.text)}</text>'
    )


def check_png() -> None:
    """Raise OptionError where Pillow is not installed."""
    try:
        import PIL.ImageDraw  # noqa: F401
    except ImportError as error:
        raise OptionError(
            "a PNG needs Pillow, which is not installed; run: pip install 'kvfolio[plot]', or write --html"
        ) from error


def png_bytes(picture: Picture) -> bytes:
    """The picture as the bytes of a PNG file. Raises OptionError where Pillow is not installed."""
    check_png()
    from PIL import Image, ImageDraw

    scale = PNG_SCALE * _FINER
    image = Image.new("RGB", (picture.width * scale, picture.height * scale), "#ffffff")
    draw = ImageDraw.Draw(image)
    for shape in picture.shapes:
        if isinstance(shape, Line):
            for piece in _pieces(shape):
                points = [(x * scale, y * scale) for x, y in piece]
                draw.line(points, fill=shape.colour, width=round(shape.width * scale), joint="curve")
        elif isinstance(shape, Dot):
            draw.circle(
                (shape.x * scale, shape.y * scale),
                shape.radius * scale,
                fill=shape.fill,
                outline=shape.edge,
                width=round(1.5 * scale),
            )
        else:
            _draw_words(image, draw, shape, scale)
    out = io.BytesIO()
    size = (picture.width * PNG_SCALE, picture.height * PNG_SCALE)
    image.resize(size, Image.Resampling.LANCZOS).save(out, "PNG", optimize=True)
    return out.getvalue()


def _draw_words(image: Any, draw: Any, words: Words, scale: int) -> None:
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(words.size * scale)
    anchor = {"start": "lm", "middle": "mm", "end": "rm"}[words.anchor]
    if not words.upright:
        draw.text((words.x * scale, words.y * scale), words.text, fill=words.colour, font=font, anchor=anchor)
        return
    left, top, right, bottom = font.getbbox(words.text, anchor="ls")
    width, height = int(right - left) + 2 * scale, int(bottom - top) + 2 * scale
    turned = Image.new("RGBA", (width, height), "#ffffff00")
    ImageDraw.Draw(turned).text((width // 2, height // 2), words.text, fill=words.colour, font=font, anchor="mm")
    turned = turned.rotate(90, expand=True)
    place = (round(words.x * scale) - turned.width // 2, round(words.y * scale) - turned.height // 2)
    image.paste(turned, place, turned)


def _pieces(line: Line) -> list[tuple[tuple[float, float], ...]]:
    """The visible pieces of a line: as long as its dash, with gaps of the same length."""
    if not line.dash:
        return [line.points]
    pieces = []
    for (x, y), (to_x, to_y) in zip(line.points, line.points[1:], strict=False):
        length = ((to_x - x) ** 2 + (to_y - y) ** 2) ** 0.5
        for number in range(int(length / line.dash / 2) + 1):
            begin, end = 2 * number * line.dash / length, min(1.0, (2 * number + 1) * line.dash / length)
            if begin < 1:
                ends = (begin, end)
                pieces.append(tuple((x + (to_x - x) * share, y + (to_y - y) * share) for share in ends))
    return pieces
