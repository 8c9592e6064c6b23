"""In-memory copies of workers' state: the worker that holds each copy, and the interval at which copies are made.

    cost of copying        cost_s per interval
    cost of a failure      half an interval of steps is repeated, on average
    interval               minimum of their sum, but copies cost at most OVERHEAD of the time

The first two give Young's interval, sqrt(2 cost_s MTBF) (Young, CACM 17(9), 1974). The true failure rate is unknown, so
an assumed one is used: FAILURES_PER_HOUR.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

OVERHEAD = 0.03
"""Maximum share of a step's time that copies may cost."""
FAILURES_PER_HOUR = 60.0
"""Assumed failure rate of a whole run, far above most: 300 spot machines that live for five hours each. It costs 1 or 2
% of the time: a copy of 20 ms is taken every 1.5 s, and one of 50 ms every 2.4 s.
"""
SENDING_SHARE = 0.5
"""Maximum share of an interval in which copies may be sent, because the controller measures nothing meanwhile."""
MOST_STEPS = 1000


class CopyCosts(NamedTuple):
    """Measured costs of a copy, on the stage with the highest costs.

    Attributes:
        step_s: duration of a step without copying.
        cost_s: time that a copy costs: by how much all steps during it are longer, in sum.
        sent_s: time from the first to the last byte of a sent copy.
    """

    step_s: float
    cost_s: float
    sent_s: float = 0.0


def copy_interval(costs: CopyCosts, failures_per_hour: float = FAILURES_PER_HOUR) -> int:
    """Return the number of steps between two copies, at least 1.

    Args:
        failures_per_hour: assumed failures of the whole run per hour.
    """
    young_s = math.sqrt(2 * costs.cost_s * 3600 / failures_per_hour)
    least_s = max(costs.cost_s / OVERHEAD, costs.sent_s / SENDING_SHARE)
    return min(MOST_STEPS, max(1, math.ceil(max(young_s, least_s) / costs.step_s)))


def holders(
    nodes: Sequence[str], homes: Sequence[Sequence[int]] = (), *, shared_out: bool = False
) -> tuple[int | None, ...]:
    """Return, by worker, the worker that holds its copies; None if it sends no copies.

    A holder is on another node if possible, and copies are spread evenly over the possible holders. Replicas of a stage
    have equal state, so they back up each other and send no copies. But if all replicas of a stage are on one node, the
    first of them sends copies to another node, if any has workers. If the optimizer state is sharded over replicas,
    each sends its slices, preferably to a worker of another stage: losing a replica that holds a copy would lose two
    pieces.

    Args:
        nodes: node of each worker.
        homes: workers of each stage; empty if no stage has several.
        shared_out: True if the optimizer state is sharded over replicas.
    """
    fellows = {worker: workers for workers in homes for worker in workers if len(workers) > 1}
    count = len(nodes)
    held = [0] * count
    holder_of: list[int | None] = []
    for worker in range(count):
        others = [(worker + distance) % count for distance in range(1, count)]
        away = [other for other in others if nodes[other] != nodes[worker]]
        if (replicas := fellows.get(worker)) is not None and shared_out:
            away, others = ([other for other in some if other not in replicas] or some for some in (away, others))
        elif replicas is not None:
            together = all(nodes[replica] == nodes[worker] for replica in replicas)
            others = away if together and worker == replicas[0] else []
        away = away if others and away else others
        holder = min(away, key=lambda other: held[other], default=None)
        if holder is not None:
            held[holder] += 1
        holder_of.append(holder)
    return tuple(holder_of)


def pieces_sent(
    homes: Sequence[Sequence[int]], held_by: Sequence[int | None], *, shared_out: bool
) -> list[list[tuple[int, int]]]:
    """List, by worker, the (stage, piece) pairs that it sends to its holder.

    Piece 0 is the state that is equal on all replicas. If the optimizer state is sharded over replicas, only the first
    replica sends piece 0, and it does not if its holder is itself a replica of the stage. Piece n is the slices of the
    n-th replica, which sends them.

    Args:
        homes: workers of each stage.
        held_by, shared_out: see ``holders``.
    """
    pieces: list[list[tuple[int, int]]] = [[] for _ in held_by]
    for stage, workers in enumerate(homes):
        slices = shared_out and len(workers) > 1
        for at, worker in enumerate(workers):
            holder = held_by[worker]
            if holder is None:
                continue
            if not slices or (at == 0 and holder not in workers):
                pieces[worker].append((stage, 0))
            if slices:
                pieces[worker].append((stage, 1 + at))
    return pieces
