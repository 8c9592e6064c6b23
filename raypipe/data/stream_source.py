"""Training data from a stream: an iterable without a length. Each pass over it is a new iteration.

    train_data=datasets.load_dataset("text", streaming=True)["train"]      an endless epoch
    train_data=raypipe.data.Stream(stream, num_samples=10_000)             epochs of 10,000 successive samples each

Every stage that reads data iterates over the stream. A run resumes at (epoch, offset), as with any data. A checkpoint
also contains a mark (stream.py), the state of the stream there, so that the stream is not read from its beginning.
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

from raypipe.data.item_randomness import own_generators
from raypipe.data.stacking import Collate, batch_of, by_request, check_range, key_of, parts_of
from raypipe.data.stream import MOST_MARKS, Mark, StreamReader, copied, resumes
from raypipe.errors import ConfigError, DataError

ENDLESS = 1 << 50
"""Number of samples that stands for an epoch without an end."""
NUM_READ_TWICE = 4
READ_AGAIN_S = 5.0
READ_ON_S = 1.0
"""Seconds for which the remaining rows of a ray.data.Dataset are read before its tasks are cancelled."""


@dataclass(frozen=True, slots=True)
class Stream:
    """Stream as train_data or eval_data.

    Args:
        dataset: iterable whose ``__iter__`` begins anew each time. If it has a method ``set_epoch``, the method is
            called with the number of each pass.
        num_samples: number of samples in an epoch; the next epoch continues after them. For eval_data: every evaluation
            reads this number of samples from the beginning. None defines one epoch without an end, for train_data only.

    Raises:
        ConfigError: ``dataset`` is not iterable, or num_samples is not an integer of at least 1.
    """

    dataset: Any
    num_samples: int | None = None

    def __post_init__(self) -> None:
        if not is_stream(self.dataset) and not hasattr(self.dataset, "__iter__"):
            raise ConfigError(f"Stream({type(self.dataset).__name__}) cannot be iterated over; give an iterable.")
        if self.num_samples is not None and (type(self.num_samples) is not int or self.num_samples < 1):
            raise ConfigError(f"Stream(num_samples={self.num_samples!r}): give an integer of at least 1, or None.")


def is_stream(data: Any) -> bool:
    """Return True if the data is a stream: a Stream, a ray.data.Dataset, or an iterable whose items have no index."""
    if isinstance(data, Stream) or callable(getattr(data, "iter_rows", None)):
        return True
    return hasattr(data, "__iter__") and not has_numbered_items(data)


def has_numbered_items(data: Any) -> bool:
    """Return True if items can be read by index; False for an IterableDataset, whose ``__getitem__`` only raises."""
    return hasattr(data, "__len__") and hasattr(data, "__getitem__") and not isinstance(data, IterableDataset)


def own_reader(source: Any, owner: Any) -> Any:
    """Return a reader that belongs to ``owner`` (a stage) if ``source`` is a stream; else return ``source`` itself."""
    return source.reader(owner) if isinstance(source, StreamSource) else source


class StreamSource:
    """Source whose samples come from a stream; see ``open_data.Source``.

    Args:
        stream: a Stream, or an iterable, which becomes a Stream with an endless epoch.
        seed: seed of the random numbers that items and ``collate`` use.
        collate: function that creates columns from items; None stacks the items.
        again: True begins another pass at the end of the stream; False raises there, so that no item is read twice.
    """

    def __init__(self, stream: Any, *, seed: int, collate: Collate | None = None, again: bool = True) -> None:
        stream = stream if isinstance(stream, Stream) else Stream(stream)
        self._name = type(stream.dataset).__name__
        self.read_by_tasks = callable(getattr(stream.dataset, "iter_rows", None))
        """True for a ray.data.Dataset, which tasks of Ray read."""
        # Readers get copies of a private copy, for they are made in several threads.
        self._items = _Rows(stream.dataset) if self.read_by_tasks else _copy_of(stream.dataset)
        self._seed, self._collate, self._again = seed, collate, again
        self.num_samples = stream.num_samples or ENDLESS
        self.shown_samples = min(NUM_READ_TWICE, self.num_samples)
        """Number of first samples by which a resumed run recognizes the stream."""
        self._check_repeats()
        self._saves = resumes(self._items, seed, _same_items)
        self._readers: dict[Any, StreamReading] = {}
        self._learnt: Mark | None = None
        self._lock = threading.Lock()
        self.columns: tuple[Any, ...] = ()
        self.columns = tuple(self._columns_of(self.reader(None).items(0, 1), 0, ()))
        self._pause()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name not in ("_readers", "_lock")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _readers={}, _lock=threading.Lock())

    def reader(self, owner: Any) -> StreamReading:
        """Return the reader of ``owner`` (a stage), which has its own position; create the reader at the first call.

        A mark is a position at which reading can resume. A new reader gets the marks of all other readers in this
        process, because a stage may move to another worker.
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
        """Give the mark at which the run resumes to all readers in this process, existing and future ones."""
        with self._lock:
            self._learnt, readers = mark, list(self._readers.values())
        for reader in readers:
            reader.learn(mark)

    def read(
        self, epoch: int, start: int, count: int, columns: Sequence[str] | Sequence[int]
    ) -> tuple[torch.Tensor, ...] | dict[str, torch.Tensor]:
        """Read samples of an epoch by position; see ``open_data.Source.read``."""
        try:
            return self.reader(None).read(epoch, start, count, columns)
        finally:
            self._pause()

    def read_again(self, epoch: int, start: int, count: int, columns: Sequence[Any]) -> dict[Any, torch.Tensor] | None:
        """Read samples a second time; None if that fails or takes longer than ``READ_AGAIN_S`` seconds.

        Reading begins at the nearest position of which a reader in this process has stored the stream's state, else at
        the beginning of the stream. For a ray.data.Dataset the result is None. Arguments are those of ``read``.
        """
        if self.read_by_tasks:  # reading would execute the dataset again
            return None
        with self._lock:
            readers = tuple(self._readers.values()) if self._saves else ()
        position = epoch * self.num_samples + start
        marks = [mark for reader in readers if (mark := reader.mark_before(position)) is not None]
        again, ended = self._reader(saves=self._saves), threading.Event()
        for mark in marks:
            again.learn(mark)
        items: list[Any] = []

        def read() -> None:
            with suppress(Exception):  # the error that the samples are read for is raised without them
                for at in range(max((mark.position for mark in marks), default=0), position + count):
                    if ended.is_set():
                        return
                    items.extend(again.read(at, 1)[: at >= position])
            again.close()

        # A daemon: a stream that waits for a network cannot be interrupted.
        thread = threading.Thread(target=read, name="raypipe reads a stream again", daemon=True)
        thread.start()
        thread.join(READ_AGAIN_S)
        ended.set()
        return self._columns_of(items, position, columns) if len(items) == count else None

    def named(self, epoch: int, position: int) -> str:
        """Return the name of a sample for messages; see ``open_data.Source.named``."""
        return f"item {epoch * self.num_samples + position} of {self._name}"

    def _pause(self) -> None:
        """End the tasks of Ray that read a ray.data.Dataset; do nothing for other streams."""
        if self.read_by_tasks:
            self.reader(None).close()

    def _check_repeats(self) -> None:
        """Refuse a stream whose first items differ when it is iterated over twice."""
        if iter(self._items) is self._items:
            raise DataError(
                f"{self._name} can be iterated over once only, but every stage that reads data iterates over it. "
                "Give an object whose __iter__ begins anew each time, a torch IterableDataset for one."
            )
        # Two copies, so that neither changes the other.
        once, again = self._first(), self._first()
        for row, (one, other) in enumerate(zip(once, again, strict=True)):
            if not _same_items(one, other):
                cure = (
                    "Give its shuffle a seed, as in .shuffle(1000, seed=0), or draw from torch's, numpy's or Python's "
                    "global generators, which raypipe seeds by (seed, position) around each item, or from a generator "
                    "that __iter__ makes anew of a fixed seed."
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

    def _columns_of(self, items: list[Any], first: int, keys: Sequence[Any]) -> dict[Any, torch.Tensor]:
        rows = range(first, first + len(items))
        return batch_of(items, rows, self._name, self._collate, self.columns, keys, seed=self._seed)


class StreamReading:
    """Reader of a StreamSource for one stage, itself a Source. Threads may share a reader: reads are serialized."""

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
        check_range(source._name, source.num_samples, start, count)
        keys = [key_of(source._name, source.columns, column) for column in columns]
        position = epoch * source.num_samples + start
        batch = source._columns_of(self.items(position, max(1, count)), position, keys)
        return by_request(columns, keys, batch if count else {key: value[:0] for key, value in batch.items()})

    def named(self, epoch: int, position: int) -> str:
        return self._source.named(epoch, position)

    def close(self) -> None:
        """End the iteration; the next read begins another one, in which each position has the same sample."""
        with self._lock:
            self._reader.close()

    def mark(self, epoch: int, offset: int) -> Mark | None:
        """Return the mark at which reading can resume with sample ``offset`` of an epoch; None if it is not known.

        Waits for a read in another thread, unless the mark exists already.
        """
        position = epoch * self._source.num_samples + offset
        if (known := self._reader.known(position)) is not None:
            return known
        with self._lock:
            return self._reader.mark(position)

    def mark_before(self, position: int) -> Mark | None:
        """Return the last mark whose position is at most ``position``; None while another thread reads."""
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
    """Iterable over the rows of a ray.data.Dataset, always in the same order."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        options = getattr(getattr(dataset, "context", None), "execution_options", None)
        if options is not None:
            options.preserve_order = True

    def __iter__(self) -> Iterator[Any]:
        """Yield the rows. Closing the iterator ends the dataset's execution, which may start Ray at exit otherwise."""
        rows = iter(self._dataset.iter_rows())
        try:
            for row in rows:  # noqa: UP028  "yield from" would close them first
                yield row
        finally:
            if hasattr(rows, "close"):
                ended = threading.Event()
                # A daemon: a task of the dataset may take long, and waiting for its rows cannot be interrupted.
                reader = threading.Thread(
                    target=_read_to_end, args=(rows, ended), name="raypipe ends a dataset", daemon=True
                )
                reader.start()
                reader.join(READ_ON_S)
                ended.set()


def _read_to_end(rows: Any, ended: threading.Event) -> None:
    """Read the remaining rows until there are no more or ``ended`` is set, then close the iterator.

    Closing cancels the tasks that still run, and Ray ends this process if one of them completes at that moment
    ("Tried to complete task that was not pending", ray-project/ray#54527; seen with 2.60). Cancelling also ends their
    workers, whose successors take a second to start.
    """
    try:
        with suppress(Exception):  # an error in rows that nothing reads
            while not ended.is_set() and next(rows, ended) is not ended:
                pass
    finally:
        rows.close()


def _copy_of(stream: Any) -> Any:
    """Copy a stream for one reader if it has ``set_epoch`` or ``load_state_dict``, which change it; else return it."""
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
