"""The schedule and the memory model of a request whose number of stages and micro-batches are known."""

from __future__ import annotations

import functools

from raypipe.ir.schedule import Schedule
from raypipe.planner.memory import Held, MemoryModel
from raypipe.planner.schedule import make_schedule
from raypipe.planner.tune.held import held_by
from raypipe.planner.tune.request import ASYNCHRONOUS, CHUNKED, Request, settled_schedule
from raypipe.planner.tune.weights import continuous_schedule, slack_of, weight_policy

__all__ = ["build_schedule", "memory_model", "placement_of"]

FULL = 2
"""Micro-batches per stage from which on the steady state of a step only grows longer, where rounds are equal."""


def build_schedule(request: Request, num_stages: int, num_microbatches: int, first_trainable: int) -> Schedule:
    """The compute actions of one step, or of an asynchronous run from an empty pipeline to an empty one."""
    if request.schedule in ASYNCHRONOUS:
        return continuous_schedule(request, num_stages, num_microbatches, first_trainable)
    kind, group_size, slack = settled_schedule(request, num_stages, num_microbatches)
    return make_schedule(
        kind,
        num_stages,
        num_microbatches,
        group_size=group_size,
        slack=slack,
        chunks=num_stages // request.workers(num_stages) if kind == "interleaved" else None,
        first_trainable=first_trainable,
        overlap=request.overlaps,
    )


def placement_of(request: Request, num_stages: int) -> tuple[int, ...]:
    """The worker of each stage, as the schedule itself says."""
    return build_schedule(request, num_stages, 1, 0).wiring.placement


def memory_model(request: Request, num_stages: int, num_microbatches: int, microbatch_size: int) -> MemoryModel:
    """What decides the memory of a stage under this request."""
    kind, group_size, slack = settled_schedule(request, num_stages, num_microbatches)
    policy = weight_policy(request, num_stages, num_microbatches)
    if not policy.synchronous:
        slack = slack_of(request, num_stages, num_microbatches)
    workers = request.workers(num_stages)
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
        # Once per worker, whose stages share it.
        reserve_bytes=-(-request.reserve_bytes * workers // num_stages),
        held=_held(kind, num_stages, num_microbatches, workers) if kind in CHUNKED else None,
    )


@functools.lru_cache(maxsize=256)  # the same few numbers are asked for at every cut that is tried
def _held(kind: str, num_stages: int, num_microbatches: int, workers: int) -> Held:
    """Of backwards on all stages, since nobody knows the lowest that trains before the cut."""
    chunks = num_stages // workers if kind == "interleaved" else None
    # Further micro-batches only repeat the steady state. What is left over decides how long rounds are: with as many
    # rounds as workers, none is longer than by one.
    enough = max(FULL * num_stages, -(-(workers**2) // num_stages) * num_stages) + num_microbatches % num_stages
    return held_by(make_schedule(kind, num_stages, min(num_microbatches, enough), chunks=chunks))
