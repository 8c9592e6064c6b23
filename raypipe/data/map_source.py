"""Training data in a torch map-style dataset: anything with ``len(data)`` and ``data[i]``.

An epoch is shuffled as a whole, because every item is equally quick to read. The dataset is sent to the workers, so it
should contain paths, and open files in ``__getitem__``.

An item may be random (crops, masks, noise): torch's, numpy's and Python's global generators are seeded by
(seed, epoch, row) before the item is read, so that every stage gets the same item, also after a resume.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils.data import TensorDataset

from raypipe.data.epoch_order import EpochOrder
from raypipe.data.item_randomness import generator_states, own_generators, seed_generators
from raypipe.data.stacking import Collate, batch_of, by_request, check_range, key_of
from raypipe.errors import DataError
from raypipe.user_lines import LEAVING, cure_of, quoted, short

NUM_READ_TWICE = 4
"""Number of first items that are read twice when the data is opened, to compare them."""
MORE_READ_TWICE, MORE_S = 60, 0.2
"""Maximum number of further random items that are read twice, and maximum seconds for them: some datasets draw random
numbers for few items only."""


class MapSource:
    """Source of the items of a map-style dataset; see ``open_data.Source``.

    Args:
        dataset: map-style dataset. An item is a tensor, number or numpy array, or a tuple or dict of them.
        seed: seed of the shuffled order, and of the random numbers that items and ``collate`` use.
        shuffle: False keeps the dataset's order.
        collate: function that creates columns from items; None stacks the items.
    """

    def __init__(self, dataset: Any, *, seed: int, shuffle: bool, collate: Collate | None = None) -> None:
        self.dataset, self.collate, self.name = dataset, collate, type(dataset).__name__
        self._seed = seed
        self._shuffle = shuffle
        self._order: tuple[int, EpochOrder] | None = None
        self._draws = False  # an item has drawn random numbers
        self.columns: tuple[Any, ...] = ()
        try:
            self.num_samples = len(dataset)
        except Exception as error:  # noqa: BLE001  (whatever the user's code raises)
            raise DataError(
                f"len({self.name}) fails{quoted(error)}: {short(error)} An epoch is cut from the number of items: let "
                "__len__ return it, an integer."
            ) from None
        if not self.num_samples:
            raise DataError(f"The dataset {self.name} is empty. Give one with at least one item.")
        with own_generators():
            seed_generators(seed, 0, 0)
            first = self._read(lambda rows: [dataset[row] for row in rows], [0])
            self.columns = tuple(self._batch(0, first, [0], ()))
        self._check_repeats()

    @property
    def is_tensors(self) -> bool:
        """True if the data is a TensorDataset without a collate function: its rows are read without the user's code."""
        return type(self.dataset) is TensorDataset and self.collate is None

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_order": None}

    def read(
        self, epoch: int, start: int, count: int, columns: Sequence[str] | Sequence[int]
    ) -> tuple[torch.Tensor, ...] | dict[str, torch.Tensor]:
        """Read samples of an epoch by position; see ``open_data.Source.read``."""
        check_range(self.name, self.num_samples, start, count)
        keys = [key_of(self.name, self.columns, column) for column in columns]
        return by_request(columns, keys, self._items(epoch, self._rows(epoch, start, count), keys))

    def named(self, epoch: int, position: int) -> str:
        """Return the name of a sample for messages; see ``open_data.Source.named``."""
        (row,) = self._rows(epoch, position, 1)
        return f"item {row} of {self.name}"

    def _rows(self, epoch: int, start: int, count: int) -> list[int]:
        """Return the dataset's indices of the items at positions start, ..., start + count - 1 of an epoch."""
        # Two stages in threads may share this source: the second one works with its own order.
        cached = self._order
        if cached is None or cached[0] != epoch:
            size = self.num_samples if self._shuffle else 0
            order = EpochOrder([self.num_samples], seed=self._seed, epoch=epoch, rows_per_window=size)
            self._order = cached = (epoch, order)
        return [row for _, rows, _ in cached[1].locate(start, count) for row in rows.tolist()]

    def _check_repeats(self) -> None:
        """Read the first items and some random items twice; raise DataError if an item differs.

        Random items are read for at most MORE_S seconds.
        """
        if self.is_tensors:
            return
        first = list(range(min(NUM_READ_TWICE, self.num_samples)))
        self._compare(first, *self._twice(first))
        deadline_s, others = time.monotonic() + MORE_S, range(NUM_READ_TWICE, self.num_samples)
        for row in random.Random(0).sample(others, min(MORE_READ_TWICE, len(others))):
            try:
                pair = self._twice([row])
            except DataError:  # the step that reads it raises the error
                return
            self._compare([row], *pair)
            if time.monotonic() > deadline_s:
                return

    def _twice(self, rows: list[int]) -> list[dict[Any, torch.Tensor]]:
        return [self._items(0, rows, list(self.columns)) for _ in range(2)]

    def _compare(self, rows: list[int], once: dict[Any, torch.Tensor], again: dict[Any, torch.Tensor]) -> None:
        for column in self.columns:
            for row, one, other in zip(rows, once[column], again[column], strict=True):
                if not torch.equal(torch.nan_to_num(one), torch.nan_to_num(other)):
                    raise DataError(
                        f"Item {row} of {self.name} comes with another column {column!r} each time it is read, so "
                        "the stage that reads the input and the stage that reads the target would see different items. "
                        "Draw from torch's, numpy's or Python's global generators, which raypipe seeds by (seed, "
                        "epoch, row) around each item, or make the item a function of its index; a generator of the "
                        "dataset's own, the clock and counters cannot be repeated."
                    )

    def _items(self, epoch: int, rows: list[int], keys: list[Any]) -> dict[Any, torch.Tensor]:
        if self.is_tensors:
            index = torch.tensor(rows, dtype=torch.int64)
            return {key: self.dataset.tensors[key][index] for key in keys}
        batch = self._batch(epoch, self._fetch(epoch, rows or [0]), rows or [0], keys)
        return batch if rows else {key: value[:0] for key, value in batch.items()}

    def _batch(self, epoch: int, items: list[Any], rows: list[int], keys: Sequence[Any]) -> dict[Any, torch.Tensor]:
        return batch_of(items, rows, self.name, self.collate, self.columns, keys, seed=self._seed, epoch=epoch)

    def _fetch(self, epoch: int, rows: list[int]) -> list[Any]:
        """Read items of the dataset, with the global generators seeded.

        Seeding takes longer than reading a small item. So at first the generators are seeded once per call. When an
        item uses random numbers, the items of that call are read again, and from then on the generators are seeded by
        (seed, epoch, row) before each item.
        """
        # The batched form that torch's own DataLoader prefers if a dataset has it.
        batched = getattr(self.dataset, "__getitems__", None) or (lambda some: [self.dataset[row] for row in some])
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
        """Read the items at the indices ``rows`` by one call of ``batched``, or one by one to find an item that fails.

        Raises:
            DataError: an item cannot be read; the message names the item.
        """
        try:
            items = list(batched(rows))
            if len(items) == len(rows):
                return items
            raise DataError(
                f"{self.name}.__getitems__ returned {len(items)} items for {len(rows)} indices. Let it return one item "
                "for each."
            )
        except (DataError, *LEAVING):
            raise
        except BaseException as error:  # noqa: BLE001  (what Rust raises through pyo3 is no Exception)
            if len(rows) == 1:
                raise DataError(
                    f"Item {rows[0]} of {self.name} cannot be read{quoted(error)}: {short(error)} "
                    f"{cure_of(error, 'Mend the item or leave it out.')}"
                ) from None
        return [item for row in rows for item in self._read(batched, [row])]  # which of them it was
