"""The data of one stage: its own columns of every micro-batch, and on the last stage the weights of the losses."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from raypipe.engine.data import Source
from raypipe.engine.microbatch import loss_weights
from raypipe.ir.plan import Segment

__all__ = ["Feed", "MicrobatchData"]


class MicrobatchData(NamedTuple):
    """Columns by name, shape (samples, ...), and the weight of this micro-batch's loss."""

    columns: Mapping[Any, torch.Tensor]
    weight: float


class _Minibatch(NamedTuple):
    """Columns and weight of each micro-batch."""

    parts: list[dict[Any, torch.Tensor]]
    weights: list[float]


class Feed:
    """Reads mini-batches and cuts them up: ahead where ``prepare`` is called, else when the first part is needed.

    One thread may prepare while another takes; reading itself is done by one of them at a time.

    Args:
        sources: "train" and, for evaluation, "eval".
        columns: that the stage reads in training and in evaluation, by mode.
        targets: columns that the loss reads, the last of which loss_reduction counts.
        weighs: whether this is the last stage, which needs the weights.
        reduction: see PipelineConfig.loss_reduction.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        columns: Mapping[str, Sequence[Any]],
        targets: Sequence[Any],
        *,
        weighs: bool,
        reduction: Any,
    ) -> None:
        self._sources = sources
        self._columns = {mode: tuple(dict.fromkeys((*names, *targets))) for mode, names in columns.items()}
        self._targets = tuple(targets)
        self._weighs = weighs
        self._reduction = reduction
        self._current: tuple[tuple[str, int, int], _Minibatch] | None = None
        self._ahead: dict[tuple[str, int, int], _Minibatch | Exception] = {}
        self._reading = threading.Lock()

    def prepare(self, segment: Segment, *, training: bool) -> None:
        """Read the segment's first mini-batch now; a failure is kept for the thread that needs the data."""
        mode = "train" if training else "eval"
        if not self._columns[mode] and not self._weighs:
            return
        key = (mode, segment.epoch, segment.offset)
        try:
            self._ahead[key] = self._read(key, segment)
        except Exception as error:  # noqa: BLE001  (raised again where the data is used)
            self._ahead[key] = error

    def microbatch(self, segment: Segment, microbatch: int, *, training: bool) -> MicrobatchData:
        """The data of a micro-batch, by its number in the run."""
        mode = "train" if training else "eval"
        wanted = self._columns[mode]
        if not wanted and not self._weighs:
            return MicrobatchData({}, 0.0)
        minibatch, index = divmod(microbatch - segment.first_microbatch, len(segment.microbatch_samples))
        key = (mode, segment.epoch, segment.offset + minibatch * segment.minibatch_samples)
        if self._current is None or self._current[0] != key:
            found = self._ahead.pop(key, None)
            if isinstance(found, Exception):
                raise found
            self._current = (key, found if found is not None else self._read(key, segment))
        parts, weights = self._current[1]
        return MicrobatchData(parts[index], weights[index] if self._weighs else 0.0)

    def _read(self, key: tuple[str, int, int], segment: Segment) -> _Minibatch:
        mode, epoch, begin = key
        wanted, sizes = self._columns[mode], segment.microbatch_samples
        whole: dict[Any, torch.Tensor] = {}
        if wanted:
            with self._reading:
                read: Any = self._sources[mode].read(epoch, begin, segment.minibatch_samples, wanted)
            whole = read if isinstance(read, dict) else dict(zip(wanted, read, strict=True))
        parts: list[dict[Any, torch.Tensor]] = [{} for _ in sizes]
        for name, tensor in whole.items():
            for part, piece in zip(parts, tensor.split(sizes), strict=True):
                part[name] = piece
        weights = loss_weights(self._reduction, sizes, self._counted(whole)) if self._weighs else []
        return _Minibatch(parts, weights)

    def _counted(self, whole: Mapping[Any, torch.Tensor]) -> torch.Tensor | None:
        """What loss_reduction counts."""
        return whole[self._targets[-1]] if self._targets else None
