"""Costs, memory and lower bounds of many cuts at once: what ``pool`` orders its candidates by, without simulating.

    arrives    F of the stages before and their messages        a stage cannot begin earlier
    returns    B of the stages before and their messages        the step cannot end earlier after a stage's last B

A step takes no less than, for any stage: arrives + all that it computes + returns; arrives + the rounds that its
micro-batches in flight make it wait, each to the last stage and back, + returns; and the same for the messages of a
hop, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe.ir.cluster import Cluster
from raypipe.ir.graph import ModelGraph
from raypipe.planner.columns import columns_of
from raypipe.planner.memory import MemoryModel
from raypipe.planner.simulate.serial import Costs

__all__ = ["CutCosts", "cut_costs", "least_s", "stage_bytes"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class CutCosts(NamedTuple):
    """All cuts at one micro-batch size, stage s on device s; shape (cuts, stages) or (cuts, stages - 1) of hops.

    Attributes:
        graph: with the seconds of this size.
        positions: where stages begin, and the end; shape (cuts, stages + 1).
        first: lowest stage that trains, by cut.
        weight_s: the part of a backward that no other stage waits for, where backwards are split.
        crossing_bytes: of one sample.
        held_bytes: parameters, those that learn, buffers and activations of one sample; shape (4, cuts, stages).
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
        """The simulator's input for one cut."""
        backward_s, weight_s = self.backward_s[cut], self.weight_s[cut]
        latency_s, occupancy_s = tuple(self.latency_s[0].tolist()), tuple(self.occupancy_s[cut].tolist())
        return Costs(
            forward_s=tuple(self.forward_s[cut].tolist()),
            backward_s=tuple(backward_s.tolist()),
            backward_input_s=tuple(np.maximum(0.0, backward_s - weight_s).tolist()),
            backward_weight_s=tuple(weight_s.tolist()),
            forward_latency_s=latency_s,
            backward_latency_s=latency_s,
            forward_occupancy_s=occupancy_s,
            backward_occupancy_s=occupancy_s,
        )


def cut_costs(
    graph: ModelGraph, cluster: Cluster, cuts: Ints, microbatch_size: int, recompute: Sequence[bool] = ()
) -> CutCosts:
    """The costs of cuts.

    Args:
        cuts: as indices into the places of the graph.
        recompute: by stage, whether backwards run the forward again; empty for none.
    """
    found = columns_of(graph)
    positions = found.places[cuts]
    stages = cuts.shape[1] - 1

    def by_stage(seconds: list[float]) -> Floats:
        sums = np.append(0.0, np.cumsum(seconds))[positions]
        by_cut: Floats = np.diff(sums, axis=1) / cluster.devices[0].speed
        return by_cut

    forward_s = by_stage([node.forward_s for node in graph.nodes])
    backward_s = by_stage([node.backward_s for node in graph.nodes])
    weight_s = by_stage([node.backward_weight_s for node in graph.nodes])
    held_bytes = np.diff(found.before[:, positions], axis=2)
    # No stage that trains at all: argmax gives 0, as first_trainable_stage does.
    first = (held_bytes[1] > 0).argmax(axis=1)
    if any(recompute):
        backward_s = backward_s + np.where(np.array(recompute) & (np.arange(stages) >= first[:, None]), forward_s, 0.0)
    crossing = found.cut_bytes[cuts[:, 1:-1]]
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
    """``memory.stage_memory`` of all cuts, of a synchronous schedule and without the workspace; (cuts, stages).

    Args:
        model: its sizes and factors count; what is in flight is given.
        in_flight, sets, slots: of MemoryModel, broadcast to (cuts, stages).
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
    """A step that no simulation of these cuts beats, by cut."""
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
    found: Floats = np.max(bounds, axis=0) * (1 - 1e-9)
    return found
