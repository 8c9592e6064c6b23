"""Sizes of mini-batches that differ from each other, as collate functions make them that pad to the longest item.

A model is traced with these sizes open. Seconds and memory are measured and planned on the largest mini-batch that was
looked at; a larger one that comes later may need more memory.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from raypipe.capture import Capture
from raypipe.data.open_data import Source
from raypipe.data.stream_source import StreamSource
from raypipe.errors import ConfigError, DataError

MOST_LOOKED_AT, LEAST_LOOKED_AT, LOOKING_S = 8, 3, 1.0
"""Mini-batches to read ahead of a plan, at most and at least; seconds after which only the least are read."""

Shapes = Mapping[Any, tuple[int, ...]]
"""Shape of every column of a mini-batch, by name."""


@dataclass(frozen=True, slots=True)
class DataSizes:
    """Shapes of some mini-batches of the data.

    Attributes:
        minibatch: samples per mini-batch.
        shapes: shapes of the columns by offset of the mini-batch in epoch 0.
    """

    minibatch: int
    shapes: Mapping[int, Shapes] = field(default_factory=dict)

    @property
    def varying(self) -> frozenset[tuple[Any, int]]:
        """(Column, dimension) of each size, besides the number of samples, that is not the same in all mini-batches."""
        ranges = self.ranges
        return frozenset(place for place, (least, most) in ranges.items() if least != most)

    @property
    def ranges(self) -> dict[tuple[Any, int], tuple[int, int]]:
        """Least and greatest size by (column, dimension), without the number of samples."""
        sizes: dict[tuple[Any, int], list[int]] = {}
        for shapes in self.shapes.values():
            for name, shape in shapes.items():
                for at, size in enumerate(shape[1:], 1):
                    sizes.setdefault((name, at), []).append(size)
        return {place: (min(seen), max(seen)) for place, seen in sizes.items()}

    @property
    def largest(self) -> int:
        """Offset of the mini-batch with the most elements; 0 if no size varies."""
        return max(self.shapes, key=self._elements) if self.varying else 0

    @property
    def smallest(self) -> int:
        """Offset of the mini-batch with the fewest elements; 0 if no size varies."""
        return min(self.shapes, key=self._elements) if self.varying else 0

    def _elements(self, offset: int) -> int:
        return sum(torch.Size(shape[1:]).numel() for shape in self.shapes[offset].values())

    def rows(self, source: Source, columns: Sequence[Any], count: int, offset: int = 0) -> Any:
        """Read ``count`` samples from ``offset`` on, as ``Source.read`` returns them.

        If sizes vary, the samples have the sizes of their whole mini-batch.
        """
        if not self.varying:
            return source.read(0, 0, count, columns)
        offset = min(offset, source.num_samples - count)
        read = source.read(0, offset, min(max(count, self.minibatch), source.num_samples - offset), columns)
        return {k: x[:count] for k, x in read.items()} if isinstance(read, Mapping) else tuple(x[:count] for x in read)

    def note(self) -> str:
        """Return a sentence for a plan on the sizes that vary; "" if none do."""
        ranges = {place: self.ranges[place] for place in sorted(self.varying, key=str)}
        if not ranges:
            return ""
        words = ", ".join(f"size {at} of {name!r} from {a} to {b}" for (name, at), (a, b) in ranges.items())
        return (
            f"mini-batches vary ({words}, in {len(self.shapes)} of them): seconds and memory are those of the largest."
        )


def look_at(source: Source, columns: Sequence[Any], minibatch: int) -> DataSizes:
    """Read some mini-batches of ``minibatch`` samples, spread over an epoch; of a stream the first ones.

    A mini-batch that cannot be read is left out: the step that reads it reports the error.
    """
    sizes: dict[int, Shapes] = {}
    count = max(1, source.num_samples // minibatch)
    if getattr(source, "is_tensors", False) or getattr(source, "read_by_tasks", False):  # one shape; slow to begin
        return DataSizes(minibatch)
    spread = 1 if isinstance(source, StreamSource) else max(1, count // MOST_LOOKED_AT)
    deadline_s = time.monotonic() + LOOKING_S
    for offset in [minibatch * spread * i for i in range(min(count, MOST_LOOKED_AT))]:
        try:
            read = source.read(0, offset, min(minibatch, source.num_samples), columns)
        except DataError:
            continue
        by_name = read if isinstance(read, Mapping) else dict(zip(columns, read, strict=True))
        sizes[offset] = {name: tuple(x.shape) for name, x in by_name.items()}
        if time.monotonic() > deadline_s and len(sizes) >= LEAST_LOOKED_AT:
            break
    return DataSizes(minibatch, sizes)


def refuse_unfit_shapes(captured: Capture, seen: Mapping[str, DataSizes]) -> None:
    """Raise ConfigError if the captured model is not valid for a mini-batch that was looked at.

    Args:
        seen: sizes of the training data ("train"), and of the evaluation data ("eval").
    """
    for mode, sizes in seen.items():
        for offset, shapes in sizes.shapes.items():
            if wrong := captured.misfit(mode, shapes):
                raise ConfigError(f"{mode}_data, mini-batch from sample {offset} on: {wrong}")
