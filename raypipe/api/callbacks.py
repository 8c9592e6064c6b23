"""The callbacks that a trainer was given: its own, and Ray Train's ``UserCallback`` with the same calls."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from raypipe.callbacks.base import METHODS, Callback, Event, RunEnd, RunStart, scalars
from raypipe.config.ray import USER_CALLBACK
from raypipe.errors import ConfigError, StageError
from raypipe.ir.report import StepRecord

__all__ = ["FromRayTrain", "callbacks_of"]


def callbacks_of(given: Any, run: Any, scaling: Any) -> tuple[Any, ...]:
    """All callbacks of a run, in the order in which they are called.

    Args:
        given: the trainer's ``callbacks``.
        run, scaling: ray.train.RunConfig, whose callbacks come behind, and ScalingConfig; or None.

    Raises:
        ConfigError: one of them is none, has a method that nobody calls, or needs what is not installed.
    """
    if not isinstance(given, Sequence) or isinstance(given, str):
        raise ConfigError(f"callbacks={given!r} is no list; give callbacks=[...].")
    for callback in given:
        _check(callback)
    of_ray = [FromRayTrain(callback, run, scaling) for callback in getattr(run, "callbacks", None) or ()]
    return (*given, *of_ray)


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
            raise ConfigError(f"The callback {name} has a method {method}, which nobody calls; {hint}")
    check = getattr(callback, "check", None)
    if isinstance(callback, Callback) and check is not None:
        check()


class FromRayTrain(Callback):
    """Tells a ``ray.train.UserCallback`` what it would hear of Ray Train.

    ``after_report`` is called after every step with the numbers of that step, and after every checkpoint with those of
    the last one, what was evaluated, and the checkpoint; ``after_exception`` after every failure. There is one
    report for the whole pipeline, as of worker 0.
    """

    def __init__(self, callback: Any, run: Any, scaling: Any) -> None:
        self._callback = callback
        self.name = type(callback).__qualname__
        # What Ray's own TrainRunContext offers; its class is private to Ray.
        self._context = SimpleNamespace(
            run_id="", run_config=run, scaling_config=scaling, train_loop_config=None, get_run_config=_Given(run)
        )
        self._metrics: dict[str, Any] = {}

    def on_start(self, run: RunStart) -> None:
        self._context.run_id = run.path.rpartition("/")[2]

    def on_step(self, record: StepRecord) -> None:
        self._metrics = {"step": record.step, **scalars(record)}
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


class _Given:
    """A function that returns this; it travels."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __call__(self) -> Any:
        return self._value
