"""When the seconds of all stages have settled."""

from __future__ import annotations

import pytest

from raypipe.ir.links import StageSample
from raypipe.planner.control.pace import MEASURED_STEPS, SETTLED_STEPS, Pace


def told(pace: Pace, seconds: list[tuple[float, float]], every: int = 1) -> list[tuple[float, ...] | None]:
    """What it says after each step of two stages; of those that are not ``every``-th it hears nothing."""
    return [
        pace.add([StageSample(stage, step, s / 3, 2 * s / 3) for stage, s in enumerate(of_step)])
        for step, of_step in enumerate(seconds)
        if step % every == 0
    ]


def test_a_new_pace_counts_once_it_has_lasted_and_the_old_one_is_forgotten() -> None:
    found = told(Pace(2, 0.25), [(0.3, 0.3)] * 10 + [(0.3, 0.6)] * 10)
    assert found[: SETTLED_STEPS - 1] == [None] * (SETTLED_STEPS - 1)
    assert found[SETTLED_STEPS - 1] == pytest.approx((0.3, 0.3))
    assert found[11 : 11 + SETTLED_STEPS] == [None] * SETTLED_STEPS  # from the second slow step on
    assert found[11 + SETTLED_STEPS] == pytest.approx((0.3, 0.6))


def test_one_slow_step_is_no_new_pace() -> None:
    found = told(Pace(2, 0.25), [(0.3, 0.3)] * 8 + [(0.3, 0.9)] + [(0.3, 0.3)] * 4)
    assert found[8:] == [pytest.approx((0.3, 0.3))] * 5


def test_stages_that_never_settle_say_nothing() -> None:
    seconds = [(0.3, 0.3), (0.3, 0.3), (0.3, 0.9), (0.3, 0.9)] * 6
    assert told(Pace(2, 0.25), seconds) == [None] * len(seconds)


def test_steps_that_nobody_measured_pass_too() -> None:
    found = told(Pace(2, 0.25), [(0.3, 0.3)] * 20 + [(0.3, 0.6)] * 20, every=2)
    # Steps 20 and 22 show the change; six more have passed with step 28, and four of them were measured with step 30.
    assert [answer is None for answer in found[10:16]] == [False, True, True, True, True, False]
    assert found[15] == pytest.approx((0.3, 0.6))
    far = told(Pace(2, 0.25), [(0.3, 0.3)] * 100, every=SETTLED_STEPS)
    assert [answer is None for answer in far] == [True] * (MEASURED_STEPS - 1) + [False] * (17 - MEASURED_STEPS + 1)


def test_a_run_that_goes_back_settles_anew() -> None:
    pace = Pace(1, 0.25)
    steps = [*range(10), *range(SETTLED_STEPS)]
    found = [pace.add([StageSample(0, step, 0.1, 0.2)]) is not None for step in steps]
    assert found == [step >= SETTLED_STEPS - 1 for step in range(10)] + [False] * (SETTLED_STEPS - 1) + [True]
