"""What cannot travel to another process, found by looking, so that it is named before any process is started.

    loss_fn  ->  loss_fn.lock  ->  _thread.lock        refused: "loss_fn.lock is a _thread.lock"

Looked at is what would be sent by value: attributes, closures, and the globals of functions that cannot be imported by
name on the other side. What can be imported is sent as its name. A large container is looked at in its first items.
"""

from __future__ import annotations

import copyreg
import functools
import io
import logging
import sys
import types
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["unshippable"]

MOST_ITEMS, MOST_OBJECTS, DEEPEST = 50, 20_000, 40

_TRAVELS = (
    type(None), bool, int, float, complex, str, bytes, bytearray, torch.Tensor, torch.dtype, torch.device,
    types.ModuleType, types.BuiltinFunctionType, types.CodeType, types.MappingProxyType, property, classmethod,
    staticmethod, memoryview, logging.Logger, weakref.WeakSet,
)  # fmt: skip
"""What every pickler of functions takes, or what would take too long to look at."""


def unshippable(name: str, value: Any) -> str | None:
    """The first part of a value that cannot be sent to another process, as a sentence with the way to it.

    Args:
        name: of the argument, which begins the sentence.
    """
    seen: set[int] = set()
    stack: list[tuple[str, Any, int]] = [(name, value, 0)]
    while stack and len(seen) < MOST_OBJECTS:
        path, found, depth = stack.pop()
        if id(found) in seen or isinstance(found, _TRAVELS) or depth > DEEPEST or _copies_itself(found):
            continue
        seen.add(id(found))
        try:
            parts = list(_parts(found))
        except (TypeError, NotImplementedError, RuntimeError):
            kind = type(found)
            module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
            if path == name:
                return f"{name} is a {module}{kind.__name__}, which cannot travel to another process."
            return f"{name} holds a {module}{kind.__name__} ({path}), which cannot travel to another process."
        stack += [(path + suffix, part, depth + 1) for suffix, part in reversed(parts)]
    return None


def _copies_itself(value: Any) -> bool:
    """Arrays and tables travel, and asking them how would copy them; so does the text of a file open for reading."""
    if isinstance(value, io.TextIOWrapper):
        return not value.closed and not value.writable()
    return type(value).__module__.partition(".")[0] in ("numpy", "pyarrow", "pandas")


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    """What is sent with a value, each with its place in it.

    Raises:
        TypeError: it cannot be sent at all.
    """
    if isinstance(value, types.FunctionType):
        if not _importable(value):
            yield from _parts_of_function(value)
    elif isinstance(value, type):
        if not _importable(value):
            for name, part in vars(value).items():
                if not name.startswith("__"):
                    yield f".{name}", part
    elif isinstance(value, types.MethodType):
        yield "", value.__self__
        yield "", value.__func__
    elif isinstance(value, functools.partial):
        yield "", value.func
        yield from _items(value.args)
        yield from _items(value.keywords)
    elif isinstance(value, types.CellType):
        yield "", value.cell_contents
    elif isinstance(value, list | tuple | set | frozenset | Mapping):
        yield from _items(value)
    else:
        yield from _parts_of_object(value)


def _items(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        pairs = [(f"[{key!r}]", part) for key, part in _first(value.items())]
    else:
        pairs = [(f"[{at}]", part) for at, part in enumerate(_first(value))]
    yield from pairs


def _first(values: Any) -> list[Any]:
    return [value for _, value in zip(range(MOST_ITEMS), values, strict=False)]


def _parts_of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    names = function.__code__.co_freevars
    for name, cell in zip(names, function.__closure__ or (), strict=True):
        try:
            held = cell.cell_contents
        except ValueError:  # not filled yet
            continue
        yield f": {name}", held
    yield from _items(function.__defaults__ or ())
    yield from _items(function.__kwdefaults__ or {})
    for name in _globals_of(function.__code__):
        if name in function.__globals__:
            yield f": {name}", function.__globals__[name]


def _globals_of(code: types.CodeType) -> list[str]:
    inner = [name for const in code.co_consts if isinstance(const, types.CodeType) for name in _globals_of(const)]
    return [*code.co_names, *inner]


def _parts_of_object(value: Any) -> Iterator[tuple[str, Any]]:
    reduce = copyreg.dispatch_table.get(type(value))
    reduced = reduce(value) if reduce else value.__reduce_ex__(4)
    yield "", type(value)
    if isinstance(reduced, str):
        return
    _make, arguments, state, *streams = (*reduced, None, None, None)[:5]
    for part in arguments or ():
        yield "", part
    for held in state if isinstance(state, tuple) else (state,):
        if isinstance(held, Mapping):
            for name, part in _first(held.items()):
                yield f".{name}", part
        elif held is not None:
            yield "", held
    for stream in streams:
        yield from _items(_first(stream or ()))


def _importable(value: Any) -> bool:
    """Whether the other side finds the very same thing under its name; what was typed in by hand is sent itself."""
    module = getattr(value, "__module__", None)
    if module is None or module == "__main__" or "<locals>" in value.__qualname__:
        return False
    found: Any = sys.modules.get(module)
    if found is None:
        return False
    for name in value.__qualname__.split("."):
        found = getattr(found, name, None)
    return found is value
