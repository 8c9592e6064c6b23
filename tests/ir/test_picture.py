"""The picture of timelines: every span is in it, in its place, and labels fit their boxes."""

from __future__ import annotations

import math
import re
from xml.etree import ElementTree

import pytest

from raypipe.ir.picture import curve_svg, timeline_svg
from raypipe.ir.schedule import parse_action
from raypipe.ir.timeline import Span, Timeline

SVG = "{http://www.w3.org/2000/svg}"


def _timeline(source: str, offset_s: float, first: int) -> Timeline:
    names = [(0, f"0F{first}", 0.0, 1.0), (1, f"1RECV_F{first}", 0.0, 1.0), (1, f"1F{first}", 1.0, 3.0)]
    spans = [Span(w, parse_action(a), s + offset_s, e + offset_s) for w, a, s, e in names]
    return Timeline(tuple(spans), source, name="<model & co>")


def test_two_timelines_share_one_scale_and_start_at_zero() -> None:
    picture = ElementTree.fromstring(timeline_svg([_timeline("simulated", 0.0, 0), _timeline("measured", 50.0, 16)]))
    boxes = {}
    for box in picture.iter(f"{SVG}rect"):
        title = box.find(f"{SVG}title")
        if title is not None:
            boxes[(title.text or "").split()[0]] = (float(box.get("x", "")), float(box.get("width", "")))
    assert boxes["0F0"] == boxes["0F16"]
    assert boxes["1F0"] == boxes["1F16"]
    assert boxes["1F0"][1] == pytest.approx(2 * boxes["0F0"][1], abs=0.02)
    assert boxes["1RECV_F0"][0] == boxes["0F0"][0]


def test_measured_micro_batches_are_labelled_from_zero_and_names_are_escaped() -> None:
    text = timeline_svg([_timeline("measured", 7.0, 16)])
    assert re.search(r">F0</text>", text)
    assert "&lt;model &amp; co&gt;" in text


def test_an_empty_timeline_has_a_picture() -> None:
    ElementTree.fromstring(timeline_svg([Timeline((), "measured")]))


def test_a_long_curve_is_drawn_with_its_extremes() -> None:
    """A million points would be a picture of 20 MB; a single step that stands out among them is still seen."""
    points = [(float(x), 1.0) for x in range(100_000)]
    points[77_777] = (77_777.0, 9.0)
    points[33_333] = (33_333.0, math.nan)
    drawn = curve_svg(points, "loss", "step", "loss")
    line = re.search(r'<polyline points="([^"]*)"', drawn)
    assert line
    placed = [tuple(map(float, pair.split(","))) for pair in line[1].split()]
    assert len(placed) <= 2 * 640
    assert [x for x, _ in placed] == sorted(x for x, _ in placed)
    assert min(y for _, y in placed) == 48.0, "the highest value is at the top"
    few = re.search(r'<polyline points="([^"]*)"', curve_svg(points[:900], "loss", "step", "loss"))
    assert few
    assert len(few[1].split()) == 900, "what fits is drawn as it is"
