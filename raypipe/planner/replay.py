"""Replay of a schedule: the seconds of one step, with separate seconds for every message.

``planner.simulator`` gives every message of a hop the same seconds. Here each message has its own, taken in turn from
measured ones. All candidates get the same sequence, so that results differ by the schedule only, not by chance.

    compiled once:   an action -> instructions: wait for its input, work, send its output
    replayed often:  one pass over the instructions, in an order that respects every wait

Rows need not be lowered first: a message leaves when its action ends, and is waited for when it is needed. With equal
messages the result equals ``makespan_s`` bit for bit (tests/planner/test_replay.py). Overlapping steps are
replayed in sequence, and the result is the time that each adds to the run.

A hop between stages with replicas has several links (``Routes``). Each keeps its messages in order, both ways:

    stages 2-1, lanes 2       link 0: worker 0 - 2, micro-batches 0 2 4 ...       link 1: worker 1 - 2, 1 3 5 ...
    stages 1-1-1              link 0: worker 0 - 1, all micro-batches             link 1: worker 1 - 2, all
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from raypipe.ir.schedule import OP_CODE, Homes, Op, Wiring
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.dependency_tables import encode
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.replicas import Replicas
from raypipe.planner.simulator import Costs


@dataclass(frozen=True, slots=True)
class Routes:
    """Links of a synchronous schedule with one stage on each worker, and the micro-batches that cross them.

    Attributes:
        homes: workers by stage.
        lanes: number of lanes, L; micro-batch m of a step belongs to lane m % L.
        workers: worker by stage and lane, as in ``Wiring.by_lane``.
        ends: by link, (hop, worker of the lower stage, worker of the higher stage); sorted by hop.
        by_lane: by hop and lane, (link, number of earlier lanes on that link, number of all lanes on that link).
    """

    homes: Homes
    lanes: int
    workers: tuple[tuple[int, ...], ...]
    ends: tuple[tuple[int, int, int], ...]
    by_lane: tuple[tuple[tuple[int, int, int], ...], ...]

    @property
    def num_stages(self) -> int:
        return len(self.homes)

    @property
    def stages(self) -> tuple[int, ...]:
        """Stage of each worker."""
        return tuple(stage for stage, workers in enumerate(self.homes) for _ in workers)

    @property
    def hops(self) -> tuple[int, ...]:
        """Hop of each link."""
        return tuple(hop for hop, _, _ in self.ends)

    def links_of(self, hop: int) -> list[int]:
        """List the links that join stage hop to stage hop + 1."""
        return [link for link, (at, _, _) in enumerate(self.ends) if at == hop]

    def name(self, link: int) -> str:
        """Name a link by its stages; by its workers too if the hop has several links."""
        hop, source, target = self.ends[link]
        return f"link {hop} - {hop + 1}" + f" (workers {source} - {target})" * (len(self.links_of(hop)) > 1)

    def place_of(self, hop: int, microbatch: int) -> tuple[int, int]:
        """Return the link that a micro-batch's message crosses, and the number of the step's messages before it."""
        link, before, each = self.by_lane[hop][microbatch % self.lanes]
        return link, microbatch // self.lanes * each + before

    def microbatches_of(self, worker: int, count: int) -> Iterator[int]:
        """Yield the micro-batches that a worker runs in a step of ``count`` micro-batches, in order."""
        by_lane = self.workers[self.stages[worker]]
        return (m for m in range(count) if by_lane[m % self.lanes] == worker)

    def messages(self, num_microbatches: int) -> tuple[int, ...]:
        """Count the messages of a step that cross each link in one direction."""
        counts = [0] * len(self.ends)
        for row in self.by_lane:
            for lane, (link, _, _) in enumerate(row):
                counts[link] += len(range(lane, num_microbatches, self.lanes))
        return tuple(counts)


def routes_of(spec: ScheduleSpec, num_stages: int) -> Routes:
    """Build the routes of a schedule."""
    return _routes(Replicas(spec.replicas, spec.lanes), num_stages)


@functools.lru_cache(maxsize=64)
def _routes(replicas: Replicas, num_stages: int) -> Routes:
    homes, lanes = replicas.homes(num_stages), replicas.lanes
    workers = Wiring(homes, lanes, lanes=lanes).by_lane
    ends = [[(hop, *pair) for pair in zip(*pairs, strict=True)] for hop, pairs in enumerate(pairwise(workers))]
    links = sorted({end for by_lane in ends for end in by_lane})
    by_lane = (
        tuple((links.index(end), row[:lane].count(end), row.count(end)) for lane, end in enumerate(row)) for row in ends
    )
    return Routes(homes, lanes, workers, tuple(links), tuple(by_lane))


WORK, WAIT, SEND = range(3)
FILLING = 2
"""Steps that are replayed, if steps overlap, to fill the empty pipeline before seconds are counted."""
STEADY = (4, 12)
"""Numbers of steps, or of repetitions of an asynchronous schedule's body, that are simulated if steps overlap: the
difference in seconds gives the seconds per step."""
_OF_CODE = {OP_CODE[op]: number for number, op in enumerate((Op.F, Op.B, Op.I, Op.W))}
"""Offset of each operation in ``work``, which has 4 entries per worker."""

Instruction = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Wire:
    """Link in one direction.

    Attributes:
        latency_s: latency of every message.
        draws_s: occupancies of successive messages, repeated if there are more messages; empty means 0.
    """

    latency_s: float = 0.0
    draws_s: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Compiled:
    """Schedule with one stage on each worker, as blocks of instructions that never wait for a later block.

    Attributes:
        routes: routes of its messages.
        messages: number of messages that cross each link in one direction.
        blocks: (worker, instructions); an instruction is (WORK, work, _), (WAIT, message, _) or (SEND, wire, message).
            Work 4 w + (0, 1, 2 or 3) is F, B, I or W of worker w; wire 2 l + (0 or 1) is link l forward or backward;
            messages are numbered wire after wire.
        overlaps: True if a stage may begin its next step before others have ended theirs; never with replicas.
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
    """Compile a synchronous schedule with one stage on each worker; results are cached.

    Raises:
        ScheduleError: the schedule does not allow so many stages.
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
"""(SEND, wire, message) by micro-batch; empty without a link."""


def _moves(routes: Routes, messages: Sequence[int], count: int) -> list[dict[int, tuple[_Sends, _Sends]]]:
    """Map, by stage, each operation to the messages that it waits for, and the messages that it sends."""
    first = [*accumulate((n for n in messages for _ in (0, 1)), initial=0)]  # message of each wire
    nothing: _Sends = ()
    ahead, back = [nothing], [nothing]  # by hop, with one before the first stage and one after the last
    for hop in range(routes.num_stages - 1):
        places = [routes.place_of(hop, microbatch) for microbatch in range(count)]
        for way, by_hop in enumerate((ahead, back)):
            by_hop.append([(SEND, 2 * link + way, first[2 * link + way] + at) for link, at in places])
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
    """Compute the seconds of one step, as the mean over ``replays`` steps with successive messages.

    Args:
        forward_s, backward_s: seconds of one micro-batch, by worker.
        wires: link 0 forward, link 0 backward, link 1 forward, ...
        optimizer_s: seconds of the optimizer step, by worker; empty means 0.
        split_backward_s: seconds of (I, W) of a split backward, by worker; empty means half of backward_s each.
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
    """Compute the seconds of one step as ``planner.simulator`` does; in the steady state if steps overlap.

    The summing of gradients between replicas is left out.

    Args:
        spec: schedule of a synchronous kind that puts one stage on each worker.
        costs: costs with all optional seconds given; ``step_s`` and ``reduce_s`` are ignored.
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
    # The first stage begins a step only after it has ended the one before: its own time is a lower bound.
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
    """Replay one step; changes ``clock`` and ``free`` in place.

    Args:
        replay: number of the step, which selects its messages' seconds.
        clock, free: times at which each worker and each wire has ended the previous step; set to those of this step.
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
