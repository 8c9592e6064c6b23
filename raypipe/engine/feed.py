"""The data of one stage: its own columns of every micro-batch, and on the last stage the weights of the losses."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from raypipe.engine.data.source import Source
from raypipe.engine.data.stream import Mark
from raypipe.engine.data.stream_source import StreamReading, own_reader
from raypipe.engine.loss_counts import LossCounts
from raypipe.engine.microbatch import Reduction, Weights, evaluation_shares, update_weights
from raypipe.engine.user_lines import quoted, short
from raypipe.errors import DataError
from raypipe.ir.segment import Segment

__all__ = ["Feed", "MicrobatchData"]


class MicrobatchData(NamedTuple):
    """A micro-batch.

    Attributes:
        columns: by name, shape (samples, ...).
        weights: of the parts of its loss in the gradient of its update; mostly there is one part.
        shares: of them in the loss of its mini-batch; the same where there is one update per mini-batch.
    """

    columns: Mapping[Any, torch.Tensor]
    weights: Weights = ()
    shares: Weights = ()


class _Minibatch(NamedTuple):
    """Columns, weights and shares of each micro-batch; in evaluation also the items that the loss averages over."""

    parts: list[dict[Any, torch.Tensor]]
    weights: list[Weights]
    shares: list[Weights]
    items: Weights


class Feed:
    """Reads mini-batches and cuts them up: ahead where ``prepare`` is called, else when the first part is needed.

    One thread may prepare while another takes; reading itself is done by one of them at a time.

    Args:
        sources: "train" and, for evaluation, "eval".
        columns: that the stage reads in training and in evaluation, by mode.
        targets: columns that the loss reads.
        weighs: whether this is the last stage, which needs the weights.
        owner: stage and worker; of a stream each reads for itself.
        reduction: see Reduction; what is counted is the last target, or the column "labels" of a model that returns
            its own loss.
    """

    def __init__(
        self,
        sources: Mapping[str, Source],
        columns: Mapping[str, Sequence[Any]],
        targets: Sequence[Any],
        *,
        weighs: bool,
        reduction: Reduction,
        owner: Any = None,
    ) -> None:
        self._sources = {mode: own_reader(source, (owner, mode)) for mode, source in sources.items()}
        self._end: tuple[int, int] | None = None  # epoch and offset after the newest mini-batch of training
        self._counted = _counted_columns(reduction, targets) if weighs else ()
        self._columns = {
            mode: tuple(dict.fromkeys((*names, *targets, *self._counted))) for mode, names in columns.items()
        }
        self._weighs = weighs
        self._reduction = reduction
        self._current: tuple[tuple[str, int, int], _Minibatch] | None = None
        self._ahead: dict[tuple[str, int, int], _Minibatch | Exception] = {}
        self._reading = threading.Lock()
        self.reading = False
        """Whether ``microbatch`` waits for data at this moment."""

    def prepare(self, segment: Segment, *, training: bool) -> None:
        """Read the mini-batches that the segment begins now; a failure is kept for the thread that needs the data."""
        mode = "train" if training else "eval"
        if not self._columns[mode] and not self._weighs:
            return
        first = 0 if segment.phase.begins_empty else 1  # what the segment before has begun, it has read
        stop = segment.num_minibatches if segment.phase.ends_empty else segment.num_minibatches + 1
        for minibatch in range(first, stop):
            key = (mode, segment.epoch, segment.offset + minibatch * segment.minibatch_samples)
            try:
                self._ahead[key] = self._read(key, segment)
            except Exception as error:  # noqa: BLE001  (raised again where the data is used)
                self._ahead[key] = error
            except BaseException as error:  # noqa: BLE001  (likewise: nobody presses Ctrl-C here)
                self._ahead[key] = DataError(f"A sample cannot be read{quoted(error)}: {short(error)}")

    def microbatch(self, segment: Segment, microbatch: int, *, training: bool) -> MicrobatchData:
        """The data of a micro-batch, by its number in the run."""
        mode = "train" if training else "eval"
        wanted = self._columns[mode]
        if not wanted and not self._weighs:
            return MicrobatchData({})
        minibatch, index = divmod(microbatch - segment.first_microbatch, len(segment.microbatch_samples))
        key = (mode, segment.epoch, segment.offset + minibatch * segment.minibatch_samples)
        if self._current is None or self._current[0] != key:
            found = self._ahead.pop(key, None)
            if isinstance(found, Exception):
                raise found
            if found is None:
                self.reading = True
                try:
                    found = self._read(key, segment)
                finally:
                    self.reading = False
            self._current = (key, found)
        if training:
            self._end = segment.epoch, key[2] + segment.minibatch_samples
        parts, weights, shares, _ = self._current[1]
        if not self._weighs:
            return MicrobatchData(parts[index])
        return MicrobatchData(parts[index], weights[index], shares[index])

    def source(self, *, training: bool) -> Source:
        """What is read from."""
        return self._sources["train" if training else "eval"]

    def mark(self) -> Mark | None:
        """Where the stream of train_data goes on, between two steps; None where it is none, or the stage reads none."""
        reader = self._sources.get("train")
        return reader.mark(*self._end) if isinstance(reader, StreamReading) and self._end is not None else None

    def learn(self, mark: Mark | None) -> None:
        """What a checkpoint says of the stream, with which the run goes on."""
        reader = self._sources.get("train")
        if mark is not None and isinstance(reader, StreamReading):
            reader.learn(mark)

    def close(self) -> None:
        """Nothing more is read."""
        for source in self._sources.values():
            if isinstance(source, StreamReading):
                source.close()

    @property
    def items(self) -> Weights:
        """How many items each part of the current mini-batch's loss averages over; of the last stage, in evaluation."""
        assert self._current is not None
        return self._current[1].items

    def _read(self, key: tuple[str, int, int], segment: Segment) -> _Minibatch:
        mode, epoch, begin = key
        wanted, sizes = self._columns[mode], segment.microbatch_samples
        whole: dict[Any, torch.Tensor] = {}
        if wanted:
            read: Any
            try:
                with self._reading:
                    read = self._sources[mode].read(epoch, begin, segment.minibatch_samples, wanted)
            except DataError as error:
                step = segment.first_step + (begin - segment.offset) // segment.minibatch_samples
                when = f"Step {step}" if mode == "train" else "Evaluation"
                raise DataError(f"{when}: {error}") from None
            whole = read if isinstance(read, dict) else dict(zip(wanted, read, strict=True))
        parts: list[dict[Any, torch.Tensor]] = [{} for _ in sizes]
        for name, tensor in whole.items():
            for part, piece in zip(parts, tensor.split(sizes), strict=True):
                part[name] = piece
        if not self._weighs:
            return _Minibatch(parts, [], [], ())
        counted: Any = None
        if isinstance(self._reduction, LossCounts):
            counted = parts
        elif self._counted:
            counted = whole[self._counted[-1]]
        if mode == "train":
            return _Minibatch(parts, *update_weights(self._reduction, sizes, counted, segment.interval), ())
        shares, items = evaluation_shares(self._reduction, sizes, counted)
        return _Minibatch(parts, shares, shares, items)


def _counted_columns(reduction: Reduction, targets: Sequence[Any]) -> tuple[Any, ...]:
    """Data columns that the weights of the losses follow from."""
    if isinstance(reduction, LossCounts):
        return reduction.columns
    if reduction in ("mean", "sum"):
        return ()
    return tuple(targets[-1:]) or ("labels",)
