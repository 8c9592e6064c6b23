"""Exhaustive search for the best plan of a small chain on equal devices, with one number of stages.

    1. list candidates: cuts x numbers of micro-batches x schedules; the list does not depend on memory or links
    2. drop those that do not fit into memory, and sort the rest by a lower bound of the step
    3. simulate them in this order, until the next lower bound is not below the best step

More memory only adds candidates that fit, and a faster link delays no message, so neither makes the best step longer.
For larger problems ``choose.attempt`` makes the decision, with a closed form for the micro-batches and a solver for the
cut; it gives no such guarantee.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe.ir.communication import NO_CODEC
from raypipe.ir.graph import ModelGraph
from raypipe.planner.cost.columns import columns_of, workspace_bytes
from raypipe.planner.cost.memory import MemoryModel
from raypipe.planner.cost.microbatch import all_sizes
from raypipe.planner.cost.tolerance import EVEN
from raypipe.planner.partition.answer import cut_at
from raypipe.planner.replay import equal_messages_s
from raypipe.planner.search.cut_costs import CutCosts, cut_costs, least_s, stage_bytes
from raypipe.planner.search.predict import NOTHING, predicted
from raypipe.planner.search.problem import Decision, Problem, limits_of
from raypipe.planner.search.request import AUTO_SLACK, Request, microbatches
from raypipe.planner.search.request_schedule import memory_model, spec_of
from raypipe.planner.search.sizes import chosen_sizes
from raypipe.planner.search.solvers import branches

Ints = NDArray[np.int64]
MOST_CUTS = 1000
"""Most cuts into one number of stages that are enumerated."""
MOST_PLACES = 64
"""Most places to cut for which all cuts are tried. Longer graphs would be copied for every micro-batch size."""
MOST_SLACKS = (2, 3, 4, 6, 8, 12, 16)
"""Values of r tried on the hop that carries the most bytes; other hops get r in proportion to their bytes."""


class _Batch(NamedTuple):
    """Candidates of one micro-batch size and one kind of schedule: the cuts that fit.

    Attributes:
        number, size: number of micro-batches, and samples of each.
        costs: costs of all cuts, also of those that do not fit.
        cuts: indices of the cuts that fit; the next three have one value for each of them.
        bounds_s: lower bound of the step, in seconds.
        requests: request with the schedule.
        held: activations and messages that all stages hold together, in mini-batches.
    """

    number: int
    size: int
    costs: CutCosts
    cuts: Ints
    bounds_s: NDArray[np.float64]
    requests: Sequence[Request]
    held: Sequence[float]


def all_cuts(graph: ModelGraph, num_stages: int) -> Ints | None:
    """List every cut as indices into the graph's places, ends included, shape (cuts, stages + 1); None if too many."""
    inner = len(columns_of(graph).places) - 2
    if inner > MOST_PLACES or not 0 < math.comb(inner, num_stages - 1) <= MOST_CUTS:
        return None
    cuts = [(0, *chosen, inner + 1) for chosen in itertools.combinations(range(1, inner + 1), num_stages - 1)]
    return np.array(cuts, dtype=np.int64)


def _best_of_all(
    problem: Problem, cuts: Ints, graphs: Sequence[tuple[int, int, ModelGraph]]
) -> tuple[float, _Batch, int] | None:
    """Find the quickest candidate that fits.

    Of equally quick candidates, one whose micro-batches divide the mini-batch is preferred, then the one that holds
    least.

    Args:
        cuts: cuts from ``all_cuts``.
        graphs: (micro-batches, samples of each, graph with the seconds of such a micro-batch).

    Returns:
        (seconds, batch, index of the candidate within the batch); None if nothing fits.
    """
    again = problem.request.recomputed(cuts.shape[1] - 1)
    sized = [(count, size, cut_costs(graph, problem.cluster, cuts, size, again)) for count, size, graph in graphs]
    cap_bytes, (minibatch, _, _) = _cap_bytes(problem), microbatches(problem.request, 1)
    # A bound as if all micro-batches could be in flight at once, and stages waited for input gradients only.
    bounds_s = [float(least_s(costs, count, np.array(count), splits=True).min()) for count, _, costs in sized]
    simulated: list[tuple[float, _Batch, int]] = []
    best_s = math.inf
    for i in np.argsort(bounds_s, kind="stable").tolist():
        if bounds_s[i] >= best_s:
            break
        count, size, costs = sized[i]
        batches = [_batch(costs, each, count, size, cap_bytes) for each in _requests(problem, costs, count)]
        simulated += _simulated(batches, cap_bytes, best_s)
        best_s = min((step_s for step_s, _, _ in simulated), default=math.inf)
    if not simulated:
        return None
    return min(
        (one for one in simulated if one[0] <= best_s * (1 + EVEN)),
        key=lambda one: (minibatch % one[1].number > 0, one[1].held[one[2]], one[0]),
    )


def _some_fit(problem: Problem, cuts: Ints, count: int, size: int) -> bool:
    """Return True if any cut fits, with any schedule that the request allows."""
    cap_bytes, again = _cap_bytes(problem), problem.request.recomputed(cuts.shape[1] - 1)
    costs = cut_costs(problem.profile.graph, problem.cluster, cuts, size, again)
    batches = (_batch(costs, each, count, size, cap_bytes) for each in _requests(problem, costs, count))
    return any(_fits(batch, at, cap_bytes) for batch in batches for at in range(len(batch.cuts)))


def _requests(problem: Problem, costs: CutCosts, count: int) -> Iterator[list[Request]]:
    """Yield the schedules to try with ``count`` micro-batches, each as a list with one request per cut.

    For a described cluster these include zb-h1, and slack in proportion to the bytes of each hop.
    """
    request = problem.request
    cuts, hops = costs.crossing_bytes.shape
    if request.schedule != "auto":
        yield [request] * cuts
        return
    plain = request.as_1f1b()
    yield [plain] * cuts
    if not hops:
        return
    if not problem.described:
        yield [dataclasses.replace(request, schedule="slack", slack=AUTO_SLACK)] * cuts
        return
    yield [dataclasses.replace(request, schedule="zb-h1", slack=None)] * cuts
    most = np.maximum(1, costs.crossing_bytes.max(axis=1, keepdims=True))
    for largest in MOST_SLACKS:
        if largest > max(count, AUTO_SLACK):
            return
        slack = (1 + np.ceil((largest - 1) * costs.crossing_bytes / most)).astype(int).tolist()
        for kind in ("slack", "zb-h1"):
            by_slack: dict[tuple[int, ...], Request] = {}
            for row in map(tuple, slack):
                if row not in by_slack:
                    short = row[0] if len(set(row)) == 1 else row
                    by_slack[row] = dataclasses.replace(request, schedule=kind, slack=short)
            yield [by_slack[tuple(row)] for row in slack]


def _batch(costs: CutCosts, requests: list[Request], count: int, size: int, cap_bytes: int | None) -> _Batch:
    stages = costs.forward_s.shape[1]
    different = {id(request): request for request in requests}
    models = {key: memory_model(request, stages, count, size) for key, request in different.items()}
    rows = {key: _held(model, stages) for key, model in models.items()}
    # One row stands for all cuts.
    of_cuts = list(rows) if len(rows) == 1 else list(map(id, requests))
    numbers = tuple(np.array([rows[key][part] for key in of_cuts]) for part in range(3))
    fitting = np.arange(len(requests))
    if cap_bytes is not None:
        total = stage_bytes(costs, next(iter(models.values())), *numbers)
        fitting = np.flatnonzero((total <= cap_bytes).all(axis=1))
    splits = requests[0].kind.splits_backward
    bounds_s = least_s(costs, count, numbers[0], splits=splits)[fitting]
    held = np.broadcast_to((numbers[1].sum(axis=1) + numbers[2][:, 0]) / count, len(requests))
    return _Batch(
        count, size, costs, fitting, bounds_s, [requests[i] for i in fitting.tolist()], held[fitting].tolist()
    )


def _simulated(batches: Sequence[_Batch], cap_bytes: int | None, best_s: float) -> Iterator[tuple[float, _Batch, int]]:
    """Simulate candidates that could be better than ``best_s``, and yield (seconds, batch, index within the batch)."""
    which = np.concatenate([np.full(len(batch.cuts), i) for i, batch in enumerate(batches)])
    within = np.concatenate([np.arange(len(batch.cuts)) for batch in batches])
    bounds_s = np.concatenate([batch.bounds_s for batch in batches])
    for i in np.argsort(bounds_s, kind="stable").tolist():
        if bounds_s[i] >= best_s:
            return
        batch, at = batches[which[i]], int(within[i])
        cut, stages = int(batch.cuts[at]), batch.costs.forward_s.shape[1]
        if not _fits(batch, at, cap_bytes):
            continue
        spec = spec_of(batch.requests[at], stages, batch.number, int(batch.costs.first[cut]))
        step_s = equal_messages_s(spec, batch.costs.of(cut))
        best_s = min(best_s, step_s)
        yield step_s, batch, at


def _fits(batch: _Batch, at: int, cap_bytes: int | None) -> bool:
    """Return True if a candidate of a batch fits with its workspace, which ``_batch`` has not counted."""
    graph = batch.costs.graph
    if cap_bytes is None or not columns_of(graph).workspace.shape[1]:
        return True
    cut = int(batch.cuts[at])
    places = batch.costs.positions[cut].tolist()
    stages = len(places) - 1
    model = memory_model(batch.requests[at], stages, batch.number, batch.size)
    total = stage_bytes(batch.costs, model, *map(np.array, _held(model, stages)))[cut]
    return all(
        nbytes + workspace_bytes(graph, range(start, stop), batch.size) <= cap_bytes
        for nbytes, start, stop in zip(total.tolist(), places, places[1:], strict=False)
    )


def _held(model: MemoryModel, stages: int) -> tuple[list[int], list[int], list[int]]:
    """Return micro-batches in flight by stage, activation sets by stage, and message slots (a list of one)."""
    depths = range(stages, 0, -1)
    return [model.in_flight(d) for d in depths], [model.activation_sets(d) for d in depths], [model.message_slots]


def best_small(problem: Problem, num_stages: int | None) -> Decision | None:
    """Find the best decision with this number of stages; ``completed`` adds the rest of its prediction.

    Returns:
        the decision; None if there are too many candidates to enumerate, or nothing fits.
    """
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
    best = _best_of_all(problem.asking(request), cuts, graphs)
    if best is None:
        return None
    step_s, batch, at = best
    request, count, size = batch.requests[at], batch.number, batch.size
    limits = limits_of(request, num_stages, num_stages, count, size)
    positions = batch.costs.positions[batch.cuts[at]].tolist()
    return Decision(
        request=request,
        graph=batch.costs.graph,
        cluster=problem.cluster,
        limits=limits,
        partition=cut_at(batch.costs.graph, problem.cluster, limits, positions, "comparing all cuts by simulation"),
        minibatch_size=minibatch,
        microbatch_size=size,
        num_microbatches=count,
        choice=None,
        prediction=dataclasses.replace(NOTHING, step_s=step_s),
        of_all=True,
    )


def completed(problem: Problem, decision: Decision) -> Decision:
    """Complete a decision of ``best_small`` with its whole prediction, and with the closed form's choice to compare."""
    stages, graph = decision.partition.num_stages, problem.profile.graph
    if problem.request.num_microbatches is None and problem.times is not None:
        cuts = all_cuts(graph, stages)
        assert cuts is not None, "best_small has looked at them"
        fits = functools.partial(_some_fit, problem.asking(decision.request), cuts)
        choice = chosen_sizes(problem, decision.request, stages, fits)
        choice = choice.simulated(decision.num_microbatches, decision.microbatch_size, decision.prediction.step_s)
        decision = dataclasses.replace(decision, choice=choice)
    return dataclasses.replace(decision, prediction=predicted(decision, problem.links))


def _cap_bytes(problem: Problem) -> int | None:
    """Return the memory limit of each worker in bytes; None for no limit."""
    caps = (problem.request.memory_limit_bytes, problem.cluster.devices[0].memory_bytes)
    return min((cap for cap in caps if cap is not None), default=None)


def _all_open(problem: Problem) -> bool:
    """Return True if every candidate can be enumerated: a chain, equal devices and links, one stage on each worker."""
    request, devices = problem.request, problem.cluster.devices
    # With a given number and schedule only the cut is open, which the solver finds.
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
        and request.codecs == (NO_CODEC, NO_CODEC)  # messages cost the same both ways
        and len({(device.speed, device.memory_bytes) for device in devices}) == 1
        and len({problem.cluster.link(a, b) for a, b in itertools.combinations(range(len(devices)), 2)}) <= 1
    )
