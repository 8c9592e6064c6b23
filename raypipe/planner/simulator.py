"""Simulation of a lowered schedule: from rows of actions and their seconds to a Timeline, as of a measured run.

A worker runs one action at a time, in the order of its row. A SEND hands its message to the link and does not block the
worker. A link carries one message per direction at a time (``occupancy_s``), in the order of the SENDs, and the message
arrives ``latency_s`` later. A RECV waits for its message. Rows and links have fixed orders, so no event queue is
needed: one pass in an order that respects every wait gives all times.

Left out: the processor time of packing and unpacking, limits on the receiver's buffers, several links
that share one wire, the exchange of gradients of tied parameters, and the time of REDUCE_NORM (which is still a
barrier). The summing of gradients between replicas of a stage is the time of REDUCE_GRAD, which starts after each
replica's last backward; no worker continues before the last replica is done, because REDUCE_NORM is a barrier.

Many workers advance together, in arrays: a row is split into steps of at most one wait, one piece of work and one
send, in this order, and in a wave every worker whose next step is not blocked runs it. A schedule has about twice as
many waves as micro-batches, for any number of workers. A loop over single workers is quicker for a few workers; its
arithmetic is the same, so both give the same bits.

    row      RECV_F F SEND_F | RECV_F F SEND_F | RECV_B B SEND_B | RECV_F F SEND_F | B ...
    step     0                 1                 2                 3                 4
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import PlanError
from raypipe.ir.schedule import COMPUTE, OP_CODE, OPS, Op, Schedule
from raypipe.ir.timeline import PackedSpans, Timeline
from raypipe.planner.dependency_tables import BARRIER, Ints, Program, build, pack

WAIT, WORK, SEND = range(3)
_ROLE = np.full(len(OPS), WORK, dtype=np.int8)
_ROLE[[OP_CODE[op] for op in (Op.RECV_F, Op.RECV_B, Op.REDUCE_NORM)]] = WAIT
_ROLE[[OP_CODE[op] for op in (Op.SEND_F, Op.SEND_B)]] = SEND

WIDE = 16
"""Least number of workers for which waves are quicker than the loop."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of every stage and hop; hop h joins stage h to stage h + 1.

    Attributes:
        forward_s, backward_s: by stage, seconds of the whole forward (F) and backward (B) of a micro-batch.
        backward_input_s, backward_weight_s: by stage, seconds of the input and weight parts (I and W) of a backward;
            empty means half of backward_s each.
        forward_latency_s, backward_latency_s: by hop, seconds from the end of occupancy to arrival; empty means 0.
        forward_occupancy_s, backward_occupancy_s: by hop, seconds for which a message occupies the link; empty means 0.
        step_s: by stage, seconds of the optimizer step; empty means 0.
        reduce_s: by stage, seconds in which its replicas sum gradients after their last backwards; empty means 0.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    backward_input_s: tuple[float, ...] = ()
    backward_weight_s: tuple[float, ...] = ()
    forward_latency_s: tuple[float, ...] = ()
    backward_latency_s: tuple[float, ...] = ()
    forward_occupancy_s: tuple[float, ...] = ()
    backward_occupancy_s: tuple[float, ...] = ()
    step_s: tuple[float, ...] = ()
    reduce_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            values = getattr(self, field.name)
            by_hop = "latency" in field.name or "occupancy" in field.name
            expected = len(self.forward_s) - by_hop
            optional = field.name not in ("forward_s", "backward_s")
            if len(values) != expected and not (optional and not values):
                unit = "hop" if by_hop else "stage"
                raise PlanError(f"Costs.{field.name} has {len(values)} numbers: give {expected}, one per {unit}.")
            if not all(value >= 0.0 for value in values):
                raise PlanError(f"Costs.{field.name} = {values}: seconds must be numbers from 0 up.")

    @classmethod
    def uniform(
        cls,
        num_stages: int,
        forward_s: float = 1.0,
        backward_s: float = 2.0,
        latency_s: float = 0.0,
        occupancy_s: float = 0.0,
        step_s: float = 0.0,
    ) -> Costs:
        """Build costs of equal stages and equal hops, the same in both directions."""
        hops = num_stages - 1
        return cls(
            forward_s=(forward_s,) * num_stages,
            backward_s=(backward_s,) * num_stages,
            forward_latency_s=(latency_s,) * hops,
            backward_latency_s=(latency_s,) * hops,
            forward_occupancy_s=(occupancy_s,) * hops,
            backward_occupancy_s=(occupancy_s,) * hops,
            step_s=(step_s,) * num_stages,
        )

    @property
    def num_stages(self) -> int:
        return len(self.forward_s)


def simulate(lowered: Schedule, costs: Costs, repeats: int = 1) -> Timeline:
    """Compute when every action of a lowered schedule starts and ends.

    Spans of compute actions and STEP are on their worker. The span of a SEND begins when the link
    takes the message and ends at its arrival; the span of a RECV or REDUCE_NORM is the time that its worker
    was blocked in it. Actions without duration, other than compute, have no span.

    Args:
        lowered: schedule from ``lower()``.
        costs: seconds of as many stages as the schedule has.
        repeats: repetitions of the body.

    Raises:
        PlanError: the costs are for another number of stages.
        ScheduleError: the schedule is malformed or deadlocks.
    """
    program = build(lowered, repeats)
    tables = _tables(program, costs)
    times = wave_times_s(program, tables) if program.num_workers >= WIDE else None
    # If the schedule deadlocks, the waves return None, and the loop raises an error that names the blocked action.
    start_s, end_s = times or _loop(program, tables)
    keep = np.isin(program.op, [OP_CODE[op] for op in COMPUTE]) | (end_s > start_s)
    actions = pack(program.stage[keep], program.op[keep], program.microbatch[keep])
    worker = array("i", program.worker[keep].tobytes())
    start, end = (array("d", seconds[keep].tobytes()) for seconds in (start_s, end_s))
    spans = PackedSpans(worker, actions, start, end)
    return Timeline(spans, "simulated", program.peak_in_flight(), lowered.kind)


def makespan_s(lowered: Schedule, costs: Costs, repeats: int = 1) -> float:
    """Compute the seconds from the first start to the last end: ``simulate(...).makespan_s`` without building spans."""
    return program_makespan_s(build(lowered, repeats), costs)


def program_makespan_s(program: Program, costs: Costs) -> float:
    """Compute ``makespan_s`` from a program that was built before, for repeated calls."""
    tables = _tables(program, costs)
    if program.num_workers >= WIDE and (last_s := wave_end_s(program, tables)) is not None:
        return last_s
    return float(_loop(program, tables)[1].max(initial=0.0))


def _loop(program: Program, tables: Tables) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Compute start and end of every node in seconds, by a loop over the workers' rows.

    The end of a SEND is the arrival of its message.
    """
    roles, work, occupancy, latency, link = (column.tolist() for column in tables[:5])
    source = program.source.tolist()
    start, end = [0.0] * len(roles), [0.0] * len(roles)
    clock = [0.0] * program.num_workers
    free = [0.0] * tables.num_links
    newest = [0.0] * tables.num_links
    for worker, first, stop in program.blocks():
        now = clock[worker]
        for node in range(first, stop):
            role = roles[node]
            if role == WORK:
                start[node] = now
                now += work[node]
                end[node] = now
            elif role == WAIT:
                start[node] = now
                if (awaited := source[node]) >= 0:
                    if end[awaited] > now:
                        now = end[awaited]
                elif awaited == BARRIER:
                    now = max(now, *[end[other] for other in program.barriers[node]])
                end[node] = now
            else:
                wire = link[node]
                leave = free[wire] if free[wire] > now else now
                start[node] = leave
                free[wire] = leave = leave + occupancy[node]
                arrival = leave + latency[node]
                # Hops of different latency may share a link; nothing overtakes on it.
                newest[wire] = end[node] = arrival if arrival > newest[wire] else newest[wire]
        clock[worker] = now
    return np.array(start), np.array(end)


def _tables(program: Program, costs: Costs) -> Tables:
    """Build the tables of a program: role, seconds and link of each node."""
    stages = program.wiring.num_stages
    if costs.num_stages != stages:
        raise PlanError(f"Costs of {costs.num_stages} stages for a schedule of {stages}: give one number per stage.")
    half = tuple(seconds / 2 for seconds in costs.backward_s)
    work = {
        Op.F: costs.forward_s,
        Op.B: costs.backward_s,
        Op.I: costs.backward_input_s or half,
        Op.W: costs.backward_weight_s or half,
        Op.STEP: costs.step_s,
        Op.REDUCE_GRAD: costs.reduce_s,
    }
    # A SEND_F of stage s uses hop s, a SEND_B of stage s uses hop s - 1; () means free.
    free = (0.0,) * (stages - 1)
    occupancy = {
        Op.SEND_F: (*(costs.forward_occupancy_s or free), 0.0),
        Op.SEND_B: (0.0, *(costs.backward_occupancy_s or free)),
    }
    latency = {
        Op.SEND_F: (*(costs.forward_latency_s or free), 0.0),
        Op.SEND_B: (0.0, *(costs.backward_latency_s or free)),
    }
    work_s, occupancy_s, latency_s = (_spread(program, by_stage) for by_stage in (work, occupancy, latency))
    return Tables(_ROLE[program.op], work_s, occupancy_s, latency_s, _links(program), program.num_workers**2)


def _spread(program: Program, by_stage: dict[Op, tuple[float, ...]]) -> NDArray[np.float64]:
    table = np.zeros((len(OPS), program.wiring.num_stages))
    for op, seconds in by_stage.items():
        if seconds:
            table[OP_CODE[op]] = seconds
    by_node: NDArray[np.float64] = table[program.op, program.stage]
    return by_node


def _links(program: Program) -> Ints:
    """Number the one-way link that each SEND uses: one for each ordered pair of workers."""
    wiring = program.wiring
    workers, lane = np.asarray(wiring.by_lane, dtype=np.int32), wiring.lane_of(program.microbatch)
    step = np.where(program.op == OP_CODE[Op.SEND_F], np.int32(1), np.int32(-1))
    peer = workers[np.clip(program.stage + step, 0, len(workers) - 1), lane]
    links: Ints = program.worker * np.int32(program.num_workers) + peer
    return links


Floats = NDArray[np.float64]
Index = NDArray[np.intp]


class Tables(NamedTuple):
    """Role, costs and link of every node (an action of the program).

    Attributes:
        role: WAIT, WORK or SEND.
        work_s, occupancy_s, latency_s: seconds of work, and of the message on its link.
        link: number of the one-way link that a SEND uses.
        num_links: upper limit of these numbers.
    """

    role: NDArray[np.int8]
    work_s: Floats
    occupancy_s: Floats
    latency_s: Floats
    link: Ints
    num_links: int


@dataclass(frozen=True, slots=True)
class _Steps:
    """Steps of all rows, numbered row after row.

    A sentinel that never runs follows each row. One more step at the end counts as done from the beginning.

    Attributes:
        of: number of the step that contains each node.
        at: first step of each worker.
        source: the step that each step waits for; the step at the end if it waits for nothing.
        barriers: for steps that wait for several others, the numbers of these.
        work_s, occupancy_s, latency_s, link: values by step.
    """

    of: Index
    at: Index
    source: Index
    barriers: dict[int, Index]
    work_s: Floats
    occupancy_s: Floats
    latency_s: Floats
    link: Index


class _Noted(NamedTuple):
    """Seconds by step: begin and end of its work, departure and arrival of its message.

    Without a message, the last two equal the end of the work.
    """

    begin: Floats
    end: Floats
    leave: Floats
    finish: Floats


def wave_end_s(program: Program, tables: Tables) -> float | None:
    """Compute the time at which everything has ended, in seconds; None if the schedule deadlocks."""
    noted = _run(_cut(program, tables), program, tables, spans=False)
    return None if noted is None else max(0.0, float(noted.finish.max()))


def wave_times_s(program: Program, tables: Tables) -> tuple[Floats, Floats] | None:
    """Compute start and end of every node, in seconds; None if the schedule deadlocks."""
    steps = _cut(program, tables)
    noted = _run(steps, program, tables, spans=True)
    if noted is None:
        return None
    of, role = steps.of, tables.role
    # A wait begins when the previous step of the row has ended its work.
    before = np.zeros(len(noted.end))
    before[1:] = noted.end[:-1]
    before[steps.at] = 0.0
    start_s = np.choose(role, (before[of], noted.begin[of], noted.leave[of]))
    end_s = np.choose(role, (noted.begin[of], noted.end[of], noted.finish[of]))
    return start_s, end_s


def _run(steps: _Steps, program: Program, tables: Tables, *, spans: bool) -> _Noted | None:
    """Run all waves; None if the schedule deadlocks. Without ``spans`` only ``finish`` is filled in."""
    count = len(steps.source)
    finish = np.full(count, -np.inf)
    begin, end, leave = (np.zeros(count if spans else 0) for _ in range(3))
    done = np.zeros(count, dtype=np.bool_)
    done[-1] = True
    at, waits = steps.at.copy(), steps.source[steps.at]
    clock = np.zeros(program.num_workers)
    free = np.zeros(tables.num_links + program.num_workers)
    newest = free.copy()
    while len(ready := done.take(waits).nonzero()[0]):
        step, awaited = at.take(ready), waits.take(ready)
        now = np.maximum(clock.take(ready), finish.take(awaited))
        if steps.barriers and not _pass_barriers(steps, done, finish, ready, step, now, waits):
            keep = done[waits[ready]]
            ready, step, now = ready[keep], step[keep], now[keep]
        if spans:
            begin[step] = now
        now += steps.work_s.take(step)
        clock[ready] = now
        link = steps.link.take(step)
        gone = np.maximum(free.take(link), now)
        if spans:
            end[step], leave[step] = now, gone
        gone += steps.occupancy_s.take(step)
        free[link] = gone
        gone += steps.latency_s.take(step)
        # Hops of different latency may share a link; nothing overtakes on it.
        newest[link] = finish[step] = np.maximum(gone, newest.take(link))
        done[step] = True
        at[ready] = step = step + 1
        waits[ready] = steps.source.take(step)
    stuck = steps.source[at] != at
    return None if stuck.any() else _Noted(begin, end, leave, finish)


def _pass_barriers(
    steps: _Steps, done: NDArray[np.bool_], finish: Floats, ready: Index, step: Index, now: Floats, waits: Index
) -> bool:
    """Check the barriers of the ready workers; changes ``now`` and ``waits`` in place.

    If all steps that a barrier awaits are done, the worker's ``now`` becomes the end of the last one; otherwise its
    entry in ``waits`` becomes one that is not done.

    Returns:
        True if no worker has to wait.
    """
    all_passed = True
    for place, number in enumerate(step.tolist()):
        if (awaited := steps.barriers.get(number)) is not None:
            pending = awaited[~done[awaited]]
            if len(pending):
                waits[ready[place]] = pending[0]
                all_passed = False
            else:
                now[place] = max(now[place], finish[awaited].max())
    return all_passed


def _cut(program: Program, tables: Tables) -> _Steps:
    """Split rows into steps.

    A new step begins where a role is not later in the order WAIT, WORK, SEND than the one before it, and after every
    node other than a SEND that another node waits for.
    """
    role, first = tables.role, np.asarray(program.first)
    starts = np.ones(len(role), dtype=np.bool_)
    starts[1:] = role[1:] <= role[:-1]
    awaited = program.source[program.source >= 0]
    behind = [awaited[role[awaited] != SEND], *(np.array(nodes) for nodes in program.barriers.values())]
    after = np.concatenate(behind) + 1
    starts[after[after < len(role)]] = True
    starts[first[:-1][first[:-1] < len(role)]] = True
    # A sentinel after each row shifts all later rows by one more.
    of = np.cumsum(starts) - 1 + program.worker
    per_row = np.add.reduceat(np.append(starts, False).astype(np.int32), first[:-1]) * (np.diff(first) > 0)
    ends = np.cumsum(per_row + 1)
    count = int(ends[-1]) + 1
    source = np.full(count, count - 1)
    source[ends - 1] = ends - 1  # waits for itself
    waiting = np.flatnonzero(program.source >= 0)
    source[of[waiting]] = of[program.source[waiting]]
    works, sends = np.flatnonzero(role == WORK), np.flatnonzero(role == SEND)
    # A step without a message gets a link of its own with zero cost: it ends with its work.
    link = np.zeros(count, dtype=np.intp)
    link[:-1] = np.repeat(np.arange(program.num_workers), per_row + 1) + tables.num_links
    link[of[sends]] = tables.link[sends]
    return _Steps(
        of,
        ends - per_row - 1,
        source,
        {int(of[node]): of[list(nodes)] for node, nodes in program.barriers.items()},
        _by_step(count, of[works], tables.work_s[works]),
        _by_step(count, of[sends], tables.occupancy_s[sends]),
        _by_step(count, of[sends], tables.latency_s[sends]),
        link,
    )


def _by_step(count: int, steps: Index, seconds: Floats) -> Floats:
    by_step = np.zeros(count)
    by_step[steps] = seconds
    return by_step
