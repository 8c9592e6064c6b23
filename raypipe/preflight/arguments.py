"""Checks of a trainer's arguments by their types and signatures, without calling them or reading data."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler

from raypipe.config.pipeline import PipelineConfig
from raypipe.data.stacking import Collate
from raypipe.engine.io.checkpoint.state_source import StateSource
from raypipe.engine.optim.state import MakeOptimizer, MakeScheduler
from raypipe.engine.stage.generated_source import Registered
from raypipe.engine.stage.stage import StageProgram
from raypipe.errors import ConfigError, PlanError, RaypipeError
from raypipe.user_lines import quoted, short


@contextmanager
def undisturbed() -> Iterator[None]:
    """Enable gradients for the code inside, in case the caller has switched them off.

    Raises:
        ConfigError: the caller has switched autocast on, which would not apply to stages.
    """
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise ConfigError(
            "The trainer was called within torch.autocast(...), which does not apply to stages. Call it outside, and "
            "set PipelineConfig(precision=...)."
        )
    with torch.inference_mode(False), torch.enable_grad():
        yield


class Unfilled(NamedTuple):
    """Model whose parameters are on the meta device, and the sources from which stages load their values."""

    model: torch.nn.Module
    sources: tuple[StateSource, ...]


class Arguments(NamedTuple):
    """Arguments of a trainer, apart from settings; see PipelineTrainer.

    Attributes:
        survives: True if workers keep copies of the state in memory, so that the run can resume after a failure.
        unfilled: function that builds the model without weights and names their sources; None if ``model`` has weights.
    """

    model: torch.nn.Module | Callable[[], torch.nn.Module]
    loss_fn: Callable[[Any, Any], torch.Tensor] | None
    optimizer: MakeOptimizer
    lr_scheduler: MakeScheduler | None
    train_data: Any
    eval_data: Any = None
    survives: bool = False
    metrics: Mapping[str, Any] | None = None
    early_stopping: Any = None
    collate_fn: Collate | None = None
    unfilled: Callable[[], Unfilled] | None = None


def check_arguments(
    model: Any, loss_fn: Any, optimizer: Any, lr_scheduler: Any, train_data: Any, pipeline: Any
) -> None:
    """Raise a ConfigError if an argument has a wrong type, or loss_fn a wrong signature; nothing is called."""
    if not callable(model):
        raise ConfigError(
            f"model is {_what(model)}; give an nn.Module, or a function without arguments that builds one."
        )
    if isinstance(loss_fn, type):
        where = "torch.nn." if loss_fn.__module__.startswith("torch.nn") else ""
        instance = f"{where}{loss_fn.__name__}()"
        raise ConfigError(
            f"loss_fn is the class {loss_fn.__name__}, and calling it makes a loss instead of computing one. Add the "
            f"brackets: loss_fn={instance}."
        )
    if loss_fn is not None and not callable(loss_fn):
        raise ConfigError(f"loss_fn is {_what(loss_fn)}; give a function (output, target) -> scalar tensor.")
    if loss_fn is not None:
        _check_loss_fn(loss_fn)
    if isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer):
        raise ConfigError(
            "optimizer must be a function of named parameters, because every stage makes its own: "
            "optimizer=lambda p: torch.optim.AdamW(p, lr=3e-4)."
        )
    if lr_scheduler is not None and (isinstance(lr_scheduler, LRScheduler) or not callable(lr_scheduler)):
        raise ConfigError(
            f"lr_scheduler is {_what(lr_scheduler)}, but every stage makes one for its own optimizer. Give a function "
            "of the optimizer: lr_scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=1000)."
        )
    if train_data is None:
        raise ConfigError("train_data is None; give the path of Parquet or Arrow files, or a torch map-style Dataset.")
    if not isinstance(pipeline, PipelineConfig | None):
        raise ConfigError(f"pipeline is {_what(pipeline)}; give raypipe.PipelineConfig(num_stages=2, ...).")


def _check_loss_fn(loss_fn: Any) -> None:
    """Check by its signature and parameter names that a loss_fn takes (output, target), in this order."""
    if isinstance(loss_fn, torch.jit.ScriptModule):
        raise ConfigError(
            "loss_fn is a torch.jit.ScriptModule, which cannot be sent to a stage. Give the module that it was made of."
        )
    try:
        signature = inspect.signature(loss_fn.forward if isinstance(loss_fn, torch.nn.Module) else loss_fn)
    except (TypeError, ValueError):  # written in C
        return
    try:
        bound = signature.bind(None, None)
    except TypeError as error:
        raise ConfigError(
            f"loss_fn takes {signature}, but it is called as loss_fn(output, target): {error}. Give a function of "
            "these two."
        ) from None
    names = [name.lower() for name in bound.arguments]
    if len(names) == 2 and names[0] in _TARGETS and names[1] in _OUTPUTS:
        raise ConfigError(
            f"loss_fn takes {signature}, but it is called as loss_fn(output, target): its {names[0]!r} would be what "
            "the model returns. Swap its parameters."
        )


_TARGETS = {"target", "targets", "label", "labels", "y_true", "truth", "ground_truth", "expected", "tgt"}
_OUTPUTS = {"output", "outputs", "y_pred", "y_hat", "pred", "preds", "prediction", "predictions", "logits", "scores"}


def check_travel(arguments: Mapping[str, Any]) -> None:
    """Raise a ConfigError for the first of these arguments, given by name, that cannot be sent to Ray's actors."""
    from ray.cloudpickle import CloudPickler

    class Trial(CloudPickler):
        """Ray's pickler, which leaves out tensors, arrays and tables: these can always be sent, and may be large."""

        def reducer_override(self, value: Any) -> Any:
            library = type(value).__module__.partition(".")[0] in ("numpy", "pyarrow", "pandas")
            return (_nothing, ()) if library or isinstance(value, torch.Tensor) else super().reducer_override(value)

    for name, value in arguments.items():
        try:
            Trial(_Sink()).dump(value)
        except _EnoughError:
            continue
        except Exception as error:  # noqa: BLE001  (whatever a type raises)
            raise ConfigError(
                f"{name} cannot be sent to another process: {short(error)} Stages are processes of their own: define "
                f"{name} at module level, and let it make such things where it is called."
            ) from None


class _EnoughError(Exception):
    """Exception that ends the trial of an argument once 16 MiB were pickled without an error; it is then accepted."""


class _Sink:
    """File object that discards what a pickler writes, and raises _EnoughError after 16 MiB."""

    left = 1 << 24

    def write(self, data: Any) -> int:
        self.left -= len(data)
        if self.left < 0:
            raise _EnoughError
        return len(data)


def _nothing(*_: Any) -> None:
    """Serve as constructor of a tensor or table in the pickle of a trial; never called, since nothing is unpickled."""


def check_operations(programs: Iterable[StageProgram]) -> None:
    """Raise ConfigError if the user's script registers a torch operation itself: workers do not run the script."""
    for program in programs:
        for function in program.modes.values():
            for known in getattr(function, "names", {}).values():
                if isinstance(known, Registered) and known.by_script:
                    raise ConfigError(
                        f"The model calls {known.operation}, an operation that this script registers with torch. "
                        "Workers do not run the script: register it in a module of its own that they can import, and "
                        "import that here."
                    )


@contextmanager
def in_one_paragraph() -> Iterator[None]:
    """Turn unexpected errors into a PlanError, which keeps the original error as its cause if RAYPIPE_DEBUG=1.

    Raises:
        PlanError: the code inside raised an error that is no RaypipeError; quotes the user's line that led to it.
    """
    try:
        yield
    except RaypipeError:
        raise
    except Exception as error:  # noqa: BLE001  (told in one paragraph)
        cause = error if os.environ.get("RAYPIPE_DEBUG") == "1" else None
        raise PlanError(
            f"The run could not be planned{quoted(error)}: {short(error)} Look there first; if it is raypipe's "
            "mistake, RAYPIPE_DEBUG=1 shows the traceback to report."
        ) from cause


def _what(value: Any) -> str:
    """Describe the type of a value for messages, as "a Tensor" or "the class Tensor"."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value).__name__
    return f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind}"
