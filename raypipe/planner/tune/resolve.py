"""What a request comes to once the number of stages and micro-batches is known: the schedule, and its memory model."""

from __future__ import annotations

import dataclasses

from raypipe.ir.schedule import Schedule, in_lane_order
from raypipe.ir.schedule_spec import ScheduleSpec, takes
from raypipe.ir.weights import WeightPolicy
from raypipe.planner.memory import MemoryModel
from raypipe.planner.row_memory import resident_under
from raypipe.planner.schedule import schedule_of
from raypipe.planner.tune.request import AUTO_SLACK, Request
from raypipe.planner.tune.weights import by_hop, slack_of, weight_policy

__all__ = ["build_schedule", "memory_model", "placement_of", "spec_of"]

GROUP_SIZE = 2
"""k of kfkb where nobody says."""


def spec_of(request: Request, num_stages: int, num_microbatches: int, first_trainable: int = 0) -> ScheduleSpec:
    """The schedule of a request, with a default for every number that it leaves open.

    Raises:
        PlanError: numbers of an asynchronous schedule do not go together; names the field and what would do.
    """
    kind, slack = request.schedule, request.slack
    if kind == "auto":
        kind, slack = ("slack", AUTO_SLACK) if num_stages > 1 else ("1f1b", None)
    policy = weight_policy(request, num_stages, num_microbatches)
    if not policy.synchronous:
        hops = slack_of(request, num_stages, num_microbatches)
    elif takes(kind, "slack"):
        hops = by_hop(slack or (AUTO_SLACK if kind == "slack" else 1), num_stages)
    else:
        hops = ()
    return ScheduleSpec(
        kind,
        num_microbatches,
        group_size=request.group_size or min(GROUP_SIZE, num_microbatches) if takes(kind, "group_size") else 1,
        slack=hops,
        chunks=num_stages // request.workers(num_stages) if takes(kind, "chunks") else 1,
        first_trainable=first_trainable,
        overlap=request.overlaps if policy.synchronous else policy.norm_per_stage,
        update_interval=policy.interval if takes(kind, "update_interval") else None,
        replicas=request.replicas_of(num_stages) if request.in_lanes else (),
        lanes=request.num_lanes(num_stages) if request.in_lanes else 1,
        per_replica=bool(policy.intervals),
    )


def build_schedule(request: Request, num_stages: int, num_microbatches: int, first_trainable: int) -> Schedule:
    """The compute actions of one step, or of an asynchronous run from an empty pipeline to an empty one."""
    return schedule_of(spec_of(request, num_stages, num_microbatches, first_trainable), num_stages)


def placement_of(request: Request, num_stages: int) -> tuple[int, ...]:
    """The worker of each stage, as the schedule itself says, where several stages share one; its replicas are one."""
    placement = build_schedule(request, num_stages, 1, 0).wiring.placement
    return tuple(worker // request.replicas_of(num_stages)[0] for worker in placement)


def memory_model(request: Request, num_stages: int, num_microbatches: int, microbatch_size: int) -> MemoryModel:
    """What decides the memory of a stage under this request."""
    spec = spec_of(request, num_stages, num_microbatches)
    policy = weight_policy(request, num_stages, num_microbatches)
    counted = None
    if not spec.of_kind.memory_formula or request.replicated:
        counted = resident_under(spec, num_stages, request.workers(num_stages))
        counted = dataclasses.replace(counted, versions=policy.capacities)
    return MemoryModel(
        spec,
        microbatch_size=microbatch_size,
        weight_versions=max(policy.capacities) if request.vertical_sync and policy.capacities else None,
        version_limit=request.weight_versions,
        optimizer_factor=_optimizer_factor(request, num_stages),
        leaf_factor=request.leaf_factor,
        state_copies=request.state_copies,
        # Once per worker, whose stages share it.
        reserve_bytes=-(-request.reserve_bytes * request.workers(num_stages) // num_stages),
        gradient_factor=tuple(_sums(request, policy, spec, count) for count in request.replicas_of(num_stages)),
        resident=counted,
        recompute=request.recomputes,
    )


def _optimizer_factor(request: Request, num_stages: int) -> float | tuple[float, ...]:
    """By stage where replicas share out its state."""
    whole = request.optimizer_factor
    return tuple(whole / count for count in request.replicas_of(num_stages)) if request.shards else whole


def _sums(request: Request, policy: WeightPolicy, spec: ScheduleSpec, replicas: int) -> int:
    """Sums of gradients that a worker holds: one for each of its lanes, or a single one (``engine.gradients``)."""
    alone = replicas == 1 and request.sums_factor == 1.0 and not policy.puts_off
    if alone and in_lane_order(0, policy.interval or spec.num_microbatches, spec.lanes):
        return 1
    return -(-spec.lanes // replicas)
