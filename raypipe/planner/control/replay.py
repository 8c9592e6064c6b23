"""Run a choice on paper with the messages that were measured, one by one.

``planner.simulate`` gives every message of a hop the same seconds. Here each has its own, taken in turn from the
measured ones and the same for every candidate: what differs between two results is the schedule, not the luck.

    compiled once:   RECV_F -> wait for a message    F -> add seconds    SEND_F -> hand a message to a wire
    replayed often:  one pass over these, in an order that respects every wait

With equal messages the result is ``makespan_s``'s to the bit (tests/planner/control/test_replay.py). Steps that overlap
are replayed one behind the other, and what counts is how much longer each of them makes the run.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from raypipe.ir.schedule import Op
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.lower import lower
from raypipe.planner.tables import OP_CODE, build

__all__ = ["Compiled", "Wire", "compiled", "step_s"]

WORK, WAIT, SEND = range(3)
FILLING = 2
"""Steps that overlap, before those that count: with an empty pipeline the first begins earlier than any other."""
# Kind of instruction, then work less 4 times the stage or wire less twice the stage: wire 2 h is hop h forward, 2 h + 1
# backward.
_PLACES = {
    Op.F: (WORK, 0),
    Op.B: (WORK, 1),
    Op.I: (WORK, 2),
    Op.W: (WORK, 3),
    Op.RECV_F: (WAIT, -2),
    Op.RECV_B: (WAIT, 1),
    Op.SEND_F: (SEND, 0),
    Op.SEND_B: (SEND, -1),
}


@dataclass(frozen=True, slots=True)
class Wire:
    """One hop, one way.

    Attributes:
        latency_s: of every message.
        draws_s: occupancy by message, used in turn; empty means none.
    """

    latency_s: float = 0.0
    draws_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Compiled:
    """A lowered schedule as a list of blocks that run without a wait for what comes later.

    Attributes:
        num_stages, num_microbatches: S and M.
        blocks: (worker, instructions); an instruction is (WORK, work, _), (WAIT, message, _) or (SEND, wire, message).
            Work 4 s + (0, 1, 2 or 3) is F, B, I or W of stage s; wire 2 h + (0 or 1) is hop h forward or backward;
            message wire * M + m is micro-batch m on it.
        overlaps: a stage begins its next step while others have not ended theirs.
    """

    num_stages: int
    num_microbatches: int
    blocks: tuple[tuple[int, tuple[tuple[int, int, int], ...]], ...]
    overlaps: bool = False


@functools.lru_cache(maxsize=512)
def compiled(spec: ScheduleSpec, num_stages: int) -> Compiled:
    """The schedule, lowered and put in order; the last few hundred are remembered.

    Raises:
        ScheduleError: it describes no pipeline of so many stages.
    """
    count, schedule = spec.num_microbatches, schedule_of(spec, num_stages)
    program = build(lower(schedule))
    stage, m, op = program.stage.astype(np.int64), program.microbatch, program.op
    # By operation: what it is, and wire or work; messages of wire w are numbered from w * M.
    places = [(4 if kind == WORK else 2) * stage + shift for kind, shift in _PLACES.values()]
    place = np.select([op == OP_CODE[o] for o in _PLACES], places, -1)
    what = np.select([op == OP_CODE[o] for o in _PLACES], [kind for kind, _ in _PLACES.values()], -1)
    message = place * count + m
    first = np.where(what == WAIT, message, place)
    lines = list(zip(what.tolist(), first.tolist(), message.tolist(), strict=True))
    # What has no place is REDUCE_GRAD, REDUCE_NORM and STEP: everybody waits for everybody, unless steps overlap, then
    # steps.
    blocks = (
        (worker, tuple(line for line in lines[start:stop] if line[0] >= 0)) for worker, start, stop in program.blocks()
    )
    filled = tuple((worker, block) for worker, block in blocks if block)
    return Compiled(num_stages, count, filled, schedule.wiring.norm_per_stage)


def step_s(
    program: Compiled,
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    wires: Sequence[Wire],
    optimizer_s: Sequence[float] = (),
    replays: int = 1,
    split_backward_s: Sequence[tuple[float, float]] = (),
) -> float:
    """Seconds of one step, the mean over ``replays`` of them with successive messages.

    Args:
        forward_s, backward_s: by stage, of one micro-batch.
        wires: hop 0 forward, hop 0 backward, hop 1 forward, ...
        optimizer_s: by stage.
        split_backward_s: by stage, (I, W) of a split backward; empty means half of backward_s each.
    """
    by_stage = zip(forward_s, backward_s, split_backward_s or [(s / 2, s / 2) for s in backward_s], strict=True)
    work = [s for f, b, parts in by_stage for s in (f, b, *parts)]
    if program.overlaps:
        return _overlapping_s(program, work, wires, optimizer_s, replays)
    total_s = 0.0
    for replay in range(replays):
        clock, free = [0.0] * program.num_stages, [0.0] * len(wires)
        _replay(program, work, wires, replay, clock, free)
        total_s += max(clock)
    return total_s / replays + max(optimizer_s, default=0.0)


def _overlapping_s(
    program: Compiled, work: list[float], wires: Sequence[Wire], optimizer_s: Sequence[float], replays: int
) -> float:
    clock, free = [0.0] * program.num_stages, [0.0] * len(wires)
    begin_s = 0.0
    for replay in range(-FILLING, replays):
        if replay == 0:
            begin_s = max(clock)
        _replay(program, work, wires, replay, clock, free)
        for worker, seconds in enumerate(optimizer_s):
            clock[worker] += seconds
    return (max(clock) - begin_s) / replays


def _replay(
    program: Compiled, work: list[float], wires: Sequence[Wire], replay: int, clock: list[float], free: list[float]
) -> None:
    """One step.

    Args:
        clock, free: by worker and by wire, when it is done with the step before, and after that with this one.
    """
    count = program.num_microbatches
    occupancy: list[float] = []
    for wire in wires:
        draws = wire.draws_s or (0.0,)
        at = replay * count % len(draws)
        line = draws[at : at + count]
        while len(line) < count:
            line += draws[: count - len(line)]
        occupancy.extend(line)
    latency = [wire.latency_s for wire in wires]
    arrival = [0.0] * len(occupancy)
    for worker, lines in program.blocks:
        now = clock[worker]
        for what, a, b in lines:
            if what == WORK:
                now += work[a]
            elif what == WAIT:
                if arrival[a] > now:
                    now = arrival[a]
            else:
                leave = free[a] if free[a] > now else now
                free[a] = leave = leave + occupancy[b]
                arrival[b] = leave + latency[a]
        clock[worker] = now
