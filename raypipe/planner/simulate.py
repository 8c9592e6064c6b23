"""Run a lowered schedule on paper: the same Timeline that a measured run gives, from costs alone.

A worker does one thing at a time, in the order of its row. A SEND hands its message to the link and
the worker goes on; a link carries one message per direction at a time (``occupancy_s``), in the order
in which they were handed over, and the message arrives ``latency_s`` after it has left. A RECV waits
for its message. Rows and links are fixed orders, so no event queue is needed: one pass over an order
that respects every wait gives the time of everything.

Left out: the processor time of packing and unpacking, limits on the receiver's buffers, several links
that share one wire, and the time of REDUCE_GRAD and REDUCE_NORM (the latter is still a barrier).
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial

import numpy as np

from raypipe.errors import PlanError
from raypipe.ir.schedule import COMPUTE, Action, Op, Schedule
from raypipe.ir.timeline import Span, Timeline
from raypipe.planner.program import BARRIER, OP_CODE, OPS, Program, build

__all__ = ["Costs", "makespan_s", "simulate"]

_WORK, _WAIT, _SEND = range(3)
_ROLE = np.full(len(OPS), _WORK)
_ROLE[[OP_CODE[op] for op in (Op.RECV_F, Op.RECV_B, Op.REDUCE_NORM)]] = _WAIT
_ROLE[[OP_CODE[op] for op in (Op.SEND_F, Op.SEND_B)]] = _SEND

# What _make does, without a Python frame for each of a million tuples.
_ACTION = partial(tuple.__new__, Action)
_SPAN = partial(tuple.__new__, Span)


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds per micro-batch of every stage and hop; hop h joins stage h to stage h + 1.

    Attributes:
        forward_s, backward_s: by stage, the whole forward (F) and backward (B).
        backward_input_s, backward_weight_s: by stage, its halves (I and W); empty means half of backward_s each.
        forward_latency_s, backward_latency_s: by hop, from leaving to arrival; empty means none.
        forward_occupancy_s, backward_occupancy_s: by hop, how long a message keeps the link busy; empty means none.
        step_s: by stage, the optimizer step; empty means none.
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
    start_s, end_s = map(np.array, _run(program, costs))
    keep = np.isin(program.op, [OP_CODE[op] for op in COMPUTE]) | (end_s > start_s)
    columns = (program.worker, program.stage, program.op, program.microbatch, start_s, end_s)
    worker, stage, op, microbatch, start, end = (column[keep].tolist() for column in columns)
    actions = map(_ACTION, zip(stage, map(OPS.__getitem__, op), microbatch, strict=True))
    spans = tuple(map(_SPAN, zip(worker, actions, start, end, strict=True)))
    return Timeline(spans, "simulated", program.peak_in_flight(), lowered.kind)


def makespan_s(lowered: Schedule, costs: Costs, repeats: int = 1) -> float:
    """Seconds from the first start to the last end: ``simulate(...).makespan_s`` without making the spans."""
    _, end_s = _run(build(lowered, repeats), costs)
    return max(end_s, default=0.0)


def _run(program: Program, costs: Costs) -> tuple[list[float], list[float]]:
    """Start and end of every node, in seconds; the end of a SEND is the arrival of its message."""
    work, occupancy, latency = _tables(program, costs)
    roles, source, link = _ROLE[program.op].tolist(), program.source.tolist(), _links(program)
    start, end = [0.0] * len(roles), [0.0] * len(roles)
    clock = [0.0] * program.num_workers
    free = [0.0] * program.num_workers**2
    newest = [0.0] * program.num_workers**2
    for worker, first, stop in program.blocks():
        now = clock[worker]
        for node in range(first, stop):
            role = roles[node]
            if role == _WORK:
                start[node] = now
                now += work[node]
                end[node] = now
            elif role == _WAIT:
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
    return start, end


def _tables(program: Program, costs: Costs) -> tuple[list[float], list[float], list[float]]:
    """Seconds of work, of link occupancy and of latency, by node."""
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
    return _spread(program, work), _spread(program, occupancy), _spread(program, latency)


def _spread(program: Program, by_stage: dict[Op, tuple[float, ...]]) -> list[float]:
    table = np.zeros((len(OPS), program.wiring.num_stages))
    for op, seconds in by_stage.items():
        if seconds:
            table[OP_CODE[op]] = seconds
    by_node: list[float] = table[program.op, program.stage].tolist()
    return by_node


def _links(program: Program) -> list[int]:
    """By node, the one-way link that a SEND uses: there is one for each ordered pair of workers."""
    placement = np.asarray(program.wiring.placement)
    step = np.where(program.op == OP_CODE[Op.SEND_F], 1, -1)
    peer = placement[np.clip(program.stage + step, 0, len(placement) - 1)]
    links: list[int] = (program.worker * program.num_workers + peer).tolist()
    return links
