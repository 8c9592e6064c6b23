"""Operations and structures that a user's module registers with torch: a worker knows them once it imports that module.

    ops.py      @torch.library.custom_op("mine::gate", ...)         the script imports it, no worker would
    stage       torch.ops.mine.gate.default(x)                      travels with "ops", which is imported on arrival

What the script itself registers, workers cannot import.
"""

from __future__ import annotations

import dataclasses
import importlib
import re
import sys
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS
from torch.utils import _pytree as pytree

from raypipe.errors import StageError

__all__ = ["Registered", "foreign_operations", "with_structure"]

_CALL = re.compile(r"\btorch\.ops\.(\w+)\.(\w+)")
_TORCHS = ("aten", "prims", "higher_order")
"""Most of torch's own. Of its other operations nothing is imported either, for a worker knows them on arrival."""
_SCRIPT = "__main__"


class Registered:
    """A module that registers an operation; where this arrives, it has been imported.

    Attributes:
        operation: as "mine::gate".
        module: empty where nobody knows.
    """

    def __init__(self, operation: str, module: str) -> None:
        self.operation, self.module = operation, module

    def __reduce__(self) -> Any:
        return _arrived, (self.operation, self.module)

    @property
    def by_script(self) -> bool:
        """Whether the process's own script registers it."""
        return self.module == _SCRIPT


def foreign_operations(source: str) -> dict[str, Registered]:
    """Those of a stage's source that are not torch's, by the text that calls them."""
    found = {}
    for namespace, name in sorted({call for call in _CALL.findall(source) if call[0] not in _TORCHS}):
        defined = OPDEFS.get(f"{namespace}::{name}")
        module = getattr(getattr(defined, "_init_fn", None), "__module__", "")
        if not module and namespace in sys.modules:  # as of torchvision
            module = namespace
        found[f"torch.ops.{namespace}.{name}"] = Registered(f"{namespace}::{name}", module)
    return found


def with_structure(leaves: list[Any], spec: pytree.TreeSpec) -> Any:
    """The leaves in a structure, whose dataclasses a worker may not know yet."""
    try:
        return pytree.tree_unflatten(leaves, spec)
    except KeyError as error:
        kind = error.args[0] if error.args else None
        if not (isinstance(kind, type) and dataclasses.is_dataclass(kind)):
            raise
        torch.export.register_dataclass(kind)
        return with_structure(leaves, spec)


def _arrived(operation: str, module: str) -> Registered:
    namespace, name = operation.split("::")
    if hasattr(getattr(torch.ops, namespace), name):
        return Registered(operation, module)
    try:
        importlib.import_module(module or namespace)
    except ImportError as error:
        raise StageError(
            f"The model calls torch.ops.{namespace}.{name}, which this worker does not know: the module "
            f"{module or namespace!r} that registers it cannot be imported here ({error}). Ship it to all nodes, as "
            "with ray.init(runtime_env={'working_dir': '.'})."
        ) from None
    return Registered(operation, module)
