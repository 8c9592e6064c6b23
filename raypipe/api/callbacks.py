"""Callbacks of a trainer: checks of raypipe's own, and an adapter that calls a ``ray.train.UserCallback``."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from functools import partial
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

from raypipe.callbacks.base import METHODS, Callback, Event, Prompts, RunEnd, RunStart, scalars
from raypipe.config.ray import USER_CALLBACK
from raypipe.errors import ConfigError, StageError
from raypipe.ir.report import StepRecord


def callbacks_of(callbacks: Any, run: Any, scaling: Any, *, evaluates: bool) -> tuple[Any, ...]:
    """Return the trainer's callbacks, followed by the callbacks of a ray.train.RunConfig, in the order of their calls.

    Args:
        callbacks: argument of the trainer.
        run, scaling: ray.train's RunConfig and ScalingConfig, or None.
        evaluates: True if the trainer has eval_data.

    Raises:
        ConfigError: an item is not a callback, has a method or prompts without effect, or needs a package that is
            missing.
    """
    if not isinstance(callbacks, Sequence) or isinstance(callbacks, str):
        raise ConfigError(f"callbacks={callbacks!r} is not a list; give callbacks=[...].")
    for callback in callbacks:
        _check(callback)
        _check_prompts(callback, evaluates=evaluates)
    of_ray = [FromRayTrain(callback, run, scaling) for callback in getattr(run, "callbacks", None) or ()]
    return (*callbacks, *of_ray)


def _check(callback: Any) -> None:
    if isinstance(callback, type):
        raise ConfigError(
            f"callbacks has the class {callback.__name__}, not one of its objects. Add the brackets: "
            f"{callback.__name__}()."
        )
    name = type(callback).__qualname__
    if any(hasattr(callback, method) for method in USER_CALLBACK):
        raise ConfigError(f"callbacks has {name}, which is Ray Train's: give it as RunConfig(callbacks=[...]).")
    methods = [method for method in dir(callback) if method.startswith("on_") and callable(getattr(callback, method))]
    if not methods:
        raise ConfigError(
            f"callbacks has {name}, which has none of the methods {', '.join(METHODS)}. Derive it from "
            "raypipe.Callback."
        )
    for method in methods:
        if method not in METHODS:
            close = difflib.get_close_matches(method, METHODS, n=1, cutoff=0.5)
            hint = f"did you mean {close[0]}?" if close else f"possible are {', '.join(METHODS)}."
            raise ConfigError(f"The callback {name} has a method {method}, which is never called; {hint}")
    check = getattr(callback, "check", None)
    if isinstance(callback, Callback) and check is not None:
        check()


def _check_prompts(callback: Any, *, evaluates: bool) -> None:
    prompts, name = getattr(callback, "prompts", None), type(callback).__qualname__
    if prompts is not None and not isinstance(prompts, Prompts):
        raise ConfigError(
            f"The callback {name} has prompts={prompts!r}: give raypipe.callbacks.Prompts(input_ids, ...)."
        )
    if prompts is not None and not evaluates:
        raise ConfigError(
            f"The callback {name} has prompts, which are continued at evaluations, and the trainer has no "
            "eval_data. Give eval_data, or call RunHandle.generate."
        )


class FromRayTrain(Callback):
    """Adapter that calls a ``ray.train.UserCallback`` as Ray Train does.

    ``after_report`` is called after every step with its numbers, after every evaluation with its results added to
    the numbers of the last step, and after every checkpoint with these numbers and the checkpoint. The list of reports
    passed to ``after_report`` has one item, for the whole pipeline, as if from worker 0. ``after_exception`` is called
    after every failure, and at the end of a run that failed.
    """

    def __init__(self, callback: Any, run: Any, scaling: Any) -> None:
        self._callback = callback
        self.name = type(callback).__qualname__
        # As Ray's own TrainRunContext, whose class is private to Ray; no lambda, because it is pickled.
        self._context = SimpleNamespace(run_id="", run_config=run, scaling_config=scaling, train_loop_config=None)
        self._context.get_run_config = partial(itemgetter(0), (run,))
        self._metrics: dict[str, Any] = {}

    def on_start(self, run: RunStart) -> None:
        self._context.run_id = run.name

    def on_step(self, record: StepRecord) -> None:
        self._metrics = {"step": record.step + 1, **scalars(record)}
        self._report(None)

    def on_eval(self, step: int, metrics: Any) -> None:
        self._metrics = {**self._metrics, **metrics}
        self._report(None)

    def on_checkpoint(self, step: int, path: str) -> None:
        from ray.train import Checkpoint

        self._report(Checkpoint(path, getattr(self._context.run_config, "storage_filesystem", None)))

    def on_recovery(self, event: Event) -> None:
        if event.decision == "failure":
            self._callback.after_exception(self._context, {0: StageError(event.reason)})

    def on_end(self, end: RunEnd) -> None:
        if end.error:
            self._callback.after_exception(self._context, {0: StageError(end.error)})

    def _report(self, checkpoint: Any) -> None:
        self._callback.after_report(self._context, [dict(self._metrics)], checkpoint)
