"""raypipe: pipelines of Ray actors that train large networks, adapt to the network and survive failures.

Public names load on first use, so that ``import raypipe.planner`` needs neither torch nor ray.
"""

from __future__ import annotations

import importlib
from typing import Any

_EXPORTS = {
    "Callback": "raypipe.callbacks",
    "EarlyStopping": "raypipe.config.early_stopping",
    "PipelineConfig": "raypipe.config.pipeline",
    "PipelineTrainer": "raypipe.api.trainer",
    "Result": "raypipe.api.result",
    "RunHandle": "raypipe.api.handle",
    "attach": "raypipe.api.handle",
    "load_state_dict": "raypipe.engine.io.checkpoint",
}

__all__ = [
    "Callback",
    "EarlyStopping",
    "PipelineConfig",
    "PipelineTrainer",
    "Result",
    "RunHandle",
    "__version__",
    "attach",
    "load_state_dict",
]


_MODULES = ("callbacks", "data", "hf", "testing", "tune")
"""Submodules that are imported when they are first used as attributes, such as ``raypipe.data``."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("raypipe.version").version()
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"raypipe.{name}")
    raise AttributeError(f"module 'raypipe' has no attribute {name!r}")
