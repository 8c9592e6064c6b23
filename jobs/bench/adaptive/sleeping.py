"""Run of emulated stages over links that may be held: seconds and schedule by step."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

import raypipe
from jobs.lib.emulated import Block, Delay, Hold, check_trained, trainer_of
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.controller import MemoryBudget
from raypipe.planner.schedule import schedule_of
from raypipe.run.journal import Journal
from raypipe.run.loop import LoopSetup, run_loop
from raypipe.run.plans.blueprint import assemble
from raypipe.run.requests import Requests
from raypipe.run.spec import Planned
from raypipe.runtime.driver.ray_cluster import connected
from raypipe.runtime.fleet.fleet import Fleet
from raypipe.runtime.fleet.roster import Terms
from raypipe.runtime.worker.packing import stored

__all__ = ["Ran", "run_sleeping"]


class Ran(NamedTuple):
    """Measurements of a run.

    Attributes:
        seconds, schedules, peaks: by step; peaks are micro-batches in flight on the fullest stage.
        events: lines of events.jsonl.
        stage_s: median (F, B) of every stage in the traced step.
    """

    seconds: list[float]
    schedules: list[str]
    peaks: list[int]
    events: list[dict[str, Any]]
    stage_s: list[tuple[float, float]]


def run_sleeping(
    stages: list[tuple[float, float]],
    num_microbatches: int,
    num_steps: int,
    delay: Delay,
    *,
    most_in_flight: int | None = None,
    **pipeline: Any,
) -> Ran:
    """Train on Ray actors.

    Args:
        stages: (forward_s, backward_s).
        most_in_flight: largest number of micro-batches that the controller may let a stage hold; the run begins with
            1F1B. None for a plan of ``pipeline`` alone.
        pipeline: further fields of PipelineConfig.

    Raises:
        RuntimeError: a stage has not done every micro-batch of every step.
    """
    count = num_microbatches * num_steps
    blocks = [Block(*times, last=index == len(stages) - 1) for index, times in enumerate(stages)]
    with tempfile.TemporaryDirectory(prefix="sleeping-") as folder:
        hold = Hold(delay, num_microbatches)
        trainer = trainer_of(blocks, num_microbatches, num_steps, hold, folder, transport="tcp", **pipeline)
        if most_in_flight is None:
            trainer.fit(num_steps=num_steps, progress=False)
        else:
            _run_bounded(trainer, num_steps, most_in_flight)
        path = Path(folder) / Path(folder).name
        rows = pq.read_table(path / "metrics.parquet").to_pylist()
        spans = pq.read_table(path / "timeline" / "spans.parquet").to_pylist()
        events = [json.loads(line) for line in (path / "events.jsonl").read_text().splitlines()]
        weights = raypipe.load_state_dict(path)
    check_trained(weights, len(stages), count)
    return Ran(
        [row["seconds"] for row in rows],
        [row["schedule"] for row in rows],
        [row["peak_in_flight"] for row in rows],
        events,
        [_median_s(spans, index) for index in range(len(stages))],
    )


def _run_bounded(trainer: raypipe.PipelineTrainer, num_steps: int, most_in_flight: int) -> None:
    """Drive the run in this process, with the plan of ``_bounded``."""
    job, resources = trainer._prepared(), trainer._resources()
    blueprint = trainer._blueprint(job, num_steps, local=False)
    spec, made = blueprint.spec, assemble(blueprint, _bounded(job.planned, most_in_flight))
    with connected(job.num_workers, resources):
        fleet = Fleet(job.num_workers, Terms(resources, blueprint.setup.transport))
        try:
            fleet.configure(blueprint.setup, made.setup, [stored(job.tensors)])
            run_loop(LoopSetup(fleet, spec, made, Journal(spec.name, str(spec.place)), Requests()))
        finally:
            fleet.stop()


def _bounded(planned: Planned, most_in_flight: int) -> Planned:
    """Make a plan that begins with 1F1B and may hold ``most_in_flight`` micro-batches per stage, instead of bytes."""
    num_stages, spec = planned.plan.partition.num_stages, ScheduleSpec("1f1b", planned.plan.num_microbatches)
    plan = dataclasses.replace(planned.plan, schedule=schedule_of(spec, num_stages), spec=spec)
    return dataclasses.replace(planned, plan=plan, budgets=(MemoryBudget(most_in_flight=most_in_flight),) * num_stages)


def _median_s(spans: list[dict[str, Any]], stage: int) -> tuple[float, float]:
    found = []
    for op in "FB":
        took = sorted(
            span["end_s"] - span["start_s"]
            for span in spans
            if span["source"] == "measured" and span["action"].rstrip("0123456789") == f"{stage}{op}"
        )
        found.append(took[len(took) // 2])
    return found[0], found[1]
