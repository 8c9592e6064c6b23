"""raypipe: pipelines of Ray actors that train large networks, adapt to the network and survive failures.

Public names load on first use, so that ``import raypipe.planner`` needs neither torch nor ray.
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_EXPORTS = {
    "Callback": "raypipe.callbacks",
    "EarlyStopping": "raypipe.config.early_stopping",
    "PipelineConfig": "raypipe.config.pipeline",
    "PipelineTrainer": "raypipe.api.trainer",
    "Result": "raypipe.api.result",
    "RunHandle": "raypipe.api.handle",
    "attach": "raypipe.api.handle",
    "load_state_dict": "raypipe.engine.checkpoint",
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


_MODULES = ("callbacks", "data", "testing", "tune")
"""Found as ``raypipe.data`` and so on, without an import of their own."""


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        return getattr(importlib.import_module(_EXPORTS[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"raypipe.{name}")
    raise AttributeError(f"module 'raypipe' has no attribute {name!r}")
