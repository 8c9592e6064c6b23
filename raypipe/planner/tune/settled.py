"""The schedule and the memory model of a request whose number of stages and micro-batches are known."""

from __future__ import annotations

from raypipe.ir.schedule import Schedule
from raypipe.planner.memory import MemoryModel
from raypipe.planner.schedule import make_schedule
from raypipe.planner.tune.request import ASYNCHRONOUS, Request, settled_schedule
from raypipe.planner.tune.weights import continuous_schedule, slack_of, weight_policy

__all__ = ["build_schedule", "memory_model"]


def build_schedule(request: Request, num_stages: int, num_microbatches: int, first_trainable: int) -> Schedule:
    """The compute actions of one step, or of an asynchronous run from an empty pipeline to an empty one."""
    if request.schedule in ASYNCHRONOUS:
        return continuous_schedule(request, num_stages, num_microbatches, first_trainable)
    kind, group_size, slack = settled_schedule(request, num_stages, num_microbatches)
    return make_schedule(
        kind, num_stages, num_microbatches, group_size=group_size, slack=slack, first_trainable=first_trainable
    )


def memory_model(request: Request, num_stages: int, num_microbatches: int, microbatch_size: int) -> MemoryModel:
    """What decides the memory of a stage under this request."""
    kind, group_size, slack = settled_schedule(request, num_stages, num_microbatches)
    policy = weight_policy(request, num_stages, num_microbatches)
    if not policy.synchronous:
        slack = slack_of(request, num_stages, num_microbatches)
    return MemoryModel(
        schedule=kind,
        num_microbatches=num_microbatches,
        microbatch_size=microbatch_size,
        group_size=group_size or 1,
        slack=1 if slack is None else slack,
        weight_versions=max(policy.capacities) if request.vertical_sync and policy.capacities else None,
        version_limit=request.weight_versions,
        update_interval=policy.interval or num_microbatches,
        optimizer_factor=request.optimizer_factor,
        reserve_bytes=request.reserve_bytes,
    )
