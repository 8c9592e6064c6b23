"""Lowering and validation: add messages, reductions and steps to the compute actions of a schedule.

    1F0 1B0   becomes   1RECV_F0 1F0 1SEND_F0   1RECV_B0 1B0 1SEND_B0   1REDUCE_GRAD0 1REDUCE_NORM0 1STEP0

A receive is placed directly before the action that needs it, a send directly after the action that made the message.
No other order has to be chosen: sends do not block, and threads prefetch messages in the order in which the peer sends
them, independent of the receiver's row.

``dependencies()`` determines the messages: an action that depends on a RECV gets that RECV, and the action before the
matching SEND gets the SEND. Stages without a backward depend on no gradients, so none are sent to them.

A replica ends an update after the last of its own micro-batches, or at the end of its row if it has no micro-batch of
that update. With replicas, a worker of several stages ends the updates of all its stages together, after all of its
computation: replicas wait for each other there, and a waiting worker must not block others.

A lowered schedule is checked by four rules before anything runs; a violation names its action:

1. Every action is on the worker that holds its stage, once, after its dependencies in the same row; all other
   dependencies are in some row.
2. Every replica of a stage takes every optimizer step, and every action in the rows is needed by some step. Together
   with rule 1 this *is* completeness: from the steps, ``dependencies()`` leads back to each gradient reduction, to one
   backward (B, or I and W) per micro-batch on each stage that trains, to one forward on each stage, and to both ends
   of each message. A missing action violates rule 1, a superfluous one rule 2.
3. Updates of a stage follow each other; in a synchronous schedule (no prologue, no epilogue) no forward of the
   next update comes before the step, because its weights would be the old ones.
4. No deadlock.

Receives may come in another order than the sends of their link: a thread empties the link in the sender's
order and puts messages aside by key, so a receive is served as soon as its own send has been. Rule 4 is
therefore the whole rule about order on links. What a different order costs is the memory of messages set
aside; no limit on it is assumed.
"""

from __future__ import annotations

from collections import Counter
from itertools import chain, pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import ScheduleError
from raypipe.ir.schedule import COMPUTE, OP_CODE, OPS, Action, Op, Row, Schedule, Wiring, dependencies
from raypipe.planner.compiled_rows import Ints
from raypipe.planner.dependency_tables import Program, build, encode, pack

Kind = tuple[int, Op]
"""Stage and operation; they determine the messages of an action."""

_IS_COMPUTE = np.array([op in COMPUTE for op in OPS])

Progress = Counter[tuple[int, int]]
"""Finished micro-batches by (stage, update), for updates that are not complete."""


class _Rules(NamedTuple):
    """Tables of the actions added to a compute action; operations are indices into OPS, -1 for none.

    Attributes:
        receive, send: by stage, operation and lane, the action inserted before and after.
        finishing: by stage, the last operation of a micro-batch.
        intervals: by stage, micro-batches per optimizer step.
        wiring: wiring of the schedule.
        replicated: True if any stage has several workers.
    """

    receive: NDArray[np.int8]
    send: NDArray[np.int8]
    finishing: NDArray[np.int8]
    intervals: Ints
    wiring: Wiring
    replicated: bool


def lower(schedule: Schedule) -> Schedule:
    """Add sends, receives, gradient reduction and optimizer steps to a schedule of compute actions.

    After the last backward of an update (the last forward, if it trains nothing) a stage gets a REDUCE_GRAD. Once all
    stages of the worker have theirs, REDUCE_NORM and STEP follow. Earlier they would deadlock: the norm needs the
    gradients of every stage, among them those that the worker has yet to compute.

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
    """Raise ScheduleError if replicas have no micro-batch in some updates, unless the whole row is one update."""
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
    """Return all pairs of stage and operation in a schedule."""
    kinds: set[Kind] = set()
    for row in chain(schedule.prologue, schedule.body, schedule.epilogue):
        stage, op, _ = encode(row)
        present = np.flatnonzero(np.bincount(stage * len(OPS) + op))
        kinds.update((kind // len(OPS), OPS[kind % len(OPS)]) for kind in present.tolist())
    return kinds


def _rules(schedule: Schedule) -> _Rules:
    """Build the tables of the messages around each compute action, and of the last action of a micro-batch."""
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
    intervals = np.array([wiring.interval_of(s) for s in range(wiring.num_stages)], dtype=np.int32)
    return _Rules(receive, send, np.array(finishing, dtype=np.int8), intervals, wiring, wiring.replicated)


def _lower_worker(schedule: Schedule, worker: int, rules: _Rules) -> tuple[Row, Row, Row]:
    """Lower prologue, body and epilogue of one worker."""
    wiring = schedule.wiring
    before: Progress = Counter()
    prologue = _lower_row(worker, schedule.prologue[worker] if schedule.prologue else (), rules, before)
    after = before.copy()
    body = _lower_row(worker, schedule.body[worker], rules, after)
    if rules.replicated:
        body = _with_empty_update(body, worker, wiring)
    shifted = {(s, u + schedule.stride // wiring.interval_of(s)): n for (s, u), n in before.items()}
    _check_periodic(worker, shifted, after, wiring)
    # The epilogue counts from the end of the body as the body counts from its own beginning.
    epilogue = _lower_row(worker, schedule.epilogue[worker] if schedule.epilogue else (), rules, before)
    return prologue, body, epilogue


def _lower_row(worker: int, row: Row, rules: _Rules, progress: Progress) -> Row:
    """Lower one part of one worker's row: prologue, body or epilogue.

    Args:
        progress: micro-batches finished before the part; changed in place to those finished after it.
    """
    stage, op, microbatch = encode(row)
    lane = rules.wiring.lane_of(microbatch) if rules.replicated else 0
    before, behind = rules.receive[stage, op, lane], rules.send[stage, op, lane]
    places = np.flatnonzero(op == rules.finishing[stage])
    closing = _closings(worker, places, stage[places], microbatch[places], rules, progress)
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
    # Each action of an update's end follows its place's own, and those added before it.
    added_columns = encode(tuple(a for _, actions in closing for a in actions))
    for column, added_column in zip(columns, added_columns, strict=True):
        column[own_end[ending] + np.arange(len(ending))] = added_column
    return pack(*columns)


def _closings(
    worker: int, places: NDArray[np.intp], stage: Ints, microbatch: Ints, rules: _Rules, progress: Progress
) -> list[tuple[int, list[Action]]]:
    """Return (position in the row, actions to add after it) for each position at which an update ends.

    Changes ``progress`` in place.

    Args:
        places: positions of the actions in the row that finish a micro-batch on a stage.
        stage, microbatch: stage and micro-batch of each of these actions.
    """
    wiring = rules.wiring
    update = microbatch // rules.intervals[stage]
    # Of one stage and update, all but the last place are counted at once: only there can the update be complete.
    key = (update * wiring.num_stages + stage)[::-1]
    keys, last, counts = np.unique(key, return_index=True, return_counts=True)
    columns = (len(places) - 1 - last, keys % wiring.num_stages, keys // wiring.num_stages, counts)
    events = sorted(zip(*(column.tolist() for column in columns), strict=True))
    # twice the same action: one by one
    if any(progress[s, u] + n > _own_count(wiring, s, u, worker) for _, s, u, n in events):
        events = [(i, s, u, 1) for i, (s, u) in enumerate(zip(stage.tolist(), update.tolist(), strict=True))]
    closings = []
    for i, s, u, number in events:
        progress[s, u] += number
        if progress[s, u] == _own_count(wiring, s, u, worker):
            closings.append((int(places[i]), _close(wiring, s, u, progress, worker)))
    return closings


def _own_count(wiring: Wiring, stage: int, update: int, worker: int) -> int:
    """Count the micro-batches of an update that a worker runs, for a stage that it holds."""
    interval, lanes = wiring.interval_of(stage), wiring.lanes
    if len(wiring.homes[stage]) == 1:
        return interval
    first = 0 if interval >= lanes else update * interval
    own = [lane for lane in range(lanes) if wiring.worker_of(stage, lane) == worker]
    # As many of each lane as there are numbers from the first to the last of the update that leave its remainder.
    return sum((first + interval - 1 - lane) // lanes - (first - 1 - lane) // lanes for lane in own)


def _with_empty_update(row: Row, worker: int, wiring: Wiring) -> Row:
    """Return ``row``; if the worker has no micro-batch in it, return the actions that end its only update instead.

    In that case the whole row is one update (``_check_share``).
    """
    held = [stage for stage, workers in enumerate(wiring.homes) if worker in workers]
    if not held or _own_count(wiring, held[0], 0, worker):
        return row
    last = wiring.update_interval - 1
    return tuple(Action(s, op, last) for op in (Op.REDUCE_GRAD, Op.REDUCE_NORM, Op.STEP) for s in held)


def _finishing_op(wiring: Wiring, stage: int) -> Op:
    """Return the last operation of a stage for a micro-batch: F, B or W."""
    if stage < wiring.first_trainable:
        return Op.F
    return Op.W if wiring.split_backward else Op.B


def _close(wiring: Wiring, stage: int, update: int, progress: Progress, worker: int) -> list[Action]:
    """Return the actions that follow the last micro-batch of an update on ``stage``.

    If all stages of the worker have finished the update, these include REDUCE_NORM and STEP of all of them, and the
    update is removed from ``progress`` in place.
    """
    last = (update + 1) * wiring.interval_of(stage) - 1
    co_located = [s for s, workers in enumerate(wiring.homes) if worker in workers]
    ends = all(progress[s, update] == _own_count(wiring, s, update, worker) for s in co_located)
    reducing = [stage]
    if len(co_located) > 1 and wiring.replicated:
        reducing = co_located if ends else []
    actions = [Action(s, Op.REDUCE_GRAD, last) for s in reducing]
    if ends:
        actions += [Action(s, op, last) for op in (Op.REDUCE_NORM, Op.STEP) for s in co_located]
        for s in co_located:
            del progress[s, update]
    return actions


def _check_periodic(worker: int, before: dict[tuple[int, int], int], after: Progress, wiring: Wiring) -> None:
    """Raise ScheduleError unless the body of a row advances every stage by the schedule's ``stride`` micro-batches.

    Args:
        before: (stage, update) -> number of micro-batches finished before the body. The numbers of the updates are
            already increased by the updates in one repetition of the body.
        after: (stage, update) -> number of micro-batches finished after the body; has to equal ``before``.
    """
    for stage, update in sorted(before.keys() | after.keys()):
        expected, finished = before.get((stage, update), 0), after[stage, update]
        if expected != finished:
            interval = wiring.interval_of(stage)
            raise ScheduleError(
                f"Worker {worker}: at the end of the body stage {stage} has finished {finished} of the {interval} "
                f"micro-batches of the update that ends with {stage}{Op.STEP.value}{(update + 1) * interval - 1}, but "
                f"{expected} at the corresponding point before it; a body must advance every stage by its stride."
            )


def lowered_and_checked(schedule: Schedule) -> Schedule:
    """Lower a schedule of compute actions to the rows that workers carry out, and validate it.

    Raises:
        ScheduleError: see ``validate``.
    """
    lowered = lower(schedule)
    validate(lowered)
    return lowered


def validate(lowered: Schedule, repeats: int = 1) -> Program:
    """Check the four rules of the module on a lowered schedule, with its body repeated ``repeats`` times.

    Returns:
        the tables of the schedule, which ``simulate()`` accepts in its place.

    Raises:
        ScheduleError: a rule is broken; names the action, its worker, its position in the row, and what to change.
    """
    program = build(lowered, repeats)
    ends = [_End(*end) for end in program.nodes_of((Op.REDUCE_GRAD, Op.REDUCE_NORM, Op.STEP))]
    steps = [end for end in ends if end.op is Op.STEP]
    _check_steps(program, steps)
    _check_nothing_idle(program, steps)
    _check_update_order(program, ends)
    if not lowered.prologue and not lowered.epilogue:
        _check_flush(program, steps)
    program.checked_steps()
    return program


class _End(NamedTuple):
    """Action at the end of an update."""

    node: int
    worker: int
    stage: int
    op: Op
    microbatch: int


def _check_steps(program: Program, steps: list[_End]) -> None:
    wiring = program.wiring
    if not steps:
        raise ScheduleError("No row contains a STEP, so nothing would be learnt: pass the schedule through lower().")
    for step in steps:
        interval = wiring.interval_of(step.stage)
        if (step.microbatch + 1) % interval:
            raise ScheduleError(
                f"{program.where(step.node)} ends no update: with {interval} micro-batches per update the last "
                f"ones are {interval - 1}, {2 * interval - 1}, and so on."
            )
    present = {(step.stage, step.worker, step.microbatch) for step in steps}
    last = max(step.microbatch for step in steps)
    for stage, worker in [(stage, worker) for stage, workers in enumerate(wiring.homes) for worker in workers]:
        for microbatch in range(wiring.interval_of(stage) - 1, last + 1, wiring.interval_of(stage)):
            if (stage, worker, microbatch) not in present:
                raise ScheduleError(
                    f"{Action(stage, Op.STEP, microbatch)} is missing (worker {worker}): every stage takes every "
                    "optimizer step, also one without trainable parameters; append it to the update."
                )


def _check_nothing_idle(program: Program, steps: list[_End]) -> None:
    idle = ~program.needed
    idle[[step.node for step in steps]] = False
    if idle.any():
        raise ScheduleError(
            f"{program.where(int(idle.argmax()))} leads to no optimizer step: nothing waits for it. "
            "Remove it, or add the action that uses its result."
        )


def _check_update_order(program: Program, ends: list[_End]) -> None:
    rows = sorted(ends, key=lambda end: (OP_CODE[end.op], end.stage, end.node))
    for earlier, later in pairwise(rows):
        alike = (earlier.op, earlier.stage, earlier.worker) == (later.op, later.stage, later.worker)
        if alike and earlier.microbatch > later.microbatch:
            raise ScheduleError(
                f"{program.where(earlier.node)} comes before {program.where(later.node)}: "
                "updates of a stage follow each other; exchange the two."
            )


def _check_flush(program: Program, steps: list[_End]) -> None:
    interval = program.wiring.update_interval
    step_at = {(step.stage, step.worker, step.microbatch): step.node for step in steps}
    for node, worker, stage, _, microbatch in program.nodes_of((Op.F,), interval):
        step = step_at[stage, worker, microbatch // interval * interval - 1]
        if step > node:
            raise ScheduleError(
                f"{program.where(node)} comes before {program.where(step)} and would use the old weights: "
                "move it behind the step."
            )
