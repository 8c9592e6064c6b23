"""Lowering: from compute actions to everything a worker has to do.

    1F0 1B0   becomes   1RECV_F0 1F0 1SEND_F0   1RECV_B0 1B0 1SEND_B0   1REDUCE_GRAD0 1REDUCE_NORM0 1STEP0

A receive stands directly before the action that needs it and a send directly behind the one that made
the message. That is all the order there is to decide: sends do not wait, and threads fetch messages ahead
of time in the order in which the peer sends them (``expected_sends``), whatever the receiver's own row.

Where a message is needed is asked of ``dependencies()``: whatever waits for a RECV gets that RECV, and
the action behind its SEND gets the SEND. Stages without backward ask for none, so none is sent to them.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain

from raypipe.errors import ScheduleError
from raypipe.ir.schedule import COMPUTE, Action, Op, Row, Schedule, Wiring, dependencies

__all__ = ["expected_sends", "lower"]

Progress = Counter[tuple[int, int]]
"""By (stage, update): micro-batches of the update that the stage has finished, while not all are."""


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
    parts = [part for part in (schedule.prologue, schedule.body, schedule.epilogue) if part]
    for worker, action in ((w, a) for part in parts for w, row in enumerate(part) for a in row):
        if action.op not in COMPUTE:
            raise ScheduleError(
                f"{action} in row {worker} is no compute action: lower() adds those itself, give it F, B, I and W only."
            )
    interval = schedule.wiring.update_interval
    if interval < 1 or schedule.stride % interval:
        raise ScheduleError(
            f"The body advances by {schedule.stride} micro-batches, the optimizer steps every {interval}: "
            "make the first a multiple of the second."
        )
    receive, send = _transfers(schedule)
    lowered: list[tuple[Row, Row, Row]] = []
    for worker, body in enumerate(schedule.body):
        before: Progress = Counter()
        prologue = _lower_row(schedule.prologue[worker] if schedule.prologue else (), schedule, receive, send, before)
        after = before.copy()
        middle = _lower_row(body, schedule, receive, send, after)
        shift = schedule.stride // interval
        _check_periodic(worker, {(s, u + shift): n for (s, u), n in before.items()}, after, interval)
        # The epilogue counts from the end of the body as the body counts from its own beginning.
        epilogue = _lower_row(schedule.epilogue[worker] if schedule.epilogue else (), schedule, receive, send, before)
        lowered.append((prologue, middle, epilogue))
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
    placement = schedule.wiring.placement
    step = {Op.SEND_F: 1, Op.SEND_B: -1}
    return tuple(
        action
        for action in schedule.row(sender, repeats)
        if action.op in step and placement[action.stage + step[action.op]] == receiver
    )


Kind = tuple[int, Op]
"""Stage and operation: all that decides which messages an action has."""


def _transfers(schedule: Schedule) -> tuple[dict[Kind, Op], dict[Kind, Op]]:
    """The receive that each kind of compute action wants before it, and the send that it wants behind it."""
    kinds = {action[:2] for part in (schedule.prologue, schedule.body, schedule.epilogue) for action in chain(*part)}
    receive: dict[Kind, Op] = {}
    send: dict[Kind, Op] = {}
    for stage, op in kinds:
        for wanted in dependencies(Action(stage, op, 0), schedule.wiring):
            if wanted.op in (Op.RECV_F, Op.RECV_B):
                receive[stage, op] = wanted.op
                (message,) = dependencies(wanted, schedule.wiring)
                (maker,) = dependencies(message, schedule.wiring)
                send[maker.stage, maker.op] = message.op
    return receive, send


def _lower_row(row: Row, schedule: Schedule, receive: dict[Kind, Op], send: dict[Kind, Op], progress: Progress) -> Row:
    """One part of one worker's row; ``progress`` is brought up to its end."""
    wiring = schedule.wiring
    interval = wiring.update_interval
    finishing = [_finishing_op(wiring, stage) for stage in range(wiring.num_stages)]
    out: list[Action] = []
    for action in row:
        stage, op, microbatch = action
        kind = (stage, op)
        if kind in receive:
            out.append(Action(stage, receive[kind], microbatch))
        out.append(action)
        if kind in send:
            out.append(Action(stage, send[kind], microbatch))
        if op is finishing[stage]:
            update = microbatch // interval
            progress[stage, update] += 1
            if progress[stage, update] == interval:
                out += _close(wiring, stage, update, progress)
    return tuple(out)


def _finishing_op(wiring: Wiring, stage: int) -> Op:
    """The operation after which a stage has nothing left to do for a micro-batch."""
    if stage < wiring.first_trainable:
        return Op.F
    return Op.W if wiring.split_backward else Op.B


def _close(wiring: Wiring, stage: int, update: int, progress: Progress) -> list[Action]:
    """A stage has finished an update; if it is the last of its worker, the worker steps."""
    last = (update + 1) * wiring.update_interval - 1
    home = wiring.placement[stage]
    mates = [s for s, worker in enumerate(wiring.placement) if worker == home]
    actions = [Action(stage, Op.REDUCE_GRAD, last)]
    if all(progress[s, update] == wiring.update_interval for s in mates):
        actions += [Action(s, op, last) for op in (Op.REDUCE_NORM, Op.STEP) for s in mates]
        for s in mates:
            del progress[s, update]
    return actions


def _check_periodic(worker: int, before: dict[tuple[int, int], int], after: Progress, interval: int) -> None:
    """After the body every update must stand where the same update, one repetition earlier, stood before it."""
    for stage, update in sorted(before.keys() | after.keys()):
        expected, found = before.get((stage, update), 0), after[stage, update]
        if expected != found:
            raise ScheduleError(
                f"Worker {worker}: at the end of the body stage {stage} has finished {found} of the {interval} "
                f"micro-batches of the update that ends with {stage}{Op.STEP.value}{(update + 1) * interval - 1}, but "
                f"{expected} at the corresponding point before it; a body must advance every stage by its stride."
            )
