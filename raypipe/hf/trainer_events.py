"""Calls of Trainer's callbacks, logs, evaluations and checkpoints for the steps that a pipeline has done."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from transformers.trainer_callback import DefaultFlowCallback, TrainerControl

from raypipe.errors import ConfigError
from raypipe.ir.report import StepRecord


@dataclasses.dataclass(frozen=True, slots=True)
class TrainingLength:
    """Length of a training, as Trainer computes it; batches are micro-batches."""

    loader: Any
    num_epochs: int
    updates_per_epoch: int
    num_samples: float
    batches_per_epoch: int
    max_steps: int


_FLOW = DefaultFlowCallback()


class Replay:
    """Calls of Trainer's callbacks, logs, evaluations and checkpoints for the steps of a pipeline.

    Attributes:
        waiting: True if a callback has requested an evaluation, a checkpoint or the end after the last reported step,
            whose weights are not in this process; see ``catch_up``.
        start_time: ``time.time()`` at the beginning of the training.
    """

    def __init__(self, trainer: Any, plan: TrainingLength, ignore_keys: Any) -> None:
        self._trainer, self._plan, self._ignore_keys = trainer, plan, ignore_keys
        self.start_time = 0.0
        self._in_epoch = False
        self._requested: set[str] = set()
        self._last: tuple[float | None, float | None] = (None, None)

    @property
    def waiting(self) -> bool:
        return bool(self._requested)

    def is_due(self, step: int) -> bool:
        """Return True if the arguments give an evaluation or a checkpoint after a step; True for the last step."""
        trainer, plan = self._trainer, self._plan
        state, control = copy.copy(trainer.state), TrainerControl()
        state.global_step, state.epoch = step, self._epoch_after(step)
        _FLOW.on_step_end(trainer.args, state, control)
        if step % plan.updates_per_epoch == 0:
            _FLOW.on_epoch_end(trainer.args, state, control)
        return step >= plan.max_steps or control.should_evaluate or control.should_save

    def step(self, record: StepRecord, *, holds_weights: bool = False) -> None:
        """Report a step to Trainer.

        Args:
            holds_weights: True if the model in this process has the weights after this step.
        """
        trainer, plan, state = self._trainer, self._plan, self._trainer.state
        handler, args = trainer.callback_handler, trainer.args
        if not self._in_epoch:
            trainer.control = handler.on_epoch_begin(args, state, trainer.control)
            self._in_epoch = True
        trainer.control = handler.on_step_begin(args, state, trainer.control)
        self._add(record)
        rate = trainer._get_learning_rate()
        if not record.skipped:
            trainer.lr_scheduler.step()
        self._last = (record.grad_norm, rate)
        state.global_step += 1
        state.epoch = self._epoch_after(state.global_step)
        trainer.control = handler.on_step_end(args, state, trainer.control)
        self._give(holds_weights)
        if state.global_step % plan.updates_per_epoch == 0:
            self.end_epoch(holds_weights)

    def catch_up(self) -> None:
        """Do what was requested after the last reported step, whose weights are in this process now."""
        self._give(True)

    def end_epoch(self, holds_weights: bool = True) -> None:
        """Report the end of an epoch, unless that was done."""
        trainer = self._trainer
        if self._in_epoch:
            self._in_epoch = False
            trainer.control = trainer.callback_handler.on_epoch_end(trainer.args, trainer.state, trainer.control)
            self._give(holds_weights)

    def _give(self, holds_weights: bool) -> None:
        """Log, and evaluate and save if the weights are here; otherwise store what was requested."""
        trainer, control = self._trainer, self._trainer.control
        if control.should_epoch_stop:
            raise ConfigError(
                "A callback has set control.should_epoch_stop, and stages read every epoch to its end. Set "
                "control.should_training_stop, or max_steps."
            )
        wanted = {name for name in ("should_evaluate", "should_save", "should_training_stop") if getattr(control, name)}
        if not holds_weights:
            self._requested |= wanted
            control.should_evaluate = control.should_save = control.should_training_stop = False
        else:
            for name in self._requested:
                setattr(control, name, True)
            self._requested = set()
        norm, rate = self._last
        trainer._maybe_log_save_evaluate(
            trainer._tr_loss, norm, trainer.model, None, trainer.state.epoch, self._ignore_keys, self.start_time,
            learning_rate=rate,
        )  # fmt: skip

    def _add(self, record: StepRecord) -> None:
        """Add the loss of a step to Trainer's sum, and its operations to Trainer's count."""
        trainer = self._trainer
        loss = torch.tensor(record.loss)
        if trainer.args.logging_nan_inf_filter and not loss.isfinite():
            loss = trainer._tr_loss / (1 + trainer.state.global_step - trainer._globalstep_last_logged)
        trainer._tr_loss += loss
        if hasattr(trainer.model, "num_parameters"):
            trainer.current_flos += 6.0 * record.tokens * trainer.model.num_parameters(exclude_embeddings=True)

    def _epoch_after(self, step: int) -> float:
        plan, accumulated = self._plan, self._trainer.args.gradient_accumulation_steps
        epoch, within = divmod(step - 1, plan.updates_per_epoch)
        return epoch + min((within + 1) * accumulated, plan.batches_per_epoch) / plan.batches_per_epoch
