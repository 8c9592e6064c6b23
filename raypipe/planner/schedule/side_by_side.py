"""Replicas of workers that hold several stages: as many pipelines side by side, each with micro-batches of its own.

All workers have as many replicas. So replica r of every stage has the lanes r, r + R, ..., a micro-batch stays among
the replicas r from the first stage to the last, and each of these pipelines has the rows that it would have alone, of
fewer micro-batches. zb-v of 4 stages on 2 workers, each of them twice, M=4:

    0: 0F0 0F2   . 3F0 3I0 3W0 3F2 3I2 3W2 0I0 0W0 0I2 0W2
    1: 0F1 0F3   . 3F1 3I1 3W1 3F3 3I3 3W3 0I1 0W1 0I3 0W3
    2:   . 1F0 2F0 1F2 2F2 2I0 2W0 1I0 2I2 1I2 1W0 2W2 1W2
    3:   . 1F1 2F1 1F3 2F3 2I1 2W1 1I1 2I3 1I3 1W1 2W3 1W3

They meet where gradients are summed, once a worker has nothing left to compute (``lower``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from raypipe.ir.schedule import Row, Schedule
from raypipe.planner.schedule.replicas import Replicas
from raypipe.planner.tables import encode, pack

__all__ = ["side_by_side"]


def side_by_side(alone: Callable[[int], Schedule], num_microbatches: int, replicas: Replicas) -> Schedule:
    """So many pipelines side by side as every stage has replicas.

    Args:
        alone: so many micro-batches -> one of them; all of them have the same placement.
        num_microbatches: M, per optimizer step, of all together.
        replicas: as many of each stage.

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
