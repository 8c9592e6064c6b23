"""Spare workers of a run: processes that have torch and the optimizer imported, started while the run trains."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from raypipe.engine.rundir import RunFolder
from raypipe.errors import RaypipeError
from raypipe.runtime.run.planned import Asked
from raypipe.runtime.run.spec import RunSpec
from raypipe.runtime.workers.fleet import Fleet
from raypipe.runtime.workers.places import AWAY, PLACE_TIMEOUT_S

__all__ = ["Spares", "spares_of"]

POLL_S, SLOW_POLL_S = 0.25, 2.0
AGAIN_S = 10.0
"""Between two tries to start a worker of a run with replicas, after one that failed."""


class Spares:
    """Keeps as many members as were offered, those that no plan uses among them.

    Args:
        count: of all members.
        offered: of these, where no more are needed.
        event: (decision, reason) notes that one is ready, or could not be started, which ends nothing.
        join: is called when there is one that a run with replicas can take in, which waits for its place as long as it
            takes; None for a run that never has replicas.
    """

    def __init__(
        self,
        fleet: Fleet,
        count: int,
        event: Callable[[str, str], None],
        join: Callable[[], None] | None = None,
        offered: int = 0,
    ) -> None:
        self._fleet, self.count, self._event, self._join = fleet, count, event, join
        self._offered = offered
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def wants(self, asked: Asked) -> None:
        """From now on the run is to have as many workers as somebody asked for, where those that are lost come back."""
        if self._join is not None and self.count:
            self.count = max(self._offered, asked.workers)

    def refill(self) -> None:
        """Start those that are missing, in the background; one that is there already may be taken in at once."""
        if self._join is not None and self._fleet.spares:
            self._join()
        with self._lock:
            busy = self._thread is not None and self._thread.is_alive()
            if busy or self._fleet.places.living >= self.count:
                return
            self._thread = threading.Thread(target=self._refill, name="raypipe spares", daemon=True)
            self._thread.start()

    def _refill(self) -> None:
        places, told = self._fleet.places, ""
        while not places.closed:
            try:
                if self._started():
                    self._fleet.rehearse_spares()
                    self._event(
                        "spare", f"{self.count} workers are there; spares have torch and the optimizer imported"
                    )
                    if self._join is not None:
                        self._join()
                return
            except (RaypipeError, *AWAY) as error:
                what = f"A spare worker could not be started: {error}"
                if what != told and not places.closed:
                    self._event("warning", what)
                if self._join is None:
                    return
                told = what
                time.sleep(AGAIN_S)

    def _started(self) -> bool:
        """Whether there are as many as wanted; False where no place was found, or the fleet has ended."""
        places, late_s, told = self._fleet.places, time.monotonic() + PLACE_TIMEOUT_S, False
        while places.living < self.count and not places.closed:
            places.ask_for(self.count)  # again and again: others may be lost meanwhile
            if places.start_granted():
                continue
            if time.monotonic() > late_s and not told:
                told, waits = True, " The run goes on without, and waits for it." if self._join else ""
                self._event("warning", f"A worker found no place within {PLACE_TIMEOUT_S:g} s.{waits}")
                if self._join is None:
                    places.ask_for(places.living)
                    return False
            time.sleep(SLOW_POLL_S if told else POLL_S)
        return not places.closed


def spares_of(fleet: Fleet, spec: RunSpec, wanted: int, join: Callable[[], None]) -> Spares:
    """Of one run.

    Args:
        wanted: workers that a run in lanes is to have; 0 of any other.
        join: see Spares.
    """
    offered = spec.num_workers or 0
    count = max(offered, wanted) if spec.max_failures else 0
    return Spares(fleet, count, RunFolder(spec.place).event, join if wanted else None, offered)
