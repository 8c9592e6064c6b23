"""Effects of an earlier run of the same name on planning: a free name, or micro-batches and lanes to keep."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Mapping
from typing import Any

from raypipe.config.pipeline import PipelineConfig
from raypipe.engine.io.checkpoint import find_checkpoint
from raypipe.engine.io.storage import Place
from raypipe.errors import CheckpointError


def free_name(storage: Place, name: str) -> str:
    """Return the first of ``<name>``, ``<name>-2``, ``<name>-3`` and so on that has no folder."""
    candidates = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
    return next(candidate for candidate in candidates if not storage.exists(candidate))


def _kept_plan(place: Place) -> Mapping[str, Any]:
    """Read the plan of the run in this folder, as JSON; empty if no checkpoint exists to resume from."""
    try:
        newest, _ = find_checkpoint(place)
        plan = json.loads(place.read_bytes("plan.json")) if newest is not None else {}
    except (CheckpointError, ValueError):
        return {}  # errors of the folder are reported when the run restores its checkpoint
    return plan if isinstance(plan, dict) else {}


def continued(pipeline: PipelineConfig, name: str | None, storage: Place, resume: bool | None) -> PipelineConfig:
    """Return the configuration with the micro-batches and lanes of the run to resume, where it leaves them open.

    Without this a new profile might lead to other numbers, and so to other bits.

    Args:
        name: name of the run; None for a new run.
        storage: folder of the runs.
        resume: as in the trainer.
    """
    sizes, lanes = pipeline.num_microbatches == "auto", pipeline.num_replicas == "auto" == pipeline.num_lanes
    if name is None or resume is False or not (sizes or lanes):
        return pipeline
    plan, size = _kept_plan(storage / name), pipeline.minibatch_size
    with contextlib.suppress(AttributeError, KeyError, TypeError, ValueError):  # a file that is not a plan's
        if sizes and size in ("auto", plan["minibatch_size"]):
            pipeline = dataclasses.replace(pipeline, num_microbatches=int(plan["num_microbatches"]))
        if lanes:
            pipeline = dataclasses.replace(pipeline, num_lanes=int(plan["schedule"]["wiring"].get("lanes", 1)))
    return pipeline
