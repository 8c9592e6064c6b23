"""Decisions about small chains on equal devices, where all cuts, numbers of micro-batches and schedules are compared.

``attempt`` makes the others: from one cut, a closed form and a solver, none of which knows of the others' candidates.
"""

from __future__ import annotations

import dataclasses
import itertools

from raypipe.ir.codec_cost import NO_CODEC
from raypipe.planner.microbatch import all_sizes
from raypipe.planner.partition.answer import cut_at
from raypipe.planner.tune.attempt import NOTHING, predicted
from raypipe.planner.tune.decision import Decision
from raypipe.planner.tune.pool import Question, all_cuts, best_of_all, some_fit
from raypipe.planner.tune.problem import Problem, limits_of
from raypipe.planner.tune.request import Request, microbatches
from raypipe.planner.tune.sizes import chosen_sizes
from raypipe.planner.tune.solvers import branches

__all__ = ["best_small", "completed"]


def best_small(problem: Problem, num_stages: int | None) -> Decision | None:
    """The best decision with so many stages, to be ``completed``; None where too many would compare, or none fits."""
    if num_stages is None or num_stages > len(problem.cluster.devices) or not _all_open(problem):
        return None
    request, graph = problem.request, problem.profile.graph
    cuts = all_cuts(graph, num_stages)
    if cuts is None:
        return None
    minibatch, size, count = microbatches(request, num_stages)
    sizes = [(count, size)]
    if request.num_microbatches is None:
        sizes = [(n, b) for n, b in all_sizes(minibatch) if request.takes(minibatch, b)]
    graphs = [(n, b, problem.at(b, graph)) for n, b in sizes]
    if request.schedule == "auto" and num_stages == 1:
        request = request.as_1f1b()
    found = best_of_all(_question(problem, request), cuts, graphs)
    if found is None:
        return None
    count, size = found.num_microbatches, found.microbatch_size
    limits = limits_of(found.request, num_stages, num_stages, count, size)
    at_size = next(graph for n, _, graph in graphs if n == count)
    return Decision(
        request=found.request,
        graph=at_size,
        cluster=problem.cluster,
        limits=limits,
        partition=cut_at(at_size, problem.cluster, limits, found.positions, "comparing all cuts by simulation"),
        minibatch_size=minibatch,
        microbatch_size=size,
        num_microbatches=count,
        choice=None,
        prediction=dataclasses.replace(NOTHING, step_s=found.step_s),
        of_all=True,
    )


def completed(problem: Problem, found: Decision) -> Decision:
    """A decision of ``best_small`` with its whole prediction, and what the closed form says of its micro-batches."""
    stages, graph = found.partition.num_stages, problem.profile.graph
    if problem.request.num_microbatches is None and problem.times is not None:
        cuts = all_cuts(graph, stages)
        assert cuts is not None, "best_small has looked at them"
        choice = chosen_sizes(
            problem,
            found.request,
            stages,
            lambda count, size: some_fit(_question(problem, found.request), cuts, count, size, graph),
        )
        choice = choice.simulated(found.num_microbatches, found.microbatch_size, found.prediction.step_s)
        found = dataclasses.replace(found, choice=choice)
    return dataclasses.replace(found, prediction=predicted(found, problem.links))


def _question(problem: Problem, request: Request) -> Question:
    caps = (request.memory_limit_bytes, problem.cluster.devices[0].memory_bytes)
    cap_bytes = min((cap for cap in caps if cap is not None), default=None)
    minibatch, _, _ = microbatches(request, 1)
    return Question(request, problem.cluster, problem.described, cap_bytes, minibatch)


def _all_open(problem: Problem) -> bool:
    """Whether every candidate can be made: of a chain, equal devices and links, one stage on each worker."""
    request, devices = problem.request, problem.cluster.devices
    # Where the number and the schedule are given there is only the cut to choose, as the solver does.
    several = problem.times is not None if request.num_microbatches is None else request.schedule == "auto"
    return (
        several
        and (problem.bounded or problem.described)
        and problem.searches
        and request.partitioner in ("auto", "prefix_sum")
        and not branches(problem.profile.graph)
        and request.kind.synchronous
        and not request.kind.several_stages
        and not request.replicated
        and request.codecs == (NO_CODEC, NO_CODEC)  # messages that are alike both ways
        and len({(device.speed, device.memory_bytes) for device in devices}) == 1
        and len({problem.cluster.link(a, b) for a, b in itertools.combinations(range(len(devices)), 2)}) <= 1
    )
