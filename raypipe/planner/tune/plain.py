"""The plan of a model that nobody has profiled: who holds what, and no word about seconds."""

from __future__ import annotations

from collections.abc import Sequence

from raypipe.errors import PlanError
from raypipe.ir.plan import Partition, Plan
from raypipe.planner.tune.request import ASYNCHRONOUS, Request, microbatches
from raypipe.planner.tune.settled import build_schedule
from raypipe.planner.tune.weights import weight_policy, weight_reason

__all__ = ["bubble_notes", "make_plan"]


def make_plan(request: Request, partition: Partition, first_trainable: int, notes: Sequence[str] = ()) -> Plan:
    """The plan of a partitioned model.

    Raises:
        PlanError: the stages do not fit on the workers offered.
    """
    num_stages = partition.num_stages
    if request.num_workers is not None and num_stages > request.num_workers:
        raise PlanError(
            f"The plan has {num_stages} stages, but scaling_config offers {request.num_workers} workers. "
            f"Set num_stages to at most {request.num_workers}, or raise num_workers."
        )
    minibatch, size, count = microbatches(request, num_stages)
    idle = () if request.schedule in ASYNCHRONOUS else bubble_notes(num_stages, count)
    found = (*notes, *idle)
    schedule = build_schedule(request, num_stages, count, first_trainable)
    reason = weight_reason(request, num_stages, count)
    return Plan(
        partition,
        schedule,
        minibatch,
        size,
        count,
        notes=found,
        reasons=(("weights", reason),) if reason else (),
        weights=weight_policy(request, num_stages, count),
    )


def bubble_notes(num_stages: int, count: int) -> tuple[str, ...]:
    """A sentence where fewer micro-batches than stages leave workers idle."""
    if count >= num_stages:
        return ()
    bubble = (num_stages - 1) / (count + num_stages - 1)
    return (
        f"{count} micro-batches for {num_stages} stages leave workers idle {bubble:.0%} of the time; "
        f"num_microbatches={4 * num_stages} would leave {(num_stages - 1) / (5 * num_stages - 1):.0%}.",
    )
