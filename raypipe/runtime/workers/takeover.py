"""Taking over living stages from a driver that is gone; what is decided of it is in runtime/run/takeover.py.

stand      every stage obeys the new driver from now on, and says what it was ordered
complete   whoever was not given an order that others have is given it; all end after the same one
ended      they have
stand      what they have done, of which the old driver may not have written all

Where they cannot, because one of them was lost with the driver, those that are left leave their work and wait for the
recovery that every lost stage takes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from raypipe.engine.setup import GenerationSetup, RunSetup
from raypipe.errors import LinkError, StageError
from raypipe.ir.schedule import Schedule
from raypipe.ir.segment import RowsKey
from raypipe.runtime.run.takeover import Done, Standing, completion, steps_done
from raypipe.runtime.workers.fleet import Fleet
from raypipe.runtime.workers.leaving import settle_s
from raypipe.runtime.workers.memos import with_read_memo
from raypipe.runtime.workers.roster import Member, end_member, results

__all__ = ["take_over", "take_survivors"]

ASK_S = 10.0
FINISH_S = 300.0
"""How long all stages may carry out nothing of what they were given, before they are given up."""
DOING = "being taken over"


def take_over(
    fleet: Fleet, run: RunSetup, setup: GenerationSetup, schedules: Callable[[RowsKey], Schedule], term: int
) -> list[Done]:
    """Make the members of the fleet its pipeline, after they have completed all that they were given.

    Args:
        run, setup: that they were configured with.
        schedules: the lowered rows by key.
        term: of this driver.

    Returns:
        What they have done that the old driver may not have written.

    Raises:
        StageError, LinkError: they cannot come to the same step.
        LeaseError: an even later driver has taken them over.
    """
    workers = _in_order(fleet.roster, _standings(fleet.roster, term))
    if len(workers) != setup.num_workers or list(workers) != sorted(range(setup.num_workers)):
        raise StageError(f"Of {setup.num_workers} stage actors only {len(workers)} outlived their driver.")
    members, standings = [m for m, _ in workers.values()], [s for _, s in workers.values()]
    if any(standing.generation != setup.generation for standing in standings):
        raise StageError("The stages were being given another plan when their driver ended.")
    todo = completion(standings)
    fleet.adopt(dict(enumerate(members)), run, setup, links=standings[0].links, last=todo.run)
    fleet.complete(todo, schedules)
    _wait_ended([member.actor for member in members], todo.run)
    done = steps_done(_standings(members, term))
    return [Done(with_read_memo(order), fleet.by_stage(reports)) for order, reports in done]


def take_survivors(fleet: Fleet, run: RunSetup, setup: GenerationSetup, term: int) -> None:
    """Make those members its workers that still are workers, and the others lost; ``Recovery`` is next.

    They leave their work; one that does not is ended.

    Args:
        run, setup: that the run had.
        term: of this driver.

    Raises:
        LeaseError: an even later driver has taken them over.
    """
    found = []
    for member in fleet.roster:
        try:
            found.append((member, *results([member.actor.stand.remote(term)], ASK_S, DOING)))
        except StageError:  # it is dead, or does not answer
            end_member(member)
    patience_s = settle_s(fleet.roster, planned_s=0.0)
    for member, standing in found:
        try:
            results([member.actor.abort.remote(term, standing.links, "its driver was lost")], ASK_S, DOING)
            with contextlib.suppress(StageError, LinkError):  # that ended its work; it has left it
                if standing.works and results(
                    [member.actor.ended.remote(standing.run, patience_s)], patience_s + ASK_S, DOING
                ) != [None]:
                    end_member(member)
        except StageError:
            end_member(member)
    living = [(member, standing) for member, standing in found if not member.lost]
    workers = {s.worker: m for m, s in living if s.worker is not None and s.worker < setup.num_workers}
    last = max((standing.run for _, standing in living), default=-1)
    links = max((standing.links for _, standing in living), default=-1)
    fleet.adopt(workers, run, setup, links=links, last=last)


def _standings(members: Sequence[Member], term: int) -> list[Standing]:
    return results([member.actor.stand.remote(term) for member in members], ASK_S, DOING)


def _in_order(members: Sequence[Member], standings: Sequence[Standing]) -> dict[int, tuple[Member, Standing]]:
    """By worker."""
    pairs = zip(members, standings, strict=True)
    found = {standing.worker: (member, standing) for member, standing in pairs if standing.worker is not None}
    return dict(sorted(found.items()))


def _wait_ended(actors: Sequence[Any], run: int) -> None:
    before, deadline_s = -1, time.monotonic() + FINISH_S
    while going_on := [n for n in results([a.ended.remote(run) for a in actors], FINISH_S, DOING) if n is not None]:
        if sum(going_on) != before:
            before, deadline_s = sum(going_on), time.monotonic() + FINISH_S
        if time.monotonic() > deadline_s:
            raise StageError(f"The stages did not complete what they were given within {FINISH_S:g} s.")
