"""The pictures: what a generator draws is the golden file, and the golden file is in its docstring."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

import raypipe.planner.schedule as manual
from raypipe.ir.schedule_spec import KINDS, ScheduleSpec
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower
from raypipe.planner.schedule.sync import gpipe, interleaved, k_f_k_b, one_f_one_b, slack
from raypipe.planner.schedule.text import draw
from raypipe.planner.schedule.zero_bubble import zb_v
from raypipe.planner.simulator import Costs, simulate

GOLDEN = Path(__file__).parents[1] / "golden"

PICTURES = {
    "1f1b_S4_M8": (one_f_one_b, one_f_one_b(4, 8)),
    "gpipe_S4_M4": (gpipe, gpipe(4, 4)),
    "kfkb_S2_M4_k2": (k_f_k_b, k_f_k_b(2, 4, 2)),
    "slack_S4_M8_r2": (slack, slack(4, 8, 2)),
    "interleaved_S2_M4_v2": (interleaved, interleaved(2, 4, 2)),
    "zb-v_S4_M4": (zb_v, zb_v(4, 4)),
}


@pytest.mark.parametrize("name", PICTURES)
def test_drawing_is_the_golden_file_and_the_docstring_shows_it(name):
    generator, schedule = PICTURES[name]
    golden = (GOLDEN / f"{name}.txt").read_text()
    assert draw(schedule) == draw(lower(schedule)) == golden
    assert golden in _dedented(generator)


def test_manual_page_shows_1f1b():
    assert (GOLDEN / "1f1b_S4_M8.txt").read_text() in _dedented(manual)


def test_every_kind_is_explained_in_the_manual_page():
    for kind in KINDS:
        assert any(line.startswith(f"{kind} ") for line in inspect.getdoc(manual).splitlines()), kind


def test_timeline_is_drawn_to_scale():
    timeline = simulate(lower(one_f_one_b(2, 2)), Costs.uniform(2, forward_s=0.5, backward_s=1.0, latency_s=0.5))
    assert draw(timeline).splitlines() == [
        "0: F0 F1  .  .  .  . B0  -  . B1  -",
        "1:  .  . F0 B0  - F1 B1  -  .  .  .",
    ]


def test_drawing_repeats_the_body():
    assert draw(one_f_one_b(1, 2), repeats=2) == "0: F0 B0 F1 B1 F2 B2 F3 B3\n"


def test_more_than_ten_workers_are_aligned():
    lines = draw(schedule_of(ScheduleSpec("1f1b", 1), 11)).splitlines()
    assert lines[0].startswith(" 0: F0")
    assert len({len(line) for line in lines}) == 1


def _dedented(documented: object) -> str:
    return "\n".join(line.removeprefix("    ") for line in inspect.getdoc(documented).splitlines()) + "\n"
