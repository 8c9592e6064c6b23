"""PipelinedTrainer: ``transformers.Trainer`` whose training loop is a pipeline of stages.

    trainer = Trainer(model, args, train_dataset=...)
    trainer = raypipe.hf.PipelinedTrainer(model, args, train_dataset=..., pipeline=PipelineConfig(num_stages=2))

    TrainingArguments --> optimizer, scheduler, clipping, micro-batches --> PipelineTrainer --> stages
    sampler, collator --> the samples of every step, in Trainer's order -->       |
                                                                             steps and weights
    TrainerState, callbacks, logs, evaluations, checkpoint-N  <-- Trainer's own code, in this process

Before an evaluation or a checkpoint-N, the weights of that step are loaded into ``model`` from a checkpoint of the run,
and Trainer's own code evaluates or saves them while the stages train on. If it then ends the training, later steps are
discarded. A callback may request one after any other step: the stages then train again up to it, to the same bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
import shutil
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers import Seq2SeqTrainer, Trainer, TrainingArguments
from transformers.trainer_callback import TrainerCallback

from raypipe.api.trainer import PipelineTrainer
from raypipe.config.pipeline import PipelineConfig
from raypipe.engine.io.checkpoint import MANIFEST, checkpoint_name, load_state_dict
from raypipe.engine.io.checkpoint.snapshot import FOLDER, step_folders
from raypipe.engine.io.run_files import METRICS
from raypipe.engine.io.storage import Place
from raypipe.engine.stage.quantized_linear import settle, without_frozen_state
from raypipe.errors import CheckpointError, ConfigError
from raypipe.hf.kept_optimizer import begin_with
from raypipe.hf.parts import StageOptimizer, stage_scheduler, stream_of
from raypipe.hf.trainer_events import Replay, TrainingLength
from raypipe.hf.trainer_loss import loss_of
from raypipe.hf.training_arguments import check_arguments, pipeline_of
from raypipe.ir.plan import Plan
from raypipe.ir.report import StepRecord
from raypipe.run.journal import News
from raypipe.run.same_run import SETTINGS

__all__ = ["PipelinedSeq2SeqTrainer", "PipelinedTrainer"]

RUN = "raypipe"
"""Name of the pipeline's run: its folder in ``output_dir``, and in each checkpoint-N that training can resume from."""

GENERATOR = "generator.pt"
"""File of a checkpoint-N with the state of torch's generator at the beginning of the training."""

MOST_AHEAD = 8
"""Maximum number of checkpoints that wait for their evaluations; then the pipeline stops until these are done."""

_METHODS = {
    "training_step": "raypipe.PipelineTrainer takes a model, a loss_fn and an optimizer",
    "_inner_training_loop": "use callbacks",
    "create_scheduler": "set lr_scheduler_type and lr_scheduler_kwargs, or create_optimizer",
    "create_optimizer_and_scheduler": "override create_optimizer",
    "get_batch_samples": "let the dataset or the collator do it",
}
"""Methods of Trainer that are not called, so that a subclass may not override them -> what to do instead."""
_HOOKS = ("on_pre_optimizer_step", "on_optimizer_step", "on_substep_end")


class PipelinedTrainer(Trainer):
    """``transformers.Trainer`` that trains a model in a pipeline of stages.

    Constructor, arguments, callbacks, logs, evaluations and checkpoints are those of Trainer. Arguments that a pipeline
    cannot honour are refused by name. After ``train`` the model in this process holds the trained weights.

    One optimizer step has per_device_train_batch_size x gradient_accumulation_steps samples. Micro-batches are those of
    gradient_accumulation_steps if it is above 1, and otherwise those of ``pipeline``.

    Args:
        pipeline: see PipelineConfig. minibatch_size, seed and max_grad_norm follow from TrainingArguments.
        scaling_config: ray.train.ScalingConfig: number of workers, and what each takes of the cluster.
        failure_config: ray.train.FailureConfig: failures that a run survives.
        local: True trains in threads of this process, without Ray.
        args, kwargs: arguments of Trainer.

    Raises:
        ConfigError: an argument cannot be honoured; the message names it and what to use instead.
    """

    control: Any
    lr_scheduler: Any
    _created_lr_scheduler: bool
    _extends: type[Trainer] = Trainer
    """Class whose constructor this one has."""
    _on_stages: Mapping[str, Any] = {}
    """Attributes of ``self`` in ``_stage_loss`` that differ from those of the trainer in this process."""

    def __init__(
        self,
        *args: Any,
        pipeline: PipelineConfig | None = None,
        scaling_config: Any = None,
        failure_config: Any = None,
        local: bool = False,
        **kwargs: Any,
    ) -> None:
        bound = inspect.signature(self._extends).bind(*args, **kwargs)
        if bound.arguments.get("args") is None:
            bound.arguments["args"] = TrainingArguments("tmp_trainer")  # as Trainer does
        check_arguments(bound.arguments["args"])
        users = set(vars(self))
        super().__init__(*bound.args, **bound.kwargs)
        self._own_attributes = frozenset(vars(self)) - users
        settle(self.model)
        self.pipeline = pipeline_of(pipeline or PipelineConfig(), self.args)
        self.scaling_config, self.failure_config, self.local = scaling_config, failure_config, local
        # In threads, data and evaluations share the global generators of random numbers.
        self._overlaps = not local
        self._random_state = torch.get_rng_state()
        # Optimizer after the last train(), and the checkpoint with its state; None for the newest one of the run.
        self._kept: tuple[Any, Path | None] | None = None
        self._check_trainer()

    def plan(self) -> Plan:
        """Plan the run without starting it; ``print`` shows a summary."""
        self.create_optimizer()
        return self._pipeline_trainer(self._length().max_steps).plan()

    def train(
        self, resume_from_checkpoint: str | bool | None = None, trial: Any = None, *args: Any, **more: Any
    ) -> Any:
        """Train as Trainer does. ``resume_from_checkpoint`` is a checkpoint-N that a PipelinedTrainer has saved."""
        if trial is not None:
            raise ConfigError("trial= is not possible: a pipeline searches no hyperparameters. Use raypipe.tune.")
        self._check_trainer()
        checkpointing = self.args.activation_checkpointing
        self.args.activation_checkpointing = False  # the stages recompute, not the modules
        try:
            return super().train(resume_from_checkpoint, trial, *args, **more)
        finally:
            self.args.activation_checkpointing = checkpointing

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the whole model in this process, on ``args.device``."""
        self.model.to(self.args.device)
        try:
            output = super().evaluation_loop(*args, **kwargs)
        finally:
            self.model.to("cpu")
        for name in [name for name in output.metrics if name.endswith("_model_preparation_time")]:
            del output.metrics[name]  # Trainer logs it only if it has not trained
        return output

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Leave the model where it is: only evaluations compute in this process."""

    def _check_trainer(self) -> None:
        """Raise ConfigError for methods, callbacks and arguments of Trainer that would have no effect."""
        for name, cure in _METHODS.items():
            if getattr(type(self), name) not in (getattr(PipelinedTrainer, name), getattr(self._extends, name)):
                raise ConfigError(f"{type(self).__name__}.{name} is never called by a pipeline: {cure}.")
        if self.lr_scheduler is not None and not self._created_lr_scheduler:
            raise ConfigError(
                "optimizers= has a scheduler, which counts steps of one optimizer, and every stage has its own. Give "
                "optimizers=(optimizer, None), and set lr_scheduler_type and lr_scheduler_kwargs."
            )
        for callback in self.callback_handler.callbacks:
            for name in _HOOKS:
                if getattr(type(callback), name, None) not in (None, getattr(TrainerCallback, name)):
                    raise ConfigError(
                        f"The callback {type(callback).__name__} has {name}, which is never called: gradients are on "
                        "the stages. Use on_step_end."
                    )

    def _length(self) -> TrainingLength:
        loader = self.get_train_dataloader()
        epochs, updates, _, samples, _, batches, steps = self.set_initial_training_values(self.args, loader)
        return TrainingLength(loader, epochs, updates, samples, batches, steps)

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train in one submission of the run, or in threads in one for each step after which weights are due."""
        plan = self._length()
        self._random_state = torch.get_rng_state()
        self._init_training_state(
            plan.max_steps, plan.updates_per_epoch, plan.num_epochs, resume_from_checkpoint, trial
        )
        kept = self._prepare_run(resume_from_checkpoint)
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_optimizer()
        replay = Replay(self, plan, ignore_keys_for_eval)
        due = filter(replay.is_due, range(1, plan.max_steps))
        pipeline = self._pipeline_trainer(plan.max_steps, due if self._overlaps else ())
        if kept is not None:
            order = pipeline._spec(pipeline._prepared(), plan.max_steps).sample_order
            begin_with(kept, self._run, dict(self.model.named_parameters()) | dict(self.model.named_buffers()), order)
            shutil.rmtree(self._before, ignore_errors=True)
        new = kept is None and resume_from_checkpoint is None
        self._kept = None if new else (self.optimizer, None)
        self.create_scheduler(plan.max_steps)
        self.optimizer.zero_grad()
        self.optimizer.step()  # without gradients; a scheduler warns otherwise
        for _ in range(self.state.global_step):
            self.lr_scheduler.step()
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = plan.loader
        replay.start_time = start_time = time.time()
        self._initial_global_step = self._globalstep_last_logged = self.state.global_step
        self._initial_num_input_tokens_seen = self.state.num_input_tokens_seen
        self._tr_loss, self._total_loss_scalar = torch.tensor(0.0), 0.0

        self.control = self.callback_handler.on_train_begin(self.args, self.state, self.control)
        if self.args.eval_on_start:
            self._evaluate(trial, ignore_keys_for_eval, skip_scheduler=True)
        with self._connected(pipeline):
            self._kept = self.optimizer, None
            while self.state.global_step < plan.max_steps and not self.control.should_training_stop:
                ahead = range(self.state.global_step + 1, plan.max_steps + 1)
                until = plan.max_steps if self._overlaps else next(filter(replay.is_due, ahead))
                self._train_to(until, pipeline, replay)
                if replay.waiting:
                    self._train_again(pipeline)
                    replay.catch_up()
        replay.end_epoch()
        self._kept = self.optimizer, self._run / checkpoint_name(self.state.global_step)
        return self._finalize_training(trial, plan.num_samples, start_time)

    def _train_to(self, until: int, pipeline: PipelineTrainer, replay: Replay) -> None:
        """Train to a step, and report the steps before it while the stages train on.

        A step after which weights are due is reported once its checkpoint is complete.
        """
        handle = pipeline.start(num_steps=until, local=self.local)
        began, records, stopping = self.state.global_step, deque[StepRecord](), False

        def report() -> None:
            while records and not (replay.waiting or self.control.should_training_stop):
                step = records[0].step + 1
                if (due := replay.is_due(step)) and not self._load_weights(step):
                    return
                replay.step(records.popleft(), holds_weights=due)

        def take(news: News) -> None:
            nonlocal stopping
            for record in news.records:
                while records and records[-1].step >= record.step:  # the run went back
                    records.pop()
                if record.step == self.state.global_step + len(records):
                    records.append(record)
            report()
            behind = self._run.is_dir() and len(list((self._run / FOLDER).glob("*"))) > MOST_AHEAD
            if (behind or replay.waiting or self.control.should_training_stop) and not stopping:
                stopping = True
                handle.request_stop("requested by the trainer")

        result = handle.wait(on_news=take)
        records.extend(result.records[n] for n in range(self.state.global_step + len(records), len(result.records)))
        report()
        if result.stopped and not stopping:  # by another process
            self.control.should_training_stop = True
        elif self.state.global_step == began:
            raise CheckpointError(f"The weights after step {records[0].step + 1} were not saved: {result.alerts}")

    def _train_again(self, pipeline: PipelineTrainer) -> None:
        """Load the weights after the last reported step: the stages train up to it from the checkpoint before it."""
        step = self.state.global_step
        for later, name in step_folders(Place.of(str(self._run))):
            if later > step:
                shutil.rmtree(self._run / name)
        pipeline.start(num_steps=step, local=self.local).wait()
        self._load_weights(step)

    def _load_weights(self, step: int) -> bool:
        """Load the weights of a checkpoint into the model, and delete earlier ones; False if it is not complete."""
        folder = self._run / checkpoint_name(step)
        if not (folder / MANIFEST).is_file():
            return False
        own = self.model.state_dict().keys()  # a teacher may be among the others
        state = {name: x for name, x in load_state_dict(folder).items() if name in own}
        self.model.load_state_dict(without_frozen_state(self.model, state))
        for earlier, name in step_folders(Place.of(str(self._run))):
            if earlier < step:
                shutil.rmtree(self._run / name, ignore_errors=True)
        return True

    @contextlib.contextmanager
    def _connected(self, pipeline: PipelineTrainer) -> Iterator[None]:
        """Keep one connection to Ray for all submissions of the run."""
        if self.local:
            yield
            return
        from raypipe.config.ray import most_workers, resources_of
        from raypipe.runtime.driver.ray_cluster import connected

        workers = max(most_workers(self.scaling_config) or 0, pipeline._prepared().num_workers)
        with connected(workers, resources_of(self.scaling_config)):
            yield

    @property
    def _run(self) -> Path:
        """Folder of the run."""
        return Path(self.args.output_dir, RUN).absolute()

    @property
    def _before(self) -> Path:
        """Folder of the run before, while another one begins with the state of its optimizer."""
        return self._run.with_name(f"{RUN}-before")

    def _pipeline_trainer(self, max_steps: int, due: Iterable[int] = ()) -> PipelineTrainer:
        """Make the trainer of the stages.

        Args:
            due: steps after which weights are due.
        """
        loader, args = self.get_train_dataloader(), self.args
        model, collate, reduction = self._loss_of(loader)
        run = SimpleNamespace(name=RUN, storage_path=str(self._run.parent))
        if self.failure_config is not None:
            run.failure_config = self.failure_config
        return PipelineTrainer(
            model.train(),
            optimizer=StageOptimizer.of(self.optimizer, self.model),
            lr_scheduler=partial(
                stage_scheduler,
                str(getattr(args.lr_scheduler_type, "value", args.lr_scheduler_type)),
                args.get_warmup_steps(max_steps),
                max_steps,
                args.lr_scheduler_kwargs,
            ),
            train_data=stream_of(loader, args, self._random_state),
            collate_fn=collate,
            pipeline=dataclasses.replace(
                self.pipeline, loss_reduction=reduction, checkpoint_interval_steps=math.gcd(*due) or "auto"
            ),
            scaling_config=self.scaling_config,
            run_config=run,
            resume=True,
        )

    def _loss_of(self, loader: Any) -> tuple[torch.nn.Module, Any, Any]:
        """Return (model, collate function, loss_reduction), see ``trainer_loss.loss_of``."""
        return loss_of(self, loader.dataset, loader.collate_fn)

    def _stage_loss(self, model: Any, inputs: dict[str, Any], num_items: torch.Tensor | None) -> torch.Tensor:
        """Compute the loss of a batch on the stages, where ``self`` has what ``compute_loss`` may read."""
        loss: torch.Tensor = self.compute_loss(model, inputs, num_items_in_batch=num_items)
        return loss

    # ---- Checkpoints: checkpoint-N has Trainer's files, and the state of the stages in place of an optimizer.pt

    def _prepare_run(self, checkpoint: str | None) -> Path | None:
        """Replace the folder of the run by that of a checkpoint, or remove it for a new run.

        Returns:
            Checkpoint with the state that the optimizer has from the last ``train``; None if a new run begins without.

        Raises:
            ConfigError: the checkpoint has no state of stages, or the optimizer has lost its state or has another.
        """
        saved = None if checkpoint is None else Path(checkpoint, RUN)
        if saved is not None and not saved.is_dir():
            raise ConfigError(
                f"{checkpoint} has no state of a pipeline: it was saved by another trainer, or with "
                "save_only_model=True. Load its weights with from_pretrained, and call train() without "
                "resume_from_checkpoint."
            )
        if saved is None and self.optimizer is not None and self.optimizer.state:
            raise ConfigError(
                "optimizers= has an optimizer with state, which the stages' own optimizers would not have. Give one "
                "that has made no step."
            )
        kept = None
        if saved is None and self._kept is not None and self.optimizer is self._kept[0]:
            last = self._kept[1] or self._newest()
            kept = self._before / last.relative_to(last.parents[1])
            if kept != last:  # else the last call has failed after this
                shutil.rmtree(self._before, ignore_errors=True)
                if self._run.is_dir():
                    self._run.rename(self._before)
                self._kept = self.optimizer, kept
        shutil.rmtree(self._run, ignore_errors=True)
        if saved is not None:
            shutil.copytree(saved, self._run)
            self._random_state = torch.load(saved / GENERATOR, weights_only=True)
        return kept

    def _newest(self) -> Path:
        """Return the newest checkpoint of the run, whose training was interrupted.

        Raises:
            ConfigError: the run has none.
        """
        folders = (self._run / name for _, name in sorted(step_folders(Place.of(str(self._run))), reverse=True))
        newest = next((folder for folder in folders if (folder / MANIFEST).is_file()), None)
        if newest is None:
            raise ConfigError(
                "The last train() was interrupted before it had saved a checkpoint, so that the state of the optimizer "
                "is lost. Set trainer.optimizer = None to begin with a new optimizer."
            )
        return newest

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the state of the stages: what a run needs to resume at this step, of the folder of the run."""
        target, checkpoint = Path(output_dir, RUN), checkpoint_name(self.state.global_step)
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(self._run / checkpoint, target / checkpoint)
        shutil.copy(self._run / SETTINGS, target / SETTINGS)
        (target / METRICS).mkdir()
        for part in (self._run / METRICS).glob("*.parquet"):
            with contextlib.suppress(FileNotFoundError):  # the run replaces them while it trains on
                shutil.copy(part, target / METRICS / part.name)

    def _save_scaler(self, output_dir: str) -> None:
        """Save nothing: the stages have the scale of their losses."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the state at the beginning, of which orders follow; other random numbers are keyed by seed and step."""
        torch.save(self._random_state, Path(output_dir, RUN, GENERATOR))


class PipelinedSeq2SeqTrainer(PipelinedTrainer, Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer`` that trains in a pipeline; evaluations generate texts in this process."""
