"""What a planned run is started with: its stages in threads, and the rows that they will need."""

from __future__ import annotations

from collections.abc import Mapping

from raypipe.engine.local import LocalFleet
from raypipe.engine.storage import Place
from raypipe.ir.schedule import Schedule
from raypipe.ir.segment import RowsKey
from raypipe.planner.segments import train_segments
from raypipe.prepare import Job

__all__ = ["local_fleet", "schedules_of"]


def local_fleet(job: Job, place: Place) -> LocalFleet:
    """All stages in threads of this process."""
    return LocalFleet(
        job.programs,
        job.tensors,
        job.make_optimizer,
        job.make_scheduler,
        job.sources,
        job.settings,
        job.persistent,
        place,
        job.placement,
    )


def schedules_of(job: Job, num_samples: Mapping[str, int], num_steps: int) -> dict[RowsKey, Schedule]:
    """Rows for every number of micro-batches that the run will meet: the usual one and short last mini-batches."""
    plan = job.plan
    lengths = {"train": min(num_samples["train"], num_steps * plan.minibatch_size)}
    if "eval" in num_samples:
        lengths["eval"] = num_samples["eval"]
    found: dict[RowsKey, None] = {}
    for mode, samples in lengths.items():
        per_epoch = min(samples, num_samples.get(mode, 0))
        for segment, _ in train_segments(per_epoch, plan.minibatch_size, plan.microbatch_size, 1):
            found[segment.rows(training=mode == "train")] = None
        rest = num_samples.get(mode, 0) % plan.minibatch_size
        if rest:
            found[RowsKey(-(-rest // plan.microbatch_size), training=mode == "train")] = None
    return {key: job.rows(key) for key in found} | job.flowing_rows()
