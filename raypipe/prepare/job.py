"""A run that is ready to start: its plan, its stages, and the rows of every segment that it may run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from raypipe.engine.data import Source
from raypipe.engine.stage import StageProgram
from raypipe.engine.state import MakeOptimizer, MakeScheduler, Settings
from raypipe.ir.plan import Plan
from raypipe.ir.schedule import Schedule
from raypipe.ir.segment import Phase, RowsKey
from raypipe.planner.control import Room
from raypipe.planner.schedule.asynchronous import finite, minibatches_to_drain, part
from raypipe.planner.schedule.forward import forward_only
from raypipe.planner.schedule.validate import lowered_and_checked
from raypipe.planner.segments import Flow
from raypipe.planner.tune import (
    Request,
    build_schedule,
)

__all__ = ["Job"]


@dataclass(frozen=True, slots=True)
class Job:
    """A run that is ready to start.

    Attributes:
        plan: what will happen.
        programs: the stages.
        tensors: the user's parameters and buffers by name; read only.
        persistent: names of tensors that belong to the state_dict.
        example: one micro-batch by column.
        aliases: further names of shared tensors in the state_dict -> the names that we use.
        sources: "train" and perhaps "eval".
        model_labels: what the model is, for settings.json.
        rooms: memory that is left to the schedule, by stage.
        microbatch_seconds: as in planner.control.Setup, where their number may change; else empty.
        check: compares the user's own module with the stages (engine/verify.py); does nothing where verify="off".
    """

    plan: Plan
    programs: tuple[StageProgram, ...]
    tensors: Mapping[str, torch.Tensor]
    persistent: frozenset[str]
    example: Mapping[Any, torch.Tensor]
    sources: Mapping[str, Source]
    settings: Settings
    make_optimizer: MakeOptimizer
    make_scheduler: MakeScheduler | None
    request: Request
    aliases: Mapping[str, str]
    rooms: tuple[Room, ...]
    check: Callable[[], None]
    model_labels: Mapping[str, Any]
    microbatch_seconds: tuple[tuple[int, float], ...] = ()

    @property
    def num_stages(self) -> int:
        return len(self.programs)

    @property
    def placement(self) -> tuple[int, ...]:
        """The worker of each stage."""
        return self.plan.schedule.wiring.placement

    @property
    def num_workers(self) -> int:
        """Workers that hold a stage; fewer than stages where a schedule puts several on each."""
        return 1 + max(self.placement)

    @property
    def flow(self) -> Flow | None:
        """How mini-batches follow each other without a flush; None for a synchronous schedule."""
        interval = self.plan.weights.interval
        if interval is None:
            return None
        warmups = tuple(map(len, self.plan.schedule.prologue))
        return Flow(interval, minibatches_to_drain(self.plan.num_microbatches, warmups))

    def schedule(self, num_microbatches: int, *, training: bool = True) -> Schedule:
        """Lowered and checked rows of a step with so many micro-batches."""
        return self.rows(RowsKey(num_microbatches, training=training, update_interval=self.plan.weights.interval))

    def rows(self, key: RowsKey) -> Schedule:
        """Lowered and checked rows of a segment that begins and ends with an empty pipeline."""
        if not key.training:
            return forward_only(self.plan.schedule.wiring.placement, key.num_microbatches)
        first, request = self.programs[0].first_trainable, self.request
        if key.update_interval is None:
            # A mini-batch smaller than the others runs by itself in any case.
            plain = dataclasses.replace(request, schedule="1f1b", slack=None) if self.flow else request
            schedule = build_schedule(plain, self.num_stages, key.num_microbatches, first)
        else:
            schedule = finite(self.plan.schedule, key.num_minibatches)
        return lowered_and_checked(schedule)

    def flowing_rows(self) -> dict[RowsKey, Schedule]:
        """Rows of all segments of a schedule that runs on without a flush; none of a synchronous one."""
        if self.flow is None:
            return {}
        count, drained, interval = self.plan.num_microbatches, self.flow.num_to_drain, self.flow.interval
        wholes = (RowsKey(count, n, update_interval=interval) for n in range(1, max(1, drained) + 1))
        found = {key: self.rows(key) for key in wholes}
        if drained:
            lowered = lowered_and_checked(self.plan.schedule)
            for phase, completed in ((Phase.FILL, 1), (Phase.STEADY, 1), (Phase.DRAIN, drained)):
                found[RowsKey(count, completed, phase, update_interval=interval)] = part(lowered, phase)
        return found
