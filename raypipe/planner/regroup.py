"""The same stages with other numbers of replicas: what is left of a plan when a worker is lost, and what it is again.

    2-1, lanes 2    worker 1 is lost       1-1: micro-batches 0 2 and 1 3 of stage 0 are all worker 0's
    2-2, lanes 2    workers 2 and 3 are    1-1: one of the replicas of stage 0 becomes stage 1

Gradients are summed in the same lanes, so that no bit depends on who is there (``schedule.replicas``).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from raypipe.errors import PlanError
from raypipe.ir.plan import Plan
from raypipe.ir.schedule import Homes
from raypipe.planner.schedule import schedule_of
from raypipe.planner.tune.replicas import on_workers

__all__ = ["counts_for", "left", "regrouped", "with_spares"]


def left(homes: Homes, lost: Collection[int]) -> tuple[tuple[int, ...], ...]:
    """By stage, the workers that are left of it, in their order; a stage may have none."""
    return tuple(tuple(worker for worker in workers if worker not in lost) for workers in homes)


def counts_for(wanted: Sequence[int], workers: int) -> tuple[int, ...] | None:
    """Replicas by stage for so many workers: those that are wanted, taken away where most are; None for too few.

    Args:
        wanted: replicas by stage.
    """
    if workers < len(wanted):
        return None
    found = list(wanted)
    while sum(found) > workers:
        most = max(found)
        found[max(stage for stage, count in enumerate(found) if count == most)] -= 1
    return tuple(found)


def with_spares(counts: Sequence[int], wanted: Sequence[int], spares: int) -> tuple[int, ...]:
    """Replicas by stage with the help of spares, each where most are missing, while any are.

    Args:
        counts: that are there.
        wanted: that there should be.
    """
    found = list(counts)
    for _ in range(spares):
        missing = [want - count for want, count in zip(wanted, found, strict=bool(wanted))]
        if max(missing, default=0) > 0:
            found[missing.index(max(missing))] += 1
    return tuple(found)


def regrouped(plan: Plan, counts: tuple[int, ...]) -> Plan:
    """The plan with so many replicas of each stage, in the lanes that it has; without a prediction, of other numbers.

    Args:
        plan: of a run in lanes.
        counts: by stage, no more than there are lanes.

    Raises:
        PlanError: the schedule is asynchronous, so that other numbers would make gradients of other weights.
    """
    assert plan.spec is not None, "a plan with lanes says what its schedule was made from"
    if not plan.spec.of_kind.synchronous and counts != plan.spec.replicas:
        raise PlanError(
            f"With schedule={plan.spec.kind!r} the numbers of replicas, {'-'.join(map(str, plan.spec.replicas))}, "
            "decide how old the weights are that gradients are taken at, so that a run keeps them."
        )
    spec = dataclasses.replace(plan.spec, replicas=counts)
    return dataclasses.replace(
        plan,
        partition=on_workers(plan.partition, counts),
        schedule=schedule_of(spec, len(counts)),
        spec=spec,
        prediction=None,
    )
