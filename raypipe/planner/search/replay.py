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
from itertools import accumulate

from raypipe.ir.schedule import Op
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.schedule import schedule_of
from raypipe.planner.search.routes import Routes, routes_of
from raypipe.planner.simulate.serial import Costs
from raypipe.planner.tables import OP_CODE, encode

__all__ = ["STEADY", "Compiled", "Wire", "compiled", "equal_messages_s", "step_s"]

WORK, WAIT, SEND = range(3)
FILLING = 2
"""Steps that overlap, before those that count: with an empty pipeline the first begins earlier than any other."""
STEADY = (4, 12)
"""Steps of a schedule that overlaps, or repetitions of an asynchronous one's body, between which seconds per step are
predicted."""
_OF_CODE = {OP_CODE[op]: number for number, op in enumerate((Op.F, Op.B, Op.I, Op.W))}
"""By operation, work less 4 times the worker."""

Instruction = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Wire:
    """One link, one way.

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
        routes: of its messages.
        messages: by link, how many cross it, each way.
        blocks: (worker, instructions); an instruction is (WORK, work, _), (WAIT, message, _) or (SEND, wire, message).
            Work 4 w + (0, 1, 2 or 3) is F, B, I or W of worker w; wire 2 l + (0 or 1) is link l forward or backward;
            messages are numbered wire after wire.
        overlaps: a stage begins its next step while others have not ended theirs; never with replicas.
    """

    routes: Routes
    messages: tuple[int, ...]
    blocks: tuple[tuple[int, tuple[Instruction, ...]], ...]
    overlaps: bool = False

    @property
    def num_workers(self) -> int:
        return len(self.routes.stages)


@functools.lru_cache(maxsize=512)
def compiled(spec: ScheduleSpec, num_stages: int) -> Compiled:
    """A synchronous schedule with a stage on each worker, put in order; the last few hundred are remembered.

    Raises:
        ScheduleError: it describes no pipeline of so many stages.
    """
    schedule, routes = schedule_of(spec, num_stages), routes_of(spec, num_stages)
    messages = routes.messages(spec.num_microbatches)
    rows = [list(zip(ops.tolist(), numbers.tolist(), strict=True)) for _, ops, numbers in map(encode, schedule.body)]
    moves, stages = _moves(routes, messages, spec.num_microbatches), routes.stages
    position = [0] * len(rows)
    sent = [False] * (2 * sum(messages))
    blocks: list[tuple[int, tuple[Instruction, ...]]] = []
    while any(at < len(row) for at, row in zip(position, rows, strict=True)):
        blocks_before = len(blocks)
        for worker, row in enumerate(rows):
            block: list[Instruction] = []
            of_stage = moves[stages[worker]]
            for op, microbatch in row[position[worker] :]:
                awaited, handed_on = of_stage[op]
                if awaited:
                    message = awaited[microbatch][2]
                    if not sent[message]:
                        break
                    block.append((WAIT, message, 0))
                block.append((WORK, 4 * worker + _OF_CODE[op], 0))
                if handed_on:
                    send = handed_on[microbatch]
                    sent[send[2]] = True
                    block.append(send)
                position[worker] += 1
            if block:
                blocks.append((worker, tuple(block)))
        assert len(blocks) > blocks_before, f"{spec} waits for itself"
    return Compiled(routes, messages, tuple(blocks), schedule.wiring.norm_per_stage)


_Sends = Sequence[Instruction]
"""(SEND, wire, message) by micro-batch; empty where there is no link."""


def _moves(routes: Routes, messages: Sequence[int], count: int) -> list[dict[int, tuple[_Sends, _Sends]]]:
    """By stage and operation, how what an action waits for was sent, and how it hands on what it made."""
    first = [*accumulate((n for n in messages for _ in (0, 1)), initial=0)]  # message of each wire
    nothing: _Sends = ()
    ahead, back = [nothing], [nothing]  # by hop, with one before the first stage and one behind the last
    for hop in range(routes.num_stages - 1):
        places = [routes.place_of(hop, microbatch) for microbatch in range(count)]
        for way, found in enumerate((ahead, back)):
            found.append([(SEND, 2 * link + way, first[2 * link + way] + at) for link, at in places])
    ahead.append(nothing)
    back.append(nothing)
    return [
        {
            OP_CODE[Op.F]: (ahead[stage], ahead[stage + 1]),
            OP_CODE[Op.B]: (back[stage + 1], back[stage]),
            OP_CODE[Op.I]: (back[stage + 1], back[stage]),
            OP_CODE[Op.W]: (nothing, nothing),
        }
        for stage in range(routes.num_stages)
    ]


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
        forward_s, backward_s: by worker, of one micro-batch.
        wires: link 0 forward, link 0 backward, link 1 forward, ...
        optimizer_s: by worker.
        split_backward_s: by worker, (I, W) of a split backward; empty means half of backward_s each.
    """
    work = _work(forward_s, backward_s, split_backward_s)
    if program.overlaps:
        return _overlapping_s(program, work, wires, optimizer_s, replays, FILLING)
    total_s = 0.0
    for replay in range(replays):
        clock, free = [0.0] * program.num_workers, [0.0] * len(wires)
        _replay(program, work, wires, replay, clock, free)
        total_s += max(clock)
    return total_s / replays + max(optimizer_s, default=0.0)


def equal_messages_s(spec: ScheduleSpec, costs: Costs) -> float:
    """Seconds of one step as ``planner.simulate`` has them; where steps overlap, in the steady state.

    What replicas take to sum their gradients is left out.

    Args:
        spec: of a synchronous kind that puts one stage on each worker.
        costs: all of them but ``step_s``, which does not count.
    """
    program = compiled(spec, costs.num_stages)
    routes = program.routes
    work = _work(
        [costs.forward_s[stage] for stage in routes.stages],
        [costs.backward_s[stage] for stage in routes.stages],
        [(costs.backward_input_s[stage], costs.backward_weight_s[stage]) for stage in routes.stages],
    )
    wires = []
    for hop in routes.hops:
        wires.append(Wire(costs.forward_latency_s[hop], (costs.forward_occupancy_s[hop],)))
        wires.append(Wire(costs.backward_latency_s[hop], (costs.backward_occupancy_s[hop],)))
    clock = [0.0] * program.num_workers
    _replay(program, work, wires, 0, clock, [0.0] * len(wires))
    # The first stage begins no step before it has ended the one before: what it takes is the least.
    if not program.overlaps or max(clock) <= clock[0]:
        return max(clock)
    return _overlapping_s(program, work, wires, (), STEADY[1] - STEADY[0], STEADY[0])


def _work(
    forward_s: Sequence[float], backward_s: Sequence[float], split_backward_s: Sequence[tuple[float, float]]
) -> list[float]:
    by_worker = zip(forward_s, backward_s, split_backward_s or [(s / 2, s / 2) for s in backward_s], strict=True)
    return [s for f, b, parts in by_worker for s in (f, b, *parts)]


def _overlapping_s(
    program: Compiled,
    work: list[float],
    wires: Sequence[Wire],
    optimizer_s: Sequence[float],
    replays: int,
    filling: int,
) -> float:
    clock, free = [0.0] * program.num_workers, [0.0] * len(wires)
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
    occupancy: list[float] = []
    for number, wire in enumerate(wires):
        count = program.messages[number // 2]
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
