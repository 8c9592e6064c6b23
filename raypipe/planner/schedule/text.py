"""Schedules as text: the CSV that torch.distributed.pipelining reads and writes, and the picture.

The CSV is torch's compute-only form: one line per worker, one action per cell, empty cells for
idle slots. The picture has one line per worker and one column per slot of time.
"""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.errors import ScheduleError
from raypipe.ir.schedule import COMPUTE, Action, Op, Schedule, Wiring, parse_action, single_homes
from raypipe.ir.timeline import Timeline
from raypipe.planner.schedule.lower import lower
from raypipe.planner.simulator import Costs, simulate


def to_csv(schedule: Schedule, repeats: int = 1) -> str:
    """Write the compute actions, one line per worker, with the body ``repeats`` times; leave out all other actions."""
    rows = schedule.rows(repeats)
    return "".join(",".join(str(a) for a in row if a.op in COMPUTE) + "\n" for row in rows)


def from_csv(text: str, kind: str = "csv", update_interval: int | None = None) -> Schedule:
    """Read a synchronous schedule from torch's compute-only CSV.

    Placement, split backwards and frozen stages follow from the actions. The order of actions is not checked here:
    lower and validate the result.

    Args:
        text: one line per worker.
        kind: label of the schedule.
        update_interval: micro-batches per optimizer step; None means all of them.

    Raises:
        ScheduleError: a cell is no compute action, or a stage is missing or on two workers.
    """
    rows = [tuple(parse_action(cell) for cell in line.split(",") if cell.strip()) for line in text.splitlines()]
    homes = _homes(rows)
    actions = [action for row in rows for action in row]
    num_microbatches = 1 + max(action.microbatch for action in actions)
    backward = [action for action in actions if action.op is not Op.F]
    wiring = Wiring(
        single_homes(homes),
        update_interval=update_interval or num_microbatches,
        split_backward=any(action.op is not Op.B for action in backward),
        first_trainable=min((action.stage for action in backward), default=0),
    )
    return Schedule(kind, wiring, tuple(rows), stride=num_microbatches)


def _homes(rows: Sequence[Sequence[Action]]) -> list[int]:
    """Return the worker of each stage; raise ScheduleError as described in ``from_csv``."""
    homes: dict[int, int] = {}
    for worker, row in enumerate(rows):
        for action in row:
            if action.op not in COMPUTE:
                raise ScheduleError(
                    f"{action} in line {worker + 1} is no compute action: keep F, B, I and W; lower() adds the rest."
                )
            if homes.setdefault(action.stage, worker) != worker:
                raise ScheduleError(
                    f"{action} in line {worker + 1}: stage {action.stage} is also in line {homes[action.stage] + 1}; "
                    "a stage lives on one worker."
                )
    if not homes:
        raise ScheduleError("The CSV holds no action: write one line per worker with cells such as 0F0.")
    num_stages = 1 + max(homes)
    if lacking := sorted(set(range(num_stages)) - homes.keys()):
        raise ScheduleError(f"Stage {lacking[0]} of {num_stages} has no action in any line: number stages from 0.")
    return [homes[stage] for stage in range(num_stages)]


def draw(what: Schedule | Timeline, repeats: int = 1, slot_s: float | None = None) -> str:
    """Draw a schedule as text: a line per worker, a column per slot, ``.`` for idle, ``-`` for a longer action.

    0: F0 F1  .  . B0 B1
    1:  . F0 F1 B0 B1  .

    A schedule is drawn as if every compute action took one slot and links were free. If every worker has only the
    stage of its own number, stages are left out.

    Args:
        what: a schedule, lowered or not, or a timeline.
        repeats: repetitions of the body of a schedule.
        slot_s: seconds per column; None takes the shortest compute action.
    """
    if isinstance(what, Schedule):
        is_lowered = any(action.op is Op.STEP for row in what.rows(repeats) for action in row)
        ones = (1.0,) * what.num_stages
        what = simulate(what if is_lowered else lower(what), Costs(ones, ones, ones, ones), repeats)
    spans = sorted((s for s in what.spans if s.action.op in COMPUTE), key=lambda s: s.start_s)
    zero = min((s.start_s for s in spans), default=0.0)
    slot = slot_s or min((s.end_s - s.start_s for s in spans if s.end_s > s.start_s), default=1.0)
    straight = all(s.action.stage == s.worker for s in spans)
    cells: list[dict[int, str]] = [{} for _ in range(what.num_workers)]
    for span in spans:
        begin = round((span.start_s - zero) / slot)
        for column in range(begin + 1, round((span.end_s - zero) / slot)):
            cells[span.worker][column] = "-"
        cells[span.worker][begin] = _label(span.action, straight)
    columns = 1 + max((max(line, default=-1) for line in cells), default=-1)
    width = max((len(text) for line in cells for text in line.values()), default=1)
    margin = len(str(what.num_workers - 1))
    return "".join(
        f"{worker:>{margin}}: " + " ".join(line.get(column, ".").rjust(width) for column in range(columns)) + "\n"
        for worker, line in enumerate(cells)
    )


def _label(action: Action, straight: bool) -> str:
    return f"{action.op.value}{action.microbatch}" if straight else str(action)
