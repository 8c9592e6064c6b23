"""What a schedule's rows make each stage hold: counted, for schedules whose micro-batches in flight have no formula.

    row of a worker   0F0 0F1 2F0 2F1 0F2 2B0 ...       whatever the costs, a worker runs its row in this order
    stage 0            1   2           3                micro-batches between F and B (or W)
    stage 2                    1   2       1

A micro-batch between I and W counts twice among the activation sets, as in ``planner.memory``: for the operands of its
products, and for the gradients of what those made. Here even where its W is the next action of its row, which makes
one more than the formula of zb-h1. A stage that runs its forwards again holds activations from B or I on, and not yet
between F and there. How many messages wait does depend on the costs; that number is the
one of equal stages and free links, where backwards take twice as long as forwards.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from numpy.typing import NDArray

from raypipe.ir.schedule import Op, Schedule
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.ir.timeline import Timeline
from raypipe.planner.memory import Resident
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower
from raypipe.planner.simulate.serial import Costs, simulate
from raypipe.planner.tables import OP_CODE, OPS, encode

__all__ = ["resident_of", "resident_under"]

FULL = 2
"""Micro-batches per stage from which on the steady state of a step only grows longer, where rounds are equal."""

_FLIGHT = np.zeros(len(OPS), dtype=np.int64)
_FLIGHT[[OP_CODE[Op.F], OP_CODE[Op.B], OP_CODE[Op.W]]] = 1, -1, -1
_SETS = np.zeros(len(OPS), dtype=np.int64)
_SETS[[OP_CODE[Op.F], OP_CODE[Op.B], OP_CODE[Op.I], OP_CODE[Op.W]]] = 1, -1, 1, -2
"""By operation, what it adds to the micro-batches in flight and to the activation sets of its stage."""
_AGAIN = np.zeros(len(OPS), dtype=np.int64)
_AGAIN[[OP_CODE[Op.I], OP_CODE[Op.W]]] = 2, -2
"""The same of a stage that runs its forwards again, besides those of a B that is being carried out."""


def resident_of(schedule: Schedule) -> Resident:
    """The most that any worker of each stage holds at once.

    Args:
        schedule: compute actions only.
    """
    in_flight, sets, again = ([0] * schedule.num_stages for _ in range(3))
    for row in schedule.rows():
        stages, ops, _ = encode(row)
        for stage in np.unique(stages).tolist():
            own = ops[stages == stage]
            in_flight[stage] = max(in_flight[stage], int(np.cumsum(_FLIGHT[own]).max()))
            sets[stage] = max(sets[stage], int(np.cumsum(_SETS[own]).max()))
            again[stage] = max(again[stage], int((np.cumsum(_AGAIN[own]) + (own == OP_CODE[Op.B])).max()))
    timeline = simulate(lower(schedule), Costs.uniform(schedule.num_stages))
    return Resident(tuple(in_flight), tuple(sets), _most_waiting(timeline, schedule), tuple(again))


@functools.lru_cache(maxsize=1024)  # the same few numbers are asked for at every cut and in every search
def resident_under(spec: ScheduleSpec, num_stages: int, workers: int) -> Resident:
    """The same of a schedule by its numbers, with backwards on all stages: nobody knows the lowest that trains yet.

    Args:
        workers: of the schedule, where each has several stages.
    """
    # Further micro-batches only repeat the steady state. What is left over decides how long rounds are: with as many
    # rounds as workers, none is longer than by one.
    count = spec.num_microbatches
    enough = max(FULL * num_stages, -(-(workers**2) // num_stages) * num_stages) + count % num_stages
    if spec.replicas:
        enough = 2 * FULL * spec.lanes * max(spec.slack, default=1) * (1 + sum(spec.replicas)) + count % spec.lanes
    if not spec.of_kind.synchronous:  # the prologue fills it, whatever the mini-batch
        enough = spec.update_interval or spec.lanes
    spec = dataclasses.replace(spec.with_microbatches(min(count, enough)), first_trainable=0)
    return resident_of(schedule_of(spec, num_stages))


def _most_waiting(timeline: Timeline, schedule: Schedule) -> int:
    """Most messages of one hop and direction that have arrived before the action that takes them could begin."""
    backward = Op.I if schedule.wiring.split_backward else Op.B
    times: dict[tuple[int, Op], list[tuple[float, float]]] = {}
    for _, action, start_s, end_s in timeline.spans:
        if action.op in (Op.F, backward):
            times.setdefault((action.stage, action.op), []).append((start_s, end_s))
    found = 1
    for (stage, op), rows in times.items():
        source = times.get((stage - 1 if op is Op.F else stage + 1, op))
        if source is not None:
            found = max(found, _behind(np.sort([end for _, end in source]), np.sort([start for start, _ in rows])))
    return found


def _behind(arrived_s: NDArray[np.float64], begun_s: NDArray[np.float64]) -> int:
    """Most that have arrived and not begun, looked at just before each begins."""
    waiting = np.searchsorted(arrived_s, begun_s) - np.arange(len(begun_s))
    return int(waiting.max(initial=0))
