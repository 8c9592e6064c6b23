"""One attempt: a settled kind of schedule and a number of stages, filled with micro-batches, cut, and its slack found.

attempt     to compare: a coarse graph in the nodes' own order, and the seconds of a step
in_full     for the best: all nodes, other orders of execution too, and the whole prediction
"""

from __future__ import annotations

import dataclasses
import functools

from raypipe.ir.graph import ModelGraph
from raypipe.ir.plan import Partition
from raypipe.ir.prediction import Prediction
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.memory import MemoryModel
from raypipe.planner.partition.fit import Solver, fits_within, refilled
from raypipe.planner.partition.limits import Limits
from raypipe.planner.search.candidates import Question, candidates, quickest, resident
from raypipe.planner.search.replay import equal_messages_s
from raypipe.planner.tune.decision import Decision
from raypipe.planner.tune.predict import costs_of, first_trainable_stage, hops_of, predict, seconds_of, stages_of
from raypipe.planner.tune.problem import Problem, limits_of
from raypipe.planner.tune.replicas import cut_for
from raypipe.planner.tune.request import AUTO_SLACK, Request
from raypipe.planner.tune.resolve import build_schedule, spec_of
from raypipe.planner.tune.sizes import Sizes, sizes_of
from raypipe.planner.tune.solvers import own_order_solver, solver_of

__all__ = ["NOTHING", "attempt", "in_full", "predicted"]

NOTHING = Prediction(0.0, 0.0, 0.0, None, "", "", "", (), ())
"""Of a decision that is only compared: of it, no more than the seconds of a step are known."""


def attempt(problem: Problem, request: Request, num_stages: int | None) -> Decision:
    """The decision for this request with so many stages, to be compared with others.

    Args:
        request: the problem's own, with a settled schedule.
        num_stages: None leaves their number to the solver.

    Raises:
        PlanError: it does not fit; names stage, action and numbers.
    """
    sizes = sizes_of(problem, request, num_stages)
    found = _settled(problem, request, num_stages, sizes, own_order_solver(request), problem.short)
    return dataclasses.replace(found, prediction=dataclasses.replace(NOTHING, step_s=seconds_of(found)))


def in_full(problem: Problem, request: Request, num_stages: int | None, sizes: Sizes | None = None) -> Decision:
    """The same with all nodes, the solver that may look at other orders of execution, and its prediction.

    Args:
        sizes: of the attempt; None where there was none.
    """
    graph = problem.profile.graph
    sizes = sizes or sizes_of(problem, request, num_stages)
    found = _settled(problem, request, num_stages, sizes, solver_of(request, graph), graph)
    return dataclasses.replace(found, prediction=predicted(found, problem.links))


def _settled(
    problem: Problem, request: Request, num_stages: int | None, sizes: Sizes, solver: Solver, graph: ModelGraph
) -> Decision:
    """Cut for the micro-batches, and the slack that this cut is best run with; without a prediction."""
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
    """The request with the best of the candidates that fit, which are those of a run's controller."""
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

    asked = Question(
        schedule=request.schedule,
        now=spec_of(request, partition.num_stages, count, first_trainable_stage(graph, partition)),
        busy_s=[stage.busy_s for stage in stages],
        round_trip_s=[2 * (hop.latency_s + hop.occupancy_s) for hop in hops],
        fits=fits,
        score=score,
        least_slack=AUTO_SLACK if request.schedule == "slack" else 1,
    )
    found = list(candidates(asked))
    if not found:
        return request
    slack = quickest(found, score, lambda spec: resident(memory(spec), partition.num_stages)).slack
    short = slack[0] if len(set(slack)) == 1 else slack or None
    return dataclasses.replace(request, slack=short)


def predicted(decision: Decision, links: str, first_trainable: int | None = None) -> Prediction:
    """The prediction of a decision, with the curve that led to its micro-batches.

    Args:
        links: where the cluster's links come from, in words.
        first_trainable: lowest stage with a backward; None follows the graph.
    """
    request, stages, count = decision.request, decision.partition.num_stages, decision.num_microbatches
    first = first_trainable_stage(decision.graph, decision.partition) if first_trainable is None else first_trainable
    schedule = build_schedule(request, stages, count, first)
    plain = None
    # On as many workers, 1F1B would have fewer and larger stages: no question of this cut.
    if schedule.kind != "1f1b" and stages > 1 and not request.kind.several_stages:
        plain = build_schedule(request.as_1f1b(), stages, count, first)
    found = predict(decision, schedule, links, one_f_one_b=plain)
    choice = decision.choice
    if choice is None:
        return dataclasses.replace(found, decided_by="given" if request.num_microbatches else "rule")
    return dataclasses.replace(
        found,
        curve=choice.curve,
        optimum=choice.optimum,
        low=choice.low,
        high=choice.high,
        epsilon=choice.epsilon,
        decided_by=choice.decided_by,
    )
