"""Search for the best plan of one shape (the number of workers of each stage), by simulation of its step.

    1. list candidates: orders of unlike devices x cuts x numbers of micro-batches x schedules
    2. compute lower bounds of their steps; drop candidates that do not fit into memory
    3. simulate candidates by increasing bound, until the next bound is no better than the best simulated step
    4. if cuts were left out, move the boundaries of the best cuts, or exchange devices, while that shortens the step

A cut divides the model's list of nodes into stages. All cuts of a short graph are listed, and all orders of few
devices (``exact``). Then the candidates depend neither on memory nor on links: more memory only adds candidates that
fit, and a faster link delays no message, so neither makes the best step longer. Otherwise the cuts of a partition
solver are candidates, for a few numbers of micro-batches, and for few stages also some cuts at small messages.

Steps include the seconds in which replicas sum gradients. Nodes keep their own order here; ``choose.py`` tries other
orders of execution for the best plan.
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
from raypipe.ir.units import human_bytes
from raypipe.planner.cost.columns import columns_of, workspace_bytes
from raypipe.planner.cost.tolerance import EVEN
from raypipe.planner.partition.answer import Piece, make_answer
from raypipe.planner.partition.device_order import MOST_DEVICES
from raypipe.planner.partition.fit import fits_within
from raypipe.planner.search.cut_costs import (
    MOST_CUTS,
    ROUNDING,
    CutTables,
    Groups,
    PlacedCuts,
    Shape,
    by_worker,
    held_of,
    stage_bytes,
    total_bytes,
)
from raypipe.planner.search.predict import schedule_step_s
from raypipe.planner.search.problem import Decision, Problem, limits_of
from raypipe.planner.search.request import Request, microbatches
from raypipe.planner.search.schedule_settings import memory_model, spec_of
from raypipe.planner.search.shape_options import MOST_ORDERS, MOST_SPECS, ShapeOptions
from raypipe.planner.search.solver_cuts import SolverCuts

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
_Cell = tuple[Groups, Ints, int, int]
"""Arguments of ``_placed``: devices by stage, cuts, number of micro-batches, and samples in each."""
MOST_PLACED = 300_000
"""Largest number of combinations of an order, a cut and a number of micro-batches of which all are compared."""
FEW_PLACED = 50_000
"""Largest number of combinations that are compared if there are more than MOST_PLACED."""
LEAST_CUTS = 200
"""Least number of cuts that are compared for each order and number of micro-batches."""
FEW_STAGES = 8
"""Most stages for which cuts at small messages are compared besides those of the solver."""
MOST_WORK = 1_500_000
"""Limit of the simulations in one ``best``: sum of stages x micro-batches over all; 1e6 take about a second."""
SLOWER, COMPILING = 10, 6
"""Additional work of a simulation without ``equal_messages_s``, and of compiling a schedule, relative to its work."""
NEAR = 1.03
"""Numbers of micro-batches are tried with all cuts too if their step takes at most this many times the shortest. Used
if all cuts can be listed, but not for all numbers of micro-batches.
"""
MOST_STARTS = 6
"""Most candidates, each with another order of devices, whose cuts are improved if not all cuts were listed."""
MOST_ROUNDS = 20
"""Most times that a candidate's cut is replaced by a better neighbouring cut."""


class ShapeError(PlanError):
    """Error if no plan of a shape is possible; its message is short, for a table."""


class _Batch(NamedTuple):
    """Candidates with one number of micro-batches, one order of devices and one kind of schedule.

    Attributes:
        placed: costs of all cuts, also of those that do not fit.
        cuts: indices of the cuts that fit; the other attributes have one value for each of these.
        bounds_s: lower bound of the step, in seconds.
        requests: request with the schedule.
        held: activation sets of all stages, plus message slots, divided by the number of micro-batches.
    """

    placed: PlacedCuts
    cuts: Ints
    bounds_s: Floats
    requests: Sequence[Request]
    held: Sequence[float]


class _Found(NamedTuple):
    """Simulated candidate.

    Attributes:
        placed: costs of cuts on devices; ``cut`` is the index of this candidate's cut in them.
        held: see _Batch.
    """

    step_s: float
    request: Request
    placed: PlacedCuts
    cut: int
    held: float


class ShapeSearch:
    """Search over orders, cuts, micro-batches and schedules for one shape at a time; costs are cached across shapes.

    Args:
        problem: its request sets recomputation for every stage; a shape with replicas overrides its replicas.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem, self._options = problem, ShapeOptions(problem)
        self._tables = CutTables(problem)
        self._solved = functools.cache(SolverCuts(problem, self._tables).cuts)
        changing = problem.request.changing
        self._work, self._compiled = MOST_WORK, set[tuple[Request, int]]()
        self._changing = np.append(0, np.cumsum([i in changing for i in range(len(problem.profile.graph.nodes))]))

    def at_least_s(self, shape: Shape) -> float:
        """Compute a lower bound of the step of plans of this shape, in seconds, without listing cuts.

        A step takes at least its whole work divided by the summed speeds of the fastest devices, and at least the
        seconds of one micro-batch through all stages.
        """
        problem, request = self._problem, self._options.request(shape)
        speeds = sorted((device.speed for device in problem.cluster.devices), reverse=True)[: sum(shape)]
        trained = np.flatnonzero(columns_of(problem.profile.graph).trainable_bytes)
        first = int(trained[0]) if len(trained) else 0
        least_s = math.inf
        for count, size in self._options.sizes(shape):
            forward_s, backward_s, weight_s = self._tables.seconds(size)
            # Backwards of nodes before the first one that trains may run on no stage.
            last_s, whole_s = backward_s[-1] - backward_s[first], forward_s[-1] + backward_s[-1] - backward_s[first]
            step_s = count * whole_s / math.fsum(speeds)
            if request.kind.synchronous and not request.kind.several_stages and max(shape) == 1:
                if any(each.kind.splits_backward for each in self._options.kinds(shape)):
                    last_s = backward_s[-1] - backward_s[first] - (weight_s[-1] - weight_s[first])
                passing_s = forward_s[-1] + max(0.0, last_s)
                step_s = max(step_s, passing_s / speeds[0])
            least_s = min(least_s, step_s)
        return least_s * ROUNDING

    def bound_s(self, shape: Shape) -> float:
        """Compute a tighter lower bound of the step in seconds: the least over the cuts that ``best`` lists at first.

        Raises:
            ShapeError: no plan of this shape is possible.
        """
        return min(float(self._least_s(self._placed(*cell)).min()) for cell in self._cells(shape, self._few(shape)))

    def exact(self, shape: Shape) -> bool:
        """Return True if ``best`` compares all cuts with all orders of ``device_orders``; nodes keep their order."""
        return max(shape) == 1 and self._number(shape) * len(self._options.sizes(shape)) <= MOST_PLACED

    def best(self, shape: Shape, below_s: float = math.inf) -> Decision | None:
        """Find the best plan of this shape; None if every step takes ``below_s`` seconds or more.

        Of equally quick candidates, those whose number of micro-batches divides the mini-batch are preferred, then the
        one that holds the fewest activations. The decision's prediction has only ``step_s``.

        Raises:
            ShapeError: no plan of this shape is possible, whatever its step time.
        """
        devices = len(self._problem.cluster.devices)
        if self._options.request(shape).workers_in_all(len(shape)) > devices:
            raise ShapeError(f"there are {devices} devices")
        self._work, self._compiled = MOST_WORK, set()
        exact, whole = self.exact(shape), self._number(shape) <= MOST_PLACED and max(shape) == 1
        cells: list[_Cell] = []
        if not (exact or self._problem.cut_is_given or (max(shape) > 1 and self._short(shape))):
            solved = self._solved(shape)
            sizes = self._options.sizes(shape)
            cells = [(groups, self._tables.at_nodes(cut), *size) for groups, cut in solved for size in sizes]
        if exact or whole or not cells:
            cells += self._cells(shape, MOST_PLACED if exact else self._few(shape))
        found = self._compared(cells, below_s)
        if not exact:
            found += map(self._moved, _starts(found))
            if whole and found:
                best_s = min(one.step_s for one in found)
                near = {one.placed.number for one in found if one.step_s <= best_s * NEAR}
                found += self._compared([cell for cell in self._cells(shape, MOST_PLACED) if cell[2] in near], best_s)
        best_s = min((one.step_s for one in found), default=math.inf)
        if best_s >= below_s:
            fitting = (self._may_fit(each).any() for each in itertools.starmap(self._placed, cells))
            if not found and (math.isinf(below_s) or not any(fitting)):
                raise ShapeError(self._unfit(cells[-1]))
            return None
        minibatch, _, _ = microbatches(self._options.request(shape), len(shape))
        best = min(
            (one for one in found if one.step_s <= best_s * (1 + EVEN)),
            key=lambda one: (minibatch % one.placed.number > 0, one.held, one.step_s),
        )
        return self._decision(best, exact=exact and self._work > 0)

    def _compared(self, cells: Sequence[_Cell], below_s: float) -> list[_Found]:
        """Simulate candidates whose lower bound is less than ``below_s`` and the best step; list those that fit."""
        least_s = [self._least_s(each, self._may_fit(each)) for each in itertools.starmap(self._placed, cells)]
        first_s = [float(bounds_s.min()) for bounds_s in least_s]
        found: list[_Found] = []
        for at in np.argsort(first_s, kind="stable").tolist():
            if first_s[at] >= below_s:
                break
            placed = self._placed(*cells[at]).take(np.flatnonzero(least_s[at] < below_s))
            more = list(self._simulated(placed, below_s))
            found += more
            below_s = min([below_s, *(one.step_s for one in more)])
        return found

    def _cells(self, shape: Shape, most_cuts: int) -> list[_Cell]:
        """List arguments of ``_placed``: the cuts, with each order of devices and number of micro-batches.

        Raises:
            ShapeError: the model cannot be cut into so many stages, a stage has more workers than micro-batches, or a
                stage with several workers would change buffers in every forward.
        """
        cuts = self._tables.cuts_into(len(shape), most_cuts)
        if cuts is None:
            raise ShapeError(f"the model cannot be cut into {len(shape)} stages")
        sizes = [size for size in self._options.sizes(shape) if size[0] >= max(shape)]
        if not sizes:
            raise ShapeError(f"a step has fewer micro-batches than stage {shape.index(max(shape))} has workers")
        cells = [(groups, cuts, *size) for size in sizes for groups in self._options.orders(shape)]
        if not self._whole(self._placed(*cells[0])).any():
            raise ShapeError("a stage with several workers would change buffers in every forward")
        return cells

    def _number(self, shape: Shape) -> int:
        """Count the pairs of a cut and an order of devices; ``MOST_PLACED`` + 1 if not all orders are listed."""
        places = len(columns_of(self._problem.profile.graph).places) - 2
        cuts = 1 if self._problem.cut_is_given else math.comb(places, len(shape) - 1)
        orders = len(self._options.orders(shape))
        listed = orders < MOST_ORDERS and len(self._problem.cluster.devices) <= MOST_DEVICES
        return cuts * orders if listed else MOST_PLACED + 1

    def _short(self, shape: Shape) -> bool:
        """Return True if the cuts that ``_cells`` lists suffice without the cuts of a solver."""
        return len(shape) <= FEW_STAGES and not self._options.request(shape).kind.several_stages

    def _few(self, shape: Shape) -> int:
        """Return the number of cuts to compare if there are too many to compare all."""
        if max(shape) > 1 and self._short(shape):
            return MOST_CUTS
        return max(LEAST_CUTS, FEW_PLACED // (len(self._options.orders(shape)) * len(self._options.sizes(shape))))

    def _placed(self, groups: Groups, cuts: Ints, count: int, size: int) -> PlacedCuts:
        shape = tuple(map(len, groups))
        return self._tables.placed(groups, cuts, count, size, self._options.request(shape).num_lanes(len(shape)))

    def _least_s(self, placed: PlacedCuts, fitting: NDArray[np.bool_] | bool = True) -> Floats:
        """Compute a lower bound of the step of each cut with any permitted schedule, in seconds; inf if not fitting."""
        if not np.any(fitting):
            return np.full(len(placed.forward_s), np.inf)
        kinds = [request.kind for request in self._options.kinds(tuple(map(len, placed.groups)))]
        return np.where(fitting, placed.least_s(next((x for x in kinds if x.splits_backward), kinds[0])), np.inf)

    def _whole(self, placed: PlacedCuts) -> NDArray[np.bool_]:
        """Mask the cuts in which no stage with several workers has nodes that change buffers; shape (cuts,)."""
        counts = self._changing[placed.costs.positions]
        changes = (counts[:, 1:] - counts[:, :-1]) > 0
        several = np.array([len(group) > 1 for group in placed.groups])
        kept: NDArray[np.bool_] = np.logical_not((changes & several).any(axis=1))
        return kept

    def _may_fit(self, placed: PlacedCuts) -> NDArray[np.bool_]:
        """Mask the cuts whose ``total_bytes`` fit with the schedule that needs the least memory; shape (cuts,)."""
        fitting, caps = self._whole(placed), self._options.caps(placed.groups)
        if not np.isinf(caps).all():
            thriftiest = self._options.kinds(tuple(map(len, placed.groups)))[0]
            total = by_worker(placed.groups, total_bytes(placed, thriftiest))
            fitting = fitting & (total <= caps).all(axis=1)
        return fitting

    def _unfit(self, cell: _Cell) -> str:
        """Describe the stage that lacks the most memory, in the cut of this cell that comes nearest to fitting."""
        placed = self._placed(*cell)
        thriftiest = self._options.kinds(tuple(map(len, placed.groups)))[0]
        total, caps = by_worker(placed.groups, total_bytes(placed, thriftiest)), self._options.caps(placed.groups)
        lacking = total / caps
        cut = int(lacking.max(axis=1).argmin())
        stage = int(lacking[cut].argmax())
        if lacking[cut, stage] <= 1:  # only workspace and sums of gradients do not fit
            return f"stage {stage} would need more than its {human_bytes(caps[stage])} while it runs"
        return f"stage {stage} would need {human_bytes(int(total[cut, stage]))} of {human_bytes(caps[stage])}"

    def _simulated(self, placed: PlacedCuts, best_s: float, request: Request | None = None) -> Iterator[_Found]:
        """Simulate candidates whose lower bound is less than ``best_s`` and the best step; yield those that fit.

        Args:
            request: the only schedule to try; None tries all.
        """
        if not len(placed.forward_s):
            return
        kinds = self._options.schedules(placed) if request is None else [[request] * len(placed.forward_s)]
        batches = [self._batch(placed, requests) for requests in kinds]
        which = np.concatenate([np.full(len(batch.cuts), i) for i, batch in enumerate(batches)])
        within = np.concatenate([np.arange(len(batch.cuts)) for batch in batches])
        bounds_s = np.concatenate([batch.bounds_s for batch in batches])
        busy_s = (placed.forward_s + placed.backward_s).max(axis=1)
        longest_s = np.concatenate([busy_s[batch.cuts] for batch in batches])
        # Of equal bounds the most even cut is first, for it stays if no other is quicker.
        for i in np.lexsort((longest_s, np.round(bounds_s / (bounds_s.min(initial=1.0) or 1.0), 9))).tolist():
            if bounds_s[i] >= best_s or self._work <= 0:
                return
            batch, at = batches[which[i]], int(within[i])
            one, cut = batch.requests[at], int(batch.cuts[at])
            self._count(one, placed)
            spec = spec_of(one, len(placed.groups), placed.number, int(placed.costs.first[cut]))
            step_s = schedule_step_s(spec, placed.of(cut))
            if step_s < best_s * (1 + EVEN) and self._fits(one, placed, cut):
                best_s = min(best_s, step_s)
                yield _Found(step_s, one, placed, cut, batch.held[at])

    def _count(self, request: Request, placed: PlacedCuts) -> None:
        """Subtract one simulation from the search's remaining budget, in micro-batches times stages (see MOST_WORK).

        The first simulation of a schedule counts more, because the schedule has to be compiled.
        """
        plain = request.kind.synchronous and not request.kind.several_stages and not request.replicated
        key = request, placed.number
        self._work -= (
            placed.number * len(placed.groups) * (1 + SLOWER * (not plain) + COMPILING * (key not in self._compiled))
        )
        self._compiled.add(key)

    def _batch(self, placed: PlacedCuts, requests: Sequence[Request]) -> _Batch:
        stages = len(placed.groups)
        requests = self._options.with_lag(placed, requests)
        different = {id(request): request for request in requests}
        models = {key: memory_model(each, stages, placed.number, placed.size) for key, each in different.items()}
        rows = {key: held_of(model, stages) for key, model in models.items()}
        # One row stands for all cuts.
        of_cuts = list(rows) if len(rows) == 1 else list(map(id, requests))
        numbers = [np.array([rows[key][part] for key in of_cuts]) for part in range(3)]
        fitting, caps = self._whole(placed), self._options.caps(placed.groups)
        if not np.isinf(caps).all():
            total = by_worker(placed.groups, stage_bytes(placed.costs, next(iter(models.values())), *numbers))
            fitting = fitting & (total <= caps).all(axis=1)
        cuts = np.flatnonzero(fitting)
        bounds_s = placed.least_s(requests[0].kind, numbers[0])[cuts]
        held = np.broadcast_to((numbers[1].sum(axis=1) + numbers[2][:, 0]) / placed.number, len(requests))
        return _Batch(placed, cuts, bounds_s, [requests[i] for i in cuts.tolist()], held[cuts].tolist())

    def _fits(self, request: Request, placed: PlacedCuts, cut: int) -> bool:
        """Return True if a candidate fits, with the workspace and summing buffers that ``_batch`` does not count."""
        caps, graph = self._options.caps(placed.groups), self._problem.profile.graph
        if np.isinf(caps).all():
            return True
        if request.replicated or request.kind.several_stages:
            plan = self._decision(_Found(0.0, request, placed, cut, 0.0))
            return fits_within(plan.partition, plan.graph, plan.cluster, plan.limits, plan.limits.memory)
        if not columns_of(graph).workspace.shape[1]:
            return True
        places = placed.costs.positions[cut].tolist()
        total = total_bytes(placed.take(np.array([cut])), request)[0].tolist()
        return all(
            nbytes + workspace_bytes(graph, range(start, stop), placed.size) <= cap
            for nbytes, (start, stop), cap in zip(total, itertools.pairwise(places), caps.tolist(), strict=True)
        )

    def _moved(self, best: _Found) -> _Found:
        """Improve a candidate by moving one boundary after the other, or exchanging devices, to shorten its step."""
        stages = len(best.placed.groups)
        if stages == 1 or self._problem.cut_is_given or stages * best.placed.number > MOST_SPECS:
            return best
        places = columns_of(self._problem.profile.graph).places
        for _ in range(MOST_ROUNDS):
            here = np.searchsorted(places, best.placed.costs.positions[best.cut]).tolist()
            near = np.array(list(_neighbours(here)), dtype=np.int64).reshape(-1, len(here))
            better = self._better(best, best.placed.groups, near)
            if better is best:
                others = (
                    self._better(best, groups, np.array([here])) for groups in self._exchanged(best.placed.groups)
                )
                better = next((other for other in others if other is not best), best)
            if better is best:
                return best
            best = better
        return best

    def _better(self, best: _Found, groups: Groups, cuts: Ints) -> _Found:
        """Return the best candidate with these cuts and devices, or ``best`` if no step of these is shorter."""
        placed = self._placed(groups, cuts, best.placed.number, best.placed.size)
        placed = placed.take(np.flatnonzero(self._least_s(placed) < best.step_s))
        only = None if self._short((1,) * len(groups)) else dataclasses.replace(best.request, lag=())
        more = self._simulated(placed, best.step_s, only)
        better = min(more, key=lambda one: one.step_s, default=best)
        return better if better.step_s < best.step_s else best

    def _exchanged(self, groups: Groups) -> Iterator[Groups]:
        """Yield variants of the devices by stage: two unlike devices exchanged, or one replaced by an unused one."""
        devices = self._problem.cluster.devices
        if max(map(len, groups)) > 1 or len(set(groups)) < len(groups) or len(groups) > FEW_STAGES:
            return
        for i, (one,) in enumerate(groups):
            for other in range(len(devices)):
                at = groups.index((other,)) if (other,) in groups else None
                alike = dataclasses.replace(devices[one], name="") == dataclasses.replace(devices[other], name="")
                if alike or (at is not None and at < i):
                    continue
                new = list(groups)
                new[i] = (other,)
                if at is not None:
                    new[at] = (one,)
                yield tuple(new)

    def _decision(self, best: _Found, *, exact: bool = False) -> Decision:
        request, placed, cluster = best.request, best.placed, self._problem.cluster
        stages, graph = len(placed.groups), self._problem.at(placed.size)
        limits = limits_of(request, stages, placed.number, placed.size)
        busy_s, pieces = columns_of(graph).busy_s, []
        places = placed.costs.positions[best.cut].tolist()
        for group, (start, stop) in zip(placed.groups, itertools.pairwise(places), strict=True):
            speed = min(cluster.devices[i].speed for i in group)
            seconds = float(busy_s[start:stop].sum()) / speed / len(group)
            crossing = graph.nodes[start - 1].cut_bytes or 0 if start else 0
            pieces.append(Piece(range(start, stop), group, seconds, crossing))
        how = f"comparing {'all ' * exact}cuts by simulation"
        partition = make_answer(graph, cluster, limits, pieces, max(piece.period_s for piece in pieces), how)
        if self._problem.cut_is_given:
            partition = dataclasses.replace(partition, reason=self._tables.given(stages).reason)
        minibatch, _, _ = microbatches(request, stages)
        return Decision(
            request=request,
            graph=graph,
            cluster=cluster,
            limits=limits,
            partition=partition,
            minibatch_size=minibatch,
            microbatch_size=placed.size,
            num_microbatches=placed.number,
        ).taking(best.step_s)


def _starts(found: Sequence[_Found]) -> list[_Found]:
    """List the quickest candidate of each order of devices, quickest first, at most ``MOST_STARTS`` in all."""
    by_order: dict[Groups, _Found] = {}
    for one in sorted(found, key=lambda one: one.step_s):
        by_order.setdefault(one.placed.groups, one)
    return list(by_order.values())[:MOST_STARTS]


def _neighbours(cut: Sequence[int]) -> Iterator[list[int]]:
    """Yield cuts with one boundary moved by a power of two, to a position between its neighbours."""
    for at in range(1, len(cut) - 1):
        room = cut[at + 1] - cut[at - 1]
        for move in (1 << power for power in range(room.bit_length())):
            for place in (cut[at] - move, cut[at] + move):
                if cut[at - 1] < place < cut[at + 1]:
                    yield [*cut[:at], place, *cut[at + 1 :]]
