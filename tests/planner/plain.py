"""Schedules made and lowered action by action: slow and plain, for the fast ways to be compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from raypipe.ir.schedule import Action, Op, Row, Schedule, Wiring, dependencies

__all__ = ["any_order", "lowered_rows"]


def lowered_rows(schedule: Schedule) -> list[Row]:
    """The lowered body of a schedule that has no prologue and no epilogue."""
    return [_lowered(row, schedule.wiring) for row in schedule.body]


def _lowered(row: Row, wiring: Wiring) -> Row:
    out: list[Action] = []
    progress: Counter[tuple[int, int]] = Counter()
    backward = Op.I if wiring.split_backward else Op.B
    for action in row:
        stage, op, microbatch = action
        out += [a for a in dependencies(action, wiring) if a.op in (Op.RECV_F, Op.RECV_B)]
        out.append(action)
        if op is Op.F and wiring.crosses(stage, microbatch):
            out.append(Action(stage, Op.SEND_F, microbatch))
        if op is backward and stage > wiring.first_trainable and wiring.crosses(stage - 1, microbatch):
            out.append(Action(stage, Op.SEND_B, microbatch))
        trained = Op.W if wiring.split_backward else Op.B
        if op is (trained if stage >= wiring.first_trainable else Op.F):
            progress[stage, microbatch // wiring.update_interval] += 1
            out += _end_of_update(wiring, stage, microbatch // wiring.update_interval, progress)
    return tuple(out)


def _end_of_update(wiring: Wiring, stage: int, update: int, progress: Counter[tuple[int, int]]) -> list[Action]:
    if progress[stage, update] != wiring.update_interval:
        return []
    last = (update + 1) * wiring.update_interval - 1
    co_located = [s for s, worker in enumerate(wiring.placement) if worker == wiring.placement[stage]]
    if any(progress[s, update] < wiring.update_interval for s in co_located):
        return [Action(stage, Op.REDUCE_GRAD, last)]
    return [
        Action(stage, Op.REDUCE_GRAD, last),
        *(Action(s, Op.REDUCE_NORM, last) for s in co_located),
        *(Action(s, Op.STEP, last) for s in co_located),
    ]


def any_order(wiring: Wiring, num_microbatches: int, choose: Callable[[int], int]) -> Schedule:
    """Compute actions of one step in an order that some run of them could have had.

    Args:
        choose: gives a number below the one that it is asked with.
    """
    backward = (Op.I, Op.W) if wiring.split_backward else (Op.B,)
    waiting = [
        Action(stage, op, m)
        for m in range(num_microbatches)
        for stage in range(wiring.num_stages)
        for op in (Op.F, *(backward if stage >= wiring.first_trainable else ()))
    ]
    done: set[Action] = set()
    rows: list[list[Action]] = [[] for _ in range(max(wiring.placement) + 1)]
    together = Wiring(((0,),) * wiring.num_stages, 1, wiring.split_backward, wiring.first_trainable)
    while waiting:
        ready = [action for action in waiting if all(d in done for d in dependencies(action, together))]
        action = ready[choose(len(ready))]
        waiting.remove(action)
        done.add(action)
        rows[wiring.placement[action.stage]].append(action)
    return Schedule("any", wiring, tuple(map(tuple, rows)), stride=num_microbatches)
