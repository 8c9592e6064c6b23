"""config.yaml of a run that was started from Python: its settings, and where its functions are defined."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import raypipe
from raypipe.config import PipelineConfig
from raypipe.yaml_text import dump

__all__ = ["describe"]

_RUN_FIELDS = ("name", "storage_path")
_SCALING_FIELDS = ("num_workers", "use_gpu", "resources_per_worker")


def describe(
    pipeline: PipelineConfig, scaling: Any, run: Any, functions: Mapping[str, Any], name: str, num_steps: int
) -> str:
    """YAML for people: what differs between two runs. A function that has no name of its own cannot be found again.

    Args:
        functions: model, loss_fn, optimizer, lr_scheduler, train_data and eval_data as they were given.
    """
    found: dict[str, Any] = {"raypipe_version": raypipe.__version__, "num_steps": num_steps}
    found |= {name: _where(value) for name, value in functions.items() if value is not None}
    found["pipeline"] = {f.name: _plain(getattr(pipeline, f.name)) for f in dataclasses.fields(pipeline)}
    found["scaling_config"] = {n: _plain(getattr(scaling, n, None)) for n in _SCALING_FIELDS if scaling is not None}
    found["run_config"] = {n: _plain(getattr(run, n, None)) for n in _RUN_FIELDS if run is not None}
    found["run_config"]["name"] = name
    return dump(found)


def _where(value: Any) -> Any:
    if isinstance(value, str):
        return value
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}:{named.__qualname__}"


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value if isinstance(value, str | int | float | bool | None) else _where(value)
