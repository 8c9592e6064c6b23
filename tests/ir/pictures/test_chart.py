"""Charts: every point has its place, long ones keep what stands out, axes count in units that fit."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from raypipe.ir.pictures.axis import in_unit, ticks
from raypipe.ir.pictures.chart import TOP, Line, Mark, chart_svg


def _placed(svg: str) -> list[tuple[float, float]]:
    line = re.search(r'<polyline points="([^"]*)"', svg)
    assert line
    return [(float(x), float(y)) for x, y in (pair.split(",") for pair in line[1].split())]


def _texts(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter() if element.tag.endswith("}text")]


def test_a_long_chart_is_drawn_with_its_extremes() -> None:
    """A million points would be a picture of 20 MB; a single step that stands out among them is still seen."""
    points = [(float(x), 1.0) for x in range(100_000)]
    points[77_777] = (77_777.0, 9.0)
    points[33_333] = (33_333.0, math.nan)
    drawn = chart_svg([Line("loss", points)], "loss", "step", "loss")
    whole = [(float(x), float(y)) for line in re.findall(r'polyline points="([^"]*)"', drawn)
             for x, y in (pair.split(",") for pair in line.split())]  # fmt: skip
    assert len(whole) <= 2 * 720
    assert [x for x, _ in whole] == sorted(x for x, _ in whole)
    assert min(y for _, y in whole) < TOP + 15, "the highest value is at the top"
    assert drawn.count("<title>not finite</title>") == 1
    assert len(_placed(chart_svg([Line("loss", points[:900])], "loss", "step", "loss"))) == 900


def test_axes_say_what_they_count_and_in_which_unit() -> None:
    lines = [Line("measured", [(1.0, 0.012), (2.0, 0.030)]), Line("predicted", [(1.0, 0.02), (2.0, 0.02)])]
    texts = _texts(chart_svg(lines, "Time per step", "step", "time", "s"))
    assert {"Time per step", "step", "time (ms)", "measured", "predicted", "0", "20"} <= set(texts)
    assert "share (%)" in _texts(chart_svg([Line("idle", [(0.0, 0.25), (1.0, 0.5)])], "Idle", "step", "share", "%"))


def test_what_stays_is_a_staircase() -> None:
    corners = _placed(chart_svg([Line("k", [(0.0, 1.0), (5.0, 4.0)], stays=True)], "k", "step", "k"))
    assert len(corners) == 3
    assert corners[0][1] == corners[1][1] > corners[2][1]


def test_marks_are_drawn_and_their_words_are_escaped() -> None:
    drawn = chart_svg([Line("loss", [(0.0, 1.0), (9.0, 2.0)])], "loss", "step", "loss", marks=[Mark(4.0, "a<b", "bad")])
    assert "<title>a&lt;b</title>" in drawn
    ElementTree.fromstring(drawn)


@pytest.mark.parametrize("points", [[], [(3.0, math.nan)], [(3.0, 7.0)], [(1.0, 2.0), (2.0, 2.0)]])
def test_few_points_have_a_chart(points: list[tuple[float, float]]) -> None:
    texts = _texts(chart_svg([Line("loss", points)], "loss", "step", "loss"))
    assert ("nothing yet" in texts) == (not any(math.isfinite(y) for _, y in points))


@pytest.mark.parametrize(
    ("low", "high", "whole", "expected"),
    [
        (0.0, 1.0, False, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.0, 3.0, True, [0.0, 1.0, 2.0, 3.0]),
        (7.0, 61.0, False, [10.0, 20.0, 30.0, 40.0, 50.0, 60.0]),
        (-0.02, 0.02, False, [-0.02, -0.01, 0.0, 0.01, 0.02]),
    ],
)
def test_ticks_are_round(low: float, high: float, whole: bool, expected: list[float]) -> None:
    assert ticks(low, high, 6, whole) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("most", "unit", "expected"),
    [(0.012, "s", (1e-3, "ms")), (90.0, "s", (60.0, "min")), (3 << 20, "B", (1 << 20, "MiB")), (5.0, "x", (1.0, "x"))],
)
def test_units_fit(most: float, unit: str, expected: tuple[float, str]) -> None:
    assert in_unit(most, unit) == expected
