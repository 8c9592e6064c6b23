"""The same stages with other numbers of replicas: what is left of a plan when a worker is lost, and what it is again.

    2-1, lanes 2    worker 1 is lost       1-1: micro-batches 0 2 and 1 3 of stage 0 are all worker 0's
    2-2, lanes 2    workers 2 and 3 are    1-1: one of the replicas of stage 0 becomes stage 1

Gradients are summed in the same lanes, so that no bit depends on who is there (``schedule.replicas``).

Numbers of replicas are those of groups of workers, a group for each stage. Where workers hold several stages there are
fewer groups, all of them with as many replicas: one that is lost leaves one of every other group without work.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from raypipe.errors import PlanError
from raypipe.ir.plan import Plan
from raypipe.ir.schedule import Homes, groups_in
from raypipe.planner.schedule import schedule_of
from raypipe.planner.tune.replicas import on_workers

__all__ = ["counts_for", "counts_of", "left", "regrouped", "with_spares"]


def counts_of(homes: Homes) -> tuple[int, ...]:
    """Replicas by group."""
    return tuple(map(len, groups_in(homes)))


def left(homes: Homes, lost: Collection[int]) -> tuple[tuple[int, ...], ...]:
    """By group, the workers that go on, in their order; a group may have none."""
    found = tuple(tuple(worker for worker in workers if worker not in lost) for workers in groups_in(homes))
    least = min(map(len, found))
    return tuple(workers[:least] for workers in found) if _several(homes) else found


def _several(homes: Homes) -> bool:
    """Whether workers hold several stages, so that all groups have as many replicas."""
    return len(groups_in(homes)) < len(homes)


def counts_for(wanted: Sequence[int], workers: int, homes: Homes) -> tuple[int, ...] | None:
    """Replicas by group for so many workers: those that are wanted, taken away where most are; None for too few.

    Args:
        wanted: replicas by group.
        homes: of any plan of these stages.
    """
    if workers < len(wanted):
        return None
    if _several(homes):
        return (min(wanted[0], workers // len(wanted)),) * len(wanted)
    found = list(wanted)
    while sum(found) > workers:
        most = max(found)
        found[max(stage for stage, count in enumerate(found) if count == most)] -= 1
    return tuple(found)


def with_spares(homes: Homes, wanted: Sequence[int], spares: int) -> tuple[int, ...]:
    """Replicas by group with the help of spares, each where most are missing, while any are.

    Args:
        homes: who is there.
        wanted: replicas by group that there should be; empty for none.
    """
    found = list(counts_of(homes))
    if _several(homes) and wanted:
        return counts_for(wanted, sum(found) + spares, homes) or tuple(found)
    for _ in range(spares):
        missing = [want - count for want, count in zip(wanted, found, strict=bool(wanted))]
        if max(missing, default=0) > 0:
            found[missing.index(max(missing))] += 1
    return tuple(found)


def regrouped(plan: Plan, counts: tuple[int, ...]) -> Plan:
    """The plan with so many replicas of each stage, in the lanes that it has; without a prediction, of other numbers.

    Args:
        plan: of a run in lanes.
        counts: by group, no more than there are lanes.

    Raises:
        PlanError: the schedule is asynchronous, so that other numbers would make gradients of other weights.
    """
    assert plan.spec is not None, "a plan with lanes says what its schedule was made from"
    homes = plan.schedule.wiring.homes
    by_group = dict(zip(groups_in(homes), counts, strict=True))
    by_stage = tuple(by_group[workers] for workers in homes)
    if not plan.spec.of_kind.synchronous and by_stage != plan.spec.replicas:
        raise PlanError(
            f"With schedule={plan.spec.kind!r} the numbers of replicas, {'-'.join(map(str, plan.spec.replicas))}, "
            "decide how old the weights are that gradients are taken at, so that a run keeps them."
        )
    spec = dataclasses.replace(plan.spec, replicas=by_stage)
    schedule = schedule_of(spec, len(homes))
    return dataclasses.replace(
        plan,
        partition=on_workers(plan.partition, schedule.wiring.homes),
        schedule=schedule,
        spec=spec,
        prediction=None,
    )
