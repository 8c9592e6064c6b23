"""Spares of a run: actors without stages, with torch and the optimizer imported, that can replace lost workers."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from raypipe.errors import RaypipeError
from raypipe.run.spec import RequestedSize, RunSpec
from raypipe.runtime.fleet.fleet import Fleet
from raypipe.runtime.worker.places import AWAY, PLACE_TIMEOUT_S

POLL_S, SLOW_POLL_S = 0.25, 2.0
AGAIN_S = 10.0
"""Seconds between two attempts to start spares in a run with replicas, after a failed attempt."""


class Spares:
    """Spares of one run: starts new ones in a thread, so that the number of workers and spares together stays the same.

    Args:
        count: number of workers and spares to keep; 0 for a run without spares.
        event: called with (decision, reason) when a spare is ready, or could not be started.
        join: called when a spare is ready, to request that spares become replicas. Then the wait for placement groups
            has no timeout. None for a run without replicas.
        offered: smallest value of ``count`` after a resize.
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

    def resized(self, size: RequestedSize) -> None:
        """Adapt ``count`` to a resized run's number of workers; do nothing in a run without replicas or spares."""
        if self._join is not None and self.count:
            self.count = max(self._offered, size.workers)

    def refill(self) -> None:
        """Start missing spares in a thread, unless it is running already; call ``join`` at once if a spare is ready."""
        if self._join is not None and self._fleet.spares:
            self._join()
        with self._lock:
            busy = self._thread is not None and self._thread.is_alive()
            if busy or self._fleet.places.living >= self.count:
                return
            self._thread = threading.Thread(target=self._refill, name="raypipe spares", daemon=True)
            self._thread.start()

    def _refill(self) -> None:
        places, reported = self._fleet.places, ""
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
                if what != reported and not places.closed:
                    self._event("warning", what)
                if self._join is None:
                    return
                reported = what
                time.sleep(AGAIN_S)

    def _started(self) -> bool:
        """Start missing spares as their placement groups are created, but not while the run recovers from a failure.

        Returns:
            False if a placement group was not created in time in a run without replicas, or if the fleet has ended.
        """
        places, late_s, reported = self._fleet.places, time.monotonic() + PLACE_TIMEOUT_S, False
        while places.living < self.count and not places.closed:
            if self._fleet.recovering:
                time.sleep(POLL_S)
                late_s = time.monotonic() + PLACE_TIMEOUT_S
                continue
            places.ask_for(self.count)  # in every round: more may be lost meanwhile
            if places.start_granted():
                continue
            if time.monotonic() > late_s and not reported:
                reported, waits = True, " The run goes on without, and waits for it." if self._join else ""
                self._event("warning", f"A worker found no place within {PLACE_TIMEOUT_S:g} s.{waits}")
                if self._join is None:
                    places.ask_for(places.living)
                    return False
            time.sleep(SLOW_POLL_S if reported else POLL_S)
        return not places.closed


def spares_of(
    fleet: Fleet, spec: RunSpec, wanted: int, join: Callable[[], None], event: Callable[[str, str], None]
) -> Spares:
    """Create the Spares of a run; their ``count`` is 0 if the run does not survive failures (max_failures=0).

    Args:
        wanted: number of workers with all replicas of all stages; 0 for a run without replicas.
        join, event: see Spares.
    """
    offered = spec.num_workers or 0
    count = max(offered, wanted) if spec.max_failures else 0
    return Spares(fleet, count, event, join if wanted else None, offered)
