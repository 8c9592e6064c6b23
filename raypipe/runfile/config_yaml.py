"""config.yaml of a run that was started from Python: a run file, as far as its parts can be named.

    optimizer=partial(AdamW, lr=3e-4)    optimizer: {target: "torch.optim.adamw:AdamW", args: {lr: 0.0003}}
    loss_fn=lambda output, y: ...        loss_fn: {unnamed: "a lambda (train.py, line 12)"}

Parts that can be imported by name are targets. Others are only described; ``raypipe train`` refuses a file with such a
part, and shows the description.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import raypipe
from raypipe.config.paths import absolute_path
from raypipe.config.pipeline import PipelineConfig
from raypipe.config.ray import worker_range
from raypipe.runfile.run_file import name_or_path, unnamed_parts
from raypipe.runfile.yaml_text import dump

_SCALING_FIELDS = ("num_workers", "use_gpu", "resources_per_worker", "accelerator_type")
_GROWING_FIELDS = ("elastic_resize_monitor_interval_s",)
_KEEPING_FIELDS = ("num_to_keep", "checkpoint_score_attribute", "checkpoint_score_order")
_DATA = ("train_data", "eval_data")
_PLAIN = (str, int, float, bool, type(None))


def describe(
    pipeline: PipelineConfig, scaling: Any, run: Any, functions: Mapping[str, Any], name: str, num_steps: int
) -> str:
    """Return the text of a run file for a run that was started from Python.

    Args:
        scaling, run: ray.train's ScalingConfig and RunConfig, or None.
        functions: the other arguments of the trainer, by name.
        name: name of the run.
        num_steps: length of the run.
    """
    content: dict[str, Any] = {part: _part(part, value) for part, value in functions.items() if value is not None}
    settings = {f.name: getattr(pipeline, f.name) for f in dataclasses.fields(pipeline)}
    content["pipeline"] = {n: _target(v) if callable(v) else _plain(v) for n, v in settings.items()}
    if scaling is not None:
        grows = () if worker_range(scaling) is None else _GROWING_FIELDS
        content["scaling_config"] = _fields(scaling, _SCALING_FIELDS + grows)
    content["run_config"] = _run_config(run, name)
    content["num_steps"] = num_steps
    unnamed = [f"#   {part}: {words}\n" for part, words in unnamed_parts(content)]
    notes = [f"# Written by raypipe {raypipe.__version__} when the run began.\n"]
    if unnamed:
        notes += ["# What follows has no name to import it by; raypipe train takes targets in its place:\n", *unnamed]
    return "".join(notes) + dump(content)


def _part(part: str, value: Any) -> Any:
    if part == "callbacks":
        return _callbacks(value)
    if part == "init_from":
        return name_or_path(value)
    if part == "metrics":
        return {name: _part("loss_fn", metric) for name, metric in value.items()}
    if part == "early_stopping":
        return dataclasses.asdict(value)
    if part in _DATA:
        if isinstance(value, str | os.PathLike):
            return absolute_path(os.fspath(value))
        return {"unnamed": f"a {type(value).__name__} that the program made; give a function that makes it, or a path"}
    if part == "model" and isinstance(value, torch.nn.Module):
        return {"unnamed": f"a {type(value).__name__} that the program made; give a function that makes it"}
    if isinstance(value, torch.nn.Module):
        return _target(type(value)) if _is_made_by_default(value) else _made(value)
    return _target(value)


def _callbacks(callbacks: Sequence[Any]) -> Any:
    """Return a target for each callback, with the fields that differ from their defaults.

    If a callback cannot be written as a target, return one {"unnamed": description} instead of the list.
    """
    targets: list[dict[str, Any]] = []
    for callback in callbacks:
        target = _target(type(callback))
        if "target" not in target or not dataclasses.is_dataclass(callback):
            return {"unnamed": f"a {type(callback).__name__} that the program made; give a dataclass of a module"}
        fields = [(f.name, getattr(callback, f.name), f.default) for f in dataclasses.fields(callback) if f.init]
        args = {name: value for name, value, default in fields if value != default}
        if not all(map(_is_plain, args.values())):
            return {"unnamed": f"a {type(callback).__name__} with arguments that YAML cannot hold"}
        targets.append({**target, "args": _plain(args)} if args else target)
    return targets


def _target(value: Any) -> dict[str, Any]:
    """Return {"target", "args"} of an object that can be imported by name, else {"unnamed": description}."""
    if isinstance(value, functools.partial):
        inner = _target(value.func)
        if value.args or "target" not in inner or not all(map(_is_plain, value.keywords.values())):
            return inner if "target" not in inner else {"unnamed": "a partial with arguments that YAML cannot hold"}
        return {"target": inner["target"], "args": {**inner.get("args", {}), **_plain(value.keywords)}}
    module, names = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not module or not names:
        return _made(value)
    if module == "__main__":
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        if spec is None:
            return {"unnamed": f"{_kind(value)} of the program itself{_where(value)}; put it into a module"}
        module = spec.name
    resolved: Any = sys.modules.get(module) or sys.modules["__main__"]
    for name in names.split("."):
        resolved = getattr(resolved, name, None)
    if resolved is not value:
        return {"unnamed": f"{_kind(value)}{_where(value)}; put it into a module as a function"}
    return {"target": f"{module}:{names}"}


def _is_made_by_default(value: torch.nn.Module) -> bool:
    """Return True if calling the class without arguments makes an equal object, as for nn.CrossEntropyLoss()."""
    try:
        return repr(vars(type(value)())) == repr(vars(value))
    except Exception:  # noqa: BLE001  (it needs arguments)
        return False


def _made(value: Any) -> dict[str, str]:
    return {"unnamed": f"a {type(value).__name__} that the program made; give a function that does the same"}


def _kind(value: Any) -> str:
    if getattr(value, "__name__", "") == "<lambda>":
        return "a lambda"
    return f"the {'class' if isinstance(value, type) else 'function'} {value.__qualname__.replace('.<locals>', '')}"


def _where(value: Any) -> str:
    code = getattr(value, "__code__", None)
    return f" ({Path(code.co_filename).name}, line {code.co_firstlineno})" if code else ""


def _run_config(run: Any, name: str) -> dict[str, Any]:
    content: dict[str, Any] = {"name": name}
    if getattr(run, "storage_filesystem", None) is not None:
        content["unnamed"] = "storage_filesystem is an object of the program; give a URI as storage_path"
    if isinstance(storage := getattr(run, "storage_path", None), str | os.PathLike):
        text = os.fspath(storage)
        content["storage_path"] = absolute_path(text, written=True) if "unnamed" not in content else text
    if kept := _fields(getattr(run, "checkpoint_config", None), _KEEPING_FIELDS):
        content["checkpoint_config"] = kept
    if survived := getattr(getattr(run, "failure_config", None), "max_failures", 0):
        content["failure_config"] = {"max_failures": survived}
    return content


def _fields(settings: Any, names: tuple[str, ...]) -> dict[str, Any]:
    values = {name: getattr(settings, name, None) for name in names}
    return {name: _plain(value) for name, value in values.items() if value is not None}


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    if isinstance(value, Mapping):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    return isinstance(value, _PLAIN)


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value
