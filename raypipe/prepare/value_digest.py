"""Digests of Python values: equal digests mean equal values, in any process that runs the same code.

A digest covers all that a value holds: items, attributes, closures, default arguments, contents of tensors. Of the
user's functions and classes it also covers class attributes and the globals that they name. Classes and functions of
installed packages count by name, so a cache must hold the files of their modules against it.

Nothing is left out silently. A value whose state cannot be read completely, such as an open file or an object of a
compiled extension, has no digest.
"""

from __future__ import annotations

import collections
import enum
import functools
import hashlib
import re
import sys
import threading
import types
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from raypipe.capture.python_state import GENERATORS, names_in
from raypipe.prepare.model_code import is_own_file

_BY_REPR = (
    type(None), bool, int, float, complex, str, bytes, bytearray, range, slice, type(...), type(NotImplemented),
    torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, np.dtype,
)  # fmt: skip
_OPERATIONS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)
_DICTS = (dict, types.MappingProxyType)
_ITEMS = (list, tuple, collections.deque)
_SETS = (set, frozenset)
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_ENDS_OF_CLASSES = (object, dict, list, tuple, set, frozenset, str, int, float, collections.OrderedDict,
                    collections.defaultdict)  # fmt: skip
_HASHES = {"_original_object_hash"}
"""Attribute of transformers' GenerationConfig: the hash of its other attributes, which is another in each process."""
_CACHE = type(functools.lru_cache(repr))
_HEAP_TYPE = 1 << 9
"""Flag of a class that is no static type of C, see CPython's Include/object.h."""


class UnreadableError(Exception):
    """Value without a digest, because its state cannot be read completely."""


def digest_of(value: Any) -> str:
    """Compute the digest of a value of any type, as hexadecimal digits.

    Raises:
        UnreadableError: the value refers to an object whose state cannot be read completely; names its class.
    """
    walk = _Walk()
    try:
        walk.add(value)
    except RecursionError:
        raise UnreadableError("values are nested too deeply") from None
    return walk.total.hexdigest()


class _Walk:
    """Walk over a value that adds each object once; later references to it add its number."""

    def __init__(self) -> None:
        self.total = hashlib.sha256()
        self._numbers: dict[int, int] = {}
        self._keep: list[Any] = []  # ids stay unique while these live

    def _put(self, *words: Any) -> None:
        self.total.update(f"{words!r}\n".encode("utf-8", "surrogatepass"))

    def _is_known(self, value: Any) -> bool:
        """Return True if a value was added before, after adding its number."""
        number = self._numbers.setdefault(id(value), len(self._numbers))
        if number < len(self._keep):
            self._put("again", number)
            return True
        self._keep.append(value)
        return False

    def add(self, value: Any) -> None:
        """Add a value of any type."""
        kind = type(value)
        if kind in _BY_REPR or isinstance(value, np.dtype):
            self._put(kind.__name__, repr(value))
        elif isinstance(value, types.ModuleType):
            self._put("module", value.__name__)
        elif kind in _OPERATIONS:
            self._put(kind.__name__, str(value))
        elif self._is_known(value):
            return
        elif isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.FunctionType):
            self._function(value)
        elif kind in _LOCKS or kind.__module__ == "logging":  # which refers to all loggers of the process
            self._put("without state", kind.__qualname__)
        elif kind.__module__ == "typing":
            self._put(kind.__qualname__, repr(value))
        elif not self._plain_object(value, kind):
            self._object(value, kind)

    def _plain_object(self, value: Any, kind: type) -> bool:
        """Add an object of a class that this file names; return False for others."""
        self._put(kind.__module__, kind.__qualname__)
        if kind in _DICTS or kind in _ITEMS or kind in _SETS:
            self._contents(value)
        elif kind is np.ndarray and not value.dtype.hasobject:
            self._put(value.shape, str(value.dtype))
            self.total.update(np.ascontiguousarray(value).tobytes())
        elif isinstance(value, np.generic) and not value.dtype.hasobject:
            self._put(str(value.dtype), value.tobytes())
        elif (own := next((one for one in GENERATORS if kind is one), None)) is not None:
            state = GENERATORS[own][0](value)
            self._put(state.numpy().tobytes() if isinstance(state, torch.Tensor) else repr(state))
        elif kind is re.Pattern:
            self._put(value.pattern, value.flags)
        elif isinstance(value, enum.Enum):
            self._put(value.name)
            self.add(kind)
        elif kind is functools.partial:
            self._all((value.func, value.args, value.keywords, vars(value)))
        elif kind is types.MethodType:
            self._all((value.__self__, value.__func__))
        elif kind in (staticmethod, classmethod):
            self.add(value.__func__)
        elif kind is _CACHE:
            if value.cache_info().currsize and _is_own(value.__module__):
                raise UnreadableError(f"results in the cache of {value.__qualname__}")
            self.add(value.__wrapped__)
        elif kind is property:
            self._all((value.fget, value.fset, value.fdel))
        elif kind in (types.BuiltinFunctionType, types.MethodWrapperType, types.WrapperDescriptorType,
                      types.MethodDescriptorType, types.ClassMethodDescriptorType):  # fmt: skip
            self._put(value.__qualname__, getattr(value, "__module__", None))
            self.add(getattr(value, "__self__", None))
        elif kind in (types.MemberDescriptorType, types.GetSetDescriptorType):
            self._put(value.__name__)
        else:
            return False
        return True

    def _all(self, values: Iterable[Any]) -> None:
        for value in values:
            self.add(value)

    def _contents(self, value: Any) -> None:
        """Add the items of a container of a built-in class, or of a class derived from one."""
        self._put(len(value))
        if isinstance(value, _DICTS):
            for key, item in value.items():
                self.add(key)
                self.add(item)
        elif isinstance(value, _SETS):  # whose order is another in each process
            if not all(type(item) in _BY_REPR for item in value):
                raise UnreadableError("a set of objects")
            self._put(sorted((type(item).__name__, repr(item)) for item in value))
        else:
            self._all(value)

    def _tensor(self, tensor: torch.Tensor) -> None:
        kind = type(tensor)
        if kind not in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) or tensor.layout is not torch.strided:
            raise UnreadableError(f"a tensor of the class {kind.__qualname__} and the layout {tensor.layout}")
        if tensor.grad_fn is not None or tensor.is_quantized or tensor.device.type not in ("cpu", "meta"):
            raise UnreadableError("a tensor with a history, quantized, or on a device")
        self._put(kind.__qualname__, str(tensor.dtype), tensor.device.type, tensor.requires_grad, tensor.is_conj())
        self._put(tuple(tensor.shape), tensor.stride(), tensor.storage_offset(), tensor.is_neg(), tensor._version)
        self.add(vars(tensor))
        self.add(tensor.grad)
        storage = tensor.untyped_storage()
        self._put(storage.nbytes())
        if tensor.is_meta or self._is_shared(storage):
            return
        # All of the storage: a view may be widened by as_strided.
        whole = torch.empty(0, dtype=torch.uint8).set_(storage)
        self.total.update(whole.numpy().data)

    def _is_shared(self, storage: Any) -> bool:
        """Return True if the memory was added before with another tensor, after adding its number."""
        key = -storage._cdata  # no id of an object is negative
        known = key in self._numbers
        number = self._numbers.setdefault(key, len(self._numbers))
        self._put("storage", number)
        if not known:
            self._keep.append(storage)
        return known

    def _class(self, cls: type) -> None:
        """Add a class by name; a class of the user's also with all attributes and bases."""
        self._put("class", cls.__module__, cls.__qualname__)
        if not _is_own(cls.__module__):
            return
        self._all(cls.__mro__[1:])
        for name, value in vars(cls).items():
            if name not in ("__dict__", "__weakref__", "__doc__", "__annotations__", "_abc_impl"):
                self._put(name)
                self.add(value)

    def _function(self, function: types.FunctionType) -> None:
        code = function.__code__
        self._put("function", function.__module__, function.__qualname__)
        self._code(code)
        self._all((function.__defaults__, function.__kwdefaults__, vars(function)))
        for cell in function.__closure__ or ():
            try:
                held = cell.cell_contents
            except ValueError:  # not filled yet
                held = None
            self.add(held)
        if not _is_own(function.__module__):
            return
        space, names = function.__globals__, tuple(dict.fromkeys(names_in(code)))
        for name in names:
            if name not in space:
                continue
            self._put(name)
            self.add(space[name])
            if isinstance(space[name], types.ModuleType) and _is_own(space[name].__name__):
                inside = vars(space[name])
                for inner in names:  # as in settings.WIDTH
                    if inner in inside:
                        self._put(inner)
                        self.add(inside[inner])

    def _code(self, code: types.CodeType) -> None:
        self._put(code.co_code, code.co_names, code.co_varnames, code.co_freevars, code.co_flags, code.co_argcount)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._code(constant)
            else:
                self.add(constant)

    def _object(self, value: Any, kind: type) -> None:
        """Add class, attributes, slots and items of an object.

        Raises:
            UnreadableError: a part of the object is hidden in a class of a compiled extension.
        """
        held = getattr(value, "__dict__", None)
        for base in kind.__mro__:
            if base in _ENDS_OF_CLASSES or base.__module__ in ("typing", "abc", "collections.abc"):
                continue
            file = getattr(sys.modules.get(base.__module__), "__file__", None) or ""
            readable = file.endswith(".py") and base.__flags__ & _HEAP_TYPE and "__module__" in vars(base)
            if not readable or (held is None and "__slots__" not in vars(base)):
                raise UnreadableError(f"{kind.__module__}.{kind.__qualname__}")
        self.add(kind)
        if held is not None:
            for name in sorted(held.keys() - (_HASHES if kind.__module__.startswith("transformers.") else set())):
                self._put(name)
                self.add(held[name])
        for base in kind.__mro__:
            slots = vars(base).get("__slots__", ())
            for name in (slots,) if isinstance(slots, str) else slots:
                mangled = f"_{base.__name__.lstrip('_')}{name}" if name[:2] == "__" != name[-2:] else name
                if name not in ("__dict__", "__weakref__") and hasattr(value, mangled):
                    self._put(name)
                    self.add(getattr(value, mangled))
        if isinstance(value, (*_DICTS, *_ITEMS, *_SETS)):
            self._contents(value)
        elif isinstance(value, str | int | float):
            self._put(*(repr(one(value)) for one in (str, int, float) if isinstance(value, one)))
        if isinstance(value, collections.defaultdict):
            self.add(value.default_factory)


def _is_own(module: str | None) -> bool:
    """Return True for a module of the user's: one that is neither installed nor part of Python, torch or raypipe.

    Raises:
        UnreadableError: the module is unknown, or has no file.
    """
    if module is None or module in sys.builtin_module_names:
        return False
    file = getattr(sys.modules.get(module), "__file__", None)
    if file is None and module.partition(".")[0] not in ("torch", "importlib", "_frozen_importlib"):
        raise UnreadableError(f"code of {module}, which has no file")
    return is_own_file(file or "")
