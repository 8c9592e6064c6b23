"""Seconds of one part after the other, for events."""

from __future__ import annotations

import time

__all__ = ["Laps"]


class Laps:
    """See the module."""

    def __init__(self) -> None:
        self._then_s = time.monotonic()
        self.laps_s: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """A part is over."""
        now_s = time.monotonic()
        self.laps_s[name] = now_s - self._then_s
        self._then_s = now_s
