"""Policies of a run: when it saves and evaluates, which workers it supports, what it takes from an earlier run."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
from collections.abc import Mapping
from typing import Any

from raypipe.config.early_stopping import EarlyStopping, may_give
from raypipe.config.pipeline import PipelineConfig
from raypipe.config.ray import worker_range
from raypipe.engine.io.checkpoint import find_checkpoint
from raypipe.engine.io.storage import Place
from raypipe.engine.stage.user_metrics import check_metrics
from raypipe.errors import CheckpointError, ConfigError, PlanError
from raypipe.ir.plan import Plan
from raypipe.prepare.job import Job
from raypipe.run.spec import CheckpointPolicy, EvaluationPolicy


def checkpoint_policy(pipeline: PipelineConfig, config: Any) -> CheckpointPolicy:
    """Create the policy of checkpoints from PipelineConfig's interval and a ray.train.CheckpointConfig or None."""
    interval = pipeline.checkpoint_interval_steps
    return CheckpointPolicy(
        None if interval == "auto" else interval,
        getattr(config, "num_to_keep", None),
        getattr(config, "checkpoint_score_attribute", None),
        getattr(config, "checkpoint_score_order", None) or "max",
    )


def evaluations_of(
    pipeline: PipelineConfig, metrics: Mapping[str, Any] | None, early_stopping: EarlyStopping | None, *,
    evaluates: bool,
) -> EvaluationPolicy:  # fmt: skip
    """Create the policy of evaluations from PipelineConfig's interval and the trainer's arguments.

    Args:
        evaluates: True if eval_data was given.

    Raises:
        ConfigError: an argument would have no effect, or a metric or early_stopping has the wrong type.
    """
    check_metrics(metrics or {})
    names = ("eval_loss", *(f"eval_{name}" for name in metrics or ())) if evaluates else ()
    if pipeline.eval_interval_steps is not None and not evaluates:
        raise ConfigError(
            f"eval_interval_steps={pipeline.eval_interval_steps} would have no effect without eval_data. Give "
            "eval_data, or leave it out."
        )
    if early_stopping is not None:
        if not isinstance(early_stopping, EarlyStopping):
            raise ConfigError(
                f"early_stopping={early_stopping!r}: give raypipe.EarlyStopping('eval_loss', patience=3)."
            )
        if not may_give(names, early_stopping.metric) or pipeline.eval_interval_steps is None:
            has = f"evaluations of this run give {', '.join(names)}" if names else "there is no eval_data"
            raise ConfigError(
                f"EarlyStopping(metric={early_stopping.metric!r}) looks at evaluations while the run trains: {has}, "
                f"and eval_interval_steps is {pipeline.eval_interval_steps}. Give eval_data, PipelineConfig("
                "eval_interval_steps=...) and, for what is not the loss, metrics={...}."
            )
    return EvaluationPolicy(pipeline.eval_interval_steps, names, early_stopping)


def evaluated_as(policy: EvaluationPolicy, job: Job, run: Any) -> EvaluationPolicy:
    """Return the policy with the names of all results of an evaluation: eval_loss, and eval_<name> of each metric.

    The names are those that the metrics returned for a few rows. If no metric was called, the policy is unchanged.

    Args:
        run: ray.train.RunConfig, or None.

    Raises:
        ConfigError: the metric of early stopping or of checkpoints is not among these names.
    """
    if not job.opened.evaluated:
        return policy
    names = ("eval_loss", *(f"eval_{name}" for name in job.opened.evaluated))
    stops = policy.early_stopping
    score = getattr(getattr(run, "checkpoint_config", None), "checkpoint_score_attribute", None)
    for field, wanted in (
        ("EarlyStopping(metric={!r})", stops.metric if stops else None),
        ("CheckpointConfig(checkpoint_score_attribute={!r})", score if score and score.startswith("eval_") else None),
    ):
        if wanted is not None and wanted not in names:
            listed = ", ".join(names)
            raise ConfigError(f"{field.format(wanted)}: evaluations of this run give {listed}. Name one of them.")
    return dataclasses.replace(policy, names=names)


def refuse_replicas(plan: Plan, scaling: Any = None) -> None:
    """Raise PlanError for an elastic number of workers with an asynchronous plan that has replicas.

    The number of replicas determines the weight versions, so it must not change during the run.
    """
    wiring, shown = plan.schedule.wiring, "-".join(map(str, plan.partition.replicas))
    if not wiring.replicated or plan.weights.synchronous:
        return
    if (workers := worker_range(scaling)) is not None:
        raise PlanError(
            f"ScalingConfig(num_workers=({workers.least}, {workers.most})) with num_replicas={shown} and schedule="
            f"{plan.schedule.kind.split()[0]!r}: how old weights are follows from stages and replicas, so that a "
            f"run keeps both. Give num_workers={wiring.num_workers}, leave num_replicas out, or take another schedule."
        )


def refuse_correction(plan: Plan) -> None:
    """Raise PlanError if the correction for stale gradients changes nothing on any stage that learns.

    Later plans of a run may have fewer stages, where the correction may have no effect.
    """
    policy, num_stages = plan.weights, plan.partition.num_stages
    first = plan.spec.first_trainable if plan.spec else 0
    latest = max((policy.delay(stage, first) for stage in range(first, num_stages)), default=0.0)
    if policy.correction != "none" and latest <= (1.0 if policy.correction == "discount" else 0.0):
        raise PlanError(
            f"stale_correction={policy.correction!r} has no effect: with {num_stages} stages and an update every "
            f"{policy.interval} micro-batches gradients are {latest:g} updates late at most. Leave it out."
        )


def refuse_in_threads(scaling: Any, *, detached: bool) -> None:
    """Raise ConfigError for arguments that threads of one process do not support."""
    if detached:
        raise ConfigError("A local run is in threads of this process and cannot be detached from it.")
    workers = worker_range(scaling)
    if workers is not None:
        raise ConfigError(
            f"ScalingConfig(num_workers=({workers.least}, {workers.most})): the number of threads of a local run is "
            f"fixed. Give num_workers={workers.most}, the number to which such a run grows, with bitwise equal "
            "results, or leave out local=True."
        )


def free_name(storage: Place, name: str) -> str:
    """Return the first of ``<name>``, ``<name>-2``, ``<name>-3`` and so on that has no folder."""
    candidates = (name if number == 1 else f"{name}-{number}" for number in itertools.count(1))
    return next(candidate for candidate in candidates if not storage.exists(candidate))


def _kept_plan(place: Place) -> Mapping[str, Any]:
    """Read the plan of the run in this folder, as JSON; return {} if there is no checkpoint to resume from."""
    try:
        newest, _ = find_checkpoint(place)
        plan = json.loads(place.read_bytes("plan.json")) if newest is not None else {}
    except (CheckpointError, ValueError):
        return {}  # errors of the folder are reported when the run restores its checkpoint
    return plan if isinstance(plan, dict) else {}


def continued(pipeline: PipelineConfig, name: str | None, storage: Place, resume: bool | None) -> PipelineConfig:
    """Replace "auto" numbers of micro-batches and of lanes by the numbers in the plan of the run that is resumed.

    With a new profile the planner might choose other numbers, and the results would no longer be bitwise equal. A lane
    is a partial sum of gradients; micro-batches are assigned to the lanes round-robin. Without a run to resume,
    ``pipeline`` is returned unchanged.

    Args:
        name: name of the run; None for a new run.
        storage: folder of the runs.
        resume: argument of the trainer; False begins a new run.
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
