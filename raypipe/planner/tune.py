"""From what the user asked for to one Plan, with a reason for every choice that was left to us."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from raypipe.errors import PlanError
from raypipe.ir.graph import ModelGraph
from raypipe.ir.plan import Partition, Plan
from raypipe.ir.schedule import Schedule
from raypipe.planner.partition.chain import equal_parameters, split_before
from raypipe.planner.schedule import make_schedule

__all__ = ["Request", "build_schedule", "make_partition", "make_plan"]


@dataclass(frozen=True, slots=True)
class Request:
    """What the planner has to know of the configuration; None is left to it.

    Attributes:
        num_stages: how many, None takes num_workers.
        num_workers: places for stages that the user offered, None if nothing was said.
        split_points: module names that begin a stage.
        minibatch_size, num_microbatches: samples per step, and in how many parts.
        num_samples: of the training data.
        schedule: "auto" or a kind of planner.schedule.
        group_size: k of kFkB.
        slack: r of slack, by hop or one for all.
    """

    num_stages: int | None
    num_workers: int | None
    split_points: tuple[str, ...]
    minibatch_size: int | None
    num_microbatches: int | None
    num_samples: int
    schedule: str = "auto"
    group_size: int | None = None
    slack: int | tuple[int, ...] | None = None


DEFAULT_MINIBATCH = 32
DEFAULT_STAGES = 2


def microbatches(request: Request, num_stages: int) -> tuple[int, int, int]:
    """(minibatch_size, microbatch_size, num_microbatches); 4 micro-batches per stage where nothing is said."""
    minibatch = request.minibatch_size or min(DEFAULT_MINIBATCH, request.num_samples)
    wanted = request.num_microbatches or min(minibatch, 4 * num_stages)
    size = math.ceil(minibatch / wanted)
    return minibatch, size, math.ceil(minibatch / size)


def make_partition(graph: ModelGraph, request: Request) -> Partition:
    """The cut into stages."""
    if request.split_points:
        return split_before(graph, request.split_points)
    places = len(graph.cut_positions())
    num_stages = request.num_stages or request.num_workers or min(DEFAULT_STAGES, places + 1)
    return equal_parameters(graph, num_stages)


def build_schedule(request: Request, num_stages: int, num_microbatches: int, first_trainable: int) -> Schedule:
    """The compute actions of one step.

    "auto" is slack 2 on every hop: with free links it takes as long as 1F1B, and it hides a transfer of up to
    half a micro-batch's compute time, which 1F1B pays in full. Its price is one micro-batch more in flight per hop.
    """
    kind, slack, group_size = request.schedule, request.slack, request.group_size
    if kind == "auto":
        kind, slack, group_size = ("slack", 2, None) if num_stages > 1 else ("1f1b", None, None)
    if kind == "slack" and slack is None:
        slack = 2
    if kind == "kfkb" and group_size is None:
        group_size = min(2, num_microbatches)
    return make_schedule(
        kind, num_stages, num_microbatches, group_size=group_size, slack=slack, first_trainable=first_trainable
    )


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
    found = list(notes)
    if count < num_stages:
        bubble = (num_stages - 1) / (count + num_stages - 1)
        found.append(
            f"{count} micro-batches for {num_stages} stages leave workers idle {bubble:.0%} of the time; "
            f"num_microbatches={4 * num_stages} would leave {(num_stages - 1) / (5 * num_stages - 1):.0%}."
        )
    schedule = build_schedule(request, num_stages, count, first_trainable)
    return Plan(partition, schedule, minibatch, size, count, notes=tuple(found))
