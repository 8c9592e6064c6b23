"""Seconds of stages on machines whose speed changes, and when they have settled."""

from __future__ import annotations

from dataclasses import replace

import pytest

from raypipe.ir.communication import StageSample
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.controller import Choice, Controller, ControllerConfig, MemoryBudget, Verdict
from raypipe.planner.controller.change_detection import (
    MEASURED_STEPS,
    SETTLED_STEPS,
    DriftState,
    StageEstimator,
)
from tests.planner.controller.lab import Pipeline, constant


def whole(stage: int, step: int, seconds: float, parts: tuple[float, float] | None = None) -> StageSample:
    """F takes half of what B does; the parts are over B."""
    told = (None, None) if parts is None else (parts[0] * seconds, parts[1] * seconds)
    return StageSample(stage, step, seconds / 2, seconds, 0.01, None, *told)


def test_when_one_stage_changes_all_begin_anew() -> None:
    observed = StageEstimator(2)
    for step in range(8):
        observed.add([whole(0, step, 1.2), whole(1, step, 1.0)])
    words = [observed.add([whole(0, step, 1.0), whole(1, step, 0.6)]) for step in (8, 9)]
    assert words[-1] is DriftState.CHANGED
    assert observed.seconds()[1] == (1.0, 0.6), "a sixth less is no change by itself"


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


def told(pace: StageEstimator, seconds: list[tuple[float, float]], every: int = 1) -> list[tuple[float, ...] | None]:
    """What it says after each step of two stages; of those that are not ``every``-th it hears nothing."""
    found = list[tuple[float, ...] | None]()
    for step, of_step in enumerate(seconds):
        if step % every == 0:
            pace.add([StageSample(stage, step, s / 3, 2 * s / 3) for stage, s in enumerate(of_step)])
            found.append(pace.settled_s)
    return found


def test_a_new_pace_counts_once_it_has_lasted_and_the_old_one_is_forgotten() -> None:
    found = told(StageEstimator(2, 0.25), [(0.3, 0.3)] * 10 + [(0.3, 0.6)] * 10)
    assert found[: SETTLED_STEPS - 1] == [None] * (SETTLED_STEPS - 1)
    assert found[SETTLED_STEPS - 1] == pytest.approx((0.3, 0.3))
    assert found[11 : 11 + SETTLED_STEPS] == [None] * SETTLED_STEPS  # from the second slow step on
    assert found[11 + SETTLED_STEPS] == pytest.approx((0.3, 0.6))


def test_one_slow_step_is_no_new_pace() -> None:
    found = told(StageEstimator(2, 0.25), [(0.3, 0.3)] * 8 + [(0.3, 0.9)] + [(0.3, 0.3)] * 4)
    assert found[8:] == [pytest.approx((0.3, 0.3))] * 5


def test_stages_that_never_settle_say_nothing() -> None:
    seconds = [(0.3, 0.3), (0.3, 0.3), (0.3, 0.9), (0.3, 0.9)] * 6
    assert told(StageEstimator(2, 0.25), seconds) == [None] * len(seconds)


def test_steps_that_nobody_measured_pass_too() -> None:
    found = told(StageEstimator(2, 0.25), [(0.3, 0.3)] * 20 + [(0.3, 0.6)] * 20, every=2)
    # Steps 20 and 22 show the change; six more have passed with step 28, and four of them were measured with step 30.
    assert [answer is None for answer in found[10:16]] == [False, True, True, True, True, False]
    assert found[15] == pytest.approx((0.3, 0.6))
    far = told(StageEstimator(2, 0.25), [(0.3, 0.3)] * 100, every=SETTLED_STEPS)
    assert [answer is None for answer in far] == [True] * (MEASURED_STEPS - 1) + [False] * (17 - MEASURED_STEPS + 1)


def test_a_run_that_goes_back_settles_anew() -> None:
    pace = StageEstimator(1, 0.25)
    steps = [*range(10), *range(SETTLED_STEPS)]
    found = list[bool]()
    for step in steps:
        pace.add([StageSample(0, step, 0.1, 0.2)])
        found.append(pace.settled_s is not None)
    assert found == [step >= SETTLED_STEPS - 1 for step in range(10)] + [False] * (SETTLED_STEPS - 1) + [True]
