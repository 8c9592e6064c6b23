"""Cuts of a graph into stages, with the costs, memory and lower bounds of all cuts as arrays.

A lower bound of a candidate's step avoids the simulation of most candidates. For a stage, let F and B be the seconds of
one forward and backward of a micro-batch, and

    arrives    sum of F and messages of the stages before it: its first F cannot begin earlier
    returns    sum of B and messages of the stages before it: the step ends no sooner than this after its last B

A step takes at least

    arrives + all computation of the stage + returns
    arrives + rounds + returns           a round is the path of one micro-batch from the stage to the last one and back;
                                         a round serves at most the micro-batches that the stage has in flight
    the first, with all messages of a hop (link between neighbouring stages), which are sent one after the other, in
    place of the stage's computation; or with all messages that the stage receives, if they share one wire
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe.ir.cluster import Link
from raypipe.ir.communication import CodecCost
from raypipe.ir.graph import ModelGraph
from raypipe.ir.plan import Partition
from raypipe.ir.schedule_spec import ScheduleKind
from raypipe.planner.cost.columns import columns_of
from raypipe.planner.cost.memory import MemoryModel
from raypipe.planner.partition.chain import equal_parameters, split_before
from raypipe.planner.search.problem import Problem, factors_at
from raypipe.planner.search.replica_cuts import exposed_s, hides, slowest_link, summing_rates_s
from raypipe.planner.search.request import Request
from raypipe.planner.search.schedule_settings import memory_model
from raypipe.planner.simulator import Costs

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Shape = tuple[int, ...]
"""Workers by stage."""
Groups = tuple[tuple[int, ...], ...]
"""Devices by stage."""
MOST_CUTS = 7000
"""Default limit of the number of cuts that ``cuts_into`` lists."""
ROUNDING = 1 - 1e-9
"""Factor by which lower bounds are lowered, because sums in another order differ by rounding."""


def cuts_into(graph: ModelGraph, num_stages: int, most: int = MOST_CUTS) -> Ints | None:
    """List cuts into ``num_stages`` stages.

    All cuts are listed if there are at most ``most``. Otherwise only some of the positions between nodes are used: the
    graph is divided into equal shares of seconds, parameters and activations, and in each share the position that the
    fewest bytes cross is used.

    Returns:
        for each cut, the first position of each stage and the end of the last, as indices into
        ``columns_of(graph).places``; shape (cuts, stages + 1). None if the graph can be cut at too few positions.
    """
    inner = len(columns_of(graph).places) - 2
    if inner < num_stages - 1:
        return None
    every = math.comb(inner, num_stages - 1) <= most
    chosen = range(1, inner + 1) if every else _thinned(graph, num_stages, most)
    cuts = [(0, *some, inner + 1) for some in itertools.combinations(chosen, num_stages - 1)]
    return np.array(cuts, dtype=np.int64)


def _thinned(graph: ModelGraph, num_stages: int, most_cuts: int) -> list[int]:
    columns = columns_of(graph)
    inner = len(columns.places) - 2
    most = num_stages - 1
    while math.comb(most + 1, num_stages - 1) <= most_cuts:
        most += 1
    grown = np.zeros(inner)
    for column in (columns.busy_s, columns.param_bytes, columns.activation_bytes):
        share = np.append(0.0, np.cumsum(column)) / max(1e-300, float(column.sum()))
        grown += share[columns.places[1:-1]] / 3
    bucket = np.minimum((grown * most).astype(np.int64), most - 1)
    order = np.lexsort((np.arange(inner), columns.cut_bytes[1:-1], bucket))
    first = order[np.unique(bucket[order], return_index=True)[1]]
    # Empty buckets make room for more places, those among the others that the fewest bytes cross.
    left = np.setdiff1d(np.arange(inner), first)
    more = left[np.argsort(columns.cut_bytes[1:-1][left], kind="stable")][: most - len(first)]
    return [int(at) + 1 for at in np.sort(np.concatenate([first, more]))]


class CutCosts(NamedTuple):
    """Costs of all cuts at one micro-batch size, on devices of speed 1 and without links.

    Arrays have shape (cuts, stages) if no other shape is given.

    Attributes:
        positions: first node of each stage, and the number of nodes; shape (cuts, stages + 1).
        first: lowest stage with trainable parameters, 0 if no stage has any; shape (cuts,).
        forward_s, backward_s: seconds of one micro-batch.
        weight_s: seconds of the part of the backward for which no other stage waits: gradients of parameters, or up to
            stage ``first`` the whole backward.
        crossing_bytes: bytes of one sample that cross a hop; shape (cuts, stages - 1).
        held_bytes: bytes of parameters, of trainable parameters, of buffers, and of one sample's activations; shape
            (4, cuts, stages).
    """

    positions: Ints
    first: Ints
    forward_s: Floats
    backward_s: Floats
    weight_s: Floats
    crossing_bytes: Ints
    held_bytes: Ints

    def take(self, rows: Ints) -> CutCosts:
        """Return the costs of the cuts with these indices."""
        return self._replace(
            positions=self.positions[rows],
            first=self.first[rows],
            forward_s=self.forward_s[rows],
            backward_s=self.backward_s[rows],
            weight_s=self.weight_s[rows],
            crossing_bytes=self.crossing_bytes[rows],
            held_bytes=self.held_bytes[:, rows],
        )


def cut_costs(graph: ModelGraph, seconds: Floats, cuts: Ints, recompute: Sequence[bool] = ()) -> CutCosts:
    """Compute the costs of cuts, on devices of speed 1 and without links.

    Args:
        seconds: three rows: seconds of the forward, of the backward, and of the part of the backward that computes
            gradients of parameters, each summed over the nodes before each position; shape (3, nodes + 1).
        cuts: result of ``cuts_into``, shape (cuts, stages + 1).
        recompute: by stage, True if it recomputes activations; empty if no stage does.
    """
    columns = columns_of(graph)
    positions = columns.places[cuts]
    stages = cuts.shape[1] - 1
    forward_s, backward_s, weight_s = np.diff(seconds[:, positions], axis=2)
    held_bytes = np.diff(columns.before[:, positions], axis=2)
    # No stage that trains at all: argmax gives 0, as first_trainable_stage does.
    first = (held_bytes[1] > 0).argmax(axis=1)
    if any(recompute):
        backward_s = backward_s + np.where(np.array(recompute) & (np.arange(stages) >= first[:, None]), forward_s, 0.0)
    weight_s = np.where(np.arange(stages) > first[:, None], weight_s, backward_s)
    crossing = columns.cut_bytes[cuts[:, 1:-1]]
    return CutCosts(positions, first, forward_s, backward_s, weight_s, crossing, held_bytes)


def stage_bytes(costs: CutCosts, model: MemoryModel, in_flight: Ints, sets: Ints, slots: Ints) -> Ints:
    """Compute the bytes of every stage of all cuts, shape (cuts, stages).

    These are the bytes of ``memory.stage_memory`` without the workspace and without buffers for summing gradients.

    Args:
        model: model of sizes and factors; its counts of micro-batches in flight are not used.
        in_flight, sets, slots: micro-batches in flight, activation sets and message slots as in MemoryModel, each
            broadcast to (cuts, stages).
    """
    params, trainable, buffers, activations = costs.held_bytes
    depths = range(trainable.shape[1], 0, -1)
    versions = np.array([model.versions(depth) for depth in depths]) - 1
    optimizer = np.ceil(trainable * np.array([model.optimizer(depth) for depth in depths]))
    gradients = np.array([model.gradients(depth) for depth in depths])
    state = np.ceil(trainable * gradients) + optimizer
    state += model.state_copies * (params + optimizer + buffers)
    none = np.zeros((len(params), 1), dtype=np.int64)
    received, sent = np.hstack([none, costs.crossing_bytes]), np.hstack([costs.crossing_bytes, none])
    messages = received * (in_flight + slots) + sent * slots
    leaves = (versions + 1) * trainable * model.version_factor + (params - trainable) * model.leaf_factor
    total: Ints = (
        params
        + (0 if model.version_factor else versions * trainable)
        + np.ceil(leaves).astype(np.int64)
        + state.astype(np.int64)
        + buffers
        + model.reserve_bytes
    )
    total += model.microbatch_size * (sets * activations + messages)
    return total


@dataclass(frozen=True, eq=False)
class PlacedCuts:
    """Costs of all cuts into stages on given devices, with one number of micro-batches.

    Attributes:
        groups: devices of each stage, one per replica; stages on the same worker have the same devices.
        number, size: number of micro-batches, and samples in each.
        costs: costs of the cuts, at speed 1 and without links.
        forward_s, backward_s, weight_s: seconds of one micro-batch, by cut and stage, on the slowest worker of a stage.
        reduce_s: seconds for which replicas sum gradients after their last backward, by cut and stage.
        hops_s: four arrays by cut and hop: latency and occupancy of a forward message, then of a backward message, in
            seconds.
        half_duplex: by hop, True if its messages share one wire of each receiving worker.
    """

    groups: Groups
    number: int
    size: int
    costs: CutCosts
    forward_s: Floats
    backward_s: Floats
    weight_s: Floats
    reduce_s: Floats
    hops_s: tuple[Floats, ...]
    half_duplex: tuple[bool, ...]

    def take(self, rows: Ints) -> PlacedCuts:
        """Return the costs of the cuts with these indices."""
        arrays = {name: getattr(self, name)[rows] for name in ("forward_s", "backward_s", "weight_s", "reduce_s")}
        hops_s = tuple(way_s if len(way_s) == 1 else way_s[rows] for way_s in self.hops_s)
        return replace(self, costs=self.costs.take(rows), hops_s=hops_s, **arrays)

    def of(self, cut: int) -> Costs:
        """Convert the costs of the cut with this index to the simulator's input."""
        there, held, back, back_held = (tuple(way_s[cut].tolist()) for way_s in self.hops_s)
        reduce_s = tuple(self.reduce_s[cut].tolist())
        return Costs(
            reduce_s=reduce_s if any(reduce_s) else (),
            forward_s=tuple(self.forward_s[cut].tolist()),
            backward_s=tuple(self.backward_s[cut].tolist()),
            backward_input_s=tuple(np.maximum(0.0, self.backward_s[cut] - self.weight_s[cut]).tolist()),
            backward_weight_s=tuple(self.weight_s[cut].tolist()),
            forward_latency_s=there,
            backward_latency_s=back,
            forward_occupancy_s=held,
            backward_occupancy_s=back_held,
            half_duplex=self.half_duplex,
        )

    def least_s(self, kind: ScheduleKind, in_flight: Ints | None = None) -> Floats:
        """Compute a lower bound of the simulated step of each cut, in seconds, shape (cuts,); see the module.

        Args:
            kind: properties of the schedule.
            in_flight: most micro-batches that a stage has in flight, broadcast to (cuts, stages); None for no limit.
        """
        workers = np.array([len(group) for group in self.groups])
        trains = np.arange(len(workers)) >= self.costs.first[:, None]
        forward_s, backward_s = self.forward_s, np.where(trains, self.backward_s, 0.0)
        if not kind.synchronous or kind.several_stages:  # the pipeline is not drained, or bubbles depend on the rows
            of_stages = self.number / workers * (forward_s + backward_s)
            of_workers: Floats = by_worker(self.groups, of_stages).max(axis=1) * ROUNDING
            return of_workers
        waited_s = np.maximum(0.0, backward_s - self.weight_s) * trains if kind.splits_backward else backward_s
        latency_s, held_s, back_latency_s, back_held_s = self.hops_s
        there_s, back_s = latency_s + held_s, np.where(trains[:, :-1], back_latency_s + back_held_s, 0.0)
        none = np.zeros((len(forward_s), 1))
        arrives_s = np.hstack([none, np.cumsum(forward_s[:, :-1] + there_s, axis=1)])
        returns_s = np.hstack([none, np.cumsum(waited_s[:, :-1] + back_s, axis=1)])
        each = -(-self.number // workers)
        # Gradients of parameters may be computed while lower stages run backward, and in the next step's warm-up.
        alone_s = each * (forward_s + backward_s) + self.reduce_s
        bounds = [alone_s if kind.splits_backward else arrives_s + alone_s]
        bounds.append(arrives_s + each * (forward_s + waited_s) + returns_s)
        if workers.max() == 1 and len(workers) > 1:
            round_s = forward_s + waited_s
            beyond_s = np.hstack([round_s[:, 1:] + there_s + back_s, none])
            round_s = round_s + np.cumsum(beyond_s[:, ::-1], axis=1)[:, ::-1]
            if in_flight is not None:
                rounds = np.where(trains, -(-self.number // in_flight), 1)
                bounds.append(arrives_s + rounds * round_s * trains + returns_s)
            sends_s, answers_s = self.number * held_s + latency_s, self.number * back_held_s + back_latency_s
            out_s = arrives_s[:, :-1] + forward_s[:, :-1] + sends_s + forward_s[:, 1:] + waited_s[:, 1:]
            home_s = arrives_s[:, 1:] + round_s[:, 1:] + answers_s + waited_s[:, :-1] + returns_s[:, :-1]
            bounds += [out_s + returns_s[:, 1:], np.where(trains[:, :-1], home_s, 0.0)]
            if any(pair := [a and b for a, b in itertools.pairwise(self.half_duplex)]):
                received_s = self.number * (held_s[:, :-1] + back_held_s[:, 1:])
                taken_s = arrives_s[:, :-2] + forward_s[:, :-2] + received_s + waited_s[:, 1:-1] + returns_s[:, 1:-1]
                bounds.append(np.where(trains[:, 1:-1] & pair, taken_s, 0.0))
        least: Floats = np.max([bound.max(axis=1) for bound in bounds], axis=0) * ROUNDING
        return least


def total_bytes(placed: PlacedCuts, request: Request) -> Ints:
    """Compute the bytes of every stage of all cuts with the schedule of a request; see ``stage_bytes``."""
    model = memory_model(request, len(placed.groups), placed.number, placed.size)
    return stage_bytes(placed.costs, model, *map(np.array, held_of(model, len(placed.groups))))


def held_of(model: MemoryModel, stages: int) -> tuple[list[int], list[int], list[int]]:
    """Return micro-batches in flight by stage, activation sets by stage, and [message slots]; see MemoryModel."""
    depths = range(stages, 0, -1)
    return [model.in_flight(d) for d in depths], [model.activation_sets(d) for d in depths], [model.message_slots]


class CutTables:
    """Cuts of one problem's graph and their costs, cached.

    Args:
        problem: problem whose request sets recomputation for every stage.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._cuts: dict[tuple[int, int], Ints | None] = {}
        self._costs: dict[tuple[int, int, int], CutCosts] = {}
        self._seconds: dict[int, Floats] = {}
        self._reduced: dict[tuple[object, ...], Floats] = {}

    def seconds(self, size: int) -> Floats:
        """Return the argument ``seconds`` of ``cut_costs`` for micro-batches of ``size`` samples."""
        if size not in self._seconds:
            profile = self._problem.profile
            columns = columns_of(profile.graph)
            of_nodes = np.stack([columns.forward_s, columns.backward_s, columns.weight_s]) * factors_at(profile, size)
            self._seconds[size] = np.hstack([np.zeros((3, 1)), np.cumsum(of_nodes, axis=1)])
        return self._seconds[size]

    def cuts_into(self, num_stages: int, most: int) -> Ints | None:
        """Return the result of the function ``cuts_into``, or only the one cut that the request determines."""
        if (num_stages, most) not in self._cuts:
            graph = self._problem.profile.graph
            if self._problem.cut_is_given:
                cuts: Ints | None = self.at_nodes([0, *self.given(num_stages).cuts, len(graph.nodes)])
            else:
                cuts = cuts_into(graph, num_stages, most)
            self._cuts[num_stages, most] = cuts
        return self._cuts[num_stages, most]

    def given(self, num_stages: int) -> Partition:
        """Build the partition that the request determines: cut before the named modules, or into equal parameters."""
        graph, points = self._problem.profile.graph, self._problem.request.split_points
        return split_before(graph, points) if points else equal_parameters(graph, num_stages)

    def at_nodes(self, positions: Sequence[int]) -> Ints:
        """Convert a cut (first node of each stage, and the number of nodes) to the form of ``cuts_into``."""
        return np.searchsorted(columns_of(self._problem.profile.graph).places, [positions])

    def placed(self, groups: Groups, cuts: Ints, count: int, size: int, lanes: int) -> PlacedCuts:
        """Compute the costs of cuts on given devices, with ``count`` micro-batches of ``size`` samples.

        Args:
            groups: devices by stage.
            cuts: result of ``cuts_into``.
            lanes: number of partial sums in which the step's gradients are accumulated.
        """
        problem = self._problem
        costs, cluster = self._costs_of(cuts, size), problem.cluster
        speed = [min(cluster.devices[i].speed for i in group) for group in groups]
        reduce_s = np.zeros_like(costs.forward_s)
        for stage, group in enumerate(groups):
            if len(group) > 1:
                link = slowest_link(cluster, group, group)
                reduce_s[:, stage] = self._reduce_s(costs, size, stage, lanes, len(group), speed[stage], link)
        links = [Link() if a == b else slowest_link(cluster, a, b) for a, b in itertools.pairwise(groups)]
        bandwidth = np.array([link.bandwidth_bytes_s for link in links])
        latency_s = np.array([link.latency_s for link in links])
        held_s = np.where([link.latency_occupies_wire for link in links], latency_s, 0.0)
        sent: Floats = (costs.crossing_bytes * size).astype(np.float64)
        sent[:, [a == b for a, b in itertools.pairwise(groups)]] = 0.0
        ways_s = (way_s(codec, sent, latency_s - held_s, bandwidth) for codec in problem.request.codecs)
        hops_s = tuple(seconds for latency_s, occupancy_s in ways_s for seconds in (latency_s, occupancy_s + held_s))
        seconds = costs.forward_s / speed, costs.backward_s / speed, costs.weight_s / speed
        half_duplex = tuple(link.half_duplex for link in links)
        return PlacedCuts(groups, count, size, costs, *seconds, reduce_s, hops_s, half_duplex)

    def _costs_of(self, cuts: Ints, size: int) -> CutCosts:
        key = (id(cuts), cuts.shape[1], size)
        known = any(cuts is each for each in self._cuts.values())
        if known and key in self._costs:
            return self._costs[key]
        recompute = self._problem.request.recomputed(cuts.shape[1] - 1)
        costs = cut_costs(self._problem.profile.graph, self.seconds(size), cuts, recompute)
        if known:
            self._costs[key] = costs
        return costs

    def _reduce_s(
        self, costs: CutCosts, size: int, stage: int, lanes: int, replicas: int, speed: float, link: Link
    ) -> Floats:
        """Compute, by cut, the seconds for which a stage's replicas sum gradients after their last backward.

        Args:
            size: samples of a micro-batch.
            lanes: number of partial sums in which the step's gradients are accumulated.
            replicas: number of workers of the stage.
            speed: speed of the slowest of these workers.
            link: slowest link between them.
        """
        key = (id(costs), stage, lanes, replicas, speed, link)
        if key in self._reduced:
            return self._reduced[key]
        request = self._problem.request
        beside_s, behind_s = summing_rates_s(replicas, lanes, link, request.sums_factor, shards=request.shards)
        sync_bytes = columns_of(self._problem.profile.graph).before[1].astype(np.float64)
        starts, ends = costs.positions[:, stage], costs.positions[:, stage + 1]
        summed = sync_bytes[ends] - sync_bytes[starts]
        seconds: Floats = (beside_s + behind_s) * summed
        if hides(request.kind):
            backward_s = self.seconds(size)[1] / speed
            for first in np.unique(starts).tolist():
                rows = np.flatnonzero(starts == first)
                seconds[rows] = exposed_s(beside_s, backward_s, sync_bytes, first, ends[rows].tolist())
            seconds += behind_s * summed
        seconds = np.where(summed > 0, seconds + 2 * link.latency_s, 0.0)
        if any(costs is known for known in self._costs.values()):
            self._reduced[key] = seconds
        return seconds


def by_worker(groups: Groups, values: Floats | Ints) -> NDArray[np.float64]:
    """Sum values over the stages of each worker or group of replicas: from (cuts, stages) to (cuts, workers)."""
    workers = list(dict.fromkeys(groups))
    if len(workers) == len(groups):
        return values.astype(np.float64)
    return np.stack([values[:, [group == own for group in groups]].sum(axis=1) for own in workers], axis=1)


def way_s(codec: CodecCost, sent: Floats, latency_s: Floats, bandwidth: Floats) -> tuple[Floats, Floats]:
    """Compute (latency, occupancy) of messages in seconds, each by cut and hop; see ``CodecCost.taken_s``.

    Args:
        sent: bytes of the messages before encoding, by cut and hop.
        latency_s, bandwidth: latency in seconds and bytes per second of each hop's link.
    """
    sending_s = sent / codec.ratio / bandwidth
    parts = np.stack([codec.encode_s_per_byte * sent, sending_s, codec.decode_s_per_byte * sent])
    return latency_s + (parts.sum(axis=0) - parts.max(axis=0)), parts.max(axis=0)
