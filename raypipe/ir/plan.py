"""Who holds what, in which order it is run: the answer of the planner, saved beside every run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from raypipe.errors import PlanError
from raypipe.ir.plan_summary import summary
from raypipe.ir.plan_table import human_bytes, table
from raypipe.ir.prediction import Prediction
from raypipe.ir.schedule import Op, Schedule, Wiring, parse_action
from raypipe.ir.weights import SYNCHRONOUS, VersionRule, WeightPolicy

__all__ = ["Partition", "Plan", "Stage", "human_bytes", "peak_in_flight"]


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
        notes: what a person must know about this plan, one sentence each.
        reasons: (what, why) of each choice, in words, the verdict before the first semicolon; and what was found on the
            way: ("stage 0", the modules that it holds), ("loss", what it averages over).
        prediction: seconds and bytes; None where nothing was profiled.
        weights: versions of the weights.
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
    explained: bool = field(default=False, compare=False, repr=False)

    def to_json(self) -> str:
        """The plan as it is saved in ``plan.json``; rows of actions in text form. ``from_json`` reads it."""
        parts = {
            name: [" ".join(map(str, row)) for row in getattr(self.schedule, name)]
            for name in ("body", "prologue", "epilogue")
        }
        return json.dumps(
            {
                "generation": self.generation,
                "minibatch_size": self.minibatch_size,
                "microbatch_size": self.microbatch_size,
                "num_microbatches": self.num_microbatches,
                "transport": self.transport,
                "schedule": {
                    "kind": self.schedule.kind,
                    "rows": parts["body"],
                    "prologue": parts["prologue"],
                    "epilogue": parts["epilogue"],
                    "stride": self.schedule.stride,
                    "wiring": asdict(self.schedule.wiring),
                },
                "partition": asdict(self.partition),
                "notes": list(self.notes),
                "reasons": [list(pair) for pair in self.reasons],
                "prediction": None if self.prediction is None else asdict(self.prediction),
                "weights": {**asdict(self.weights), "rule": self.weights.rule.value},
            },
            indent=2,
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Inverse of ``to_json``.

        Raises:
            PlanError: the text is no such plan; names what is wrong.
        """
        try:
            found = json.loads(text)
            return cls(
                partition=_partition(found["partition"]),
                schedule=_schedule(found["schedule"]),
                minibatch_size=found["minibatch_size"],
                microbatch_size=found["microbatch_size"],
                num_microbatches=found["num_microbatches"],
                transport=found["transport"],
                generation=found["generation"],
                notes=tuple(found["notes"]),
                reasons=tuple((what, why) for what, why in found["reasons"]),
                prediction=None if found["prediction"] is None else Prediction.from_dict(found["prediction"]),
                weights=_weights(found["weights"]),
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PlanError(
                f"This is not a saved plan ({error!r}): write one with Plan.to_json or `raypipe plan --json`."
            ) from None

    def __str__(self) -> str:
        """Four lines, stages, step, memory and why, and the notes; all of ``explain`` where it was asked for."""
        return self.explain() if self.explained else summary(self)

    def explain(self) -> str:
        """The four lines, then a table of the stages, the reason for every choice, and what was not chosen."""
        return f"{summary(self)}\n\n{table(self, peak_in_flight(self.schedule))}"


def _partition(found: Mapping[str, Any]) -> Partition:
    stages = (Stage(**{**row, "devices": tuple(row["devices"])}) for row in found["stages"])
    return Partition(**{**found, "stages": tuple(stages), "order": tuple(found["order"])})


def _schedule(found: Mapping[str, Any]) -> Schedule:
    wiring = Wiring(**{**found["wiring"], "placement": tuple(found["wiring"]["placement"])})
    body, prologue, epilogue = (
        tuple(tuple(parse_action(word) for word in row.split()) for row in found[name])
        for name in ("rows", "prologue", "epilogue")
    )
    return Schedule(found["kind"], wiring, body, found["stride"], prologue, epilogue)


def _weights(found: Mapping[str, Any]) -> WeightPolicy:
    numbers = {name: tuple(found[name]) for name in ("capacities", "shares")}
    return WeightPolicy(**{**found, **numbers, "rule": VersionRule(found["rule"])})


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
