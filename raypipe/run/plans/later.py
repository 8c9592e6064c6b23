"""Later plans of a run: other workers, stages or replicas, with the same mini-batches, micro-batches and lanes.

Lanes are partial sums of gradients; their number fixes the order of summation. Later plans keep it, so that results
are bitwise equal.

a resize, other workers, another partition --> another basis --> later_plan --> as plan_for, with PlanErrors only
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from raypipe.errors import CaptureError, PlanError, RanOut
from raypipe.ir.cluster import Cluster, ComputeDevice
from raypipe.ir.plan import Plan
from raypipe.ir.units import human_bytes
from raypipe.planner.elastic import shape_of
from raypipe.planner.repartition import can_be_cut_again, lighter, line_of
from raypipe.planner.search import ASSUMED_LINK, Decision, Request
from raypipe.run.plans.planning import PlanBasis, plan_for
from raypipe.run.spec import Planned


def another(
    basis: PlanBasis,
    plan: Plan,
    *,
    num_stages: int | None,
    num_workers: int | None = None,
    cluster: Cluster | None = None,
    replicas: int | tuple[int, ...] | None = 1,
) -> PlanBasis:
    """Create the input of a later plan of the same run.

    Mini-batches and lanes (partial sums of gradients) are kept, so that results are bitwise equal.

    Args:
        basis: input of the run's first plan.
        plan: plan of this run that has its mini-batches and lanes.
        num_stages: number of stages; None leaves it to the planner.
        num_workers: number of workers available now; None for one per stage.
        cluster: current cluster; None for equal workers.
        replicas: replicas per stage, one number for all stages or one for each; None leaves them to the planner.

    Raises:
        PlanError: the run cannot have these numbers of replicas.
    """
    _check_replicas(plan, replicas)
    recompute = basis.request.recompute
    if isinstance(recompute, tuple) and len(recompute) != num_stages:  # flags by stage lose their meaning
        recompute = True if any(recompute) else None if None in recompute else False
    slack, points = basis.request.slack, basis.request.split_points
    request = dataclasses.replace(
        basis.request,
        recompute=recompute,
        # Slack by hop does not apply to another number of hops: the planner chooses it.
        slack=None if isinstance(slack, tuple) and len(slack) + 1 != num_stages else slack,
        replicas=replicas,
        changing=basis.request.changing if replicas is None else (),
        lanes=plan.schedule.wiring.lanes,
        replicated_buffers=basis.request.replicated_buffers and replicas != 1,
        num_stages=num_stages,
        num_workers=num_workers,
        minibatch_size=plan.minibatch_size,
        num_microbatches=plan.num_microbatches,
        split_points=points if num_stages == len(points) + 1 else (),
        partitioner=basis.request.partitioner if basis.profile is not None else "parameters",
        codec_choices=((), ()),  # the controller chooses codecs while a run trains
    )
    return dataclasses.replace(basis, request=request, cluster=cluster)


def _check_replicas(plan: Plan, replicas: int | tuple[int, ...] | None) -> None:
    """Raise PlanError if the run cannot have these numbers of replicas; see ``another``."""
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
    """Create the input of a plan of the same run for ``workers`` workers.

    Args:
        plan: plan of this run that has its mini-batches and lanes.
        request: planning request as configured, or as changed by a resize.
    """
    num_stages, num_workers, replicas = shape_of(request, workers)
    return another(basis, plan, num_stages=num_stages, num_workers=num_workers, replicas=replicas)


def first_plan(basis: PlanBasis, wanted: Planned, workers: int) -> Planned:
    """Return the first plan of an elastic run: ``wanted`` if ``workers`` suffice for it, else a plan for ``workers``.

    Raises:
        PlanError: no plan exists for so few workers.
    """
    if workers >= wanted.plan.schedule.num_workers:
        return wanted
    return later_plan(for_workers(basis, wanted.plan, basis.request, workers))


def later_plan(basis: PlanBasis, decision: Decision | None = None) -> Planned:
    """Make a plan for a running job like ``plan_for``, but raise PlanError instead of CaptureError.

    A PlanError does not end a run, which then continues with its old plan.

    Args:
        decision: partition and schedule to use; None lets the planner choose.

    Raises:
        PlanError: no such plan exists.
    """
    try:
        return plan_for(basis, decision)
    except CaptureError as error:  # the model cannot be partitioned like this
        raise PlanError(str(error)) from None


class MemoryLimits:
    """Memory limits of one run's workers, lowered for workers that ran out of memory.

    Args:
        basis: input of the run's plans.
        first: first plan of the run, which fixes its micro-batches.
    """

    def __init__(self, basis: PlanBasis, first: Plan) -> None:
        self._basis, self._first = basis, first
        self._most_bytes: dict[int, int] = {}

    def lighter(self, plan: Plan, ran_out: RanOut) -> Decision:
        """Find a plan for the same workers with less memory on the worker that ran out of it; record its new limit.

        Args:
            plan: plan under which the worker ran out of memory.
            ran_out: the worker, and the bytes that it held.

        Raises:
            PlanError: no such plan exists; the message has worker, bytes and fields.
        """
        profile, stages = self._basis.profile, plan.partition.num_stages
        if profile is None or not can_be_cut_again(plan):
            raise PlanError(
                "a plan that needs less can only be found for a model with a profile, in several stages with a worker "
                "each, under a synchronous schedule."
            )
        basis = another(self._basis, self._first, num_stages=stages, num_workers=stages)
        decision = lighter(basis.request, profile, plan, self.on(line_of(plan, None, ASSUMED_LINK)), *ran_out)
        limit = decision.cluster.devices[ran_out.worker].memory_bytes
        assert limit is not None, "lighter() has set it"
        self._most_bytes[ran_out.worker] = limit
        return decision

    def capped(self, planned: Planned) -> Planned:
        """Return the plan with smaller memory budgets for the workers that ran out of memory.

        The new budgets allow only as many micro-batches in flight as the plan itself uses. These workers ran out of
        memory within their old budgets, so the controller must not rely on the old ones.
        """
        budgets, prediction = list(planned.budgets), planned.plan.prediction
        assert prediction is not None, "of a plan made with a profile"
        for worker in [worker for worker in self._most_bytes if worker < len(budgets)]:  # there may be fewer by now
            stage, budget = prediction.stages[worker], budgets[worker]
            most = min(filter(None, (stage.in_flight, budget.most_in_flight)))
            budgets[worker] = dataclasses.replace(budget, most_in_flight=most)
        return dataclasses.replace(planned, budgets=tuple(budgets))

    def on(self, line: Cluster) -> Cluster:
        """Return the cluster; its device i gets the recorded memory limit of worker i, if there is one."""
        devices = (
            dataclasses.replace(device, memory_bytes=min(filter(None, (device.memory_bytes, self._most_bytes.get(at)))))
            if at in self._most_bytes
            else device
            for at, device in enumerate(line.devices)
        )
        return Cluster(tuple(devices), line.links)


class Offered(NamedTuple):
    """Memory that a device offers to one worker.

    Attributes:
        title: name of the device, for messages.
        memory_bytes: bytes that the worker may use; None if unknown.
    """

    title: str
    memory_bytes: int | None = None


class Fitted(NamedTuple):
    """Plan that fits the devices.

    Attributes:
        basis: input of all later plans, with the smallest memory limit.
        planned: the plan.
        members: item i is the index of the available worker that becomes worker i of the plan; None keeps their order.
        why: reason for a new plan; "" if the plan is unchanged.
    """

    basis: PlanBasis
    planned: Planned
    members: tuple[int, ...] | None = None
    why: str = ""


def within(basis: PlanBasis, planned: Planned, offered: Sequence[Offered]) -> Fitted:
    """Return ``planned`` if its workers have enough memory, else another plan that fits.

    Another plan splits mini-batches as before, so that results are bitwise equal.

    Args:
        planned: plan made from ``basis``; no worker runs it yet.
        offered: memory of each available worker's device; the plan may use fewer workers, or need more.

    Raises:
        PlanError: no plan fits; the message has the devices, the bytes and the field.
    """
    plan = planned.plan
    limits = [one.memory_bytes for one in offered if one.memory_bytes is not None]
    if not limits or plan.prediction is None:  # available or needed memory is unknown
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
            fitted = _on_each(basis, plan, offered)
            return Fitted(bounded, fitted, tuple(stage.devices[0] for stage in fitted.plan.partition.stages), why)
        request = dataclasses.replace(
            bounded.request, minibatch_size=plan.minibatch_size, num_microbatches=plan.num_microbatches
        )
        return Fitted(bounded, later_plan(dataclasses.replace(bounded, request=request)), None, why)
    except PlanError as error:
        raise PlanError(f"{why[0].upper()}{why[1:]}. No other plan fits there: {error}") from None


def _on_each(basis: PlanBasis, plan: Plan, offered: Sequence[Offered]) -> Planned:
    """Make a plan with as many stages as ``plan``, in which each worker has the memory limit of its own device."""
    devices = tuple(
        ComputeDevice(f"{one.title} of worker {worker}", memory_bytes=one.memory_bytes)
        for worker, one in enumerate(offered)
    )
    stages = plan.partition.num_stages
    line = Cluster(devices, (ASSUMED_LINK,))
    return later_plan(another(basis, plan, num_stages=stages, num_workers=len(devices), cluster=line))


def _one_each(plan: Plan) -> bool:
    return all(len(workers) == 1 for workers in plan.schedule.wiring.homes) and (
        plan.schedule.num_workers == plan.partition.num_stages
    )


def _needs(plan: Plan) -> list[int]:
    """Return the bytes that each worker needs."""
    assert plan.prediction is not None
    needs = [0] * plan.schedule.num_workers
    for stage, workers in zip(plan.prediction.stages, plan.schedule.wiring.homes, strict=True):
        for worker in workers:
            needs[worker] += stage.memory_bytes
    return needs
