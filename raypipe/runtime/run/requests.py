"""What people ask of a running loop from outside its thread: begin, stop, or save a checkpoint."""

from __future__ import annotations

import threading
from typing import Protocol

__all__ = ["Requests"]


class _Haltable(Protocol):
    def halt(self) -> None: ...


class Requests:
    """Shared by the thread that runs the loop and those that answer people.

    Attributes:
        stop_reason: why the run shall end after the segment that is running; empty while nobody asked.
    """

    def __init__(self) -> None:
        self.stop_reason = ""
        self._fleet: _Haltable | None = None
        self._lock = threading.Lock()
        self._checkpoint = threading.Event()
        self._go_on = threading.Event()

    def serve(self, fleet: _Haltable) -> None:
        """From now on ``stop`` halts this fleet, at once if it was asked for already."""
        with self._lock:
            self._fleet = fleet
            stopping = bool(self.stop_reason)
        if stopping:
            fleet.halt()

    def checked(self) -> None:
        """The model has been checked: the loop may begin."""
        self._go_on.set()

    def wait_checked(self, timeout_s: float) -> bool:
        """Wait for that word; whether the loop may begin, be it only to stop."""
        return self._go_on.wait(timeout_s) or bool(self.stop_reason)

    def stop(self, reason: str) -> None:
        """End the run after the segment that is running, with a checkpoint. The first reason is the one told."""
        with self._lock:
            self.stop_reason = self.stop_reason or reason or "asked to stop"
            fleet = self._fleet
        if fleet is not None:
            fleet.halt()

    def checkpoint(self) -> None:
        """Save a checkpoint after one of the next segments."""
        self._checkpoint.set()

    @property
    def wants_checkpoint(self) -> bool:
        """Whether somebody asked for a checkpoint that has not been taken."""
        return self._checkpoint.is_set()

    def take_checkpoint(self) -> bool:
        """Whether somebody asked for a checkpoint since the last call."""
        asked = self._checkpoint.is_set()
        self._checkpoint.clear()
        return asked
