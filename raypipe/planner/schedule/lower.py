"""Lowering: from compute actions to everything a worker has to do.

    1F0 1B0   becomes   1RECV_F0 1F0 1SEND_F0   1RECV_B0 1B0 1SEND_B0   1REDUCE_GRAD0 1REDUCE_NORM0 1STEP0

A receive stands directly before the action that needs it and a send directly behind the one that made
the message. That is all the order there is to decide: sends do not wait, and threads fetch messages ahead
of time in the order in which the peer sends them (``expected_sends``), whatever the receiver's own row.

Where a message is needed is asked of ``dependencies()``: whatever waits for a RECV gets that RECV, and
the action behind its SEND gets the SEND. Stages without backward ask for none, so none is sent to them.

A replica of a stage ends an update behind the last of its own micro-batches, or behind everything else in its row
where it has none of that update. Where workers hold several stages it ends the updates of all of them together, with
nothing left to compute: there replicas wait for each other, and nobody may wait for one that waits.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import ScheduleError
from raypipe.ir.schedule import COMPUTE, Action, Op, Row, Schedule, Wiring, dependencies
from raypipe.planner.tables import OP_CODE, OPS, Ints, encode, pack

__all__ = ["expected_sends", "lower"]

Kind = tuple[int, Op]
"""Stage and operation: all that decides which messages an action has."""

_IS_COMPUTE = np.array([op in COMPUTE for op in OPS])

Progress = Counter[tuple[int, int]]
"""By (stage, update): micro-batches of the update that the stage has finished, while not all are."""


class _Rules(NamedTuple):
    """What becomes of a compute action; operations are places in OPS, -1 for none.

    Attributes:
        receive, send: by stage, operation and lane, what stands before and behind the action.
        finishing: by stage, the operation after which nothing is left to do for a micro-batch.
        wiring: of the schedule.
    """

    receive: NDArray[np.int8]
    send: NDArray[np.int8]
    finishing: NDArray[np.int8]
    wiring: Wiring


def lower(schedule: Schedule) -> Schedule:
    """Add sends, receives, gradient reduction and optimizer steps to a schedule of compute actions.

    When a stage has done the last backward of an update (the last forward, if it trains nothing), it gets a
    REDUCE_GRAD. When all stages of a worker have, they get REDUCE_NORM and STEP. Not earlier: the norm needs
    every stage, so one that waits for a later part of its own row would wait forever.

    Prologue, body and epilogue are lowered one by one; an update may begin in one and end in another.

    Raises:
        ScheduleError: the schedule has other than compute actions, or its body does not return to the
            same point of an update.
    """
    _check_compute_only(schedule)
    interval = schedule.wiring.update_interval
    if interval < 1 or schedule.stride % interval:
        raise ScheduleError(
            f"The body advances by {schedule.stride} micro-batches, the optimizer steps every {interval}: "
            "make the first a multiple of the second."
        )
    _check_share(schedule)
    rules = _rules(schedule)
    lowered = [_lower_worker(schedule, worker, rules) for worker in range(len(schedule.body))]
    return Schedule(
        schedule.kind,
        schedule.wiring,
        body=tuple(rows[1] for rows in lowered),
        stride=schedule.stride,
        prologue=tuple(rows[0] for rows in lowered) if schedule.prologue else (),
        epilogue=tuple(rows[2] for rows in lowered) if schedule.epilogue else (),
    )


def expected_sends(schedule: Schedule, sender: int, receiver: int, repeats: int = 1) -> tuple[Action, ...]:
    """What worker ``receiver`` gets from worker ``sender``, in the order in which it will arrive.

    Args:
        schedule: lowered.
        sender, receiver: workers.
        repeats: repetitions of the body.
    """
    step = {Op.SEND_F: 1, Op.SEND_B: -1}
    return tuple(
        action
        for action in schedule.row(sender, repeats)
        if action.op in step
        and schedule.wiring.worker_of(action.stage + step[action.op], action.microbatch) == receiver
    )


def _check_compute_only(schedule: Schedule) -> None:
    for part in (schedule.prologue, schedule.body, schedule.epilogue):
        for worker, row in enumerate(part):
            odd = np.flatnonzero(~_IS_COMPUTE[encode(row)[1]])
            if len(odd):
                raise ScheduleError(
                    f"{row[int(odd[0])]} in row {worker} is no compute action: lower() adds those itself, "
                    "give it F, B, I and W only."
                )


def _check_share(schedule: Schedule) -> None:
    """Refuse replicas that have nothing to do in some updates, unless each part of a row is one update."""
    wiring = schedule.wiring
    interval = wiring.update_interval
    if not wiring.replicated or interval >= wiring.lanes:
        return
    if schedule.prologue or schedule.epilogue or schedule.stride != interval:
        raise ScheduleError(
            f"Updates of {interval} micro-batches in {wiring.lanes} lanes leave replicas of a stage without any: set "
            f"update_interval to {wiring.lanes} or more."
        )


def _kinds(schedule: Schedule) -> set[Kind]:
    """All of the schedule's."""
    found: set[Kind] = set()
    for row in chain(schedule.prologue, schedule.body, schedule.epilogue):
        stage, op, _ = encode(row)
        present = np.flatnonzero(np.bincount(stage * len(OPS) + op))
        found.update((kind // len(OPS), OPS[kind % len(OPS)]) for kind in present.tolist())
    return found


def _rules(schedule: Schedule) -> _Rules:
    """The receive that each kind of compute action wants before it, the send that it wants behind it, and its end."""
    lanes = schedule.wiring.lanes if schedule.wiring.replicated else 1
    receive, send = (np.full((schedule.num_stages, len(OPS), lanes), -1, dtype=np.int8) for _ in range(2))
    for stage, op in _kinds(schedule):
        for lane in range(lanes):
            for wanted in dependencies(Action(stage, op, lane), schedule.wiring):
                if wanted.op in (Op.RECV_F, Op.RECV_B):
                    receive[stage, OP_CODE[op], lane] = OP_CODE[wanted.op]
                    (message,) = dependencies(wanted, schedule.wiring)
                    (maker,) = dependencies(message, schedule.wiring)
                    send[maker.stage, OP_CODE[maker.op], lane] = OP_CODE[message.op]
    wiring = schedule.wiring
    finishing = [OP_CODE[_finishing_op(wiring, s)] for s in range(wiring.num_stages)]
    return _Rules(receive, send, np.array(finishing, dtype=np.int8), wiring)


def _lower_worker(schedule: Schedule, worker: int, rules: _Rules) -> tuple[Row, Row, Row]:
    """Prologue, body and epilogue of one worker."""
    wiring = schedule.wiring
    before: Progress = Counter()
    prologue = _lower_row(worker, schedule.prologue[worker] if schedule.prologue else (), rules, before)
    after = before.copy()
    body = _lower_row(worker, schedule.body[worker], rules, after)
    if wiring.replicated:
        body = _with_empty_update(body, worker, wiring)
    shifted = {(s, u + schedule.stride // wiring.interval_of(s)): n for (s, u), n in before.items()}
    _check_periodic(worker, shifted, after, wiring)
    # The epilogue counts from the end of the body as the body counts from its own beginning.
    epilogue = _lower_row(worker, schedule.epilogue[worker] if schedule.epilogue else (), rules, before)
    return prologue, body, epilogue


def _lower_row(worker: int, row: Row, rules: _Rules, progress: Progress) -> Row:
    """One part of one worker's row; ``progress`` is brought up to its end."""
    stage, op, microbatch = encode(row)
    lane = rules.wiring.lane_of(microbatch) if rules.wiring.replicated else 0
    before, behind = rules.receive[stage, op, lane], rules.send[stage, op, lane]
    places = np.flatnonzero(op == rules.finishing[stage])
    closing = _closings(worker, places, stage[places], microbatch[places], rules.wiring, progress)
    width = 1 + (before >= 0) + (behind >= 0)
    own_end = np.cumsum(width)
    added = [len(actions) for _, actions in closing]
    ending = np.repeat(np.array([place for place, _ in closing], dtype=np.int64), added)
    np.add.at(width, ending, 1)
    at = np.cumsum(width) - width + (before >= 0)
    total = int(width.sum())
    columns: list[NDArray[Any]] = [np.empty(total, dtype=np.int32) for _ in range(3)]
    for shift, codes in ((-1, before), (0, op), (1, behind)):
        there = np.flatnonzero(codes >= 0)
        for column, own in zip(columns, (stage, codes, microbatch), strict=True):
            column[at[there] + shift] = np.asarray(own)[there]
    # Each action of an update's end stands behind its place's own, and behind those added before it.
    added_columns = encode(tuple(a for _, actions in closing for a in actions))
    for column, added_column in zip(columns, added_columns, strict=True):
        column[own_end[ending] + np.arange(len(ending))] = added_column
    return pack(*columns)


def _closings(
    worker: int, places: NDArray[np.intp], stage: Ints, microbatch: Ints, wiring: Wiring, progress: Progress
) -> list[tuple[int, list[Action]]]:
    """What ends an update, behind which of ``places``; ``progress`` is brought up to the end of the row.

    Args:
        places: of the actions in the row that finish a micro-batch on a stage.
        stage, microbatch: of those.
    """
    update = microbatch // np.array([wiring.interval_of(s) for s in range(wiring.num_stages)], dtype=np.int32)[stage]
    # Of one stage and update, all but the last place are counted at once: only there can the update be complete.
    key = (update * wiring.num_stages + stage)[::-1]
    keys, last, counts = np.unique(key, return_index=True, return_counts=True)
    columns = (len(places) - 1 - last, keys % wiring.num_stages, keys // wiring.num_stages, counts)
    events = sorted(zip(*(column.tolist() for column in columns), strict=True))
    # twice the same action: one by one
    if any(progress[s, u] + n > _own_count(wiring, s, u, worker) for _, s, u, n in events):
        events = [(i, s, u, 1) for i, (s, u) in enumerate(zip(stage.tolist(), update.tolist(), strict=True))]
    found = []
    for i, s, u, number in events:
        progress[s, u] += number
        if progress[s, u] == _own_count(wiring, s, u, worker):
            found.append((int(places[i]), _close(wiring, s, u, progress, worker)))
    return found


def _own_count(wiring: Wiring, stage: int, update: int, worker: int) -> int:
    """Micro-batches of an update that this worker has, of a stage that it holds."""
    interval, lanes = wiring.interval_of(stage), wiring.lanes
    if len(wiring.homes[stage]) == 1:
        return interval
    first = 0 if interval >= lanes else update * interval
    own = [lane for lane in range(lanes) if wiring.worker_of(stage, lane) == worker]
    # As many of each lane as there are numbers from the first to the last of the update that leave its remainder.
    return sum((first + interval - 1 - lane) // lanes - (first - 1 - lane) // lanes for lane in own)


def _with_empty_update(row: Row, worker: int, wiring: Wiring) -> Row:
    """A row with the end of its one update, where the worker has no micro-batch of it."""
    held = [stage for stage, workers in enumerate(wiring.homes) if worker in workers]
    if not held or _own_count(wiring, held[0], 0, worker):
        return row
    last = wiring.update_interval - 1
    return tuple(Action(s, op, last) for op in (Op.REDUCE_GRAD, Op.REDUCE_NORM, Op.STEP) for s in held)


def _finishing_op(wiring: Wiring, stage: int) -> Op:
    """The operation after which a stage has nothing left to do for a micro-batch."""
    if stage < wiring.first_trainable:
        return Op.F
    return Op.W if wiring.split_backward else Op.B


def _close(wiring: Wiring, stage: int, update: int, progress: Progress, worker: int) -> list[Action]:
    """A stage has finished an update; if it is the last of its worker, the worker steps."""
    last = (update + 1) * wiring.interval_of(stage) - 1
    co_located = [s for s, workers in enumerate(wiring.homes) if worker in workers]
    ends = all(progress[s, update] == _own_count(wiring, s, update, worker) for s in co_located)
    reducing = [stage]
    if wiring.replicated and len(co_located) > 1:
        reducing = co_located if ends else []
    actions = [Action(s, Op.REDUCE_GRAD, last) for s in reducing]
    if ends:
        actions += [Action(s, op, last) for op in (Op.REDUCE_NORM, Op.STEP) for s in co_located]
        for s in co_located:
            del progress[s, update]
    return actions


def _check_periodic(worker: int, before: dict[tuple[int, int], int], after: Progress, wiring: Wiring) -> None:
    """After the body every update must stand where the same update, one repetition earlier, stood before it."""
    for stage, update in sorted(before.keys() | after.keys()):
        expected, found = before.get((stage, update), 0), after[stage, update]
        if expected != found:
            interval = wiring.interval_of(stage)
            raise ScheduleError(
                f"Worker {worker}: at the end of the body stage {stage} has finished {found} of the {interval} "
                f"micro-batches of the update that ends with {stage}{Op.STEP.value}{(update + 1) * interval - 1}, but "
                f"{expected} at the corresponding point before it; a body must advance every stage by its stride."
            )
