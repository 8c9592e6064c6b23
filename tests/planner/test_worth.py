"""Whether a move pays."""

from __future__ import annotations

from raypipe.planner.worth import MOST_PAUSED, Gain, pays, rest_steps


def test_a_move_must_earn_its_pause_twice_in_the_steps_that_are_left() -> None:
    assert pays(Gain(1.0, 0.875, 100, 6.25), 0.03)  # 12.5 s against 6.25 s
    assert not pays(Gain(1.0, 0.875, 100, 6.26), 0.03)
    assert not pays(Gain(1.0, 0.875, 99, 6.25), 0.03)


def test_a_small_gain_is_none_however_many_steps_are_left() -> None:
    assert not pays(Gain(1.0, 0.98, 1_000_000, 0.0), 0.03)
    assert pays(Gain(1.0, 0.97, 1_000_000, 0.0), 0.03 - 1e-9)


def test_slower_steps_never_pay() -> None:
    assert not pays(Gain(1.0, 1.0, 100, 0.0), 0.0)
    assert not pays(Gain(1.0, 1.1, 100, 0.0), -1.0)
    assert not pays(Gain(0.0, 0.0, 100, 0.0), 0.03)


def test_pauses_stay_a_small_part_of_the_time() -> None:
    pause_s, step_s = 2.0, 0.3
    assert rest_steps(pause_s, step_s) * step_s >= pause_s / MOST_PAUSED
    assert rest_steps(pause_s, 0.0) == 0
