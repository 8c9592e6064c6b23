"""Asynchronous schedules: 1F1B that does not run empty between mini-batches.

S=3, mini-batches of two micro-batches, rows in parts. With an update per mini-batch, every part ends with an update:

    prologue | body        | body        | epilogue
    0: F0 F1 | F2 B0 F3 B1 | F4 B2 F5 B3 |    B4    B5
    1: F0    | F1 B0 F2 B1 | F3 B2 F4 B3 | F5 B4    B5
    2:       | F0 B0 F1 B1 | F2 B2 F3 B3 | F4 B4 F5 B5

and in time, one slot per action:

    0: F0 F1 F2  .  . B0 F3 B1 F4 B2 F5 B3  . B4  . B5
    1:  . F0 F1  . B0 F2 B1 F3 B2 F4 B3 F5 B4  . B5  .
    2:  .  . F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5  .  .

In the prologue stage s runs w_s forwards ahead. In the body forwards and backwards alternate, one mini-batch per
repetition. The epilogue completes the mini-batches that have been begun by then. With slack 1, w_s = S - 1 - s, which
is PipeDream's NOAM; more slack, r_h on hop h, hides slower links (w_s = r_s + ... + r_(S-2)).

Stages may have replicas (``replicas``): each of them has a prologue, body and epilogue of its own micro-batches, and
takes part in every update of its stage. As a whole, stage s runs W_s = w_s * R_s forwards ahead. Stages 2-1, an update
every two micro-batches, in time, with its body twice:

    0: 0F0 0F2   . 0B0 0F4   .   . 0B2   .   .   . 0B4   .   .
    1: 0F1 0F3   .   .   . 0B1 0F5   .   . 0B3   .   .   . 0B5
    2:   . 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4 1F5 1B5   .

The schedule does not determine the version of the weights that a micro-batch uses: see ``raypipe.ir.weights``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import ScheduleError
from raypipe.ir.schedule import OP_CODE, Op, Row, Schedule, Wiring
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.ir.segment import Phase
from raypipe.planner.dependency_tables import pack
from raypipe.planner.schedule.replicas import Replicas, ahead_of
from raypipe.planner.schedule.sync import check_counts, slack_by_hop


def minibatches_to_drain(num_microbatches: int, ahead: int) -> int:
    """Count the mini-batches that were begun before the epilogue, which completes them; at least 1.

    A single stage runs no forwards ahead. Its epilogue completes one mini-batch too, so that one rule for the age of
    weights holds for all mini-batches.

    Args:
        ahead: W_0, forwards that stage 0 runs ahead of its backwards.
    """
    return max(1, math.ceil(ahead / num_microbatches))


def continuous(spec: ScheduleSpec, num_stages: int) -> Schedule:
    """Build the compute actions of 1F1B without a flush; the module docstring has a picture.

    Args:
        spec: spec of "pipedream" or "2bw"; with ``overlap`` every stage clips by the norm of its own gradients.

    Raises:
        ScheduleError: a number is out of range, ``update_interval`` does not divide the number of micro-batches, or
            replicas have unequal shares of an update.
    """
    num_microbatches, replicas = spec.num_microbatches, Replicas(spec.replicas, spec.lanes)
    interval = num_microbatches if spec.kind == "2bw" else spec.update_interval or spec.lanes
    check_counts(num_stages, num_microbatches, spec.first_trainable)
    _check_interval(interval, num_microbatches)
    counts = replicas.of(num_stages)
    _check_shares(counts, spec.lanes, interval)
    ahead = ahead_of(counts, slack_by_hop(num_stages, spec.slack))
    tail = num_microbatches * minibatches_to_drain(num_microbatches, ahead[0])
    wiring = Wiring(
        replicas.homes(num_stages),
        interval,
        first_trainable=spec.first_trainable,
        norm_per_stage=spec.overlap,
        lanes=spec.lanes,
        intervals=counts if spec.per_replica else (),
        frozen_alone=True,
    )
    prologue, body, epilogue = [], [], []
    for stage, own in _workers(wiring):
        trains, begun = stage >= spec.first_trainable, ahead[stage]
        prologue.append(_turns(stage, own, 0, begun, 0, trains))
        body.append(_turns(stage, own, begun, num_microbatches, num_microbatches, trains))
        epilogue.append(_turns(stage, own, begun, tail - begun, tail, trains))
    parts = {"prologue": tuple(prologue), "epilogue": tuple(epilogue)}
    return Schedule(spec.name, wiring, tuple(body), stride=num_microbatches, **parts)


def _check_interval(interval: int, num_microbatches: int) -> None:
    if num_microbatches % interval:
        raise ScheduleError(
            f"An update every {interval} micro-batches does not go into mini-batches of {num_microbatches}: "
            "update_interval must divide num_microbatches."
        )


def _check_shares(counts: Sequence[int], lanes: int, interval: int) -> None:
    """Raise ScheduleError unless the replicas of each stage get equally many micro-batches of every update.

    Only then all replicas of a stage have equal progress and equal weight versions at an update.
    """
    if interval % lanes or any(lanes % count for count in counts):
        raise ScheduleError(
            f"An asynchronous schedule of stages {'-'.join(map(str, counts))} with {lanes} lanes and an update every "
            f"{interval} micro-batches has unequal shares: every number of replicas must divide the lanes, and the "
            "lanes the update interval."
        )


def finite(schedule: Schedule, num_minibatches: int) -> Schedule:
    """Restrict a ``continuous`` schedule to ``num_minibatches`` between two flushes.

    The result has a prologue and a single body. Its actions are those of the prologue, the repeated body and the
    epilogue of ``schedule``, in the same sequence. Fewer mini-batches than that epilogue completes are possible too.
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
    """Return the rows of one phase of a lowered ``continuous`` schedule, as the body of a new schedule.

    Raises:
        ScheduleError: the phase is WHOLE, for which ``finite`` makes a schedule.
    """
    rows: tuple[Row, ...] = lowered.epilogue
    if phase is Phase.STEADY:
        rows = lowered.body
    elif phase is Phase.FILL:
        rows = tuple((*one, *other) for one, other in zip(lowered.prologue, lowered.body, strict=True))
    elif phase is Phase.WHOLE:
        raise ScheduleError("The phase WHOLE is not part of a continuous schedule: use finite().")
    return Schedule(f"{lowered.kind} {phase.value}", lowered.wiring, rows, stride=lowered.stride)


def _workers(wiring: Wiring) -> list[tuple[int, tuple[int, int]]]:
    """List (stage, (index of the replica, number of replicas)) of each worker."""
    return [(s, (number, len(held))) for s, held in enumerate(wiring.homes) for number in range(len(held))]


def _turns(stage: int, own: tuple[int, int], ahead: int, forwards: int, backwards: int, trains: bool) -> Row:
    """Build a row of one replica: forwards and backwards in turn, then what is left of the longer series.

    Args:
        own: (index of the replica, number of replicas).
        ahead: micro-batch of the stage's first forward in this row.
        forwards, backwards: numbers of forwards and backwards of the stage, over all replicas.
        trains: False for a stage without backwards.
    """
    replica, count = own
    numbers: list[NDArray[np.int64]] = [
        np.arange(ahead + replica, ahead + forwards, count),
        np.arange(replica, backwards if trains else 0, count),
    ]
    ops = [np.full(len(own_numbers), OP_CODE[op]) for op, own_numbers in zip((Op.F, Op.B), numbers, strict=True)]
    # Forward i comes before backward i; a stable sort by turn keeps that.
    turn = np.concatenate([np.arange(len(own_numbers)) for own_numbers in numbers])
    order = np.argsort(turn, kind="stable")
    total = len(order)
    return pack(np.full(total, stage), np.concatenate(ops)[order], np.concatenate(numbers)[order])
