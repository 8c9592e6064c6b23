"""When the seconds of all stages have settled."""

from __future__ import annotations

import pytest

from raypipe.ir.links import StageSample
from raypipe.planner.control.pace import SETTLED_STEPS, Pace


def told(pace: Pace, seconds: list[tuple[float, float]]) -> list[tuple[float, ...] | None]:
    """What it says after each step of two stages."""
    return [
        pace.add([StageSample(stage, step, s / 3, 2 * s / 3) for stage, s in enumerate(of_step)])
        for step, of_step in enumerate(seconds)
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
