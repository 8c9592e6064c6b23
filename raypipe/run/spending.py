"""Cost of a run so far: the hours for which it held workers, times a price per worker-hour.

    cost.json   {"cost": in the currency of the price, "worker_hours": number,
                 "at": time of writing in seconds since 1970, "workers": number of workers at that time}

Recoveries, waiting, checkpoints and spare workers cost as much as training. The run's folder keeps the cost of earlier
submissions. Time without a driver costs nothing, unless the next driver adopts stages that held their resources
meanwhile.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

from raypipe.engine.io.run_files import RunFolder
from raypipe.engine.io.storage import Place
from raypipe.errors import CheckpointError, LeaseError

COST_FILE = "cost.json"
KEEP_EVERY_S = 30.0


class Spent(NamedTuple):
    """Cost of a run, in the currency of the price, and the worker-hours for which it was paid."""

    cost: float = 0.0
    worker_hours: float = 0.0


class Meter:
    """Meter of a run's cost, continued from cost.json in its folder.

    Args:
        price: price of a worker-hour.
        workers: returns the number of workers that the run holds, spares included.
        held: True if this driver takes over workers of a lost one; the time since the last cost.json is then added.
        guard: returns a context for each write to the folder, such as ``Lease.completing``, which raises if another
            process has taken the run over.
        clock: returns seconds since 1970.
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
            row = json.loads(place.read_bytes(COST_FILE)) if place.exists(COST_FILE) else {}
            self._spent = Spent(float(row.get("cost", 0.0)), float(row.get("worker_hours", 0.0)))
            before = int(row.get("workers", 0)), float(row.get("at", self._last_s))
        except (CheckpointError, ValueError, TypeError, AttributeError):
            pass  # an unreadable file starts the count anew
        if held:
            self._add(before[0], self._last_s - before[1])
        self._kept_s = self._last_s
        self._count = workers()

    @property
    def per_hour(self) -> float:
        """Cost per hour of the workers that the run held at the last ``read``."""
        return self._price * self._count

    def read(self) -> Spent:
        """Add the cost since the last call and return the total.

        The total is written to cost.json at most every KEEP_EVERY_S seconds.
        """
        now_s, count = self._clock(), self._workers()
        # Workers that came or left meanwhile count for half of the time.
        self._add((self._count + count) / 2, now_s - self._last_s)
        self._last_s, self._count = now_s, count
        if now_s - self._kept_s >= KEEP_EVERY_S:
            self._keep()
        return self._spent

    def close(self) -> None:
        """Write the total to cost.json and events.jsonl, at the end of the run or of its driver."""
        spent = self.read()
        self._keep()
        reason = f"{spent.worker_hours:.3g} hours of workers at {self._price:g} each, earlier submissions included"
        numbers = {"cost": round(spent.cost, 6), "worker_hours": round(spent.worker_hours, 6)}
        # A full disk or a lost lease is reported by the components that need the folder.
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
