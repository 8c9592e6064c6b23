"""The best plan of one shape: stages with so many workers each, out of all cuts and numbers of micro-batches.

    cuts x micro-batches x 1f1b or slack      a bound for each; those that fit, the least bound first
    simulated, until the next bound is not below the best step
    between places that were left out of a long graph: neighbours of the best cut
    a graph with branches: the antichain method with as many workers per stage, where it is faster

A step is simulated as that of every other plan, with what replicas take to sum their gradients. Neither candidates nor
their order depend on links, on memory or on further workers, so that more of these make no answer worse.
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

from raypipe.errors import PlanError
from raypipe.ir.cluster import Cluster, Device, Link
from raypipe.ir.graph import ModelGraph
from raypipe.ir.plan_table import human_bytes
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.columns import columns_of
from raypipe.planner.microbatch import all_sizes
from raypipe.planner.partition.answer import Piece, make_answer
from raypipe.planner.partition.chain import split_before
from raypipe.planner.partition.fit import fits_within, refilled
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower
from raypipe.planner.simulate.serial import Costs, program_makespan_s
from raypipe.planner.tables import Program, build
from raypipe.planner.tune.attempt import NOTHING
from raypipe.planner.tune.decision import Decision
from raypipe.planner.tune.pool_bounds import CutCosts, cut_costs, stage_bytes
from raypipe.planner.tune.problem import Problem, limits_of
from raypipe.planner.tune.replicas import groups_of, slowest_link, summing_s
from raypipe.planner.tune.request import AUTO_SLACK, Request, microbatches
from raypipe.planner.tune.resolve import memory_model, spec_of
from raypipe.planner.tune.shapes import Shape, cuts_into

__all__ = ["ShapeError", "ShapeSearch"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MOST_EACH = 16
"""Micro-batches per worker up to which numbers of them are compared."""
MOST_ROUNDS = 20
"""Of neighbours, each better than the one before."""


class ShapeError(PlanError):
    """No plan of a shape can be; the message is a few words for a table."""


class _Sized(NamedTuple):
    """All cuts of one shape with one number of micro-batches.

    Attributes:
        costs: of the cuts, at speed 1 and without links.
        forward_s, backward_s, reduce_s: by cut and stage, on the workers of the shape.
        latency_s: by hop; shape (hops,).
        occupancy_s: by cut and hop.
        bounds_s: a step that no simulation of the cut beats.
    """

    number: int
    size: int
    costs: CutCosts
    forward_s: Floats
    backward_s: Floats
    reduce_s: Floats
    latency_s: Floats
    occupancy_s: Floats
    bounds_s: Floats

    def of(self, cut: int) -> Costs:
        """The simulator's input for one cut."""
        latency_s, occupancy_s = tuple(self.latency_s.tolist()), tuple(self.occupancy_s[cut].tolist())
        reduce_s = tuple(self.reduce_s[cut].tolist())
        return Costs(
            forward_s=tuple(self.forward_s[cut].tolist()),
            backward_s=tuple(self.backward_s[cut].tolist()),
            forward_latency_s=latency_s,
            backward_latency_s=latency_s,
            forward_occupancy_s=occupancy_s,
            backward_occupancy_s=occupancy_s,
            reduce_s=reduce_s if any(reduce_s) else (),
        )


class _Best(NamedTuple):
    step_s: float
    request: Request
    sized: _Sized
    cut: int


class ShapeSearch:
    """What shapes have in common: cuts, and their costs at every size.

    Args:
        problem: with a request whose replicas are open or given, and whose recomputation is settled.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._cuts: dict[int, Ints | None] = {}
        self._costs: dict[tuple[int, int], CutCosts] = {}
        self._graphs: dict[int, ModelGraph] = {}
        changing = problem.request.changing
        self._changing = np.append(0, np.cumsum([i in changing for i in range(len(problem.profile.graph.nodes))]))

    def at_least_s(self, shape: Shape) -> float:
        """A step that no plan of this shape beats, found without looking at cuts."""
        request = self._request(shape)
        speed = math.fsum(count * speed for count, speed in zip(shape, self._speeds(shape), strict=True))
        return min(self._problem.seconds(size) * count for count, size in _sizes(self._problem, request)) / speed

    def bound_s(self, shape: Shape) -> float:
        """A larger one, by the cuts.

        Raises:
            ShapeError: no plan of this shape can be, whatever it costs.
        """
        return min(float(each.bounds_s.min()) for each in self._all_sized(shape))

    def best(self, shape: Shape, below_s: float = math.inf) -> Decision | None:
        """The best plan of this shape, to be predicted; None where none has a step below so many seconds.

        Raises:
            ShapeError: it cannot be, whatever it costs.
        """
        request, sized = self._request(shape), self._all_sized(shape)
        cuts = self._cuts_into(len(shape))
        assert cuts is not None
        whole = self._whole(shape, cuts, sized[0].costs)
        found = self._least(shape, sized, whole, below_s)
        if found is None:
            if math.isinf(below_s) or not any(self._fitting(request, each, whole).any() for each in sized):
                raise ShapeError(self._unfit(request, sized[-1]))
            return None
        return self._decision(self._moved(shape, found))

    def _all_sized(self, shape: Shape) -> list[_Sized]:
        """Every number of micro-batches."""
        cuts = self._cuts_into(len(shape))
        if cuts is None:
            raise ShapeError(f"the model cannot be cut into {len(shape)} stages")
        sizes = [size for size in _sizes(self._problem, self._request(shape)) if size[0] >= max(shape)]
        if not sizes:
            raise ShapeError(f"a step has fewer micro-batches than stage {shape.index(max(shape))} has workers")
        return [self._sized(shape, cuts, *size) for size in sizes]

    def _request(self, shape: Shape) -> Request:
        return dataclasses.replace(self._problem.request, replicas=shape, num_stages=len(shape))

    def _kinds(self, shape: Shape) -> list[Request]:
        """The request with the schedules that are open, the one that holds less first."""
        request = self._request(shape)
        if request.schedule != "auto":
            return [request]
        plain = dataclasses.replace(request, schedule="1f1b", slack=None)
        return [plain] if len(shape) == 1 else [plain, dataclasses.replace(request, schedule="slack", slack=AUTO_SLACK)]

    def _speeds(self, shape: Shape) -> list[float]:
        """By stage, of the slowest of its workers."""
        devices = self._problem.cluster.devices
        return [min(devices[i].speed for i in group) for group in groups_of(shape)]

    def _cuts_into(self, num_stages: int) -> Ints | None:
        if num_stages not in self._cuts:
            graph, points = self._problem.profile.graph, self._problem.request.split_points
            if points:
                inner = np.searchsorted(columns_of(graph).places, split_before(graph, points).cuts)
                self._cuts[num_stages] = np.array([[0, *inner.tolist(), len(columns_of(graph).places) - 1]])
            else:
                self._cuts[num_stages] = cuts_into(graph, num_stages)
        return self._cuts[num_stages]

    def _costs_of(self, cuts: Ints, size: int) -> CutCosts:
        stages = cuts.shape[1] - 1
        known = cuts is self._cuts.get(stages)
        if known and (stages, size) in self._costs:
            return self._costs[stages, size]
        if size not in self._graphs:
            self._graphs[size] = self._problem.at(size, self._problem.profile.graph)
        plain = Cluster((Device(),) * stages, (Link(),))
        found = cut_costs(self._graphs[size], plain, cuts, size, self._problem.request.recomputed(stages))
        if known:
            self._costs[stages, size] = found
        return found

    def _sized(self, shape: Shape, cuts: Ints, count: int, size: int) -> _Sized:
        costs, cluster = self._costs_of(cuts, size), self._problem.cluster
        lanes, groups, speed = self._request(shape).num_lanes(len(shape)), groups_of(shape), self._speeds(shape)
        forward_s, backward_s = costs.forward_s / speed, costs.backward_s / speed
        summed = [
            summing_s(
                costs.held_bytes[1][:, stage].astype(np.float64), len(group), lanes, slowest_link(cluster, group, group)
            )
            for stage, group in enumerate(groups)
        ]
        links = [slowest_link(cluster, a, b) for a, b in itertools.pairwise(groups)]
        bandwidth = np.array([link.bandwidth_bytes_s for link in links])
        latency_s = np.array([link.latency_s for link in links])
        occupancy_s = costs.crossing_bytes * size / bandwidth
        reduce_s = np.stack(summed, axis=1)
        bounds_s = _bounds_s(
            np.array(shape), count, costs.first, forward_s, backward_s, reduce_s, occupancy_s + latency_s
        )
        return _Sized(count, size, costs, forward_s, backward_s, reduce_s, latency_s, occupancy_s, bounds_s)

    def _whole(self, shape: Shape, cuts: Ints, costs: CutCosts) -> NDArray[np.bool_]:
        """Which cuts leave what changes buffers to stages of one worker."""
        counts = self._changing[costs.positions]
        changes: NDArray[np.bool_] = (counts[:, 1:] - counts[:, :-1]) > 0
        kept: NDArray[np.bool_] = np.logical_not((changes & (np.array(shape) > 1)).any(axis=1))
        if not kept.any():
            raise ShapeError("a stage with several workers would change buffers in every forward")
        return kept

    def _caps(self, request: Request) -> list[float]:
        """Bytes that each stage's workers offer, all of them; infinite for no limit."""
        devices, limit = self._problem.cluster.devices, request.memory_limit_bytes
        own = [
            [cap for i in group if (cap := devices[i].memory_bytes) is not None]
            for group in groups_of(request.replicas_of(request.num_stages or 1))
        ]
        return [min([math.inf if limit is None else limit, *caps]) for caps in own]

    def _total_bytes(self, request: Request, sized: _Sized) -> Ints:
        """By cut and stage, without workspace and what is exchanged, which do not add up."""
        stages = len(request.replicas_of(request.num_stages or 1))
        model = memory_model(request, stages, sized.number, sized.size)
        depths = range(stages, 0, -1)
        held = (np.array([model.in_flight(d) for d in depths]), np.array([model.activation_sets(d) for d in depths]))
        return stage_bytes(sized.costs, model, *held, np.array(model.message_slots))

    def _fitting(self, request: Request, sized: _Sized, whole: NDArray[np.bool_]) -> NDArray[np.bool_]:
        caps = self._caps(request)
        if all(map(math.isinf, caps)):
            return whole
        plain = self._kinds(request.replicas_of(request.num_stages or 1))[0] if request.schedule == "auto" else request
        found: NDArray[np.bool_] = whole & (self._total_bytes(plain, sized) <= np.array(caps)).all(axis=1)
        return found

    def _unfit(self, request: Request, sized: _Sized) -> str:
        """Where memory is lacking in the cut that comes nearest, with the smallest micro-batches."""
        plain = self._kinds(request.replicas_of(request.num_stages or 1))[0]
        total, caps = self._total_bytes(plain, sized), np.array(self._caps(plain))
        lacking = total / caps
        cut = int(lacking.max(axis=1).argmin())
        stage = int(lacking[cut].argmax())
        if lacking[cut, stage] <= 1:  # what operations and sums of gradients need besides is missing
            return f"stage {stage} would need more than its {human_bytes(caps[stage])} while it runs"
        return f"stage {stage} would need {human_bytes(int(total[cut, stage]))} of {human_bytes(caps[stage])}"

    def _least(self, shape: Shape, sized: Sequence[_Sized], whole: NDArray[np.bool_], below_s: float) -> _Best | None:
        """The quickest candidate that fits and is quicker than so many seconds."""
        kinds = self._kinds(shape)
        which = np.concatenate([np.full(len(whole), i) for i in range(len(sized))])
        cut_of = np.tile(np.arange(len(whole)), len(sized))
        bounds_s = np.concatenate(
            [np.where(self._fitting(kinds[0], each, whole), each.bounds_s, np.inf) for each in sized]
        )
        best: _Best | None = None
        for at in np.argsort(bounds_s, kind="stable").tolist():
            if bounds_s[at] >= below_s:
                break
            each, cut = sized[which[at]], int(cut_of[at])
            for request in kinds:
                if request is not kinds[0] and not each.occupancy_s[cut].any() and not each.latency_s.any():
                    continue  # nothing to hide
                step_s = self._step_s(request, each, cut)
                if step_s < below_s and self._fits(request, each, cut):
                    best, below_s = _Best(step_s, request, each, cut), step_s
        return best

    def _step_s(self, request: Request, sized: _Sized, cut: int) -> float:
        spec = spec_of(request, request.num_stages or 1, sized.number, int(sized.costs.first[cut]))
        return program_makespan_s(_program(spec, request.num_stages or 1), sized.of(cut))

    def _fits(self, request: Request, sized: _Sized, cut: int) -> bool:
        if not self._problem.bounded:
            return True
        made = self._decision(_Best(0.0, request, sized, cut))
        return fits_within(made.partition, made.graph, made.cluster, made.limits, made.limits.memory)

    def _moved(self, shape: Shape, best: _Best) -> _Best:
        """The best of neighbouring cuts, and of their neighbours, where not all places were looked at."""
        places = len(columns_of(self._problem.profile.graph).places)
        cuts = self._cuts_into(len(shape))
        assert cuts is not None
        if len(shape) == 1 or self._problem.request.split_points or len(cuts) >= math.comb(places - 2, len(shape) - 1):
            return best
        here = cuts[best.cut]
        for _ in range(MOST_ROUNDS):
            near = np.array(list(_neighbours(here.tolist())), dtype=np.int64).reshape(-1, len(here))
            sized = self._sized(shape, near, best.sized.number, best.sized.size)
            try:
                whole = self._whole(shape, near, sized.costs)
            except ShapeError:
                return best
            better = self._least(shape, [sized], whole, best.step_s)
            if better is None:
                return best
            best, here = better, near[better.cut]
        return best

    def _decision(self, best: _Best) -> Decision:
        request, sized, cluster = best.request, best.sized, self._problem.cluster
        shape = request.replicas_of(request.num_stages or 1)
        graph, places = sized.costs.graph, sized.costs.positions[best.cut].tolist()
        limits = limits_of(request, len(shape), len(shape), sized.number, sized.size)
        busy_s, pieces = columns_of(graph).busy_s, []
        for stage, (group, speed) in enumerate(zip(groups_of(shape), self._speeds(shape), strict=True)):
            start, stop = places[stage], places[stage + 1]
            seconds = float(busy_s[start:stop].sum()) / speed / len(group)
            crossing = graph.nodes[start - 1].cut_bytes or 0 if start else 0
            pieces.append(Piece(range(start, stop), group, seconds, crossing))
        how = "comparing cuts by simulation"
        made = make_answer(graph, cluster, limits, pieces, max(piece.period_s for piece in pieces), how)
        minibatch, _, _ = microbatches(request, len(shape))
        return Decision(
            request=request,
            graph=graph,
            cluster=cluster,
            limits=limits,
            partition=refilled(made, graph, limits.memory),
            minibatch_size=minibatch,
            microbatch_size=sized.size,
            num_microbatches=sized.number,
            choice=None,
            prediction=dataclasses.replace(NOTHING, step_s=best.step_s),
        )


@functools.lru_cache(maxsize=64)
def _program(spec: ScheduleSpec, num_stages: int) -> Program:
    return build(lower(schedule_of(spec, num_stages)))


def _sizes(problem: Problem, request: Request) -> list[tuple[int, int]]:
    """(micro-batches, samples of each) to compare, for a request with given replicas; the fewest first."""
    stages = request.num_stages or 1
    minibatch, size, count = microbatches(request, stages)
    if request.num_microbatches is not None or problem.times is None:
        return [(count, size)]
    shape, lanes = request.replicas_of(stages), request.num_lanes(stages)
    least = min(request.least_microbatch, minibatch)
    found = [
        (n, b)
        for n, b in all_sizes(minibatch)
        if b >= least and max(shape) <= n <= MOST_EACH * sum(shape) and (minibatch % n == 0 or n % lanes == 0)
    ]
    return found or [(count, size)]


def _bounds_s(
    shape: Ints, count: int, first: Ints, forward_s: Floats, backward_s: Floats, reduce_s: Floats, hop_s: Floats
) -> Floats:
    """By cut, a step that no simulation beats: a stage waits for its first message, and its last backward goes down.

    Args:
        first: by cut, the lowest stage that trains.
        hop_s: of one message, by cut and hop.
    """
    stages = len(shape)
    trains = np.arange(stages) >= first[:, None]
    backward_s = np.where(trains, backward_s, 0.0)
    none = np.zeros((len(forward_s), 1))
    arrives_s = np.hstack([none, np.cumsum(forward_s[:, :-1] + hop_s, axis=1)])
    returns_s = np.hstack([none, np.cumsum(backward_s[:, :-1] + np.where(trains[:, :-1], hop_s, 0.0), axis=1)])
    busy_s = -(-count // shape) * (forward_s + backward_s)
    found: Floats = (arrives_s + busy_s + np.maximum(returns_s, reduce_s)).max(axis=1) * (1 - 1e-9)
    return found


def _neighbours(cut: Sequence[int]) -> Iterator[list[int]]:
    """Cuts with one boundary moved a little; a boundary stays between its neighbours."""
    for at in range(1, len(cut) - 1):
        for move in (-8, -4, -2, -1, 1, 2, 4, 8):
            if cut[at - 1] < cut[at] + move < cut[at + 1]:
                yield [*cut[:at], cut[at] + move, *cut[at + 1 :]]
