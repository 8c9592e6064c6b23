"""Rows of a plan for any segment: the one way from a plan and a RowsKey to what workers carry out.

evaluation                             forwards alone, on the first replica of every stage
synchronous                            the plan's spec, or the key's, for the key's number of micro-batches
asynchronous, empty at both ends       so many mini-batches of the plan's schedule
asynchronous, a phase of it            fill, steady or drain
asynchronous, a smaller mini-batch     1f1b, by itself
"""

from __future__ import annotations

from raypipe.errors import PlanError
from raypipe.ir.plan import Plan
from raypipe.ir.schedule import Schedule
from raypipe.ir.segment import Phase, RowsKey
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.asynchronous import finite, minibatches_to_drain, part
from raypipe.planner.schedule.forward import forward_only
from raypipe.planner.schedule.validate import lowered_and_checked
from raypipe.planner.segments import Flow

__all__ = ["flow_of", "flowing_keys", "rows_for"]


def rows_for(plan: Plan, key: RowsKey) -> Schedule:
    """Lowered and checked rows of a segment.

    Raises:
        PlanError: the plan was saved by a release that did not write its schedule's numbers down.
        ScheduleError: the key's spec cannot work on the plan's stages.
    """
    wiring = plan.schedule.wiring
    if not key.training:
        return forward_only(wiring.placement, key.num_microbatches, wiring.num_workers)
    if key.phase is not Phase.WHOLE:
        return part(lowered_and_checked(plan.schedule), key.phase)
    if key.update_interval is not None:
        return lowered_and_checked(finite(plan.schedule, key.num_minibatches))
    spec = key.spec or plan.spec
    if spec is None:
        raise PlanError(
            f"This plan does not say what its schedule {plan.schedule.kind!r} was made from, for an earlier release "
            "saved it: make the plan again."
        )
    if not spec.of_kind.synchronous:
        spec = spec.as_kind("1f1b")
    return lowered_and_checked(schedule_of(spec.with_microbatches(key.num_microbatches), wiring.num_stages))


def flow_of(plan: Plan) -> Flow | None:
    """How mini-batches follow each other without a flush; None for a synchronous schedule."""
    interval = plan.weights.interval
    if interval is None:
        return None
    return Flow(interval, minibatches_to_drain(plan.num_microbatches, plan.weights.ahead))


def flowing_keys(plan: Plan) -> tuple[RowsKey, ...]:
    """All segments of a schedule that runs on without a flush; none of a synchronous one."""
    flow = flow_of(plan)
    if flow is None:
        return ()
    count, drained, interval = plan.num_microbatches, flow.num_to_drain, flow.interval
    wholes = [RowsKey(count, n, update_interval=interval) for n in range(1, drained + 1)]
    completed = ((Phase.FILL, 1), (Phase.STEADY, 1), (Phase.DRAIN, drained))
    return (*wholes, *(RowsKey(count, done, phase, update_interval=interval) for phase, done in completed))
