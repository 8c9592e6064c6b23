"""Order of the rows in an epoch: a pure function of seed, epoch, rows per row group and window.

Big files are read by row group, so nearby positions should have rows of few row groups:

    row groups            0  1  2  3  4  5
    shuffled              4  0  5  2  1  3
    cut into windows     [4  0][5  2][1  3]       each has at least rows_per_window rows; the last may have fewer
    rows of each window shuffled among each other

A resumed run locates any position without the rows before it.

numpy guarantees the raw stream of its bit generators over releases, but not its shuffles. So permutations are computed
here, by a stable sort of raw random words.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
_GROUPS, _ROWS = 0, 1  # first part of the key: which kind of shuffle


def permutation(size: int, seed: int, *key: int) -> Indices:
    """Return a random permutation of range(size), shape (size,), int64, which depends only on size, seed and key."""
    stream: Any = np.random.Philox(np.random.SeedSequence(seed, spawn_key=key))
    return np.argsort(stream.random_raw(size), kind="stable").astype(np.int64, copy=False)


class EpochOrder:
    """Order of one epoch: maps each position to a row group and a row in it.

    Args:
        rows_per_group: rows of each row group, in file order.
        seed, epoch: key of the shuffle, both at least 0.
        rows_per_window: minimum number of rows in a window, whose rows are shuffled among each other. A window ends
            with the row group that reaches this number. 0 keeps the file order.
    """

    def __init__(self, rows_per_group: Sequence[int], *, seed: int, epoch: int, rows_per_window: int) -> None:
        self._rows_per_group = rows_per_group
        self._key = (seed, epoch)
        self._shuffle = rows_per_window > 0
        groups = permutation(len(rows_per_group), seed, epoch, _GROUPS) if self._shuffle else range(len(rows_per_group))
        self._windows: list[list[int]] = []
        self._starts: list[int] = []
        self._shuffled: tuple[int, Indices] | None = None
        self.num_rows = 0
        rows_in_window = rows_per_window
        for group in map(int, groups):
            if rows_in_window >= rows_per_window:
                self._windows.append([])
                self._starts.append(self.num_rows)
                rows_in_window = 0
            self._windows[-1].append(group)
            rows_in_window += rows_per_group[group]
            self.num_rows += rows_per_group[group]

    def window_at(self, position: int) -> tuple[int, int]:
        """Return the first position of the window that contains ``position``, and the position after its last.

        A window is a range of positions whose rows are shuffled among each other.
        """
        window = max(bisect_right(self._starts, position) - 1, 0)
        return self._starts[window], self._starts[window + 1] if window + 1 < len(self._starts) else self.num_rows

    def locate(self, start: int, count: int) -> Iterator[tuple[int, Indices, Indices]]:
        """Locate the samples at positions start, ..., start + count - 1.

        Yields:
            (row group, indices of rows within the group, positions of these rows minus ``start``), once for each row
            group of each window that contains some of the positions.
        """
        position = start
        while position < start + count:
            first, stop = self.window_at(position)
            window = bisect_right(self._starts, position) - 1
            taken = self._rows_of(window)[position - first : start + count - first]
            groups = self._windows[window]
            if len(groups) == 1:  # as of every dataset that is no file
                yield groups[0], taken, np.arange(position - start, position - start + len(taken))
                position = stop
                continue
            ends = np.cumsum([self._rows_per_group[g] for g in groups])
            which = np.searchsorted(ends, taken, side="right")
            # Sorting by group once instead of searching per group: a window may hold thousands.
            by_group = np.argsort(which, kind="stable")
            touched, begins = np.unique(which[by_group], return_index=True)
            for index, places in zip(touched, np.split(by_group, begins[1:]), strict=True):
                group = groups[index]
                rows = taken[places] - (ends[index] - self._rows_per_group[group])
                yield group, rows, places + (position - start)
            position = stop

    def _rows_of(self, window: int) -> Indices:
        """Return the permutation of the rows of the window with this index, and cache it for the next call."""
        kept = self._shuffled
        if kept is not None and kept[0] == window:
            return kept[1]
        size = sum(self._rows_per_group[g] for g in self._windows[window])
        seed, epoch = self._key
        order = permutation(size, seed, epoch, _ROWS, window) if self._shuffle else np.arange(size, dtype=np.int64)
        self._shuffled = (window, order)
        return order
