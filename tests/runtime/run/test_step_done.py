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


def test_replicas_are_told_apart_and_messages_have_the_micro_batches_of_the_step() -> None:
    """Stages 2-1 with 3 lanes and 5 micro-batches: lanes 0 and 2 are worker 0's, lane 1 is worker 1's."""
    spec = ScheduleSpec("1f1b", 5, replicas=(2, 1), lanes=3)

    def report(stage: int, worker: int, count: int, *, forward: bool) -> StepReport:
        times = MessageTimes(0, forward)
        for message in range(count):
            times.add(8, 8, float(message), message + 0.5)
        sample = StageSample(stage, 7, 0.1 * (1 + worker), 0.2)
        return StepReport(
            stage, 7, 4, 0.5, None, 0.0, 1.0, 0.5, 0.1, (0, 0), 1, sample=sample, messages=(times,), worker=worker
        )

    reports = [report(0, 0, 3, forward=False), report(0, 1, 2, forward=False), report(1, 2, 5, forward=True)]
    event = step_done(2.0, ActiveSettings(Choice(spec)), reports, counts=True)
    assert [(s.stage, s.replica, s.forward_s) for s in event.stages] == [(0, 0, 0.1), (0, 1, 0.2), (1, 0, 0.1 * 3)]
    back = [m.microbatch for m in event.messages if not m.forward]
    assert back == [0, 2, 3, 1, 4]
    assert [m.microbatch for m in event.messages if m.forward] == [0, 1, 2, 3, 4]
