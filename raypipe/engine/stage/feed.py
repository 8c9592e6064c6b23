"""Data of one stage: the columns of every micro-batch, their number of tokens, and the losses' weights on the last
stage.

``token_column`` selects the column of token ids by the first rule that applies:

    columns of the data                           column of token ids
    input_ids, attention_mask, labels             input_ids
    tokens, targets                               tokens
    0, 1 (of tuples)                              0, if it is int64 or int32 of shape (samples, length)

Every entry of the column counts as a token, including padding, which takes as much computation as any other token.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from raypipe.data.open_data import Source
from raypipe.data.stream import Mark
from raypipe.data.stream_source import StreamReading, own_reader
from raypipe.engine.stage.losses import LossCounts, Reduction, Weights, evaluation_shares, update_weights
from raypipe.engine.stage.minibatch_loss import WholeMinibatch
from raypipe.errors import DataError
from raypipe.ir.segment import Segment
from raypipe.user_lines import quoted, short


class MicrobatchData(NamedTuple):
    """Data columns of a micro-batch, and the weights of its loss.

    Attributes:
        columns: tensors of shape (samples, ...) in host memory by column name.
        placed: the same on the device: views of one copy of the mini-batch.
        weights: weight of each part of the micro-batch's loss in the gradient of its update; most losses have one part.
        shares: weight of each part in the loss of the mini-batch. Equal to ``weights`` if the mini-batch is one update.
    """

    columns: Mapping[Any, torch.Tensor]
    placed: Mapping[Any, torch.Tensor]
    weights: Weights = ()
    shares: Weights = ()


class _Minibatch(NamedTuple):
    """Data of a mini-batch, one entry per micro-batch as in MicrobatchData.

    Attributes:
        whole: the columns of the mini-batch in host memory.
        items: number of items over which each part of the loss averages; in evaluation only.
    """

    whole: Mapping[Any, torch.Tensor]
    parts: list[dict[Any, torch.Tensor]]
    placed: list[dict[Any, torch.Tensor]]
    weights: Sequence[Weights] = ()
    shares: Sequence[Weights] = ()
    items: Weights = ()


class Feed:
    """Reader of mini-batches, which it splits into micro-batches.

    ``prepare`` reads mini-batches in advance; ``microbatch`` reads any other mini-batch when it is called for its first
    micro-batch. Two threads may call these methods at once, but only one of them reads at a time.

    Args:
        sources: data by mode: "train" and, for evaluation, "eval".
        columns: columns that the stage reads, by mode.
        targets: columns that the loss reads.
        weighs: True on the last stage, which needs the losses' weights.
        owner: (stage, worker); each owner has a separate reader of a data stream.
        token_column: column of token ids; None counts no tokens.
        place: copies columns to the device, in the thread that calls ``microbatch``; None if that is the CPU.
        reduction: average of the loss; its items are counted in the last target, or in the column "labels" if the model
            returns its own loss.
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
        token_column: Any = None,
        place: Callable[[Mapping[Any, torch.Tensor]], Mapping[Any, torch.Tensor]] | None = None,
    ) -> None:
        self._place = place
        self._sources = {mode: own_reader(source, (owner, mode)) for mode, source in sources.items()}
        self._end: tuple[int, int] | None = None  # epoch and offset after the newest mini-batch of training
        self._counted = _counted_columns(reduction, targets) if weighs else ()
        self._columns = {
            mode: tuple(dict.fromkeys((*names, *targets, *self._counted))) for mode, names in columns.items()
        }
        self._token_column = token_column
        self._tokens: dict[int, int] = {}  # by micro-batch
        self._targets, self._weighs = tuple(targets), weighs
        self._reduction = reduction
        self._current: tuple[tuple[str, int, int], _Minibatch] | None = None
        self._ahead: dict[tuple[str, int, int], _Minibatch | Exception] = {}
        self._reading = threading.Lock()
        self.reading = False
        """True while ``microbatch`` waits for data."""

    def prepare(self, segment: Segment, *, training: bool) -> None:
        """Read the mini-batches that begin in this segment. If a read fails, ``microbatch`` raises its exception."""
        mode = "train" if training else "eval"
        if not self._columns[mode] and not self._weighs:
            return
        first = 0 if segment.phase.begins_empty else 1  # the segment before has read what it began
        stop = segment.num_minibatches if segment.phase.ends_empty else segment.num_minibatches + 1
        for minibatch in range(first, stop):
            key = (mode, segment.epoch, segment.offset + minibatch * segment.minibatch_samples)
            try:
                self._ahead[key] = self._read(key, segment)
            except BaseException as error:  # noqa: BLE001  (raised where the data is used; no Ctrl-C reaches this thread)
                failed = DataError(f"A sample cannot be read{quoted(error)}: {short(error)}")
                self._ahead[key] = error if isinstance(error, Exception) else failed

    def microbatch(self, segment: Segment, microbatch: int, *, training: bool) -> MicrobatchData:
        """Return the data of a micro-batch, given by its number in the run; read its mini-batch if necessary.

        Raises:
            DataError: the data cannot be read; other exceptions of ``prepare`` are raised here too.
        """
        mode = "train" if training else "eval"
        columns = self._columns[mode]
        if not columns and not self._weighs:
            return MicrobatchData({}, {})
        minibatch, index = divmod(microbatch - segment.first_microbatch, len(segment.microbatch_samples))
        key = (mode, segment.epoch, segment.offset + minibatch * segment.minibatch_samples)
        if self._current is None or self._current[0] != key:
            self._current = None  # frees the columns of the mini-batch before, which the device has whole
            loaded = self._ahead.pop(key, None)
            if isinstance(loaded, Exception):
                raise loaded
            if loaded is None:
                self.reading = True
                try:
                    loaded = self._read(key, segment)
                finally:
                    self.reading = False
            if self._place is not None:
                placed = _split(self._place(loaded.whole), segment.microbatch_samples)
                loaded = loaded._replace(placed=placed)
            self._current = (key, loaded)
        if training:
            self._end = segment.epoch, key[2] + segment.minibatch_samples
        _, parts, placed, weights, shares, _ = self._current[1]
        if training and self._token_column in parts[index]:
            self._tokens[microbatch] = parts[index][self._token_column].numel()
        of_loss = (weights[index], shares[index]) if self._weighs else ()
        return MicrobatchData(parts[index], placed[index], *of_loss)

    def targets(self, index: int) -> dict[Any, torch.Tensor]:
        """Return the columns that the loss reads, on the device, of a micro-batch of the mini-batch read last."""
        assert self._current is not None
        return {name: self._current[1].placed[index][name] for name in self._targets}

    def take_tokens(self, segment: Segment, step: int) -> int:
        """Remove and return the number of tokens in a finished step's mini-batch; 0 if the stage reads no tokens."""
        count = len(segment.microbatch_samples)
        first = segment.first_microbatch + (step - segment.first_step) * count
        return sum(self._tokens.pop(microbatch, 0) for microbatch in range(first, first + count))

    def source(self, *, training: bool) -> Source:
        """Return the source of the training or evaluation data."""
        return self._sources["train" if training else "eval"]

    def mark(self) -> Mark | None:
        """Return the position in the stream of train_data after the newest mini-batch, from which a run can resume.

        Returns None if train_data is no stream, or if this stage has read nothing from it.
        """
        reader = self._sources.get("train")
        return reader.mark(*self._end) if isinstance(reader, StreamReading) and self._end is not None else None

    def learn(self, mark: Mark | None) -> None:
        """Set the position from which to resume the stream of train_data; no effect if None, or without a stream."""
        reader = self._sources.get("train")
        if mark is not None and isinstance(reader, StreamReading):
            reader.learn(mark)

    def close(self) -> None:
        """Close the readers of streams."""
        for source in self._sources.values():
            if isinstance(source, StreamReading):
                source.close()

    @property
    def items(self) -> Weights:
        """Number of items over which each part of the mini-batch's loss averages; on the last stage, in evaluation."""
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
        parts = _split(whole, sizes)
        if not self._weighs:
            return _Minibatch(whole, parts, parts)
        counted: Any = None
        if isinstance(self._reduction, LossCounts):
            counted = parts
        elif self._counted:
            counted = whole[self._counted[-1]]
        if mode == "train":
            weights, shares = update_weights(self._reduction, sizes, counted, segment.interval)
            return _Minibatch(whole, parts, parts, weights=weights, shares=shares)
        shares, items = evaluation_shares(self._reduction, sizes, counted)
        return _Minibatch(whole, parts, parts, weights=shares, shares=shares, items=items)


def _split(whole: Mapping[Any, torch.Tensor], sizes: Sequence[int]) -> list[dict[Any, torch.Tensor]]:
    """Return the columns of each micro-batch, as views of those of the mini-batch."""
    parts: list[dict[Any, torch.Tensor]] = [{} for _ in sizes]
    for name, tensor in whole.items():
        for part, piece in zip(parts, tensor.split(sizes), strict=True):
            part[name] = piece
    return parts


def _counted_columns(reduction: Reduction, targets: Sequence[Any]) -> tuple[Any, ...]:
    """Return the data columns from which the weights of the losses are computed."""
    if isinstance(reduction, LossCounts):
        return reduction.columns
    if reduction in ("mean", "sum") or isinstance(reduction, WholeMinibatch):
        return ()
    return tuple(targets[-1:]) or ("labels",)


NAMES = ("input_ids", "tokens")
_IDS = (torch.int64, torch.int32)


def token_column(names: Sequence[Any], example: Mapping[Any, torch.Tensor]) -> Any:
    """Return the key of the column of token ids; None if no rule applies.

    Args:
        names: column names of the data, in order.
        example: some samples of each column, by the key of the column that stages use, a name or an index.
    """
    for name in NAMES:
        if name in names:
            return name if name in example else list(names).index(name)
    first = example.get(0)
    ids = first is not None and first.dtype in _IDS and first.dim() == 2 and first.shape[1] > 1
    return 0 if ids else None
