"""Ray Train's settings as raypipe reads them: fields without an effect are refused by name.

    ScalingConfig(num_workers=4, use_gpu=True, resources_per_worker={"GPU": 0.5})
                  ^ read: four workers, each on half of a GPU     topology="2x2"
                                                                  ^ refused: nothing computes on TPUs
    ScalingConfig(num_workers=(2, 8), elastic_resize_monitor_interval_s=60)
                  ^ a run that begins with 2 and grows up to 8, looking for more workers once a minute

A field counts as set if it differs from its class's default. Fields that Ray adds later are
refused by the same rule, so that no table here can fall behind.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from raypipe.config.early_stopping import may_give
from raypipe.errors import ConfigError

READ: Mapping[str, tuple[str, ...]] = {
    "ScalingConfig": (
        "num_workers",
        "use_gpu",
        "resources_per_worker",
        "accelerator_type",
        "elastic_resize_monitor_interval_s",
    ),
    "RunConfig": ("name", "storage_path", "storage_filesystem", "checkpoint_config", "failure_config", "callbacks"),
    "CheckpointConfig": ("num_to_keep", "checkpoint_score_attribute", "checkpoint_score_order"),
    "FailureConfig": ("max_failures",),
}
"""Fields that raypipe reads, by class of Ray Train."""

SCORES = ("loss", "grad_norm")
"""Numbers in every checkpoint's manifest; with eval_data also eval_loss and eval_<name> of each metric."""

_NO_TPU = "stages compute on CPUs and on NVIDIA GPUs"
_PLACED = "every worker is placed by itself, by its resources_per_worker alone"
_REASONS: Mapping[str, str] = {
    "use_tpu": _NO_TPU,
    "topology": _NO_TPU,
    "trainer_resources": "the driver of a run computes nothing and reserves nothing",
    "placement_strategy": _PLACED,
    "label_selector": _PLACED,
    "worker_runtime_env": "workers have the environment of the cluster or job; set it with ray.init(runtime_env=...)",
    "logging_config": "what a run does stands in events.jsonl of its folder",
    "checkpoint_frequency": "PipelineConfig(checkpoint_interval_steps=...) sets how often a run saves",
    "checkpoint_at_end": "a run always saves at its end",
}


RESIZE_INTERVAL_S = 60.0
"""Ray's default of elastic_resize_monitor_interval_s, in seconds."""


class WorkerRange(NamedTuple):
    """Range of the number of workers of an elastic run.

    Attributes:
        least: minimum; the run waits until as many workers are available.
        most: maximum, up to which the run grows.
        interval_s: minimum seconds between two checks for further workers.
    """

    least: int
    most: int
    interval_s: float = RESIZE_INTERVAL_S


def worker_range(scaling: Any) -> WorkerRange | None:
    """Return the range of workers if num_workers of a ScalingConfig is a pair; None if it is one number or not set."""
    value = getattr(scaling, "num_workers", None)
    if not isinstance(value, tuple | list):
        return None
    interval_s = getattr(scaling, "elastic_resize_monitor_interval_s", RESIZE_INTERVAL_S)
    return WorkerRange(value[0], value[1], float(interval_s))


def most_workers(scaling: Any) -> int | None:
    """Return the maximum number of workers of a ScalingConfig; None if num_workers is not set."""
    value = getattr(scaling, "num_workers", None)
    return value[1] if isinstance(value, tuple | list) else value


ACCELERATOR_SHARE = 0.001
"""Amount of the resource "accelerator_type:NAME" that a worker reserves, as in Ray Train. Each node has 1 of it."""


def resources_of(scaling: Any) -> dict[str, float]:
    """Return the resources of one worker, {name: amount}, by a ScalingConfig; one CPU by default.

    Args:
        scaling: any object with the fields of ScalingConfig as attributes, or None.
    """
    resources: dict[str, float] = {"CPU": 1, **({"GPU": 1} if getattr(scaling, "use_gpu", False) else {})}
    resources |= getattr(scaling, "resources_per_worker", None) or {}
    if kind := getattr(scaling, "accelerator_type", None):
        resources.setdefault(f"accelerator_type:{kind}", ACCELERATOR_SHARE)
    return resources


def failures_of(run: Any) -> int:
    """Return the number of failures that a run survives, from ray.train.RunConfig; -1 is no limit."""
    return getattr(getattr(run, "failure_config", None), "max_failures", 0)


def gpu_share(resources: Mapping[str, float]) -> float:
    """Return the share of a GPU that a worker with these resources has; 0 if the worker computes on the CPU."""
    return float(resources.get("GPU", 0))


def check_ray_settings(scaling: Any, run: Any, evaluated: Collection[str] = ()) -> None:
    """Raise ConfigError for settings of Ray Train that are impossible or would have no effect on a run.

    Args:
        scaling, run: ray.train.ScalingConfig and RunConfig, or None.
        evaluated: names of the results of evaluations; empty without eval_data.
    """
    checkpoints = getattr(run, "checkpoint_config", None)
    for argument, kind, settings in (
        ("scaling_config", "ScalingConfig", scaling),
        ("run_config", "RunConfig", run),
        ("checkpoint_config", "CheckpointConfig", checkpoints),
        ("failure_config", "FailureConfig", getattr(run, "failure_config", None)),
    ):
        if settings is None:
            continue
        if isinstance(settings, Mapping | type) or not hasattr(settings, "__dict__"):
            shown = (
                f"the class {settings.__name__}"
                if isinstance(settings, type)
                else f"{type(settings).__name__} {settings!r}"
            )
            raise ConfigError(f"{argument} is {shown}; give ray.train.{kind}({_EXAMPLES[kind]}).")
        for name, why in faults(kind, settings):
            raise ConfigError(f"{kind}({name}={getattr(settings, name)!r}): {why}")
    score = getattr(checkpoints, "checkpoint_score_attribute", None)
    if score is not None and score not in SCORES and not may_give(evaluated, score):
        why = f"checkpoints of this run have {', '.join((*SCORES, *evaluated))}."
        if not evaluated:
            why = f"there is no {score} without eval_data. Give eval_data, or 'loss' as the attribute."
        raise ConfigError(f"CheckpointConfig(checkpoint_score_attribute={score!r}): {why}")


_EXAMPLES = {
    "ScalingConfig": "num_workers=2",
    "RunConfig": "name='first'",
    "CheckpointConfig": "num_to_keep=2",
    "FailureConfig": "max_failures=3",
}


def faults(kind: str, settings: Any) -> Iterator[tuple[str, str]]:
    """Yield (field, reason and fix) for each field that has an impossible value or would have no effect.

    Args:
        kind: name of the class of Ray Train.
        settings: an object of this class, or any object with its fields as attributes.
    """
    fresh: Any = None
    with suppress(Exception):  # a class of its own, whose defaults nobody knows
        fresh = type(settings)()
    for name, value in vars(settings).items():
        if name.startswith("_"):
            continue
        if name in READ[kind]:
            why = _CHECKS[name](value, settings) if name in _CHECKS and value is not None else ""
            if why:
                yield name, why
        elif value and value != getattr(fresh, name, None):
            reason = _REASONS.get(name, "raypipe does not read it")
            reads = ", ".join(READ[kind])
            of = f"of {kind} raypipe reads {reads}"
            yield name, f"it would have no effect: {reason}. Leave it out{'' if name in _REASONS else f'; {of}'}."


def _only(accepts: Callable[[Any], bool], otherwise: str) -> Callable[[Any, Any], str]:
    """Make the check function of a field: (value, settings) -> error message, "" if the value is allowed.

    Args:
        accepts: (value) -> True if the value is allowed.
        otherwise: the error message.
    """
    return lambda value, settings: "" if accepts(value) else otherwise


def _check_name(value: Any, settings: Any) -> str:
    if not isinstance(value, str) or value in (".", "..") or "/" in value or not value.strip():
        return (
            "it is the name of one folder, in which the run is found again. Give one without a slash, and what stands "
            "before it in storage_path."
        )
    return ""


def _check_workers(value: Any, settings: Any) -> str:
    if isinstance(value, tuple | list):
        if len(value) == 2 and all(type(n) is int for n in value) and 1 <= value[0] <= value[1]:
            return ""
        return "a pair is the least and the most workers; give two integers, the first from 1 on, as in (2, 8)."
    if type(value) is not int or value < 1:
        return "it is the number of places for stages; give an integer of at least 1, or a pair as in (2, 8)."
    return ""


def _check_interval(value: Any, settings: Any) -> str:
    if type(value) not in (int, float) or not 0 <= value < math.inf:
        return "it is the seconds between two looks for more workers; give a number from 0 on."
    if value != RESIZE_INTERVAL_S and worker_range(settings) is None:
        return (
            "it would have no effect: a run with one number of workers does not look for more. Give a pair, as in "
            "num_workers=(2, 8), or leave it out."
        )
    return ""


def _check_resources(value: Any, settings: Any) -> str:
    good = isinstance(value, Mapping) and all(
        isinstance(name, str) and type(n) in (int, float) and n >= 0 for name, n in value.items()
    )
    if not good:
        return "it is what a worker reserves of each resource, as in {'CPU': 1}; give numbers from 0 on by name."
    gpus, wanted = value.get("GPU"), bool(getattr(settings, "use_gpu", False))
    if gpus and not wanted:
        return "a GPU would be reserved and left idle. Set use_gpu=True, or leave out 'GPU'."
    if wanted and gpus == 0:
        return "use_gpu=True needs at least a share of a GPU. Leave out 'GPU' for a whole one, or set use_gpu=False."
    if gpus and gpus > 1:
        return (
            f"a worker computes on one GPU, so that {gpus:g} would leave others idle. Give at most 1, or a share of "
            "one as in {'GPU': 0.5}, and more num_workers."
        )
    return ""


def _check_accelerator(value: Any, settings: Any) -> str:
    if not getattr(settings, "use_gpu", False):
        return "it names the kind of GPU that workers are placed on, and use_gpu is False. Set use_gpu=True."
    return "" if isinstance(value, str) and value else "give the name of a kind of GPU, as in 'A100'."


def _check_score(value: Any, settings: Any) -> str:
    if value not in SCORES and not (isinstance(value, str) and value.startswith("eval_")):
        return (
            f"no checkpoint has such a number; give one of {', '.join(SCORES)}, eval_loss, or eval_<name> of a metric."
        )
    if getattr(settings, "num_to_keep", None) is None:
        return "it ranks checkpoints, but without num_to_keep all are. Give num_to_keep too."
    return ""


def _check_callbacks(value: Any, settings: Any) -> str:
    if not isinstance(value, list | tuple):
        return f"it takes a list of ray.train.UserCallback. {_OWN_CALLBACKS}"
    for one in value:
        if isinstance(one, type):
            return f"it has the class {one.__name__}, not one of its objects. Add the brackets: {one.__name__}()."
        name = type(one).__qualname__
        for method in USER_CALLBACK:
            if not callable(getattr(one, method, None)):
                return f"{name} is no ray.train.UserCallback: it has no method {method}. {_OWN_CALLBACKS}"
        others = [method for method in dir(one) if method.startswith(_HOOKS) and method not in USER_CALLBACK]
        if others:
            return (
                f"{name} has the method {others[0]}, which is never called: of a callback of Ray Train a pipeline "
                f"calls {' and '.join(USER_CALLBACK)}. Leave it out, or give it another name if you call it yourself. "
                f"{_OWN_CALLBACKS}"
            )
    return ""


def _check_order(value: Any, settings: Any) -> str:
    if value not in ("max", "min"):
        return "give 'max' or 'min'."
    if value == "min" and getattr(settings, "checkpoint_score_attribute", None) is None:
        return "it orders by checkpoint_score_attribute, which is not given. Give 'loss' or 'eval_loss' there."
    return ""


USER_CALLBACK = ("after_report", "after_exception")
"""The methods of ray.train.UserCallback."""
_HOOKS = ("after_", "before_", "on_")
_OWN_CALLBACKS = "Give raypipe's own callbacks to the trainer, as in PipelineTrainer(callbacks=[...])."

_CHECKS = {
    "name": _check_name,
    "storage_path": _only(
        lambda value: isinstance(value, str | os.PathLike) and bool(value),
        "give a path or a URI, as in s3://bucket/runs.",
    ),
    "callbacks": _check_callbacks,
    "num_workers": _check_workers,
    "elastic_resize_monitor_interval_s": _check_interval,
    "use_gpu": _only(lambda value: isinstance(value, bool), "it places stages on GPUs; give True or False."),
    "accelerator_type": _check_accelerator,
    "resources_per_worker": _check_resources,
    "max_failures": _only(
        lambda value: type(value) is int and value >= -1,
        "it is the number of failures that a run survives; give an integer from 0 on, or -1 for any number.",
    ),
    "num_to_keep": _only(
        lambda value: type(value) is int and value >= 1, "give an integer of at least 1, or None to keep all."
    ),
    "checkpoint_score_attribute": _check_score,
    "checkpoint_score_order": _check_order,
}
