"""Fingerprint of a module or a function: equal fingerprints mean equal work on equal shapes.

    Conv(nn.Module)      names of its classes, and the source of those outside of torch; training mode; hooks
      weight [8, 3] ...  parameters and buffers: shapes, dtypes, requires_grad
      stride=2           attributes, private ones too; containers and objects in them to some depth
    lambda x: f(x, n)    its byte code, defaults, and the variables that it closes over

The contents of tensors do not count. Fingerprints are equal from process to process, so that profiles can be cached by
them. Left out are globals, objects that are nested deeper, and the attributes of objects of some libraries.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import inspect
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from raypipe.engine.stage.module_copy import made_by_hooks

_DEEPEST = 5
_MOST_ITEMS = 1024
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, range, slice)
_OPAQUE = ("_thread", "threading", "logging", "random", "io", "pandas", "pyarrow", "datasets", "ray")
"""Packages whose objects differ from process to process, or are data: only the class of such an object counts."""
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_MODULES = {*vars(nn.Module()), *_HOOKS} - {"training"}


def fingerprint(thing: Any) -> str:
    """Compute the fingerprint of a module, a function or an object that contains such, as hexadecimal digits."""
    return hashlib.sha256("\n".join(_parts(thing, _DEEPEST, set())).encode()).hexdigest()


def _parts(value: Any, depth: int, seen: set[int]) -> Iterator[str]:
    """Yield the texts from which a fingerprint is computed.

    Args:
        depth: number of levels of containers and objects that are still read; modules in modules do not count.
        seen: ids of the enclosing objects, which are not read again.
    """
    if isinstance(value, (*_PLAIN, enum.Enum)):
        yield repr(value)
    elif isinstance(value, torch.Tensor):
        yield f"tensor {list(value.shape)} {value.dtype} {value.requires_grad}"
    elif isinstance(value, np.ndarray):
        yield f"array {value.shape} {value.dtype}"
    elif isinstance(value, types.FunctionType):
        yield f"function {value.__module__}.{value.__qualname__}"
        yield from _code(value.__code__)
        if depth and id(value) not in seen:
            cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
            yield from _all((value.__defaults__, value.__kwdefaults__, cells), depth, seen | {id(value)})
    elif isinstance(value, types.MethodType | functools.partial):
        inner = (value.func, value.args, value.keywords) if isinstance(value, functools.partial) else (value.__func__,)
        yield from _all((type(value).__name__, *inner, getattr(value, "__self__", None)), depth, seen)
    elif isinstance(value, type | types.ModuleType | types.BuiltinFunctionType):
        yield f"{type(value).__name__} {getattr(value, '__module__', '')}.{value.__name__}"
    else:
        yield from _class(type(value))
        if not depth or id(value) in seen:
            return
        seen = seen | {id(value)}
        if isinstance(value, nn.Module):
            yield from _module(value, depth, seen)
        elif isinstance(value, Mapping):
            yield from _all([x for pair in value.items() for x in pair], depth, seen)
        elif isinstance(value, list | tuple):
            yield from _all(value, depth, seen)
        elif isinstance(value, set | frozenset):
            yield from sorted(repr(x) for x in value if isinstance(x, _PLAIN))
        elif _package(type(value)) not in _OPAQUE:
            yield from _all(sorted(getattr(value, "__dict__", {}).items()), depth, seen)


def _all(values: Any, depth: int, seen: set[int]) -> Iterator[str]:
    yield f"{len(values)} items"
    for value in values[:_MOST_ITEMS]:
        yield from _parts(value, depth - 1, seen)


def _module(module: nn.Module, depth: int, seen: set[int]) -> Iterator[str]:
    skipped = made_by_hooks(module)
    own = {name: value for name, value in vars(module).items() if name not in _OF_MODULES and name not in skipped}
    hooks = [hook for name in _HOOKS for hook in vars(module).get(name, {}).values()]
    for held in (own, module._parameters, module._buffers, dict(enumerate(hooks))):
        for name, value in sorted(held.items()):
            yield str(name)
            yield from _parts(value, depth - 1, seen)
    for name, child in module._modules.items():
        yield f"child {name}"
        yield from _parts(child, depth, seen)


def _class(kind: type) -> Iterator[str]:
    for base in kind.__mro__:
        yield f"{base.__module__}.{base.__qualname__}"
        if _package(base) not in ("torch", "builtins", "raypipe", *_OPAQUE):
            yield _source(base)


@functools.lru_cache(maxsize=1024)
def _source(kind: type) -> str:
    try:
        return inspect.getsource(kind)
    except (OSError, TypeError):  # of an interactive session
        return "".join(text for x in vars(kind).values() if inspect.isfunction(x) for text in _code(x.__code__))


def _code(code: types.CodeType) -> Iterator[str]:
    yield f"{code.co_code.hex()} {code.co_names}"
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code(constant)
        elif isinstance(constant, _PLAIN):
            yield repr(constant)


def _package(kind: type) -> str:
    return kind.__module__.partition(".")[0]
