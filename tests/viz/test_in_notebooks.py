"""What a notebook shows of plans, schedules and timelines."""

from __future__ import annotations

import dataclasses
from xml.etree import ElementTree

import pytest

from raypipe.ir.schedule_spec import KINDS
from raypipe.planner.schedule import schedule_of
from raypipe.planner.search import decide, plan_of, timeline_of
from tests.planner.search.test_choose import REQUEST, chain
from tests.planner.specs import spec_for


@pytest.mark.parametrize("kind", list(KINDS))
def test_every_schedule_has_a_picture(kind: str) -> None:
    schedule = schedule_of(spec_for(kind, 4, 8, group_size=2, chunks=2), 4)
    words = [element.text for element in ElementTree.fromstring(schedule._repr_html_()).iter() if element.text]
    assert any(text.startswith(f"schedule {kind}") for text in words)
    assert "worker 1" in words


def test_a_plan_shows_its_words_its_schedule_and_its_stages() -> None:
    plan = plan_of(decide(dataclasses.replace(REQUEST, num_stages=2, minibatch_size=32, num_microbatches=8), chain(8)))
    shown = plan._repr_html_()
    assert "stages:  2" in shown
    assert shown.count("<svg") == 2
    assert "memory at its fullest" in shown
    assert dataclasses.replace(plan, prediction=None)._repr_html_().count("<svg") == 1
    assert "predicted" in timeline_of(plan)._repr_html_()
