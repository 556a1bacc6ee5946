"""The Pareto plot: every format is there with its name, no label covers another, and a PNG is as large as it says.

Knows nothing of models.
"""

import struct
import xml.etree.ElementTree as Xml
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvfolio.errors import OptionError
from kvfolio.planner.page.pareto import HEIGHT, WIDTH, ParetoPlot, Point, _box, _overlap, pareto_page, pareto_picture
from kvfolio.planner.page.picture import PNG_SCALE, Dot, Line, Picture, Words, check_png, png_bytes, svg_text

POINTS = (
    *(Point("bf16", 16.06, 5e-5), Point("int8", 8.56, 3e-4), Point("fp8", 8.1, 2e-3), Point("fp8-scaled", 8.56, 2e-3)),
    *(Point("int6", 6.6, 2e-3), Point("k8v4", 6.6, 5e-3), Point("int4", 4.6, 2e-2), Point("int4@16", 4.8, 2e-2)),
    *(Point("k5v3", 4.55, 3e-2), Point("int3", 3.6, 0.2), Point("int2", 2.6, 3.1), Point("f32", 32.0, 0.0)),
)


def plot(*points: Point, noise: float = 3e-12, max_kld: float = 0.01) -> ParetoPlot:
    front = frozenset(one.name for one in points[::2])
    return ParetoPlot("a <model>", "some tokens", points, front, points[0].name if points else None, noise, max_kld)


def labels(picture: Picture) -> list[Words]:
    return [shape for shape in picture.shapes if isinstance(shape, Words) and not shape.upright]


def test_every_format_has_its_name_and_nothing_covers_it() -> None:
    picture = pareto_picture(plot(*POINTS))
    words = labels(picture)
    assert {one.name for one in POINTS} <= {one.text for one in words}
    assert [(a.text, b.text) for a, b in combinations(words, 2) if _overlap(_box(a), _box(b))] == []
    dots = [shape for shape in picture.shapes if isinstance(shape, Dot)]
    assert [
        (word.text, dot.words)
        for word in words
        for dot in dots
        if _overlap(_box(word), (dot.x - 5, dot.y - 5, dot.x + 5, dot.y + 5))
    ] == []


@settings(deadline=None)
@given(
    points=st.lists(
        st.builds(Point, st.just("int8"), st.floats(0.1, 40), st.just(0.0) | st.floats(1e-14, 30)), max_size=9
    ),
    noise=st.just(0.0) | st.floats(1e-16, 1),
    max_kld=st.just(0.0) | st.floats(1e-9, 10),
)
def test_whatever_was_measured_lies_inside_the_picture(points: list[Point], noise: float, max_kld: float) -> None:
    for shape in pareto_picture(plot(*points, noise=noise, max_kld=max_kld)).shapes:
        places = shape.points if isinstance(shape, Line) else ((shape.x, shape.y),)
        assert all(0 <= x <= WIDTH and 0 <= y <= HEIGHT for x, y in places)


def test_less_divergence_is_lower_and_fewer_bits_are_left() -> None:
    dots = {
        shape.words.split(":")[0]: shape for shape in pareto_picture(plot(*POINTS)).shapes if isinstance(shape, Dot)
    }
    for one, other in combinations(POINTS, 2):
        assert (one.bits < other.bits) == (dots[one.name].x < dots[other.name].x)
        assert (one.kld > other.kld) == (dots[one.name].y < dots[other.name].y)


def test_limit_and_noise_floor_are_drawn_and_named() -> None:
    words = [one.text for one in labels(pareto_picture(plot(*POINTS)))]
    assert "limit 0.01" in words
    assert "noise floor 3e-12, below this axis" in words
    assert "noise floor 0.0001" in [one.text for one in labels(pareto_picture(plot(*POINTS, noise=1e-4)))]


def test_the_page_needs_no_network_and_what_it_is_told_cannot_break_it() -> None:
    page = pareto_page(plot(*POINTS), ["format", "bits"], [["<b>int8", "8.5"]], ["a & b"])
    assert "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "<script" not in page
    for escaped in ("a &lt;model&gt;", "&lt;b&gt;int8", "a &amp; b"):
        assert escaped in page
    Xml.fromstring(svg_text(pareto_picture(plot(*POINTS))))


def test_a_png_is_drawn_at_its_scale() -> None:
    pytest.importorskip("PIL")
    data = png_bytes(pareto_picture(plot(*POINTS)))
    assert data.startswith(b"\x89PNG\r\n")
    assert struct.unpack(">II", data[16:24]) == (WIDTH * PNG_SCALE, HEIGHT * PNG_SCALE)


def test_without_pillow_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    monkeypatch.setitem(__import__("sys").modules, "PIL.ImageDraw", None)
    with pytest.raises(OptionError, match=r"kvfolio\[plot\]"):
        check_png()
