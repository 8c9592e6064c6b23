"""What one step takes, from the rows of compute actions and seconds for every message.

``planner.simulate`` gives every message of a hop the same seconds. Here each has its own, taken in turn from measured
ones and the same for every candidate: what differs between two results is the schedule, not the luck.

    compiled once:   F -> wait for its input, add seconds, hand the output to a wire
    replayed often:  one pass over these, in an order that respects every wait

Rows need not be lowered first: a message leaves when its action ends, and is waited for when it is needed. With equal
messages the result is ``makespan_s``'s to the bit (tests/planner/search/test_replay.py). Steps that overlap are
replayed one behind the other, and what counts is how much longer each of them makes the run.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from raypipe.ir.schedule import Op
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.schedule import schedule_of
from raypipe.planner.simulate.serial import Costs
from raypipe.planner.tables import OP_CODE, encode

__all__ = ["STEADY", "Compiled", "Wire", "compiled", "equal_messages_s", "step_s"]

WORK, WAIT, SEND = range(3)
FILLING = 2
"""Steps that overlap, before those that count: with an empty pipeline the first begins earlier than any other."""
STEADY = (4, 12)
"""Steps of a schedule that overlaps, or repetitions of an asynchronous one's body, between which seconds per step are
predicted."""
_WORK = {Op.F: 0, Op.B: 1, Op.I: 2, Op.W: 3}
"""By operation, work less 4 times the stage."""

Instruction = tuple[int, int, int]


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
    """A schedule with a stage on each worker, as blocks that run without a wait for what comes later.

    Attributes:
        num_stages, num_microbatches: S and M.
        blocks: (stage, instructions); an instruction is (WORK, work, _), (WAIT, message, _) or (SEND, wire, message).
            Work 4 s + (0, 1, 2 or 3) is F, B, I or W of stage s; wire 2 h + (0 or 1) is hop h forward or backward;
            message wire * M + m is micro-batch m on it.
        overlaps: a stage begins its next step while others have not ended theirs.
    """

    num_stages: int
    num_microbatches: int
    blocks: tuple[tuple[int, tuple[Instruction, ...]], ...]
    overlaps: bool = False


@functools.lru_cache(maxsize=512)
def compiled(spec: ScheduleSpec, num_stages: int) -> Compiled:
    """A synchronous schedule with a stage on each worker, put in order; the last few hundred are remembered.

    Raises:
        ScheduleError: it describes no pipeline of so many stages.
    """
    schedule, count = schedule_of(spec, num_stages), spec.num_microbatches
    rows = [list(zip(ops.tolist(), numbers.tolist(), strict=True)) for _, ops, numbers in map(encode, schedule.body)]
    moves = [{OP_CODE[op]: _moves(op, stage, num_stages) for op in _WORK} for stage in range(num_stages)]
    position = [0] * num_stages
    sent = [False] * (2 * (num_stages - 1) * count)
    blocks: list[tuple[int, tuple[Instruction, ...]]] = []
    while any(at < len(row) for at, row in zip(position, rows, strict=True)):
        blocks_before = len(blocks)
        for stage, row in enumerate(rows):
            block: list[Instruction] = []
            for op, microbatch in row[position[stage] :]:
                awaited, work, handed_on = moves[stage][op]
                if awaited is not None:
                    message = awaited * count + microbatch
                    if not sent[message]:
                        break
                    block.append((WAIT, message, 0))
                block.append((WORK, work, 0))
                if handed_on is not None:
                    message = handed_on * count + microbatch
                    sent[message] = True
                    block.append((SEND, handed_on, message))
                position[stage] += 1
            if block:
                blocks.append((stage, tuple(block)))
        assert len(blocks) > blocks_before, f"{spec} waits for itself"
    return Compiled(num_stages, count, tuple(blocks), schedule.wiring.norm_per_stage)


def _moves(op: Op, stage: int, num_stages: int) -> tuple[int | None, int, int | None]:
    """The wire that an action's message comes on, its work, and the wire that it hands a message to."""
    work = 4 * stage + _WORK[op]
    if op is Op.W:
        return None, work, None
    before = 2 * (stage - 1) if stage else None
    after = 2 * stage if stage < num_stages - 1 else None
    if op is Op.F:
        return before, work, after
    return None if after is None else after + 1, work, None if before is None else before + 1


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
    work = _work(forward_s, backward_s, split_backward_s)
    if program.overlaps:
        return _overlapping_s(program, work, wires, optimizer_s, replays, FILLING)
    total_s = 0.0
    for replay in range(replays):
        clock, free = [0.0] * program.num_stages, [0.0] * len(wires)
        _replay(program, work, wires, replay, clock, free)
        total_s += max(clock)
    return total_s / replays + max(optimizer_s, default=0.0)


def equal_messages_s(spec: ScheduleSpec, costs: Costs) -> float:
    """Seconds of one step as ``planner.simulate`` has them; where steps overlap, in the steady state.

    Args:
        spec: of a synchronous kind that puts one stage on each worker.
        costs: all of them but ``step_s``, which does not count.
    """
    program = compiled(spec, costs.num_stages)
    work = _work(
        costs.forward_s,
        costs.backward_s,
        tuple(zip(costs.backward_input_s, costs.backward_weight_s, strict=True)),
    )
    wires = []
    for hop in range(costs.num_stages - 1):
        wires.append(Wire(costs.forward_latency_s[hop], (costs.forward_occupancy_s[hop],)))
        wires.append(Wire(costs.backward_latency_s[hop], (costs.backward_occupancy_s[hop],)))
    clock = [0.0] * program.num_stages
    _replay(program, work, wires, 0, clock, [0.0] * len(wires))
    # The first stage begins no step before it has ended the one before: what it takes is the least.
    if not program.overlaps or max(clock) <= clock[0]:
        return max(clock)
    return _overlapping_s(program, work, wires, (), STEADY[1] - STEADY[0], STEADY[0])


def _work(
    forward_s: Sequence[float], backward_s: Sequence[float], split_backward_s: Sequence[tuple[float, float]]
) -> list[float]:
    by_stage = zip(forward_s, backward_s, split_backward_s or [(s / 2, s / 2) for s in backward_s], strict=True)
    return [s for f, b, parts in by_stage for s in (f, b, *parts)]


def _overlapping_s(
    program: Compiled,
    work: list[float],
    wires: Sequence[Wire],
    optimizer_s: Sequence[float],
    replays: int,
    filling: int,
) -> float:
    clock, free = [0.0] * program.num_stages, [0.0] * len(wires)
    begin_s = 0.0
    for replay in range(-filling, replays):
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
