"""OrderGate: where a stage's orders wait, and where all stages can be made to end after the same one.

    submitted   0  1  2  3
    stage 0     [==0==][==1==][=2
    stage 1           [==0==][==1==        halt: stage 0 says 3 have begun, stage 1 says 2
                                           finish_after(3): stage 1 still carries out 2, nobody begins 3

Stages run ahead of each other, and a segment that one of them has begun needs all. So stopping takes two
messages: the first keeps every stage from beginning anything and asks how many it has begun, the second
tells the largest answer. In between a stage finishes what it is doing.
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque

from raypipe.ir.work_order import Order

__all__ = ["OrderGate"]


class OrderGate:
    """Orders of numbered runs; one thread takes them, others put them and close the gate."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._queues: defaultdict[int, deque[Order | None]] = defaultdict(deque)
        self._begun: defaultdict[int, int] = defaultdict(int)
        self._halted: set[int] = set()
        self._limits: dict[int, int] = {}

    def put(self, run: int, order: Order | None) -> None:
        """Queue an order; None ends the run after those before."""
        with self._changed:
            self._queues[run].append(order)
            self._changed.notify_all()

    def next(self, run: int) -> Order | None:
        """Wait for the next order and begin it; None at the end of the run."""
        with self._changed:
            self._changed.wait_for(lambda: self._may_go(run))
            ended = self._begun[run] >= self._limits.get(run, self._begun[run] + 1)
            order = None if ended else self._queues[run].popleft()
            if order is None:
                self._queues.pop(run, None)
            else:
                self._begun[run] += 1
            return order

    def halt(self, run: int) -> int:
        """Let nothing more begin until ``finish_after``; how many orders have begun."""
        with self._changed:
            self._halted.add(run)
            return self._begun[run]

    def finish_after(self, run: int, count: int) -> None:
        """End the run after ``count`` orders."""
        with self._changed:
            self._limits[run] = count
            self._halted.discard(run)
            self._changed.notify_all()

    def abort(self, run: int) -> None:
        """Begin nothing more of the run, whatever has begun elsewhere: it has failed."""
        with self._changed:
            self._limits[run] = self._begun[run]
            self._halted.discard(run)
            self._changed.notify_all()

    def limit(self, run: int) -> int | None:
        """Orders after which the run was told to end; None where it was not."""
        with self._changed:
            return self._limits.get(run)

    def _may_go(self, run: int) -> bool:
        if run in self._limits and self._begun[run] >= self._limits[run]:
            return True
        return run not in self._halted and bool(self._queues[run])
