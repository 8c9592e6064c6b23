"""PipelineTrainer: what a person calls."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch

from raypipe.api import launch
from raypipe.api.beside import Stages, actors, evaluating, evaluation, predicting, predictions, threads, with_checkpoint
from raypipe.api.callbacks import callbacks_of
from raypipe.api.devices import gpu_rates, on_devices
from raypipe.api.handle import RunHandle
from raypipe.api.listing import DEFAULT_STORAGE
from raypipe.api.result import Result
from raypipe.api.signals import stopping_on_signals
from raypipe.api.worker_weights import begun_with, weights_for
from raypipe.config.early_stopping import EarlyStopping
from raypipe.config.pipeline import PipelineConfig
from raypipe.config.ray import check_ray_settings, most_workers, resources_of, worker_range
from raypipe.engine.data.loader import notes_on
from raypipe.engine.state import MakeOptimizer, MakeScheduler
from raypipe.engine.storage import Place
from raypipe.errors import ConfigError
from raypipe.ir.cluster import Cluster
from raypipe.ir.plan import Plan
from raypipe.ir.profile import Profile
from raypipe.ir.timeline import Timeline
from raypipe.prepare.arguments import Arguments, check_arguments, check_travel, in_one_paragraph
from raypipe.prepare.identity import settings_of
from raypipe.prepare.job import Job
from raypipe.prepare.planning import prepare, profile
from raypipe.prepare.resume import free_name
from raypipe.progress import RunProgress, heard
from raypipe.runfile.write import describe
from raypipe.runtime.run.blueprint import Blueprint, predicted_step
from raypipe.runtime.run.resuming import refuse_another_run
from raypipe.runtime.run.spec import RunSpec
from raypipe.runtime.run.threads import ThreadConnection

__all__ = ["PipelineTrainer"]


class PipelineTrainer:
    """Trains a model as a pipeline of Ray actors.

        trainer = raypipe.PipelineTrainer(
            model, loss_fn=torch.nn.functional.cross_entropy,
            optimizer=lambda p: torch.optim.AdamW(p, lr=3e-4), train_data="data/train",
            pipeline=raypipe.PipelineConfig(num_stages=2, minibatch_size=64, num_microbatches=8))
        print(trainer.plan())
        result = trainer.fit(num_steps=500)

    Args:
        model: nn.Module, or a function without arguments that builds one. It is read, never changed.
        loss_fn: (output, target) -> scalar; None where the model returns its own loss.
        optimizer: ([(name, parameter), ...]) -> torch optimizer; every stage makes one for its own parameters.
        lr_scheduler: (optimizer) -> scheduler; it steps once per optimizer step.
        train_data, eval_data: path of Parquet or Arrow, pyarrow.dataset, map-style Dataset or DataLoader of torch. A
            sample is a tuple (input, ..., target) with a loss_fn, otherwise columns that become the model's arguments.
            Items may draw random numbers: torch's, numpy's and Python's global generators are seeded by (seed, epoch,
            row) around each item, under one lock of the process. Items that come differently each time are refused.
        pipeline: see PipelineConfig.
        scaling_config: ray.train.ScalingConfig; num_workers is the number of places for stages, or a pair of the least
            and the most of a run that grows; resources_per_worker is what each takes of the cluster.
        run_config: ray.train.RunConfig; name and storage_path say where the run's folder is (``~/ray_results/TIME`` by
            default), checkpoint_config what is kept, callbacks who is told. Other fields are refused.
        resume: where that folder has a run, None goes on if it is the same and else names every difference; True goes
            on with what may change (options of the optimizer, scheduler, clipping, schedule); False begins another one
            in ``<name>-2`` and so on.
        collate_fn: makes a batch of a list of items of a Dataset; it is called with those of a mini-batch.
        metrics: by name, (output, target) -> a number, or (total, count), or an object of torchmetrics; evaluations
            tell them as eval_<name>. Without a loss_fn they are given what the model returns, and the batch.
        early_stopping: see EarlyStopping.
        init_from: weights that a new run begins with: the name of another run, the path of a run or of one of its
            checkpoints, of a .pt or .safetensors file with a state_dict, or of a folder of Hugging Face. A run that
            goes on keeps its own. Of a model larger than this machine, see PipelineConfig.weights_on.
        callbacks: objects whose on_start, on_step and so on are called while a run trains, in the process that runs its
            loop (see raypipe.callbacks); those of RunConfig(callbacks=...) are called behind them.

    Raises:
        ConfigError: an argument is missing, of the wrong kind, or a field of Ray's that would have no effect.
    """

    def __init__(
        self,
        model: torch.nn.Module | Callable[[], torch.nn.Module],
        *,
        optimizer: MakeOptimizer,
        train_data: Any,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        lr_scheduler: MakeScheduler | None = None,
        eval_data: Any = None,
        pipeline: PipelineConfig | None = None,
        scaling_config: Any = None,
        run_config: Any = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        metrics: Mapping[str, Any] | None = None,
        early_stopping: EarlyStopping | None = None,
        resume: bool | None = None,
        init_from: str | os.PathLike[str] | None = None,
        callbacks: Sequence[Any] = (),
    ) -> None:
        check_arguments(model, loss_fn, optimizer, lr_scheduler, train_data, pipeline)
        self._pipeline = launch.settled(train_data, pipeline or PipelineConfig())
        self._evaluations = launch.evaluations_of(
            self._pipeline, metrics, early_stopping, evaluates=eval_data is not None
        )
        check_ray_settings(scaling_config, run_config, self._evaluations.names)
        self._callbacks = callbacks_of(callbacks, run_config, scaling_config)
        self._scaling = scaling_config
        self._run = run_config
        self._resume = resume
        self._weights = weights_for(model, init_from, self._pipeline, self._storage())
        built, unfilled = begun_with(model, self._weights)
        survives = launch.survives_with(run_config, scaling_config, self._pipeline)
        self._arguments = Arguments(
            built, loss_fn, optimizer, lr_scheduler, train_data, eval_data,
            survives, metrics, early_stopping, collate_fn, unfilled,
        )  # fmt: skip
        if resume not in (None, True, False) or (resume and getattr(run_config, "name", None) is None):
            raise ConfigError(
                f"resume={resume!r} is not possible: give None, False, or True together with the name of the run that "
                'is to go on, as in run_config=RunConfig(name="lm").'
            )
        self._job: Job | None = None
        self._checked: Job | None = None
        self._forward: Job | None = None
        self._begun: Place | None = None  # the folder of the run that was started last
        self.config_yaml: Callable[[str], str] | None = None
        """What the config.yaml of a run of this name says; None for a description of the arguments."""

    def plan(self, *, cluster: Cluster | None = None, profiled: Profile | None = None, explain: bool = False) -> Plan:
        """Capture the model and plan the run; starts no actor. ``print(trainer.plan())`` shows four lines.

        Args:
            cluster: plan for these devices and links instead of scaling_config's workers; what ``fit`` runs is
                the plan without it.
            profiled: seconds measured before, by ``profile``; None measures here where the plan needs them.
            explain: printed, the plan shows all of it (``Plan.explain``): tables, every reason, what was not chosen.

        Raises:
            RaypipeError: one paragraph that says what to change.
        """
        self._check_travel()
        own = cluster is None and profiled is None
        job = self._prepared() if own else self._prepare(self._pipeline, cluster=cluster, profiled=profiled)
        self._check_travel(job)
        return dataclasses.replace(job.plan, explained=explain)

    def profile(self) -> Profile:
        """Seconds and bytes of every operation, and seconds by micro-batch size, measured here; of GPUs, estimated.

        Raises:
            RaypipeError: one paragraph that says what to change.
        """
        return profile(*self._for_planning(self._arguments, self._pipeline))

    @in_one_paragraph()
    def simulate(self) -> Timeline:
        """One step as the plan predicts it; a plan that was made without seconds has the model profiled for this."""
        job = self._prepared()
        if job.plan.prediction is None:
            job = self._prepare(self._continued(), predict=True)
        predicted = predicted_step(job.plan)
        assert predicted is not None
        return predicted

    def fit(
        self,
        num_steps: int | None = None,
        num_epochs: int | None = None,
        *,
        local: bool = False,
        progress: bool = True,
    ) -> Result:
        """Train to the end; a run of this name that was stopped or failed goes on from its newest checkpoint.

        Ctrl-C and SIGTERM stop it after the step that is running, with a checkpoint.

        Args:
            num_steps, num_epochs: how long, steps of earlier submissions included; exactly one of them.
            local: run the same plan in threads of this process, without Ray.
            progress: show what a start waits for, the plan's notes, the run's folder and a live line on standard error.

        Raises:
            RaypipeError: the root cause of a failure; nothing is left running.
        """
        with heard(progress):
            watch = RunProgress(self._prepared().plan.notes) if progress else None
            with stopping_on_signals() as stop:
                handle = self._start(num_steps, num_epochs, local=local, detached=False, connected_to_ray=stop.install)
                stop.watch(handle)
                return handle.wait(on_news=watch or (lambda news: None))

    def start(
        self,
        num_steps: int | None = None,
        num_epochs: int | None = None,
        *,
        local: bool = False,
        detached: bool = False,
    ) -> RunHandle:
        """Like ``fit``, without waiting for the end.

        Args:
            num_steps, num_epochs, local: as in ``fit``.
            detached: the run outlives this process, on the cluster that RAY_ADDRESS names; ``raypipe.attach(name)``
                finds it again. Otherwise it ends with this process and leaves nothing behind.

        Raises:
            ConfigError: detached without a cluster that would outlive this process, or the name is taken.
        """
        return self._start(num_steps, num_epochs, local=local, detached=detached)

    def evaluate(
        self, checkpoint: str | os.PathLike[str] | None = None, data: Any = None, *, local: bool = False
    ) -> dict[str, Any]:
        """The loss of a checkpoint over some data, weighed as in ``fit``'s evaluation; nothing is trained or written.

        Args:
            checkpoint: what init_from takes; None is the newest checkpoint of this trainer's run, and the weights that
                a run would begin with before there is one.
            data: as eval_data; None for eval_data itself.
            local: in threads of this process, without Ray.

        Returns:
            eval_loss, eval_<name> of each metric, samples, and checkpoint: where the weights came from, "" for those
            that a run would begin with.

        Raises:
            RaypipeError: one paragraph that says what to change.
        """
        if data is None and self._arguments.eval_data is None:
            raise ConfigError("evaluate() has no data: give data=..., or eval_data to the trainer.")
        job = self._forward_job() if data is None else evaluating(self._forward_job(), data)
        job, source = with_checkpoint(job, checkpoint, self._own_run(), self._storage())
        with self._stages(job, data, local=local) as stages:
            found = evaluation(job, stages)
        return {**found, "samples": job.sources["eval"].num_samples, "checkpoint": source}

    def predict(self, data: Any, checkpoint: str | os.PathLike[str] | None = None, *, local: bool = False) -> Any:
        """What the model returns for these rows in evaluation mode, in their order: one output, tensors of all rows.

        Args:
            data: as train_data; the target may be left out.
            checkpoint, local: as in ``evaluate``.

        Raises:
            RaypipeError: one paragraph that says what to change; the model returns its own loss, for one.
        """
        job = predicting(self._forward_job(), data)
        job, _ = with_checkpoint(job, checkpoint, self._own_run(), self._storage())
        with self._stages(job, data, local=local) as stages:
            return predictions(job, stages)

    def _forward_job(self) -> Job:
        """With evaluation's mode, whether there is eval_data or not; checked as for training."""
        if self._arguments.eval_data is not None:
            job = self._prepared()
        else:
            given = self._arguments._replace(eval_data=self._arguments.train_data)
            job = self._forward = self._forward or self._prepare(self._continued(), given)
        self._check(job)
        return job

    def _own_run(self) -> Place | None:
        """The folder of the run that was started last, or that would go on."""
        name = getattr(self._run, "name", None)
        return self._begun or (self._storage() / name if name and self._resume is not False else None)

    def _stages(self, job: Job, data: Any, *, local: bool) -> contextlib.AbstractContextManager[Stages]:
        launch.refuse_replicas(job.plan)
        if local:
            return threads(self._resources())
        self._check_travel(job)
        check_travel({"data": data})
        setup = partial(launch.run_setup, place=self._storage(), pipeline=self._pipeline)
        return actors(job.num_workers, self._resources(), setup)

    def _check_travel(self, job: Job | None = None) -> None:
        launch.check_sent(self._arguments, self._pipeline, self._callbacks, job)

    def _prepared(self) -> Job:
        if self._job is None:
            job = self._prepare(self._continued())
            if self._weights is not None:
                job = job.noting(self._weights.note(getattr(self._run, "name", None), self._resume))
            self._job = reduce(Job.noting, notes_on(self._arguments.train_data), job)
        return self._job

    def _prepare(self, pipeline: PipelineConfig, given: Arguments | None = None, **more: Any) -> Job:
        return prepare(*self._for_planning(given or self._arguments, pipeline), **more)

    def _for_planning(self, given: Arguments, pipeline: PipelineConfig) -> tuple[Any, ...]:
        return given, pipeline, most_workers(self._scaling), gpu_rates(self._resources(), pipeline.precision)

    def _continued(self) -> PipelineConfig:
        pipeline = on_devices(self._pipeline, self._resources())
        return launch.continued(pipeline, getattr(self._run, "name", None), self._storage(), self._resume)

    def _storage(self) -> Place:
        storage = getattr(self._run, "storage_path", None) or DEFAULT_STORAGE
        return Place.of(storage, getattr(self._run, "storage_filesystem", None))

    def _start(
        self,
        num_steps: int | None,
        num_epochs: int | None,
        *,
        local: bool,
        detached: bool,
        connected_to_ray: Callable[[], None] = lambda: None,
    ) -> RunHandle:
        job = self._prepared()
        launch.refuse_replicas(job.plan, self._scaling)
        blueprint = self._blueprint(job, launch.steps_of(job, num_steps, num_epochs), local=local)
        self._begun = blueprint.spec.place
        if local:
            launch.refuse_in_threads(self._scaling, detached=detached)
            self._check(job)
            stages = partial(launch.threads_of, job, self._resources())
            return RunHandle(blueprint.spec.name, ThreadConnection(blueprint, job.planned, stages))
        return self._start_on_ray(job, blueprint, detached, connected_to_ray)

    def _start_on_ray(
        self, job: Job, blueprint: Blueprint, detached: bool, connected_to_ray: Callable[[], None]
    ) -> RunHandle:
        from raypipe.runtime.driver.client import connected
        from raypipe.runtime.driver.starting import start_run

        self._check_travel(job)
        with contextlib.ExitStack() as stack:
            stack.enter_context(
                connected(
                    launch.places_of(job, most_workers(self._scaling), self._run), self._resources(), detached=detached
                )
            )
            connected_to_ray()  # which takes signals for itself
            line = start_run(blueprint, job.initial, self._resources(), partial(self._check, job), detached=detached)
            return RunHandle(blueprint.spec.name, line, stack.pop_all().close)
        raise AssertionError("unreachable: an ExitStack swallows nothing")

    def _check(self, job: Job) -> None:
        """The model against its stages, once for every plan."""
        if self._checked is not job:
            job.check()
            self._checked = job

    def _blueprint(self, job: Job, num_steps: int, *, local: bool) -> Blueprint:
        """What becomes a run wherever it is planned and assembled."""
        spec = self._spec(job, num_steps)
        if spec.max_failures:
            spec = dataclasses.replace(spec, copy_interval_steps=launch.copy_interval(job))
        setup = launch.run_setup(job, spec.place, None if local else self._pipeline)
        return Blueprint(job.basis, self._pipeline, setup, spec, turns=not local)

    def _spec(self, job: Job, num_steps: int) -> RunSpec:
        plan = job.plan
        name = getattr(self._run, "name", None) or f"raypipe-{time.strftime('%Y%m%d-%H%M%S')}-{uuid.uuid4().hex[:4]}"
        if self._resume is False:
            name = free_name(self._storage(), name)
        settings = settings_of(job, self._pipeline, self._arguments.loss_fn, getattr(self._weights, "digest", None))
        refuse_another_run(self._storage() / name, name, settings, num_steps, self._resume)
        return RunSpec(
            name=name,
            place=self._storage() / name,
            config_yaml=self.config_yaml(name) if self.config_yaml else self._described(name, num_steps),
            settings=settings,
            resume=self._resume,
            num_samples={mode: source.num_samples for mode, source in job.sources.items()},
            minibatch_size=plan.minibatch_size,
            microbatch_size=plan.microbatch_size,
            num_steps=num_steps,
            seed=job.settings.seed,
            aliases=job.aliases,
            sums_losses=job.settings.loss_reduction == "sum",
            checkpoints=launch.policy_of(self._pipeline, getattr(self._run, "checkpoint_config", None)),
            evaluations=launch.evaluated_as(self._evaluations, job, self._run),
            max_failures=launch.failures_of(self._run),
            num_workers=most_workers(self._scaling),
            workers=worker_range(self._scaling),
            wanted_workers=job.num_workers,
            callbacks=self._callbacks,
        )

    def _described(self, name: str, num_steps: int) -> str:
        given = launch.described_parts(self._arguments, self._weights, self._callbacks)
        return describe(self._pipeline, self._scaling, self._run, given, name, num_steps)

    def _resources(self) -> Mapping[str, float]:
        return resources_of(self._scaling)
