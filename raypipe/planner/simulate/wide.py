"""The times of a wide program: all workers go on by one step at once, in arrays, instead of one by one.

A row is cut into steps of at most one wait, one piece of work and one send, in this order. In a wave every worker
whose next step need not wait any longer does it; a schedule has about twice as many waves as micro-batches,
whatever the number of workers. The arithmetic is, number by number, that of the loop in
``raypipe.planner.simulate.serial``, so both give the same bits; that loop is quicker for a few workers.

    row      RECV_F F SEND_F | RECV_F F SEND_F | RECV_B B SEND_B | RECV_F F SEND_F | B ...
    step     0                 1                 2                 3                 4
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe.planner.tables import Ints, Program

__all__ = ["SEND", "WAIT", "WORK", "Tables", "last_end_s", "times_s"]

Floats = NDArray[np.float64]
Index = NDArray[np.intp]

WAIT, WORK, SEND = range(3)


class Tables(NamedTuple):
    """What every node does and costs.

    Attributes:
        role: WAIT, WORK or SEND.
        work_s, occupancy_s, latency_s: seconds of work and of the message on the link.
        link: one-way link that a SEND uses.
        num_links: links are numbered below it.
    """

    role: NDArray[np.int8]
    work_s: Floats
    occupancy_s: Floats
    latency_s: Floats
    link: Ints
    num_links: int


@dataclass(frozen=True, slots=True)
class _Steps:
    """Steps of all rows, one behind the other, a sentinel that nobody reaches behind each row, and a last one, done.

    Attributes:
        of: step of every node.
        at: step at which each worker begins.
        source: by step, the step that it waits for; the last one where it waits for nothing.
        barriers: by step that waits for several, those.
        work_s, occupancy_s, latency_s, link: by step.
    """

    of: Index
    at: Index
    source: Index
    barriers: dict[int, Index]
    work_s: Floats
    occupancy_s: Floats
    latency_s: Floats
    link: Index


class _Noted(NamedTuple):
    """By step: when its work began and ended, when its message left, and when that arrived (or the work ended)."""

    begin: Floats
    end: Floats
    leave: Floats
    finish: Floats


def last_end_s(program: Program, tables: Tables) -> float | None:
    """When everything has ended, in seconds; None where the schedule deadlocks."""
    noted = _run(_cut(program, tables), program, tables, spans=False)
    return None if noted is None else max(0.0, float(noted.finish.max()))


def times_s(program: Program, tables: Tables) -> tuple[Floats, Floats] | None:
    """Start and end of every node, in seconds; None where the schedule deadlocks."""
    steps = _cut(program, tables)
    noted = _run(steps, program, tables, spans=True)
    if noted is None:
        return None
    of, role = steps.of, tables.role
    # A wait begins where the step before it in the row stopped working.
    before = np.zeros(len(noted.end))
    before[1:] = noted.end[:-1]
    before[steps.at] = 0.0
    start_s = np.choose(role, (before[of], noted.begin[of], noted.leave[of]))
    end_s = np.choose(role, (noted.begin[of], noted.end[of], noted.finish[of]))
    return start_s, end_s


def _run(steps: _Steps, program: Program, tables: Tables, *, spans: bool) -> _Noted | None:
    """All waves; without spans only ``finish`` is noted."""
    count = len(steps.source)
    finish = np.full(count, -np.inf)
    begin, end, leave = (np.zeros(count if spans else 0) for _ in range(3))
    done = np.zeros(count, dtype=np.bool_)
    done[-1] = True
    at, waits = steps.at.copy(), steps.source[steps.at]
    clock = np.zeros(program.num_workers)
    free = np.zeros(tables.num_links + program.num_workers)
    newest = free.copy()
    while len(ready := done.take(waits).nonzero()[0]):
        step, awaited = at.take(ready), waits.take(ready)
        now = np.maximum(clock.take(ready), finish.take(awaited))
        if steps.barriers and not _pass_barriers(steps, done, finish, ready, step, now, waits):
            keep = done[waits[ready]]
            ready, step, now = ready[keep], step[keep], now[keep]
        if spans:
            begin[step] = now
        now += steps.work_s.take(step)
        clock[ready] = now
        link = steps.link.take(step)
        gone = np.maximum(free.take(link), now)
        if spans:
            end[step], leave[step] = now, gone
        gone += steps.occupancy_s.take(step)
        free[link] = gone
        gone += steps.latency_s.take(step)
        # Hops of different latency may share a link; nothing overtakes on it.
        newest[link] = finish[step] = np.maximum(gone, newest.take(link))
        done[step] = True
        at[ready] = step = step + 1
        waits[ready] = steps.source.take(step)
    stuck = steps.source[at] != at
    return None if stuck.any() else _Noted(begin, end, leave, finish)


def _pass_barriers(
    steps: _Steps, done: NDArray[np.bool_], finish: Floats, ready: Index, step: Index, now: Floats, waits: Index
) -> bool:
    """Let those who stand at a barrier through if all it waits for is done, else make them wait for what is not."""
    all_passed = True
    for place, number in enumerate(step.tolist()):
        if (awaited := steps.barriers.get(number)) is not None:
            pending = awaited[~done[awaited]]
            if len(pending):
                waits[ready[place]] = pending[0]
                all_passed = False
            else:
                now[place] = max(now[place], finish[awaited].max())
    return all_passed


def _cut(program: Program, tables: Tables) -> _Steps:
    """Cut rows into steps: wherever the role does not rise, and behind what others wait for if it is no SEND."""
    role, first = tables.role, np.asarray(program.first)
    starts = np.ones(len(role), dtype=np.bool_)
    starts[1:] = role[1:] <= role[:-1]
    awaited = program.source[program.source >= 0]
    behind = [awaited[role[awaited] != SEND], *(np.array(nodes) for nodes in program.barriers.values())]
    after = np.concatenate(behind) + 1
    starts[after[after < len(role)]] = True
    starts[first[:-1][first[:-1] < len(role)]] = True
    # A sentinel behind each row shifts all rows after it by one more.
    of = np.cumsum(starts) - 1 + program.worker
    per_row = np.add.reduceat(np.append(starts, False).astype(np.int32), first[:-1]) * (np.diff(first) > 0)
    ends = np.cumsum(per_row + 1)
    count = int(ends[-1]) + 1
    source = np.full(count, count - 1)
    source[ends - 1] = ends - 1  # waits for itself
    waiting = np.flatnonzero(program.source >= 0)
    source[of[waiting]] = of[program.source[waiting]]
    works, sends = np.flatnonzero(role == WORK), np.flatnonzero(role == SEND)
    # Without a message a step has a link of its own, on which nothing takes time: it ends when its work does.
    link = np.zeros(count, dtype=np.intp)
    link[:-1] = np.repeat(np.arange(program.num_workers), per_row + 1) + tables.num_links
    link[of[sends]] = tables.link[sends]
    return _Steps(
        of,
        ends - per_row - 1,
        source,
        {int(of[node]): of[list(nodes)] for node, nodes in program.barriers.items()},
        _by_step(count, of[works], tables.work_s[works]),
        _by_step(count, of[sends], tables.occupancy_s[sends]),
        _by_step(count, of[sends], tables.latency_s[sends]),
        link,
    )


def _by_step(count: int, steps: Index, seconds: Floats) -> Floats:
    found = np.zeros(count)
    found[steps] = seconds
    return found
