"""Shortest step of a pipeline over all orders of its actions, with a certificate, by constraint programming (CP-SAT).

Micro-batches are alike, so an optimal schedule exists in which every stage and link takes each kind of action in the
order of the micro-batches: the i-th forward of a stage starts after the i-th of the stage before, whatever their names,
and names can be exchanged. What is open is how forwards and backwards interleave, which is what schedules differ in.
Messages, links and the count of micro-batches in memory are those of ``planner.simulate``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from raypipe.ir.schedule import Action, Op
from raypipe.planner.simulator import Costs

__all__ = ["Case", "Optimum", "optimum"]


@dataclass(frozen=True)
class Case:
    """Step to schedule, one stage per worker; all times are whole numbers of one unit.

    Attributes:
        microbatches: number of micro-batches.
        forward, backward_input, backward_weight: times by stage; a whole backward takes the sum of its two parts.
        occupancy, latency: times of a message by hop, equal in both directions.
        limit: by stage, largest number of micro-batches between the start of forward and the end of backward.
    """

    microbatches: int
    forward: tuple[int, ...]
    backward_input: tuple[int, ...]
    backward_weight: tuple[int, ...]
    occupancy: tuple[int, ...]
    latency: tuple[int, ...]
    limit: tuple[int, ...]

    @property
    def costs(self) -> Costs:
        """Costs for the simulator, a unit as a second."""
        whole = tuple(i + w for i, w in zip(self.backward_input, self.backward_weight, strict=True))
        return Costs(
            forward_s=self.forward, backward_s=whole,
            backward_input_s=self.backward_input, backward_weight_s=self.backward_weight,
            forward_latency_s=self.latency, backward_latency_s=self.latency,
            forward_occupancy_s=self.occupancy, backward_occupancy_s=self.occupancy,
        )  # fmt: skip


@dataclass(frozen=True)
class Optimum:
    """Best step that was found, and the proof.

    Attributes:
        step: time of the step.
        bound: proven lower bound of all schedules; equal to ``step`` if that is proven optimal.
        rows: actions of each worker, in order.
        seconds: duration of the search.
    """

    step: int
    bound: int
    rows: tuple[tuple[Action, ...], ...]
    seconds: float


def optimum(case: Case, *, split: bool, limit_s: float, known: int | None = None) -> Optimum:
    """Search for the shortest step.

    Args:
        split: weight gradients may be computed later than input gradients, as zero-bubble schedules do.
        limit_s: time limit of the search.
        known: a step that some schedule has, which shortens the search.

    Raises:
        ImportError: ortools is missing.
        RuntimeError: no schedule within the time limit.
    """
    from ortools.sat.python import cp_model

    stages, count = len(case.forward), case.microbatches
    whole = case.costs.backward_s
    lengths = {Op.F: case.forward}
    lengths |= {Op.I: case.backward_input, Op.W: case.backward_weight} if split else {Op.B: tuple(map(int, whole))}
    back, release = (Op.I, Op.W) if split else (Op.B, Op.B)
    horizon = known or count * (sum(map(sum, lengths.values())) + 2 * sum(case.occupancy) + 2 * sum(case.latency))
    model = cp_model.CpModel()
    start: dict[tuple[int, Op, int], Any] = {}
    for stage in range(stages):
        busy = []
        for op, length in lengths.items():
            for m in range(count):
                start[stage, op, m] = at = model.new_int_var(0, horizon, f"{stage}{op.name}{m}")
                busy.append(model.new_fixed_size_interval_var(at, length[stage], f"{stage}{op.name}{m}"))
                if m:
                    model.add(at >= start[stage, op, m - 1] + length[stage])
        model.add_no_overlap(busy)
        ends = [start[stage, release, m] + lengths[release][stage] for m in range(count)]
        for m in range(count - case.limit[stage]):
            model.add(start[stage, Op.F, m + case.limit[stage]] >= ends[m])
        for m in range(count):
            model.add(start[stage, back, m] >= start[stage, Op.F, m] + case.forward[stage])
            if split:
                model.add(start[stage, Op.W, m] >= start[stage, Op.I, m] + case.backward_input[stage])
    for hop in range(stages - 1):
        for op, sender, receiver in ((Op.F, hop, hop + 1), (back, hop + 1, hop)):
            left = None
            for m in range(count):
                sent = model.new_int_var(0, horizon, f"{op.name}{m} over {hop}")
                model.add(sent >= start[sender, op, m] + lengths[op][sender])
                model.add(start[receiver, op, m] >= sent + case.occupancy[hop] + case.latency[hop])
                if left is not None:
                    model.add(sent >= left + case.occupancy[hop])
                left = sent
    step = model.new_int_var(0, horizon, "step")
    for stage in range(stages):
        model.add(step >= start[stage, release, count - 1] + lengths[release][stage])
    model.minimize(step)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = limit_s
    status = solver.solve(model)
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        raise RuntimeError(f"CP-SAT: {solver.status_name(status)} after {limit_s:g} s for {case}.")
    rows = []
    for stage in range(stages):
        own = sorted((solver.value(at), op.name, m, op) for (s, op, m), at in start.items() if s == stage)
        rows.append(tuple(Action(stage, op, m) for _, _, m, op in own))
    return Optimum(round(solver.objective_value), round(solver.best_objective_bound), tuple(rows), solver.wall_time)
