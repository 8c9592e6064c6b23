"""Replicas of stages: how the lanes of micro-batches are dealt out, and how many forwards each replica runs ahead.

Micro-batches are dealt out into L lanes, and lanes to the R_s replicas of stage s (PipeDream's round robin, "1F1B-RR",
SOSP'19, section 3.2): micro-batch m is worked on by replica (m % L) % R_s, forward and backward. Stages 2-1, M=4:

    0: 0F0 0F2   . 0B0   .   .   . 0B2   .   .
    1: 0F1 0F3   .   .   . 0B1   .   .   . 0B3
    2:   . 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3   .

A replica of stage s runs floor((sum of R_t for t >= s, minus 1) / R_s) forwards ahead, so that stage 0 has
NOAM = ceil(N / R_0) micro-batches in flight on each of its replicas, where there are N workers: the least that keeps
all of them busy if stage s takes R_s times as long. With slack r_h on hop h it is floor((sum of r_h * R_(h + 1) for
h >= s, plus R_s - 1) / R_s), which is the same for r_h = 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import ScheduleError
from raypipe.ir.schedule import Homes, Wiring

__all__ = ["SINGLE", "Replicas", "ahead_of", "warmups_of"]


@dataclass(frozen=True, slots=True)
class Replicas:
    """How often each stage is there, and into how many lanes its gradients are summed.

    Attributes:
        by_stage: R_s; empty for one each.
        lanes: L, at least the largest of them.
    """

    by_stage: tuple[int, ...] = ()
    lanes: int = 1

    def of(self, num_stages: int) -> tuple[int, ...]:
        """R_s of every stage.

        Raises:
            ScheduleError: not one number for each stage, or one below 1.
        """
        found = self.by_stage or (1,) * num_stages
        if len(found) != num_stages or min(found) < 1:
            raise ScheduleError(f"replicas={found} for {num_stages} stages: give each stage a number of at least 1.")
        return found

    def homes(self, num_stages: int) -> Homes:
        """Workers by stage, numbered stage after stage."""
        ends = [*accumulate(self.of(num_stages), initial=0)]
        return tuple(tuple(range(first, stop)) for first, stop in pairwise(ends))

    def microbatches(self, wiring: Wiring, stage: int, worker: int) -> NDArray[np.int64]:
        """Those of one update that a worker has of its stage, in their order."""
        number = np.arange(wiring.update_interval)
        own = np.array([wiring.worker_of(stage, lane) == worker for lane in range(wiring.lanes)])
        found: NDArray[np.int64] = number[own[wiring.lane_of(number)]]
        return found


SINGLE = Replicas()
"""One worker for every stage."""


def warmups_of(replicas: Sequence[int], slack: Sequence[int] | int = 1) -> tuple[int, ...]:
    """By stage, forwards that each replica runs ahead of its backwards.

    Args:
        replicas: R_s by stage.
        slack: r_h by hop, or one for all.
    """
    hops = len(replicas) - 1
    by_hop = (slack,) * hops if isinstance(slack, int) else tuple(slack)
    ahead_of = (r * count for r, count in zip(reversed(by_hop), reversed(replicas), strict=False))
    behind = [*accumulate(ahead_of, initial=0)]
    return tuple((ahead + count - 1) // count for ahead, count in zip(reversed(behind), replicas, strict=True))


def ahead_of(replicas: Sequence[int], slack: Sequence[int] | int = 1) -> tuple[int, ...]:
    """W_s by stage: forwards that all replicas of a stage together run ahead of their backwards, w_s on each.

    It never grows from a stage to the next, so that no stage waits for forwards that stand behind one of its updates.
    """
    return tuple(w * count for w, count in zip(warmups_of(replicas, slack), replicas, strict=True))
