"""Simulation of a schedule: from steps of rows and their seconds to a Timeline, as of a measured run.

A worker runs one action at a time, in the order of its row. A SEND hands its message to the link and does not block the
worker. A link carries one message per direction at a time (``occupancy_s``), in the order of the SENDs, and the message
arrives ``latency_s`` later. A RECV waits for its message.

Messages of half-duplex hops share one wire per receiving worker, whether activations or gradients. It carries them one
at a time, in the order of the worker's RECVs.

Left out: the processor time of packing and unpacking, limits on the receiver's buffers, other wires
that several links share, the exchange of gradients of tied parameters, and the time of REDUCE_NORM (which is still a
barrier). The summing of gradients between replicas of a stage is the time of REDUCE_GRAD, which starts after each
replica's last backward; no worker continues before the last replica is done, because REDUCE_NORM is a barrier.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, fields

import numpy as np

from raypipe.errors import PlanError
from raypipe.ir.schedule import COMPUTE, OP_CODE, OPS, Op, PackedRow, Schedule
from raypipe.ir.timeline import PackedSpans, Timeline
from raypipe.planner.compiled_rows import CompiledRows, Seconds, Times, run, run_waves
from raypipe.planner.dependency_tables import ROLE, Program, build

_IS_COMPUTE = np.array([op in COMPUTE for op in OPS])


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
        half_duplex: by hop, True if its messages share one wire of each receiving worker; empty means False.
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
    half_duplex: tuple[bool, ...] = ()

    def __post_init__(self) -> None:
        for field in fields(self):
            values = getattr(self, field.name)
            by_hop = "latency" in field.name or "occupancy" in field.name or field.name == "half_duplex"
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


def simulate(lowered: Schedule | Program, costs: Costs, repeats: int = 1) -> Timeline:
    """Compute when every action of a lowered schedule starts and ends.

    Spans of compute actions and STEP are on their worker. The span of a SEND begins when the link
    takes the message and ends at its arrival; the span of a RECV or REDUCE_NORM is the time that its worker
    was blocked in it. Actions without duration, other than compute, have no span.

    Args:
        lowered: schedule from ``lower()``, or its tables from ``validate()``, which are then not built again.
        costs: seconds of as many stages as the schedule has.
        repeats: repetitions of the body of a schedule.

    Raises:
        PlanError: the costs are for another number of stages.
        ScheduleError: the schedule is malformed or deadlocks.
    """
    program = lowered if isinstance(lowered, Program) else build(lowered, repeats)
    return Timeline(_spans(program, _times(program, costs)), "simulated", program.peak_in_flight(), program.kind)


def makespan_s(lowered: Schedule, costs: Costs, repeats: int = 1) -> float:
    """Compute the seconds from the first start to the last end: ``simulate(...).makespan_s`` without building spans."""
    return program_makespan_s(build(lowered, repeats), costs)


def program_makespan_s(program: Program, costs: Costs) -> float:
    """Compute ``makespan_s`` from a program that was built before, for repeated calls."""
    seconds, steps = _on_wires(program, costs)
    if steps.wide:
        return float(run_waves(steps, seconds, spans=False).finish.max())
    return max(run(steps, seconds, [0.0] * steps.num_workers, [0.0] * steps.num_links))


def _on_wires(program: Program, costs: Costs) -> tuple[Seconds, CompiledRows]:
    """Return the seconds and the steps of the program; with the wires that half-duplex hops share, if there are any."""
    seconds, steps = _seconds(program, costs), program.checked_steps()
    if not any(costs.half_duplex):
        return seconds, steps
    shared = np.zeros(len(seconds.occupancy), dtype=np.bool_)
    shared[OP_CODE[Op.SEND_F] : -1 : len(OPS)] = (*costs.half_duplex, False)
    shared[OP_CODE[Op.SEND_B] : -1 : len(OPS)] = (False, *costs.half_duplex)
    return seconds.with_shared_wires(), steps.with_shared_wires(shared)


def _seconds(program: Program, costs: Costs) -> Seconds:
    """List the seconds of the work and messages of the program, by their numbers ``stage * len(OPS) + op``.

    The last entry of each list is 0, for steps without work or message.
    """
    stages = program.wiring.num_stages
    if costs.num_stages != stages:
        raise PlanError(f"Costs of {costs.num_stages} stages for a schedule of {stages}: give one number per stage.")
    half = tuple(seconds / 2 for seconds in costs.backward_s)
    # A SEND_F of stage s uses hop s, a SEND_B of stage s uses hop s - 1; () means free.
    free = (0.0,) * (stages - 1)
    return Seconds(
        _by_kind(
            stages,
            {
                Op.F: costs.forward_s,
                Op.B: costs.backward_s,
                Op.I: costs.backward_input_s or half,
                Op.W: costs.backward_weight_s or half,
                Op.STEP: costs.step_s,
                Op.REDUCE_GRAD: costs.reduce_s,
            },
        ),
        *(
            _by_kind(stages, {Op.SEND_F: (*(forward or free), 0.0), Op.SEND_B: (0.0, *(backward or free))})
            for forward, backward in (
                (costs.forward_occupancy_s, costs.backward_occupancy_s),
                (costs.forward_latency_s, costs.backward_latency_s),
            )
        ),
    )


def _by_kind(stages: int, by_op: dict[Op, tuple[float, ...]]) -> list[float]:
    by_kind = [0.0] * (stages * len(OPS) + 1)
    for op, seconds in by_op.items():
        if seconds:
            by_kind[OP_CODE[op] : -1 : len(OPS)] = seconds
    return by_kind


def _times(program: Program, costs: Costs) -> Times:
    seconds, steps = _on_wires(program, costs)
    if steps.wide:
        times = run_waves(steps, seconds, spans=True)
    else:
        spans = [[0.0] * len(steps.source) for _ in range(3)]
        finish = run(steps, seconds, [0.0] * steps.num_workers, [0.0] * steps.num_links, spans)
        times = Times(*map(np.array, (*spans, finish)))
    carry = np.arange(len(program.steps.source) - 1, steps.first[-1])
    sent = steps.source[carry]
    carry, sent = carry[sent != carry], sent[sent != carry]
    times.leave[sent], times.finish[sent] = times.begin[carry], times.finish[carry]
    return times


def _spans(program: Program, times: Times) -> PackedSpans:
    """Convert times of steps to spans of actions, row after row."""
    worker_of, stage_of, microbatch_of, op_of = array("i"), array("i"), array("i"), array("b")
    start_of, end_of = array("d"), array("d")
    for worker, (stage, op, microbatch) in enumerate(program.rows):
        starts = program.starts[program.first[worker] : program.first[worker + 1]]
        of = np.cumsum(starts, dtype=np.int32) + np.int32(program.steps.first[worker] - 1)
        role = ROLE[op]
        # A wait begins when the previous step of the row has ended its work.
        begin, end = times.begin[of], times.end[of]
        start_s = np.choose(role, (times.end[of - 1], begin, times.leave[of]))
        end_s = np.choose(role, (begin, end, times.finish[of]))
        keep = np.flatnonzero(_IS_COMPUTE[op] | (end_s > start_s))
        worker_of.frombytes(np.full(len(keep), worker, dtype=np.int32).tobytes())
        for column, values in ((stage_of, stage), (microbatch_of, microbatch), (op_of, op)):
            column.frombytes(values[keep].tobytes())
        for seconds, values_s in ((start_of, start_s), (end_of, end_s)):
            seconds.frombytes(values_s[keep].tobytes())
    return PackedSpans(worker_of, PackedRow(stage_of, op_of, microbatch_of), start_of, end_of)
