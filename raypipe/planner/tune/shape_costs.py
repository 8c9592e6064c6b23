"""What all cuts of one shape cost, and a lower bound of their steps: what ``replicated`` orders its candidates by."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from raypipe.ir.codec_cost import CodecCost
from raypipe.ir.schedule_spec import ScheduleKind
from raypipe.planner.simulate.serial import Costs
from raypipe.planner.tune.pool_bounds import CutCosts

__all__ = ["SizedCuts", "way_s"]

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SizedCuts:
    """All cuts of one shape with one number of micro-batches.

    Attributes:
        shape: workers by stage.
        kind: of the schedule, where one was asked for.
        number, size: of micro-batches, and of each in samples.
        costs: of the cuts, at speed 1 and without links.
        forward_s, backward_s, weight_s, reduce_s: by cut and stage, on the workers of the shape.
        hops_s: latency and occupancy of a message that goes ahead, then of one that comes back; each by cut and hop.
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

    @cached_property
    def bounds_s(self) -> Floats:
        """By cut, a step that no simulation beats.

        A stage waits for its first message, and its last backward goes down.
        """
        workers, first = np.array(self.shape), self.costs.first
        trains = np.arange(len(self.shape)) >= first[:, None]
        forward_s, backward_s = self.forward_s, np.where(trains, self.backward_s, 0.0)
        if not self.kind.synchronous:  # the pipeline does not run empty behind every step
            of_stages: Floats = (self.number / workers * (forward_s + backward_s)).max(axis=1) * (1 - 1e-9)
            return of_stages
        latency_s, occupancy_s, back_latency_s, back_occupancy_s = self.hops_s
        there_s, back_s = latency_s + occupancy_s, back_latency_s + back_occupancy_s
        none = np.zeros((len(forward_s), 1))
        arrives_s = np.hstack([none, np.cumsum(forward_s[:, :-1] + there_s, axis=1)])
        returns_s = np.hstack([none, np.cumsum(backward_s[:, :-1] + np.where(trains[:, :-1], back_s, 0.0), axis=1)])
        busy_s = -(-self.number // workers) * (forward_s + backward_s)
        # Where backwards are split, parameters' gradients may lie beside what goes down.
        behind_s = self.reduce_s if self.kind.splits_backward else np.maximum(returns_s, self.reduce_s)
        found: Floats = (arrives_s + busy_s + behind_s).max(axis=1) * (1 - 1e-9)
        return found


def way_s(codec: CodecCost, sent: Floats, latency_s: Floats, bandwidth: Floats) -> tuple[Floats, Floats]:
    """Latency and occupancy of messages of so many bytes, by cut and hop; see ``CodecCost.taken_s``."""
    sending_s = sent / codec.ratio / bandwidth
    parts = np.stack([codec.encode_s_per_byte * sent, sending_s, codec.decode_s_per_byte * sent])
    return latency_s + (parts.sum(axis=0) - parts.max(axis=0)), parts.max(axis=0)
