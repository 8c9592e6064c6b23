"""Run a lowered schedule on paper: the same Timeline that a measured run gives, from costs alone.

A worker does one thing at a time, in the order of its row. A SEND hands its message to the link and
the worker goes on; a link carries one message per direction at a time (``occupancy_s``), in the order
in which they were handed over, and the message arrives ``latency_s`` after it has left. A RECV waits
for its message. Rows and links are fixed orders, so no event queue is needed: one pass over an order
that respects every wait gives the time of everything.

Left out: the processor time of packing and unpacking, limits on the receiver's buffers, several links
that share one wire, what stages take to exchange gradients of tied parameters, and the time of REDUCE_NORM (which is
still a barrier). What replicas of a stage take to sum theirs is the time of REDUCE_GRAD, which starts behind each one's
last backward: nobody goes on before the last of them has got there, for all wait for each other in REDUCE_NORM.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from raypipe.errors import PlanError
from raypipe.ir.schedule import COMPUTE, Op, Schedule
from raypipe.ir.spans import PackedSpans
from raypipe.ir.timeline import Timeline
from raypipe.planner.simulate import wide as waves
from raypipe.planner.simulate.wide import SEND, WAIT, WORK, Tables
from raypipe.planner.tables import BARRIER, OP_CODE, OPS, Ints, Program, build, pack

__all__ = ["Costs", "makespan_s", "program_makespan_s", "simulate"]

_ROLE = np.full(len(OPS), WORK, dtype=np.int8)
_ROLE[[OP_CODE[op] for op in (Op.RECV_F, Op.RECV_B, Op.REDUCE_NORM)]] = WAIT
_ROLE[[OP_CODE[op] for op in (Op.SEND_F, Op.SEND_B)]] = SEND

WIDE = 16
"""Workers from which on all of them together are quicker than one by one."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds per micro-batch of every stage and hop; hop h joins stage h to stage h + 1.

    Attributes:
        forward_s, backward_s: by stage, the whole forward (F) and backward (B).
        backward_input_s, backward_weight_s: by stage, its input and weight parts (I and W); empty means half of
            backward_s each.
        forward_latency_s, backward_latency_s: by hop, from leaving to arrival; empty means none.
        forward_occupancy_s, backward_occupancy_s: by hop, how long a message keeps the link busy; empty means none.
        step_s: by stage, the optimizer step; empty means none.
        reduce_s: by stage, what its replicas take to sum their gradients behind their last backwards; empty means none.
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
        """Equal stages and equal hops, the same in both directions."""
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
    """When every action of a lowered schedule starts and ends.

    Spans of compute actions and STEP lie on their worker. The span of a SEND goes from the moment the link
    takes the message to its arrival; the span of a RECV or REDUCE_NORM is the time that its worker
    stood still for it. Whatever took no time, apart from compute, has no span.

    Args:
        lowered: from ``lower()``.
        costs: seconds; the number of stages must be the schedule's.
        repeats: repetitions of the body.

    Raises:
        PlanError: costs for another number of stages.
        ScheduleError: the schedule is malformed or deadlocks.
    """
    program = build(lowered, repeats)
    tables = _tables(program, costs)
    times = waves.times_s(program, tables) if program.num_workers >= WIDE else None
    # The loop also says who is stuck where the waves only found that somebody is.
    start_s, end_s = times or _loop(program, tables)
    keep = np.isin(program.op, [OP_CODE[op] for op in COMPUTE]) | (end_s > start_s)
    actions = pack(program.stage[keep], program.op[keep], program.microbatch[keep])
    worker = array("i", program.worker[keep].tobytes())
    start, end = (array("d", seconds[keep].tobytes()) for seconds in (start_s, end_s))
    spans = PackedSpans(worker, actions, start, end)
    return Timeline(spans, "simulated", program.peak_in_flight(), lowered.kind)


def makespan_s(lowered: Schedule, costs: Costs, repeats: int = 1) -> float:
    """Seconds from the first start to the last end: ``simulate(...).makespan_s`` without making the spans."""
    return program_makespan_s(build(lowered, repeats), costs)


def program_makespan_s(program: Program, costs: Costs) -> float:
    """The same of tables that were made before, for who asks often."""
    tables = _tables(program, costs)
    if program.num_workers >= WIDE and (last_s := waves.last_end_s(program, tables)) is not None:
        return last_s
    return float(_loop(program, tables)[1].max(initial=0.0))


def _loop(program: Program, tables: Tables) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Start and end of every node, in seconds, worker by worker; the end of a SEND is the arrival of its message."""
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
    """Roles, seconds and links by node."""
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
    """By node, the one-way link that a SEND uses: there is one for each ordered pair of workers."""
    wiring = program.wiring
    workers, lane = np.asarray(wiring.by_lane, dtype=np.int32), wiring.lane_of(program.microbatch)
    step = np.where(program.op == OP_CODE[Op.SEND_F], np.int32(1), np.int32(-1))
    peer = workers[np.clip(program.stage + step, 0, len(workers) - 1), lane]
    links: Ints = program.worker * np.int32(program.num_workers) + peer
    return links
