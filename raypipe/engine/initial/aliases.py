"""Tensors with values that a constructor still holds after it made parameters of them.

    w = torch.zeros(10);  self.p = nn.Parameter(w);  w.fill_(3.0)      p has changed too, for they share memory

A parameter gives its memory up when it is registered, so what is written to ``w`` later has to be carried over. Once
the parameter itself was written to, ``w`` is out of date, and whoever uses it is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from raypipe.errors import ConfigError

__all__ = ["Aliases"]


class _Source(NamedTuple):
    """What a parameter was made of.

    Attributes:
        weak: of its storage; while this lives, nothing else is given that address.
        real: shape, strides and offset there.
        ref: the parameter, as memory of the tape.
        at: how many entries the tape had then.
    """

    weak: StorageWeakRef
    real: tuple[torch.Size, tuple[int, ...], int]
    ref: Any
    at: int


class Aliases:
    """The tensors that parameters were made of, by storage."""

    def __init__(self) -> None:
        self._sources: dict[int, list[_Source]] = {}

    def add(self, real: torch.Tensor, ref: Any, at: int) -> None:
        """A parameter with the memory ``ref`` begins with the values of this tensor.

        Raises:
            ConfigError: another parameter has some of its memory.
        """
        storage = real.untyped_storage()
        if any(_overlap(real, source.real) for source in self._sources.get(storage._cdata, ())):
            raise ConfigError(
                f"weights_on='workers': two parameters are made of one tensor, the second of shape {list(real.shape)}, "
                "and have the same memory in plain PyTorch. Stages hold each for itself, so they would drift apart. "
                "Make them one parameter, or give one of them its own memory with clone()."
            )
        view = (real.shape, real.stride(), int(real.storage_offset()))
        self._sources.setdefault(storage._cdata, []).append(_Source(StorageWeakRef(storage), view, ref, at))

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a parameter was made of this tensor, or of another one over the same memory."""
        sources = self._sources.get(tensor.untyped_storage()._cdata, ())
        return any(_overlap(tensor, source.real) for source in sources)

    def check(self, used: Iterable[torch.Tensor], entries: Sequence[Any]) -> None:
        """Refuse the use of a tensor that the parameter made of it has left behind.

        Args:
            entries: of the tape; those without an operation carry over what was written to such a tensor.

        Raises:
            ConfigError: says so.
        """
        for tensor in used:
            for source in self._sources.get(tensor.untyped_storage()._cdata, ()):
                if any(entry.op and source.ref.memory in entry.writes for entry in entries[source.at :]):
                    raise ConfigError(
                        f"weights_on='workers': the model cannot be built without weights, because its constructor "
                        f"made a parameter of a tensor of shape {list(source.real[0])}, wrote to the parameter, and "
                        "then uses the tensor, which has the parameter's memory in plain PyTorch. Use the parameter "
                        "there, or set weights_on='client', which builds the model as it is."
                    )

    def values(self, written: Iterable[torch.Tensor]) -> Iterator[tuple[Any, torch.Tensor]]:
        """(memory of a parameter, its values now) for those that were made of what was just written to."""
        for storage in {t.untyped_storage()._cdata: t.untyped_storage() for t in written}.values():
            for source in self._sources.get(storage._cdata, ()):
                shape, strides, offset = source.real
                yield source.ref, torch.empty(0, dtype=source.ref.dtype).set_(storage, offset, shape, strides)


def _overlap(tensor: torch.Tensor, other: tuple[torch.Size, tuple[int, ...], int]) -> bool:
    """Whether the places in one storage from the first to the last of each have some in common."""
    start, stop = _ends(tensor.shape, tensor.stride(), int(tensor.storage_offset()))
    begin, end = _ends(*other)
    return start < end and begin < stop


def _ends(shape: torch.Size, strides: tuple[int, ...], offset: int) -> tuple[int, int]:
    """In elements; none of an empty tensor."""
    last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
    return offset, offset + last + 1 if shape.numel() else offset
