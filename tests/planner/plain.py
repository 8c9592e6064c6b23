"""Schedules made, lowered and simulated action by action: slow and plain, for the fast ways to be compared with."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

from raypipe.ir.schedule import OF_UPDATES, Action, Op, Row, Schedule, Wiring, dependencies
from raypipe.planner.simulator import Costs

__all__ = ["any_order", "lowered_rows", "simulated_times"]


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


def simulated_times(rows: Sequence[Row], wiring: Wiring, costs: Costs) -> dict[tuple[int, Action], tuple[float, float]]:
    """Start and end of every action of lowered rows, by worker and action; action by action, in any order that works.

    An end of a dependency is looked up, and the end of a SEND is the arrival of its message. On half-duplex hops it is
    known only when the receiver takes the message.
    """
    times: dict[tuple[int, Action], tuple[float, float]] = {}
    at, clock = [0] * len(rows), [0.0] * len(rows)
    free: dict[tuple[int, int], float] = {}
    newest: dict[tuple[int, int], float] = {}
    sent_s: dict[Action, float] = {}
    moved = True
    while moved:
        moved = False
        for worker, row in enumerate(rows):
            while at[worker] < len(row):
                action, now = row[at[worker]], clock[worker]
                awaited = [key for wanted in dependencies(action, wiring) for key in _places(wanted, worker, wiring)]
                if any(key not in times for key in awaited):
                    break
                if action.op in (Op.RECV_F, Op.RECV_B) and awaited[0][1] in sent_s:
                    sender, message = awaited[0]
                    wire = (-1, worker)  # of all senders
                    times[sender, message] = _message(message, wire, sent_s[message], costs, free, newest)
                if action.op in (Op.SEND_F, Op.SEND_B) and any(costs.half_duplex[_hop(action) :][:1]):
                    sent_s[action], times[worker, action] = now, (now, now)
                elif action.op in (Op.SEND_F, Op.SEND_B):
                    there = action.stage + (1 if action.op is Op.SEND_F else -1)
                    link = worker, wiring.worker_of(there, action.microbatch)
                    times[worker, action] = _message(action, link, now, costs, free, newest)
                else:
                    waits = action.op in (Op.RECV_F, Op.RECV_B, Op.REDUCE_NORM)
                    ends = [times[key][1] for key in awaited if waits and key[0] != worker]
                    clock[worker] = max([now, *ends]) + _work_s(action, costs)
                    times[worker, action] = (now, clock[worker])
                at[worker] += 1
                moved = True
    if any(place < len(row) for place, row in zip(at, rows, strict=True)):
        raise RuntimeError("deadlock")
    return times


def _places(action: Action, worker: int, wiring: Wiring) -> list[tuple[int, Action]]:
    """Where an awaited action is: in this row, where it is one that each replica has, else in the rows of all."""
    workers = wiring.homes[action.stage]
    if action.op not in OF_UPDATES:
        workers = (wiring.worker_of(action.stage, action.microbatch),)
    elif worker in workers:
        workers = (worker,)
    return [(each, action) for each in workers]


def _work_s(action: Action, costs: Costs) -> float:
    half_s = tuple(s / 2 for s in costs.backward_s)
    by_stage = {
        Op.F: costs.forward_s,
        Op.B: costs.backward_s,
        Op.I: costs.backward_input_s or half_s,
        Op.W: costs.backward_weight_s or half_s,
        Op.REDUCE_GRAD: costs.reduce_s,
        Op.STEP: costs.step_s,
    }.get(action.op)
    return by_stage[action.stage] if by_stage else 0.0


def _hop(action: Action) -> int:
    return action.stage if action.op is Op.SEND_F else action.stage - 1


def _message(
    action: Action,
    link: tuple[int, int],
    now: float,
    costs: Costs,
    free: dict[tuple[int, int], float],
    newest: dict[tuple[int, int], float],
) -> tuple[float, float]:
    """Departure and arrival; changes the link's times at which it is free and at which its newest message arrives."""
    hop = _hop(action)
    if action.op is Op.SEND_F:
        latency_s, occupancy_s = costs.forward_latency_s, costs.forward_occupancy_s
    else:
        latency_s, occupancy_s = costs.backward_latency_s, costs.backward_occupancy_s
    leave = max(now, free.get(link, 0.0))
    free[link] = leave + (occupancy_s[hop] if occupancy_s else 0.0)
    arrival = free[link] + (latency_s[hop] if latency_s else 0.0)
    newest[link] = max(arrival, newest.get(link, 0.0))
    return leave, newest[link]
