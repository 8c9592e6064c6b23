"""Creation of a trainer from a checked run file, and a table of the first mini-batch that it would read.

    {target: "torch.optim:AdamW", args: {lr: 3e-4}}  -->  functools.partial(torch.optim.AdamW, lr=3e-4)

Names of the fields of Ray's classes are taken from the installed Ray, and unknown names are refused.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import types
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from raypipe.config.early_stopping import EarlyStopping
from raypipe.config.pipeline import PipelineConfig
from raypipe.config.ray import faults
from raypipe.data.open_data import open_data
from raypipe.data.stream_source import ENDLESS
from raypipe.engine.stage.losses import IGNORED_TARGET
from raypipe.errors import ConfigError
from raypipe.runfile.run_file import RunFile, as_begun, is_target, refuse, refuse_unknown, to_yaml
from raypipe.runfile.yaml_text import Path as KeyPath

if TYPE_CHECKING:
    from raypipe.api.trainer import PipelineTrainer


_NESTED = {"checkpoint_config": "CheckpointConfig", "failure_config": "FailureConfig"}
_PYTHON_ONLY = ("storage_filesystem", "callbacks", "logging_config")


def make_trainer(run: RunFile, *, planning: bool = False) -> Any:
    """Create the PipelineTrainer that a run file describes.

    The model is built after ``torch.manual_seed(pipeline.seed)``, so that a file gives the same run each time. Modules
    are imported from ``sys.path``; the caller adds the working directory if necessary.

    Args:
        planning: True if the trainer is only used to plan. Then Ray is not imported. Of Ray's settings, only
            num_workers and the resources of a worker are used. run_config, resume, init_from and callbacks are ignored;
            settings that a run would refuse are refused all the same.

    Raises:
        ConfigError: a target cannot be imported or does not accept its args, or Ray refuses a setting; the message has
            the file, the line and the key.
    """
    from raypipe.api.trainer import PipelineTrainer

    values = run.values
    pipeline = _pipeline(run)
    trainer = PipelineTrainer(
        _seeded(_bound(run, "model", taking=0), pipeline.seed),
        loss_fn=_imported_function(run, ("loss_fn",), values["loss_fn"]) if "loss_fn" in values else None,
        optimizer=_bound(run, "optimizer", taking=1),
        lr_scheduler=_bound(run, "lr_scheduler", taking=1) if "lr_scheduler" in values else None,
        train_data=_data(run, "train_data"),
        eval_data=_data(run, "eval_data"),
        pipeline=pipeline,
        scaling_config=_places(run) if planning else _ray_config(run, ("scaling_config",), "ScalingConfig"),
        run_config=None if planning else _ray_config(run, ("run_config",), "RunConfig"),
        metrics=_metrics(run),
        collate_fn=_imported_function(run, ("collate_fn",), values["collate_fn"], 1)
        if "collate_fn" in values
        else None,
        early_stopping=EarlyStopping(**values["early_stopping"]) if "early_stopping" in values else None,
        resume=None if planning else values.get("resume"),
        init_from=None if planning else values.get("init_from"),
        callbacks=() if planning else [_bind(run, ("callbacks",), one, 0)() for one in values.get("callbacks", ())],
    )
    trainer.config_yaml = lambda name: to_yaml(as_begun(run, name))
    return trainer


def _pipeline(run: RunFile) -> PipelineConfig:
    settings = dict(run.values.get("pipeline", {}))
    if is_target(settings.get("loss_reduction")):
        path = ("pipeline", "loss_reduction")
        settings["loss_reduction"] = _bind(run, path, settings["loss_reduction"], taking=1)
    return PipelineConfig(**settings)


def _seeded(make: Callable[[], Any], seed: int) -> Callable[[], Any]:
    def build() -> Any:
        torch.manual_seed(seed)
        return make()

    return build


def _metrics(run: RunFile) -> dict[str, Any] | None:
    metrics = run.values.get("metrics")
    return metrics and {name: _imported_function(run, ("metrics", name), setting) for name, setting in metrics.items()}


def _imported_function(run: RunFile, path: KeyPath, setting: dict[str, Any], taking: int = 2) -> Any:
    """Import the function ``setting["target"]`` and bind ``setting["args"]``; if it is a class, return an instance.

    Args:
        path: keys that lead to the setting, for errors.
        taking: number of positional arguments with which the function will be called.
    """
    target = _imported(run, path, setting)
    bound = _bind(run, path, setting, taking=0 if isinstance(target, type) else taking)
    return bound() if isinstance(target, type) else bound


def _data(run: RunFile, key: str) -> Any:
    data = run.values.get(key)
    return _bound(run, key, taking=0)() if is_target(data) else data


def _bound(run: RunFile, key: str, taking: int) -> Callable[..., Any]:
    return _bind(run, (key,), run.values[key], taking)


def _bind(run: RunFile, path: KeyPath, setting: dict[str, Any], taking: int) -> Callable[..., Any]:
    """Return the callable ``setting["target"]`` with ``setting["args"]`` bound; refuse args that do not fit it.

    ``path`` is the key of the target in the file; ``taking`` is the number of positional arguments of later calls.
    """
    target = _imported(run, path, setting)
    args = setting.get("args") or {}
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):  # some builtins have none to look at
        return functools.partial(target, **args)
    kinds = inspect.Parameter
    if all(p.kind is not kinds.VAR_KEYWORD for p in signature.parameters.values()):
        named = (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
        known = [name for name, p in signature.parameters.items() if p.kind in named]
        refuse_unknown(run, (*path, "args"), args, known)
    try:
        signature.bind(*[None] * taking, **args)
    except TypeError as error:
        refuse(run, path, f"{setting['target']}{signature} does not fit args {args}: {error}.")
    return functools.partial(target, **args) if args else target


def _imported(run: RunFile, path: KeyPath, setting: dict[str, Any]) -> Callable[..., Any]:
    module_name, _, names = setting["target"].partition(":")
    path = (*path, "target")
    try:
        target: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the module is there, and something that it imports is not
        refuse(
            run, path, f"there is no module {error.name}; run from the folder that has it, or add that to PYTHONPATH."
        )
    for name in names.split("."):
        if not hasattr(target, name):
            refuse_unknown(run, path, [name], [known for known in dir(target) if not known.startswith("_")])
            refuse(run, path, f"{setting['target']} does not exist.")
        target = getattr(target, name)
    if not callable(target):
        refuse(run, path, f"{setting['target']} is {type(target).__name__}, which cannot be called.")
    return target


def _places(run: RunFile) -> Any:
    """Check the settings of Ray in a run file, and return the settings of ScalingConfig that a plan needs.

    Returns:
        An object with the attribute num_workers (None if the file has none), and with use_gpu, resources_per_worker and
        accelerator_type as far as the file has them.

    Raises:
        ConfigError: scaling_config or run_config has a setting that a run would refuse.
    """
    scaling = run.values.get("scaling_config", {})
    _refuse_faults(run, ("scaling_config",), "ScalingConfig", scaling)
    _refuse_faults(run, ("run_config",), "RunConfig", run.values.get("run_config", {}))
    wanted = ("use_gpu", "resources_per_worker", "accelerator_type")
    chosen = {name: scaling[name] for name in wanted if name in scaling}
    return types.SimpleNamespace(num_workers=scaling.get("num_workers"), **chosen)


def _refuse_faults(run: RunFile, path: KeyPath, class_name: str, values: dict[str, Any]) -> None:
    """Raise ConfigError for the first field of Ray's class that would have no effect, or has an impossible value.

    Args:
        path: keys that lead to ``values`` in the file.
        class_name: class of ray.train, such as "RunConfig".
        values: settings by field.
    """
    nested = {name: value for name, value in values.items() if name in _NESTED and isinstance(value, dict)}
    for name, value in nested.items():
        _refuse_faults(run, (*path, name), _NESTED[name], value)
    plain = {name: value for name, value in values.items() if name not in nested}
    for name, why in faults(class_name, types.SimpleNamespace(**plain)):
        refuse(run, (*path, name), f"{values[name]!r}: {why}")


def _ray_config(run: RunFile, path: KeyPath, class_name: str) -> Any:
    """Create an object of the class ``class_name`` of ray.train from the values under ``path``; None without values."""
    values: Any = run.values
    for key in path:
        values = values.get(key)
        if values is None:
            return None
    import ray.train

    cls = getattr(ray.train, class_name)
    # Ray leaves fields that are no more in its classes, with this default.
    known = [field.name for field in dataclasses.fields(cls) if field.default != "DEPRECATED"]
    if not isinstance(values, dict):
        refuse(run, path, f"{values!r} is no mapping of names to values.")
    refuse_unknown(run, path, values, [name for name in known if name not in _PYTHON_ONLY])
    arguments = {name: value for name, value in values.items() if value is not None}
    for name, value in arguments.items():
        if name in _NESTED:
            arguments[name] = _ray_config(run, (*path, name), _NESTED[name])
        elif name == "num_workers" and isinstance(value, list):
            arguments[name] = tuple(value)
    _refuse_faults(run, path, class_name, values)
    try:
        return cls(**arguments)
    except (ValueError, TypeError, DeprecationWarning) as error:
        raise ConfigError(f"{run.name}: {'.'.join(path)}: {' '.join(str(error).split())}") from error


SAMPLES = 8
"""Number of samples to show if minibatch_size is "auto", because a profile would decide it."""
SHOWN = 6


def first_batches(trainer: PipelineTrainer) -> Iterator[str]:
    """Yield a table of the first mini-batch of train_data, and one of eval_data if the trainer has it.

    Raises:
        DataError: the data cannot be opened or read.
    """
    arguments, pipeline = trainer._arguments, trainer._pipeline
    size = SAMPLES if pipeline.minibatch_size == "auto" else pipeline.minibatch_size
    for name, data, shuffle in (("train_data", arguments.train_data, True), ("eval_data", arguments.eval_data, False)):
        if data is None:
            continue
        source = open_data(data, seed=pipeline.seed, shuffle=shuffle, collate=arguments.collate_fn)
        count = min(size, source.num_samples)
        read = source.read(0, 0, count, source.columns)
        columns = read if isinstance(read, Mapping) else dict(zip(source.columns, read, strict=True))
        of_epoch = " of epoch 0" if shuffle else ""
        whole = "a stream" if source.num_samples == ENDLESS else f"{source.num_samples:,} samples"
        lines = [f"{name}: {whole}, of which the first {count}{of_epoch}"]
        yield "\n".join(lines + _table([_row(column, value) for column, value in columns.items()]))


def _row(column: Any, value: torch.Tensor) -> list[str]:
    flat = value.reshape(-1)
    exact = not value.is_floating_point()
    shown = [f"{number}" if exact else f"{number:.4g}" for number in flat[:SHOWN].tolist()]
    extent = "" if not len(flat) else f"{_number(flat.min())} to {_number(flat.max())}"
    ignored = float((flat == IGNORED_TARGET).double().mean()) if exact and len(flat) else 0.0
    more = f"  {IGNORED_TARGET} in {ignored:.0%}" if ignored else ""
    kind = str(value.dtype).removeprefix("torch.")
    first = " ".join(shown) + (" ..." if len(flat) > SHOWN else "") + more
    return [str(column), str(tuple(value.shape)), kind, extent, first]


def _number(value: torch.Tensor) -> str:
    return f"{value.item():.4g}" if value.is_floating_point() else str(value.item())


def _table(rows: list[list[str]]) -> list[str]:
    widths = [max(len(row[at]) for row in rows) for at in range(len(rows[0]))] if rows else []
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
