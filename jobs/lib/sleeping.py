"""One run of stages that sleep as accelerators work, over links that may be held: seconds and schedule by step."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq

import raypipe
from jobs.lib.emulated import Block, check_trained, trainer_of
from jobs.lib.held_links import Delay, Hold
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.control import MemoryBudget
from raypipe.planner.schedule import schedule_of
from raypipe.runtime.driver.client import connected
from raypipe.runtime.run.blueprint import assemble
from raypipe.runtime.run.journal import Journal
from raypipe.runtime.run.loop import run_loop
from raypipe.runtime.run.planned import Planned
from raypipe.runtime.run.requests import Requests
from raypipe.runtime.workers.fleet import Fleet
from raypipe.runtime.workers.packing import stored

__all__ = ["Ran", "run_sleeping"]


class Ran(NamedTuple):
    """What a run did.

    Attributes:
        seconds, schedules, peaks: by step; peaks are micro-batches in flight on the stage that held most.
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
        most_in_flight: micro-batches that any stage may hold, which the controller keeps to; it begins with 1F1B.
        pipeline: further fields of PipelineConfig.

    Raises:
        RuntimeError: a stage has not done every micro-batch of every step.
    """
    count = num_microbatches * num_steps
    blocks = [Block([times], num_microbatches, last=index == len(stages) - 1) for index, times in enumerate(stages)]
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
    """What a driver does, in this process and with another plan than its own: see _bounded."""
    job, resources = trainer._prepared(), trainer._resources()
    blueprint = trainer._blueprint(job, num_steps, local=False)
    spec, made = blueprint.spec, assemble(blueprint, _bounded(job.planned, most_in_flight))
    with connected(job.num_workers, resources):
        fleet = Fleet(job.num_workers, resources, made.run.transport)
        try:
            fleet.configure(made.run, made.setup, [stored(job.tensors)])
            run_loop(fleet, spec, made.plan, Journal(spec.name, str(spec.place)), Requests())
        finally:
            fleet.stop()


def _bounded(planned: Planned, most_in_flight: int) -> Planned:
    """A plan that begins with 1F1B and may hold so many micro-batches.

    Said in micro-batches, which is what a scenario is about; people say it in bytes.
    """
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
