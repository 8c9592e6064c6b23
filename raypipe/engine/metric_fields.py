"""What metrics are given of a model that returns its own loss: its output and the batch, as far as they read them.

    output.logits   output["logits"]   output[1]          one part, whatever the model returned
    loss, logits = output                                 of a tuple or a list
    for name in output: ...   "logits" in output          of a dict or an object: its names

Parts are read once before the run is planned, which is noted, and only those are there in evaluations.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

__all__ = ["fields_of"]


def fields_of(values: Mapping[Any, Any], names: Sequence[Any], read: dict[Any, None] | None = None) -> Any:
    """A Sequence where parts go by number only, else a Mapping.

    Args:
        values: by key: a number, or a name too.
        names: of all parts in their order, also of those that are not in ``values``.
        read: where each key that is read is noted; None notes nothing.
    """
    numbered = all(isinstance(name, int) for name in names)
    return (_Items if numbered else _Fields)(values, names, read)


class _Parts:
    def __init__(self, values: Mapping[Any, Any], names: Sequence[Any], read: dict[Any, None] | None) -> None:
        self._values, self._names, self._read = dict(values), tuple(names), read

    def __len__(self) -> int:
        return len(self._names)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in (*self._names, *self._values):
            raise AttributeError(f"there is no {name!r}; there are {', '.join(map(str, self._names))}")
        return self._part(name)

    def _part(self, key: Any) -> Any:
        if isinstance(key, slice):
            return tuple(self._part(at) for at in range(len(self._names))[key])
        if type(key) is int and key < 0:
            key += len(self._names)
        if key in self._values:
            if self._read is not None:
                self._read[key] = None
            return self._values[key]
        if key in self._names or (type(key) is int and 0 <= key < len(self._names)):
            # No KeyError: ``get`` would make None of it.
            raise LookupError(
                f"{key!r} is not kept in evaluations, because no metric read it when they were called on a few rows "
                "before the run began. Let the metric read the same parts with every call."
            )
        raise (IndexError if type(key) is int else KeyError)(key)


class _Fields(_Parts, Mapping[Any, Any]):
    def __getitem__(self, key: Any) -> Any:
        return self._part(key)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._names)

    def __contains__(self, key: object) -> bool:
        return key in self._names


class _Items(_Parts, Sequence[Any]):
    def __getitem__(self, key: Any) -> Any:
        return self._part(key)
