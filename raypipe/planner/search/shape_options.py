"""Settings that are compared for one shape: schedules, slack, lag, orders of devices, and numbers of micro-batches.

A shape is the number of workers of each stage. The lag of a stage is the number of micro-batches by which "zb-h1"
defers the gradients of its weights.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from raypipe.ir.schedule_spec import takes
from raypipe.planner.cost.columns import stages_workspace
from raypipe.planner.cost.microbatch import all_sizes
from raypipe.planner.partition.device_order import listed_orders
from raypipe.planner.schedule.zero_bubble import full_lags
from raypipe.planner.search.cut_costs import Floats, Groups, Ints, PlacedCuts, Shape, stage_bytes, total_bytes
from raypipe.planner.search.problem import Problem
from raypipe.planner.search.replica_cuts import homes_of
from raypipe.planner.search.request import AUTO_SLACK, Request, microbatches
from raypipe.planner.search.schedule_settings import memory_model

MOST_ORDERS = 128
"""Most orders of unlike devices that are compared."""
MOST_EACH = 16
"""Most micro-batches per worker in the comparison of shapes with replicas."""
SLACKS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Values of a hop's slack (additional micro-batches in flight) that are tried."""
GROUPS = (1, 2, 3, 4, 6, 8, 12, 16)
"""Values of k that are tried if kfkb is requested without its group size."""
FEW_HOPS = 2
"""Most hops between stages for which every combination of SLACKS is tried."""
MOST_SPECS = 3000
"""Largest product of stages and micro-batches for which all SLACKS are tried; compiling a schedule takes longer than
simulating a step.
"""


class ShapeOptions:
    """Settings to compare for a shape, as far as the request leaves them open.

    Args:
        problem: its request sets recomputation for every stage; a shape with replicas overrides its replicas.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    def request(self, shape: Shape) -> Request:
        request = self._problem.request
        if request.replicas is not None:
            return request
        return dataclasses.replace(request, replicas=1 if max(shape) == 1 else shape, num_stages=len(shape))

    def kinds(self, shape: Shape) -> list[Request]:
        """List one request for each permitted schedule, the one that needs the least memory first."""
        problem, request = self._problem, self.request(shape)
        if request.schedule != "auto":
            return list(dict.fromkeys([request.thriftiest(len(shape)), request])) if problem.bounded else [request]
        plain = request.as_1f1b()
        if len(shape) == 1:
            return [plain]
        slack = dataclasses.replace(request, schedule="slack", slack=AUTO_SLACK)
        # Links are unknown without a described cluster: then slack hides them if memory allows it.
        kinds = [plain, slack] if problem.bounded or problem.described or max(shape) > 1 else [slack]
        if problem.described and (max(shape) == 1 or problem.cut_is_given):
            kinds.append(dataclasses.replace(request, schedule="zb-h1", slack=None))
        return kinds

    def schedules(self, placed: PlacedCuts) -> Iterator[list[Request]]:
        """Yield the schedules to try, each as a list with one request per cut.

        On a described cluster with one worker per stage, other values of slack (additional micro-batches in flight on a
        hop) are included: every combination of SLACKS on few hops, else slack in proportion to the bytes of each hop,
        or few values for all hops if a step has many micro-batches.
        """
        shape = tuple(map(len, placed.groups))
        kinds = self.kinds(shape)
        cuts = len(placed.forward_s)
        if self._problem.request.schedule != "auto":
            yield [kinds[-1]] * cuts  # with_lag sets less lag where memory requires it
            if kinds[-1].schedule == "kfkb" and kinds[-1].group_size is None and self._problem.described:
                groups = (k for k in GROUPS if k <= placed.number)
                yield from ([dataclasses.replace(kinds[-1], group_size=k)] * cuts for k in groups)
            return
        yield from ([request] * cuts for request in kinds)
        if len(kinds) < 3:
            return
        every: list[list[tuple[int, ...]]]
        hops = len(shape) - 1
        if hops <= FEW_HOPS:
            every = [[slack] * cuts for slack in itertools.product(SLACKS, repeat=hops)]
        elif placed.number * len(shape) > MOST_SPECS:
            every = [[(slack,) * hops] * cuts for slack in SLACKS[1:3]]
        else:
            crossing = placed.costs.crossing_bytes
            share = crossing / np.maximum(1, crossing.max(axis=1, keepdims=True))
            by_cut = [(1 + np.ceil((most - 1) * share)).astype(int).tolist() for most in SLACKS[1:]]
            every = [[tuple(slack) for slack in rows] for rows in by_cut]
        for slacks in every:
            if max(slacks[0]) > max(placed.number, AUTO_SLACK):
                continue
            for kind in ("slack", "zb-h1"):
                with_slack = {
                    slack: dataclasses.replace(
                        kinds[0], schedule=kind, slack=slack[0] if len(set(slack)) == 1 else slack
                    )
                    for slack in set(slacks)
                }
                yield [with_slack[slack] for slack in slacks]

    def orders(self, shape: Shape) -> list[Groups]:
        """List the assignments of devices to stages; several if each stage has one worker and the cut is open."""
        request = self.request(shape)
        if max(shape) > 1 or request.kind.several_stages or self._problem.cut_is_given:
            return [tuple(homes_of(request, len(shape)))]
        orders = listed_orders(self._problem.cluster, len(shape), MOST_ORDERS)
        return [tuple((device,) for device in order) for order in orders]

    def sizes(self, shape: Shape) -> list[tuple[int, int]]:
        """List (number of micro-batches, samples in each) to compare for a shape, fewest micro-batches first."""
        request = self.request(shape)
        minibatch, size, count = microbatches(request, len(shape))
        if request.num_microbatches is not None or self._problem.times is None or not request.kind.synchronous:
            return [(count, size)]
        sizes = [(n, b) for n, b in all_sizes(minibatch) if request.takes(minibatch, b)]
        if max(shape) > 1:
            lanes, most = request.num_lanes(len(shape)), MOST_EACH * sum(shape)
            sizes = [(n, b) for n, b in sizes if max(shape) <= n <= most and (minibatch % n == 0 or n % lanes == 0)]
        return sizes or [(count, size)]

    def caps(self, groups: Groups) -> Floats:
        """Return the memory limit in bytes of each worker (or group of replicas); infinite without a limit."""
        devices, limit = self._problem.cluster.devices, self._problem.request.memory_limit_bytes
        of_all = math.inf if limit is None else limit
        own = [[cap for i in group if (cap := devices[i].memory_bytes) is not None] for group in dict.fromkeys(groups)]
        return np.array([min([of_all, *caps]) for caps in own])

    def with_lag(self, placed: PlacedCuts, requests: Sequence[Request]) -> Sequence[Request]:
        """Set the largest lag of every stage that fits into memory, for cuts that do not fit with the full lag.

        With replicas this is 0 on all stages. Requests of other kinds, or with a lag, are returned unchanged.

        Args:
            requests: a request of the same kind for each cut.
        """
        caps, stages, first = self.caps(placed.groups), len(placed.groups), requests[0]
        if not takes(first.schedule, "lag") or first.lag or stages == 1 or np.isinf(caps).all():
            return requests
        # Buffers in which replicas sum gradients are left out. If they do not fit, less lag does not help: the bytes
        # that deferred W hold are free before the sums begin.
        room = caps - stages_workspace(self._problem.profile.graph, placed.costs.positions, placed.size)
        chosen, keys = list(requests), np.array(list(map(id, requests)))
        for key, request in {id(each): each for each in requests}.items():
            rows, lags = _largest_lags(placed, request, np.flatnonzero(keys == key), room)
            of_lag = {lag: dataclasses.replace(request, lag=lag) for lag in set(map(tuple, lags.tolist()))}
            for row, lag in zip(rows.tolist(), map(tuple, lags.tolist()), strict=True):
                chosen[row] = of_lag[lag]
        return chosen


def _largest_lags(placed: PlacedCuts, request: Request, rows: Ints, room: Floats) -> tuple[Ints, Ints]:
    """Select the cuts that fit into memory only with less than the full lag, and find their largest lags.

    Args:
        rows: indices of the cuts to examine.
        room: limit of ``total_bytes`` by cut and stage.

    Returns:
        indices of the selected cuts, and by cut and stage the largest lag that fits; 0 with replicas.
    """
    stages = len(placed.groups)
    if request.replicated:
        kinds = (request, request.thriftiest(stages))
        full_fits, least_fits = (np.all(total_bytes(placed, each) <= room, axis=1)[rows] for each in kinds)
        rows = rows[least_fits & ~full_fits]
        return rows, np.zeros((len(rows), stages), dtype=np.int64)
    model, columns = memory_model(request, stages, placed.number, placed.size), np.arange(stages)
    full = np.array(full_lags(model.spec.slack, (1,) * stages))
    in_flight, sets = np.stack([model.deferring(stages - s, np.arange(full[-1] + 1)) for s in range(stages)], axis=2)

    def fits(lags: Ints) -> NDArray[np.bool_]:
        """Mask the stages of the cuts ``rows`` that fit with these lags, shape (rows, stages)."""
        held = in_flight[lags, columns], sets[lags, columns], np.array([model.message_slots])
        mask: NDArray[np.bool_] = stage_bytes(placed.costs.take(rows), model, *held) <= room[rows]
        return mask

    rows = rows[~fits(full).all(axis=1)]
    rows = rows[fits(0 * full).all(axis=1)]
    low, high = np.zeros((len(rows), stages), dtype=np.int64), np.tile(full, (len(rows), 1))
    while (low < high).any():
        middle = (low + high + 1) // 2
        fitting = fits(middle)
        low, high = np.where(fitting, middle, low), np.where(fitting, high, middle - 1)
    return rows, low
