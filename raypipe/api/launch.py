"""What a planned run is started with: its stages in threads or as setups of actors, and the rows that they need."""

from __future__ import annotations

import dataclasses
import secrets
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from raypipe.api.callbacks import FromRayTrain
from raypipe.api.devices import in_threads
from raypipe.api.init_from import InitialWeights
from raypipe.api.worker_weights import WorkerWeights
from raypipe.config.early_stopping import EarlyStopping, may_give
from raypipe.config.pipeline import PipelineConfig
from raypipe.config.ray import worker_range
from raypipe.config.replicas import laned
from raypipe.engine.data.loader import batch_size_of
from raypipe.engine.data.stream_source import ENDLESS
from raypipe.engine.local import LocalFleet
from raypipe.engine.meter import check_metrics
from raypipe.engine.setup import GenerationSetup, RunSetup
from raypipe.engine.storage import Place
from raypipe.engine.token_count import token_column
from raypipe.engine.torch_settings import torch_settings
from raypipe.engine.trial.scheduler_length import refuse_too_short
from raypipe.errors import ConfigError, PlanError
from raypipe.ir.plan import Plan
from raypipe.planner.segments import num_steps_of
from raypipe.prepare.arguments import Arguments, check_operations, check_travel
from raypipe.prepare.job import Job
from raypipe.prepare.resume import kept_lanes, kept_microbatches, kept_plan
from raypipe.runtime.run.blueprint import Assembled
from raypipe.runtime.run.checkpoints import CheckpointPolicy
from raypipe.runtime.run.evaluations import EvaluationPolicy

__all__ = [
    "continued",
    "copy_interval",
    "described_parts",
    "evaluated_as",
    "evaluations_of",
    "failures_of",
    "generation_setup",
    "local_fleet",
    "places_of",
    "policy_of",
    "refuse_in_threads",
    "refuse_replicas",
    "run_setup",
    "settled",
    "steps_of",
    "survives_with",
    "threads_of",
]

COPY_EVERY = 3
"""Orders are given three ahead, so that of two copies one is of a step that the driver knows to be done."""
DRAIN_EVERY = 20
"""Of an asynchronous schedule, for which a copy costs (stages - 1) / (20 x micro-batches) of the time."""


def local_fleet(job: Job, place: Place | None, resources: Mapping[str, float]) -> LocalFleet:
    """All stages in threads of this process.

    Args:
        resources: of one worker.
    """
    return LocalFleet(run_setup(job, place), generation_setup(job), job.initial, in_threads(resources))


def threads_of(job: Job, resources: Mapping[str, float], made: Assembled) -> LocalFleet:
    """All stages of what a plan made of a run, in threads of this process; see ``local_fleet``."""
    return LocalFleet(made.run, made.setup, job.initial, in_threads(resources))


def run_setup(job: Job, place: Place | None, pipeline: PipelineConfig | None = None) -> RunSetup:
    """What its workers know of the run, whatever the plan is.

    Args:
        pipeline: where they have links between processes; None for threads.
    """
    setup = RunSetup(
        job.make_optimizer, job.make_scheduler, job.sources, job.settings, job.persistent, place, metrics=job.metrics,
        token_column=token_column(job.sources["train"].columns, job.example), compile_stages=job.compile_stages,
    )  # fmt: skip
    if pipeline is None:
        return setup
    return dataclasses.replace(
        setup,
        run_id=uuid.uuid4().hex,
        secret=secrets.token_bytes(32),
        transport=pipeline.transport,
        link_checksum=pipeline.link_checksum,
        replays=pipeline.replay == "auto",
        torch_settings=torch_settings(),
        link_ports=None if pipeline.link_ports == "auto" else pipeline.link_ports,
        driver_grace_s=float(pipeline.driver_grace_s),
        worker_price_per_hour=pipeline.worker_price_per_hour,
    )


def generation_setup(job: Job) -> GenerationSetup:
    """What its plan makes of the workers."""
    plan = job.plan
    return GenerationSetup(
        job.programs,
        plan.schedule.wiring.homes,
        plan.weights,
        job.codecs,
        plan.generation,
        recompute=plan.recompute,
        lanes=plan.schedule.wiring.lanes,
    )


def check_sent(arguments: Arguments, pipeline: PipelineConfig, callbacks: Any, job: Job | None = None) -> None:
    """Refuse what cannot travel: of all but the model, of which stages are sent what was captured.

    Args:
        job: what was planned, with the operations that it calls; None before.

    Raises:
        ConfigError: names it.
    """
    check_operations(job.programs if job else ())
    given = {**arguments._asdict(), "loss_reduction": pipeline.loss_reduction, "callbacks": callbacks}
    check_travel({name: value for name, value in given.items() if name not in ("model", "unfilled")})


def refuse_replicas(plan: Plan, scaling: Any = None) -> None:
    """What runs with replicas cannot do.

    Args:
        scaling: ray.train.ScalingConfig or None.

    Raises:
        PlanError: names the field.
    """
    replicas, wiring = plan.partition.replicas, plan.schedule.wiring
    shown = "-".join(map(str, replicas))
    if max(replicas) > 1 and not wiring.replicated:
        raise PlanError(
            f"The plan has {shown} workers per stage, which partitioner='hierarchical' found: such a plan can be "
            f"looked at only. Set partitioner='auto' and, for replicas, num_replicas={list(replicas)}."
        )
    if not wiring.replicated or plan.weights.synchronous:
        return
    if (workers := worker_range(scaling)) is not None:
        raise PlanError(
            f"ScalingConfig(num_workers=({workers.least}, {workers.most})) with num_replicas={shown} and schedule="
            f"{plan.schedule.kind.split()[0]!r}: how old weights are follows from stages and replicas, so that a "
            f"run keeps both. Give num_workers={wiring.num_workers}, leave num_replicas out, or take another schedule."
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


def evaluations_of(
    pipeline: PipelineConfig, metrics: Mapping[str, Any] | None, early_stopping: EarlyStopping | None, *,
    evaluates: bool,
) -> EvaluationPolicy:  # fmt: skip
    """From PipelineConfig's interval and the trainer's arguments.

    Args:
        evaluates: whether there is eval_data.

    Raises:
        ConfigError: something would have no effect, or is no metric.
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
    """With the names of all numbers, which are known once the metrics were called.

    Args:
        run: ray.train.RunConfig, or None.

    Raises:
        ConfigError: what stops the run or orders its checkpoints is none of them.
    """
    if not job.evaluated:
        return policy
    names = ("eval_loss", *(f"eval_{name}" for name in job.evaluated))
    stops = policy.early_stopping
    score = getattr(getattr(run, "checkpoint_config", None), "checkpoint_score_attribute", None)
    for field, wanted in (
        ("EarlyStopping(metric={!r})", stops.metric if stops else None),
        ("CheckpointConfig(checkpoint_score_attribute={!r})", score if score and score.startswith("eval_") else None),
    ):
        if wanted is not None and wanted not in names:
            given = ", ".join(names)
            raise ConfigError(f"{field.format(wanted)}: evaluations of this run give {given}. Name one of them.")
    return dataclasses.replace(policy, names=names)


def places_of(job: Job, num_workers: int | None, run: Any) -> int:
    """Workers that a cluster of our own must have room for: those of the plan, and spares.

    Args:
        num_workers: that scaling_config offers.
    """
    return max(job.num_workers, (num_workers if failures_of(run) else None) or 0)


def settled(train_data: Any, pipeline: PipelineConfig) -> PipelineConfig:
    """With the mini-batches of a DataLoader, where train_data is one, and a schedule that compiled stages can follow.

    Raises:
        ConfigError: the loader says another size than the pipeline.
    """
    size = batch_size_of(train_data, pipeline.minibatch_size)
    if size != pipeline.minibatch_size:
        pipeline = dataclasses.replace(pipeline, minibatch_size=size)
    if pipeline.compile_stages != "off" and pipeline.schedule == "auto" and not laned(pipeline):
        return dataclasses.replace(pipeline, schedule="slack")  # "auto" but for "zb-h1", which splits backwards
    return pipeline


def steps_of(job: Job, num_steps: int | None, num_epochs: int | None) -> int:
    """Of the whole run, from what ``fit`` was told.

    Raises:
        ConfigError: both or none were given, something that is no number of steps, or more than lr_scheduler can take.
    """
    if (num_steps is None) == (num_epochs is None):
        raise ConfigError("fit() takes exactly one of num_steps and num_epochs, as in fit(num_steps=500).")
    name, given = ("num_steps", num_steps) if num_epochs is None else ("num_epochs", num_epochs)
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise ConfigError(f"{name}={given!r} is not possible: give an integer of at least 1.")
    if num_epochs is None:
        _refuse_too_short(job, given, f"num_steps={given}")
        return given
    if job.sources["train"].num_samples == ENDLESS:
        raise ConfigError(
            f"num_epochs={given} is not possible: train_data is a stream, whose epoch has no end. Give num_steps, or "
            "train_data=raypipe.data.Stream(data, num_samples=...)."
        )
    steps = num_steps_of(given, job.sources["train"].num_samples, job.plan.minibatch_size)
    _refuse_too_short(job, steps, f"num_epochs={given}, which is {steps} steps,")
    return steps


def _refuse_too_short(job: Job, steps: int, length: str) -> None:
    """A scheduler with an end before that of the run."""
    held = ([name for name in program.parameters if name in program.trainable] for program in job.programs)
    names = next(filter(None, held), [])
    parameters = {name: job.tensors[name] for name in names}
    refuse_too_short(
        parameters, job.make_optimizer, job.make_scheduler, _updates(job, steps), length, step_each=job.flow is None
    )


def _updates(job: Job, steps: int) -> int:
    """Of so many steps from the first one on: one each, or those of an asynchronous schedule."""
    if job.flow is None:
        return steps
    samples, minibatch = job.sources["train"].num_samples, job.plan.minibatch_size
    short = steps // -(-samples // minibatch) if samples % minibatch else 0  # the last one of an epoch has one update
    return (steps - short) * (minibatch // job.plan.microbatch_size // job.flow.interval) + short


def copy_interval(job: Job) -> int:
    """Steps between two copies of the state in memory, of a run that survives failures.

    An asynchronous schedule completes what is under way before each, which changes later weight versions and so the
    bits: its interval is the same wherever and however often the run is started, in threads too.
    """
    return COPY_EVERY if job.flow is None else DRAIN_EVERY


def failures_of(run: Any) -> int:
    """How many failures a run survives, from ray.train.RunConfig; -1 is no limit."""
    return getattr(getattr(run, "failure_config", None), "max_failures", 0)


def survives_with(run: Any, scaling: Any, pipeline: PipelineConfig) -> bool:
    """Whether a run on Ray goes on after failures.

    Raises:
        ConfigError: it is to change its workers, with links that are opened once.
    """
    wants = {"FailureConfig(max_failures=...)": failures_of(run) != 0,
             "ScalingConfig(num_workers=(least, most))": worker_range(scaling) is not None}  # fmt: skip
    named = next((field for field, wanted in wants.items() if wanted), None)
    if pipeline.transport == "ray_collective" and named:
        raise ConfigError(
            f"transport='ray_collective' does not go with {named}: no wait in a group of ray.util.collective can be "
            "ended, and no process joins a second one, so that links are opened once. Take transport='tcp', or leave "
            "the other out."
        )
    return failures_of(run) != 0


def refuse_in_threads(scaling: Any, *, detached: bool) -> None:
    """What threads of one process cannot do.

    Args:
        scaling: ray.train.ScalingConfig or None.

    Raises:
        ConfigError: names what was asked for.
    """
    if detached:
        raise ConfigError("A local run lives in threads of this process and cannot be detached from it.")
    workers = worker_range(scaling)
    if workers is not None:
        raise ConfigError(
            f"ScalingConfig(num_workers=({workers.least}, {workers.most})): threads of one process (local=True) do not "
            f"become more or fewer. Give num_workers={workers.most}, whose plan such a run grows to and whose bits it "
            "has, or leave out local=True."
        )


def continued(pipeline: PipelineConfig, name: str | None, storage: Place, resume: bool | None) -> PipelineConfig:
    """A run that goes on keeps its micro-batches and lanes, which a profile taken today might choose differently."""
    sizes, lanes = pipeline.num_microbatches == "auto", pipeline.num_replicas == "auto" == pipeline.num_lanes
    if name is None or resume is False or not (sizes or lanes):
        return pipeline
    plan = kept_plan(storage / name)
    if sizes and (count := kept_microbatches(plan, pipeline.minibatch_size)) is not None:
        pipeline = dataclasses.replace(pipeline, num_microbatches=count)
    if lanes and (count := kept_lanes(plan)) is not None:
        pipeline = dataclasses.replace(pipeline, num_lanes=count)
    return pipeline


def described_parts(
    arguments: Arguments, weights: InitialWeights | WorkerWeights | None, callbacks: Sequence[Any]
) -> dict[str, Any]:
    """What config.yaml names, as it was given."""
    # run_config says whether it survives, and has Ray's callbacks
    given = {name: part for name, part in arguments._asdict().items() if name not in ("survives", "unfilled")}
    if weights is not None:
        given |= {"model": weights.model} | ({} if weights.source is None else {"init_from": weights.source})
    if own := [callback for callback in callbacks if not isinstance(callback, FromRayTrain)]:
        given["callbacks"] = own
    return given
