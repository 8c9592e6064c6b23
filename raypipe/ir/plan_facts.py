"""What a plan says: who holds what, in which order it is run, and what that was predicted to take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from raypipe.ir.candidate import Candidate
from raypipe.ir.prediction import Prediction
from raypipe.ir.schedule import Schedule
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.ir.weights import SYNCHRONOUS, WeightPolicy

__all__ = ["Partition", "PlanFacts", "Stage"]


@dataclass(frozen=True, slots=True)
class Stage:
    """A run of the model's nodes.

    Attributes:
        index: position in the pipeline.
        start, stop: its nodes are graph.nodes[start:stop], in the partition's order where it has one.
        first_node, last_node: their names.
        param_bytes: bytes of the parameters that it is the first to use.
        input_bytes: bytes per sample that arrive from the stage before.
        devices: positions in the cluster, one per replica; empty where nobody chose.
        period_s: predicted seconds per micro-batch that passes, its replicas' work shared out; 0 where unknown.
        memory_bytes: predicted bytes on each of its devices at the fullest moment; 0 where unknown.
    """

    index: int
    start: int
    stop: int
    first_node: str
    last_node: str
    param_bytes: int
    input_bytes: int
    devices: tuple[int, ...] = ()
    period_s: float = 0.0
    memory_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Partition:
    """The cut of a model into stages, with the reason for it.

    Attributes:
        stages: in the order of the pipeline.
        reason: why this cut.
        order: positions of the graph's nodes in an order in which every stage is a run; empty for their own order.
        bottleneck_s: predicted seconds per micro-batch of the slowest stage or cut; 0 where unknown.
    """

    stages: tuple[Stage, ...]
    reason: str
    order: tuple[int, ...] = ()
    bottleneck_s: float = 0.0

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def cuts(self) -> tuple[int, ...]:
        """Node positions between stages."""
        return tuple(stage.start for stage in self.stages[1:])

    @property
    def replicas(self) -> tuple[int, ...]:
        """Workers by stage."""
        return tuple(max(1, len(stage.devices)) for stage in self.stages)

    def nodes_of(self, stage: Stage) -> Sequence[int]:
        """Positions of a stage's nodes in the graph, in the order in which they are run."""
        return self.order[stage.start : stage.stop] if self.order else range(stage.start, stage.stop)


@dataclass(frozen=True, slots=True)
class PlanFacts:
    """Everything that decides how a step runs.

    Attributes:
        partition: the stages.
        schedule: compute actions only; lowering adds the rest.
        minibatch_size: samples per optimizer step.
        microbatch_size: samples per micro-batch; the last one of a mini-batch may be smaller.
        num_microbatches: ceil(minibatch_size / microbatch_size).
        transport: how boundary tensors travel.
        generation: counts re-plans; messages of an older one are dropped.
        notes: what a person must know about this plan, one sentence each.
        reasons: (what, why) of each choice, in words, the verdict before the first semicolon; and what was found on the
            way: ("stage 0", the modules that it holds), ("loss", what it averages over).
        prediction: seconds and bytes; None where nothing was profiled.
        weights: versions of the weights.
        spec: what the schedule was made from; None in a plan that an earlier release saved.
        recompute: by stage, whether backwards run the forward again; empty for none.
        candidates: shapes that were compared, quickest first; empty where num_replicas was given.
        explained: ``str`` is ``explain()``; how a plan is shown is no part of it.
    """

    partition: Partition
    schedule: Schedule
    minibatch_size: int
    microbatch_size: int
    num_microbatches: int
    transport: str = "tcp"
    generation: int = 0
    notes: tuple[str, ...] = field(default=())
    reasons: tuple[tuple[str, str], ...] = ()
    prediction: Prediction | None = None
    weights: WeightPolicy = SYNCHRONOUS
    spec: ScheduleSpec | None = None
    recompute: tuple[bool, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    explained: bool = field(default=False, compare=False, repr=False)
