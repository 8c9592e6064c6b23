"""Choice of the plan for a profiled model, a cluster and a request.

    for each number of stages and kind of schedule that the request leaves open:
        cut  -->  slowest stage's t(b)  -->  micro-batches  -->  cut again at that size  -->  slack  -->  step
        if memory is short, repeat this with stages that recompute activations
    take the decision with the least step time; of equals the one with the fewest stages
    cut that one with all nodes, also in other orders of execution, and simulate it

A cut divides the model's nodes into stages. t(b) is the time of a micro-batch of b samples. Slack is the number of
additional micro-batches in flight on a hop. Settings of the user are kept. A number of stages at which nothing fits is
skipped. If nothing fits at any number, the error is that of the largest number, which has the most memory.

Two functions make a decision for one kind of schedule and one number of stages:

    attempt     for comparison: a coarse graph in the nodes' own order, and only the seconds of a step
    in_full     for the best decision: all nodes, other orders of execution too, and the whole prediction

k of kfkb is not searched here: request_schedule.py sets it, and the controller changes it during training.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster, ComputeDevice, Link
from raypipe.ir.graph import ModelGraph
from raypipe.ir.plan import Candidate, Partition, Plan
from raypipe.ir.profile import Profile
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.candidates import ScheduleQuery, candidates, quickest, resident
from raypipe.planner.cost.memory import MemoryModel
from raypipe.planner.cost.microbatch import MicrobatchChoice
from raypipe.planner.cost.tolerance import EVEN, as_quick
from raypipe.planner.partition.costs import Limits
from raypipe.planner.partition.fit import Solver, fits_within, refilled
from raypipe.planner.replay import equal_messages_s
from raypipe.planner.search.compare_shapes import best_shape, of_shape, shape_reason
from raypipe.planner.search.make_plan import build_plan
from raypipe.planner.search.predict import (
    NOTHING,
    costs_of,
    first_trainable_stage,
    hops_of,
    predicted,
    seconds_of,
    stages_of,
)
from raypipe.planner.search.problem import Decision, Problem, limits_of, step_s_of
from raypipe.planner.search.reasons import reasons_of, what_would_fit
from raypipe.planner.search.recompute import best_recompute, is_open, most_recompute, only_where_needed, settled
from raypipe.planner.search.replica_cuts import check_workers_of_replicas, cut_for
from raypipe.planner.search.request import AUTO_SLACK, DEFAULT_STAGES, Request, microbatches
from raypipe.planner.search.request_schedule import spec_of
from raypipe.planner.search.shape_search import ShapeError, ShapeSearch
from raypipe.planner.search.sizes import Sizes, chosen_sizes, sizes_of
from raypipe.planner.search.solvers import FEW_NODES, WORTH, branches, own_order_solver, solver_of
from raypipe.planner.search.workers import settled_workers, used_devices

ASSUMED_LINK = Link(bandwidth_bytes_s=1e9, latency_s=1e-4)
"""Link that is assumed if no cluster is described, about TCP on one machine. It never changes the schedule."""
FEW = 8
"""Largest number of stages for which every smaller number is tried too. Above it, the largest number, half of it, a
quarter of it and so on are tried.
"""


def decide(request: Request, profile: Profile, cluster: Cluster | None = None) -> Decision:
    """Choose everything that the request leaves open.

    Args:
        cluster: described devices and links; None assumes equal workers, joined by ``ASSUMED_LINK``.

    Raises:
        PlanError: nothing fits, or the model cannot be cut into so many stages; the message has the numbers.
    """
    places = len(profile.graph.cut_positions()) + 1
    request = settled_workers(request, places, len(cluster.devices) if cluster else None)
    cluster = cluster and used_devices(request, cluster)
    if request.replicated:
        _check_replicas(request, cluster)
    problem = Problem(request, profile, cluster or _assumed(request, profile.graph), described=cluster is not None)
    if request.replicas is None:
        return _of_any_shape(problem)
    if request.replicated and problem.searches and not request.kind.several_stages:
        return _of_given_shape(problem)
    decisions = _compared(problem)
    return _best_of(problem, decisions)


def _best_of(
    problem: Problem,
    decisions: Sequence[Decision],
    table: tuple[Candidate, ...] = (),
    chosen: Decision | None = None,
) -> Decision:
    """Complete the best decision.

    Args:
        table: compared shapes, which the result includes; empty if shapes were not compared.
        chosen: one of ``decisions``; None takes the one with the least step time, of equals that with fewest workers.
    """
    chosen = chosen or min(as_quick(decisions, step_s_of), key=lambda decision: sum(decision.partition.replicas))
    best = _completed(settled(problem, chosen.request.recomputes), chosen)
    fewer = only_where_needed(problem, best)
    if fewer is not best:
        best = dataclasses.replace(fewer, prediction=predicted(fewer, problem.links))
    reasons = reasons_of(problem, best, decisions)
    if table:
        reasons = (("replicas", shape_reason(best, table)), *reasons)
    return dataclasses.replace(best, reasons=reasons, candidates=table)


def _of_any_shape(problem: Problem) -> Decision:
    """Find the quickest plan of any shape: data parallelism, a pipeline, or a pipeline with replicas."""
    one_each = problem.asking(dataclasses.replace(problem.request, replicas=1))
    try:
        single, refusal = _compared(one_each), None
    except PlanError as error:
        single, refusal = [], error
    try:
        chosen, table = best_shape(problem, single)
    except PlanError as error:
        raise refusal or error from None
    if any(chosen is each for each in single):
        return _best_of(one_each, single, table, chosen)
    best = _replicated(problem, chosen)
    return dataclasses.replace(
        best, reasons=(("replicas", shape_reason(best, table)), *reasons_of(problem, best, [best])), candidates=table
    )


def _of_given_shape(problem: Problem) -> Decision:
    """Find the best decision for the number of workers that num_replicas gives each stage."""
    request = problem.request
    assert request.num_stages is not None, "num_replicas needs num_stages"
    try:
        best = _replicated(problem, of_shape(problem, request.replicas_of(request.num_stages)))
    except ShapeError:  # the solver's refusal has all the numbers
        plain = "1f1b" if request.schedule == "auto" else request.schedule
        return _best_of(problem, _compared(problem.asking(dataclasses.replace(request, schedule=plain))))
    return dataclasses.replace(best, reasons=reasons_of(problem, best, [best]))


def _replicated(problem: Problem, decision: Decision) -> Decision:
    """Drop recomputation on stages that fit without it, and make the whole prediction of a decision."""
    decision = only_where_needed(problem, dataclasses.replace(decision, prediction=predicted(decision, problem.links)))
    return dataclasses.replace(decision, prediction=predicted(decision, problem.links))


def _check_replicas(request: Request, cluster: Cluster | None) -> None:
    """Raise PlanError if there are too few workers for all replicas, or if num_stages is not set."""
    stages = request.requested_stages
    if stages is None:
        raise PlanError(f"num_replicas={request.replicas} needs a number of stages: set num_stages.")
    offered = request.num_workers if cluster is None else len(cluster.devices)
    check_workers_of_replicas(request, stages, offered, described=cluster is not None)


def _compared(problem: Problem) -> list[Decision]:
    """List the best decision for each number of stages that may be the best; PlanError if nothing fits at any."""
    decisions: list[Decision] = []
    counts, best_s = _stage_counts(problem), math.inf
    for count in reversed(counts):
        if count is not None and _at_least_s(problem, count) > best_s * (1 + EVEN):
            continue
        with contextlib.suppress(PlanError):
            decisions.append(best_recompute(problem, count, functools.partial(_quickest, num_stages=count)))
            best_s = min(best_s, decisions[-1].prediction.step_s)
    if decisions:
        return decisions
    if is_open(problem.request):
        problem = settled(problem, most_recompute(problem.request))
    try:  # another order of execution may fit though the nodes' own does not
        return [_best_kind(problem, counts[-1], in_full)]
    except PlanError as refusal:
        advice = what_would_fit(problem) if problem.bounded else ""
        if not advice:
            raise
        raise PlanError(f"{refusal} {advice}") from None


def _quickest(problem: Problem, num_stages: int | None) -> Decision:
    """Find the best decision with this number of stages (None: the solver's choice), for comparison with others."""
    if num_stages is None or not _by_simulation(problem, num_stages):
        return _best_kind(problem, num_stages, attempt)
    search, shape, rough = ShapeSearch(problem), (1,) * num_stages, None
    if not search.exact(shape):
        with contextlib.suppress(PlanError):
            rough = _best_kind(problem, num_stages, attempt)
    try:
        if rough is None:
            found = search.best(shape)
        else:
            found = search.best(shape, rough.prediction.step_s, _on_all_nodes(problem, rough))
    except ShapeError:  # the solver's refusal has all the numbers
        return rough or _best_kind(problem, num_stages, attempt)
    decision = _with_better_slack(problem, found) if found else rough
    assert decision is not None, "any step is shorter than forever"
    return decision


def _with_better_slack(problem: Problem, decision: Decision) -> Decision:
    """Try other slack with a decision's cut and micro-batches; return the fastest decision."""
    partition, best = decision.partition, decision
    if problem.request.schedule != "auto" or not problem.described or partition.num_stages == 1:
        return decision
    for kind in ("slack", "zb-h1"):
        request = decision.request
        if request.schedule != kind:
            request = dataclasses.replace(request, schedule=kind, slack=None)
        request = _with_slack(problem, request, decision.graph, decision.limits, partition)
        sizes = decision.num_microbatches, decision.microbatch_size
        limits = limits_of(request, partition.num_stages, partition.num_stages, *sizes)
        if problem.bounded and not fits_within(partition, decision.graph, problem.cluster, limits, limits.memory):
            continue
        other = dataclasses.replace(
            decision, request=request, limits=limits, partition=refilled(partition, decision.graph, limits.memory)
        )
        step_s = seconds_of(other)
        if step_s < step_s_of(best) * (1 - EVEN):
            best = dataclasses.replace(other, prediction=dataclasses.replace(NOTHING, step_s=step_s))
    return best


def _on_all_nodes(problem: Problem, rough: Decision) -> Decision | None:
    """Make a decision of ``attempt`` again, by a cut of all nodes, not of the coarse graph; None if nothing fits."""
    graph, request = problem.profile.graph, rough.request
    if problem.short is graph:
        return rough
    sizes = Sizes(rough.minibatch_size, rough.microbatch_size, rough.num_microbatches)
    try:
        return _settled(problem, request, rough.partition.num_stages, sizes, own_order_solver(request), graph)
    except PlanError:
        return None


def _by_simulation(problem: Problem, num_stages: int) -> bool:
    """Return True if plans with this number of stages are compared by ``ShapeSearch``.

    This is so for few nodes and stages, with one worker per stage and a synchronous schedule, on devices that are
    described or whose memory is limited, if the user has not chosen the cut.
    """
    request = problem.request
    return (
        num_stages <= min(FEW, len(problem.cluster.devices))
        and len(problem.profile.graph.nodes) <= FEW_NODES
        and (problem.bounded or problem.described)
        and problem.searches
        and request.partitioner in ("auto", "prefix_sum")
        and request.kind.synchronous
        and not request.kind.several_stages
        and not request.replicated
    )


def plan_of(decision: Decision, first_trainable: int | None = None, notes: Sequence[str] = ()) -> Plan:
    """Build the plan of a decision.

    Args:
        first_trainable: lowest stage with a backward, as found in the built stages; None takes it from the graph.
        notes: further notes for the plan.
    """
    expected = first_trainable_stage(decision.graph, decision.partition)
    first = expected if first_trainable is None else first_trainable
    as_expected = first == expected and not decision.request.ties  # which are known only after the cut
    prediction = decision.prediction if as_expected else predicted(decision, decision.prediction.links, first)
    sizes = decision.minibatch_size, decision.microbatch_size, decision.num_microbatches
    plan = build_plan(
        decision.request, decision.partition, sizes, first, notes, decision.reasons, notes_idle=not decision.choice
    )
    return dataclasses.replace(plan, prediction=prediction, candidates=decision.candidates)


def _assumed(request: Request, graph: ModelGraph) -> Cluster:
    """Build a cluster of equal workers: as many as offered, else as the requested stages need, else DEFAULT_STAGES."""
    stages = request.requested_stages
    wanted = stages and request.workers_in_all(stages)
    places = request.num_workers or wanted or min(DEFAULT_STAGES, len(graph.cut_positions()) + 1)
    return Cluster(tuple(ComputeDevice(f"worker{i}") for i in range(places)), (ASSUMED_LINK,))


def _stage_counts(problem: Problem) -> list[int | None]:
    """List the numbers of stages to try; None leaves the number to the solver."""
    request, devices = problem.request, len(problem.cluster.devices)
    if request.kind.several_stages:  # settled, and more stages than devices
        return [request.num_stages]
    wanted = request.requested_stages
    if wanted is not None and wanted > devices and not problem.described:
        raise PlanError(
            f"The plan has {wanted} stages, but scaling_config offers {devices} workers. "
            f"Set num_stages to at most {devices}, or raise num_workers."
        )
    if wanted is not None:
        return [wanted]
    most = min(devices, len(problem.profile.graph.cut_positions()) + 1)
    if request.num_workers is None and not problem.described:
        return [min(DEFAULT_STAGES, most)]
    if most <= FEW:
        return list(range(1, most + 1))
    return [*sorted({most >> i for i in range(most.bit_length())})]


def _at_least_s(problem: Problem, num_stages: int) -> float:
    """Compute a lower bound, in seconds, of the step of plans with this number of stages.

    The bound is the time of a step without bubbles and messages on the fastest devices. If the number of micro-batches
    is open, it is that of a single micro-batch with all samples.
    """
    request = problem.request
    minibatch, size, count = microbatches(request, num_stages)
    if request.num_microbatches is None and problem.times is not None:
        size, count = minibatch, 1
    fastest = sorted((device.speed for device in problem.cluster.devices), reverse=True)[:num_stages]
    # The last micro-batch may be smaller, but the simulator counts it in full.
    return problem.seconds(size) * count / math.fsum(fastest)


def _kinds(problem: Problem, num_stages: int | None) -> list[Request]:
    """List the request with each kind of schedule that may be the best, the preferred one first.

    Slack costs memory, so "auto" also tries 1F1B if memory is limited. On a described cluster zb-h1 is a candidate too.
    It splits backwards, whose cost is unknown before training: the run measures it, and switches back if too high.
    """
    request = problem.request
    if request.schedule != "auto" or num_stages == 1:
        return [request]
    slack = dataclasses.replace(request, schedule="slack", slack=AUTO_SLACK)
    plain = request.as_1f1b()
    split = dataclasses.replace(request, schedule="zb-h1", slack=None)
    return [slack, *([plain] if problem.bounded else []), *([split] if problem.described else [])]


def _best_kind(
    problem: Problem, num_stages: int | None, settle: Callable[[Problem, Request, int | None], Decision]
) -> Decision:
    """Make a decision for each kind of schedule with ``settle`` (``attempt`` or ``in_full``); return the best.

    Raises:
        PlanError: no kind fits; the error is that of the last kind tried, which needs the least memory.
    """
    decisions, refusal = [], None
    for request in _kinds(problem, num_stages):
        try:
            decisions.append(settle(problem, request, num_stages))
        except PlanError as error:
            refusal = error
    if not decisions:
        assert refusal is not None
        raise refusal
    return as_quick(decisions, step_s_of)[0]


def _completed(problem: Problem, decision: Decision) -> Decision:
    """Complete the best of the compared decisions: all nodes, other execution orders, and the whole prediction."""
    if decision.prediction.source:
        return decision
    if decision.of_all:
        decision = dataclasses.replace(decision, choice=_closed_form(problem, decision))
        decision = dataclasses.replace(decision, prediction=predicted(decision, problem.links))
        other = _in_another_order(problem, decision) if branches(problem.profile.graph) else None
        return other if other and step_s_of(other) < step_s_of(decision) * (1 - WORTH) else decision
    num_stages, settled = decision.limits.num_stages, decision.request
    same_kind = (request for request in _kinds(problem, num_stages) if request.schedule == settled.schedule)
    sizes = Sizes(decision.minibatch_size, decision.microbatch_size, decision.num_microbatches, decision.choice)
    return in_full(problem, next(same_kind, settled), num_stages, sizes)


def _in_another_order(problem: Problem, decision: Decision) -> Decision | None:
    """Make the decision again by a solver that may execute nodes in another order; None if no such cut fits."""
    sizes = Sizes(decision.minibatch_size, decision.microbatch_size, decision.num_microbatches, decision.choice)
    try:
        return in_full(problem, decision.request, decision.partition.num_stages, sizes)
    except PlanError:
        return None


def _closed_form(problem: Problem, decision: Decision) -> MicrobatchChoice | None:
    """Return the formula's choice of micro-batches, with the number that simulation found; None without a choice."""
    if problem.request.num_microbatches is not None or problem.times is None:
        return None
    try:
        choice = chosen_sizes(problem, decision.request, decision.partition.num_stages)
    except PlanError:  # no cut of the solver fits
        return None
    return choice.simulated(decision.num_microbatches, decision.microbatch_size, decision.prediction.step_s)


def attempt(problem: Problem, request: Request, num_stages: int | None) -> Decision:
    """Make a decision that is compared with others: a cut of the coarse graph, and the seconds of a step only.

    Args:
        request: the problem's request, with a chosen schedule.
        num_stages: number of stages; None leaves it to the solver.

    Raises:
        PlanError: no cut fits; the message names stage, action and numbers.
    """
    sizes = sizes_of(problem, request, num_stages)
    decision = _settled(problem, request, num_stages, sizes, own_order_solver(request), problem.short)
    return dataclasses.replace(decision, prediction=dataclasses.replace(NOTHING, step_s=seconds_of(decision)))


def in_full(problem: Problem, request: Request, num_stages: int | None, sizes: Sizes | None = None) -> Decision:
    """Make a decision from all nodes, by a solver that may try other execution orders, with the whole prediction.

    Args:
        sizes: mini-batch and micro-batches that ``attempt`` chose; None chooses them here.
    """
    graph = problem.profile.graph
    sizes = sizes or sizes_of(problem, request, num_stages)
    decision = _settled(problem, request, num_stages, sizes, solver_of(request, graph), graph)
    return dataclasses.replace(decision, prediction=predicted(decision, problem.links))


def _settled(
    problem: Problem, request: Request, num_stages: int | None, sizes: Sizes, solver: Solver, graph: ModelGraph
) -> Decision:
    """Cut the graph for these micro-batches, and choose the slack that suits the cut; make no prediction."""
    stages = num_stages or len(problem.cluster.devices)
    graph = problem.at(sizes.microbatch, graph)
    limits = limits_of(request, num_stages, stages, sizes.num_microbatches, sizes.microbatch)
    partition = cut_for(request, solver, graph, problem.cluster, limits)
    if problem.request.schedule == "auto" and partition.num_stages == 1:
        request = request.as_1f1b()
    elif problem.request.schedule == "auto" and problem.described:
        request = _with_slack(problem, request, graph, limits, partition)
        limits = limits_of(request, num_stages, partition.num_stages, sizes.num_microbatches, sizes.microbatch)
        partition = refilled(partition, graph, limits.memory)
    return Decision(
        request=request,
        graph=graph,
        cluster=problem.cluster,
        limits=limits,
        partition=partition,
        minibatch_size=sizes.minibatch,
        microbatch_size=sizes.microbatch,
        num_microbatches=sizes.num_microbatches,
        choice=sizes.choice,
        prediction=NOTHING,
    )


def _with_slack(problem: Problem, request: Request, graph: ModelGraph, limits: Limits, partition: Partition) -> Request:
    """Set the best slack that fits into memory, of the candidates of a run's controller; unchanged if none fits."""
    stages, hops = (
        stages_of(graph, partition, problem.cluster, limits),
        hops_of(partition, problem.cluster, limits.memory.microbatch_size, request.codecs),
    )
    costs, count = costs_of(stages, hops), limits.memory.spec.num_microbatches

    def memory(spec: ScheduleSpec) -> MemoryModel:
        return dataclasses.replace(limits.memory, spec=dataclasses.replace(spec, first_trainable=0))

    def fits(spec: ScheduleSpec) -> bool:
        return not problem.bounded or fits_within(partition, graph, problem.cluster, limits, memory(spec))

    @functools.cache
    def score(spec: ScheduleSpec) -> float:
        return equal_messages_s(spec, costs)

    query = ScheduleQuery(
        schedule=request.schedule,
        now=spec_of(request, partition.num_stages, count, first_trainable_stage(graph, partition)),
        busy_s=[stage.busy_s for stage in stages],
        round_trip_s=[2 * (hop.latency_s + hop.occupancy_s) for hop in hops],
        fits=fits,
        score=score,
        least_slack=AUTO_SLACK if request.schedule == "slack" else 1,
    )
    specs = list(candidates(query))
    if not specs:
        return request
    slack = quickest(specs, score, lambda spec: resident(memory(spec), partition.num_stages)).slack
    short = slack[0] if len(set(slack)) == 1 else slack or None
    return dataclasses.replace(request, slack=short)
