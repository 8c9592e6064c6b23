"""Schedules by list scheduling: every free worker takes the best action that is ready, in simulated time.

A candidate that the planner does not have yet: unlike slack or ZB-H1 it knows the memory of each stage, the seconds of
each link, and how long a gap is before it fills it with a weight gradient.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from jobs.bench.optimum.exact import Case
from raypipe.ir.schedule import Action, Op

__all__ = ["listed"]

NEVER = 1 << 60
SHARES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5)


def listed(case: Case, *, split: bool) -> Iterator[tuple[tuple[Action, ...], ...]]:
    """Yield a schedule, as actions by worker, for each pair of arguments of ``_Listing.rows``."""
    back = Op.I if split else Op.B
    for first, share in product((Op.F, back), SHARES):
        yield _Listing(case, split).rows(first, share)


class _Listing:
    """State of a simulated pipeline while its rows are written.

    Attributes:
        done: by operation and stage, micro-batches begun.
        arrival: by operation and stage, times of the messages that have been sent.
        free: by stage, time at which its worker has nothing to do.
    """

    def __init__(self, case: Case, split: bool) -> None:
        whole = tuple(map(int, case.costs.backward_s))
        self._case, self._back = case, Op.I if split else Op.B
        self._release = Op.W if split else Op.B
        self._length = {Op.F: case.forward, Op.I: case.backward_input, Op.W: case.backward_weight, Op.B: whole}
        stages = len(case.forward)
        self.done = {op: [0] * stages for op in self._length}
        self.arrival: dict[Op, list[list[int]]] = {op: [[] for _ in range(stages)] for op in (Op.F, self._back)}
        self.arrival[Op.F][0] = [0] * case.microbatches
        self.free = [0] * stages
        self._link: dict[tuple[Op, int], int] = {}
        self._rows: list[list[Action]] = [[] for _ in range(stages)]

    def rows(self, first: Op, share: float) -> tuple[tuple[Action, ...], ...]:
        """Write all rows.

        Args:
            first: F or the backward, whichever a worker prefers if it can choose.
            share: with split backwards, fraction of a weight gradient's time for which nothing else may be ready
                before a worker fills the gap with it. With whole backwards, fraction of a forward's time for which a
                worker waits for the preferred action.
        """
        count = self._case.microbatches
        while min(self.done[self._release]) < count:
            at, stage, op = min(filter(None, (self._next(stage, first, share) for stage in range(len(self.free)))))
            self._take(at, stage, op)
        return tuple(map(tuple, self._rows))

    def _next(self, stage: int, first: Op, share: float) -> tuple[int, int, Op] | None:
        """Choose the next action of a stage and the time at which it starts; None if nothing can start yet."""
        now, forwards, backs = self.free[stage], self.done[Op.F][stage], self.done[self._back][stage]
        ready: dict[Op, int] = {}
        held = forwards - self.done[self._release][stage]
        if held < self._case.limit[stage] and forwards < len(self.arrival[Op.F][stage]):
            ready[Op.F] = max(now, self.arrival[Op.F][stage][forwards])
        if backs < min(forwards, len(self.arrival[self._back][stage])):
            ready[self._back] = max(now, self.arrival[self._back][stage][backs])
        soonest = min(ready.values(), default=NEVER)
        if self._release is Op.W:
            pending = self.done[Op.W][stage] < backs
            if pending and soonest > now and soonest - now >= share * self._length[Op.W][stage]:
                return now, stage, Op.W
            wait = 0
        else:
            wait = round(share * self._length[Op.F][stage])
        choices = sorted((op is not first, at, op) for op, at in ready.items() if at <= soonest + wait)
        return (choices[0][1], stage, choices[0][2]) if choices else None

    def _take(self, at: int, stage: int, op: Op) -> None:
        """Append an action, and send its message."""
        self._rows[stage].append(Action(stage, op, self.done[op][stage]))
        self.done[op][stage] += 1
        self.free[stage] = end = at + self._length[op][stage]
        hop, receiver = (stage, stage + 1) if op is Op.F else (stage - 1, stage - 1)
        if op is Op.F and receiver == len(self.free):
            self.arrival[self._back][stage].append(end)
        elif op in self.arrival and receiver >= 0:
            self._link[op, hop] = left = max(end, self._link.get((op, hop), 0)) + self._case.occupancy[hop]
            self.arrival[op][receiver].append(left + self._case.latency[hop])
