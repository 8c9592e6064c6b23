"""What decides how long a module or a function takes, in words: equal words mean the same work on the same shapes.

    Conv(nn.Module)      class: its methods' code, and the classes above it
      stride=2           attributes, private ones too, and what they hold
      weight [8, 3] ...  parameters and buffers: names, shapes, types, whether trained
    lambda x: f(x, n)    its code, defaults, what it closes over, and the globals that it names

Contents of tensors and states of generators do not count. Words are equal from process to process, so that a profile
can be kept by them. Code of libraries counts by its name and, for a module outside of torch, by the source of its
class. What this cannot see: the body of an operation that is registered with torch, and state behind objects without
``__dict__`` or ``__slots__``.
"""

from __future__ import annotations

import enum
import functools
import inspect
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from raypipe.engine.copies import made_by_hooks

__all__ = ["described"]

_DEEPEST = 12
_MOST_ITEMS = 4096
"""Of one container; its length always counts."""
_MOST_WORDS = 50_000
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, slice)
_LIBRARIES = (
    "torch", "numpy", "transformers", "datasets", "pyarrow", "pandas", "raypipe", "builtins", "collections",
    "functools", "typing", "logging",
)  # fmt: skip
_STATELESS = (
    "builtins",
    "_thread",
    "threading",
    "logging",
    "random",
    "io",
    "numpy",
    "pandas",
    "pyarrow",
    "datasets",
    "ray",
)
"""Objects of these count by their class: what they hold differs from process to process, or is data."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_TORCH = frozenset(vars(nn.Module()))
"""Attributes that every module has; those that matter are looked at by name."""


def described(thing: Any) -> str:
    """See the module."""
    walk = _Walk()
    walk.value(thing, 0)
    return "\n".join(walk.words)


class _Walk:
    def __init__(self) -> None:
        self.words: list[str] = []
        self._seen: dict[int, int] = {}
        self._keep: list[Any] = []  # ids stay unique while these live

    def value(self, value: Any, depth: int) -> None:
        if isinstance(value, _PLAIN):
            self._say(type(value).__name__, repr(value))
        elif isinstance(value, enum.Enum):
            self._say(str(value))
        elif isinstance(value, torch.Tensor):
            self._say("tensor", str(list(value.shape)), str(value.dtype), str(value.requires_grad))
        elif isinstance(value, np.ndarray):
            self._say("array", str(value.shape), str(value.dtype))
        elif depth >= _DEEPEST or len(self.words) >= _MOST_WORDS:
            self._say(_name(type(value)))
        elif id(value) in self._seen:
            self._say("again", str(self._seen[id(value)]))
        else:
            self._seen[id(value)] = len(self._seen)
            self._keep.append(value)
            self._compound(value, depth + 1)

    def _compound(self, value: Any, depth: int) -> None:
        if isinstance(value, nn.Module):
            self._module(value, depth)
        elif isinstance(value, Mapping):
            self._items("mapping", (part for pair in value.items() for part in pair), len(value), depth)
        elif isinstance(value, list | tuple):
            self._items(type(value).__name__, iter(value), len(value), depth)
        elif isinstance(value, set | frozenset):
            self._say("set", str(len(value)), *sorted(repr(x) for x in value if isinstance(x, _PLAIN)))
        elif isinstance(value, functools.partial):
            self._items("partial", iter((value.func, value.args, value.keywords)), 3, depth)
        elif isinstance(value, types.MethodType):
            self._items("method", iter((value.__self__, value.__func__)), 2, depth)
        elif isinstance(value, types.FunctionType):
            self._function(value, depth)
        elif isinstance(value, types.CodeType):
            self._code(value, depth)
        elif isinstance(value, type):
            self._class(value, depth)
        elif isinstance(value, staticmethod | classmethod):
            self.value(value.__func__, depth)
        elif isinstance(value, property):
            self._items("property", iter((value.fget, value.fset)), 2, depth)
        elif hasattr(type(value), "cache_info"):
            self.value(getattr(value, "__wrapped__", None), depth)
        elif isinstance(value, types.ModuleType | types.BuiltinFunctionType) or not _has_state(value):
            self._say(getattr(value, "__qualname__", getattr(value, "__name__", _name(type(value)))))
        else:
            self._class(type(value), depth)
            self._attributes(_state(value), depth)

    def _module(self, module: nn.Module, depth: int) -> None:
        self._class(type(module), depth)
        made = made_by_hooks(module)
        own = {n: v for n, v in vars(module).items() if n not in _OF_TORCH and n not in made}
        self._attributes({"training": module.training, **own}, depth)
        for tensors in (module._parameters, module._buffers):
            self._attributes(tensors, depth)
        for name in _HOOKS:  # by a number that differs from process to process
            for hook in vars(module).get(name, {}).values():
                self._say(name)
                self.value(hook, depth)
        for name, child in module._modules.items():
            self._say("child", name)
            self.value(child, depth - 1)  # however deep a model is

    def _class(self, cls: type, depth: int) -> None:
        self._say("class", *map(_name, cls.__mro__))
        for base in cls.__mro__:
            root = _root(base)
            if root in ("torch", "builtins") or root in _LIBRARIES or id(base) in self._seen:
                if root not in ("torch", "builtins") and issubclass(base, nn.Module):
                    self._say(_source(base))  # type: ignore[arg-type]
                continue
            self._seen[id(base)] = len(self._seen)
            self._keep.append(base)
            for name, value in vars(base).items():
                if name in ("__call__", "__init__") or not (name.startswith("__") or _is_slot(value)):
                    self._say(name)
                    self.value(value, depth)

    def _function(self, function: types.FunctionType, depth: int) -> None:
        if _root(function) in _LIBRARIES:
            self._say("function", str(function.__module__), function.__qualname__)
            return
        code = function.__code__
        self._code(code, depth)
        self._items("defaults", iter((function.__defaults__, function.__kwdefaults__)), 2, depth)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._say("closure", name)
            try:
                self.value(cell.cell_contents, depth)
            except ValueError:  # not filled yet
                continue
        for name in dict.fromkeys(_names(code)):
            if name in function.__globals__:
                self._say("global", name)
                self.value(function.__globals__[name], depth)
        if vars(function):
            self._attributes(vars(function), depth)

    def _code(self, code: types.CodeType, depth: int) -> None:
        self._say("code", code.co_code.hex(), repr((code.co_names, code.co_varnames)))
        for constant in code.co_consts:
            self.value(constant, depth)

    def _items(self, kind: str, items: Iterator[Any], length: int, depth: int) -> None:
        self._say(kind, str(length))
        for number, item in enumerate(items):
            if number == _MOST_ITEMS:
                return
            self.value(item, depth)

    def _attributes(self, held: Mapping[str, Any], depth: int) -> None:
        for name in sorted(held, key=str):
            self._say("attribute", str(name))
            self.value(held[name], depth)

    def _say(self, *words: str) -> None:
        self.words.append(" ".join(words))


@functools.lru_cache(maxsize=1024)
def _source(cls: type) -> str:
    """Source of a class, its name where there is none to read."""
    try:
        return inspect.getsource(cls)
    except (OSError, TypeError):
        return _name(cls)


def _has_state(value: Any) -> bool:
    return _root(type(value)) not in _STATELESS and bool(_state(value))


def _state(value: Any) -> dict[str, Any]:
    held = getattr(value, "__dict__", {})
    slots = [name for cls in type(value).__mro__ for name in _slots(cls)]
    return {**(held if isinstance(held, dict) else {}), **{n: getattr(value, n) for n in slots if hasattr(value, n)}}


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _is_slot(value: Any) -> bool:
    return isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType)


def _names(code: types.CodeType) -> Iterator[str]:
    """Names that a function reads, those of the functions within it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _root(thing: Any) -> str:
    return (getattr(thing, "__module__", None) or "builtins").split(".")[0]


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
