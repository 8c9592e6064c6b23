"""The answer of the planner, as it is printed, and as it is saved beside every run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from raypipe.errors import PlanError, ScheduleError
from raypipe.ir.candidate import Candidate
from raypipe.ir.candidate_table import candidate_lines
from raypipe.ir.plan_facts import Partition, PlanFacts, Stage
from raypipe.ir.plan_summary import summary
from raypipe.ir.plan_table import human_bytes, table
from raypipe.ir.prediction import Prediction
from raypipe.ir.schedule import Op, Schedule, Wiring, parse_action, single_homes
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.ir.weights import VersionRule, WeightPolicy

__all__ = ["Partition", "Plan", "Stage", "human_bytes", "peak_in_flight"]


@dataclass(frozen=True, slots=True)
class Plan(PlanFacts):
    """Everything that decides how a step runs, as people and files read it."""

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
                    "wiring": _wiring_fields(self.schedule.wiring),
                },
                "spec": None if self.spec is None else self.spec.to_dict(),
                "recompute": list(self.recompute),
                "partition": asdict(self.partition),
                "notes": list(self.notes),
                "reasons": [list(pair) for pair in self.reasons],
                "prediction": None if self.prediction is None else self.prediction.to_dict(),
                "weights": {**asdict(self.weights), "rule": self.weights.rule.value},
                **({"candidates": [each.to_dict() for each in self.candidates]} if self.candidates else {}),
            },
            indent=2,
        )

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Inverse of ``to_json``; a plan of an earlier release has no spec and does not recompute.

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
                spec=ScheduleSpec.from_dict(found["spec"]) if found.get("spec") else None,
                recompute=tuple(found.get("recompute", ())),
                candidates=tuple(map(Candidate.from_dict, found.get("candidates", ()))),
            )
        except (AttributeError, KeyError, ScheduleError, TypeError, ValueError) as error:
            raise PlanError(
                f"This is not a saved plan ({error!r}): write one with Plan.to_json or `raypipe plan --json`."
            ) from None

    def __str__(self) -> str:
        """Four lines, stages, step, memory and why, and the notes; all of ``explain`` where it was asked for.

        Where shapes were compared, a table of them follows.
        """
        text = self.explain() if self.explained else summary(self)
        return "\n".join([text, *(candidate_lines(self.candidates) if self.candidates else ())])

    def _repr_html_(self) -> str:
        from raypipe.ir.pictures.plan import plan_html

        return plan_html(self, str(self))

    def explain(self) -> str:
        """The four lines, then a table of the stages, the reason for every choice, and what was not chosen."""
        return f"{summary(self)}\n\n{table(self, peak_in_flight(self.schedule))}"


def _partition(found: Mapping[str, Any]) -> Partition:
    stages = (Stage(**{**row, "devices": tuple(row["devices"])}) for row in found["stages"])
    return Partition(**{**found, "stages": tuple(stages), "order": tuple(found["order"])})


def _wiring_fields(wiring: Wiring) -> dict[str, Any]:
    """For JSON, where a stage is named with its one worker unless it has several."""
    fields = asdict(wiring)
    if not wiring.frozen_alone:
        del fields["frozen_alone"]
    if not wiring.intervals:
        del fields["intervals"]
    if wiring.replicated or wiring.lanes > 1:
        return fields
    del fields["homes"], fields["lanes"]
    return {"placement": wiring.placement, **fields}


def _schedule(found: Mapping[str, Any]) -> Schedule:
    fields = dict(found["wiring"])
    given = fields.pop("homes", None)
    homes = single_homes(fields.pop("placement")) if given is None else tuple(map(tuple, given))
    intervals = tuple(fields.pop("intervals", ()))
    wiring = Wiring(homes, intervals=intervals, **fields)
    body, prologue, epilogue = (
        tuple(tuple(parse_action(word) for word in row.split()) for row in found[name])
        for name in ("rows", "prologue", "epilogue")
    )
    return Schedule(found["kind"], wiring, body, found["stride"], prologue, epilogue)


def _weights(found: Mapping[str, Any]) -> WeightPolicy:
    numbers = {name: tuple(found[name]) for name in ("capacities", "shares", "intervals") if name in found}
    return WeightPolicy(**{**found, **numbers, "rule": VersionRule(found["rule"])})


def peak_in_flight(schedule: Schedule) -> tuple[int, ...]:
    """Most micro-batches that each stage holds between their F and their B on one worker, by the order of its row."""
    peaks = [0] * schedule.num_stages
    for row in schedule.rows():
        held = [0] * schedule.num_stages
        for action in row:
            if action.op is Op.F:
                held[action.stage] += 1
                peaks[action.stage] = max(peaks[action.stage], held[action.stage])
            elif action.op in (Op.B, Op.W):
                held[action.stage] -= 1
    return tuple(peaks)
