"""Search for the best plan of one shape (the number of workers of each stage), over cuts and numbers of micro-batches.

    1. list candidates: cuts (of a long graph at selected places only) x numbers of micro-batches x {1f1b, slack}
    2. compute a lower bound of the step of each; drop those that need too much memory
    3. simulate them in the order of their bounds, until the next bound is no better than the best simulated step
    4. if places were left out, move the boundaries of the best cut while that shortens the step

Steps include the seconds in which replicas sum gradients. Nodes keep their own order here; ``with_branches`` of
compare_shapes.py tries others.
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
from raypipe.ir.cluster import Cluster, ComputeDevice, Link
from raypipe.ir.graph import ModelGraph
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.ir.units import human_bytes
from raypipe.planner.cost.columns import columns_of
from raypipe.planner.cost.microbatch import all_sizes
from raypipe.planner.dependency_tables import Program, build
from raypipe.planner.partition.answer import Piece, make_answer
from raypipe.planner.partition.chain import split_before
from raypipe.planner.partition.fit import fits_within, refilled
from raypipe.planner.replay import STEADY
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower
from raypipe.planner.search.cut_costs import CutCosts, Shape, SizedCuts, cut_costs, cuts_into, stage_bytes, way_s
from raypipe.planner.search.predict import NOTHING
from raypipe.planner.search.problem import Decision, Problem, limits_of
from raypipe.planner.search.replica_cuts import exposed_s, groups_of, hides, slowest_link, summing_rates_s
from raypipe.planner.search.request import AUTO_SLACK, Request, microbatches
from raypipe.planner.search.request_schedule import memory_model, spec_of
from raypipe.planner.simulator import program_makespan_s

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
MOST_EACH = 16
"""Most micro-batches per worker in the comparison."""
MOST_ROUNDS = 20
"""Most rounds of moving to a better neighbouring cut."""


class ShapeError(PlanError):
    """Error if no plan of a shape is possible; its message is short, for a table."""


class _Best(NamedTuple):
    step_s: float
    request: Request
    sized: SizedCuts
    cut: int


class ShapeSearch:
    """Search over cuts and numbers of micro-batches for one shape at a time; costs are cached across shapes.

    Args:
        problem: problem whose request leaves no recomputation open; its replicas are ignored.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._cuts: dict[int, Ints | None] = {}
        self._costs: dict[tuple[int, int], CutCosts] = {}
        self._graphs: dict[int, ModelGraph] = {}
        self._reduced: dict[tuple[object, ...], Floats] = {}
        changing = problem.request.changing
        self._changing = np.append(0, np.cumsum([i in changing for i in range(len(problem.profile.graph.nodes))]))

    def at_least_s(self, shape: Shape) -> float:
        """Compute a lower bound of the step of plans of this shape, in seconds, without listing cuts."""
        request = self._request(shape)
        speed = math.fsum(count * speed for count, speed in zip(shape, self._speeds(shape), strict=True))
        return min(self._problem.seconds(size) * count for count, size in _sizes(self._problem, request)) / speed

    def bound_s(self, shape: Shape) -> float:
        """Compute a tighter lower bound of the step of plans of this shape, in seconds: the least over all cuts.

        Raises:
            ShapeError: no plan of this shape is possible.
        """
        return min(float(each.bounds_s.min()) for each in self._all_sized(shape))

    def best(self, shape: Shape, below_s: float = math.inf) -> Decision | None:
        """Find the best plan of this shape; None if every step takes ``below_s`` seconds or more.

        Of the prediction, only ``step_s`` is filled in.

        Raises:
            ShapeError: no plan of this shape is possible, whatever its step time.
        """
        request, sized = self._request(shape), self._all_sized(shape)
        cuts = self._cuts_into(len(shape))
        assert cuts is not None
        whole = self._whole(shape, sized[0].costs)
        best = self._least(shape, sized, whole, below_s)
        if best is None:
            if math.isinf(below_s) or not any(self._fitting(request, each, whole).any() for each in sized):
                raise ShapeError(self._unfit(request, sized[-1]))
            return None
        return self._decision(self._moved(shape, best))

    def _all_sized(self, shape: Shape) -> list[SizedCuts]:
        """List the costs of all cuts, one entry for each number of micro-batches.

        Raises:
            ShapeError: the model cannot be cut so, or there are too few micro-batches.
        """
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
        """List one request for each permitted schedule, the one that needs the least memory first."""
        request = self._request(shape)
        if request.schedule != "auto":
            return [request]
        plain = request.as_1f1b()
        return [plain] if len(shape) == 1 else [plain, dataclasses.replace(request, schedule="slack", slack=AUTO_SLACK)]

    def _speeds(self, shape: Shape) -> list[float]:
        """List the speed of the slowest worker of each stage."""
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
        plain = Cluster((ComputeDevice(),) * stages, (Link(),))
        costs = cut_costs(self._graphs[size], plain, cuts, size, self._problem.request.recomputed(stages))
        if known:
            self._costs[stages, size] = costs
        return costs

    def _sized(self, shape: Shape, cuts: Ints, count: int, size: int) -> SizedCuts:
        costs, cluster = self._costs_of(cuts, size), self._problem.cluster
        lanes, groups, speed = self._request(shape).num_lanes(len(shape)), groups_of(shape), self._speeds(shape)
        forward_s, backward_s = costs.forward_s / speed, costs.backward_s / speed
        reduce_s = np.stack(
            [
                self._reduce_s(costs, stage, lanes, len(group), speed[stage], slowest_link(cluster, group, group))
                for stage, group in enumerate(groups)
            ],
            axis=1,
        )
        links = [slowest_link(cluster, a, b) for a, b in itertools.pairwise(groups)]
        bandwidth = np.array([link.bandwidth_bytes_s for link in links])
        latency_s = np.array([link.latency_s for link in links])
        sent: Floats = (costs.crossing_bytes * size).astype(np.float64)
        there_s, back_s = (way_s(codec, sent, latency_s, bandwidth) for codec in self._problem.request.codecs)
        weight_s, hops_s, kind = costs.weight_s / speed, (*there_s, *back_s), self._problem.request.kind
        return SizedCuts(shape, kind, count, size, costs, forward_s, backward_s, weight_s, reduce_s, hops_s)

    def _reduce_s(self, costs: CutCosts, stage: int, lanes: int, replicas: int, speed: float, link: Link) -> Floats:
        """Compute, by cut, the seconds for which a stage's replicas sum gradients after their last backward.

        Args:
            lanes: number of partial sums of gradients.
            replicas: workers of the stage.
            speed: speed of the slowest of them.
            link: slowest link between them.
        """
        key = (id(costs), stage, lanes, replicas, speed, link)
        if key in self._reduced:
            return self._reduced[key]
        request = self._problem.request
        graph = costs.graph
        beside_s, behind_s = summing_rates_s(replicas, lanes, link, request.sums_factor, shards=request.shards)
        sync_bytes = columns_of(graph).before[1].astype(np.float64)
        starts, ends = costs.positions[:, stage], costs.positions[:, stage + 1]
        summed = sync_bytes[ends] - sync_bytes[starts]
        seconds: Floats = (beside_s + behind_s) * summed
        if replicas > 1 and hides(request.kind):
            backward_s = np.append(0.0, np.cumsum([node.backward_s for node in graph.nodes])) / speed
            for first in np.unique(starts).tolist():
                rows = np.flatnonzero(starts == first)
                seconds[rows] = exposed_s(beside_s, backward_s, sync_bytes, first, ends[rows].tolist())
            seconds += behind_s * summed
        seconds = np.where(summed > 0, seconds + 2 * link.latency_s * (replicas > 1), 0.0)
        if any(costs is known for known in self._costs.values()):
            self._reduced[key] = seconds
        return seconds

    def _whole(self, shape: Shape, costs: CutCosts) -> NDArray[np.bool_]:
        """Mask the cuts that keep all nodes with changing buffers in stages of one worker; shape (cuts,).

        Raises:
            ShapeError: no cut does.
        """
        counts = self._changing[costs.positions]
        changes: NDArray[np.bool_] = (counts[:, 1:] - counts[:, :-1]) > 0
        kept: NDArray[np.bool_] = np.logical_not((changes & (np.array(shape) > 1)).any(axis=1))
        if not kept.any():
            raise ShapeError("a stage with several workers would change buffers in every forward")
        return kept

    def _caps(self, request: Request) -> list[float]:
        """List the memory limit of each stage in bytes: the least of its workers' limits; infinite without a limit."""
        devices, limit = self._problem.cluster.devices, request.memory_limit_bytes
        own = [
            [cap for i in group if (cap := devices[i].memory_bytes) is not None]
            for group in groups_of(request.replicas_of(request.num_stages or 1))
        ]
        return [min([math.inf if limit is None else limit, *caps]) for caps in own]

    def _total_bytes(self, request: Request, sized: SizedCuts) -> Ints:
        """Compute the bytes by cut and stage, without workspace and exchange, which are not sums over nodes."""
        stages = len(request.replicas_of(request.num_stages or 1))
        model = memory_model(request, stages, sized.number, sized.size)
        depths = range(stages, 0, -1)
        held = (np.array([model.in_flight(d) for d in depths]), np.array([model.activation_sets(d) for d in depths]))
        return stage_bytes(sized.costs, model, *held, np.array(model.message_slots))

    def _fitting(self, request: Request, sized: SizedCuts, whole: NDArray[np.bool_]) -> NDArray[np.bool_]:
        caps = self._caps(request)
        if all(map(math.isinf, caps)):
            return whole
        plain = self._kinds(request.replicas_of(request.num_stages or 1))[0] if request.schedule == "auto" else request
        fitting: NDArray[np.bool_] = whole & (self._total_bytes(plain, sized) <= np.array(caps)).all(axis=1)
        return fitting

    def _unfit(self, request: Request, sized: SizedCuts) -> str:
        """Describe the stage that lacks memory in the cut nearest to fitting, with the smallest micro-batches."""
        plain = self._kinds(request.replicas_of(request.num_stages or 1))[0]
        total, caps = self._total_bytes(plain, sized), np.array(self._caps(plain))
        lacking = total / caps
        cut = int(lacking.max(axis=1).argmin())
        stage = int(lacking[cut].argmax())
        if lacking[cut, stage] <= 1:  # only workspace and sums of gradients do not fit
            return f"stage {stage} would need more than its {human_bytes(caps[stage])} while it runs"
        return f"stage {stage} would need {human_bytes(int(total[cut, stage]))} of {human_bytes(caps[stage])}"

    def _least(
        self, shape: Shape, sized: Sequence[SizedCuts], whole: NDArray[np.bool_], below_s: float
    ) -> _Best | None:
        """Find the quickest candidate that fits and takes less than ``below_s`` seconds."""
        kinds = self._kinds(shape)
        which = np.concatenate([np.full(len(whole), i) for i in range(len(sized))])
        cut_of = np.tile(np.arange(len(whole)), len(sized))
        least_s = np.concatenate(
            [np.where(self._fitting(kinds[0], each, whole), each.bounds_s, np.inf) for each in sized]
        )
        best: _Best | None = None
        for at in np.argsort(least_s, kind="stable").tolist():
            if least_s[at] >= below_s:
                break
            each, cut = sized[which[at]], int(cut_of[at])
            for request in kinds:
                if request is not kinds[0] and not any(way[cut].any() for way in each.hops_s):
                    continue  # nothing to hide
                step_s = self._step_s(request, each, cut)
                if step_s < below_s and self._fits(request, each, cut):
                    best, below_s = _Best(step_s, request, each, cut), step_s
        return best

    def _step_s(self, request: Request, sized: SizedCuts, cut: int) -> float:
        spec = spec_of(request, request.num_stages or 1, sized.number, int(sized.costs.first[cut]))
        stages, costs = request.num_stages or 1, sized.of(cut)
        if spec.of_kind.synchronous:
            return program_makespan_s(_program(spec, stages), costs)
        fewer, more = (program_makespan_s(_program(spec, stages, repeats), costs) for repeats in STEADY)
        return (more - fewer) / (STEADY[1] - STEADY[0])

    def _fits(self, request: Request, sized: SizedCuts, cut: int) -> bool:
        if not self._problem.bounded:
            return True
        plan = self._decision(_Best(0.0, request, sized, cut))
        return fits_within(plan.partition, plan.graph, plan.cluster, plan.limits, plan.limits.memory)

    def _moved(self, shape: Shape, best: _Best) -> _Best:
        """Improve the best cut by moving its boundaries; return it unchanged if all places were tried before."""
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
                whole = self._whole(shape, sized.costs)
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
        partition = make_answer(graph, cluster, limits, pieces, max(piece.period_s for piece in pieces), how)
        minibatch, _, _ = microbatches(request, len(shape))
        return Decision(
            request=request,
            graph=graph,
            cluster=cluster,
            limits=limits,
            partition=refilled(partition, graph, limits.memory),
            minibatch_size=minibatch,
            microbatch_size=sized.size,
            num_microbatches=sized.number,
            choice=None,
            prediction=dataclasses.replace(NOTHING, step_s=best.step_s),
        )


@functools.lru_cache(maxsize=64)
def _program(spec: ScheduleSpec, num_stages: int, repeats: int = 1) -> Program:
    return build(lower(schedule_of(spec, num_stages)), repeats)


def _sizes(problem: Problem, request: Request) -> list[tuple[int, int]]:
    """List the (micro-batches, samples of each) to compare, fewest micro-batches first, for the request's replicas."""
    stages = request.num_stages or 1
    minibatch, size, count = microbatches(request, stages)
    if request.num_microbatches is not None or problem.times is None or not request.kind.synchronous:
        return [(count, size)]
    shape, lanes = request.replicas_of(stages), request.num_lanes(stages)
    sizes = [
        (n, b)
        for n, b in all_sizes(minibatch)
        if max(shape) <= n <= MOST_EACH * sum(shape)
        and (minibatch % n == 0 or n % lanes == 0)
        and request.takes(minibatch, b)
    ]
    return sizes or [(count, size)]


def _neighbours(cut: Sequence[int]) -> Iterator[list[int]]:
    """Yield cuts with one boundary moved by up to 8 places, which stays between its neighbours."""
    for at in range(1, len(cut) - 1):
        for move in (-8, -4, -2, -1, 1, 2, 4, 8):
            if cut[at - 1] < cut[at] + move < cut[at + 1]:
                yield [*cut[:at], cut[at] + move, *cut[at + 1 :]]
