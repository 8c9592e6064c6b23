"""What a trace of spot machines leaves of a run's steps: raypipe's elasticity against restarting from checkpoints.

    machines    ----+    +------+         joins and removals, from the trace
                    |____|      |___
    elastic     ====!====~======!===      ! recover: pause, a few steps done again; ~ grow: pause
    restart     ====X   ====X   =X  =     X start again: pause, all steps since the checkpoint done again

Goodput is the steps that were done and kept over those that the same machines would have done without any cost of a
change. Every machine has one worker, and a step on n of them takes ``step_s(n)``.

What is lost with several machines at once is told by their names: workers stand in the order of their machines, and
each holds a copy of the one before. Where a worker and its holder go together, the newest checkpoint counts.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple

__all__ = [
    "Change", "Costs", "Lived", "changes_of", "elastic", "restarting", "step_seconds", "steps_of",
    "undisturbed_steps", "young_interval_s",
]  # fmt: skip

TRACE = Path(__file__).resolve().parents[1] / "data" / "spot_g4dn.csv"


class Change(NamedTuple):
    """Machines that come or go at one time, by name."""

    at_s: float
    come: tuple[str, ...]
    go: tuple[str, ...]


class Costs(NamedTuple):
    """Seconds that things take, and what goes with them; see jobs/bench/spot for where each number is from.

    Attributes:
        recover_s: after a loss without a notice, until the first new step begins.
        redone_steps: steps done again after such a loss.
        resize_s: a change of the plan between two steps, to grow or to leave machines in time.
        join_s: until a machine that came has a worker that may be used.
        restart_s: a whole run that starts again from its checkpoint.
        checkpoint_s: for which steps stand still to save one.
        checkpoint_every_s: between two of them.
        overhead: share of the time that copies of state take.
        least: machines that the model needs.
        noticed: machines that go are told of before, in time for what has to be done.
    """

    recover_s: float
    redone_steps: float
    resize_s: float
    join_s: float
    restart_s: float
    checkpoint_s: float
    checkpoint_every_s: float
    overhead: float = 0.0
    least: int = 1
    noticed: bool = False


class Lived(NamedTuple):
    """What became of a run.

    Attributes:
        steps: done and kept.
        paused_s: in which nothing was computed though there were machines enough.
        redone: steps that were done again.
        changes: of the plan.
    """

    steps: float
    paused_s: float
    redone: float
    changes: int


def changes_of(path: Path = TRACE, *, speed: float = 1.0, machines_each: int = 1) -> list[Change]:
    """A trace, earliest first.

    Args:
        speed: so many times quicker than it was.
        machines_each: of the trace make one machine here; as many are here as can be made of those that are there, and
            the newest goes first.
    """
    events: dict[float, list[tuple[str, str]]] = {}
    with path.open(newline="") as file:
        for milliseconds, what, name in csv.reader(file):
            events.setdefault(int(milliseconds) / 1e3 / speed, []).append((what, name))
    if machines_each == 1:
        return [
            Change(at_s, *(tuple(name for what, name in found if what == wanted) for wanted in ("add", "remove")))
            for at_s, found in sorted(events.items())
        ]
    count, number, here, result = 0, 0, list[str](), []
    for at_s, found in sorted(events.items()):
        count += sum(1 if what == "add" else -1 for what, _ in found)
        have = count // machines_each
        come = tuple(f"machine{number + i}" for i in range(max(0, have - len(here))))
        number += len(come)
        go = tuple(here[have:])
        here = [*here[:have], *come]
        if come or go:
            result.append(Change(at_s, come, go))
    return result


def undisturbed_steps(changes: Sequence[Change], step_s: Callable[[int], float], least: int = 1) -> float:
    """Steps that the machines of a trace would do if changes cost nothing."""
    return sum(seconds / step_s(len(here)) for _, seconds, here in _stretches(changes) if len(here) >= least)


def _stretches(changes: Sequence[Change]) -> Iterable[tuple[float, float, list[str]]]:
    """(begin, seconds, machines that are there) between every two changes."""
    here: list[str] = []
    for now, following in itertools.pairwise(changes):
        here = [name for name in here if name not in now.go] + list(now.come)
        yield now.at_s, following.at_s - now.at_s, list(here)


class _Run:
    """A run's clock and its steps."""

    def __init__(self, costs: Costs, step_s: Callable[[int], float]) -> None:
        self.costs, self.step_s = costs, step_s
        self.now_s = self.busy_until_s = 0.0
        self.used: list[str] = []
        self.steps = self.saved = self.redone = self.paused_s = 0.0
        self.saved_at_s = 0.0
        self.changes = 0

    def until(self, at_s: float) -> None:
        """Train on, and save when that is due."""
        while self.now_s < at_s:
            due_s = self.saved_at_s + self.costs.checkpoint_every_s
            stop_s = min(at_s, due_s) if due_s > self.now_s else at_s
            begin_s = min(max(self.now_s, self.busy_until_s), stop_s)
            if len(self.used) >= self.costs.least:
                self.paused_s += begin_s - self.now_s
                self.steps += (stop_s - begin_s) * (1 - self.costs.overhead) / self.step_s(len(self.used))
            self.now_s = stop_s
            if stop_s == due_s:
                self.saved_at_s = stop_s
                if begin_s < stop_s and len(self.used) >= self.costs.least:
                    self.saved = self.steps
                    self.pause(self.costs.checkpoint_s)

    def pause(self, seconds: float) -> None:
        """What is under way already goes on meanwhile, or begins anew."""
        self.busy_until_s = max(self.busy_until_s, self.now_s + seconds)

    def back_to(self, steps: float) -> None:
        self.redone += self.steps - steps
        self.steps = steps

    def take(self, machines: Sequence[str], seconds: float) -> None:
        self.used = list(machines)
        self.changes += 1
        self.pause(seconds)

    def lived(self) -> Lived:
        return Lived(self.steps, self.paused_s, self.redone, self.changes)


def _moments(changes: Sequence[Change], join_s: float) -> list[tuple[float, str, Change]]:
    """When machines go, and when those that came can be used."""
    found = [(change.at_s, "go", change) for change in changes if change.go]
    found += [(change.at_s + join_s, "join", change) for change in changes if change.come]
    return sorted(found, key=lambda moment: moment[0])


def elastic(changes: Sequence[Change], costs: Costs, step_s: Callable[[int], float]) -> Lived:
    """A run that goes on with what is left, and grows between two steps."""
    run, ready = _Run(costs, step_s), list[str]()
    gone: set[str] = set()
    end_s = changes[-1].at_s
    for at_s, what, change in _moments(changes, costs.join_s):
        if at_s >= end_s:
            break
        run.until(at_s)
        if what == "join":
            ready += [name for name in change.come if name not in gone]
            if ready != run.used:
                run.take(ready, costs.resize_s)
            continue
        gone.update(change.go)
        lost = [name for name in run.used if name in change.go]
        ready = [name for name in ready if name not in change.go]
        if not lost:
            continue
        if costs.noticed:
            run.take(ready, costs.resize_s)
            continue
        together = any(run.used[at - 1] in change.go and name in change.go for at, name in enumerate(run.used))
        run.back_to(min(run.steps, run.saved) if together else max(run.saved, run.steps - costs.redone_steps))
        run.take(ready, costs.recover_s)
    run.until(end_s)
    return run.lived()


def restarting(changes: Sequence[Change], costs: Costs, step_s: Callable[[int], float]) -> Lived:
    """A run whose whole group starts again from the newest checkpoint; to grow, right after it has saved one."""
    run, ready = _Run(costs, step_s), list[str]()
    gone: set[str] = set()
    end_s = changes[-1].at_s
    for at_s, what, change in _moments(changes, costs.join_s):
        if at_s >= end_s:
            break
        run.until(at_s)
        if what == "join":
            ready += [name for name in change.come if name not in gone]
            if ready != run.used:
                run.saved, run.saved_at_s = run.steps, at_s  # it saves before it starts again with more
                run.take(ready, costs.checkpoint_s + costs.restart_s)
            continue
        gone.update(change.go)
        lost = [name for name in run.used if name in change.go]
        ready = [name for name in ready if name not in change.go]
        if not lost:
            continue
        if costs.noticed:
            run.saved, run.saved_at_s = run.steps, at_s
        run.back_to(run.saved)
        run.take(ready, costs.restart_s + (costs.checkpoint_s if costs.noticed else 0.0))
    run.until(end_s)
    return run.lived()


def young_interval_s(checkpoint_s: float, changes: Sequence[Change]) -> float:
    """Between two checkpoints, for as many losses as the trace has: sqrt(2 cost MTBF) (Young, CACM 17(9), 1974)."""
    losses = sum(1 for change in changes if change.go)
    return math.sqrt(2 * checkpoint_s * changes[-1].at_s / max(1, losses))


def step_seconds(seconds: Mapping[int, float], seen: Sequence[tuple[int, int]]) -> dict[int, float]:
    """Median step by number of stages, of the steps between two looks at which a run had as many.

    Args:
        seconds: by step.
        seen: (steps done, stages) at moments of the run; no stages where it did not train.
    """
    found: dict[int, list[float]] = {}
    for (begin, count), (end, then) in itertools.pairwise(seen):
        if count == then:
            found.setdefault(count, []).extend(seconds[step] for step in range(begin + 1, end) if step in seconds)
    return {count: median(steps) for count, steps in sorted(found.items()) if count and steps}


def steps_of(
    changes: Sequence[Change],
    until_s: float,
    of_stages: Mapping[int, float],
    microbatches: int,
    stages: tuple[int, int],
) -> float:
    """Steps that the machines of a trace would do until then, if changes cost nothing and one stage were on each.

    Args:
        of_stages: seconds of a step by number of stages; where one is missing, those of the nearest, as long as a
            pipeline of so many equal stages would take.
        stages: least and most that the run has.
    """

    def step_s(machines: int) -> float:
        count = min(machines, stages[1])
        near = min(of_stages, key=lambda known: (abs(known - count), known))
        return of_stages[near] * (microbatches + count - 1) / count * near / (microbatches + near - 1)

    cut = [change for change in changes if change.at_s < until_s]
    return undisturbed_steps([*cut, Change(until_s, (), ())], step_s, stages[0])
