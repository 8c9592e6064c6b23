"""Seconds of one synchronous step with a stage on each worker, straight from the rows of compute actions.

The same seconds as ``serial.makespan_s`` of the lowered schedule, at a twentieth of the price: such rows need no order
of their own for messages, which leave when their action ends and are waited for when they are needed.
"""

from __future__ import annotations

import functools

from raypipe.ir.schedule import COMPUTE, Op, Schedule
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.schedule import schedule_of
from raypipe.planner.simulate.serial import Costs
from raypipe.planner.tune.predict import STEADY

__all__ = ["quick_step_s"]


def quick_step_s(spec: ScheduleSpec, costs: Costs) -> float:
    """Seconds of one step; where steps overlap, in the steady state.

    Args:
        spec: of a synchronous kind that puts one stage on each worker.
        costs: with all fields filled in but ``step_s``, which does not count.
    """
    step_s, first_stage_s = _ends_s(spec, costs, 1)
    # The first stage begins no step before it has ended the one before: what it takes is the least.
    if step_s <= first_stage_s or not _schedule(spec, costs.num_stages).wiring.norm_per_stage:
        return step_s
    fewer_s, more_s = (_ends_s(spec, costs, repeats)[0] for repeats in STEADY)
    return (more_s - fewer_s) / (STEADY[1] - STEADY[0])


def _ends_s(spec: ScheduleSpec, costs: Costs, repeats: int) -> tuple[float, float]:
    """When all stages have ended so many steps, and when the first has."""
    rows = _rows(spec, costs.num_stages, repeats)
    clock, at = [0.0] * len(rows), [0] * len(rows)
    work_s = {
        Op.F: costs.forward_s,
        Op.B: costs.backward_s,
        Op.I: costs.backward_input_s,
        Op.W: costs.backward_weight_s,
    }
    # By stage, when the message of a micro-batch arrives, and when the link that it takes is free again.
    inputs: list[dict[int, float]] = [{} for _ in rows]
    gradients: list[dict[int, float]] = [{} for _ in rows]
    forward_free, backward_free = [0.0] * len(rows), [0.0] * len(rows)
    last = len(rows) - 1
    while any(i < len(row) for i, row in zip(at, rows, strict=True)):
        for stage, row in enumerate(rows):
            now = clock[stage]
            for op, microbatch in row[at[stage] :]:
                waits = inputs if op is Op.F and stage else gradients if op in (Op.B, Op.I) and stage < last else None
                if waits is not None:
                    arrival = waits[stage].get(microbatch)
                    if arrival is None:
                        break
                    now = max(now, arrival)
                now += work_s[op][stage]
                if op is Op.F and stage < last:
                    forward_free[stage] = leave = max(forward_free[stage], now) + costs.forward_occupancy_s[stage]
                    inputs[stage + 1][microbatch] = leave + costs.forward_latency_s[stage]
                elif op in (Op.B, Op.I) and stage:
                    backward_free[stage] = leave = (
                        max(backward_free[stage], now) + costs.backward_occupancy_s[stage - 1]
                    )
                    gradients[stage - 1][microbatch] = leave + costs.backward_latency_s[stage - 1]
                at[stage] += 1
            clock[stage] = now
    return max(clock), clock[0]


@functools.lru_cache(maxsize=512)
def _schedule(spec: ScheduleSpec, num_stages: int) -> Schedule:
    return schedule_of(spec, num_stages)


@functools.lru_cache(maxsize=512)
def _rows(spec: ScheduleSpec, num_stages: int, repeats: int) -> tuple[tuple[tuple[Op, int], ...], ...]:
    rows = _schedule(spec, num_stages).rows(repeats)
    return tuple(tuple((a.op, a.microbatch) for a in row if a.op in COMPUTE) for row in rows)
