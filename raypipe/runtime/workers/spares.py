"""Spare workers of a run: processes that have torch and the optimizer imported, started while the run trains."""

from __future__ import annotations

import threading
from collections.abc import Callable

from ray.exceptions import RayError

from raypipe.errors import RaypipeError
from raypipe.runtime.workers.fleet import Fleet

__all__ = ["Spares"]


class Spares:
    """Keeps as many members as were offered, those that no plan uses among them.

    Args:
        count: of all members.
        event: (decision, reason) notes that one is ready, or could not be started, which ends nothing.
    """

    def __init__(self, fleet: Fleet, count: int, event: Callable[[str, str], None]) -> None:
        self._fleet, self.count, self._event = fleet, count, event

    def refill(self) -> None:
        """Start those that are missing, in the background."""
        if len(self._fleet.roster) < self.count:
            threading.Thread(target=self._refill, name="raypipe spares", daemon=True).start()

    def _refill(self) -> None:
        try:
            self._fleet.grow(self.count)
            self._fleet.rehearse_spares()
            self._event("spare", f"{self.count} workers are there, spares with torch and the optimizer imported")
        except (RaypipeError, RayError) as error:
            self._event("warning", f"A spare worker could not be started: {error}")
