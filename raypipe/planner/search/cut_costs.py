"""Shapes and cuts to compare, with the costs, memory and lower bounds of all cuts at once as arrays.

A shape is the number of workers of every stage:

    4 workers, up to 3 stages      2  3  4  |  1-2  2-1  1-3  3-1  2-2  |  1-1-2  1-2-1  2-1-1

More workers add shapes and take none away, and neither shapes nor cuts depend on links or memory. So the best plan for
fewer workers or slower links is still a candidate with more workers or faster links.

Lower bounds of the step order the candidates before simulation. For a stage, let

    arrives    sum of F and messages of the stages before it: its first F cannot begin earlier
    returns    sum of B and messages of the stages before it: the step ends no sooner than this after its last B

Then a step takes at least arrives + all computation of the stage + returns. It also takes at least arrives + rounds +
returns: a round is the path of one micro-batch from the stage to the last one and back, and at most as many
micro-batches as the stage holds in flight share a round. Both bounds also hold with the messages of a hop, which are
sent one after the other, in place of a stage's computation.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe.ir.cluster import Cluster
from raypipe.ir.communication import CodecCost
from raypipe.ir.graph import ModelGraph
from raypipe.ir.schedule_spec import ScheduleKind
from raypipe.planner.cost.columns import columns_of
from raypipe.planner.cost.memory import MemoryModel
from raypipe.planner.simulator import Costs

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Shape = tuple[int, ...]
"""Workers by stage."""
FEW_WORKERS = 8
"""Largest number of workers for which every shape is compared."""
MOST_CUTS = 3000
"""Most cuts into one number of stages that are compared; see ``cuts_into``."""


def shapes(workers: int, most_stages: int, most_each: int | None = None, num_stages: int | None = None) -> list[Shape]:
    """List the shapes on at most ``workers`` workers in which some stage has several workers.

    For more than ``FEW_WORKERS`` workers only these are listed, besides all shapes on up to ``FEW_WORKERS``: one stage;
    two stages; three stages, the last with one worker; stages with equal numbers of workers; and one stage with several
    workers among stages with one.

    Args:
        most_stages: largest number of stages that the model can be cut into.
        most_each: most workers of a stage; None for no limit.
        num_stages: number of stages of the shapes; None for any.
    """
    kept = (
        shape
        for shape in dict.fromkeys(_all(workers) if workers <= FEW_WORKERS else _paying(workers))
        if 1 < max(shape) <= (most_each or workers) and len(shape) <= most_stages and num_stages in (None, len(shape))
    )
    return sorted(kept, key=lambda shape: (-sum(shape), len(shape), shape))


def _all(workers: int) -> Iterator[Shape]:
    for count in range(2, workers + 1):
        for ends in itertools.product((False, True), repeat=count - 1):
            places = [0, *(at for at, end in enumerate(ends, 1) if end), count]
            yield tuple(b - a for a, b in itertools.pairwise(places))


def _paying(workers: int) -> Iterator[Shape]:
    every = range(1, workers + 1)
    yield from ((count,) for count in every)
    yield from ((first, second) for first in every for second in range(1, workers - first + 1))
    yield from ((first, second, 1) for first in every for second in range(1, workers - first))
    yield from ((each,) * stages for each in every for stages in range(1, workers // each + 1))
    for several in every:
        for single in range(1, workers - several + 1):
            for before in (0, single // 2, single):
                yield (1,) * before + (several,) + (1,) * (single - before)
    yield from _all(FEW_WORKERS)


def cuts_into(graph: ModelGraph, num_stages: int) -> Ints | None:
    """List cuts into ``num_stages`` stages.

    All cuts are listed if there are at most ``MOST_CUTS``. Otherwise a subset of places is cut: the graph is divided
    into equal shares of seconds, parameters and activations, and the place with the fewest cut bytes is taken in each.

    Returns:
        indices into the places of the graph, its two ends included, shape (cuts, stages + 1); None if the graph has too
        few places.
    """
    inner = len(columns_of(graph).places) - 2
    if inner < num_stages - 1:
        return None
    chosen = range(1, inner + 1) if _number(inner, num_stages) <= MOST_CUTS else _thinned(graph, num_stages)
    cuts = [(0, *some, inner + 1) for some in itertools.combinations(chosen, num_stages - 1)]
    return np.array(cuts, dtype=np.int64)


def _number(places: int, num_stages: int) -> int:
    return math.comb(places, num_stages - 1)


def _thinned(graph: ModelGraph, num_stages: int) -> list[int]:
    columns = columns_of(graph)
    inner = len(columns.places) - 2
    most = next(count for count in range(inner, 0, -1) if _number(count, num_stages) <= MOST_CUTS)
    most = max(most, num_stages - 1)
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
    """Costs of all cuts at one micro-batch size, with stage s on device s.

    Arrays have shape (cuts, stages), or (cuts, stages - 1) for hops, if no other shape is given.

    Attributes:
        graph: graph with the seconds of this size.
        positions: first node of each stage, and the number of nodes; shape (cuts, stages + 1).
        first: lowest stage that trains; shape (cuts,).
        forward_s, backward_s: seconds of one micro-batch.
        weight_s: seconds of the part of a split backward that no other stage waits for.
        crossing_bytes: bytes of one sample that cross a hop.
        latency_s: shape (1, stages - 1), equal for all cuts.
        occupancy_s: seconds that a message occupies a link.
        held_bytes: bytes of parameters, of trainable parameters, of buffers, and of one sample's activations; shape
            (4, cuts, stages).
    """

    graph: ModelGraph
    positions: Ints
    first: Ints
    forward_s: Floats
    backward_s: Floats
    weight_s: Floats
    crossing_bytes: Ints
    latency_s: Floats
    occupancy_s: Floats
    held_bytes: Ints

    def of(self, cut: int) -> Costs:
        """Convert one cut to the simulator's input."""
        hops_s = (self.latency_s[0], self.occupancy_s[cut]) * 2
        return _costs(self.forward_s[cut], self.backward_s[cut], self.weight_s[cut], hops_s)


def _costs(forward_s: Floats, backward_s: Floats, weight_s: Floats, hops_s: Sequence[Floats]) -> Costs:
    """Build the simulator's input from seconds by stage, and by hop.

    ``hops_s`` are latency and occupancy of forward messages, then latency and occupancy of backward messages.
    """
    latency_s, occupancy_s, back_latency_s, back_occupancy_s = (tuple(way_s.tolist()) for way_s in hops_s)
    return Costs(
        forward_s=tuple(forward_s.tolist()),
        backward_s=tuple(backward_s.tolist()),
        backward_input_s=tuple(np.maximum(0.0, backward_s - weight_s).tolist()),
        backward_weight_s=tuple(weight_s.tolist()),
        forward_latency_s=latency_s,
        backward_latency_s=back_latency_s,
        forward_occupancy_s=occupancy_s,
        backward_occupancy_s=back_occupancy_s,
    )


def cut_costs(
    graph: ModelGraph, cluster: Cluster, cuts: Ints, microbatch_size: int, recompute: Sequence[bool] = ()
) -> CutCosts:
    """Compute the costs of cuts on devices of equal speed.

    Args:
        cuts: indices into the places of the graph, shape (cuts, stages + 1).
        recompute: by stage, True if it recomputes activations; empty if no stage does.
    """
    columns = columns_of(graph)
    positions = columns.places[cuts]
    stages = cuts.shape[1] - 1

    def by_stage(seconds: list[float]) -> Floats:
        sums = np.append(0.0, np.cumsum(seconds))[positions]
        by_cut: Floats = np.diff(sums, axis=1) / cluster.devices[0].speed
        return by_cut

    forward_s = by_stage([node.forward_s for node in graph.nodes])
    backward_s = by_stage([node.backward_s for node in graph.nodes])
    weight_s = by_stage([node.backward_weight_s for node in graph.nodes])
    held_bytes = np.diff(columns.before[:, positions], axis=2)
    # No stage that trains at all: argmax gives 0, as first_trainable_stage does.
    first = (held_bytes[1] > 0).argmax(axis=1)
    if any(recompute):
        backward_s = backward_s + np.where(np.array(recompute) & (np.arange(stages) >= first[:, None]), forward_s, 0.0)
    crossing = columns.cut_bytes[cuts[:, 1:-1]]
    links = [cluster.link(stage, stage + 1) for stage in range(stages - 1)]
    return CutCosts(
        graph=graph,
        positions=positions,
        first=first,
        forward_s=forward_s,
        backward_s=backward_s,
        weight_s=np.where(np.arange(stages) > first[:, None], weight_s, backward_s),
        crossing_bytes=crossing,
        latency_s=np.array([[link.latency_s for link in links]]),
        occupancy_s=crossing * microbatch_size / np.array([link.bandwidth_bytes_s for link in links]),
        held_bytes=held_bytes,
    )


def stage_bytes(costs: CutCosts, model: MemoryModel, in_flight: Ints, sets: Ints, slots: Ints) -> Ints:
    """Compute the bytes of every stage of all cuts for a synchronous schedule, shape (cuts, stages).

    They equal those of ``memory.stage_memory`` without the workspace.

    Args:
        model: model of sizes and factors; its counts of micro-batches in flight are not used.
        in_flight, sets, slots: micro-batches in flight, activation sets and message slots as in MemoryModel; broadcast
            to (cuts, stages).
    """
    params, trainable, buffers, activations = costs.held_bytes
    depths = range(trainable.shape[1], 0, -1)
    optimizer = np.ceil(trainable * np.array([model.optimizer(depth) for depth in depths]))
    gradients = np.array([model.gradients(depth) for depth in depths])
    state = np.ceil(trainable * gradients) + optimizer
    state += model.state_copies * (params + optimizer + buffers)
    none = np.zeros((len(params), 1), dtype=np.int64)
    received, sent = np.hstack([none, costs.crossing_bytes]), np.hstack([costs.crossing_bytes, none])
    messages = received * (in_flight + slots) + sent * slots
    leaves = np.ceil(params * model.leaf_factor).astype(np.int64)
    total: Ints = params + leaves + state.astype(np.int64) + buffers + model.reserve_bytes
    total += model.microbatch_size * (sets * activations + messages)
    return total


def least_s(costs: CutCosts, count: int, in_flight: Ints, *, splits: bool) -> Floats:
    """Compute a lower bound of the simulated step of each cut, in seconds.

    Args:
        count: number of micro-batches.
        in_flight: most micro-batches in flight, broadcast to (cuts, stages).
        splits: True if backwards are split, so that lower stages wait for input gradients only.
    """
    stages = costs.forward_s.shape[1]
    trains = np.arange(stages) >= costs.first[:, None]
    forward_s, backward_s = costs.forward_s, np.where(trains, costs.backward_s, 0.0)
    waited_s = np.maximum(0.0, backward_s - costs.weight_s) * trains if splits else backward_s
    there_s = costs.occupancy_s + costs.latency_s
    back_s = np.where(trains[:, :-1], there_s, 0.0)
    none = np.zeros((len(forward_s), 1))
    arrives_s = np.hstack([none, np.cumsum(forward_s[:, :-1] + there_s, axis=1)])
    returns_s = np.hstack([none, np.cumsum(waited_s[:, :-1] + back_s, axis=1)])
    round_s = forward_s + waited_s
    beyond_s = np.hstack([round_s[:, 1:] + there_s + back_s, none])
    round_s = round_s + np.cumsum(beyond_s[:, ::-1], axis=1)[:, ::-1]
    rounds = np.where(trains, -(-count // in_flight), 1)
    computes = np.maximum(arrives_s + count * (forward_s + waited_s) + returns_s, count * (forward_s + backward_s))
    bounds = [computes.max(axis=1), (arrives_s + rounds * round_s * trains + returns_s).max(axis=1)]
    if stages > 1:
        sends_s = count * costs.occupancy_s + costs.latency_s
        out_s = arrives_s[:, :-1] + forward_s[:, :-1] + sends_s + forward_s[:, 1:] + waited_s[:, 1:] + returns_s[:, 1:]
        home_s = arrives_s[:, 1:] + round_s[:, 1:] + sends_s + waited_s[:, :-1] + returns_s[:, :-1]
        bounds += [out_s.max(axis=1), np.where(trains[:, :-1], home_s, 0.0).max(axis=1)]
    # Sums in another order differ by rounding.
    least: Floats = np.max(bounds, axis=0) * (1 - 1e-9)
    return least


@dataclass(frozen=True, eq=False)
class SizedCuts:
    """Costs of all cuts of one shape with one number of micro-batches.

    Attributes:
        shape: workers by stage.
        kind: properties of the requested schedule.
        number, size: number of micro-batches, and samples of each.
        costs: costs of the cuts, at speed 1 and without links.
        forward_s, backward_s, weight_s: seconds of one micro-batch, by cut and stage, on the slowest worker of a stage.
        reduce_s: seconds for which replicas sum gradients after their last backward, by cut and stage.
        hops_s: latency and occupancy of a forward message, then of a backward one; each by cut and hop.
    """

    shape: tuple[int, ...]
    kind: ScheduleKind
    number: int
    size: int
    costs: CutCosts
    forward_s: Floats
    backward_s: Floats
    weight_s: Floats
    reduce_s: Floats
    hops_s: tuple[Floats, ...]

    def of(self, cut: int) -> Costs:
        """Convert one cut to the simulator's input."""
        hops_s = [way_s[cut] for way_s in self.hops_s]
        costs = _costs(self.forward_s[cut], self.backward_s[cut], self.weight_s[cut], hops_s)
        reduce_s = tuple(self.reduce_s[cut].tolist())
        return replace(costs, reduce_s=reduce_s) if any(reduce_s) else costs

    @cached_property
    def bounds_s(self) -> Floats:
        """Lower bound of the simulated step of each cut, in seconds, as in the module's docstring."""
        workers, first = np.array(self.shape), self.costs.first
        trains = np.arange(len(self.shape)) >= first[:, None]
        forward_s, backward_s = self.forward_s, np.where(trains, self.backward_s, 0.0)
        if not self.kind.synchronous:  # the pipeline is not drained after every step
            of_stages: Floats = (self.number / workers * (forward_s + backward_s)).max(axis=1) * (1 - 1e-9)
            return of_stages
        latency_s, occupancy_s, back_latency_s, back_occupancy_s = self.hops_s
        there_s, back_s = latency_s + occupancy_s, back_latency_s + back_occupancy_s
        none = np.zeros((len(forward_s), 1))
        arrives_s = np.hstack([none, np.cumsum(forward_s[:, :-1] + there_s, axis=1)])
        returns_s = np.hstack([none, np.cumsum(backward_s[:, :-1] + np.where(trains[:, :-1], back_s, 0.0), axis=1)])
        busy_s = -(-self.number // workers) * (forward_s + backward_s)
        # In a split backward, gradients of parameters may be computed in parallel with lower stages' backwards.
        behind_s = self.reduce_s if self.kind.splits_backward else np.maximum(returns_s, self.reduce_s)
        bounds: Floats = (arrives_s + busy_s + behind_s).max(axis=1) * (1 - 1e-9)
        return bounds


def way_s(codec: CodecCost, sent: Floats, latency_s: Floats, bandwidth: Floats) -> tuple[Floats, Floats]:
    """Compute latency and occupancy of messages of ``sent`` bytes before encoding, by cut and hop.

    See ``CodecCost.taken_s``.
    """
    sending_s = sent / codec.ratio / bandwidth
    parts = np.stack([codec.encode_s_per_byte * sent, sending_s, codec.decode_s_per_byte * sent])
    return latency_s + (parts.sum(axis=0) - parts.max(axis=0)), parts.max(axis=0)
