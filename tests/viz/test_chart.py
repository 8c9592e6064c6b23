"""Charts: every point has its place, long ones keep what stands out, axes count in units that fit."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from raypipe.viz.chart import BESIDE_PX, HEIGHT, MEDIANS, MOST_LONG, TOP, WIDTH, Annotation, Line, chart_svg
from raypipe.viz.svg import in_unit, ticks


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
    *parts, medians = re.findall(r'polyline points="([^"]*)"', drawn)
    whole = [(float(x), float(y)) for line in parts for x, y in (pair.split(",") for pair in line.split())]
    assert len(whole) <= 2 * 720
    assert [x for x, _ in whole] == sorted(x for x, _ in whole)
    assert min(y for _, y in whole) < TOP + 15, "the highest value is at the top"
    assert drawn.count("<title>not finite</title>") == 1
    heights = [float(pair.split(",")[1]) for pair in medians.split()]
    assert len(heights) == MEDIANS
    assert min(heights) > TOP + 100, "one step of hundreds does not move the line of medians"
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
    drawn = chart_svg(
        [Line("loss", [(0.0, 1.0), (9.0, 2.0)])], "loss", "step", "loss", marks=[Annotation(4.0, "a<b", "bad")]
    )
    assert "<title>a&lt;b</title>" in drawn
    ElementTree.fromstring(drawn)


def test_marks_at_the_same_place_stand_side_by_side() -> None:
    """A failure and the recovery from it belong to one step, and one would hide the other."""
    marks = [Annotation(4.0, "failure", "bad"), Annotation(4.0, "recovery", "good"), Annotation(6.0, "switch", "note")]
    drawn = chart_svg([Line("loss", [(0.0, 1.0), (9.0, 2.0)])], "loss", "step", "loss", marks=marks)
    found = [float(line.get("x1", "")) for line in ElementTree.fromstring(drawn).iter() if line.get("y2")]
    assert found[1] == found[0] + BESIDE_PX
    assert found[2] > found[1] + 10


@pytest.mark.parametrize("points", [[], [(3.0, math.nan)], [(3.0, 7.0)], [(1.0, 2.0), (2.0, 2.0)]])
def test_few_points_have_a_chart(points: list[tuple[float, float]]) -> None:
    texts = _texts(chart_svg([Line("loss", points)], "loss", "step", "loss"))
    assert ("nothing yet" in texts) == (not any(math.isfinite(y) for _, y in points))


@pytest.mark.parametrize("lines", [2, 8, 30])
def test_a_legend_that_does_not_fit_beside_the_label_is_below(lines: int) -> None:
    drawn = chart_svg([Line(f"stage {at}", [(0.0, at), (1.0, at)]) for at in range(lines)], "Memory", "step", "bytes")
    picture = ElementTree.fromstring(drawn)
    named = [found for found in picture.iter() if (found.text or "").startswith("stage ")]
    assert len(named) == lines
    for found in named:
        assert 0 < float(found.get("x", "")) < WIDTH - 7 * len(found.text or "")
        assert float(found.get("y", "")) < float(picture.get("height", "")) - 4
        assert (float(found.get("y", "")) > HEIGHT) == (lines > 2)


def test_a_few_peaks_are_cut_and_told() -> None:
    points = [(float(x), 4.0 if x % 50 == 7 else 0.1) for x in range(200)]
    cut = _texts(chart_svg([Line("measured", points, cut_peaks=True)], "Time", "step", "time", "s"))
    assert "time (ms); 4 higher, up to 4,000" in cut
    assert "150" in cut
    assert "time (s)" in _texts(chart_svg([Line("measured", points)], "Time", "step", "time", "s"))
    even = [(float(x), 0.1) for x in range(200)]
    assert "time (ms)" in _texts(chart_svg([Line("measured", even, cut_peaks=True)], "Time", "step", "time", "s"))


@pytest.mark.parametrize("count", [MOST_LONG, MOST_LONG + 1])
def test_many_marks_leave_the_lines_to_be_seen(count: int) -> None:
    marks = [Annotation(float(at), "failure", "bad") for at in range(count)]
    drawn = ElementTree.fromstring(chart_svg([Line("loss", [(0.0, 1.0), (20.0, 2.0)])], "l", "x", "y", marks=marks))
    lengths = [
        float(element.get("y2", "")) - float(element.get("y1", "")) for element in drawn.iter() if element.get("y2")
    ]
    assert len(lengths) == count
    assert (max(lengths) < 12) == (count > MOST_LONG)
    highest = min(y for _, y in _placed(ElementTree.tostring(drawn, "unicode").replace("ns0:", "")))
    lowest = max(float(element.get("y2", "")) for element in drawn.iter() if element.get("y2"))
    assert count <= MOST_LONG or lowest < highest, "they stand above the lines"


def test_a_few_failures_are_seen_among_many_other_marks() -> None:
    marks = [Annotation(4.0, "failure", "bad"), *(Annotation(float(at), "replan", "good") for at in range(MOST_LONG))]
    drawn = ElementTree.fromstring(chart_svg([Line("loss", [(0.0, 1.0), (20.0, 2.0)])], "l", "x", "y", marks=marks))
    long = [found for found in drawn.iter() if found.get("y2") and float(found.get("y2", "")) > HEIGHT / 2]
    assert [found.get("class") for found in long] == ["rp-bad"]


def test_numbers_stand_on_axes_that_count_something() -> None:
    texts = _texts(chart_svg([Line("loss", [])], "loss", "step", "loss", marks=[Annotation(4.0, "failed", "bad")]))
    assert sorted(texts) == ["loss", "loss", "nothing yet", "step"]
    fine = _texts(chart_svg([Line("held", [(0.0, 1.0), (0.5, 2.0), (1.4, 1.0)], True)], "Memory", "time (ms)", "bytes"))
    assert {"0.2", "0.4", "1.2"} <= set(fine), "an axis of fractions has more than its whole numbers"
    assert "10,000" in _texts(chart_svg([Line("loss", [(1.0, 1.0), (1e4, 2.0)])], "loss", "step", "loss"))


def test_a_long_title_keeps_its_begin_and_its_end() -> None:
    title = _texts(chart_svg([Line("loss", [(0.0, 1.0)])], f"eval_{'x' * 200}_accuracy", "step", "share"))[0]
    assert title.startswith("eval_x")
    assert title.endswith("_accuracy")
    assert 12 + 9 * len(title) < WIDTH


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
