"""The best plan of a small chain for one number of stages, out of all that could be taken.

    candidates    cuts x numbers of micro-batches x schedules: the same whatever the memory and the links
    those that fit, the ones with the least lower bound first
    simulated, until the next lower bound is not below the best step

More memory only adds to those that fit, and a faster link delays no message, so neither makes the best step longer.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe.ir.cluster import Cluster
from raypipe.ir.graph import ModelGraph
from raypipe.planner.columns import columns_of, workspace_bytes
from raypipe.planner.memory import MemoryModel
from raypipe.planner.search.replay import equal_messages_s
from raypipe.planner.tune.pool_bounds import CutCosts, cut_costs, least_s, stage_bytes
from raypipe.planner.tune.request import AUTO_SLACK, Request
from raypipe.planner.tune.resolve import memory_model, spec_of

__all__ = ["Found", "Question", "all_cuts", "best_of_all", "some_fit"]

Ints = NDArray[np.int64]
MOST_CUTS = 1000
"""Cuts into one number of stages up to which all of them are looked at."""
MOST_PLACES = 64
"""To cut, in the same sense: of each graph with more nodes a copy for every micro-batch size would take too long."""
EVEN = 0.004
"""Steps this near to each other are equal; with that of ``choose`` it stays below one per cent."""
MOST_SLACKS = (2, 3, 4, 6, 8, 12, 16)
"""Largest r of the candidates with slack, on the hop that carries most; the others get their share of it."""


class Question(NamedTuple):
    """What does not depend on the number of stages.

    Attributes:
        cluster: of equal devices; stage s is put on device s.
        described: the cluster is the user's, so that "auto" fits slack to its links.
        cap_bytes: that each worker may use; None for no limit.
    """

    request: Request
    cluster: Cluster
    described: bool
    cap_bytes: int | None
    minibatch_size: int


class Found(NamedTuple):
    """The best candidate.

    Attributes:
        positions: where its stages begin in the graph, and the end.
        request: with the schedule settled.
    """

    step_s: float
    positions: tuple[int, ...]
    request: Request
    num_microbatches: int
    microbatch_size: int


class _Batch(NamedTuple):
    """The candidates of one micro-batch size and one way of scheduling: those cuts that fit.

    Attributes:
        number: of micro-batches.
        cuts: which.
        bounds_s: steps that none of them beats.
        requests: one for each cut.
        held: mini-batches that all stages hold together; one for each cut.
    """

    number: int
    size: int
    costs: CutCosts
    cuts: Ints
    bounds_s: NDArray[np.float64]
    requests: Sequence[Request]
    held: Sequence[float]


def all_cuts(graph: ModelGraph, num_stages: int) -> Ints | None:
    """Every cut as indices into the places of the graph, ends included, shape (cuts, stages + 1); None if too many."""
    inner = len(columns_of(graph).places) - 2
    if inner > MOST_PLACES or not 0 < math.comb(inner, num_stages - 1) <= MOST_CUTS:
        return None
    cuts = [(0, *chosen, inner + 1) for chosen in itertools.combinations(range(1, inner + 1), num_stages - 1)]
    return np.array(cuts, dtype=np.int64)


def best_of_all(asked: Question, cuts: Ints, graphs: Sequence[tuple[int, int, ModelGraph]]) -> Found | None:
    """The quickest candidate that fits; of equals one that divides the mini-batch and holds least. None if none fits.

    Args:
        cuts: from ``all_cuts``.
        graphs: (micro-batches, samples, graph with the seconds of such a micro-batch).
    """
    again = asked.request.recomputed(cuts.shape[1] - 1)
    sized = [(count, size, cut_costs(graph, asked.cluster, cuts, size, again)) for count, size, graph in graphs]
    # As if all micro-batches could be in flight at once, and nobody waited for more than the inputs' gradients.
    bounds_s = [float(least_s(costs, count, np.array(count), splits=True).min()) for count, _, costs in sized]
    simulated: list[tuple[float, _Batch, int]] = []
    best_s = math.inf
    for i in np.argsort(bounds_s, kind="stable").tolist():
        if bounds_s[i] >= best_s:
            break
        count, size, costs = sized[i]
        batches = [_batch(costs, each, count, size, asked.cap_bytes) for each in _requests(asked, costs, count)]
        simulated += _simulated(batches, asked.cap_bytes, best_s)
        best_s = min((step_s for step_s, _, _ in simulated), default=math.inf)
    if not simulated:
        return None
    step_s, batch, at = min(
        (one for one in simulated if one[0] <= best_s * (1 + EVEN)),
        key=lambda one: (asked.minibatch_size % one[1].number > 0, one[1].held[one[2]], one[0]),
    )
    positions = tuple(batch.costs.positions[batch.cuts[at]].tolist())
    return Found(step_s, positions, batch.requests[at], batch.number, batch.size)


def some_fit(asked: Question, cuts: Ints, count: int, size: int, graph: ModelGraph) -> bool:
    """Whether any cut fits, with the schedule that holds least of those that the request leaves open."""
    costs = cut_costs(graph, asked.cluster, cuts, size, asked.request.recomputed(cuts.shape[1] - 1))
    batches = (_batch(costs, each, count, size, asked.cap_bytes) for each in _requests(asked, costs, count))
    return any(_fits(batch, at, asked.cap_bytes) for batch in batches for at in range(len(batch.cuts)))


def _requests(asked: Question, costs: CutCosts, count: int) -> Iterator[list[Request]]:
    """Ways of scheduling; for each a request by cut."""
    request = asked.request
    cuts, hops = costs.crossing_bytes.shape
    if request.schedule != "auto":
        yield [request] * cuts
        return
    plain = request.as_1f1b()
    yield [plain] * cuts
    if not hops:
        return
    if not asked.described:
        yield [dataclasses.replace(request, schedule="slack", slack=AUTO_SLACK)] * cuts
        return
    yield [dataclasses.replace(request, schedule="zb-h1", slack=None)] * cuts
    most = np.maximum(1, costs.crossing_bytes.max(axis=1, keepdims=True))
    for largest in MOST_SLACKS:
        if largest > max(count, AUTO_SLACK):
            return
        slack = (1 + np.ceil((largest - 1) * costs.crossing_bytes / most)).astype(int).tolist()
        for kind in ("slack", "zb-h1"):
            made: dict[tuple[int, ...], Request] = {}
            for row in map(tuple, slack):
                if row not in made:
                    short = row[0] if len(set(row)) == 1 else row
                    made[row] = dataclasses.replace(request, schedule=kind, slack=short)
            yield [made[tuple(row)] for row in slack]


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
    """(seconds, batch, which of it) of all candidates that could be the best."""
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
    """Whether a candidate fits with its workspace too, which does not add up and has not been counted so far."""
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
    """In flight and activation sets by stage, and the message slots."""
    depths = range(stages, 0, -1)
    return [model.in_flight(d) for d in depths], [model.activation_sets(d) for d in depths], [model.message_slots]
