"""The run as a loop over segments: the same for actors and for threads, so it imports no Ray.

segments --> fleet --> reports of all stages --> one StepRecord per step --> progress, metrics, run folder
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from raypipe.engine.checkpoint import checkpoint_folder, write_manifest
from raypipe.engine.rundir import RunFolder
from raypipe.ir.plan import Segment
from raypipe.ir.report import StepRecord, StepReport, merge_reports
from raypipe.ir.schedule import Schedule
from raypipe.ir.timeline import Span, Timeline
from raypipe.planner.segments import evaluation_segments, train_segments

__all__ = ["AnyFleet", "Outcome", "RunSpec", "run_loop"]


class AnyFleet(Protocol):
    """Stages that carry out segments: actors or threads."""

    def run(
        self, segments: Iterator[tuple[Segment, bool]], schedules: Callable[[int], Schedule], *, training: bool
    ) -> Iterator[list[list[StepReport]]]: ...

    def spans(self) -> Sequence[Span]: ...

    def save(self, folder: str) -> list[dict[str, Any]]: ...

    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What the loop needs to know; small, and without a tensor.

    Attributes:
        name: of the run.
        folder: of the run.
        plan_json: saved as plan.json.
        schedules: lowered rows by (number of micro-batches, training).
        num_samples: of "train" and perhaps "eval".
        predicted: the simulated timeline of one step, for the trace.
        trace_step: step whose spans are kept.
        aliases: further names of shared tensors -> the names that they are stored under.
        sums_losses: loss_reduction is "sum".
    """

    name: str
    folder: str
    plan_json: str
    schedules: Mapping[tuple[int, bool], Schedule]
    num_samples: Mapping[str, int]
    minibatch_size: int
    microbatch_size: int
    num_steps: int
    predicted: Timeline
    trace_step: int
    aliases: Mapping[str, str]
    sums_losses: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    Attributes:
        eval_loss: on eval_data after the last step, None without.
        checkpoint: folder of the final checkpoint.
    """

    eval_loss: float | None
    checkpoint: str


def run_loop(fleet: AnyFleet, spec: RunSpec, on_record: Callable[[StepRecord], None]) -> Outcome:
    """Train, evaluate, save. Whatever happens, the metrics so far are written."""
    folder = RunFolder(spec.folder)
    records: list[StepRecord] = []
    try:
        folder.write_plan(spec.plan_json)
        folder.event("start", "fit was called", num_steps=spec.num_steps)
        end_s = None
        for reports in fleet.run(_training(spec), lambda m: spec.schedules[m, True], training=True):
            for of_step in zip(*reports, strict=True):
                record = merge_reports(of_step, end_s)
                end_s = max(r.end_s for r in of_step)
                records.append(record)
                on_record(record)
        saved = checkpoint_folder(folder.path, spec.num_steps)
        write_manifest(saved, spec.num_steps, fleet.save(str(saved)), spec.aliases)
        eval_loss = _evaluate(fleet, spec)
        measured = Timeline(tuple(fleet.spans()), "measured", name=spec.name)
        folder.write_timelines([spec.predicted, measured])
        folder.event("finish", "all steps done", num_steps=len(records), checkpoint=str(saved))
        return Outcome(eval_loss, str(saved))
    except BaseException as error:
        folder.event("fail", f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}", num_steps=len(records))
        raise
    finally:
        if records:
            folder.write_metrics(records)


def _training(spec: RunSpec) -> Iterator[tuple[Segment, bool]]:
    steps = train_segments(spec.num_samples["train"], spec.minibatch_size, spec.microbatch_size, spec.num_steps)
    for segment, _ in steps:
        yield segment, segment.first_step == spec.trace_step


def _evaluate(fleet: AnyFleet, spec: RunSpec) -> float | None:
    """Loss over the evaluation samples: each mini-batch's weighs as much as its samples; sums are added up."""
    if "eval" not in spec.num_samples:
        return None
    segments = evaluation_segments(spec.num_samples["eval"], spec.minibatch_size, spec.microbatch_size)
    total = samples = 0.0
    pairs = ((segment, False) for segment in segments)
    for reports in fleet.run(pairs, lambda m: spec.schedules[m, False], training=False):
        last = reports[-1][0]
        weight = 1 if spec.sums_losses else last.samples
        total += (math.nan if last.loss is None else last.loss) * weight
        samples += last.samples
    return total if spec.sums_losses else total / samples
