"""What a thing that is called again and again remembers from call to call: read, compared, put back.

Attributes of modules and other objects, lists and dicts, closures, the globals that functions name, generators, caches
and hooks: whatever can be reached is read before and after a call. What the second call changes again is a memory;
what only the first one changed is a cache.

    before --call--> after one --call--> after two        after one != after two: it remembers

What this cannot see: state behind objects without a ``__dict__`` or ``__slots__``, in files or in other processes, and
whatever changes only at a later call.
"""

from __future__ import annotations

import collections
import functools
import random
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from raypipe.engine.copies import made_by_hooks
from raypipe.engine.put_back import forget, refill, refill_tensor, reset

__all__ = ["Memory", "first_change", "read_memory", "read_memory_of"]

_MOST_VALUES = 50_000
_MOST_ITEMS = 256
"""Of one container that are looked at; its length always is."""
_MOST_BYTES = 1 << 28
"""Of all tensors and arrays whose content is looked at; of further ones only the number of changes in place is."""
_DEEPEST = 8
_LIBRARIES = (
    "torch", "numpy", "transformers", "datasets", "pyarrow", "pandas", "raypipe", "builtins", "collections",
    "functools", "typing", "logging", "threading", "tqdm", "rich",
)  # fmt: skip
"""What these keep in their classes and functions is not looked at: some of it changes by the clock, whoever calls."""
_IN_WORDS = (torch.dtype, torch.device, torch.Size, torch.SymInt, torch.SymFloat, torch.SymBool, range, slice)
_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OWN_DICTS = ("_parameters", "_buffers", "_modules")


@dataclass(slots=True)
class Memory:
    """What was found.

    Attributes:
        values: path, as a person would write it -> something that compares.
        tensors: path -> a copy.
        undo: puts every container that was read back to what it held.
    """

    values: dict[str, Any] = field(default_factory=dict)
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    undo: list[Callable[[], object]] = field(default_factory=list)

    def changes(self, later: Memory) -> Iterator[tuple[str, Any, Any]]:
        """(path, value here, value there) of whatever is not the same there, in the order of reading."""
        for path in dict.fromkeys((*self.values, *later.values)):
            here, there = self.values.get(path, _MISSING), later.values.get(path, _MISSING)
            if not _same(here, there):
                yield path, here, there

    def restore(self) -> None:
        """Put back what attributes and containers held when they were read; tensors of the model are not touched."""
        for put_back in reversed(self.undo):
            put_back()


class _Tensor(NamedTuple):
    """A tensor's content when it was read."""

    shape: str
    dtype: str
    content: bytes
    begin: str


_MISSING = type("Missing", (), {"__repr__": lambda self: "nothing"})()


def read_memory(model: nn.Module, loss_fn: Any = None) -> Memory:
    """Everything that can be reached from the model and from the loss, apart from parameters and buffers.

    Args:
        loss_fn: None where the model returns its own loss.
    """
    walk = _Walk()
    walk.module(model, "model")
    if loss_fn is not None:
        walk.value(loss_fn, "loss_fn", 0)
    return walk.memory


def read_memory_of(thing: Any, name: str) -> Memory:
    """The same of anything else, a dataset for one; paths begin with the name."""
    walk = _Walk()
    walk.value(thing, name, 0)
    return walk.memory


def first_change(once: Memory, twice: Memory) -> str:
    """What a second call changed again, in words; empty where nothing did.

    Args:
        once, twice: read after one call and after the next.
    """
    for path, before, after in once.changes(twice):
        return f"{path} with every call: {_words(before)} after one call, {_words(after)} after the next"
    return ""


class _Walk:
    def __init__(self) -> None:
        self.memory = Memory()
        self._seen: set[int] = set()
        self._keep: list[Any] = []  # ids stay unique while these live
        self._bytes = 0

    def module(self, module: nn.Module, path: str) -> None:
        """A module and its children: attributes, hooks, what its class and its forward refer to."""
        if not self._enter(module):
            return
        own = vars(module)
        self._undo_dict(own)
        for name in _OWN_DICTS:
            self._undo_dict(own.get(name, {}))
        for name in _HOOKS:
            hooks = own.get(name)
            if hooks is not None:
                self._undo_dict(hooks)
                self.memory.values[f"the number of {path}'s {name[1:]}"] = len(hooks)
                for hook in hooks.values():
                    self.value(hook, f"{path}.{name}", 1)
        for name, parameter in module._parameters.items():
            if parameter is not None:
                count = len(parameter._backward_hooks or ())
                count += len(getattr(parameter, "_post_accumulate_grad_hooks", None) or ())
                self.memory.values[f"the number of gradient hooks of {path}.{name}"] = count
        for name, value in own.items():
            if name not in (*_HOOKS, *_OWN_DICTS, "training", "forward", *made_by_hooks(module)):
                self.value(value, f"{path}.{name}", 1)
        self._class(type(module), 1)
        for name, child in module._modules.items():
            if child is not None:
                self.module(child, f"{path}.{name}")

    def value(self, value: Any, path: str, depth: int) -> None:
        """Anything that is found on the way."""
        if isinstance(value, _PLAIN):
            self.memory.values[path] = value
        elif isinstance(value, nn.Parameter | random.SystemRandom):  # the latter has no state to remember
            return
        elif isinstance(value, torch.Tensor):
            self._tensor(value, path)
        elif isinstance(value, np.ndarray):
            self._array(value, path)
        elif isinstance(value, torch.Generator):
            state = value.get_state()
            self._put(path, bytes(state.numpy()), lambda: value.set_state(state))
        elif isinstance(value, random.Random):
            held = value.getstate()
            self._put(path, held, lambda: value.setstate(held))
        elif isinstance(value, np.random.Generator):
            bits = value.bit_generator
            self._numpy_state(bits, bits.state, path)
        elif isinstance(value, np.random.RandomState):
            self._numpy_state(value, value.get_state(legacy=False), path)
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
            for position, (key, item) in _first_items(enumerate(value.items())):
                self.value(item, f"{path}[{repr(key) if _reads(key) else f'item {position}'}]", depth + 1)
        elif isinstance(value, list | collections.deque | set):
            kept = value.copy()
            self.memory.undo.append(functools.partial(refill, value, kept))
            self._items(value, path, depth)
        elif isinstance(value, tuple | frozenset):
            self._items(value, path, depth)
        elif isinstance(value, functools.partial):
            for part, name in ((value.func, "func"), (value.args, "args"), (value.keywords, "keywords")):
                self.value(part, f"{path}.{name}", depth + 1)
        elif isinstance(value, types.MethodType):
            self.value(value.__self__, _bound(path, value), depth + 1)
            self.value(value.__func__, path, depth + 1)
        elif isinstance(value, types.FunctionType):
            self._function(value, path, depth)
        elif hasattr(type(value), "cache_info"):  # of the type, for some objects have an answer to every name
            size = value.cache_info().currsize
            self._put(f"the cache of {path}", size, functools.partial(forget, value, size))
            self.value(getattr(value, "__wrapped__", None), path, depth + 1)
        elif isinstance(value, type):
            self._class(value, depth)
        elif not isinstance(value, types.ModuleType | types.BuiltinFunctionType):
            self._object(value, path, depth)

    def _items(self, items: Any, path: str, depth: int) -> None:
        self.memory.values[f"the number of items in {path}"] = len(items)
        if isinstance(items, set | frozenset):
            if all(isinstance(item, _PLAIN) for item in items):
                self.memory.values[path] = hash(frozenset(items))
            return
        for position, item in _first_items(enumerate(items)):
            self.value(item, f"{path}[{position}]", depth + 1)

    def _function(self, function: types.FunctionType, path: str, depth: int) -> None:
        """Its attributes, what it closes over, and the globals that it names."""
        if _of_library(function):
            return
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
        for name in _names(code):
            if name in function.__globals__:
                held = function.__globals__[name]
                if isinstance(held, _PLAIN):
                    self.memory.undo.append(functools.partial(function.__globals__.__setitem__, name, held))
                self.value(held, f"{function.__module__}.{name}", depth + 1)

    def _class(self, cls: type, depth: int) -> None:
        """Attributes of the user's own classes, and what their methods refer to."""
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
                    self.memory.undo.append(functools.partial(reset, base, name, value))
                if not isinstance(value, types.MemberDescriptorType | types.GetSetDescriptorType):
                    self.value(value, f"the class attribute {base.__qualname__}.{name}", depth + 1)

    def _object(self, value: Any, path: str, depth: int) -> None:
        held = getattr(value, "__dict__", None)
        if isinstance(held, dict):
            self._undo_dict(held)
            for name, item in list(held.items()):
                self.value(item, f"{path}.{name}", depth + 1)
        for name in (slot for cls in type(value).__mro__ for slot in _slots(cls)):
            if hasattr(value, name):
                item = getattr(value, name)
                if isinstance(item, _PLAIN):
                    self.memory.undo.append(functools.partial(reset, value, name, item))
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
            self.memory.tensors[path] = kept
            self._put(path, _Tensor(*what, content, _begin(kept)), lambda: refill_tensor(value, kept))

    def _array(self, value: np.ndarray[Any, Any], path: str) -> None:
        if value.dtype.hasobject or not self._affords(value.nbytes):
            self.memory.values[path] = (value.shape, str(value.dtype))
            return
        kept = value.copy()
        undo = functools.partial(np.copyto, value, kept) if value.flags.writeable else None
        self._put(path, (value.shape, str(value.dtype), kept.tobytes()), undo)

    def _numpy_state(self, holder: Any, state: Any, path: str) -> None:
        def put_back() -> None:
            if isinstance(holder, np.random.RandomState):
                holder.set_state(state)
            else:
                holder.state = state

        self._put(path, repr(state), put_back)

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
        self.memory.undo.append(functools.partial(refill, held, dict(held)))

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
    """Whether its repr tells it, and tells it the same of a copy."""
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


def _names(code: types.CodeType) -> Iterator[str]:
    """Names that a function reads, those of the functions within it included."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)


def _of_library(thing: Any) -> bool:
    return (getattr(thing, "__module__", None) or "builtins").split(".")[0] in _LIBRARIES


def _slots(cls: type) -> tuple[str, ...]:
    slots = vars(cls).get("__slots__", ())
    named = (slots,) if isinstance(slots, str) else tuple(slots)
    return tuple(name for name in named if name not in ("__dict__", "__weakref__"))


def _bound(path: str, method: types.MethodType) -> str:
    return f"{path}.__self__" if path == "loss_fn" else path


def _first_items(items: Any) -> Iterator[Any]:
    for position, item in enumerate(items):
        if position == _MOST_ITEMS:
            return
        yield item
