"""Plans within the memory of the devices that workers turned out to have: known once the workers are there.

    planned, what each worker's device offers --within--> the same plan, where every worker has enough
                                                          else one made again for these limits

A GPU that several workers share offers each its share. Devices may differ: a plan with one stage on each is then made
for every device as it is, and says which worker becomes which stage; any other, and every later plan of the run, keeps
to the smallest.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster, Device
from raypipe.ir.plan import Plan, human_bytes
from raypipe.planner.tune import ASSUMED_LINK
from raypipe.runtime.run.later import another, later_plan
from raypipe.runtime.run.planned import Planned
from raypipe.runtime.run.planning import PlanBasis

__all__ = ["Fitted", "Offered", "within"]


class Offered(NamedTuple):
    """By a worker's device.

    Attributes:
        title: of the device, for people.
        memory_bytes: that the worker may hold there; None where nobody says.
    """

    title: str
    memory_bytes: int | None = None


class Fitted(NamedTuple):
    """What became of a plan.

    Attributes:
        basis: of all later plans.
        members: which of the workers that are there become workers 0, 1, ... of the plan; None for their own order.
        why: another plan was made, for people; "" where it is the same.
    """

    basis: PlanBasis
    planned: Planned
    members: tuple[int, ...] | None = None
    why: str = ""


def within(basis: PlanBasis, planned: Planned, offered: Sequence[Offered]) -> Fitted:
    """A plan whose workers have enough memory. Mini-batches are parted as before, so that no bit changes.

    Args:
        planned: of this basis, not begun.
        offered: to each worker that is there, of which the plan may use fewer or want more.

    Raises:
        PlanError: there is none; names the devices, the bytes and the field.
    """
    plan = planned.plan
    limits = [one.memory_bytes for one in offered if one.memory_bytes is not None]
    if not limits or plan.prediction is None:  # nobody knows what is there, or what is needed
        return Fitted(basis, planned)
    least = min(limits if basis.request.memory_limit_bytes is None else [*limits, basis.request.memory_limit_bytes])
    bounded = dataclasses.replace(basis, request=dataclasses.replace(basis.request, memory_limit_bytes=least))
    needs = _needs(plan)
    short = [
        (worker, need, one)
        for worker, (need, one) in enumerate(zip(needs, offered, strict=False))
        if one.memory_bytes is not None and need > one.memory_bytes
    ]
    if not short:
        return Fitted(bounded, planned)
    worker, need, one = short[0]
    why = (
        f"worker {worker} was planned to hold {human_bytes(need)}, and its device, {one.title}, offers "
        f"{human_bytes(one.memory_bytes or 0)}"
    )
    try:
        if len(set(limits)) > 1 and _one_each(plan):
            found = _on_each(basis, plan, offered)
            return Fitted(bounded, found, tuple(stage.devices[0] for stage in found.plan.partition.stages), why)
        request = dataclasses.replace(
            bounded.request, minibatch_size=plan.minibatch_size, num_microbatches=plan.num_microbatches
        )
        return Fitted(bounded, later_plan(dataclasses.replace(bounded, request=request)), None, why)
    except PlanError as error:
        raise PlanError(f"{why[0].upper()}{why[1:]}. No other plan fits there: {error}") from None


def _on_each(basis: PlanBasis, plan: Plan, offered: Sequence[Offered]) -> Planned:
    """A plan for these devices as they are."""
    devices = tuple(
        Device(f"{one.title} of worker {worker}", memory_bytes=one.memory_bytes) for worker, one in enumerate(offered)
    )
    stages = plan.partition.num_stages
    line = Cluster(devices, (ASSUMED_LINK,))
    return later_plan(another(basis, plan, num_stages=stages, num_workers=len(devices), cluster=line))


def _one_each(plan: Plan) -> bool:
    return all(len(workers) == 1 for workers in plan.schedule.wiring.homes) and (
        plan.schedule.num_workers == plan.partition.num_stages
    )


def _needs(plan: Plan) -> list[int]:
    """Bytes by worker."""
    assert plan.prediction is not None
    found = [0] * plan.schedule.num_workers
    for stage, workers in zip(plan.prediction.stages, plan.schedule.wiring.homes, strict=True):
        for worker in workers:
            found[worker] += stage.memory_bytes
    return found
