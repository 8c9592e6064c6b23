"""Taking living stages over from a driver that is gone: what is still to be ordered, and what has been done.

    the driver ordered      0 1 2 3 4      and died while it did
    stage 0 was given       0 1 2 3 4
    stage 1 was given       0 1 2 3        is handed 4 by the next driver: both end after it, at the same step

A step that one stage has begun needs all of them, and every order that was given to one of them can be given to the
others. So nothing is done again and no state is copied: stages complete what they were given, and the next driver goes
on after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from raypipe.errors import StageError
from raypipe.ir.report import StepReport
from raypipe.ir.work_order import Order

__all__ = ["Completion", "Done", "Entry", "Standing", "completion", "steps_done"]


class Entry(NamedTuple):
    """An order as a stage remembers it.

    Attributes:
        run, place: number of the ``Fleet.run`` that it is of, and where it comes in it.
        reports: by stage of the worker, and step; None until it was carried out.
    """

    run: int
    place: int
    order: Order
    reports: tuple[tuple[StepReport, ...], ...] | None = None


class Standing(NamedTuple):
    """Where a stage actor stands when it is taken over.

    Attributes:
        worker: its number in the pipeline; None for a spare.
        generation, links: of its plan, and of its links.
        run: newest one that it works at or was ordered anything of.
        works: whether it has begun to work at that run.
        limit: orders of that run after which it was told to end; None where it was not.
        entries: what it was ordered lately, oldest first.
    """

    worker: int | None
    generation: int
    links: int
    run: int
    works: bool
    limit: int | None
    entries: tuple[Entry, ...]


class Completion(NamedTuple):
    """How stages come to the same step.

    Attributes:
        run: that they complete.
        orders: of it, after which all of them end.
        missing: by worker, what it was not given.
        idle: workers that have not begun with the run.
    """

    run: int
    orders: int
    missing: tuple[tuple[Order, ...], ...]
    idle: frozenset[int]


class Done(NamedTuple):
    """An order to train that every stage has carried out, with the reports of all stages, by stage and step."""

    order: Order
    reports: Sequence[Sequence[StepReport]]


def completion(standings: Sequence[Standing]) -> Completion:
    """What is missing until all stages have done the same orders.

    Args:
        standings: of workers 0, 1, ...

    Raises:
        StageError: they were in the middle of something else than training: of another plan, or of a recovery.
    """
    if len({(s.generation, s.links) for s in standings}) > 1:
        raise StageError("The stages were being configured anew when their driver ended, and are not one pipeline.")
    if not any(s.entries for s in standings):
        raise StageError("The stages were ordered nothing before their driver ended.")
    run = max(s.run for s in standings)
    here = [{entry.place: entry.order for entry in s.entries if entry.run == run} for s in standings]
    counts = [max(given, default=-1) + 1 for given in here]
    limits = [s.limit for s in standings if s.run == run and s.limit is not None]
    count = min(limits, default=max(counts))
    given = {index: order for of_worker in here for index, order in of_worker.items()}
    if any(index not in given for known in counts for index in range(known, count)):
        raise StageError("The stages have lost orders that were under way when their driver ended.")
    missing = tuple(tuple(given[index] for index in range(known, count)) for known in counts)
    idle = frozenset(worker for worker, s in enumerate(standings) if not (s.works and s.run == run))
    return Completion(run, count, missing, idle)


def steps_done(
    standings: Sequence[Standing],
) -> list[tuple[Order, list[tuple[tuple[StepReport, ...], ...]]]]:
    """Orders to train that every stage has carried out and remembers, oldest first, with the reports by worker.

    Args:
        standings: of workers 0, 1, ..., after they have completed what they were given.
    """
    by_worker = [
        {(e.run, e.place): e for e in s.entries if e.reports is not None and e.order.training} for s in standings
    ]
    common = sorted(set.intersection(*map(set, by_worker)))
    return [(by_worker[0][key].order, [found[key].reports or () for found in by_worker]) for key in common]
