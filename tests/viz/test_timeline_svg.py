"""Picture of timelines and of schedules in slots: every span has its place, and labels fit their boxes."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from raypipe.ir.schedule import dependencies, parse_action
from raypipe.ir.schedule_spec import KINDS
from raypipe.ir.timeline import Span, Timeline
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower
from raypipe.planner.simulator import Costs, makespan_s
from raypipe.viz.timeline_svg import in_slots, timeline_svg
from tests.planner.specs import spec_for

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


def test_a_legend_that_is_too_long_for_one_row_has_two() -> None:
    """Split backwards, with messages: everything that there is to explain."""
    names = ["0F0", "0SEND_F0", "0RECV_B0", "0I0", "0W0", "0REDUCE_GRAD0", "0STEP0"]
    spans = [Span(0, parse_action(name), float(i), i + 1.0) for i, name in enumerate(names)]
    spans += [Span(1, parse_action(name), i + 2.0, i + 3.0) for i, name in enumerate(("1RECV_F0", "1F0", "1I0"))]
    picture = ElementTree.fromstring(timeline_svg([Timeline(tuple(spans), "measured")], width=1000))
    shown = ("message, pale until it is taken", "optimizer step", "I backward, gradients of inputs")
    words = [text for text in picture.iter(f"{SVG}text") if text.text in shown]
    ends = [float(text.get("x", "")) + 7.3 * len(text.text or "") for text in words]
    lows = {float(text.get("y", "")) for text in picture.iter(f"{SVG}text")}
    assert len(words) == 3
    assert max(ends) < 1000
    assert max(lows) < float(picture.get("height", "")) - 10


def test_a_long_name_leaves_the_numbers_to_be_read() -> None:
    spans = (Span(0, parse_action("0F0"), 0.0, 1.0),)
    picture = ElementTree.fromstring(timeline_svg([Timeline(spans, "measured", name="run-of-" + "x" * 300)]))
    title = next(text.text or "" for text in picture.iter(f"{SVG}text"))
    assert title.startswith("measured run-of-xx")
    assert title.endswith(": 1 s, workers idle 0.0% of it")
    assert 12 + 9.5 * len(title) < float(picture.get("width", ""))


def test_edges_leave_thin_boxes_their_colour() -> None:
    edges = []
    for count in (4, 4000):
        spans = tuple(Span(0, parse_action(f"0F{at}"), float(at), at + 1.0) for at in range(count))
        picture = ElementTree.fromstring(timeline_svg([Timeline(spans, "measured")]))
        plot = next(group for group in picture.iter(f"{SVG}g") if group.get("class") == "rp-plot")
        edges.append(float(plot.get("stroke-width", "")))
    assert edges[0] == 0.8
    assert edges[1] < 0.1


def test_the_legend_explains_what_takes_time() -> None:
    spans = (Span(0, parse_action("0F0"), 0.0, 1.0), Span(0, parse_action("0REDUCE_NORM0"), 1.0, 1.0))
    assert "sum and norm" not in timeline_svg([Timeline(spans, "simulated")])


def test_an_empty_timeline_has_a_picture() -> None:
    ElementTree.fromstring(timeline_svg([Timeline((), "measured")]))


def test_axis_legend_and_links_are_there() -> None:
    spans = [
        (0, "0F0", 0.0, 1.0), (0, "0SEND_F0", 1.0, 1.5), (1, "1RECV_F0", 0.0, 2.0), (1, "1F0", 2.0, 3.0),
        (1, "1B0", 3.0, 5.0), (1, "1SEND_B0", 5.0, 5.5), (0, "0RECV_B0", 1.5, 6.0), (0, "0B0", 6.0, 8.0),
    ]  # fmt: skip
    timeline = Timeline(tuple(Span(w, parse_action(a), s, e) for w, a, s, e in spans), "measured", name="lm")
    picture = ElementTree.fromstring(timeline_svg([timeline]))
    texts = [element.text for element in picture.iter(f"{SVG}text")]
    assert {"worker 0", "worker 1", "link 0→1", "link 1→0", "F0", "B0", "time (s)", "0", "8"} <= set(texts)
    assert {"F forward", "B backward", "waits for a message", "message, pale until it is taken"} <= set(texts)
    assert "measured lm: 8 s, workers idle 62.5% of it" in texts
    boxes = [box for box in picture.iter(f"{SVG}rect") if "0SEND_F0" in (box.findtext(f"{SVG}title") or "")]
    tail, sent = sorted((float(box.get("width", "")) for box in boxes), reverse=True)
    assert tail == pytest.approx(2 * sent, abs=0.02), "a message is on its way until it is taken"


def test_boxes_name_their_stage_where_a_worker_holds_several() -> None:
    spans = tuple(Span(0, parse_action(name), i, i + 1.0) for i, name in enumerate(("0F0", "1F0", "1B0", "0B0")))
    drawn = timeline_svg([Timeline(spans, "simulated")])
    assert ">1F0</text>" in drawn
    assert "predicted" in drawn


@pytest.mark.parametrize(("boxes", "lines"), [(20, ["1F0"]), (45, ["1F0"]), (55, ["1", "F0"]), (300, [])])
def test_words_of_a_box_take_two_lines_before_they_are_left_out(boxes: int, lines: list[str]) -> None:
    names = [f"{at % 2}F{at // 2 % 10}" for at in range(boxes)]
    spans = tuple(Span(0, parse_action(f"{name}"), float(at), at + 1.0) for at, name in enumerate(names))
    picture = ElementTree.fromstring(timeline_svg([Timeline(spans, "simulated")]))
    found = [text for text in picture.iter(f"{SVG}text") if text.get("class") == "rp-on-full"]
    assert [text.text for text in found[len(lines) : 2 * len(lines)]] == lines
    assert len(found) == len(lines) * boxes


def test_of_very_many_spans_the_first_are_drawn_and_it_says_so() -> None:
    spans = tuple(Span(0, parse_action(f"0F{i}"), float(i), i + 1.0) for i in range(20_100))
    drawn = timeline_svg([Timeline(spans, "measured")])
    assert drawn.count("<title>") == 20_000
    assert "; messages are not drawn, and only the first 5.556 h" in drawn


def test_of_many_spans_those_of_workers_are_drawn_to_the_end() -> None:
    names = ("0F", "0SEND_F", "1RECV_F", "1F")
    spans = tuple(Span(int(n[0]), parse_action(f"{n}{i}"), float(i), i + 1.0) for i in range(6000) for n in names)
    drawn = timeline_svg([Timeline(spans, "measured")])
    assert drawn.count("<title>") == 12_000
    assert "messages are not drawn" in drawn
    assert "only the first" not in drawn
    assert "link 0" not in drawn


@pytest.mark.parametrize("kind", [kind for kind, of in KINDS.items() if of.synchronous])
def test_slots_are_the_times_of_the_simulator(kind: str) -> None:
    """A forward takes one slot, a backward two, lowered or not."""
    made = schedule_of(spec_for(kind, 4, 8, group_size=2, chunks=2), 4)
    taken = [in_slots(one.rows(), lambda action: dependencies(action, made.wiring)) for one in (made, lower(made))]
    assert [found.makespan_s for found in taken] == [makespan_s(lower(made), Costs.uniform(4, 1.0, 2.0))] * 2
