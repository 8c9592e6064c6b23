"""A bounded wait. Loads neither torch nor Ray."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["wait_until"]


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Return when ``condition`` holds; AssertionError when it does not in time."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "condition not reached"
        time.sleep(0.05)
