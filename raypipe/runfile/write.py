"""config.yaml of a run that was started from Python: a run file, as far as its parts can be named.

    optimizer=partial(AdamW, lr=3e-4)    optimizer: {target: "torch.optim.adamw:AdamW", args: {lr: 0.0003}}
    loss_fn=lambda output, y: ...        loss_fn: {unnamed: "a lambda (train.py, line 12)"}

What can be imported under its name trains again; what cannot is told in words, and ``raypipe train`` refuses the file
with all of them.
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
from raypipe.config.pipeline import PipelineConfig
from raypipe.config.ray import worker_range
from raypipe.runfile.read import absolute_path, name_or_path, unnamed_parts
from raypipe.runfile.yaml_text import dump

__all__ = ["describe"]

_SCALING_FIELDS = ("num_workers", "use_gpu", "resources_per_worker", "accelerator_type")
_GROWING_FIELDS = ("elastic_resize_monitor_interval_s",)
_KEEPING_FIELDS = ("num_to_keep", "checkpoint_score_attribute", "checkpoint_score_order")
_DATA = ("train_data", "eval_data")
_PLAIN = (str, int, float, bool, type(None))


def describe(
    pipeline: PipelineConfig, scaling: Any, run: Any, functions: Mapping[str, Any], name: str, num_steps: int
) -> str:
    """The text of a run file.

    Args:
        scaling, run: ray.train's ScalingConfig and RunConfig, or None.
        functions: model, loss_fn, optimizer, lr_scheduler, train_data, eval_data, init_from, metrics, early_stopping
            and callbacks as they were given.
        name: of the run.
    """
    found: dict[str, Any] = {part: _part(part, value) for part, value in functions.items() if value is not None}
    settings = {f.name: getattr(pipeline, f.name) for f in dataclasses.fields(pipeline)}
    found["pipeline"] = {n: _target(v) if callable(v) else _plain(v) for n, v in settings.items()}
    if scaling is not None:
        grows = () if worker_range(scaling) is None else _GROWING_FIELDS
        found["scaling_config"] = _fields(scaling, _SCALING_FIELDS + grows)
    found["run_config"] = _run_config(run, name)
    found["num_steps"] = num_steps
    unnamed = [f"#   {part}: {words}\n" for part, words in unnamed_parts(found)]
    notes = [f"# Written by raypipe {raypipe.__version__} when the run began.\n"]
    if unnamed:
        notes += ["# What follows has no name to import it by; raypipe train takes targets in its place:\n", *unnamed]
    return "".join(notes) + dump(found)


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


def _callbacks(given: Sequence[Any]) -> Any:
    """A target for each, with those of its fields that say something."""
    found = []
    for callback in given:
        target = _target(type(callback))
        if "target" not in target or not dataclasses.is_dataclass(callback):
            return {"unnamed": f"a {type(callback).__name__} that the program made; give a dataclass of a module"}
        fields = [(f.name, getattr(callback, f.name), f.default) for f in dataclasses.fields(callback) if f.init]
        said = {name: value for name, value, default in fields if value != default}
        if not all(map(_is_plain, said.values())):
            return {"unnamed": f"a {type(callback).__name__} with arguments that YAML cannot say"}
        found.append({**target, "args": _plain(said)} if said else target)
    return found


def _target(value: Any) -> dict[str, Any]:
    """A target with its args, or the words for why there is none."""
    if isinstance(value, functools.partial):
        inner = _target(value.func)
        if value.args or "target" not in inner or not all(map(_is_plain, value.keywords.values())):
            return inner if "target" not in inner else {"unnamed": "a partial with arguments that YAML cannot say"}
        return {"target": inner["target"], "args": {**inner.get("args", {}), **_plain(value.keywords)}}
    module, names = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not module or not names:
        return _made(value)
    if module == "__main__":
        spec = getattr(sys.modules["__main__"], "__spec__", None)
        if spec is None:
            return {"unnamed": f"{_kind(value)} of the program itself{_where(value)}; put it into a module"}
        module = spec.name
    found: Any = sys.modules.get(module) or sys.modules["__main__"]
    for name in names.split("."):
        found = getattr(found, name, None)
    if found is not value:
        return {"unnamed": f"{_kind(value)}{_where(value)}; put it into a module as a function"}
    return {"target": f"{module}:{names}"}


def _is_made_by_default(value: torch.nn.Module) -> bool:
    """Whether its class without arguments makes the same, as nn.CrossEntropyLoss() does."""
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
    found: dict[str, Any] = {"name": name}
    if getattr(run, "storage_filesystem", None) is not None:
        found["unnamed"] = "storage_filesystem is an object of the program; give a URI as storage_path"
    if isinstance(storage := getattr(run, "storage_path", None), str | os.PathLike):
        found["storage_path"] = absolute_path(os.fspath(storage)) if "unnamed" not in found else os.fspath(storage)
    if kept := _fields(getattr(run, "checkpoint_config", None), _KEEPING_FIELDS):
        found["checkpoint_config"] = kept
    if survived := getattr(getattr(run, "failure_config", None), "max_failures", 0):
        found["failure_config"] = {"max_failures": survived}
    return found


def _fields(given: Any, names: tuple[str, ...]) -> dict[str, Any]:
    found = {name: getattr(given, name, None) for name in names}
    return {name: _plain(value) for name, value in found.items() if value is not None}


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
