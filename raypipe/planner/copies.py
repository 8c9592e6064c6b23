"""Copies of state in memory: who holds whose, and how often they are worth taking. Pure arithmetic.

    cost of copying        cost_s per interval
    cost of a failure      half an interval of steps is done again, on average
    interval               where both together are least, but never more than OVERHEAD of the time

The first two give Young's interval, sqrt(2 cost_s MTBF) (Young, CACM 17(9), 1974), with the failure rate that is worth
insuring against in place of one that nobody knows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["MOST_STEPS", "CopyCosts", "copy_interval", "holders", "pieces_sent"]

OVERHEAD = 0.03
"""Of a step's time that copies may cost."""
FAILURES_PER_HOUR = 60.0
"""Of a whole run, that are insured against. Far more than most have: 300 spot machines that live for five hours each.
Who asks for a run that survives failures rather pays 1 or 2 % of the time than many seconds of work at each: a copy of
20 ms is taken every 1.5 s, and one of 50 ms every 2.4 s."""
SENDING_SHARE = 0.5
"""Of an interval in which copies may travel: the controller measures nothing meanwhile."""
MOST_STEPS = 1000


class CopyCosts(NamedTuple):
    """What was measured where copies cost most.

    Attributes:
        step_s: of the pipeline, while no copy is under way.
        cost_s: that steps took longer in all while one was.
        sent_s: from the first to the last byte of a copy that was sent.
    """

    step_s: float
    cost_s: float
    sent_s: float = 0.0


def copy_interval(costs: CopyCosts, failures_per_hour: float = FAILURES_PER_HOUR) -> int:
    """Steps between two copies, at least 1.

    Args:
        failures_per_hour: of the run.
    """
    young_s = math.sqrt(2 * costs.cost_s * 3600 / failures_per_hour)
    least_s = max(costs.cost_s / OVERHEAD, costs.sent_s / SENDING_SHARE)
    return min(MOST_STEPS, max(1, math.ceil(max(young_s, least_s) / costs.step_s)))


def holders(
    nodes: Sequence[str], homes: Sequence[Sequence[int]] = (), *, shared_out: bool = False
) -> tuple[int | None, ...]:
    """By worker, the worker that holds its copies: on another node where there is one, and each as few as possible.

    Replicas of a stage have the same state, so that each holds what the others copy. They send theirs to nobody, but
    for the first one where all of them are on one node and other workers are not. Where they share out the state of
    their optimizer, each sends its slices: rather to a worker of another stage than to one of its fellows, with whom
    two pieces would be lost.

    Args:
        nodes: that the workers are on.
        homes: workers of each stage; empty where no stage has several.
        shared_out: replicas share out the state of their optimizer.
    """
    fellows = {worker: workers for workers in homes for worker in workers if len(workers) > 1}
    count = len(nodes)
    held = [0] * count
    found: list[int | None] = []
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
        found.append(holder)
    return tuple(found)


def pieces_sent(
    homes: Sequence[Sequence[int]], held_by: Sequence[int | None], *, shared_out: bool
) -> list[list[tuple[int, int]]]:
    """By worker, as (stage, piece), what of the copies of its stages it sends to its holder.

    Piece 0 is what all replicas of a stage have alike, so that one of them sends it, and none where the holder is a
    replica too; piece n is the slices of the n-th.

    Args:
        homes: workers of each stage.
        held_by, shared_out: see ``holders``.
    """
    found: list[list[tuple[int, int]]] = [[] for _ in held_by]
    for stage, workers in enumerate(homes):
        slices = shared_out and len(workers) > 1
        for at, worker in enumerate(workers):
            holder = held_by[worker]
            if holder is None:
                continue
            if not slices or (at == 0 and holder not in workers):
                found[worker].append((stage, 0))
            if slices:
                found[worker].append((stage, 1 + at))
    return found
