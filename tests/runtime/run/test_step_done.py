"""What the controller is told of a step: nothing that was measured while a copy of the state was under way."""

from __future__ import annotations

from array import array
from dataclasses import replace

import pytest

from raypipe.ir.links import MessageTimes, StageSample, stage_sample
from raypipe.ir.report import StepReport
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.control import Choice
from raypipe.runtime.run.controller_thread import ActiveSettings, step_done


@pytest.mark.parametrize("copying", [False, True])
def test_a_step_beside_a_copy_is_no_measurement(copying: bool) -> None:
    """Also of the stage that copied nothing: its messages share the way of the other one's copy."""
    times = MessageTimes(0, True, array("I", [8]), array("I", [8]), array("d", [1.0]), array("d", [1.5]))
    sample = stage_sample(0, 7, (), None)
    assert isinstance(sample, StageSample | None)
    quiet = StepReport(1, 7, 4, 0.5, None, 0.0, 1.0, 0.5, 0.1, (0, 0), 1, sample=sample, messages=(times,))
    reports = [replace(quiet, stage=0, copying=copying), quiet]
    event = step_done(2.0, ActiveSettings(Choice(ScheduleSpec("1f1b", 1))), reports, counts=True)
    assert (event.step, event.seconds, event.counts) == (7, 2.0, not copying)
    assert len(event.messages) == (0 if copying else 2)
    assert bool(event.stages) == (not copying and sample is not None)
