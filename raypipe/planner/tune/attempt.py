"""One attempt: a settled schedule and number of stages, cut, filled with micro-batches and simulated."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster
from raypipe.ir.graph import ModelGraph
from raypipe.ir.plan import Partition
from raypipe.ir.prediction import Prediction
from raypipe.ir.profile import Profile
from raypipe.planner.memory import MemoryModel
from raypipe.planner.microbatch import Hop, MicrobatchChoice, StageTime, choose_microbatches, fit_stage_time
from raypipe.planner.partition.fit import Solver, fitting_partition, limit_bytes, memory_of, refilled, solve_within
from raypipe.planner.partition.limits import Limits
from raypipe.planner.tolerance import EVEN
from raypipe.planner.tune.coarse import coarse
from raypipe.planner.tune.decision import Decision
from raypipe.planner.tune.feasibility import memory_test
from raypipe.planner.tune.predict import first_trainable_stage, hops_of, predict, stages_of
from raypipe.planner.tune.request import Request, microbatches
from raypipe.planner.tune.rescale import graph_at, seconds_at, times_of
from raypipe.planner.tune.resolve import build_schedule, memory_model, spec_of
from raypipe.planner.tune.solvers import quick_cut, solver_of
from raypipe.planner.tune.workers import rounds_of

__all__ = ["NOTHING", "Problem", "attempt", "choice_of", "limits_of", "predicted"]

MOST_SLACK = 16


@dataclass(frozen=True)
class Problem:
    """What does not change between attempts.

    Attributes:
        described: the cluster is the user's, not assumed.
    """

    request: Request
    profile: Profile
    cluster: Cluster
    described: bool

    @property
    def searches(self) -> bool:
        """Whether the cut is left to a solver, so that a shorter graph will do to compare."""
        return not self.request.split_points and self.request.partitioner != "parameters"

    @functools.cached_property
    def short(self) -> ModelGraph:
        """The graph to compare with."""
        return coarse(self.profile.graph) if self.searches else self.profile.graph

    @functools.cached_property
    def times(self) -> StageTime | None:
        """t(b) of the whole model."""
        return times_of(self.profile)

    def seconds(self, samples: int) -> float:
        """Of one micro-batch of so many samples through the whole model."""
        return seconds_at(self.profile, self.times, samples)

    def at(self, samples: int, graph: ModelGraph) -> ModelGraph:
        """The profile's graph, or a coarser form of it, with seconds at this size."""
        return graph_at(self.profile, samples, self.seconds(samples), graph)

    @property
    def bounded(self) -> bool:
        """Whether memory can refuse anything."""
        caps = (self.request.memory_limit_bytes, *(device.memory_bytes for device in self.cluster.devices))
        return any(cap is not None for cap in caps)

    @property
    def links(self) -> str:
        if self.described:
            return "as described"
        link = self.cluster.links[0]
        return f"assumed ({link.bandwidth_bytes_s / 1e9:g} GB/s, {link.latency_s * 1e3:g} ms)"


def attempt(problem: Problem, request: Request, num_stages: int | None, *, quick: bool) -> Decision:
    """The decision for this request with so many stages; None leaves their number to the solver.

    Args:
        request: the problem's own, with a settled schedule.
        quick: as in ``solver_of``.

    Raises:
        PlanError: it does not fit; names stage, action and numbers.
    """
    solver = solver_of(request, problem.profile.graph, quick=quick)
    stages = num_stages or len(problem.cluster.devices)
    minibatch, size, count = microbatches(request, stages)
    times, choice = problem.times, None
    # The closed form counts a bubble per step, which an asynchronous schedule does not have.
    if request.num_microbatches is None and times is not None and request.kind.synchronous:
        quickest = solver_of(request, problem.profile.graph, quick=True)
        choice = choice_of(problem, request, num_stages, quickest, times, (minibatch, size, count))
        size, count = choice.microbatch_size, choice.num_microbatches
    graph = problem.at(size, problem.short if quick else problem.profile.graph)
    limits = limits_of(request, num_stages, stages, count, size)
    partition = fitting_partition(solver, graph, problem.cluster, limits)
    if problem.request.schedule == "auto" and partition.num_stages == 1:
        request = dataclasses.replace(request, schedule="1f1b", slack=None)
    elif problem.described and problem.request.schedule == "auto" and request.schedule == "slack":
        request = _with_slack(problem, request, graph, limits, partition)
        limits = limits_of(request, num_stages, partition.num_stages, count, size)
        partition = refilled(partition, graph, limits.memory)
    found = Decision(
        request=request,
        graph=graph,
        cluster=problem.cluster,
        limits=limits,
        partition=partition,
        minibatch_size=minibatch,
        microbatch_size=size,
        num_microbatches=count,
        choice=choice,
        prediction=NOTHING,
    )
    return dataclasses.replace(found, prediction=predicted(found, problem.links, compare=not quick))


def predicted(
    decision: Decision, links: str, first_trainable: int | None = None, *, compare: bool = True
) -> Prediction:
    """The prediction of a decision, with the curve that led to its micro-batches.

    Args:
        first_trainable: lowest stage with a backward; None follows the graph.
        compare: with 1F1B too, where workers hold one stage each.
    """
    stages, count = decision.partition.num_stages, decision.num_microbatches
    first = first_trainable_stage(decision.graph, decision.partition) if first_trainable is None else first_trainable
    schedule = build_schedule(decision.request, stages, count, first)
    plain = None
    # On as many workers, 1F1B would have fewer and larger stages: no question of this cut.
    if compare and schedule.kind != "1f1b" and stages > 1 and not decision.request.kind.several_stages:
        plain = build_schedule(
            dataclasses.replace(decision.request, schedule="1f1b", slack=None, group_size=None), stages, count, first
        )
    found = predict(
        decision.graph,
        decision.partition,
        decision.cluster,
        decision.limits,
        schedule,
        decision.minibatch_size,
        links=links,
        one_f_one_b=plain,
        check=compare,
    )
    choice = decision.choice
    if choice is None:
        return dataclasses.replace(found, decided_by="given" if decision.request.num_microbatches else "rule")
    return dataclasses.replace(
        found,
        curve=choice.curve,
        optimum=choice.optimum,
        low=choice.low,
        high=choice.high,
        epsilon=choice.epsilon,
        decided_by=choice.decided_by,
    )


NOTHING = Prediction(0.0, 0.0, 0.0, None, "", "", "", (), ())


def limits_of(request: Request, num_stages: int | None, stages: int, count: int, size: int) -> Limits:
    return Limits(
        num_stages=num_stages,
        memory=memory_model(request, stages, count, size),
        memory_limit_bytes=request.memory_limit_bytes,
        update_interval=count,  # synchronous: replicas reduce their gradients once per step
    )


def choice_of(
    problem: Problem,
    request: Request,
    num_stages: int | None,
    solver: Solver,
    times: StageTime,
    rule: tuple[int, int, int],
    fits: Callable[[int, int], bool] | None = None,
) -> MicrobatchChoice:
    """The number of micro-batches for the slowest stage of a cut that memory does not bind.

    Args:
        fits: (micro-batches, samples) -> whether memory holds them, where that is known.
    """
    minibatch, _, count = rule
    graph, cluster = problem.short, problem.cluster
    stages = num_stages or len(cluster.devices)
    size = problem.profile.microbatch_size
    free = Cluster(tuple(dataclasses.replace(d, memory_bytes=None) for d in cluster.devices), cluster.links)
    unbound = dataclasses.replace(limits_of(request, num_stages, stages, count, size), memory_limit_bytes=None)
    rough = solver(graph, free, unbound)
    # Stages do not all grow alike: which one is slowest, and by how much, depends on the size.
    time = fit_stage_time(
        {b: _slowest_s(problem.at(b, graph), rough, free, unbound, problem.at(size, graph)) for b, _ in times.points}
    )
    hops = hops_of(rough, cluster, 1)
    exposed = spec_of(request, rough.num_stages, count).kind == "1f1b"
    hop = Hop(max(h.latency_s for h in hops), max(h.occupancy_s for h in hops), exposed) if hops else None
    if problem.bounded and fits is None:
        some = quick_cut(request) if problem.searches else solver
        fits = memory_test(
            lambda limits: solve_within(some, graph, cluster, limits),
            lambda n, b: limits_of(request, num_stages, stages, n, b),
            stages,
            minibatch,
        )
    try:
        return choose_microbatches(
            time,
            minibatch,
            rough.num_stages,
            hop=hop,
            chunks=rough.num_stages // request.workers(rough.num_stages),
            rounds=rounds_of(request, rough.num_stages),
            in_rounds=request.schedule == "interleaved",
            fits=fits,
            least=request.least_microbatch,
            multiple=math.lcm(*rough.replicas),
        )
    except PlanError:
        # The solver's refusal of the smallest micro-batches names stage, action and bytes.
        least = min(request.least_microbatch, minibatch)
        fitting_partition(solver, graph, cluster, limits_of(request, num_stages, stages, -(-minibatch // least), least))
        raise


def _slowest_s(graph: ModelGraph, cut: Partition, cluster: Cluster, limits: Limits, cut_at: ModelGraph) -> float:
    """Seconds per micro-batch of the worker that takes longest, its stages together.

    Args:
        graph: with the seconds of some size.
        cut_at: with those that the cut was made for, and its periods.
    """
    order = cut.order or range(len(graph.nodes))
    busy_s: dict[tuple[int, ...], float] = {}
    for stage, found in zip(cut.stages, stages_of(cut_at, cut, cluster, limits), strict=True):
        here_s, then_s = (
            math.fsum(g.nodes[i].busy_s for i in order[stage.start : stage.stop]) for g in (graph, cut_at)
        )
        grown = here_s / then_s if then_s else 1.0
        busy_s[stage.devices] = busy_s.get(stage.devices, 0.0) + found.busy_s * grown
    return max(busy_s.values())


def _with_slack(problem: Problem, request: Request, graph: ModelGraph, limits: Limits, partition: Partition) -> Request:
    """The request with r = 1 + ceil(2 c / T) on every hop, as far as that fits and shortens the step."""
    hops = hops_of(partition, problem.cluster, limits.memory.microbatch_size)
    slowest_s = max(stage.busy_s for stage in stages_of(graph, partition, problem.cluster, limits))
    if not hops or not slowest_s:
        return request
    least = request.slack if isinstance(request.slack, int) else 1
    most = min(MOST_SLACK, limits.memory.spec.num_microbatches)
    wanted = [max(least, min(most, 1 + math.ceil(2 * (h.latency_s + h.occupancy_s) / slowest_s - 1e-9))) for h in hops]
    best, best_s = request, math.inf
    caps = sorted({least, *(max(least, max(wanted) >> i) for i in range(max(wanted).bit_length()))})
    if caps == [least] and request.slack == least:
        return request  # nothing to compare
    for cap in caps:
        capped = tuple(min(cap, r) for r in wanted)
        new = dataclasses.replace(request, slack=capped[0] if len(set(capped)) == 1 else capped)
        count = limits.memory.spec.num_microbatches
        memory = memory_model(new, partition.num_stages, count, limits.memory.microbatch_size)
        if cap > least and not _fits(partition, graph, problem.cluster, limits, memory):
            break
        first = first_trainable_stage(graph, partition)
        schedule = build_schedule(new, partition.num_stages, count, first)
        step_s = predict(
            graph,
            partition,
            problem.cluster,
            dataclasses.replace(limits, memory=memory),
            schedule,
            1,
            links="",
            check=False,
        ).step_s
        if step_s < best_s * (1 - EVEN):
            best, best_s = new, step_s
    return best


def _fits(partition: Partition, graph: ModelGraph, cluster: Cluster, limits: Limits, memory: MemoryModel) -> bool:
    for stage, need in zip(partition.stages, memory_of(graph, partition, memory), strict=True):
        caps = [cap for i in stage.devices if (cap := limit_bytes(cluster, limits, i)) is not None]
        if caps and need.total_bytes > min(caps):
            return False
    return True
