"""What all cuts of one shape cost, and a lower bound of their steps: what ``replicated`` orders its candidates by."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe.ir.codec_cost import CodecCost
from raypipe.planner.simulate.serial import Costs
from raypipe.planner.tune.pool_bounds import CutCosts

__all__ = ["SizedCuts", "bounds_s", "way_s"]

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class SizedCuts(NamedTuple):
    """All cuts of one shape with one number of micro-batches.

    Attributes:
        costs: of the cuts, at speed 1 and without links.
        forward_s, backward_s, weight_s, reduce_s: by cut and stage, on the workers of the shape.
        hops_s: latency and occupancy of a message that goes ahead, then of one that comes back; each by cut and hop.
        bounds_s: a step that no simulation of the cut beats.
    """

    number: int
    size: int
    costs: CutCosts
    forward_s: Floats
    backward_s: Floats
    weight_s: Floats
    reduce_s: Floats
    hops_s: tuple[Floats, ...]
    bounds_s: Floats

    def of(self, cut: int) -> Costs:
        """The simulator's input for one cut."""
        latency_s, occupancy_s, back_latency_s, back_occupancy_s = (tuple(way[cut].tolist()) for way in self.hops_s)
        reduce_s = tuple(self.reduce_s[cut].tolist())
        input_s = np.maximum(0.0, self.backward_s[cut] - self.weight_s[cut])
        return Costs(
            forward_s=tuple(self.forward_s[cut].tolist()),
            backward_s=tuple(self.backward_s[cut].tolist()),
            backward_input_s=tuple(input_s.tolist()),
            backward_weight_s=tuple(self.weight_s[cut].tolist()),
            forward_latency_s=latency_s,
            backward_latency_s=back_latency_s,
            forward_occupancy_s=occupancy_s,
            backward_occupancy_s=back_occupancy_s,
            reduce_s=reduce_s if any(reduce_s) else (),
        )


def way_s(codec: CodecCost, sent: Floats, latency_s: Floats, bandwidth: Floats) -> tuple[Floats, Floats]:
    """Latency and occupancy of messages of so many bytes, by cut and hop; see ``CodecCost.taken_s``."""
    sending_s = sent / codec.ratio / bandwidth
    parts = np.stack([codec.encode_s_per_byte * sent, sending_s, codec.decode_s_per_byte * sent])
    return latency_s + (parts.sum(axis=0) - parts.max(axis=0)), parts.max(axis=0)


def bounds_s(
    shape: Ints, count: int, first: Ints, forward_s: Floats, backward_s: Floats, reduce_s: Floats, there_s: Floats,
    back_s: Floats, *, empties: bool, splits: bool,
) -> Floats:  # fmt: skip
    """By cut, a step that no simulation beats: a stage waits for its first message, and its last backward goes down.

    Args:
        first: by cut, the lowest stage that trains.
        there_s, back_s: of one message ahead and back, by cut and hop.
        empties: the pipeline runs empty behind every step.
        splits: backwards are split, so that parameters' gradients may lie beside what goes down.
    """
    stages = len(shape)
    trains = np.arange(stages) >= first[:, None]
    backward_s = np.where(trains, backward_s, 0.0)
    none = np.zeros((len(forward_s), 1))
    arrives_s = np.hstack([none, np.cumsum(forward_s[:, :-1] + there_s, axis=1)])
    returns_s = np.hstack([none, np.cumsum(backward_s[:, :-1] + np.where(trains[:, :-1], back_s, 0.0), axis=1)])
    busy_s = -(-count // shape) * (forward_s + backward_s)
    if not empties:
        of_stages: Floats = (count / shape * (forward_s + backward_s)).max(axis=1) * (1 - 1e-9)
        return of_stages
    behind_s = reduce_s if splits else np.maximum(returns_s, reduce_s)
    found: Floats = (arrives_s + busy_s + behind_s).max(axis=1) * (1 - 1e-9)
    return found
