"""Rows of all workers, compiled for simulation, and the one pass that gives the times of all their steps.

A row is split into steps of at most one wait, one piece of work and one message, in this order:

    row      RECV_F F SEND_F | RECV_F F SEND_F | RECV_B B SEND_B | RECV_F F SEND_F | B ...
    step     0                 1                 2                 3                 4

Rows and links have fixed orders, so no event queue is needed: one pass in an order that respects every wait gives all
times. A deadlock is found when this order is.

A wire over which a worker receives from several others is simulated as one more worker (``with_shared_wires``).

Many workers advance together, in arrays, wave after wave. A loop over single steps is quicker for a few workers, but
the 8 million steps of 1024 workers do not fit into memory as Python objects. The arithmetic is the same.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import ScheduleError

Ints = NDArray[np.int32]
Floats = NDArray[np.float64]

WIDE = 32
"""Least number of workers for which waves are quicker than a loop over blocks."""

Line = tuple[int, int, int, int, int]
"""Step, awaited step (or ``-2 - group``), work, link (-1 without a message) and message of a step."""


class DeadlockError(ScheduleError):
    """Error if workers wait for each other; ``at`` has the next step of each worker."""

    def __init__(self, at: list[int]) -> None:
        super().__init__("Deadlock: the workers wait for each other.")
        self.at = at


class Waves(NamedTuple):
    """Order of execution in waves. A wave has the next step of every worker that is not blocked; they run at once.

    Attributes:
        order: steps, wave after wave.
        bounds: position of each wave's first step in ``order``; one more entry for the end.
        joins: indices of the waves in which some step waits for several steps.
    """

    order: Ints
    bounds: list[int]
    joins: frozenset[int]


@dataclass(frozen=True)
class CompiledRows:
    """Rows of all workers as steps of at most one wait, one piece of work and one message, numbered row after row.

    After each row comes a step that never runs, and at the end one that is done from the beginning. Work and messages
    are indices into the lists of ``Seconds``; a link is an index into a list of times until which links are busy.

    Attributes:
        first: first step of each worker's row; one more entry for the end of the last row.
        source: by step, the step of another worker that it waits for; ``-2 - g`` if it waits for all steps of group g;
            the last step, which is always done, if it waits for nothing.
        groups: by group, the steps that are awaited together.
        untimed: steps whose wait determines the order of execution only, and does not delay their begin.
        work, message: number of the work and of the message of each step.
        link: number of the one-way link of each step's message; ``num_links`` + its worker if it has no message.
        num_links: number of links.
    """

    first: list[int]
    source: Ints
    groups: tuple[Ints, ...]
    untimed: list[int]
    work: NDArray[np.integer]
    message: NDArray[np.integer]
    link: Ints
    num_links: int

    @property
    def num_workers(self) -> int:
        return len(self.first) - 1

    @property
    def wide(self) -> bool:
        """True if the steps are simulated in waves, False if in blocks."""
        return self.num_workers >= WIDE

    @cached_property
    def blocks(self) -> list[tuple[int, list[Line]]]:
        """Order of execution in blocks (worker, lines of consecutive steps). A block waits for earlier blocks only.

        Raises:
            DeadlockError: workers wait for each other.
        """
        owner = np.repeat(np.arange(self.num_workers), np.diff(self.first)).tolist()
        source, none, groups = self.source.tolist(), len(self.source) - 1, [group.tolist() for group in self.groups]
        timed = self.source.copy()
        timed[self.untimed] = none
        link = np.where(self.link < self.num_links, self.link, -1)
        columns = (timed, self.work, link, self.message)
        lines = list(zip(range(none + 1), *(column.tolist() for column in columns), strict=True))
        at, end = self.first[:-1], [stop - 1 for stop in self.first[1:]]
        sleepers: list[list[int]] = [[] for _ in end]
        blocks = []
        ready = deque(range(self.num_workers))
        while ready:
            w = ready.popleft()
            for step in range(at[w], end[w]):
                awaited = source[step]
                if awaited < 0:
                    awaited = next((one for one in groups[-2 - awaited] if one >= at[owner[one]]), none)
                if awaited != none and awaited >= at[owner[awaited]]:
                    sleepers[owner[awaited]].append(w)
                    break
            else:
                step = end[w]
            if step > at[w]:
                blocks.append((w, lines[at[w] : step]))
                at[w] = step
                ready.extend(sleepers[w])
                sleepers[w].clear()
        if at != end:
            raise DeadlockError(at)
        return blocks

    @cached_property
    def waves(self) -> Waves:
        """Order of execution in waves. There are about twice as many waves as micro-batches, for any number of workers.

        Raises:
            DeadlockError: workers wait for each other.
        """
        count, end = len(self.source), np.array(self.first[1:]) - 1
        # Negative numbers of groups are places at the end of this array: a step that waits for a group is looked at.
        done = np.zeros(count + len(self.groups) + 1, dtype=np.bool_)
        done[count - 1 :] = True
        at = np.array(self.first[:-1], dtype=np.int32)
        waits = self.source[at]
        order, bounds, joins = np.empty(count - 1 - self.num_workers, dtype=np.int32), [0], set()
        while len(ready := done.take(waits).nonzero()[0]):
            step = at.take(ready)
            several = (self.source.take(step) < 0).nonzero()[0].tolist()
            for i in several:
                group = self.groups[-2 - self.source[step[i]]]
                waits[ready[i]] = next(iter(group[~done[group]]), count - 1)
            if several:
                ready = ready[done[waits[ready]]]
                step = at[ready]
                joins.add(len(bounds) - 1)
            bounds.append(bounds[-1] + len(step))
            order[bounds[-2] : bounds[-1]] = step
            done[step] = True
            step += 1
            at[ready] = step
            waits[ready] = self.source.take(step)
        if (at != end).any():
            raise DeadlockError(at.tolist())
        return Waves(order, bounds, frozenset(joins))

    def with_shared_wires(self, shared: NDArray[np.bool_]) -> CompiledRows:
        """Return rows in which each worker receives the messages in ``shared`` over one wire, one after the other.

        The wire of worker w is row ``num_workers + w``, with a step for each message, in the order in which w takes
        them. Such a step waits until the message has been sent. Its work is to carry the message; what it sends is the
        message's latency. Numbers of work and messages are those of ``Seconds.with_shared_wires``.

        Args:
            shared: True for messages that share the wire of their receiver, by number of the message.
        """
        none, workers, count = len(self.source) - 1, self.num_workers, len(shared)
        sent = np.flatnonzero((self.link < self.num_links) & shared[self.message])
        takes = np.flatnonzero(np.isin(self.source, sent))
        sender = self.source[takes]
        receiver = np.repeat(np.arange(workers), np.diff(self.first))[takes]
        carry = none + np.arange(len(takes)) + receiver  # each earlier wire has a step that never runs at its end
        sizes = np.append(np.diff(self.first), np.bincount(receiver, minlength=workers) + 1)
        first = [0, *np.cumsum(sizes).tolist()]
        end = first[-1]
        source = np.arange(end + 1, dtype=np.int32)
        source[:none] = np.where(self.source[:none] == none, end, self.source[:none])
        source[takes], source[carry] = carry, sender
        work, message = (np.full(end + 1, 2 * count, dtype=np.int32) for _ in range(2))
        link = self.num_links + workers + np.append(np.repeat(np.arange(2 * workers), sizes), 0).astype(np.int32)
        alone = np.setdiff1d(np.flatnonzero(self.link < self.num_links), sent)
        message[alone], link[alone] = self.message[alone], self.link[alone]
        work[:none] = self.work[:none] + count
        work[carry] = self.message[sender]
        message[carry], link[carry] = self.message[sender] + count, self.num_links + receiver
        return CompiledRows(first, source, self.groups, self.untimed, work, message, link, self.num_links + workers)


class Seconds(NamedTuple):
    """Durations in seconds, indexed by the numbers of work and of messages in ``CompiledRows``.

    Attributes:
        work: duration of each piece of work.
        occupancy: for each message, how long it occupies its link.
        latency: for each message, time from the end of its occupancy to its arrival.
    """

    work: Sequence[float]
    occupancy: Sequence[float]
    latency: Sequence[float]

    def with_shared_wires(self) -> Seconds:
        """Return the durations for ``CompiledRows.with_shared_wires``."""
        free = [0.0] * (len(self.occupancy) + 1)
        return Seconds([*self.occupancy, *self.work], [*self.occupancy, *free], [*self.latency, *self.latency, 0.0])


@dataclass(frozen=True, slots=True)
class Times:
    """Times in seconds, by step: begin and end of the step's work, departure and arrival of its message.

    If a step has no message, its departure and arrival equal the end of its work.
    """

    begin: Floats
    end: Floats
    leave: Floats
    finish: Floats


def run(
    rows: CompiledRows, seconds: Seconds, clock: list[float], free: list[float], spans: list[list[float]] | None = None
) -> list[float]:
    """Compute in a loop, for each step, the time at which it has ended or, if it sends, its message has arrived.

    Args:
        clock, free: times at which each worker and each link has ended earlier work; changed in place.
        spans: begin, end and departure by step, filled in place; None to leave them out.
    """
    work_s, occupancy_s, latency_s = seconds
    groups, finish, newest = rows.groups, [0.0] * len(rows.source), [0.0] * len(free)
    for worker, lines in rows.blocks:
        now = clock[worker]
        for step, awaited, work, link, message in lines:
            if awaited < 0:
                now = max(now, *[finish[one] for one in groups[-2 - awaited].tolist()])
            elif finish[awaited] > now:
                now = finish[awaited]
            begin = now
            now += work_s[work]
            leave = arrival = now
            if link >= 0:
                if free[link] > now:
                    leave = free[link]
                free[link] = arrival = leave + occupancy_s[message]
                arrival += latency_s[message]
                # Hops of different latency may share a link; nothing overtakes on it.
                if arrival < newest[link]:
                    arrival = newest[link]
                newest[link] = arrival
            finish[step] = arrival
            if spans:
                spans[0][step], spans[1][step], spans[2][step] = begin, now, leave
        clock[worker] = now
    return finish


def run_waves(rows: CompiledRows, seconds: Seconds, *, spans: bool) -> Times:
    """Compute the times of all steps, wave after wave; ``begin`` and ``leave`` stay empty if ``spans`` is False."""
    work_s, occupancy_s, latency_s = map(np.asarray, seconds)
    order, bounds, joins = rows.waves
    source, count = rows.source, len(rows.source)
    if len(rows.untimed):
        source = source.copy()
        source[rows.untimed] = count - 1
    begin, leave = (np.zeros(count if spans else 0) for _ in range(2))
    # The step before the first one of a row never runs. Numbers of groups are places at the end, read as 0.
    end, finish = np.zeros(count), np.zeros(count + len(rows.groups) + 1)
    free = np.zeros(rows.num_links + rows.num_workers)
    newest = free.copy()
    for wave, (first, stop) in enumerate(pairwise(bounds)):
        step = order[first:stop]
        awaited = source.take(step)
        now = np.maximum(end.take(step - 1), finish.take(awaited))
        if wave in joins:
            for i in np.flatnonzero(awaited < 0).tolist():
                now[i] = max(now[i], finish[rows.groups[-2 - awaited[i]]].max())
        if spans:
            begin[step] = now
        now += work_s.take(rows.work.take(step))
        end[step] = now
        link, message = rows.link.take(step), rows.message.take(step)
        gone = np.maximum(free.take(link), now)
        if spans:
            leave[step] = gone
        gone += occupancy_s.take(message)
        free[link] = gone
        gone += latency_s.take(message)
        newest[link] = finish[step] = np.maximum(gone, newest.take(link))
    return Times(begin, end, leave, finish[:count])
