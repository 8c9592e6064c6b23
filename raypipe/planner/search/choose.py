"""Choice of the plan for a profiled model, a cluster and a request.

    for each shape (workers of every stage) that the request leaves open:
        for each setting of recomputation, if memory is limited:
            ShapeSearch.best  -->  order of devices, cut, micro-batches, schedule, slack
    take the decision with the least step time; of equally quick ones the one with the fewest workers
    try other slack, lag and other orders of execution for it, and predict it in full

A decision is a complete planned configuration (``Decision``). Slack r of a hop, the link between neighbouring stages,
lets the stage before it have r more micro-batches in flight than the stage after it. In 1F1B r is 1. The lag of a stage
is the number of micro-batches by which "zb-h1" defers the gradients of its weights.

Shapes and settings are skipped if a lower bound of their steps shows that they cannot be the best. Settings of the
user are kept. If nothing fits, the error names the stage that lacks memory at the largest number of stages, and the
least memory that would do.

k of kfkb is searched if kfkb is requested. "auto" leaves kfkb out: without a memory limit the best slack was as quick
in 149 of 150 drawn cases and 2 % slower in one, and it holds fewer micro-batches.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

from raypipe.errors import PlanError, ScheduleError
from raypipe.ir.cluster import Cluster, ComputeDevice, Link
from raypipe.ir.communication import CodecCost
from raypipe.ir.graph import ModelGraph
from raypipe.ir.plan import Candidate, CurvePoint, Plan
from raypipe.ir.profile import Profile
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.candidates import ScheduleQuery, candidates, quickest, resident
from raypipe.planner.cost.columns import columns_of
from raypipe.planner.cost.memory import MemoryModel
from raypipe.planner.cost.microbatch import MicrobatchChoice, divisors, explain_number
from raypipe.planner.cost.tolerance import EVEN, as_quick
from raypipe.planner.partition.fit import fits_within, refilled
from raypipe.planner.replay import equal_messages_s
from raypipe.planner.search.compare_shapes import always_shown, row_of, shape_reason, shapes, table_of
from raypipe.planner.search.cut_costs import Shape
from raypipe.planner.search.cut_search import ShapeError, ShapeSearch
from raypipe.planner.search.make_plan import build_plan
from raypipe.planner.search.other_orders import in_another_order, only_in_another_order
from raypipe.planner.search.predict import (
    costs_of,
    first_trainable_stage,
    predicted,
    seconds_of,
    stages_and_hops,
)
from raypipe.planner.search.problem import Decision, Problem, limits_of, step_s_of
from raypipe.planner.search.reasons import codec_reason, reasons_of
from raypipe.planner.search.recompute import best_recompute, is_open, only_where_needed
from raypipe.planner.search.refusal import refusal
from raypipe.planner.search.replica_cuts import check_workers_of_replicas
from raypipe.planner.search.request import AUTO_SLACK, DEFAULT_STAGES, Request
from raypipe.planner.search.schedule_settings import spec_of
from raypipe.planner.search.workers import settled_workers, used_devices

Codecs = tuple[CodecCost, CodecCost]
"""Codecs of activations and of gradients."""
ASSUMED_LINK = Link(bandwidth_bytes_s=1e9, latency_s=1e-4)
"""Link that is assumed if no cluster is described, about TCP on one machine. It never changes the schedule."""
FEW = 8
"""Largest number of stages for which every smaller number is tried too. Above it, the largest number, half of it, a
quarter of it and so on are tried.
"""
NEAR = 1.1
"""Other slack and other orders of execution are tried for plans whose step is at most this many times the shortest."""
MOST_NEAR = 8
"""Largest number of plans for which other slack and other orders of execution are tried."""
MOST_WORK = 8_000
"""Largest product of stages and micro-batches of a step that is added to the curve."""


def decide(request: Request, profile: Profile, cluster: Cluster | None = None) -> Decision:
    """Plan a run: choose everything that the request leaves open, and predict a step.

    Codecs are chosen for described clusters only, from those that the request permits. Plans are made without a choice
    and with the smallest messages; all pairs of a forward and a backward codec are tried on these two, and a plan is
    made for the best pair. Of pairs within half a percent of it, that is the one which sends the most bytes. If this
    gains less than ``min_gain``, the codecs of ``request.codecs`` are kept.

    Args:
        cluster: described devices and links; None assumes equal workers, joined by ``ASSUMED_LINK``.

    Raises:
        PlanError: no plan fits, or the model has too few places to cut for the requested stages; names the numbers.
    """
    if cluster is None or not any(request.codec_choices):
        return _decide(request, profile, cluster)

    @functools.cache  # the best pair may be one of the first two
    def decided(codecs: Codecs) -> Decision:
        return _decide(dataclasses.replace(request, codecs=codecs), profile, cluster)

    forward, backward = ((own, *more) for own, more in zip(request.codecs, request.codec_choices, strict=True))
    pairs = sorted(itertools.product(forward, backward), key=_sent_share, reverse=True)
    plain, smallest = decided(request.codecs), decided(pairs[-1])

    def least_s(codecs: Codecs) -> float:
        """Predict the step with another pair of codecs for the better of the two plans."""
        requests = (dataclasses.replace(each.request, codecs=codecs) for each in (plain, smallest))
        return min(
            seconds_of(dataclasses.replace(each, request=other))
            for each, other in zip((plain, smallest), requests, strict=True)
        )

    found = [plain, smallest, decided(as_quick(pairs, least_s)[0])]
    best = as_quick(sorted(found, key=lambda each: -_sent_share(each.request.codecs)), step_s_of)[0]
    if step_s_of(best) * (1 + request.min_gain) > step_s_of(plain):
        best = plain
    return dataclasses.replace(best, reasons=(*best.reasons, ("choice of codecs", codec_reason(best, found))))


def _sent_share(codecs: Codecs) -> float:
    """Return the bytes that a pair of codecs sends, over those of one direction before encoding."""
    return sum(1 / codec.ratio for codec in codecs)


def _decide(request: Request, profile: Profile, cluster: Cluster | None) -> Decision:
    """Plan a run with the codecs of the request."""
    places = len(profile.graph.cut_positions()) + 1
    request = settled_workers(request, places, len(cluster.devices) if cluster else None)
    cluster = cluster and used_devices(request, cluster)
    if request.replicated:
        _check_replicas(request, cluster)
    problem = Problem(request, profile, cluster or _assumed(request, profile.graph), described=cluster is not None)
    single = [request.replicas_of(count) for count in _stage_counts(problem)]
    decisions, refused, bound_s = _compared(problem, single)
    decisions.sort(key=step_s_of)
    near = [each for each in decisions if step_s_of(each) <= step_s_of(decisions[0]) * NEAR][:MOST_NEAR]
    improved = {id(each): in_another_order(problem, _with_better_slack(problem, each)) for each in near}
    decisions = [improved.get(id(each), each) for each in decisions]
    best = min(
        as_quick(decisions, step_s_of),
        key=lambda each: (sum(each.partition.replicas), max(each.partition.replicas), step_s_of(each)),
    )
    if is_open(request):
        best = only_where_needed(problem, dataclasses.replace(best, prediction=predicted(best, problem.links)))
        best = dataclasses.replace(best, prediction=predicted(best, problem.links))
    best = dataclasses.replace(best, choice=_choice_of(problem, best))
    best = dataclasses.replace(best, prediction=predicted(best, problem.links))
    looked_at = [each for each in decisions if each.partition.replicas in single]
    reasons = reasons_of(problem, best, looked_at, min(bound_s, step_s_of(best)))
    table: tuple[Candidate, ...] = ()
    if request.replicas is None:
        table = table_of([*refused, *map(row_of, decisions)], best.partition.replicas)
        reasons = (("replicas", shape_reason(best, table)), *reasons)
    return dataclasses.replace(best, reasons=reasons, candidates=table)


_DEADLOCK = (
    "schedule={schedule!r} with {workers} workers by stage: workers would wait for each other. Give every stage as "
    "many workers, or set another schedule."
)


def _compared(problem: Problem, single: Sequence[Shape]) -> tuple[list[Decision], list[Candidate], float]:
    """Find the best decision for each shape that may be the best.

    Args:
        single: one shape for each number of stages to try: with the requested replicas, else with one worker per stage.

    Returns:
        the decisions, table rows of the shapes for which no plan is possible, and a lower bound of the seconds of a
        step over all shapes.

    Raises:
        PlanError: nothing fits.
    """
    request, decisions, refused, bound_s = problem.request, list[Decision](), list[Candidate](), math.inf
    shown: set[Shape] = set()
    several: list[Shape] = []
    search_of = functools.lru_cache(maxsize=None)(lambda recompute: ShapeSearch(_recomputing(problem, recompute)))
    if request.replicas is None:
        most = len(problem.profile.graph.cut_positions()) + 1
        several = shapes(len(problem.cluster.devices), most, request.lanes, request.requested_stages)
        shown = always_shown(search_of(request.recomputes), several)
    best_s, errors = math.inf, list[PlanError]()
    for shape in (*single, *several):
        least_s = search_of(request.recomputes).at_least_s(shape)
        bound_s = min(bound_s, least_s)
        if shape not in shown and least_s > best_s * (1 + EVEN):
            continue
        below_s = math.inf if shape in shown or shape in single else best_s * (1 + 2 * EVEN)
        try:
            decision = best_recompute(problem, shape, search_of, below_s)
        except ShapeError as error:
            refused.append(Candidate(shape, refused=str(error)))
        except PlanError as error:
            errors.append(error)
        except ScheduleError:
            errors.append(PlanError(_DEADLOCK.format(schedule=request.schedule, workers="-".join(map(str, shape)))))
        else:
            if decision is not None:
                decisions.append(decision)
                best_s = min(best_s, step_s_of(decision))
    if not decisions:
        if errors:
            raise errors[-1]
        other = only_in_another_order(problem, single)
        if other is None:
            raise refusal(problem, single)
        decisions.append(other)
    return decisions, refused, bound_s


def _recomputing(problem: Problem, recompute: bool | tuple[bool, ...]) -> Problem:
    return problem.asking(dataclasses.replace(problem.request, recompute=recompute))


def _with_better_slack(problem: Problem, decision: Decision) -> Decision:
    """Return the quickest of a decision and its variants with other slack; cut and micro-batches stay the same.

    Only an open schedule on described links, with several stages and no replicas, has such variants.
    """
    partition, best = decision.partition, decision
    if problem.request.schedule != "auto" or not problem.described or len(partition.stages) == 1:
        return decision
    if max(partition.replicas) > 1:
        return decision
    for kind in ("slack", "zb-h1"):
        request = decision.request
        if request.schedule != kind:
            request = dataclasses.replace(request, schedule=kind, slack=None, lag=())
        request = _with_slack(problem, dataclasses.replace(decision, request=request))
        sizes = decision.num_microbatches, decision.microbatch_size
        limits = limits_of(request, partition.num_stages, *sizes)
        if problem.bounded and not fits_within(partition, decision.graph, problem.cluster, limits, limits.memory):
            continue
        other = dataclasses.replace(
            decision, request=request, limits=limits, partition=refilled(partition, decision.graph, limits.memory)
        )
        step_s = seconds_of(other)
        if step_s < step_s_of(best) * (1 - EVEN):
            best = other.taking(step_s)
    return best


def _choice_of(problem: Problem, decision: Decision) -> MicrobatchChoice | None:
    """Explain the number of micro-batches of a plan by predicted steps of the same cut and schedule with other numbers.

    Returns None if the number was given, the schedule is asynchronous, or only one micro-batch size was measured.
    """
    request, stages, minibatch = decision.request, decision.partition.num_stages, decision.minibatch_size
    if problem.request.num_microbatches is not None or problem.times is None or not request.kind.synchronous:
        return None
    curve = [CurvePoint(decision.num_microbatches, decision.microbatch_size, step_s_of(decision))]
    for count in divisors(minibatch):
        size, most = minibatch // count, max(decision.partition.replicas)
        if count == decision.num_microbatches or count < most or count * stages > MOST_WORK:
            continue
        other = _with_number(problem, decision, count, size)
        refused = "" if request.takes(minibatch, size) else "model"
        if not refused and problem.bounded:
            fits = fits_within(other.partition, other.graph, other.cluster, other.limits, other.limits.memory)
            refused = "" if fits else "memory"
        curve.append(CurvePoint(count, size, seconds_of(other), refused))
    curve.sort(key=lambda point: point.num_microbatches)
    return explain_number(curve, decision.num_microbatches, minibatch, problem.times)


def _with_number(problem: Problem, decision: Decision, count: int, size: int) -> Decision:
    """Return the decision with ``count`` micro-batches of ``size`` samples, and the same cut and schedule."""
    graph, stages = problem.at(size), decision.partition.num_stages
    then_s, now_s = columns_of(decision.graph).busy_s, columns_of(graph).busy_s
    moved = []
    for stage in decision.partition.stages:
        nodes = list(decision.partition.nodes_of(stage))
        grown = float(now_s[nodes].sum()) / (float(then_s[nodes].sum()) or 1.0)
        moved.append(dataclasses.replace(stage, period_s=stage.period_s * grown))
    return dataclasses.replace(
        decision,
        graph=graph,
        limits=limits_of(decision.request, stages, count, size),
        partition=dataclasses.replace(decision.partition, stages=tuple(moved)),
        num_microbatches=count,
        microbatch_size=size,
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
    """Build a cluster of equal workers: the offered number, else as many as the request needs, else DEFAULT_STAGES."""
    stages = request.requested_stages
    wanted = stages and request.workers_in_all(stages)
    places = request.num_workers or wanted or min(DEFAULT_STAGES, len(graph.cut_positions()) + 1)
    return Cluster(tuple(ComputeDevice(f"worker{i}") for i in range(places)), (ASSUMED_LINK,))


def _stage_counts(problem: Problem) -> list[int]:
    """List the numbers of stages to try, the largest first."""
    request, devices = problem.request, len(problem.cluster.devices)
    wanted = request.requested_stages
    if wanted is not None and request.kind.several_stages:  # settled, and more stages than devices
        return [wanted]
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
        return list(range(most, 0, -1))
    return [most >> i for i in range(most.bit_length())]


def _check_replicas(request: Request, cluster: Cluster | None) -> None:
    """Raise PlanError if there are too few workers for all replicas, or if num_stages is not set."""
    stages = request.requested_stages
    if stages is None:
        raise PlanError(f"num_replicas={request.replicas} needs a number of stages: set num_stages.")
    offered = request.num_workers if cluster is None else len(cluster.devices)
    check_workers_of_replicas(request, stages, offered, described=cluster is not None)


def _with_slack(problem: Problem, decision: Decision) -> Request:
    """Return the decision's request with the best slack and lag that fit into memory, or unchanged if none fit.

    The slacks that a run's controller would try are compared (``candidates``), and ``quickest`` selects one.
    """
    request, graph, limits, partition = decision.request, decision.graph, decision.limits, decision.partition
    stages, hops = stages_and_hops(decision)
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
    best = quickest(specs, score, lambda spec: resident(memory(spec), partition.num_stages))
    short = best.slack[0] if len(set(best.slack)) == 1 else best.slack or None
    return dataclasses.replace(request, slack=short, lag=best.lag)
