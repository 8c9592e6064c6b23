"""Asynchronous schedules: 1F1B that does not run empty between mini-batches.

S=3, mini-batches of two micro-batches, rows in parts; with an update per mini-batch it stands where a part ends:

    prologue | body        | body        | epilogue
    0: F0 F1 | F2 B0 F3 B1 | F4 B2 F5 B3 |    B4    B5
    1: F0    | F1 B0 F2 B1 | F3 B2 F4 B3 | F5 B4    B5
    2:       | F0 B0 F1 B1 | F2 B2 F3 B3 | F4 B4 F5 B5

and in time, one slot per action:

    0: F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3  . B4  . B5
    1:  . F0 F1  . B0 F2 B1 F3 B2 F4 B3 F5 B4  . B5  .
    2:  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5  .  .

Stage s runs w_s forwards ahead, in the prologue; the body takes turns, one mini-batch per repetition; the epilogue
completes the mini-batches that have been begun by then.
How far ahead is PipeDream's NOAM for slack 1 (w_s = S - 1 - s); more slack, r_h on hop h, hides slower links
(w_s = r_s + ... + r_(S-2)).

Which version of the weights a micro-batch uses is not the schedule's business: see ``raypipe.ir.weights``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate

import numpy as np

from raypipe.errors import ScheduleError
from raypipe.ir.schedule import Op, Row, Schedule, Wiring, single_homes
from raypipe.ir.segment import Phase
from raypipe.planner.schedule.sync import check_counts, slack_by_hop
from raypipe.planner.tables import OP_CODE, pack

__all__ = ["continuous", "finite", "minibatches_to_drain", "part", "warmups_of"]


def warmups_of(num_stages: int, slack: Sequence[int] | int = 1) -> tuple[int, ...]:
    """w_s: forwards that each stage runs ahead of its backwards.

    Args:
        slack: forwards that may be under way over each hop, or over all of them alike.
    """
    by_hop = [slack] * (num_stages - 1) if isinstance(slack, int) else list(slack)
    return tuple(accumulate([0, *reversed(by_hop)]))[::-1]


def minibatches_to_drain(num_microbatches: int, warmups: tuple[int, ...]) -> int:
    """Mini-batches that the epilogue completes: those that the prologue, or the body before, has begun."""
    return math.ceil(warmups[0] / num_microbatches)


def continuous(
    kind: str,
    num_stages: int,
    num_microbatches: int,
    interval: int,
    *,
    slack: Sequence[int] | int = 1,
    first_trainable: int = 0,
    norm_per_stage: bool = True,
) -> Schedule:
    """1F1B without a flush; see the module for a picture. Compute actions only.

    Args:
        kind: for people, as ``2bw``.
        num_stages: S.
        num_microbatches: M, of one mini-batch: the body's stride.
        interval: u, micro-batches per update; divides M.
        slack: forwards that may be under way over each hop, or over all of them alike.
        first_trainable: lowest stage with a backward.
        norm_per_stage: see Wiring.

    Raises:
        ScheduleError: a number is out of range, or u does not divide M.
    """
    check_counts(num_stages, num_microbatches, first_trainable)
    warmups = warmups_of(num_stages, slack_by_hop(num_stages, slack))
    _check_interval(interval, num_microbatches)
    tail = num_microbatches * minibatches_to_drain(num_microbatches, warmups)
    stages = range(num_stages)
    wiring = Wiring(single_homes(stages), interval, first_trainable=first_trainable, norm_per_stage=norm_per_stage)
    return Schedule(
        kind,
        wiring,
        body=tuple(_turns(s, warmups[s], num_microbatches, num_microbatches, s >= first_trainable) for s in stages),
        stride=num_microbatches,
        prologue=tuple(_turns(s, 0, warmups[s], 0, s >= first_trainable) for s in stages),
        epilogue=tuple(_turns(s, warmups[s], tail - warmups[s], tail, s >= first_trainable) for s in stages),
    )


def _check_interval(interval: int, num_microbatches: int) -> None:
    if interval < 1 or num_microbatches % interval:
        raise ScheduleError(
            f"An update every {interval} micro-batches does not go into mini-batches of {num_microbatches}: "
            "update_interval must divide num_microbatches."
        )


def finite(schedule: Schedule, num_minibatches: int) -> Schedule:
    """So many mini-batches of a ``continuous`` schedule from an empty pipeline to an empty one: prologue and one body.

    It is what prologue, bodies and epilogue amount to, and exists for fewer mini-batches than the epilogue has too.
    """
    wiring, total = schedule.wiring, num_minibatches * schedule.stride
    prologue, body = [], []
    for stage, row in enumerate(schedule.prologue):
        trains = stage >= wiring.first_trainable
        ahead = min(len(row), total) if trains else 0  # without a backward nothing is left over for the body
        prologue.append(_turns(stage, 0, ahead, 0, trains))
        body.append(_turns(stage, ahead, total - ahead, total, trains))
    return Schedule(schedule.kind, wiring, tuple(body), stride=total, prologue=tuple(prologue))


def part(lowered: Schedule, phase: Phase) -> Schedule:
    """The rows of one phase of a lowered ``continuous`` schedule, as one body."""
    rows: tuple[Row, ...] = lowered.epilogue
    if phase is Phase.STEADY:
        rows = lowered.body
    elif phase is Phase.FILL:
        rows = tuple((*one, *other) for one, other in zip(lowered.prologue, lowered.body, strict=True))
    elif phase is Phase.WHOLE:
        raise ScheduleError("The phase WHOLE is no part of a continuous schedule: ask finite() for it.")
    return Schedule(f"{lowered.kind} {phase.value}", lowered.wiring, rows, stride=lowered.stride)


def _turns(stage: int, ahead: int, forwards: int, backwards: int, trains: bool) -> Row:
    """So many forwards, the first of micro-batch ``ahead``, and backwards in turn; what is left over comes last."""
    numbers = [np.arange(forwards) + ahead, np.arange(backwards if trains else 0)]
    ops = [np.full(len(found), OP_CODE[op]) for op, found in zip((Op.F, Op.B), numbers, strict=True)]
    # Forward i stands before backward i; a stable sort by turn keeps that.
    turn = np.concatenate([np.arange(len(found)) for found in numbers])
    order = np.argsort(turn, kind="stable")
    count = len(order)
    return pack(np.full(count, stage), np.concatenate(ops)[order], np.concatenate(numbers)[order])
