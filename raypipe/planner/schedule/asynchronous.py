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

Stages may have replicas (``replicas``): each of them has a prologue, body and epilogue of its own micro-batches, and
takes part in every update of its stage. As a whole, stage s runs W_s = w_s * R_s forwards ahead. Stages 2-1, an update
every two micro-batches, in time, with its body twice:

    0: 0F0 0F2   . 0B0 0F4   .   . 0B2   .   .   . 0B4   .   .
    1: 0F1 0F3   .   .   . 0B1 0F5   .   . 0B3   .   .   . 0B5
    2:   . 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4 1F5 1B5   .

Which version of the weights a micro-batch uses is not the schedule's business: see ``raypipe.ir.weights``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import ScheduleError
from raypipe.ir.schedule import Op, Row, Schedule, Wiring
from raypipe.ir.segment import Phase
from raypipe.planner.schedule.replicas import SINGLE, Replicas, ahead_of
from raypipe.planner.schedule.sync import check_counts, slack_by_hop
from raypipe.planner.tables import OP_CODE, pack

__all__ = ["continuous", "finite", "minibatches_to_drain", "part"]


def minibatches_to_drain(num_microbatches: int, ahead: int) -> int:
    """Mini-batches that the epilogue completes: those that the prologue, or the body before, has begun.

    One at least: a single stage begins none before its time, and yet the rule by which weights are late goes on from
    mini-batch to mini-batch there too.

    Args:
        ahead: W_0, forwards that stage 0 runs ahead of its backwards.
    """
    return max(1, math.ceil(ahead / num_microbatches))


def continuous(
    kind: str,
    num_stages: int,
    num_microbatches: int,
    interval: int,
    *,
    slack: Sequence[int] | int = 1,
    first_trainable: int = 0,
    norm_per_stage: bool = True,
    replicas: Replicas = SINGLE,
    per_replica: bool = False,
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
        replicas: of each stage.
        per_replica: a stage updates every R_s micro-batches, one on each replica, whatever the interval.

    Raises:
        ScheduleError: a number is out of range, u does not divide M, or replicas have unequal shares of an update.
    """
    check_counts(num_stages, num_microbatches, first_trainable)
    _check_interval(interval, num_microbatches)
    counts = replicas.of(num_stages)
    _check_shares(counts, replicas.lanes, interval)
    ahead = ahead_of(counts, slack_by_hop(num_stages, slack))
    tail = num_microbatches * minibatches_to_drain(num_microbatches, ahead[0])
    wiring = Wiring(
        replicas.homes(num_stages),
        interval,
        first_trainable=first_trainable,
        norm_per_stage=norm_per_stage,
        lanes=replicas.lanes,
        intervals=counts if per_replica else (),
        frozen_alone=True,
    )
    prologue, body, epilogue = [], [], []
    for stage, own in _workers(wiring):
        trains, begun = stage >= first_trainable, ahead[stage]
        prologue.append(_turns(stage, own, 0, begun, 0, trains))
        body.append(_turns(stage, own, begun, num_microbatches, num_microbatches, trains))
        epilogue.append(_turns(stage, own, begun, tail - begun, tail, trains))
    return Schedule(
        kind, wiring, tuple(body), stride=num_microbatches, prologue=tuple(prologue), epilogue=tuple(epilogue)
    )


def _check_interval(interval: int, num_microbatches: int) -> None:
    if interval < 1 or num_microbatches % interval:
        raise ScheduleError(
            f"An update every {interval} micro-batches does not go into mini-batches of {num_microbatches}: "
            "update_interval must divide num_microbatches."
        )


def _check_shares(counts: Sequence[int], lanes: int, interval: int) -> None:
    """With equal shares all replicas of a stage are equally far at every update, with the same versions."""
    if interval % lanes or any(lanes % count for count in counts):
        raise ScheduleError(
            f"An asynchronous schedule of stages {'-'.join(map(str, counts))} with {lanes} lanes and an update every "
            f"{interval} micro-batches has unequal shares: every number of replicas must divide the lanes, and the "
            "lanes the update interval."
        )


def finite(schedule: Schedule, num_minibatches: int) -> Schedule:
    """So many mini-batches of a ``continuous`` schedule from an empty pipeline to an empty one: prologue and one body.

    It is what prologue, bodies and epilogue amount to, and exists for fewer mini-batches than the epilogue has too.
    """
    wiring, total = schedule.wiring, num_minibatches * schedule.stride
    prologue, body = [], []
    for (stage, own), row in zip(_workers(wiring), schedule.prologue, strict=True):
        trains = stage >= wiring.first_trainable
        # Without a backward nothing is left over for the body.
        ahead = min(len(row) * len(wiring.homes[stage]), total) if trains else 0
        prologue.append(_turns(stage, own, 0, ahead, 0, trains))
        body.append(_turns(stage, own, ahead, total - ahead, total, trains))
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


def _workers(wiring: Wiring) -> list[tuple[int, tuple[int, int]]]:
    """By worker, its stage and (number among the replicas, replicas) there."""
    return [(s, (number, len(held))) for s, held in enumerate(wiring.homes) for number in range(len(held))]


def _turns(stage: int, own: tuple[int, int], ahead: int, forwards: int, backwards: int, trains: bool) -> Row:
    """Forwards and backwards in turn, as far as they are this replica's; what is left over comes last.

    Args:
        own: see ``_workers``.
        ahead: micro-batch of the stage's first forward.
        forwards, backwards: of the stage as a whole.
    """
    replica, count = own
    numbers: list[NDArray[np.int64]] = [
        np.arange(ahead + replica, ahead + forwards, count),
        np.arange(replica, backwards if trains else 0, count),
    ]
    ops = [np.full(len(found), OP_CODE[op]) for op, found in zip((Op.F, Op.B), numbers, strict=True)]
    # Forward i stands before backward i; a stable sort by turn keeps that.
    turn = np.concatenate([np.arange(len(found)) for found in numbers])
    order = np.argsort(turn, kind="stable")
    total = len(order)
    return pack(np.full(total, stage), np.concatenate(ops)[order], np.concatenate(numbers)[order])
