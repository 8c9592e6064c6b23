"""Forward only: what an evaluation runs. All there is to decide is whose turn it is on a worker of several stages."""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.errors import ScheduleError
from raypipe.ir.schedule import Action, Op, Schedule, Wiring, single_homes
from raypipe.planner.schedule.interleaved import in_rounds

__all__ = ["forward_only"]


def forward_only(placement: Sequence[int], num_microbatches: int, num_workers: int | None = None) -> Schedule:
    """Lowered rows of an evaluation, for any placement of the stages.

    placement=(0, 1), M=2
    0: 0F0 0SEND_F0 0F1 0SEND_F1
    1: 1RECV_F0 1F0 1RECV_F1 1F1

    Micro-batches go in rounds of about 2 P, where P is the number of workers. A worker of several stages takes the
    earliest round that it has something of, there the earliest stage, and a later round rather than stand still: the
    pipeline stays full, also where a message is under way for as long as a forward takes, and the first stage is ahead
    of a last one on its worker by a few rounds at most. With equal stages and free links, M >= P micro-batches take
    M * v + P - 1 forwards where stages go round the workers v times, and 2 * (M + P - 1) where they go there and back.
    Neither can be less: the last worker of the way there begins after P - 1 forwards of others, all of its own work is
    still to come then, and on the way back P - 1 forwards of others come after that.

    Args:
        placement: worker of each stage, by stage.
        num_microbatches: M.
        num_workers: rows; those of workers without a stage are empty. None for no such worker.

    Raises:
        ScheduleError: no stage, or no micro-batch.
    """
    if not placement or num_microbatches < 1:
        raise ScheduleError(
            f"An evaluation of {num_microbatches} micro-batches on {len(placement)} stages does nothing: "
            "it needs at least one of each."
        )
    wiring = Wiring(single_homes(placement), update_interval=num_microbatches)
    rows = tuple(tuple(_with_messages(row, wiring)) for row in _orders(wiring, num_microbatches))
    rows += ((),) * ((num_workers or 0) - len(rows))
    return Schedule("forward", wiring, rows, stride=num_microbatches)


def _orders(wiring: Wiring, num_microbatches: int) -> list[list[Action]]:
    """Forwards of each worker as equal stages could run them, slot by slot: an order that was run cannot deadlock.

    A message is under way for one slot. If links were free here, forwards would follow on each other's heels, and any
    latency would delay every round.
    """
    placement, num_stages = wiring.placement, wiring.num_stages
    held = [[s for s, worker in enumerate(placement) if worker == w] for w in range(1 + max(placement))]
    round_of = [
        number for number, part in enumerate(in_rounds(num_microbatches, 2 * len(set(placement)))) for _ in part
    ]
    orders: list[list[Action]] = [[] for _ in held]
    done = [0] * num_stages
    before = done
    while done[-1] < num_microbatches:
        there = [num_microbatches] + [
            (before if wiring.crosses(s, done[s + 1]) else done)[s] for s in range(num_stages - 1)
        ]
        ready = ([s for s in stages if done[s] < there[s]] for stages in held)
        turns = [min(stages, key=lambda s: (round_of[done[s]], s)) for stages in ready if stages]
        before = done.copy()
        for stage in turns:
            orders[placement[stage]].append(Action(stage, Op.F, done[stage]))
            done[stage] += 1
    return orders


def _with_messages(row: Sequence[Action], wiring: Wiring) -> list[Action]:
    found = []
    for action in row:
        stage, _, microbatch = action
        if stage and wiring.crosses(stage - 1, microbatch):
            found.append(Action(stage, Op.RECV_F, microbatch))
        found.append(action)
        if wiring.crosses(stage, microbatch):
            found.append(Action(stage, Op.SEND_F, microbatch))
    return found
