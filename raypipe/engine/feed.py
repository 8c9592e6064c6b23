"""The data of one stage: its own columns of every micro-batch, and on the last stage the weights of the losses."""

from __future__ import annotations

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


class Feed:
    """Reads a mini-batch when its first micro-batch is asked for and cuts it up.

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
        self._at: tuple[str, int, int] | None = None
        self._parts: list[dict[Any, torch.Tensor]] = []
        self._weights: list[float] = []

    def microbatch(self, segment: Segment, microbatch: int, *, training: bool) -> MicrobatchData:
        """The data of a micro-batch, by its number in the run."""
        mode = "train" if training else "eval"
        wanted = self._columns[mode]
        if not wanted and not self._weighs:
            return MicrobatchData({}, 0.0)
        minibatch, index = divmod(microbatch - segment.first_microbatch, len(segment.microbatch_samples))
        begin = segment.offset + minibatch * segment.minibatch_samples
        if self._at != (mode, segment.epoch, begin):
            self._read(mode, segment, begin)
        return MicrobatchData(self._parts[index], self._weights[index] if self._weighs else 0.0)

    def _read(self, mode: str, segment: Segment, begin: int) -> None:
        wanted = self._columns[mode]
        sizes = segment.microbatch_samples
        whole: dict[Any, torch.Tensor] = {}
        if wanted:
            read: Any = self._sources[mode].read(segment.epoch, begin, segment.minibatch_samples, wanted)
            whole = read if isinstance(read, dict) else dict(zip(wanted, read, strict=True))
        self._parts = [{} for _ in sizes]
        for name, tensor in whole.items():
            for part, piece in zip(self._parts, tensor.split(sizes), strict=True):
                part[name] = piece
        if self._weighs:
            self._weights = loss_weights(self._reduction, sizes, self._counted(whole))
        self._at = (mode, segment.epoch, begin)

    def _counted(self, whole: Mapping[Any, torch.Tensor]) -> torch.Tensor | None:
        """What loss_reduction counts."""
        return whole[self._targets[-1]] if self._targets else None
