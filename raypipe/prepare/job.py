"""A run that is ready to start: its plan, its stages, and the rows of every segment that it may run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from raypipe.engine.checkpoint import GivenTensors, StateSource
from raypipe.engine.codec import Codecs
from raypipe.engine.data.collate import Collate
from raypipe.engine.data.source import Source
from raypipe.engine.stage import StageProgram
from raypipe.engine.state import MakeOptimizer, MakeScheduler, Settings
from raypipe.ir.plan import Plan
from raypipe.ir.schedule import Schedule
from raypipe.ir.segment import RowsKey
from raypipe.planner.rows import flow_of, rows_for
from raypipe.planner.segments import Flow
from raypipe.runtime.run.planned import Planned
from raypipe.runtime.run.planning import PlanBasis

__all__ = ["Job"]


@dataclass(frozen=True, slots=True)
class Job:
    """A run that is ready to start.

    Attributes:
        basis: what its plan was made from, and what others can be made from.
        planned: what will happen.
        programs: the stages.
        tensors: the user's parameters and buffers by name; read only. Those of ``unfilled`` are on the meta device.
        persistent: names of tensors that belong to the state_dict.
        example: one micro-batch by column.
        sources: "train" and perhaps "eval".
        codecs: that were configured; of "auto", what a run begins with.
        aliases: further names of shared tensors in the state_dict -> the names that we use.
        check: compares the user's own module with the stages (engine/trial/verify.py); does nothing where verify="off".
        model_labels: what the model is, for settings.json.
        metrics: of evaluations, by name.
        evaluated: names of the numbers that they give, where that is known.
        collate: of the items of datasets.
        unfilled: where workers find the tensors that this process does not hold.
        compile_stages: see PipelineConfig.
    """

    basis: PlanBasis
    planned: Planned
    programs: tuple[StageProgram, ...]
    tensors: Mapping[str, torch.Tensor]
    persistent: frozenset[str]
    example: Mapping[Any, torch.Tensor]
    sources: Mapping[str, Source]
    settings: Settings
    codecs: Codecs
    make_optimizer: MakeOptimizer
    make_scheduler: MakeScheduler | None
    aliases: Mapping[str, str]
    check: Callable[[], None]
    model_labels: Mapping[str, Any]
    metrics: Mapping[str, Any] = field(default_factory=dict)
    evaluated: tuple[str, ...] = ()
    collate: Collate | None = None
    unfilled: tuple[StateSource, ...] = ()
    compile_stages: str = "off"

    @property
    def initial(self) -> tuple[StateSource, ...]:
        """Where the stages find what they begin with, each name in the first that has it."""
        elsewhere = {name for source in self.unfilled for name in source.names}
        held = {name: x for name, x in self.tensors.items() if not x.is_meta and name not in elsewhere}
        return (*self.unfilled, GivenTensors(held))

    @property
    def plan(self) -> Plan:
        return self.planned.plan

    @property
    def num_stages(self) -> int:
        return len(self.programs)

    @property
    def placement(self) -> tuple[int, ...]:
        """The worker of each stage that leads its replicas: the only one, where it has one."""
        return self.plan.schedule.wiring.placement

    @property
    def num_workers(self) -> int:
        """Workers that hold a stage; fewer than stages where a schedule puts several on each, more with replicas."""
        return self.plan.schedule.wiring.num_workers

    @property
    def flow(self) -> Flow | None:
        """As planner.rows.flow_of."""
        return flow_of(self.plan)

    def noting(self, note: str) -> Job:
        """The same with a further sentence for its plans."""
        basis = dataclasses.replace(self.basis, notes=(*self.basis.notes, note))
        plan = dataclasses.replace(self.plan, notes=(*self.plan.notes, note))
        return dataclasses.replace(self, basis=basis, planned=dataclasses.replace(self.planned, plan=plan))

    def schedule(self, num_microbatches: int, *, training: bool = True) -> Schedule:
        """Lowered and checked rows of a step with so many micro-batches."""
        return self.rows(RowsKey(num_microbatches, training=training, update_interval=self.plan.weights.interval))

    def rows(self, key: RowsKey) -> Schedule:
        """As planner.rows.rows_for."""
        return rows_for(self.plan, key)
