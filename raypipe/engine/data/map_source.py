"""Training data in a torch map-style dataset: anything with ``len(data)`` and ``data[i]``.

The whole epoch is one window, because any item is as near as any other. The dataset itself travels
to the workers: keep paths in it, and open files in ``__getitem__``.

An item may be random (crops, masks, noise): torch's, numpy's and Python's global generators are seeded by
(seed, epoch, row) around it, so that every stage gets the same item, and a run that goes on does too.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import TensorDataset

from raypipe.engine.data.collate import Collate, collated
from raypipe.engine.data.epoch_order import EpochOrder
from raypipe.engine.data.stacking import key_of, parts_of, stacked
from raypipe.engine.item_randomness import generator_states, own_generators, seed_generators
from raypipe.engine.remembered import Memory, first_change, read_memory_of
from raypipe.engine.user_lines import LEAVING, quoted, short
from raypipe.errors import DataError

__all__ = ["MapSource"]

NUM_READ_TWICE = 4
"""Items that are read twice before anything begins, to see whether they come alike."""
MORE_READ_TWICE, MORE_S = 60, 0.2
"""Others, spread over all of them, and the seconds that this may take: some are drawn otherwise now and then."""


def _length_of(dataset: Any) -> int:
    """How many items there are.

    Raises:
        DataError: nobody can tell.
    """
    try:
        return len(dataset)
    except Exception as error:  # noqa: BLE001  (whatever the user's code raises)
        raise DataError(
            f"len({type(dataset).__name__}) fails{quoted(error)}: {short(error)} An epoch is cut from the number of "
            "items: let __len__ return it, an integer."
        ) from None


class MapSource:
    """Reads samples of any epoch by position; see ``open_data``.

    Args:
        dataset: map-style; items are tuples or dicts of tensors, numbers or numpy arrays, or one of these.
        seed: of the order.
        shuffle: False keeps the dataset's order.
        collate: makes columns of items; None stacks them.
    """

    def __init__(self, dataset: Any, *, seed: int, shuffle: bool, collate: Collate | None = None) -> None:
        self._dataset = dataset
        self._seed = seed
        self._shuffle = shuffle
        self._collate = collate
        self._order: tuple[int, EpochOrder] | None = None
        self._draws = False  # whether an item has been seen to draw random numbers
        self._name = type(dataset).__name__
        self.num_samples = _length_of(dataset)
        if not self.num_samples:
            raise DataError(f"The dataset {self._name} is empty. Give one with at least one item.")
        with own_generators():
            seed_generators(seed, 0, 0)
            (read,) = self._read(lambda rows: [dataset[row] for row in rows], [0])
            item = parts_of(read) if collate is None else collated(collate, [read], [0], seed, 0)
        self.columns: tuple[Any, ...] = tuple(item)
        for column, value in item.items() if collate is None else ():
            stacked(self._name, column, [value], [0])
        self._check_repeats()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_order": None}

    def read(
        self, epoch: int, start: int, count: int, columns: Sequence[str] | Sequence[int]
    ) -> tuple[torch.Tensor, ...] | dict[str, torch.Tensor]:
        """See ``raypipe.engine.data.source.Source.read``."""
        if not 0 <= start <= start + count <= self.num_samples:
            raise DataError(
                f"Samples {start} to {start + count} were asked of {self._name}, which has {self.num_samples}."
            )
        keys = [key_of(self._name, self.columns, column) for column in columns]
        read = self._items(epoch, self._rows(epoch, start, count), keys)
        if all(isinstance(column, int) for column in columns):
            return tuple(read[key] for key in keys)
        return {key: read[key] for key in keys}

    def named(self, epoch: int, position: int) -> str:
        """See ``raypipe.engine.data.source.Source.named``."""
        (row,) = self._rows(epoch, position, 1)
        return f"item {row} of {self._name}"

    def _rows(self, epoch: int, start: int, count: int) -> list[int]:
        """Numbers of the items at these positions."""
        # Two stages in threads may share this source: whoever comes second works with its own order.
        cached = self._order
        if cached is None or cached[0] != epoch:
            size = self.num_samples if self._shuffle else 0
            order = EpochOrder([self.num_samples], seed=self._seed, epoch=epoch, rows_per_window=size)
            self._order = cached = (epoch, order)
        return [row for _, within, _ in cached[1].locate(start, count) for row in within.tolist()]

    def _check_repeats(self) -> None:
        """Refuse a dataset that remembers what it served, or whose items come differently each time.

        Raises:
            DataError: names an item and a column.
        """
        if type(self._dataset) is TensorDataset and self._collate is None:
            return
        rows = list(range(min(NUM_READ_TWICE, self.num_samples)))
        once, kept = self._items(0, rows, list(self.columns)), self._memories()
        again = self._items(0, rows, list(self.columns))
        changes = [first_change(*pair) for pair in zip(kept, self._memories(), strict=True)]
        self._compare(rows, once, again)
        if change := next(filter(None, changes), ""):
            raise DataError(
                f"Reading items of {self._name} changes {change}. Every stage reads for itself and would keep another "
                "account of it. Make an item a function of its index and of draws from torch's, numpy's or Python's "
                "global generators, which raypipe seeds by (seed, epoch, row) around each item."
            )
        self._check_more()

    def _check_more(self) -> None:
        """Like ``_check_repeats``, of items from all over, as far as time allows."""
        deadline_s, others = time.monotonic() + MORE_S, range(NUM_READ_TWICE, self.num_samples)
        for row in random.Random(0).sample(others, min(MORE_READ_TWICE, len(others))):
            try:
                once, again = (self._items(0, [row], list(self.columns)) for _ in range(2))
            except DataError:  # the step that reads it tells more
                return
            self._compare([row], once, again)
            if time.monotonic() > deadline_s:
                return

    def _compare(self, rows: list[int], once: dict[Any, torch.Tensor], again: dict[Any, torch.Tensor]) -> None:
        for column in self.columns:
            for row, one, other in zip(rows, once[column], again[column], strict=True):
                if not torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)):
                    raise DataError(
                        f"Item {row} of {self._name} comes with another column {column!r} each time it is read, so "
                        "the stage that reads the input and the stage that reads the target would see different items. "
                        "Draw from torch's, numpy's or Python's global generators, which raypipe seeds by (seed, "
                        "epoch, row) around each item, or make the item a function of its index; a generator of the "
                        "dataset's own, the clock and counters cannot be repeated."
                    )

    def _memories(self) -> tuple[Memory, Memory]:
        """What the dataset and the collate function remember now."""
        return read_memory_of(self._dataset, self._name), read_memory_of(self._collate, "collate_fn")

    def _items(self, epoch: int, rows: list[int], keys: list[Any]) -> dict[Any, torch.Tensor]:
        if type(self._dataset) is TensorDataset and self._collate is None:
            index = torch.tensor(rows, dtype=torch.int64)
            return {key: self._dataset.tensors[key][index] for key in keys}
        if not rows:
            first = self._items(epoch, [0], keys)
            return {key: value[:0] for key, value in first.items()}
        fetched = self._fetch(epoch, rows)
        if self._collate is not None:
            return self._collated(fetched, epoch, rows, keys)
        items = [parts_of(item) for item in fetched]
        for row, item in zip(rows, items, strict=True):
            if tuple(item) != self.columns:
                raise DataError(
                    f"Item {row} of {self._name} has the columns {list(item)}, but item 0 has {list(self.columns)}. "
                    "Make every item alike."
                )
        return {key: stacked(self._name, key, [item[key] for item in items], rows) for key in keys}

    def _collated(self, items: list[Any], epoch: int, rows: list[int], keys: list[Any]) -> dict[Any, torch.Tensor]:
        assert self._collate is not None
        batch = collated(self._collate, items, rows, self._seed, epoch)
        missing = [key for key in keys if key not in batch]
        if missing:
            raise DataError(
                f"collate_fn made the columns {list(batch)} of items {rows[0]} and others, but of item 0 it made "
                f"{list(self.columns)}. Let it make the same ones of any items."
            )
        return {key: batch[key] for key in keys}

    def _fetch(self, epoch: int, rows: list[int]) -> list[Any]:
        """The dataset's items, each with random numbers of its own.

        Seeding three generators takes longer than reading a small item, so it is done row by row only once something
        was drawn; the items that showed it are read again.
        """
        # The batched form that torch's own DataLoader prefers where a dataset has it.
        batched = getattr(self._dataset, "__getitems__", None) or (lambda some: [self._dataset[row] for row in some])
        with own_generators():
            if not self._draws:
                seed_generators(self._seed, epoch, rows[0])
                before = generator_states()
                items = self._read(batched, rows)
                if generator_states().same_as(before):
                    return items
                self._draws = True
            items = []
            for row in rows:
                seed_generators(self._seed, epoch, row)
                items += self._read(batched, [row])
            return items

    def _read(self, batched: Callable[[list[int]], Any], rows: list[int]) -> list[Any]:
        """The dataset's items as they are.

        Raises:
            DataError: the dataset raised; names the item and the line.
        """
        try:
            items = list(batched(rows))
            if len(items) == len(rows):
                return items
            raise DataError(
                f"{self._name}.__getitems__ gave {len(items)} items for {len(rows)} numbers. Let it give one for each."
            )
        except (DataError, *LEAVING):
            raise
        except BaseException as error:  # noqa: BLE001  (told in one paragraph)
            if len(rows) == 1:
                raise DataError(
                    f"Item {rows[0]} of {self._name} cannot be read{quoted(error)}: {short(error)} Mend the item or "
                    "leave it out."
                ) from None
        items = [item for row in rows for item in self._read(batched, [row])]  # which of them it was
        assert len(items) == len(rows)
        return items
