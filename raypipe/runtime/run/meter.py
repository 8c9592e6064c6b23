"""What a run has cost so far: a price for every worker and hour, for as long as it holds workers.

    cost.json   {"cost": in the currency of the price, "worker_hours", "at": seconds since 1970, "workers": then}

Recoveries, waiting, checkpoints and spare workers cost as much as training does, and what earlier submissions of the
run have cost is in its folder. Time in which a run has no driver costs nothing, except where the next driver takes over
stages that went on holding their places meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from raypipe.engine.rundir import RunFolder
from raypipe.engine.storage import Place
from raypipe.errors import CheckpointError, LeaseError

__all__ = ["COST_FILE", "Meter", "Spent"]

COST_FILE = "cost.json"
KEEP_EVERY_S = 30.0


class Spent(NamedTuple):
    """Money, and the hours of workers that it was paid for."""

    cost: float = 0.0
    worker_hours: float = 0.0


class Meter:
    """Counts from now on, from what the run's folder says.

    Args:
        price: of a worker for an hour.
        workers: how many the run holds at the moment, spares included.
        held: the workers were there already, in the hands of an earlier driver.
        guard: around each write to the folder, as ``Lease.completing``: who has lost the run writes nothing.
        clock: seconds since 1970.
    """

    def __init__(
        self,
        place: Place,
        price: float,
        workers: Callable[[], int],
        *,
        held: bool = False,
        guard: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._guard = guard
        self._place, self._price, self._workers, self._clock = place, price, workers, clock
        self._spent, self._last_s, before = Spent(), clock(), (0, clock())
        try:
            found = json.loads(place.read_bytes(COST_FILE)) if place.exists(COST_FILE) else {}
            self._spent = Spent(float(found.get("cost", 0.0)), float(found.get("worker_hours", 0.0)))
            before = int(found.get("workers", 0)), float(found.get("at", self._last_s))
        except (CheckpointError, ValueError, TypeError, AttributeError):
            pass  # what cannot be read is counted anew
        if held:
            self._add(before[0], self._last_s - before[1])
        self._kept_s = self._last_s
        self._count = workers()

    @property
    def per_hour(self) -> float:
        """Of the workers that the run holds."""
        return self._price * self._count

    def read(self) -> Spent:
        """All that was spent until now; keeps it in the run's folder now and then."""
        now_s, count = self._clock(), self._workers()
        # Who has come or gone meanwhile is taken to have been there for half of the time.
        self._add((self._count + count) / 2, now_s - self._last_s)
        self._last_s, self._count = now_s, count
        if now_s - self._kept_s >= KEEP_EVERY_S:
            self._keep()
        return self._spent

    def close(self) -> None:
        """The run is over, or its driver is: keep the sum, and tell it in events.jsonl."""
        spent = self.read()
        self._keep()
        reason = f"{spent.worker_hours:.3g} hours of workers at {self._price:g} each, earlier submissions included"
        numbers = {"cost": round(spent.cost, 6), "worker_hours": round(spent.worker_hours, 6)}
        # A full disk, and a run that is somebody else's by now, are told by those who need the folder.
        with contextlib.suppress(CheckpointError, LeaseError), self._guard():
            RunFolder(self._place).event("cost", reason, **numbers)

    def _add(self, workers: float, seconds: float) -> None:
        hours = workers * max(0.0, seconds) / 3600
        self._spent = Spent(self._spent.cost + hours * self._price, self._spent.worker_hours + hours)

    def _keep(self) -> None:
        self._kept_s = self._last_s
        row = {**self._spent._asdict(), "at": self._last_s, "workers": self._count}
        with contextlib.suppress(CheckpointError, LeaseError), self._guard():
            self._place.write_bytes(COST_FILE, json.dumps(row).encode())
