"""A run that is ready to start: its plan, its stages, and the rows of every segment that it may run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from raypipe.engine.codec import Codecs
from raypipe.engine.data import Source
from raypipe.engine.stage import StageProgram
from raypipe.engine.state import MakeOptimizer, MakeScheduler, Settings
from raypipe.ir.plan import Plan
from raypipe.ir.schedule import Schedule
from raypipe.ir.segment import RowsKey
from raypipe.planner.control import Room
from raypipe.planner.rows import flow_of, rows_for
from raypipe.planner.segments import Flow
from raypipe.planner.tune import (
    Request,
)
from raypipe.runtime.run.blueprint import OneCut
from raypipe.runtime.run.planned import Planned

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
        codecs: that were configured; of "auto", what a run begins with.
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
    codecs: Codecs
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
        """As planner.rows.flow_of."""
        return flow_of(self.plan)

    @property
    def graph(self) -> OneCut:
        """What travels to the driver."""
        partition = self.plan.partition
        return OneCut(self.programs, tuple(partition.cuts), tuple(partition.order))

    @property
    def planned(self) -> Planned:
        """The plan for whoever carries it out."""
        return Planned(self.plan, self.rooms, self.microbatch_seconds)

    def schedule(self, num_microbatches: int, *, training: bool = True) -> Schedule:
        """Lowered and checked rows of a step with so many micro-batches."""
        return self.rows(RowsKey(num_microbatches, training=training, update_interval=self.plan.weights.interval))

    def rows(self, key: RowsKey) -> Schedule:
        """As planner.rows.rows_for."""
        return rows_for(self.plan, key)
