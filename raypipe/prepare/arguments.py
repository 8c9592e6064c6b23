"""What a trainer's arguments must be, looked at when they are given: nothing is called or read for it."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from raypipe.config.pipeline import PipelineConfig
from raypipe.engine.checkpoint import StateSource
from raypipe.engine.data.collate import Collate
from raypipe.engine.foreign_operations import Registered
from raypipe.engine.shipping import unshippable
from raypipe.engine.stage import StageProgram
from raypipe.engine.state import MakeOptimizer, MakeScheduler
from raypipe.engine.trial.optimizer_trial import PLATEAU
from raypipe.engine.user_lines import quoted, short
from raypipe.errors import ConfigError, PlanError, RaypipeError

__all__ = [
    "Arguments",
    "Unfilled",
    "check_arguments",
    "check_operations",
    "check_travel",
    "in_one_paragraph",
    "undisturbed",
]


@contextmanager
def undisturbed() -> Iterator[None]:
    """With gradients, whatever the caller has switched off around the call.

    Raises:
        ConfigError: autocast is on around it, of which nobody can tell whether it is meant for the stages.
    """
    if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
        raise ConfigError(
            "The trainer was called within torch.autocast(...), which stages know nothing of. Call it outside, and set "
            "PipelineConfig(precision=...)."
        )
    with torch.inference_mode(False), torch.enable_grad():
        yield


class Unfilled(NamedTuple):
    """A model whose parameters are on the meta device, and where the stages find what they hold."""

    model: torch.nn.Module
    sources: tuple[StateSource, ...]


class Arguments(NamedTuple):
    """What the user gave a trainer, besides settings.

    Attributes:
        model: a module, or a function without arguments that builds one.
        loss_fn: (output, target) -> scalar; None where the model returns its own loss.
        optimizer: of named parameters.
        lr_scheduler: of an optimizer.
        train_data, eval_data: paths or map-style datasets.
        survives: workers keep copies of the state in memory, so that the run can go on after a failure.
        metrics: of evaluations, by name.
        early_stopping: raypipe.EarlyStopping.
        collate_fn: makes a batch of a list of items.
        unfilled: builds the model without weights, and says where workers find them; None where it comes with them.
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
    """Refuse what cannot be right, whatever the data.

    Raises:
        ConfigError: names the argument and says what to write.
    """
    if not callable(model):
        raise ConfigError(
            f"model is {_what(model)}; give an nn.Module, or a function without arguments that builds one."
        )
    if isinstance(loss_fn, type):
        where = "torch.nn." if loss_fn.__module__.startswith("torch.nn") else ""
        made = f"{where}{loss_fn.__name__}()"
        raise ConfigError(
            f"loss_fn is the class {loss_fn.__name__}, and calling it makes a loss instead of computing one. Add the "
            f"brackets: loss_fn={made}."
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
    if isinstance(lr_scheduler, ReduceLROnPlateau) or lr_scheduler is ReduceLROnPlateau:
        raise ConfigError(PLATEAU.replace("makes", "is", 1))
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
    """That it can be called with an output and a target, in this order, as far as its parameters tell."""
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
    """Refuse what Ray's actors could not be sent, before there are any.

    Raises:
        ConfigError: names the argument, what it holds, and where.
    """
    for name, value in arguments.items():
        what = unshippable(name, value)
        if what is not None and not _travels_all_the_same(value):
            raise ConfigError(
                f"{what} Stages are processes of their own: define {name} at module level, and let it make such things "
                "where it is called."
            )


def check_operations(programs: Iterable[StageProgram]) -> None:
    """Refuse operations that no worker could know, for nobody but the script registers them.

    Raises:
        ConfigError: names one.
    """
    for program in programs:
        for function in program.modes.values():
            for known in getattr(function, "names", {}).values():
                if isinstance(known, Registered) and known.by_script:
                    raise ConfigError(
                        f"The model calls {known.operation}, an operation that this script registers with torch. "
                        "Workers do not run the script: register it in a module of its own that they can import, and "
                        "import that here."
                    )


def _travels_all_the_same(value: Any) -> bool:
    """Ask Ray's own pickler where Ray is loaded: a type may have been taught to it."""
    ray = sys.modules.get("ray")
    try:
        return ray is not None and bool(ray.cloudpickle.dumps(value))
    except Exception:  # noqa: BLE001  (whatever a type raises)
        return False


@contextmanager
def in_one_paragraph() -> Iterator[None]:
    """Inside, what nobody has foreseen becomes an error of ours too; RAYPIPE_DEBUG=1 keeps where it came from.

    Raises:
        PlanError: with the user's line on the way to it.
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
    """A value in few words."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    kind = type(value).__name__
    return f"{'an' if kind[:1].lower() in 'aeiou' else 'a'} {kind}"
