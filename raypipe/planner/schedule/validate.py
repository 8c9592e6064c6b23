"""The rules that a lowered schedule must keep, checked before anything runs; a breach names its action.

1. Every action is on the worker that holds its stage, once, behind what it waits for in its own row, and
   whatever it waits for is somewhere in the rows.
2. Every replica of a stage takes every optimizer step, and whatever is in the rows leads to one. Together with rule 1
   this *is* completeness: from the steps, ``dependencies()`` leads back to each gradient reduction, to one
   backward (B, or I and W) per micro-batch on each stage that trains, to one forward on each stage, and to
   both ends of each message. Less is missing, more is work for nobody.
3. Updates of a stage follow each other; in a synchronous schedule (no prologue, no epilogue) no forward of the
   next update comes before the step, because its weights would be the old ones.
4. No deadlock.

Receives may come in another order than the sends of their link: a thread empties the link in the sender's
order and puts messages aside by key, so a receive is served as soon as its own send has been. Rule 4 is
therefore the whole rule about order on links. What a different order costs is the memory of messages set
aside; no limit on it is assumed.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from raypipe.errors import ScheduleError
from raypipe.ir.schedule import Action, Op, Schedule
from raypipe.planner.schedule.lower import lower
from raypipe.planner.tables import OP_CODE, Program, build

__all__ = ["lowered_and_checked", "validate"]


def lowered_and_checked(schedule: Schedule) -> Schedule:
    """The rows that stages carry out, from compute actions alone.

    Raises:
        ScheduleError: see ``validate``.
    """
    lowered = lower(schedule)
    validate(lowered)
    return lowered


def validate(lowered: Schedule, repeats: int = 1) -> None:
    """Refuse a lowered schedule that breaks a rule, with its body repeated ``repeats`` times.

    Raises:
        ScheduleError: names the action, its worker, its position in the row, and what to change.
    """
    program = build(lowered, repeats)
    _check_steps(program)
    _check_nothing_idle(program)
    _check_update_order(program)
    if not lowered.prologue and not lowered.epilogue:
        _check_flush(program)
    program.blocks()


def _check_steps(program: Program) -> None:
    wiring = program.wiring
    steps = np.flatnonzero(program.op == OP_CODE[Op.STEP])
    if not len(steps):
        raise ScheduleError("No row contains a STEP, so nothing would be learnt: pass the schedule through lower().")
    intervals = np.array([wiring.interval_of(stage) for stage in range(wiring.num_stages)])
    for node in steps[(program.microbatch[steps] + 1) % intervals[program.stage[steps]] != 0][:1].tolist():
        interval = wiring.interval_of(int(program.stage[node]))
        raise ScheduleError(
            f"{program.where(node)} ends no update: with {interval} micro-batches per update the last "
            f"ones are {interval - 1}, {2 * interval - 1}, and so on."
        )
    columns = (program.stage, program.worker, program.microbatch)
    present = set(zip(*(column[steps].tolist() for column in columns), strict=True))
    last = max(microbatch for _, _, microbatch in present)
    for stage, worker in [(stage, worker) for stage, workers in enumerate(wiring.homes) for worker in workers]:
        for microbatch in range(wiring.interval_of(stage) - 1, last + 1, wiring.interval_of(stage)):
            if (stage, worker, microbatch) not in present:
                raise ScheduleError(
                    f"{Action(stage, Op.STEP, microbatch)} is missing (worker {worker}): every stage takes every "
                    "optimizer step, also one without trainable parameters; append it to the update."
                )


def _check_nothing_idle(program: Program) -> None:
    for node in np.flatnonzero(~program.needed & (program.op != OP_CODE[Op.STEP]))[:1].tolist():
        raise ScheduleError(
            f"{program.where(node)} leads to no optimizer step: nothing waits for it. "
            "Remove it, or add the action that uses its result."
        )


def _check_update_order(program: Program) -> None:
    for op in (Op.REDUCE_GRAD, Op.REDUCE_NORM, Op.STEP):
        for stage in range(program.wiring.num_stages):
            nodes = np.flatnonzero((program.op == OP_CODE[op]) & (program.stage == stage)).tolist()
            for earlier, later in pairwise(nodes):
                of_one_worker = program.worker[earlier] == program.worker[later]
                if of_one_worker and program.microbatch[earlier] > program.microbatch[later]:
                    raise ScheduleError(
                        f"{program.where(earlier)} comes before {program.where(later)}: "
                        "updates of a stage follow each other; exchange the two."
                    )


def _check_flush(program: Program) -> None:
    interval = program.wiring.update_interval
    step_at = {
        (int(program.stage[node]), int(program.worker[node]), int(program.microbatch[node])): node
        for node in np.flatnonzero(program.op == OP_CODE[Op.STEP]).tolist()
    }
    later = (program.op == OP_CODE[Op.F]) & (program.microbatch >= interval)
    for node in np.flatnonzero(later).tolist():
        stage, _, microbatch = program.action(node)
        step = step_at[stage, int(program.worker[node]), microbatch // interval * interval - 1]
        if step > node:
            raise ScheduleError(
                f"{program.where(node)} comes before {program.where(step)} and would use the old weights: "
                "move it behind the step."
            )
