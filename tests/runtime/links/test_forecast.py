"""What both ends of a link expect of its next message."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.runtime.links.forecast import Forecast


def guesses(sizes: Sequence[int]) -> list[int]:
    forecast, found = Forecast(), []
    for size in sizes:
        found.append(forecast.next_bytes)
        forecast.saw(size)
    return found


def test_the_picture() -> None:
    assert guesses([8, 8, 8, 8, 1] * 2 + [8]) == [0, 8, 8, 8, 8, 1, 8, 8, 8, 1, 8]


@pytest.mark.parametrize("step", [[5], [5, 5, 5], [5, 5, 1], [9, 9, 9, 5, 1], [3, 2, 1]])
def test_a_step_that_comes_again_is_known_after_its_second_time(step: list[int]) -> None:
    assert guesses(step * 5)[2 * len(step) :] == step * 3


@given(st.lists(st.integers(0, 3), max_size=60))
def test_a_guess_is_a_size_that_was_seen(sizes: list[int]) -> None:
    for i, guess in enumerate(guesses(sizes)):
        assert guess in {0, *sizes[:i]}


def test_neither_one_size_for_ever_nor_ever_new_ones_take_memory_for_ever() -> None:
    forecast = Forecast()
    for size in [7] * 10_000 + list(range(10_000)):
        forecast.saw(size)
        assert len(forecast._after) <= 4096
