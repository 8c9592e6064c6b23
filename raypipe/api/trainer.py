"""PipelineTrainer: the entry point for training a model as a pipeline."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from typing import Any

import torch

from raypipe.api.callbacks import FromRayTrain, callbacks_of
from raypipe.api.devices import gpu_rates, in_threads, on_devices
from raypipe.api.evaluate import (
    Stages,
    actors,
    evaluating,
    evaluation,
    predicting,
    predictions,
    threads,
    with_checkpoint,
)
from raypipe.api.generate import generated, generation_of, generations_of
from raypipe.api.handle import RunHandle
from raypipe.api.initial_weights import begun_with, weights_for
from raypipe.api.result import Result
from raypipe.api.signals import stopping_on_signals
from raypipe.callbacks.base import Prompts
from raypipe.capture.decode_recipe import DecodeRecipe, decode_recipe
from raypipe.config.early_stopping import EarlyStopping
from raypipe.config.paths import DEFAULT_STORAGE
from raypipe.config.pipeline import PipelineConfig
from raypipe.config.ray import check_ray_settings, failures_of, most_workers, resources_of, worker_range
from raypipe.data.open_data import notes_on
from raypipe.engine.io.storage import Place
from raypipe.engine.local import LocalFleet
from raypipe.engine.optim.state import MakeOptimizer, MakeScheduler
from raypipe.errors import ConfigError
from raypipe.ir.cluster import Cluster
from raypipe.ir.plan import Plan
from raypipe.ir.profile import Profile
from raypipe.ir.timeline import Timeline
from raypipe.preflight.arguments import (
    Arguments,
    check_arguments,
    check_operations,
    check_travel,
    in_one_paragraph,
    undisturbed,
)
from raypipe.prepare.identity import settings_of
from raypipe.prepare.inputs import resolve_defaults
from raypipe.prepare.job import Job
from raypipe.prepare.policies import (
    checkpoint_policy,
    continued,
    evaluated_as,
    evaluations_of,
    free_name,
    refuse_in_threads,
    refuse_replicas,
)
from raypipe.prepare.prepare import prepare, profile
from raypipe.progress import RunProgress, progress_shown
from raypipe.run.generate_loop import Generation
from raypipe.run.plans.blueprint import Blueprint, Charter, predicted_step
from raypipe.run.same_run import refuse_another_run
from raypipe.run.spec import RunSpec
from raypipe.run.threads import ThreadConnection
from raypipe.runfile.config_yaml import describe


class PipelineTrainer:
    """Trainer of a model as a pipeline of Ray actors.

        trainer = raypipe.PipelineTrainer(
            model, loss_fn=torch.nn.functional.cross_entropy,
            optimizer=lambda p: torch.optim.AdamW(p, lr=3e-4), train_data="data/train",
            pipeline=raypipe.PipelineConfig(num_stages=2, minibatch_size=64, num_microbatches=8))
        print(trainer.plan())
        result = trainer.fit(num_steps=500)

    Args:
        model: nn.Module, or a function without arguments that builds one. It is read, never changed.
        loss_fn: (output, target) -> scalar; None if the model returns its own loss.
        optimizer: ([(name, parameter), ...]) -> torch optimizer; every stage makes one for its own parameters.
        lr_scheduler: (optimizer) -> scheduler, which steps once per optimizer step; None keeps the learning rate.
        train_data, eval_data: path of Parquet or Arrow, pyarrow.dataset, map-style Dataset or DataLoader of torch. A
            sample is a tuple (input, ..., target) with a loss_fn, otherwise columns that become the model's arguments.
            Items may draw random numbers: torch's, numpy's and Python's global generators are seeded by (seed, epoch,
            row) around each item, under one lock of the process. A dataset whose Python state changes when an item is
            read again is refused. eval_data is for evaluations; None evaluates nothing.
        pipeline: see PipelineConfig.
        scaling_config: ray.train.ScalingConfig; num_workers is a number, or the pair (minimum, maximum) of an elastic
            run; resources_per_worker is what each worker takes of the cluster.
        run_config: ray.train.RunConfig. The run's folder is <storage_path>/<name>, by default
            ``~/ray_results/raypipe-<time>-<id>``. checkpoint_config sets which checkpoints are kept, failure_config how
            many failures the run survives; callbacks and storage_filesystem are used too. Other fields are refused.
        resume: decides what happens if that folder has a run. None resumes it if it is the same run, and otherwise
            raises ConfigError with every difference. True also accepts new values of settings that may change (options
            of the optimizer, scheduler, clipping, schedule). False begins another run in ``<name>-2`` and so on.
        collate_fn: ([item, ...]) -> batch, for a Dataset; it is called with the items of a mini-batch.
        metrics: {name: metric}, reported by evaluations as eval_<name>. A metric is an object of torchmetrics, or a
            function (output, target) -> number or (total, count). Without a loss_fn its arguments are the output of
            the model and the batch.
        early_stopping: see EarlyStopping.
        init_from: initial weights of a new run: the name of another run, or a path: of a run, of one of its
            checkpoints, of a .pt or .safetensors file with a state_dict, or of a folder of Hugging Face. A resumed
            run keeps its own weights. For a model larger than this machine, see PipelineConfig.weights_on.
        callbacks: objects whose on_start, on_step and so on are called while a run trains, in the process that runs its
            loop (see raypipe.callbacks); those of RunConfig(callbacks=...) are called after them.

    Raises:
        ConfigError: an argument is missing or of the wrong kind, or a field of Ray's classes would have no effect.
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
        self._pipeline = resolve_defaults(train_data, pipeline or PipelineConfig())
        self._evaluations = evaluations_of(self._pipeline, metrics, early_stopping, evaluates=eval_data is not None)
        check_ray_settings(scaling_config, run_config, self._evaluations.names)
        self._callbacks = callbacks_of(callbacks, run_config, scaling_config, evaluates=eval_data is not None)
        self._scaling = scaling_config
        self._run = run_config
        self._resume = resume
        self._weights = weights_for(model, init_from, self._pipeline, self._storage())
        built, unfilled = begun_with(model, self._weights)
        survives = failures_of(run_config) != 0
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
        self._decodes: DecodeRecipe | None = None
        self._begun: Place | None = None  # folder of the run that was started last
        self.config_yaml: Callable[[str], str] | None = None
        """Function (name of the run) -> text of its config.yaml; None to describe the trainer's arguments there."""

    def plan(self, *, cluster: Cluster | None = None, profiled: Profile | None = None, explain: bool = False) -> Plan:
        """Capture the model and plan the run; starts no actor. ``print(trainer.plan())`` shows a summary of four lines.

        Args:
            cluster: devices and links to plan for, instead of scaling_config's workers. ``fit`` makes a plan of its
                own.
            profiled: result of ``profile``; None measures the model in this process if the plan needs seconds.
            explain: True to let ``print`` show the complete plan (``Plan.explain``): tables, all reasons, rejected
                options.

        Raises:
            RaypipeError: no plan could be made; the message is one paragraph with the fix.
        """
        own = cluster is None and profiled is None
        job = self._prepared() if own else self._prepare(self._pipeline, cluster=cluster, profiled=profiled)
        if "ray" in sys.modules:  # else a start on Ray checks them
            self._check_travel(job)
        else:
            check_operations(job.programs)
        return dataclasses.replace(job.plan, explained=explain)

    def profile(self) -> Profile:
        """Measure seconds and bytes of every operation, and seconds by micro-batch size, on this machine's CPU.

        If stages compute on GPUs, the seconds are estimated from the GPU's speed.

        Raises:
            RaypipeError: the model could not be profiled; the message is one paragraph with the fix.
        """
        rates = gpu_rates(self._resources(), self._pipeline.precision)
        return profile(self._arguments, self._pipeline, most_workers(self._scaling), rates)

    @in_one_paragraph()
    def simulate(self) -> Timeline:
        """Simulate one step of the plan, and return its timeline. A plan without a profile is made again with one.

        Raises:
            RaypipeError: no plan could be made; the message is one paragraph with the fix.
        """
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
        """Train to the end. A stopped or failed run of the same name resumes from its newest checkpoint.

        Ctrl-C, SIGTERM and SIGHUP (the terminal was closed) stop the run after the current step, with a checkpoint.
        SIGHUP does so only if it is neither ignored, as under nohup, nor handled by the caller.

        Args:
            num_steps, num_epochs: length of the whole run, earlier submissions included; give exactly one of them.
            local: run the same plan in threads of this process, without Ray.
            progress: show what a start waits for, the plan's notes, the run's folder and a live line on standard error.

        Raises:
            RaypipeError: the root cause of a failure; no actor or thread of the run continues.
        """
        with progress_shown(progress):
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
        """Start a run like ``fit``, and return its handle without waiting for the end.

        Args:
            num_steps, num_epochs, local: as in ``fit``.
            detached: True if the run shall outlive this process, on the cluster of RAY_ADDRESS;
                ``raypipe.attach(name)`` connects to it again. Otherwise the run and its actors end with this process.

        Raises:
            ConfigError: detached=True without a cluster that would outlive this process, or the name is in use.
        """
        return self._start(num_steps, num_epochs, local=local, detached=detached)

    def evaluate(
        self, checkpoint: str | os.PathLike[str] | None = None, data: Any = None, *, local: bool = False
    ) -> dict[str, Any]:
        """Compute the loss of a checkpoint over data, weighted as in evaluations of ``fit``; trains and writes nothing.

        Args:
            checkpoint: a value as for init_from; None for the newest checkpoint of this trainer's run, or for the
                initial weights if the run has no checkpoint yet.
            data: data in a form as for eval_data; None for the trainer's eval_data.
            local: evaluate in threads of this process, without Ray.

        Returns:
            {"eval_loss", "eval_<name>" of each metric, "samples": number of samples, "checkpoint": path of the weights,
            or "" for initial weights}.

        Raises:
            RaypipeError: the evaluation failed; the message is one paragraph with the fix.
        """
        if data is None and self._arguments.eval_data is None:
            raise ConfigError("evaluate() has no data: give data=..., or eval_data to the trainer.")
        job = self._forward_job() if data is None else evaluating(self._forward_job(), data)
        job, source = with_checkpoint(job, checkpoint, self._own_run(), self._storage())
        with self._stages(job, data, local=local) as stages:
            numbers = evaluation(job, stages)
        return {**numbers, "samples": job.sources["eval"].num_samples, "checkpoint": source}

    def predict(self, data: Any, checkpoint: str | os.PathLike[str] | None = None, *, local: bool = False) -> Any:
        """Compute the output of the model for every row of data, in evaluation mode.

        Args:
            data: data in a form as for train_data; the target may be left out.
            checkpoint, local: as in ``evaluate``.

        Returns:
            One output of the model's structure, whose tensors have the rows of all data, in order.

        Raises:
            RaypipeError: the prediction failed, for example because the model returns its own loss; the message is one
                paragraph with the fix.
        """
        job = predicting(self._forward_job(), data)
        job, _ = with_checkpoint(job, checkpoint, self._own_run(), self._storage())
        with self._stages(job, data, local=local) as stages:
            return predictions(job, stages)

    def generate(
        self, input_ids: Any, *, max_new_tokens: int = 20, attention_mask: Any = None, do_sample: bool = False,
        temperature: float = 1.0, top_k: int | None = None, top_p: float | None = None, seed: int = 0,
        eos_token_id: int | Sequence[int] | None = None, pad_token_id: int | None = None, num_beams: int = 1,
        group_size: int | None = None, checkpoint: str | os.PathLike[str] | None = None, local: bool = False,
    ) -> torch.Tensor:  # fmt: skip
        """Continue sequences of token ids with a model of transformers, on the stages of the plan.

        It starts stages of its own, also while a run trains; ``RunHandle.generate`` uses those of the run.

        Args:
            checkpoint, local: as in ``evaluate``.
            input_ids, attention_mask, max_new_tokens, do_sample, temperature, top_k, top_p, seed, eos_token_id,
                pad_token_id, num_beams, group_size: see ``Prompts`` in raypipe.callbacks.

        Returns:
            Token ids of the sequences, or of the decoder's output if the model has an encoder.

        Raises:
            RaypipeError: the model or an argument is not possible; the message is one paragraph with the fix.
        """
        generation = self._generation(
            Prompts(
                input_ids, attention_mask, max_new_tokens, do_sample, temperature, top_k, top_p, seed, eos_token_id,
                pad_token_id, num_beams, group_size,
            )
        )()  # fmt: skip
        job, _ = with_checkpoint(self._prepared(), checkpoint, self._own_run(), self._storage())
        with self._stages(job, None, local=local) as stages:
            return generated(job, stages, generation)

    def _generation(self, prompts: Prompts) -> Callable[[], Generation]:
        return generation_of(self._prepared().opened.model, self._recipe, prompts)

    def _recipe(self) -> DecodeRecipe:
        """Return the traced forwards for text generation; the model is traced at the first call."""
        if self._decodes is None:
            job = self._prepared()
            with undisturbed():
                self._decodes = decode_recipe(job.opened.model, job.programs[0].precision)
        return self._decodes

    def _forward_job(self) -> Job:
        """Return a planned and verified job (see ``_check``) whose stages have an evaluation mode.

        Without eval_data, train_data are used to capture the model in evaluation mode.
        """
        if self._arguments.eval_data is not None:
            job = self._prepared()
        else:
            arguments = self._arguments._replace(eval_data=self._arguments.train_data)
            job = self._forward = self._forward or self._prepare(self._continued(), arguments)
        self._check(job)
        return job

    def _own_run(self) -> Place | None:
        """Return the folder of the run that was started last, or of the run that ``fit`` would resume.

        None without either.
        """
        name = getattr(self._run, "name", None)
        return self._begun or (self._storage() / name if name and self._resume is not False else None)

    def _stages(self, job: Job, data: Any, *, local: bool) -> contextlib.AbstractContextManager[Stages]:
        if local:
            return threads(self._resources())
        self._check_travel(job)
        check_travel({"data": data})
        setup = partial(Job.run_setup, place=self._storage(), links=self._pipeline)
        return actors(job.num_workers, self._resources(), setup)

    def _check_travel(self, job: Job) -> None:
        """Refuse arguments that cannot be sent to workers, and operations of the model that workers cannot import."""
        check_operations(job.programs)
        sent = {**self._arguments._asdict(), "loss_reduction": self._pipeline.loss_reduction}
        sent["callbacks"] = self._callbacks
        check_travel({name: value for name, value in sent.items() if name not in ("model", "unfilled")})

    def _prepared(self) -> Job:
        if self._job is None:
            job = self._prepare(self._continued())
            if self._weights is not None:
                job = job.noting(self._weights.note(getattr(self._run, "name", None), self._resume))
            self._job = reduce(Job.noting, notes_on(self._arguments.train_data), job)
        return self._job

    def _prepare(self, pipeline: PipelineConfig, arguments: Arguments | None = None, **more: Any) -> Job:
        rates = gpu_rates(self._resources(), pipeline.precision)
        return prepare(arguments or self._arguments, pipeline, most_workers(self._scaling), rates, **more)

    def _continued(self) -> PipelineConfig:
        pipeline = on_devices(self._pipeline, self._resources())
        return continued(pipeline, getattr(self._run, "name", None), self._storage(), self._resume)

    def _storage(self) -> Place:
        storage = getattr(self._run, "storage_path", None) or DEFAULT_STORAGE
        return Place.of(storage, getattr(self._run, "storage_filesystem", None), written=True)

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
        refuse_replicas(job.plan, self._scaling)
        blueprint = self._blueprint(job, job.steps(num_steps, num_epochs), local=local)
        self._begun = blueprint.spec.place
        if local:
            refuse_in_threads(self._scaling, detached=detached)
            self._check(job)
            device_of = in_threads(self._resources())
            stages = lambda plan: LocalFleet(blueprint.setup, plan.setup, job.initial, device_of)  # noqa: E731
            connection = ThreadConnection(blueprint, job.planned, stages)
            return RunHandle(blueprint.spec.name, connection, generation=self._generation)
        return self._start_on_ray(job, blueprint, detached, connected_to_ray)

    def _start_on_ray(
        self, job: Job, blueprint: Blueprint, detached: bool, connected_to_ray: Callable[[], None]
    ) -> RunHandle:
        from raypipe.runtime.driver.client import start_run
        from raypipe.runtime.driver.ray_cluster import connected

        self._check_travel(job)
        with contextlib.ExitStack() as stack:
            spares = most_workers(self._scaling) if blueprint.spec.max_failures else None
            # A cluster that raypipe starts must have room for the plan's workers, and for spares.
            stack.enter_context(connected(max(job.num_workers, spares or 0), self._resources(), detached=detached))
            connected_to_ray()  # Ray sets its own signal handlers
            charter = Charter(blueprint, job.planned)
            line = start_run(charter, job.initial, partial(self._check, job), detached=detached)
            return RunHandle(blueprint.spec.name, line, stack.pop_all().close, self._generation)
        raise AssertionError("unreachable: an ExitStack swallows nothing")

    def _check(self, job: Job) -> None:
        """Verify that the stages compute the same as the whole model, unless ``job`` is the job verified last."""
        if self._checked is not job:
            job.check()
            self._checked = job

    def _blueprint(self, job: Job, num_steps: int, *, local: bool) -> Blueprint:
        """Create the blueprint of a run of ``num_steps`` steps in total."""
        spec = self._spec(job, num_steps)
        setup = job.run_setup(spec.place, None if local else self._pipeline)
        return Blueprint(job.basis, self._pipeline, setup, spec, turns=not local, resources=dict(self._resources()))

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
            checkpoints=checkpoint_policy(self._pipeline, getattr(self._run, "checkpoint_config", None)),
            evaluations=evaluated_as(self._evaluations, job, self._run),
            max_failures=failures_of(self._run),
            copy_interval_steps=job.copy_interval_steps if failures_of(self._run) else None,
            num_workers=most_workers(self._scaling),
            workers=worker_range(self._scaling),
            wanted_workers=job.num_workers,
            callbacks=self._callbacks,
            generations=generations_of(self._callbacks, self._generation),
        )

    def _described(self, name: str, num_steps: int) -> str:
        # ``survives`` and Ray's callbacks follow from run_config
        parts = {name: x for name, x in self._arguments._asdict().items() if name not in ("survives", "unfilled")}
        if self._weights is not None:
            source = self._weights.source
            parts |= {"model": self._weights.model} | ({} if source is None else {"init_from": source})
        if own := [callback for callback in self._callbacks if not isinstance(callback, FromRayTrain)]:
            parts["callbacks"] = own
        return describe(self._pipeline, self._scaling, self._run, parts, name, num_steps)

    def _resources(self) -> Mapping[str, float]:
        return resources_of(self._scaling)
