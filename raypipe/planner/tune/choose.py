"""From a profiled model, a cluster and what the user asked for to one plan.

    for each number of stages and kind of schedule that is open:
        cut  -->  slowest stage's t(b)  -->  micro-batches  -->  cut again at that size  -->  slack  -->  step
        where memory is short, the same with stages that run their forwards again
    take the least step time; of those that are as good, the one with the fewest stages
    cut that one with all nodes and in other orders of execution too, and simulate it

Whatever the user said is kept. A number of stages at which nothing fits is passed over; where none is left, the
refusal is that of the largest number, which has the most memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

from raypipe.errors import PlanError
from raypipe.ir.candidate import Candidate
from raypipe.ir.cluster import Cluster, Device, Link
from raypipe.ir.graph import ModelGraph
from raypipe.ir.plan import Plan
from raypipe.ir.profile import Profile
from raypipe.planner.schedule import schedule_of
from raypipe.planner.tolerance import EVEN, as_quick
from raypipe.planner.tune.advice import what_would_fit
from raypipe.planner.tune.attempt import attempt, in_full, predicted
from raypipe.planner.tune.compare_shapes import best_shape, of_shape, shape_reason
from raypipe.planner.tune.decision import Decision, step_s_of
from raypipe.planner.tune.explain import reasons_of
from raypipe.planner.tune.predict import first_trainable_stage
from raypipe.planner.tune.problem import Problem
from raypipe.planner.tune.recompute import best_recompute, is_open, most_recompute, only_where_needed, settled
from raypipe.planner.tune.replicas import check_shares, check_workers_of_replicas, share_notes
from raypipe.planner.tune.replicated import ShapeError
from raypipe.planner.tune.request import AUTO_SLACK, DEFAULT_STAGES, Request, microbatches
from raypipe.planner.tune.resolve import spec_of
from raypipe.planner.tune.sizes import Sizes
from raypipe.planner.tune.small import best_small, completed
from raypipe.planner.tune.weights import weight_policy
from raypipe.planner.tune.workers import idle_notes, settled_workers, single_notes, used_devices

__all__ = ["ASSUMED_LINK", "decide", "plan_of"]

ASSUMED_LINK = Link(bandwidth_bytes_s=1e9, latency_s=1e-4)
"""TCP on one machine, roughly; stands in where no cluster is described, and never changes the schedule."""
FEW = 8
"""Numbers of stages up to which every one is tried; beyond it, halves of the largest."""


def decide(request: Request, profile: Profile, cluster: Cluster | None = None) -> Decision:
    """Choose everything that the request leaves open.

    Args:
        cluster: what to plan for; None for equal workers with links that are assumed.

    Raises:
        PlanError: nothing fits, or there are fewer places than stages; names stage or field, and numbers.
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
    found = _compared(problem)
    return _best_of(problem, found)


def _best_of(problem: Problem, found: Sequence[Decision], table: tuple[Candidate, ...] = ()) -> Decision:
    """The least step, completed; of those that are as good the one with the fewest workers."""
    chosen = min(as_quick(found, step_s_of), key=lambda decision: sum(decision.partition.replicas))
    best = _completed(settled(problem, chosen.request.recomputes), chosen)
    fewer = only_where_needed(problem, best)
    if fewer is not best:
        best = dataclasses.replace(fewer, prediction=predicted(fewer, problem.links))
    reasons = reasons_of(problem, best, found)
    if table:
        reasons = (("replicas", shape_reason(best, table)), *reasons)
    return dataclasses.replace(best, reasons=reasons, candidates=table)


def _of_any_shape(problem: Problem) -> Decision:
    """Data parallelism, a pipeline, or anything between: whatever is the quickest."""
    one_each = problem.asking(dataclasses.replace(problem.request, replicas=1))
    try:
        single, refusal = _compared(one_each), None
    except PlanError as error:
        single, refusal = [], error
    try:
        chosen, table = best_shape(problem, single)
    except PlanError as error:
        raise refusal or error from None
    if chosen is None:
        return _best_of(one_each, single, table)
    best = _replicated(problem, chosen)
    return dataclasses.replace(
        best, reasons=(("replicas", shape_reason(best, table)), *reasons_of(problem, best, [best])), candidates=table
    )


def _of_given_shape(problem: Problem) -> Decision:
    """The best cut for the workers that num_replicas gives each stage."""
    request = problem.request
    assert request.num_stages is not None, "num_replicas needs num_stages"
    try:
        best = _replicated(problem, of_shape(problem, request.replicas_of(request.num_stages)))
    except ShapeError:  # the solver's refusal has all the numbers
        plain = "1f1b" if request.schedule == "auto" else request.schedule
        return _best_of(problem, _compared(problem.asking(dataclasses.replace(request, schedule=plain))))
    return dataclasses.replace(best, reasons=reasons_of(problem, best, [best]))


def _replicated(problem: Problem, found: Decision) -> Decision:
    """With no more recomputation than it takes, and the whole prediction."""
    found = only_where_needed(problem, dataclasses.replace(found, prediction=predicted(found, problem.links)))
    return dataclasses.replace(found, prediction=predicted(found, problem.links))


def _check_replicas(request: Request, cluster: Cluster | None) -> None:
    """Raises: PlanError where there are no workers for all replicas, or nobody says how many stages there are."""
    stages = request.asked_stages
    if stages is None:
        raise PlanError(f"num_replicas={request.replicas} needs num_stages beside it: say how many stages there are.")
    offered = request.num_workers if cluster is None else len(cluster.devices)
    check_workers_of_replicas(request, stages, offered, described=cluster is not None)


def _compared(problem: Problem) -> list[Decision]:
    """The best decision for each number of stages that fits and could be the best of all."""
    found: list[Decision] = []
    counts, best_s = _stage_counts(problem), math.inf
    for count in reversed(counts):
        if count is not None and _at_least_s(problem, count) > best_s * (1 + EVEN):
            continue
        with contextlib.suppress(PlanError):
            found.append(best_recompute(problem, count, functools.partial(_quickest, num_stages=count)))
            best_s = min(best_s, found[-1].prediction.step_s)
    if found:
        return found
    if is_open(problem.request):
        problem = settled(problem, most_recompute(problem.request))
    try:  # another order of execution may fit where the nodes' own does not
        return [_best_kind(problem, counts[-1], in_full)]
    except PlanError as refusal:
        advice = what_would_fit(problem) if problem.bounded else ""
        if not advice:
            raise
        raise PlanError(f"{refusal} {advice}") from None


def _quickest(problem: Problem, num_stages: int | None) -> Decision:
    """The best decision with so many stages, to be compared."""
    return best_small(problem, num_stages) or _best_kind(problem, num_stages, attempt)


def plan_of(decision: Decision, first_trainable: int | None = None, notes: Sequence[str] = ()) -> Plan:
    """The plan of a decision.

    Args:
        first_trainable: lowest stage with a backward, where the stages know better than the graph.
    """
    expected = first_trainable_stage(decision.graph, decision.partition)
    first = expected if first_trainable is None else first_trainable
    as_expected = first == expected and not decision.request.ties  # of which nobody knew before the cut
    sizes = decision.partition.num_stages, decision.num_microbatches
    idle = () if decision.choice or not decision.request.kind.synchronous else idle_notes(decision.request, *sizes)
    check_shares(decision.request, *sizes)
    spec = spec_of(decision.request, *sizes, first)
    return Plan(
        decision.partition,
        schedule_of(spec, sizes[0]),
        decision.minibatch_size,
        decision.microbatch_size,
        decision.num_microbatches,
        notes=(*notes, *single_notes(decision.request, sizes[0]), *idle, *share_notes(decision.request, *sizes)),
        reasons=decision.reasons,
        prediction=decision.prediction if as_expected else predicted(decision, decision.prediction.links, first),
        weights=weight_policy(decision.request, *sizes),
        spec=spec,
        candidates=decision.candidates,
        recompute=decision.request.recomputed(sizes[0], first),
    )


def _assumed(request: Request, graph: ModelGraph) -> Cluster:
    """Equal workers: as many as were offered, else one per stage."""
    stages = request.asked_stages
    wanted = stages and request.workers_in_all(stages)
    places = request.num_workers or wanted or min(DEFAULT_STAGES, len(graph.cut_positions()) + 1)
    return Cluster(tuple(Device(f"worker{i}") for i in range(places)), (ASSUMED_LINK,))


def _stage_counts(problem: Problem) -> list[int | None]:
    """Numbers of stages to try; None leaves it to the solver."""
    request, devices = problem.request, len(problem.cluster.devices)
    if request.kind.several_stages:  # settled, and more stages than devices
        return [request.num_stages]
    wanted = request.asked_stages
    if wanted is not None and wanted > devices and not problem.described:
        raise PlanError(
            f"The plan has {wanted} stages, but scaling_config offers {devices} workers. "
            f"Set num_stages to at most {devices}, or raise num_workers."
        )
    if wanted is not None or request.partitioner == "hierarchical":
        return [wanted]
    most = min(devices, len(problem.profile.graph.cut_positions()) + 1)
    if request.num_workers is None and not problem.described:
        return [min(DEFAULT_STAGES, most)]
    if most <= FEW:
        return list(range(1, most + 1))
    return [*sorted({most >> i for i in range(most.bit_length())})]


def _at_least_s(problem: Problem, num_stages: int) -> float:
    """A step that no plan with so many stages beats: all samples at once, shared out without a bubble."""
    request = problem.request
    minibatch, size, count = microbatches(request, num_stages)
    if request.num_microbatches is None and problem.times is not None:
        size, count = minibatch, 1
    fastest = sorted((device.speed for device in problem.cluster.devices), reverse=True)[:num_stages]
    # The last micro-batch may be smaller, and the simulator takes it as large as the others: so it counts in full.
    return problem.seconds(size) * count / math.fsum(fastest)


def _kinds(problem: Problem, num_stages: int | None) -> list[Request]:
    """The request for every kind of schedule that may be the best, the one that is preferred first.

    Slack costs memory, so that "auto" looks at 1F1B too where that counts. Of a described cluster zb-h1 is a candidate
    as well, as it is for the controller of a run. Nobody has measured here what splitting the backward costs; the run
    that does takes it back where that is too much.
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
    """The best decision with so many stages.

    Args:
        settle: ``attempt`` or ``in_full``.

    Raises:
        PlanError: none fits; the refusal of the last kind, which holds the least.
    """
    found, refusal = [], None
    for request in _kinds(problem, num_stages):
        try:
            found.append(settle(problem, request, num_stages))
        except PlanError as error:
            refusal = error
    if not found:
        assert refusal is not None
        raise refusal
    return as_quick(found, step_s_of)[0]


def _completed(problem: Problem, found: Decision) -> Decision:
    """The best of those compared, with all nodes, the solver asked in full and its whole prediction."""
    if found.prediction.source:
        return found
    if found.of_all:
        return completed(problem, found)
    num_stages, settled = found.limits.num_stages, found.request
    asked = (request for request in _kinds(problem, num_stages) if request.schedule == settled.schedule)
    sizes = Sizes(found.minibatch_size, found.microbatch_size, found.num_microbatches, found.choice)
    return in_full(problem, next(asked, settled), num_stages, sizes)
