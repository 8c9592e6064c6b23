"""Replicas of stages: assignment of micro-batches to them, and the number of forwards that each replica runs ahead.

Micro-batches are assigned in turn to L lanes, and lanes to the R_s replicas of stage s (PipeDream's round robin,
"1F1B-RR", SOSP'19, section 3.2): replica (m % L) % R_s runs forward and backward of micro-batch m. Stages 2-1, M=4:

    0: 0F0 0F2   . 0B0   .   .   . 0B2   .   .
    1: 0F1 0F3   .   .   . 0B1   .   .   . 0B3
    2:   . 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3   .

A replica of stage s runs floor((sum of R_t for t >= s, minus 1) / R_s) forwards ahead, so that stage 0 has
NOAM = ceil(N / R_0) micro-batches in flight on each of its replicas, where there are N workers: the least that keeps
all of them busy if stage s takes R_s times as long. With slack r_h on hop h it is floor((sum of r_h * R_(h + 1) for
h >= s, plus R_s - 1) / R_s), which is the same for r_h = 1.

If workers hold several stages, all stages have R replicas, which make R pipelines in parallel (``side_by_side``).
Replica r of every stage has the lanes r, r + R, ..., so a micro-batch passes only through replicas with the same r.
Each pipeline has the rows that it would have alone for its share of the micro-batches. zb-v of 4 stages on 2 workers,
with 2 replicas of each, M=4:

    0: 0F0 0F2   . 3F0 3I0 3W0 3F2 3I2 3W2 0I0 0W0 0I2 0W2
    1: 0F1 0F3   . 3F1 3I1 3W1 3F3 3I3 3W3 0I1 0W1 0I3 0W3
    2:   . 1F0 2F0 1F2 2F2 2I0 2W0 1I0 2I2 1I2 1W0 2W2 1W2
    3:   . 1F1 2F1 1F3 2F3 2I1 2W1 1I1 2I3 1I3 1W1 2W3 1W3

The pipelines wait for each other only to sum gradients, after all computation of a worker (``lower``).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import ScheduleError
from raypipe.ir.schedule import Homes, Row, Schedule, Wiring
from raypipe.planner.dependency_tables import encode, pack


@dataclass(frozen=True, slots=True)
class Replicas:
    """Replicas per stage, and the number of gradient-accumulation lanes.

    Attributes:
        by_stage: number of replicas of each stage, R_s; empty for one each.
        lanes: number of lanes, L, at least the largest number of replicas.
    """

    by_stage: tuple[int, ...] = ()
    lanes: int = 1

    def of(self, num_stages: int) -> tuple[int, ...]:
        """Return the number of replicas of every stage.

        Raises:
            ScheduleError: ``by_stage`` does not have one number for each stage, or has a number below 1.
        """
        counts = self.by_stage or (1,) * num_stages
        if len(counts) != num_stages or min(counts) < 1:
            raise ScheduleError(f"replicas={counts} for {num_stages} stages: give each stage a number of at least 1.")
        return counts

    def homes(self, num_stages: int) -> Homes:
        """Return the workers of every stage, numbered stage after stage."""
        ends = [*accumulate(self.of(num_stages), initial=0)]
        return tuple(tuple(range(first, stop)) for first, stop in pairwise(ends))

    def microbatches(self, wiring: Wiring, stage: int, worker: int) -> NDArray[np.int64]:
        """Return the micro-batches of one update that a worker runs on a stage, in order."""
        number = np.arange(wiring.update_interval)
        own = np.array([wiring.worker_of(stage, lane) == worker for lane in range(wiring.lanes)])
        microbatches: NDArray[np.int64] = number[own[wiring.lane_of(number)]]
        return microbatches


SINGLE = Replicas()
"""One worker for every stage."""


def warmups_of(replicas: Sequence[int], slack: Sequence[int] | int = 1) -> tuple[int, ...]:
    """Return, by stage, the forwards that each replica runs ahead of its backwards.

    Args:
        replicas: number of replicas by stage, R_s.
        slack: slack by hop, r_h, or one value for all hops.
    """
    hops = len(replicas) - 1
    by_hop = (slack,) * hops if isinstance(slack, int) else tuple(slack)
    ahead_of = (r * count for r, count in zip(reversed(by_hop), reversed(replicas), strict=False))
    behind = [*accumulate(ahead_of, initial=0)]
    return tuple((ahead + count - 1) // count for ahead, count in zip(reversed(behind), replicas, strict=True))


def ahead_of(replicas: Sequence[int], slack: Sequence[int] | int = 1) -> tuple[int, ...]:
    """Return, by stage, the forwards that all replicas together run ahead of their backwards (W_s = w_s * R_s).

    The number never grows from a stage to the next, so no stage waits for forwards that follow one of its own updates.

    Args:
        replicas, slack: as in ``warmups_of``.
    """
    return tuple(w * count for w, count in zip(warmups_of(replicas, slack), replicas, strict=True))


def side_by_side(alone: Callable[[int], Schedule], num_microbatches: int, replicas: Replicas) -> Schedule:
    """Build parallel pipelines, one per replica of the stages.

    Args:
        alone: builds the schedule of one pipeline for a number of micro-batches, always with the same placement.
        num_microbatches: M, per optimizer step, over all pipelines.
        replicas: replicas of every stage.

    Raises:
        ScheduleError: a number is out of range.
    """
    whole = alone(num_microbatches)
    count = replicas.of(whole.num_stages)[0]
    homes = tuple(tuple(range(count * worker, count * (worker + 1))) for worker in whole.wiring.placement)
    wiring = replace(whole.wiring, homes=homes, lanes=replicas.lanes)
    if count == 1:
        return replace(whole, wiring=wiring)
    rows: list[Row] = [()] * (count * whole.num_workers)
    for replica, leader in enumerate(homes[0]):
        own = replicas.microbatches(wiring, 0, leader)
        for worker, row in enumerate(alone(len(own)).body if len(own) else ()):
            stage, op, number = encode(row)
            rows[count * worker + replica] = pack(stage, op, own[number])
    return replace(whole, wiring=wiring, body=tuple(rows))
