"""Seconds of operations add up to the whole, and those of another process are not counted."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.engine.profiling.rounds import Moment, Round, seconds_between, seconds_of

SECONDS = st.floats(1e-6, 10.0)


@st.composite
def rounds(draw: st.DrawFn) -> list[Round]:
    count, most = draw(st.integers(1, 5)), draw(st.integers(1, 6))

    def some() -> list[float]:
        return draw(st.lists(SECONDS, min_size=count, max_size=count))

    return [Round((draw(SECONDS), draw(SECONDS)), some(), some(), some()) for _ in range(most)]


@given(rounds())
def test_operations_add_up_to_the_whole(found: list[Round]) -> None:
    seconds = seconds_of(found)
    assert sum(seconds.forward) == pytest.approx(seconds.whole[0])
    assert sum(seconds.backward) + sum(seconds.sums) == pytest.approx(seconds.whole[1])
    assert sum(seconds.by_operation()) == pytest.approx(sum(seconds.whole))
    assert min(r.whole[0] for r in found) <= seconds.whole[0] <= max(r.whole[0] for r in found)


def test_a_model_without_a_backward_takes_none() -> None:
    seconds = seconds_of([Round((2.0, 1e-5), [1.0, 3.0], [0.0, 0.0], [0.0, 0.0])])
    assert seconds.forward == [0.5, 1.5]
    assert seconds.backward == seconds.sums == [0.0, 0.0]


@given(st.floats(0, 10), st.floats(0, 10), st.integers(0, 3), st.integers(0, 3))
def test_time_taken_by_others_is_not_ours(wall_s: float, cpu_s: float, before: int, more: int) -> None:
    begin, end = Moment(5.0, 1.0, before), Moment(5.0 + wall_s, 1.0 + cpu_s, before + more)
    found = seconds_between(begin, end)
    assert found <= wall_s + 1e-9
    if more:  # it waited for something, and whoever waits is not taken from the processor
        assert found == pytest.approx(wall_s)
    else:
        assert found == pytest.approx(min(wall_s, cpu_s))


def test_a_sleep_counts_and_so_does_work() -> None:
    begin = Moment.now()
    time.sleep(0.02)
    assert seconds_between(begin, Moment.now()) >= 0.02
    begin = Moment.now()
    while time.thread_time() - begin.cpu_s < 0.01:
        pass
    assert seconds_between(begin, Moment.now()) >= 0.01
