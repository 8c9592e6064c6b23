"""Code and options of a model as (label, value) pairs, which do not depend on the versions of raypipe and torch.

    for each module:   module 'blocks.0'         name of its class
                       dropout of Block          its options, over all modules of that class
                       forward of Block          syntax tree of its forward and of what forward reads by name:
                       softcap, constant 'SCALE'   methods, functions and plain values, however deep

Comments, docstrings, annotations and layout do not count. Installed packages and the standard library do not count
either: they have versions, and the operations of the model show what they compute.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import json
import linecache
import sysconfig
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

from raypipe.capture.python_state import names_in

_LIBRARIES = tuple(str(Path(path).resolve()) for path in (sysconfig.get_path("stdlib"), Path(__file__).parents[1],
                                                          Path(torch.__file__).parent))  # fmt: skip
_INSTALLED = {"site-packages", "dist-packages"}
_UNREAD = {"annotation", "returns", "type_comment", "type_params", "kind", "ctx"}
"""Fields of a syntax tree that do not change the result of a function, or follow from others."""
_OF_TORCH = frozenset(vars(nn.Module()))
_LONGEST = 200


def code_labels(model: nn.Module) -> dict[str, Any]:
    """Describe classes, options and code of a model's modules, by label."""
    modules = dict(model.named_modules())
    walk = _Walk(tuple(dict.fromkeys(map(type, modules.values()))))
    for path, module in modules.items():
        walk.found[f"module {path!r}"] = type(module).__qualname__
        walk.module(module)
    return {**walk.found, **{label: _short(values) for label, values in walk.options.items()}}


def options(thing: Any) -> dict[str, Any]:
    """Return the plain values of a module's attributes; private ones too if its class is user code."""
    private = _is_own_class(type(thing))
    return {
        name: value
        for name, value in sorted(vars(thing).items())
        if name not in _OF_TORCH and (private or not name.startswith("_")) and is_plain(value)
    }


def is_plain(value: Any) -> bool:
    """Return True for numbers, texts, None, and lists and tuples of them."""
    if isinstance(value, list | tuple):
        return all(map(is_plain, value))
    return value is None or isinstance(value, bool | int | float | str)


class _Walk:
    """Collector of all functions that the forward methods of some classes call, directly or indirectly.

    Each function or value is stored under a label, its qualified name. A name that a function reads is looked up in
    the function's globals, in its closure, and in the methods of all classes.

    Args:
        classes: classes of the model's modules.

    Attributes:
        found: label -> {"file": name, "sha256": a digest for each function of this label}; label -> value if the name
            is that of a plain value.
        options: "attribute of class" -> values of this attribute, one for each instance of the class.
    """

    def __init__(self, classes: tuple[type, ...]) -> None:
        self.found: dict[str, Any] = {}
        self.options: dict[str, list[Any]] = {}
        self._bases = tuple(dict.fromkeys(base for cls in classes for base in cls.__mro__ if _is_own_class(base)))
        self._seen: set[CodeType | type] = set()
        self._method("forward")

    def module(self, module: nn.Module) -> None:
        """Add the options of a module, and follow the functions and objects in its attributes."""
        self._options(module)
        for name, value in vars(module).items():
            if name not in _OF_TORCH and not is_plain(value):
                self._thing(value)
                if _is_own_class(type(value)) and hasattr(value, "__dict__"):
                    self._options(value)
                    self._helper(type(value))

    def _options(self, thing: Any) -> None:
        named = {
            name: x.__name__ for name, x in vars(thing).items() if isinstance(x, FunctionType | BuiltinFunctionType)
        }
        for name, value in {**options(thing), **named}.items():
            self.options.setdefault(f"{name} of {type(thing).__qualname__}", []).append(value)

    def _method(self, name: str) -> None:
        for base in self._bases:
            self._thing(vars(base).get(name))

    def _helper(self, cls: type) -> None:
        """Follow all methods of a class that is not a module, such as a torch.autograd.Function."""
        if cls not in self._seen and not issubclass(cls, nn.Module) and _is_own_class(cls):
            self._seen.add(cls)
            for part in vars(cls).values():
                self._thing(part)

    def _thing(self, thing: Any) -> None:
        for function in _functions_in(thing):
            code = function.__code__
            if code not in self._seen and _is_own(code.co_filename):
                self._seen.add(code)
                self._function(function, code)

    def _function(self, function: FunctionType, code: CodeType) -> None:
        if digest := _digests(code.co_filename).get(code.co_firstlineno):
            outer, _, name = function.__qualname__.rpartition(".")
            file = Path(code.co_filename)  # those of a notebook have new names in each session
            entry = {"file": file.name if file.is_file() else "the notebook", "sha256": []}
            digests = self.found.setdefault(f"{name} of {outer}" if outer else name, entry)["sha256"]
            if digest not in digests:
                digests.append(digest)
        names = tuple(dict.fromkeys(names_in(code)))
        for name in names:
            self._method(name)
            self._named(name, function.__globals__)
            held = function.__globals__.get(name)
            if isinstance(held, ModuleType) and _is_own(getattr(held, "__file__", None) or ""):
                for inner in names:
                    self._named(inner, vars(held))
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            with suppress(ValueError):  # not filled yet
                self._named(name, {name: cell.cell_contents})

    def _named(self, name: str, space: Mapping[str, Any]) -> None:
        if name not in space or name.startswith("__"):
            return
        value = space[name]
        if is_plain(value):
            self.found[f"constant {name!r}"] = _short([value])
        elif isinstance(value, type):
            self._helper(value)
        else:
            self._thing(value)


def _functions_in(thing: Any) -> Iterator[FunctionType]:
    """Yield the functions that a value is or wraps.

    Methods, properties, decorators and functools.partial are unwrapped.
    """
    if isinstance(thing, property):
        things: tuple[Any, ...] = (thing.fget,)
    elif isinstance(thing, functools.partial):
        things = (thing.func, *thing.args, *thing.keywords.values())
    elif isinstance(thing, list | tuple):
        things = tuple(thing)
    elif isinstance(thing, staticmethod | classmethod | MethodType):
        things = (thing.__func__,)
    elif isinstance(thing, FunctionType):
        yield thing
        things = (thing.__wrapped__,) if hasattr(thing, "__wrapped__") else ()
    else:
        return
    for part in things:
        yield from _functions_in(part)


@functools.lru_cache(maxsize=4096)
def _file_of(cls: Any) -> str:
    """Return the file of a class; in a notebook, the file of its methods; "" for a built-in class."""
    try:
        return inspect.getfile(cls)
    except (OSError, TypeError):
        functions = (function for value in vars(cls).values() for function in _functions_in(value))
        return next((function.__code__.co_filename for function in functions), "")


@functools.lru_cache(maxsize=4096)
def _is_own(file: str) -> bool:
    """Return True if a file is neither installed nor part of Python, torch or raypipe."""
    if not file or file.startswith("<frozen"):
        return False
    path = Path(file).resolve()
    return not (_INSTALLED & set(path.parts)) and not any(path.is_relative_to(folder) for folder in _LIBRARIES)


def _is_own_class(cls: Any) -> bool:
    return _is_own(_file_of(cls))


@functools.lru_cache(maxsize=512)
def _digests(file: str) -> Mapping[int, str]:
    """Return {first line of a function in this file: digest of its syntax tree}; empty without source."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:  # edited after it was imported
        return {}
    digests: dict[int, list[Any]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            first = min([node.lineno, *(one.lineno for one in getattr(node, "decorator_list", ()))])
            digests.setdefault(first, []).append(_canonical(node))
    return {line: _digest(trees) for line, trees in digests.items()}


def _canonical(node: Any) -> Any:
    """Convert a syntax tree to JSON, without docstrings, annotations and positions.

    Empty fields are left out, because newer versions of Python add such fields.
    """
    if isinstance(node, list):
        kept = (part for part in node if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant)))
        return [_canonical(part) for part in kept]
    if isinstance(node, ast.Constant):
        return ["Constant", repr(node.value)]
    if isinstance(node, ast.AST):
        read = ((name, value) for name, value in ast.iter_fields(node) if name not in _UNREAD)
        return [type(node).__name__, {name: _canonical(value) for name, value in read if value is not None}]
    return node


def _short(values: list[Any]) -> Any:
    """Return the repr of the first value if all are equal, else of all values; instead of a long repr, its digest."""
    text = repr(values[0] if all(value == values[0] for value in values) else values)
    return text if len(text) <= _LONGEST else {"sha256": _digest(text)}


def _digest(thing: Any) -> str:
    return hashlib.sha256(json.dumps(thing, sort_keys=True).encode()).hexdigest()[:16]
