"""Ledger: what a stage was ordered lately and what came of it, for a driver that takes the stage over.

    ordered  ... 7 8 9 10 11      7 and 8 are in metrics.parquet, as order 11 says: 8 stays, to measure 9 by its end
    done     ... 7 8 9

A driver has some orders under way, and some records that it has not written yet. Both are here, so that neither is lost
with it.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from raypipe.ir.report import StepReport
from raypipe.ir.work_order import Order
from raypipe.runtime.run.takeover import Entry

__all__ = ["Ledger"]


@dataclass(slots=True)
class _Run:
    """Orders of one ``Fleet.run``: how many came, how many were carried out."""

    number: int = -1
    ordered: int = 0
    done: int = 0


class Ledger:
    """Orders in their order, with their reports; those drop out whose records the driver has written."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: deque[Entry] = deque()
        self._run = _Run()

    @property
    def run(self) -> int:
        """Number of the newest run that anything was ordered of; -1 before."""
        return self._run.number

    def ordered(self, run: int, order: Order) -> None:
        """One more order."""
        with self._lock:
            if run != self._run.number:
                # What a halt kept an older run from carrying out never is: the new run orders it again.
                self._entries = deque(entry for entry in self._entries if entry.reports is not None)
                self._run = _Run(run)
            known = self._entries
            while len(known) > 1 and _written(known[0], order.written) and _written(known[1], order.written):
                known.popleft()
            self._entries.append(Entry(run, self._run.ordered, order))
            self._run.ordered += 1

    def done(self, run: int, reports: Sequence[Sequence[StepReport]]) -> None:
        """The next order of this run has been carried out.

        Args:
            reports: by stage of this worker, and step.
        """
        with self._lock:
            place = self._run.done - self._run.ordered  # from the end
            if run == self._run.number and place < 0:
                self._entries[place] = self._entries[place]._replace(reports=tuple(map(tuple, reports)))
                self._run.done += 1

    def entries(self) -> tuple[Entry, ...]:
        """Oldest first."""
        with self._lock:
            return tuple(self._entries)

    def clear(self) -> None:
        """The stage's state comes from elsewhere now, so that these orders say nothing of it."""
        with self._lock:
            self._entries.clear()


def _written(entry: Entry, steps: int) -> bool:
    """Whether its records lie in the run's folder, where those of the first ``steps`` steps do."""
    segment = entry.order.segment
    return entry.reports is not None and (
        not entry.order.training or segment.first_step + segment.num_minibatches <= steps
    )
