"""A plan in which a worker that ran out of memory holds less: the same stages and micro-batches, cut otherwise.

    what the plan counts for that worker, or what it held when it ran out, the smaller  --less a tenth-->  its limit
    schedules that may be taken, the one that holds least first  --cut within the limit-->  the plan
    where none fits and recompute="auto": the same, with its stage running its forwards again

What a plan counts and what a process holds are not the same bytes: the interpreter, libraries and what an allocator
keeps are in the second only. So a limit is set in the plan's bytes, and the next failure sets a lower one.
"""

from __future__ import annotations

import dataclasses

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster
from raypipe.ir.plan import Plan, human_bytes
from raypipe.ir.profile import Profile
from raypipe.planner.partition.fit import memory_of
from raypipe.planner.tune.again import cut_anew, in_force
from raypipe.planner.tune.decision import Decision
from raypipe.planner.tune.request import Request

__all__ = ["LESS", "lighter"]

LESS = 0.9
"""Of what a worker was planned to hold, what it may hold after it ran out."""


def lighter(request: Request, profile: Profile, plan: Plan, line: Cluster, worker: int, held_bytes: int) -> Decision:
    """The plan for the same workers in which this one holds less.

    Args:
        request: of a plan with the same stages and micro-batches.
        plan: with which it ran out of memory.
        line: a device for each stage, with the limits that are known.
        held_bytes: by the worker then, 0 where nobody knows.

    Returns:
        the decision; its cluster has the new limit.

    Raises:
        PlanError: no plan holds less there; names worker, bytes and fields.
    """
    assert plan.spec is not None, "can_be_cut_again"
    now = in_force(request.with_schedule(plan.spec), profile, plan, line)
    need = memory_of(now.graph, now.partition, now.limits.memory)[worker].total_bytes
    limit = max(1, int(LESS * min(need, held_bytes or need)))
    devices = list(line.devices)
    devices[worker] = dataclasses.replace(devices[worker], memory_bytes=limit)
    line, why = Cluster(tuple(devices), line.links), ""
    for settled in [*_thriftiest_first(request, plan), *_again(request, plan, worker)]:
        try:
            found = cut_anew(settled, profile, plan, line)
        except PlanError as error:
            why = str(error)
        else:
            told = f"made again, as worker {worker} ran out of memory: it holds {human_bytes(limit)} at most now"
            return dataclasses.replace(found, reasons=(("memory", told),))
    raise PlanError(
        f"Worker {worker} was planned to hold {human_bytes(need)}, and no other cut or schedule that may be taken lets "
        f"it hold {human_bytes(limit)} at most. {why}"
    )


def _thriftiest_first(request: Request, plan: Plan) -> list[Request]:
    """The schedules that may be taken, that which holds the fewest micro-batches first. Who asked for one keeps it."""
    assert plan.spec is not None
    now = request.with_schedule(plan.spec)
    if request.schedule != "auto" or plan.spec.kind == "1f1b":
        return [now]
    return [request.as_1f1b(), now]


def _again(request: Request, plan: Plan, worker: int) -> list[Request]:
    """The same with one more stage that runs its forwards again, where that is left to memory."""
    now = plan.recompute or (False,) * plan.partition.num_stages
    asked = request.recompute if isinstance(request.recompute, tuple) else (request.recompute,) * len(now)
    if now[worker] or asked[worker] is not None:
        return []
    more = (*now[:worker], True, *now[worker + 1 :])
    return [dataclasses.replace(settled, recompute=more) for settled in _thriftiest_first(request, plan)]
