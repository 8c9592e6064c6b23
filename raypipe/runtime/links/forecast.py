"""Forecast: the size of the next payload on one direction of a link, reckoned alike by both of its ends.

A pipeline repeats itself: some messages of one size, then the few bytes of a norm, then again. So the guess is what
came last time after as many messages of this size; before there was a last time, the same size again.

    came       8 8 8 8 1   8 8 8 8 1   8
    guessed    0 8 8 8 8   1 8 8 8 1   8        three misses, and then none
"""

from __future__ import annotations

__all__ = ["Forecast"]

_RUN_LIMIT = 1024  # longer runs of one size are one state, so that a run without an end needs no memory
_STATES_LIMIT = 4096


class Forecast:
    """Of the sizes, in bytes, that one end sent and the other received. ``next_bytes`` is 0 at first."""

    def __init__(self) -> None:
        self.next_bytes = 0
        self._state = (0, 0)  # size, and how many of it in a row
        self._after: dict[tuple[int, int], int] = {}

    def saw(self, size_bytes: int) -> None:
        """One more payload went or came."""
        if len(self._after) >= _STATES_LIMIT:
            self._after.clear()
        self._after[self._state] = size_bytes
        last_bytes, run = self._state
        self._state = (size_bytes, min(run + 1, _RUN_LIMIT) if size_bytes == last_bytes else 1)
        self.next_bytes = self._after.get(self._state, size_bytes)
