"""The plan of a run made again at the same number of stages, with what its stages were measured to take.

    plan in force, seconds of each stage while all was well --calibrated--> profile in which they take these seconds
    that profile, plan in force, seconds of each stage now  --speeds_of---> speed of each worker
    that profile, speeds                                    --cut_again---> another cut, and what its steps gain

That a stage became slower is put down to its worker, not to its layers: they take as long elsewhere as they did, and
what moves to the slow worker becomes slow. If in truth the layers are to blame, which do something else now than when
they were timed, the new cut takes too few of them away, and the next measurement the rest.

One stage on each worker, synchronous schedules: stages stay on their workers, in their order. The memory limits hold.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import NamedTuple

from raypipe.ir.cluster import Cluster, Device, Link
from raypipe.ir.graph import ModelGraph
from raypipe.ir.plan import Partition, Plan
from raypipe.ir.profile import Profile
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.partition.fit import fitting_partition
from raypipe.planner.partition.limits import Limits
from raypipe.planner.partition.prefix_sum import prefix_sum
from raypipe.planner.tune.attempt import NOTHING, predicted
from raypipe.planner.tune.decision import Decision
from raypipe.planner.tune.predict import seconds_of
from raypipe.planner.tune.problem import limits_of
from raypipe.planner.tune.recompute import is_open
from raypipe.planner.tune.request import Request
from raypipe.planner.tune.rescale import graph_at, seconds_at, slower, times_of
from raypipe.planner.tune.solvers import placed

__all__ = [
    "CutAgain", "calibrated", "cut_again", "cut_anew", "in_force", "line_of", "moved", "planned_seconds", "speeds_of",
]  # fmt: skip


class CutAgain(NamedTuple):
    """Another cut, for workers of these speeds.

    Attributes:
        before_s, after_s: seconds of one step as the workers are now: with the cut in force, and with this one.
    """

    decision: Decision
    speeds: tuple[float, ...]
    before_s: float
    after_s: float


def calibrated(profile: Profile, plan: Plan, busy_s: Sequence[float], speeds: Sequence[float]) -> Profile:
    """The profile at the plan's micro-batch size, so that its stages take what they were measured to.

    Args:
        busy_s: seconds of forward and backward of one micro-batch, by stage.
        speeds: of the workers at that time.
    """
    graph = _at(profile, plan.microbatch_size)
    nodes = list(graph.nodes)
    took = zip(plan.partition.stages, planned_seconds(profile, plan), busy_s, speeds, strict=True)
    for stage, planned_s, measured_s, speed in took:
        for at in plan.partition.nodes_of(stage):
            nodes[at] = slower(nodes[at], measured_s * speed / planned_s if planned_s > 0 else 1.0)
    found = dataclasses.replace(graph, nodes=tuple(nodes))
    total_s = math.fsum(node.busy_s for node in nodes)
    return dataclasses.replace(
        profile,
        graph=found,
        microbatch_size=plan.microbatch_size,
        seconds_by_size=((plan.microbatch_size, total_s),),
        small=None,
    )


def planned_seconds(profile: Profile, plan: Plan) -> tuple[float, ...]:
    """Seconds of forward and backward of one micro-batch on a worker of speed 1, by stage."""
    graph = _at(profile, plan.microbatch_size)
    again = plan.recompute or (False,) * plan.partition.num_stages
    return tuple(
        math.fsum(
            node.busy_s + again[stage.index] * node.forward_s
            for node in (graph.nodes[at] for at in plan.partition.nodes_of(stage))
        )
        for stage in plan.partition.stages
    )


def speeds_of(planned_s: Sequence[float], busy_s: Sequence[float]) -> tuple[float, ...]:
    """Of each worker: what its stage takes by the profile, over what it takes now; 1 where one of both is nothing.

    Args:
        planned_s: see ``planned_seconds``.
        busy_s: as in ``calibrated``.
    """
    return tuple(then / now if min(then, now) > 0 else 1.0 for then, now in zip(planned_s, busy_s, strict=True))


def moved(before: Sequence[float], after: Sequence[float]) -> float:
    """By how much workers' speeds have changed against each other: 0 where all became slower alike."""
    ratios = [now / then for then, now in zip(before, after, strict=True)]
    return max(ratios) / min(ratios) - 1.0


def line_of(plan: Plan, cluster: Cluster | None, link: Link) -> Cluster:
    """The plan's workers in the order of its stages, each with speed 1 where no cluster is described.

    Args:
        link: between workers where no cluster is described.
    """
    if cluster is None:
        return Cluster(tuple(Device(f"worker{s.index}") for s in plan.partition.stages), (link,))
    return Cluster(tuple(cluster.devices[s.devices[0]] for s in plan.partition.stages), cluster.links)


def in_force(request: Request, profile: Profile, plan: Plan, line: Cluster) -> Decision:
    """The plan as it is, on these workers: what others are compared with.

    Args:
        request: with a settled schedule, of a plan with the same stages and micro-batches.
        line: a device for each stage.
    """
    request = dataclasses.replace(request, recompute=plan.recompute or False)
    graph, limits = _asked(request, profile, plan)
    return _decision(request, graph, limits, plan, line, placed(plan.partition, graph, line, limits))


def cut_anew(request: Request, profile: Profile, plan: Plan, line: Cluster) -> Decision:
    """The cut whose slowest stage is quickest on these workers, which keep their order. Arguments as in ``in_force``.

    Where it is left to memory which stages run their forwards again, those of the plan do.

    Raises:
        PlanError: none keeps the memory limits.
    """
    if is_open(request):
        request = dataclasses.replace(request, recompute=plan.recompute or False)
    graph, limits = _asked(request, profile, plan)
    found = _decision(request, graph, limits, plan, line, fitting_partition(prefix_sum, graph, line, limits))
    return dataclasses.replace(found, prediction=predicted(found, "as in the plan before"))


def cut_again(
    request: Request, profile: Profile, plan: Plan, spec: ScheduleSpec, line: Cluster, speeds: Sequence[float]
) -> CutAgain:
    """Cut for workers of these speeds.

    Args:
        spec: the schedule that the run has now, and keeps.

    Raises:
        PlanError: no cut keeps the memory limits.
    """
    devices = (dataclasses.replace(d, speed=s) for d, s in zip(line.devices, speeds, strict=True))
    line = Cluster(tuple(devices), line.links)
    request = request.with_schedule(spec)
    now, found = (make(request, profile, plan, line) for make in (in_force, cut_anew))
    return CutAgain(found, tuple(speeds), seconds_of(now), seconds_of(found))


def _asked(request: Request, profile: Profile, plan: Plan) -> tuple[ModelGraph, Limits]:
    stages, count, size = plan.partition.num_stages, plan.num_microbatches, plan.microbatch_size
    limits = limits_of(request, stages, stages, count, size)
    return _at(profile, size), dataclasses.replace(limits, in_order=True)


def _decision(
    request: Request, graph: ModelGraph, limits: Limits, plan: Plan, line: Cluster, partition: Partition
) -> Decision:
    sizes = plan.minibatch_size, plan.microbatch_size, plan.num_microbatches
    return Decision(request, graph, line, limits, partition, *sizes, choice=None, prediction=NOTHING)


def _at(profile: Profile, samples: int) -> ModelGraph:
    return graph_at(profile, samples, seconds_at(profile, times_of(profile), samples), profile.graph)
