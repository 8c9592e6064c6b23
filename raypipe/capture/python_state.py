"""Snapshots of the Python state that a model or a loss keeps between calls, to compare and to restore it.

Attributes of modules and other objects, lists and dicts, closures, globals that functions name, generators, caches and
hooks are read before and after a call. A value that the second call changes again is state, which stages would not
share. A value that only the first call changes is a cache, which is allowed.

    before --call--> after one --call--> after two        after one != after two: state

Not detected: state of objects without a ``__dict__`` or ``__slots__``, state in files or other processes, and state
that changes only at a later call.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import random
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from raypipe.engine.stage.module_copy import made_by_hooks
from raypipe.errors import CaptureError

_MOST_VALUES = 50_000
_MOST_ITEMS = 256
"""Number of items of one container that are read; its length is always read."""
_MOST_BYTES = 1 << 28
"""Total size of tensors and arrays that are compared by content. Beyond it a tensor is compared by its shape, dtype and
version counter, an array by its shape and dtype."""
_DEEPEST = 8
_LIBRARIES = (
    "torch", "numpy", "transformers", "accelerate", "trl", "datasets", "pyarrow", "pandas", "raypipe", "builtins",
    "collections", "functools", "typing", "logging", "threading", "tqdm", "rich",
)  # fmt: skip
"""Packages whose classes and functions are skipped: some of their state changes by the clock."""
CACHE = "the cache of "
"""Beginning of the path of a functools cache, whose value is its number of entries."""
_IN_WORDS = (torch.dtype, torch.device, torch.Size, torch.SymInt, torch.SymFloat, torch.SymBool, range, slice)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OWN_DICTS = ("_parameters", "_buffers", "_modules")
_GENERATORS: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.RandomState: (lambda own: own.get_state(legacy=False), np.random.RandomState.set_state),
    np.random.Generator: (
        lambda own: own.bit_generator.state,
        lambda own, state: setattr(own.bit_generator, "state", state),
    ),
}
"""Types of generators, with functions that read and set their state."""


@dataclass(slots=True)
class Memory:
    """Python state at one moment.

    Attributes:
        values: path, such as "model.layers[0].count" -> value that can be compared.
        undo: functions that restore the attributes and containers that were read.
    """

    values: dict[str, Any] = field(default_factory=dict)
    undo: list[Callable[[], object]] = field(default_factory=list)

    def changes(self, later: Memory) -> Iterator[tuple[str, Any, Any]]:
        """Yield (path, value here, value in ``later``) for every value that differs, in the order of reading."""
        for path in dict.fromkeys((*self.values, *later.values)):
            here, there = self.values.get(path, _MISSING), later.values.get(path, _MISSING)
            if not _same(here, there):
                yield path, here, there

    def restore(self) -> None:
        """Restore the attributes and containers that were read; parameters and buffers are left as they are."""
        for put_back in reversed(self.undo):
            put_back()


class _Tensor(NamedTuple):
    """Content of a tensor when it was read; ``begin`` is a text with its first three elements, for messages."""

    shape: str
    dtype: str
    content: bytes
    begin: str


_MISSING = type("Missing", (), {"__repr__": lambda self: "nothing"})()


def read_memory(model: nn.Module, loss_fn: Any = None) -> Memory:
    """Read the Python state to which a model and its loss_fn, if not None, refer, without parameters and buffers."""
    walk = _Walk()
    walk.module(model, "model")
    if loss_fn is not None:
        walk.value(loss_fn, "loss_fn", 0)
    return walk.memory


def read_memory_of(thing: Any, name: str) -> Memory:
    """Read the Python state that an object, such as a dataset, refers to; all paths begin with ``name``."""
    walk = _Walk()
    walk.value(thing, name, 0)
    return walk.memory


def first_change(once: Memory, twice: Memory) -> str:
    """Describe the first value that differs between the states after one and after two calls; "" if all are equal."""
    for path, before, after in once.changes(twice):
        return f"{path} with every call: {_words(before)} after one call, {_words(after)} after the next"
    return ""


def refuse_change(once: Memory, twice: Memory, whose: str) -> None:
    """Raise an error if the state after the second call of ``whose`` differs from that after the first.

    Raises:
        CaptureError: names the path of the state and both values.
    """
    change = first_change(once, twice)
    if change:
        raise CaptureError(
            f"{whose} changes {change}. Stages of a pipeline are traced or copied and would not share it, and no "
            "checkpoint holds it. Make it a buffer (register_buffer) that tensor operations update in place, or keep "
            "it out of forward and loss."
        )


class _Walk:
    def __init__(self) -> None:
        self.memory = Memory()
        self._seen: set[int] = set()
        self._keep: list[Any] = []  # ids stay unique while these live
        self._bytes = 0

    def module(self, module: nn.Module, path: str) -> None:
        """Record the attributes and hooks of a module, its class with its methods, and its children."""
        if not self._enter(module):
            return
        own = vars(module)
        self._undo_dict(own)
        for name in _OWN_DICTS:
            self._undo_dict(own.get(name, {}))
        for name in _HOOKS:
            hooks = own.get(name, {})  # whose keys are numbers that torch gives out
            self._undo_dict(hooks)
            self.value(tuple(hooks.values()), f"{path}.{name}", 1)
        for name, value in own.items():
            if name not in (*_HOOKS, *_OWN_DICTS, "training", "forward", *made_by_hooks(module)):
                self.value(value, f"{path}.{name}", 1)
        self._class(type(module), 1)
        for name, child in module._modules.items():
            if child is not None:
                self.module(child, f"{path}.{name}")

    def value(self, value: Any, path: str, depth: int) -> None:
        """Record a value under ``path``, and recursively what it refers to; ``depth`` counts the levels above it."""
        if isinstance(value, _PLAIN):
            self.memory.values[path] = value
        elif isinstance(value, nn.Parameter | random.SystemRandom):  # the latter has no state to remember
            return
        elif isinstance(value, torch.Tensor):
            self._tensor(value, path)
        elif isinstance(value, np.ndarray):
            self._array(value, path)
        elif (kind := next((kind for kind in _GENERATORS if isinstance(value, kind)), None)) is not None:
            read, write = _GENERATORS[kind]
            state = read(value)
            content = state.numpy().tobytes() if isinstance(state, torch.Tensor) else repr(state)
            self._put(path, (content,), functools.partial(write, value, state))
        elif isinstance(value, _IN_WORDS):
            self.memory.values[path] = str(value)
        elif depth < _DEEPEST and len(self.memory.values) < _MOST_VALUES and self._enter(value):
            self._compound(value, path, depth)

    def _compound(self, value: Any, path: str, depth: int) -> None:
        if isinstance(value, nn.Module | type):
            self._seen.discard(id(value))  # which these look at themselves
        if isinstance(value, nn.Module):
            self.module(value, path)
        elif isinstance(value, Mapping):
            if isinstance(value, dict):
                self._undo_dict(value)
            self.memory.values[f"the number of items in {path}"] = len(value)
            for position, (key, item) in itertools.islice(enumerate(value.items()), _MOST_ITEMS):
                self.value(item, f"{path}[{repr(key) if _reads(key) else f'item {position}'}]", depth + 1)
        elif isinstance(value, list | collections.deque | set):
            kept = value.copy()
            self.memory.undo.append(functools.partial(_refill, value, kept))
            self._items(value, path, depth)
        elif isinstance(value, tuple | frozenset):
            self._items(value, path, depth)
        elif isinstance(value, functools.partial):
            for part, name in ((value.func, "func"), (value.args, "args"), (value.keywords, "keywords")):
                self.value(part, f"{path}.{name}", depth + 1)
        elif isinstance(value, types.MethodType):
            self.value(value.__self__, path, depth + 1)
            self.value(value.__func__, path, depth + 1)
        elif isinstance(value, types.FunctionType):
            self._function(value, path, depth)
        elif hasattr(type(value), "cache_info"):  # of the type, for some objects have an answer to every name
            size = value.cache_info().currsize
            self._put(f"{CACHE}{path}", size, functools.partial(_forget, value, size))
            self.value(getattr(value, "__wrapped__", None), path, depth + 1)
        elif isinstance(value, type):
            self._class(value, depth)
        elif isinstance(value, types.BuiltinFunctionType):
            self.memory.values[path] = value.__qualname__
        elif not isinstance(value, types.ModuleType):
            self._object(value, path, depth)

    def _items(self, items: Any, path: str, depth: int) -> None:
        self.memory.values[f"the number of items in {path}"] = len(items)
        if isinstance(items, set | frozenset):
            if all(isinstance(item, _PLAIN) for item in items):
                self.memory.values[path] = tuple(sorted(map(repr, items)))
            return
        for position, item in itertools.islice(enumerate(items), _MOST_ITEMS):
            self.value(item, f"{path}[{position}]", depth + 1)

    def _function(self, function: types.FunctionType, path: str, depth: int) -> None:
        """Record a function's name, code, attributes, closure and defaults, and the globals that it names."""
        self.memory.values[path] = f"{function.__module__}.{function.__qualname__}"
        if _of_library(function):
            return
        self.memory.values[f"the code of {path}"] = tuple(_code(function.__code__))
        if vars(function):
            self._undo_dict(vars(function))
            for name, item in list(vars(function).items()):
                self.value(item, f"{path}.{name}", depth + 1)
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                held = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            self.memory.undo.append(functools.partial(setattr, cell, "cell_contents", held))
            self.value(held, f"{function.__qualname__}:{name}", depth + 1)
        for item in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            if not isinstance(item, _PLAIN):
                self.value(item, f"a default argument of {function.__qualname__}", depth + 1)
        for name in names_in(code):
            if name in function.__globals__:
                held = function.__globals__[name]
                if isinstance(held, _PLAIN):
                    self.memory.undo.append(functools.partial(function.__globals__.__setitem__, name, held))
                self.value(held, f"{function.__module__}.{name}", depth + 1)

    def _class(self, cls: type, depth: int) -> None:
        """Record the attributes and methods of a class and its bases, except for those of libraries."""
        for base in cls.__mro__:
            if _of_library(base) or not self._enter(base):
                continue
            for name, value in list(vars(base).items()):
                if name.startswith("__") and name not in ("__call__", "__init__"):
                    continue
                if isinstance(value, staticmethod | classmethod):
                    value = value.__func__
                if isinstance(value, property):
                    value = value.fget
                if isinstance(value, _PLAIN):
                    self.memory.undo.append(functools.partial(_reset, base, name, value))
                if not isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType):
                    self.value(value, f"the class attribute {base.__qualname__}.{name}", depth + 1)

    def _object(self, value: Any, path: str, depth: int) -> None:
        self.memory.values[path] = type(value).__qualname__
        if type(value).__module__ == "logging":  # its objects refer to all loggers of the process
            return
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict):
            self._undo_dict(held)
            for name, item in list(held.items()):
                self.value(item, f"{path}.{name}", depth + 1)
        for name in (slot for cls in type(value).__mro__ for slot in _slots(cls)):
            if hasattr(value, name):
                item = getattr(value, name)
                if isinstance(item, _PLAIN):
                    self.memory.undo.append(functools.partial(_reset, value, name, item))
                self.value(item, f"{path}.{name}", depth + 1)
        self._class(type(value), depth)

    def _tensor(self, value: torch.Tensor, path: str) -> None:
        what = (str(tuple(value.shape)), str(value.dtype))
        if type(value) is not torch.Tensor or value.is_meta or value.device.type != "cpu" or value.is_sparse:
            self.memory.values[path] = what  # a stand-in while tracing: no content
        elif not self._affords(value.nbytes):
            self.memory.values[path] = (*what, value._version)
        else:
            kept = value.detach().clone()
            content = kept.contiguous().flatten().view(torch.uint8).numpy().tobytes() if kept.numel() else b""
            self._put(path, _Tensor(*what, content, _begin(kept)), lambda: _refill_tensor(value, kept))

    def _array(self, value: np.ndarray[Any, Any], path: str) -> None:
        if value.dtype.hasobject or not self._affords(value.nbytes):
            self.memory.values[path] = (value.shape, str(value.dtype))
            return
        kept = value.copy()
        undo = functools.partial(np.copyto, value, kept) if value.flags.writeable else None
        self._put(path, (value.shape, str(value.dtype), kept.tobytes()), undo)

    def _affords(self, num_bytes: int) -> bool:
        if self._bytes + num_bytes > _MOST_BYTES:
            return False
        self._bytes += num_bytes
        return True

    def _put(self, path: str, value: Any, undo: Callable[[], object] | None) -> None:
        self.memory.values[path] = value
        if undo is not None:
            self.memory.undo.append(undo)

    def _undo_dict(self, held: dict[Any, Any]) -> None:
        self.memory.undo.append(functools.partial(_refill, held, dict(held)))

    def _enter(self, value: Any) -> bool:
        if id(value) in self._seen:
            return False
        self._seen.add(id(value))
        self._keep.append(value)
        return True


def _same(here: Any, there: Any) -> bool:
    if isinstance(here, tuple) and isinstance(there, tuple) and len(here) == len(there):
        return all(map(_same, here, there))
    if type(here) is not type(there):
        return False
    return bool(here == there or (here != here and there != there))  # nan is itself


def _reads(key: Any) -> bool:
    """Return True if the repr of a mapping's key identifies it, as for numbers and texts, and is equal for a copy."""
    return all(map(_reads, key)) if isinstance(key, tuple) else isinstance(key, (*_PLAIN, *_IN_WORDS))


def _words(value: Any) -> str:
    if isinstance(value, _Tensor):
        return f"a tensor of shape {value.shape} that begins with {value.begin}"
    if isinstance(value, bytes | tuple):
        return "one state"
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _begin(tensor: torch.Tensor) -> str:
    return ", ".join(f"{x:.5g}" if isinstance(x, float) else str(x) for x in tensor.flatten()[:3].tolist())


def names_in(code: types.CodeType) -> Iterator[str]:
    """Yield the names that a function reads, including those in nested functions."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from names_in(constant)


def _code(code: types.CodeType) -> Iterator[str]:
    """Yield the byte code of a function and the constants in it, including those of nested functions."""
    yield code.co_code.hex()
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _code(constant)
        else:
            yield repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)


def _of_library(thing: Any) -> bool:
    return (getattr(thing, "__module__", None) or "builtins").split(".")[0] in _LIBRARIES


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    named = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in named if name not in ("__dict__", "__weakref__"))


def _refill(container: Any, kept: Any) -> None:
    """Restore the items of a list, a deque, a set or a dict in place."""
    container.clear()
    if isinstance(container, list | collections.deque):
        container.extend(kept)
    else:
        container.update(kept)


def _refill_tensor(tensor: torch.Tensor, kept: torch.Tensor) -> None:
    """Restore a tensor in place, if its values differ."""
    if tensor.shape == kept.shape and not torch.equal(tensor, kept):
        with torch.no_grad():
            tensor.copy_(kept)


def _forget(cache: Any, size: int) -> None:
    """Clear a functools cache if its number of entries has changed."""
    if cache.cache_info().currsize != size:
        cache.cache_clear()


def _reset(holder: Any, name: str, value: Any) -> None:
    """Set an attribute back to ``value``, unless its object is frozen."""
    if getattr(holder, name, None) is not value:
        with contextlib.suppress(AttributeError):  # frozen
            setattr(holder, name, value)
