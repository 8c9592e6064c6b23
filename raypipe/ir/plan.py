"""Who holds what, in which order it is run: the answer of the planner, saved beside every run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field

from raypipe.ir.schedule import Op, Schedule

__all__ = ["Partition", "Plan", "Segment", "Stage", "human_bytes", "peak_in_flight"]


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


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that decides how a step runs.

    Attributes:
        partition: the stages.
        schedule: compute actions only; lowering adds the rest.
        minibatch_size: samples per optimizer step.
        microbatch_size: samples per micro-batch; the last one of a mini-batch may be smaller.
        num_microbatches: ceil(minibatch_size / microbatch_size).
        transport: how boundary tensors travel.
        generation: counts re-plans; messages of an older one are dropped.
        notes: what a person should know about this plan, one sentence each.
    """

    partition: Partition
    schedule: Schedule
    minibatch_size: int
    microbatch_size: int
    num_microbatches: int
    transport: str = "tcp"
    generation: int = 0
    notes: tuple[str, ...] = field(default=())

    def to_json(self) -> str:
        """The plan as it is saved in ``plan.json``; rows of actions in text form."""
        rows = [" ".join(map(str, row)) for row in self.schedule.rows()]
        return json.dumps(
            {
                "generation": self.generation,
                "minibatch_size": self.minibatch_size,
                "microbatch_size": self.microbatch_size,
                "num_microbatches": self.num_microbatches,
                "transport": self.transport,
                "schedule": {"kind": self.schedule.kind, "rows": rows},
                "partition": asdict(self.partition),
                "notes": list(self.notes),
            },
            indent=2,
        )

    def __str__(self) -> str:
        """The plan as a table: who holds what, and what travels."""
        stages = self.partition.stages
        total = sum(stage.param_bytes for stage in stages) or 1
        peaks = peak_in_flight(self.schedule)
        ideal = (len(stages) - 1) / (self.num_microbatches + len(stages) - 1)
        lines = [
            f"plan: {len(stages)} stages, schedule {self.schedule.kind}, {self.num_microbatches} micro-batches of "
            f"{self.microbatch_size} of {self.minibatch_size} samples, transport {self.transport}",
            f"{'stage':>5}  {'parameters':>11}  {'share':>5}  {'receives/sample':>15}  {'in flight':>9}  operations",
        ]
        for stage in stages:
            receives = human_bytes(stage.input_bytes) if stage.index else "data"
            lines.append(
                f"{stage.index:>5}  {human_bytes(stage.param_bytes):>11}  {stage.param_bytes / total:>5.0%}  "
                f"{receives:>15}  {peaks[stage.index]:>9}  {stage.first_node} ... {stage.last_node}"
            )
        lines.append(f"cut: {self.partition.reason}; smallest possible bubble {ideal:.0%}")
        return "\n".join(lines + [f"note: {note}" for note in self.notes])


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Most micro-batches that each stage holds between their F and their B, by the order of its row."""
    peaks = [0] * schedule.num_stages
    held = [0] * schedule.num_stages
    for action in (a for row in schedule.rows() for a in row):
        if action.op is Op.F:
            held[action.stage] += 1
            peaks[action.stage] = max(peaks[action.stage], held[action.stage])
        elif action.op in (Op.B, Op.W):
            held[action.stage] -= 1
    return tuple(peaks)


def human_bytes(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"


@dataclass(frozen=True, slots=True)
class Segment:
    """One order to all workers: run from one flush to the next, on these samples.

    Micro-batch numbers are global to the run, in actions, in message keys and in randomness.

    Attributes:
        schedule_id: which of the rows known to the worker.
        repeats: repetitions of the schedule's body.
        first_step: optimizer step of the first mini-batch, counted from 0 over the whole run.
        first_microbatch: number of its first micro-batch over the whole run.
        epoch, offset: the samples are those at positions offset, offset + 1, ... of this epoch's order.
        microbatch_samples: sizes of the micro-batches of ONE mini-batch, in order.
        num_minibatches: mini-batches in the segment, all cut alike.
        generation: of the plan.
    """

    schedule_id: int
    repeats: int
    first_step: int
    first_microbatch: int
    epoch: int
    offset: int
    microbatch_samples: tuple[int, ...]
    num_minibatches: int = 1
    generation: int = 0

    @property
    def minibatch_samples(self) -> int:
        return sum(self.microbatch_samples)

    def locate(self, microbatch: int) -> tuple[int, int, int]:
        """(step, position in the epoch's order of the first sample, samples) of a global micro-batch."""
        minibatch, index = divmod(microbatch - self.first_microbatch, len(self.microbatch_samples))
        start = self.offset + minibatch * self.minibatch_samples + sum(self.microbatch_samples[:index])
        return self.first_step + minibatch, start, self.microbatch_samples[index]
