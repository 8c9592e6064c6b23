"""Training data that is a stream: an iterable without a length, which is iterated over again for each pass.

    train_data=datasets.load_dataset("text", streaming=True)["train"]      an endless epoch
    train_data=raypipe.data.Stream(stream, num_samples=10_000)             epochs of so many samples, one after another

Every stage that reads data iterates over the stream for itself. Where a run stands is (epoch, offset), as everywhere;
with a checkpoint goes a mark (stream.py), so that a run that goes on need not read the stream from its begin.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset

from raypipe.engine.data.collate import Collate, collated
from raypipe.engine.data.stacking import key_of, parts_of, stacked
from raypipe.engine.data.stream import MOST_MARKS, Mark, StreamReader, copied, resumes
from raypipe.engine.item_randomness import own_generators
from raypipe.errors import ConfigError, DataError

__all__ = ["ENDLESS", "Stream", "StreamReading", "StreamSource", "has_numbered_items", "is_stream", "own_reader"]

ENDLESS = 1 << 50
"""Samples of an epoch that has no end."""
NUM_READ_TWICE = 4
READ_AGAIN_S = 5.0


@dataclass(frozen=True, slots=True)
class Stream:
    """A stream as train_data or eval_data.

    Args:
        dataset: its ``__iter__`` begins anew each time; with a ``set_epoch``, that is told the number of the pass.
        num_samples: of one epoch; the next epoch goes on behind them. Of eval_data, how many of its first samples every
            evaluation takes. None makes one epoch without an end, for train_data only.

    Raises:
        ConfigError: it cannot be iterated over, or num_samples is no number of samples.
    """

    dataset: Any
    num_samples: int | None = None

    def __post_init__(self) -> None:
        if not is_stream(self.dataset) and not hasattr(self.dataset, "__iter__"):
            raise ConfigError(f"Stream({type(self.dataset).__name__}) cannot be iterated over; give an iterable.")
        if self.num_samples is not None and (type(self.num_samples) is not int or self.num_samples < 1):
            raise ConfigError(f"Stream(num_samples={self.num_samples!r}): give an integer of at least 1, or None.")


def is_stream(data: Any) -> bool:
    """Whether this is read as a stream: what has items one behind the other, and no number of them."""
    if isinstance(data, Stream) or callable(getattr(data, "iter_rows", None)):
        return True
    return hasattr(data, "__iter__") and not has_numbered_items(data)


def has_numbered_items(data: Any) -> bool:
    """Whether items are found by their number; torch gives every IterableDataset a ``__getitem__`` that only raises."""
    return hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, IterableDataset)


def own_reader(source: Any, owner: Any) -> Any:
    """A source for one reader: of a stream one of its own, any other as it is."""
    return source.reader(owner) if isinstance(source, StreamSource) else source


class StreamSource:
    """Reads samples of any epoch by position; see ``open_data``.

    Args:
        stream: or what it is made of.
        seed: of the draws of items.
        collate: makes columns of items; None stacks them.
        again: begin anew where the stream ends; False refuses to give items more than once.
    """

    def __init__(self, stream: Any, *, seed: int, collate: Collate | None = None, again: bool = True) -> None:
        given = stream if isinstance(stream, Stream) else Stream(stream)
        self._name = type(given.dataset).__name__
        self.read_by_tasks = callable(getattr(given.dataset, "iter_rows", None))
        """By tasks of Ray: a ray.data.Dataset."""
        # Copies for readers are made of one that nobody else looks at, for they are made in several threads.
        self._items = _Rows(given.dataset) if self.read_by_tasks else _copy_of(given.dataset)
        self._seed, self._collate, self._again = seed, collate, again
        self.num_samples = given.num_samples or ENDLESS
        self.shown_samples = min(NUM_READ_TWICE, self.num_samples)
        """From the first on: what says that it is the same stream."""
        self._check_repeats()
        self._saves = resumes(self._items, seed, _same_items)
        self._readers: dict[Any, StreamReading] = {}
        self._learnt: Mark | None = None
        self._lock = threading.Lock()
        self.columns: tuple[Any, ...] = ()
        self.columns = tuple(self._columns_of(self.reader(None).items(0, 1), 0, None))
        self._pause()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_readers", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _readers={}, _lock=threading.Lock())

    def reader(self, owner: Any) -> StreamReading:
        """The same samples for one reader, which goes forwards at its own pace; asked again, the same one.

        A new one knows how to get to where others of this process have been: a stage may become another worker's.
        """
        with self._lock:
            if owner not in self._readers:
                known = {mark.position: mark for other in self._readers.values() for mark in other.marks}
                if self._learnt is not None:
                    known[self._learnt.position] = self._learnt
                self._readers[owner] = StreamReading(self)
                for position in sorted(known)[-MOST_MARKS:]:
                    self._readers[owner].learn(known[position])
            return self._readers[owner]

    def learn(self, mark: Mark) -> None:
        """Where the run goes on, which was in another process until now: for all readers here, later ones too."""
        with self._lock:
            self._learnt, readers = mark, list(self._readers.values())
        for reader in readers:
            reader.learn(mark)

    def read(
        self, epoch: int, start: int, count: int, columns: Sequence[str] | Sequence[int]
    ) -> tuple[torch.Tensor, ...] | dict[str, torch.Tensor]:
        """See ``raypipe.engine.data.source.Source.read``."""
        try:
            return self.reader(None).read(epoch, start, count, columns)
        finally:
            self._pause()

    def read_again(self, epoch: int, start: int, count: int, columns: Sequence[Any]) -> dict[Any, torch.Tensor] | None:
        """Samples that readers have passed, or None where it takes longer than ``READ_AGAIN_S`` to come there.

        From the nearest mark of any reader in this process, where the stream has a state, else from the begin.
        """
        if self.read_by_tasks:  # of Ray, which would begin the dataset once more
            return None
        with self._lock:
            readers = tuple(self._readers.values()) if self._saves else ()
        position = epoch * self.num_samples + start
        marks = [mark for reader in readers if (mark := reader.mark_before(position)) is not None]
        again, ended = self._reader(saves=self._saves), threading.Event()
        for mark in marks:
            again.learn(mark)
        found: list[Any] = []

        def read() -> None:
            with suppress(Exception):  # what this is to explain is told without it
                for at in range(max((mark.position for mark in marks), default=0), position + count):
                    if ended.is_set():
                        return
                    found.extend(again.read(at, 1)[: at >= position])
            again.close()

        # A daemon, for a stream that waits for a network cannot be interrupted.
        thread = threading.Thread(target=read, name="raypipe reads a stream again", daemon=True)
        thread.start()
        thread.join(READ_AGAIN_S)
        ended.set()
        return self._columns_of(found, position, columns) if len(found) == count else None

    def named(self, epoch: int, position: int) -> str:
        """See ``raypipe.engine.data.source.Source.named``."""
        return f"item {epoch * self.num_samples + position} of {self._name}"

    def _pause(self) -> None:
        """Whoever plans reads now and then, and keeps no tasks of Ray under way meanwhile."""
        if self.read_by_tasks:
            self.reader(None).close()

    def _check_repeats(self) -> None:
        """Refuse what can be read once only, or differs each time.

        Raises:
            DataError: names the item.
        """
        if iter(self._items) is self._items:
            raise DataError(
                f"{self._name} can be iterated over once only, but every stage that reads data does so for itself. "
                "Give an object whose __iter__ begins anew each time, a torch IterableDataset for one."
            )
        # Of two copies, for both to know nothing of each other.
        once, again = self._first(), self._first()
        for row, (one, other) in enumerate(zip(once, again, strict=True)):
            if not _same_items(one, other):
                cure = (
                    "Draw from torch's, numpy's or Python's global generators, which raypipe seeds by (seed, position) "
                    "around each item, or from a generator that __iter__ makes anew of a fixed seed."
                )
                if self.read_by_tasks:
                    cure = "Give data.materialize(), which is executed once and keeps its order."
                raise DataError(
                    f"Item {row} of {self._name} comes differently each time it is iterated over, so the stage that "
                    f"reads the input and the stage that reads the target would see different items. {cure}"
                )

    def _first(self) -> list[Any]:
        with closing(self._reader(saves=False)) as reader:
            return reader.read(0, self.shown_samples)

    def _reader(self, *, saves: bool) -> StreamReader:
        once = None if self._again else self.num_samples
        return StreamReader(_copy_of(self._items), self._name, self._seed, saves=saves, once=once)

    def _columns_of(self, items: list[Any], first: int, wanted: Sequence[Any] | None) -> dict[Any, torch.Tensor]:
        rows = list(range(first, first + len(items)))
        if self._collate is not None:
            return collated(self._collate, items, rows, self._seed, 0)
        parts = [parts_of(item) for item in items]
        names = self.columns or tuple(parts[0])
        for row, item in zip(rows, parts, strict=True):
            if tuple(item) != names:
                raise DataError(
                    f"Item {row} of {self._name} has the columns {list(item)}, but item 0 has {list(names)}. Make "
                    "every item alike."
                )
        keys = names if wanted is None else wanted
        return {key: stacked(self._name, key, [item[key] for item in parts], rows) for key in keys}


class StreamReading:
    """The reader of a stage: a Source itself. Several threads may read, one at a time."""

    def __init__(self, source: StreamSource) -> None:
        self._source = source
        self._reader = source._reader(saves=source._saves)
        self._lock = threading.Lock()
        self.num_samples, self.columns = source.num_samples, source.columns

    def items(self, position: int, count: int) -> list[Any]:
        with self._lock:
            return self._reader.read(position, count)

    def read(
        self, epoch: int, start: int, count: int, columns: Sequence[str] | Sequence[int]
    ) -> tuple[torch.Tensor, ...] | dict[str, torch.Tensor]:
        source = self._source
        if not 0 <= start <= start + count <= source.num_samples:
            raise DataError(
                f"Samples {start} to {start + count} were asked of {source._name}, of which an epoch has "
                f"{source.num_samples}."
            )
        keys = [key_of(source._name, source.columns, column) for column in columns]
        position = epoch * source.num_samples + start
        read = source._columns_of(self.items(position, max(1, count)), position, keys)
        read = read if count else {key: value[:0] for key, value in read.items()}
        missing = [key for key in keys if key not in read]
        if missing:
            raise DataError(
                f"collate_fn made no column {missing[0]!r} of items {position} and others, as it did of item 0. Let it "
                "make the same columns of any items."
            )
        if all(isinstance(column, int) for column in columns):
            return tuple(read[key] for key in keys)
        return {key: read[key] for key in keys}

    def named(self, epoch: int, position: int) -> str:
        return self._source.named(epoch, position)

    def close(self) -> None:
        """Let go of the iteration; the samples that come next are those that would have come."""
        with self._lock:
            self._reader.close()

    def mark(self, epoch: int, offset: int) -> Mark | None:
        """How to get to this sample again, see StreamReader. Where it has been read ahead, nobody waits for a read."""
        position = epoch * self._source.num_samples + offset
        if (known := self._reader.known(position)) is not None:
            return known
        with self._lock:
            return self._reader.mark(position)

    def mark_before(self, position: int) -> Mark | None:
        """The nearest, see StreamReader; None while somebody reads."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return self._reader.mark_before(position)
        finally:
            self._lock.release()

    @property
    def marks(self) -> list[Mark]:
        return self._reader.marks

    def learn(self, mark: Mark) -> None:
        with self._lock:
            self._reader.learn(mark)


class _Rows:
    """The rows of a ray.data.Dataset, always in the same order."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        options = getattr(getattr(dataset, "context", None), "execution_options", None)
        if options is not None:
            options.preserve_order = True

    def __iter__(self) -> Iterator[Any]:
        """Closed, it ends the execution of the dataset, which else would start Ray again when a process ends."""
        rows = iter(self._dataset.iter_rows())
        try:
            yield from rows
        finally:
            if (close := getattr(rows, "close", None)) is not None:
                close()


def _copy_of(stream: Any) -> Any:
    """For one reader: what it is told of passes and states is no business of others."""
    if not any(hasattr(stream, name) for name in ("set_epoch", "load_state_dict")):
        return stream
    with own_generators():
        return copied(stream)


def _same_items(one: Any, other: Any) -> bool:
    here, there = parts_of(one), parts_of(other)
    return here.keys() == there.keys() and all(_same(here[name], there[name]) for name in here)


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.shape == other.shape and torch.equal(torch.nan_to_num(one), torch.nan_to_num(other))
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        equal_nan = np.asarray(one).dtype.kind == "f"
        return bool(np.array_equal(one, other, equal_nan=equal_nan))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return _same_items(one, other)
    return bool(one == other or (one != one and other != other))
