"""Run files: the YAML fields of a run, overrides of the command line, and the position of a mistake.

    model: {target: "text_lm:GPT", args: {width: 128}}        called with args
    loss_fn: {target: "text_lm:loss_fn"}                      used as it is, or with args bound
    optimizer: {target: "torch.optim:AdamW", args: {lr: 3e-4}}
    collate_fn: {target: "raypipe.data:Pad", args: {lengths: 128}}    a class is instantiated
    train_data: data/stdlib/train.parquet                     a path, or a target
    metrics: {accuracy: {target: "text_lm:accuracy"}}         of evaluations, each as loss_fn
    early_stopping: {metric: eval_loss, patience: 3}          the fields of raypipe.EarlyStopping
    pipeline: {num_stages: 2, schedule: 1f1b}                 the fields of PipelineConfig
    scaling_config: {num_workers: 2}                          those of ray.train.ScalingConfig
    run_config: {name: lm, storage_path: runs}                those of ray.train.RunConfig
    num_steps: 500                                            or num_epochs
    resume: true                                              or false; see PipelineTrainer
    init_from: pretrained                                     a run's name, or a path of weights
    callbacks: [{target: "raypipe.callbacks:TensorBoard"}]   called while it trains

Paths of data, init_from and storage_path are expanded and made absolute here, see raypipe.config.paths. This file
imports neither torch nor Ray; raypipe.api.from_file makes the trainer.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from raypipe.config.early_stopping import EarlyStopping
from raypipe.config.paths import absolute_path
from raypipe.config.pipeline import PipelineConfig
from raypipe.config.ray import READ
from raypipe.errors import ConfigError
from raypipe.runfile.yaml_text import Path as KeyPath
from raypipe.runfile.yaml_text import dump, parse, parse_value

_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")
_LENGTHS = ("num_steps", "num_epochs")


@dataclass(frozen=True)
class RunFile:
    """Settings of a run, checked without importing anything that they name.

    Attributes:
        name: name of the file, for messages.
        values: the file's settings with all overrides.
        origins: {path of a key: where it was set}, such as "line 7" or "--set".
    """

    name: str
    values: Mapping[str, Any]
    origins: Mapping[KeyPath, str]

    @property
    def length(self) -> dict[str, int]:
        """{"num_steps": number} or {"num_epochs": number}: arguments of fit() and start().

        Raises:
            ConfigError: both are missing.
        """
        length = {key: self.values[key] for key in _LENGTHS if key in self.values}
        if not length:
            raise ConfigError(f"{self.name} has no length of training: add num_steps or num_epochs.")
        return length


def read_runfile(path: str | Path, overrides: Sequence[str] = ()) -> RunFile:
    """Read a YAML file and check it.

    Args:
        overrides: "pipeline.schedule=kfkb" and the like, with YAML values, which replace values of the file. num_steps
            and num_epochs replace one another.

    Raises:
        ConfigError: the message has file, line and key, and the nearest name of an unknown key.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}. Give the path of a run's YAML file.") from error
    values, lines = parse(text, str(path))
    origins = {key: f"line {line}" for key, line in lines.items()}
    for override in overrides:
        _override(values, origins, override)
    run = RunFile(str(path), {key: value for key, value in values.items() if value is not None}, origins)
    _check(run)
    return RunFile(run.name, _absolute(run), origins)


def to_yaml(run: RunFile) -> str:
    """Format the settings, including overrides, as YAML that ``read_runfile`` reads as equal settings."""
    return dump(run.values)


def as_begun(run: RunFile, name: str) -> RunFile:
    """Return the settings for config.yaml of a run that was begun from this file under the name ``name``.

    ``resume`` is left out, because it applied to that start only.
    """
    values = {key: value for key, value in run.values.items() if key != "resume"}
    return RunFile(run.name, {**values, "run_config": {**values.get("run_config", {}), "name": name}}, run.origins)


def with_name(run: RunFile, name: str) -> RunFile:
    """Return the settings with ``name`` as the name of the run, unless they have a name already."""
    settings = {"name": name, **{k: v for k, v in run.values.get("run_config", {}).items() if v is not None}}
    return RunFile(run.name, {**run.values, "run_config": settings}, run.origins)


def unnamed_parts(values: Mapping[str, Any]) -> list[tuple[str, str]]:
    """List (key, description) of parts that config_yaml.py could only describe, because no import reaches them."""
    pipeline = values.get("pipeline")
    inner = pipeline.items() if isinstance(pipeline, dict) else ()
    metrics = values.get("metrics")
    of_metrics = metrics.items() if isinstance(metrics, dict) else ()
    parts = [
        *values.items(),
        *((f"pipeline.{key}", value) for key, value in inner),
        *((f"metrics.{key}", value) for key, value in of_metrics),
    ]
    return [(key, str(value["unnamed"])) for key, value in parts if isinstance(value, dict) and "unnamed" in value]


def is_target(value: object) -> bool:
    """Return True for a mapping that names a Python object: ``{target: "package.module:callable", args: {...}}``."""
    return isinstance(value, dict) and "target" in value


def refuse(run: RunFile, path: KeyPath, complaint: str) -> NoReturn:
    """Raise a ConfigError that begins with the file, the line and the key.

    The line is that of the innermost key on ``path`` that is in the file.
    """
    places = (run.origins.get(path[:end]) for end in range(len(path), 0, -1))
    place = next((f", {origin}" for origin in places if origin), "")
    raise ConfigError(f"{run.name}{place}: {'.'.join(map(str, path))}: {complaint}")


def refuse_unknown(run: RunFile, path: KeyPath, keys: Iterable[Any], known: Sequence[str]) -> None:
    """Raise ConfigError for the first key under ``path`` that is not known; the message has the nearest known keys."""
    for key in keys:
        if key not in known:
            close = _nearest(str(key).lower(), known)
            hint = f"did you mean {close}?" if close else f"possible are {', '.join(known) or 'none'}."
            refuse(run, (*path, str(key)), f"unknown; {hint}")


def _nearest(key: str, known: Sequence[str]) -> str:
    """Return the most similar known key, or "". Names that contain the key, or are contained in it, are preferred."""
    within = [name for name in known if min(len(name), len(key)) >= _TELLING and (name in key or key in name)]
    return next(iter(difflib.get_close_matches(key, within or known, n=1, cutoff=0.0 if within else 0.5)), "")


_TELLING = 5
"""Minimum length of a key that counts as contained in another one; shorter keys are contained by chance."""


def _override(values: dict[str, Any], origins: dict[KeyPath, str], override: str) -> None:
    dotted, equals, text = override.partition("=")
    path = tuple(dotted.strip().split("."))
    if not equals or not all(path):
        raise ConfigError(f"--set {override!r} is not of the form key.key=value, as in --set pipeline.schedule=kfkb.")
    inner = values
    for depth, key in enumerate(path[:-1], 1):
        below = inner.get(key)
        if below is None:
            below = inner[key] = {}
        if not isinstance(below, dict):
            raise ConfigError(f"--set {override!r}: {'.'.join(path[:depth])} is {below!r} and has no keys to set.")
        inner = below
    inner[path[-1]] = parse_value(text)
    if path[0] in _LENGTHS and len(path) == 1 and inner[path[-1]] is not None:
        for other in _LENGTHS:
            if other != path[0]:
                values.pop(other, None)
    origins[path] = "--set"


def _check(run: RunFile) -> None:
    for key in run.values:
        below = next((part for part, known in _BELOW.items() if key not in _CHECKS and key in known), "")
        if below:
            refuse(run, (key,), f"it is a field of {below}: write it there, as in {below}: {{{key}: ...}}.")
    refuse_unknown(run, (), run.values, tuple(_CHECKS))
    unnamed = unnamed_parts(run.values)
    if unnamed:
        parts = "; ".join(f"{key} was {words}" for key, words in unnamed)
        raise ConfigError(
            f"{run.name} cannot train yet: the program that started the run had parts that no file can name: {parts}"
            '. Write {target: "package.module:function"} for each of them.'
        )
    for key, value in run.values.items():
        _CHECKS[key](run, (key,), value)
    missing = [key for key in ("model", "optimizer", "train_data") if key not in run.values]
    if missing:
        raise ConfigError(f"{run.name} has no {missing[0]}: add {_EXAMPLES[missing[0]]}.")
    if set(_LENGTHS) <= set(run.values):
        refuse(run, ("num_epochs",), "num_steps is there too; keep one of them.")


_BELOW: Mapping[str, Iterable[str]] = {
    "pipeline": [field.name for field in fields(PipelineConfig)],
    "run_config": READ["RunConfig"],
    "scaling_config": READ["ScalingConfig"],
    "early_stopping": [field.name for field in fields(EarlyStopping)],
}

_EXAMPLES = {
    "model": 'model: {target: "package.module:Model", args: {...}}',
    "optimizer": 'optimizer: {target: "torch.optim:AdamW", args: {lr: 3e-4}}',
    "train_data": 'train_data: path/to/data.parquet, or train_data: {target: "package.module:dataset"}',
}


def _check_target(run: RunFile, path: KeyPath, value: Any) -> None:
    if not isinstance(value, dict):
        refuse(run, path, f'{value!r} is not of the form {{target: "package.module:callable", args: {{...}}}}.')
    refuse_unknown(run, path, value, ("target", "args"))
    target, args = value.get("target"), value.get("args")
    if not isinstance(target, str) or not _TARGET.match(target):
        refuse(run, (*path, "target"), f"{target!r} is not of the form package.module:callable.")
    if args is not None:
        _check_mapping(run, (*path, "args"), args)


def _check_data(run: RunFile, path: KeyPath, value: Any) -> None:
    if not isinstance(value, str):
        _check_target(run, path, value)


def _check_callbacks(run: RunFile, path: KeyPath, value: Any) -> None:
    if not isinstance(value, list):
        refuse(run, path, f'{value!r} is not a list; write [{{target: "raypipe.callbacks:TensorBoard"}}].')
    for one in value:
        _check_target(run, path, one)


def _check_mapping(run: RunFile, path: KeyPath, value: Any) -> None:
    if not isinstance(value, dict):
        refuse(run, path, f"{value!r} is not a mapping of names to values.")
    for key in value:
        if not isinstance(key, str):
            refuse(run, (*path, str(key)), f"the name {key!r} is not a string; put it in quotes.")


def _check_count(run: RunFile, path: KeyPath, value: Any) -> None:
    if type(value) is not int or value < 1:
        refuse(run, path, f"{value!r} is not possible; give an integer of at least 1.")


def _check_pipeline(run: RunFile, path: KeyPath, value: Any) -> None:
    _check_mapping(run, path, value)
    refuse_unknown(run, path, value, [field.name for field in fields(PipelineConfig)])
    settings = dict(value)
    if is_target(settings.get("loss_reduction")):
        _check_target(run, (*path, "loss_reduction"), settings["loss_reduction"])
        settings["loss_reduction"] = len  # stands in: the right function is imported when the trainer is made
    try:
        PipelineConfig(**settings)
    except ConfigError as error:
        # PipelineConfig begins with the field it complains of: group_size=5 is more than ...
        field = str(error).partition("=")[0].split(" ")[0]
        if field not in settings:
            refuse(run, path, str(error))
        refuse(run, (*path, field), str(error))


def _check_flag(run: RunFile, path: KeyPath, value: Any) -> None:
    if not isinstance(value, bool):
        refuse(run, path, f"{value!r} is not possible; give true or false, or leave it out.")


def _check_targets(run: RunFile, path: KeyPath, value: Any) -> None:
    _check_mapping(run, path, value)
    for name, target in value.items():
        _check_target(run, (*path, name), target)


def _check_early_stopping(run: RunFile, path: KeyPath, value: Any) -> None:
    _check_mapping(run, path, value)
    refuse_unknown(run, path, value, [field.name for field in fields(EarlyStopping)])
    try:
        EarlyStopping(**value)
    except ConfigError as error:
        refuse(run, path, str(error))


def _check_text(run: RunFile, path: KeyPath, value: Any) -> None:
    if not isinstance(value, str) or not value:
        refuse(run, path, f"{value!r} is not possible; give the name of a run, or a path.")


_CHECKS: Mapping[str, Callable[[RunFile, KeyPath, Any], None]] = {
    "model": _check_target,
    "loss_fn": _check_target,
    "optimizer": _check_target,
    "lr_scheduler": _check_target,
    "collate_fn": _check_target,
    "train_data": _check_data,
    "eval_data": _check_data,
    "pipeline": _check_pipeline,
    "scaling_config": _check_mapping,
    "run_config": _check_mapping,
    "num_steps": _check_count,
    "num_epochs": _check_count,
    "metrics": _check_targets,
    "early_stopping": _check_early_stopping,
    "resume": _check_flag,
    "init_from": _check_text,
    "callbacks": _check_callbacks,
}


def _absolute(run: RunFile) -> dict[str, Any]:
    values = dict(run.values)
    for key, path_of in (("train_data", absolute_path), ("eval_data", absolute_path), ("init_from", name_or_path)):
        if isinstance(values.get(key), str):
            values[key] = _refused_here(run, (key,), path_of, values[key])
    storage = values.get("run_config", {}).get("storage_path")
    if isinstance(storage, str):
        path = _refused_here(run, ("run_config", "storage_path"), partial(absolute_path, written=True), storage)
        values["run_config"] = {**values["run_config"], "storage_path": path}
    return values


def _refused_here(run: RunFile, path: KeyPath, path_of: Callable[[str], str], text: str) -> str:
    try:
        return path_of(text)
    except ConfigError as error:
        refuse(run, path, str(error))


def name_or_path(text: str) -> str:
    """Return a path as an absolute path, and the name of a run unchanged."""
    path = absolute_path(text)
    return path if "/" in text or text.startswith(("$", "~")) or Path(path).exists() else text
