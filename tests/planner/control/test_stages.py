"""What is known of stages on machines whose speed changes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raypipe.ir.links import StageSample
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.control import Choice, Controller, ControllerConfig, MemoryBudget, Verdict
from raypipe.planner.control.drift import News
from raypipe.planner.control.stages import StageEstimator
from tests.planner.control.lab import Pipeline, constant


def whole(stage: int, step: int, seconds: float, parts: tuple[float, float] | None = None) -> StageSample:
    """F takes half of what B does; the parts are over B."""
    told = (None, None) if parts is None else (parts[0] * seconds, parts[1] * seconds)
    return StageSample(stage, step, seconds / 2, seconds, 0.01, None, *told)


def test_when_one_stage_changes_all_begin_anew() -> None:
    observed = StageEstimator(2)
    for step in range(8):
        observed.add([whole(0, step, 1.2), whole(1, step, 1.0)])
    words = [observed.add([whole(0, step, 1.0), whole(1, step, 0.6)]) for step in (8, 9)]
    assert words[-1] is News.CHANGED
    assert observed.seconds()[1] == (1.0, 0.6), "a sixth less is no change by itself"


def test_one_odd_backward_does_not_say_what_halves_take() -> None:
    observed = StageEstimator(1)
    for step in range(4):
        observed.add([whole(0, step, 1.0, (0.6, 0.45))])
    for step in range(4, 16):  # the others have left the window
        observed.add([whole(0, step, 1.0)])
    observed.add([whole(0, 16, 1.5, (0.85, 0.61))])
    assert observed.split_backward_s() == ((pytest.approx(0.6), pytest.approx(0.45)),)


def test_halves_count_as_soon_as_they_run() -> None:
    """Half of the window ran whole backwards in a slow minute, and half ran split ones in a quick one."""
    observed = StageEstimator(1, drift_threshold=10.0)
    for step in range(3):
        observed.add([whole(0, step, 2.0, (0.6, 0.4))])
    for step in range(3, 8):
        observed.add([StageSample(0, step, 0.5, 0.0, 0.01, None, 0.6, 0.4)])
    assert observed.split_backward_s() == ((0.6, 0.4),)
    assert observed.seconds()[1] == (1.0,)


def test_a_model_that_is_wrong_about_the_present_asks_for_nothing() -> None:
    """Steps take half of what is said of them, and less than what is said of anything else."""
    setup = ControllerConfig("auto", Choice(ScheduleSpec("1f1b", 8)), (MemoryBudget(),) * 2)
    pipeline = Pipeline([(0.01, 0.02)] * 2, constant(0.025))
    controller, found = Controller(setup), list[Verdict]()
    for step in range(50):
        done = pipeline.step(step, setup.choice)
        found += [d.verdict for d in controller.handle(replace(done, seconds=done.seconds / 2))]
    assert set(found) == {Verdict.KEEP}
    controller = Controller(setup)
    assert any(
        d.verdict is Verdict.SWITCH for step in range(5) for d in controller.handle(pipeline.step(step, setup.choice))
    ), "it would, where they take what is said"
