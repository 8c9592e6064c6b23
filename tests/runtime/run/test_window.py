"""A window keeps the end of a list, and its items keep their places."""

from __future__ import annotations

import pytest

from raypipe.runtime.run.window import Window

pytestmark = pytest.mark.core


def test_the_newest_items_stay_at_their_places() -> None:
    window = Window[str](3)
    assert (window.first, window.end, window.since(0)) == (0, 0, [])
    window.extend(list("ab"))
    for letter in "cde":
        window.append(letter)
    assert (window.first, window.end) == (2, 5)
    assert window.since(0) == list("cde")
    assert window.since(3) == list("de")
    assert window.since(5) == window.since(9) == []
    assert [window[place] for place in range(2, 5)] == list("cde")
    for place in (-1, 1, 5):
        with pytest.raises(IndexError, match="not in 2"):
            window[place]


def test_more_items_than_it_keeps_come_at_once() -> None:
    window = Window[int](3)
    window.extend(list(range(10)))
    assert (window.first, window.end, window.since(0)) == (7, 10, [7, 8, 9])


def test_without_a_bound_items_stay_until_they_are_taken() -> None:
    window = Window[int]()
    window.extend(list(range(10_000)))
    assert window.take(9_997) == 9_997
    assert (window.first, window.end, window.since(0)) == (9_998, 10_000, [9_998, 9_999])
    with pytest.raises(IndexError, match="5 is not in 9998"):
        window.take(5)
    assert [window.take(9_998), window.take(9_999)] == [9_998, 9_999]
    assert (window.first, window.end) == (10_000, 10_000)
