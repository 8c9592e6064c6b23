"""Dataclasses and named tuples from parsed JSON, by their type hints."""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from functools import cache
from typing import Any, Union, get_args, get_origin, get_type_hints


def from_plain(kind: Any, value: Any, path: str = "") -> Any:
    """Convert parsed JSON to a value of the type ``kind``.

    Lists become tuples, and objects become dataclasses, whose fields with a default may be missing. An instance of such
    a dataclass is returned unchanged.

    Args:
        kind: the type, with the types of its parts.
        value: parsed JSON.
        path: path of the value in its document, for messages.

    Raises:
        ValueError: the value does not fit the type; the message has path and value.
    """
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any or (value is None and type(None) in arguments):
        return value
    if is_dataclass(kind) and isinstance(kind, type) and isinstance(value, kind):
        return value
    if origin in (Union, types.UnionType):
        (kind,) = (one for one in arguments if one is not type(None))
        return from_plain(kind, value, path)
    if origin is tuple and isinstance(value, list | tuple):
        kinds = [arguments[0]] * len(value) if arguments[-1] is Ellipsis else arguments
        if len(kinds) == len(value):
            return tuple(
                from_plain(one, item, f"{path}[{i}]") for i, (one, item) in enumerate(zip(kinds, value, strict=True))
            )
    elif origin is not None and issubclass(origin, Mapping) and isinstance(value, dict):
        return {name: from_plain(arguments[1], item, f"{path}.{name}") for name, item in value.items()}
    elif isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    elif isinstance(kind, type) and is_dataclass(kind) and isinstance(value, dict):
        return kind(**_fields(kind, value, path))
    elif type(value) is kind or (kind is float and type(value) is int):
        return value
    raise ValueError(f"{path.lstrip('.') or 'the document'} is {str(value)[:80]!r}, not {_name(kind)}")


def _fields(kind: Any, value: Mapping[str, Any], path: str) -> dict[str, Any]:
    hints, needed = _hints(kind)
    if unknown := value.keys() - hints.keys():
        raise ValueError(f"{path.lstrip('.') or 'the document'} has an unknown field {min(unknown)!r}")
    if missing := needed - value.keys():
        raise ValueError(f"{path}.{min(missing)}".lstrip(".") + " is missing")
    return {name: from_plain(hints[name], item, f"{path}.{name}") for name, item in value.items()}


@cache
def _hints(kind: Any) -> tuple[dict[str, Any], frozenset[str]]:
    """Return ({name of a field: its type}, names of the fields without a default)."""
    listed = fields(kind)
    needed = frozenset(f.name for f in listed if f.default is MISSING and f.default_factory is MISSING)
    hints = get_type_hints(kind)
    return {f.name: hints[f.name] for f in listed}, needed


def _name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) and not get_args(kind) else str(kind)
