"""What a planned run is started with: its stages in threads or as setups of actors, and the rows that they need."""

from __future__ import annotations

import secrets
import uuid
from collections.abc import Mapping
from typing import Any

from raypipe.config.pipeline import PipelineConfig
from raypipe.engine.local import LocalFleet
from raypipe.engine.storage import Place
from raypipe.errors import PlanError
from raypipe.ir.plan import Plan
from raypipe.ir.schedule import Schedule
from raypipe.ir.segment import RowsKey
from raypipe.planner.segments import train_segments
from raypipe.prepare.job import Job
from raypipe.runtime.run.checkpoints import CheckpointPolicy

__all__ = ["local_fleet", "policy_of", "refuse_replicas", "schedules_of", "stage_setups"]

OPEN_TIMEOUT_S = 60.0


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


def stage_setups(job: Job, place: Place, pipeline: PipelineConfig) -> list[Any]:
    """What makes each worker's actor a part of the pipeline."""
    from raypipe.runtime.workers.worker import StageSetup

    run_id, secret = uuid.uuid4().hex, secrets.token_bytes(32)
    return [
        StageSetup(
            programs=job.programs,
            worker=worker,
            make_optimizer=job.make_optimizer,
            make_scheduler=job.make_scheduler,
            sources=job.sources,
            settings=job.settings,
            persistent=job.persistent,
            place=place,
            run_id=run_id,
            open_timeout_s=OPEN_TIMEOUT_S,
            transport=pipeline.transport,
            secret=secret,
            link_ports=None if pipeline.link_ports == "auto" else pipeline.link_ports,
            placement=job.placement,
        )
        for worker in range(job.num_workers)
    ]


def refuse_replicas(plan: Plan) -> None:
    """Raises: PlanError where a stage has several workers."""
    replicas = plan.partition.replicas
    if max(replicas) > 1:
        raise PlanError(
            f"The plan has {'-'.join(map(str, replicas))} workers per stage, but this release runs one worker per "
            "stage: such a plan can be looked at only. Set partitioner='auto'."
        )


def policy_of(pipeline: PipelineConfig, config: Any) -> CheckpointPolicy:
    """From PipelineConfig's interval and ray.train.CheckpointConfig."""
    interval = pipeline.checkpoint_interval_steps
    return CheckpointPolicy(
        None if interval == "auto" else interval,
        getattr(config, "num_to_keep", None),
        getattr(config, "checkpoint_score_attribute", None),
        getattr(config, "checkpoint_score_order", None) or "max",
    )
