"""Later plans of a run: other workers, stages or replicas, for the same mini-batches in the same parts and lanes.

a resize, other workers, another cut --> another basis --> later_plan --> as plan_for, with PlanErrors only
"""

from __future__ import annotations

import dataclasses
import math

from raypipe.errors import CaptureError, PlanError
from raypipe.ir.cluster import Cluster
from raypipe.ir.plan import Plan
from raypipe.planner.elastic import shape_of
from raypipe.planner.tune import Decision, Request
from raypipe.runtime.run.planned import Planned
from raypipe.runtime.run.planning import PlanBasis, plan_for

__all__ = ["another", "first_plan", "for_workers", "later_plan"]


def another(
    basis: PlanBasis,
    plan: Plan,
    *,
    num_stages: int | None,
    num_workers: int | None = None,
    cluster: Cluster | None = None,
    replicas: int | tuple[int, ...] | None = 1,
) -> PlanBasis:
    """The basis of a later plan of the same run. Mini-batches and lanes are as before, so that no bit changes.

    Args:
        plan: one of this run.
        num_stages: as many; None leaves it to the planner.
        num_workers: that are offered now; None for as many as there are stages.
        cluster: as it is now; None for equal workers.
        replicas: of every stage, one number for all or one for each; None leaves them to the planner.

    Raises:
        PlanError: there cannot be so many replicas, or the run cannot have others.
    """
    _check_replicas(plan, replicas)
    recompute = basis.request.recompute
    if isinstance(recompute, tuple) and len(recompute) != num_stages:  # which stages that were means nothing now
        recompute = True if any(recompute) else None if None in recompute else False
    slack, points = basis.request.slack, basis.request.split_points
    request = dataclasses.replace(
        basis.request,
        recompute=recompute,
        # Numbers for other hops say nothing of these, so they are the planner's.
        slack=None if isinstance(slack, tuple) and len(slack) + 1 != num_stages else slack,
        replicas=replicas,
        lanes=plan.schedule.wiring.lanes,
        replicated_buffers=basis.request.replicated_buffers and replicas != 1,
        num_stages=num_stages,
        num_workers=num_workers,
        minibatch_size=plan.minibatch_size,
        num_microbatches=plan.num_microbatches,
        split_points=points if num_stages == len(points) + 1 else (),
        partitioner=basis.request.partitioner if basis.profile is not None else "parameters",
    )
    return dataclasses.replace(basis, request=request, cluster=cluster)


def _check_replicas(plan: Plan, replicas: int | tuple[int, ...] | None) -> None:
    """See ``another``."""
    lanes, counts = plan.schedule.wiring.lanes, replicas if isinstance(replicas, tuple) else (replicas or 1,)
    if max(counts) > lanes:
        few = "one lane, in the order of micro-batches" if lanes == 1 else f"{lanes} lanes"
        raise PlanError(
            f"num_replicas={replicas}: the run sums gradients in {few}, and other lanes would change its bits, so that "
            f"no stage can have more than {lanes} replica{'s' * (lanes > 1)}. Give at most as many, or begin a run "
            f"with num_lanes={math.lcm(lanes, *counts)}."
        )
    if not plan.weights.synchronous and max(*counts, *plan.partition.replicas) > 1:
        shown = "-".join(map(str, plan.partition.replicas))
        raise PlanError(
            f"num_replicas={shown} with schedule={plan.schedule.kind.split()[0]!r}: how old weights are follows from "
            "stages and replicas, so that a run keeps both. Stop it, and let it go on with other numbers."
        )


def for_workers(basis: PlanBasis, plan: Plan, request: Request, workers: int) -> PlanBasis:
    """The basis of a later plan for so many workers, of a run that may change their number.

    Args:
        plan: one of this run.
        request: what was asked for.
    """
    num_stages, num_workers, replicas = shape_of(request, workers)
    return another(basis, plan, num_stages=num_stages, num_workers=num_workers, replicas=replicas)


def first_plan(basis: PlanBasis, wanted: Planned, workers: int) -> Planned:
    """The plan that a run begins with whose number of workers may change.

    Args:
        wanted: the plan of this basis.
        workers: that are there.

    Raises:
        PlanError: there is none for so few.
    """
    if workers >= wanted.plan.schedule.num_workers:
        return wanted
    return later_plan(for_workers(basis, wanted.plan, basis.request, workers))


def later_plan(basis: PlanBasis, decision: Decision | None = None) -> Planned:
    """A plan for a run that was planned before: whatever is wrong with it, there was a better one.

    Args:
        decision: as in ``plan_for``.

    Raises:
        PlanError: there is none.
    """
    try:
        return plan_for(basis, decision)
    except CaptureError as error:  # the model cannot be cut like this
        raise PlanError(str(error)) from None
