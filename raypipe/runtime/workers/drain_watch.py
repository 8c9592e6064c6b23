"""Looks at Ray's list of nodes that are about to go, and has the stages on them moved in time."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from ray.exceptions import RayError

from raypipe.runtime.workers.drains import draining_nodes

__all__ = ["DrainWatch"]

EVERY_S = 1.0


class DrainWatch:
    """A thread of the driver; it ends with ``close``.

    Args:
        nodes: Ray's ids of the nodes that the run has workers on now.
        leave: told once of those of them that are about to go.
        event: (decision, reason, ...) notes it.
    """

    def __init__(
        self, nodes: Callable[[], Collection[str]], leave: Callable[[Collection[str]], None], event: Callable[..., None]
    ) -> None:
        self._nodes, self._leave, self._event = nodes, leave, event
        self._told: set[str] = set()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="raypipe drains", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._ended.set()
        self._thread.join(EVERY_S)

    def _watch(self) -> None:
        while not self._ended.wait(EVERY_S):
            try:
                draining = draining_nodes()
            except (RayError, ConnectionError, RuntimeError):  # the head is not there for a while
                continue
            new = {node for node in draining if node in self._nodes()} - self._told
            if not new:
                continue
            self._told |= new
            deadlines = [s - time.time() for node in new if (s := draining[node]) is not None]
            numbers = {"seconds_left": round(min(deadlines), 1)} if deadlines else {}
            self._event("drain", f"Ray drains {', '.join(sorted(new))}", **numbers)
            self._leave(new)
