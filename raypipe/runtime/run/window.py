"""Window: the end of a list that grows as long as the run, by places in the whole list.

whole list   0 1 2 3 4 5 6 7 8
in memory              5 6 7 8      first = 5, end = 9
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Generic, TypeVar

__all__ = ["Window"]

T = TypeVar("T")


class Window(Generic[T]):
    """Keeps the newest items.

    Args:
        most: items in memory; None keeps all until they are taken.

    Attributes:
        end: items that were ever added.
    """

    def __init__(self, most: int | None = None) -> None:
        self._items: deque[T] = deque(maxlen=most)
        self.end = 0

    @property
    def first(self) -> int:
        """Place of the oldest item in memory; ``end`` where there is none."""
        return self.end - len(self._items)

    def append(self, item: T) -> None:
        self._items.append(item)
        self.end += 1

    def extend(self, items: list[T]) -> None:
        self._items.extend(items)
        self.end += len(items)

    def since(self, place: int) -> list[T]:
        """Those from ``place`` on that are still in memory."""
        return list(islice(self._items, max(0, place - self.first), None))

    def __getitem__(self, place: int) -> T:
        if not self.first <= place < self.end:
            raise IndexError(f"{place} is not in {self.first} ... {self.end - 1}")
        return self._items[place - self.first]

    def take(self, place: int) -> T:
        """The item at ``place``; it and those before it are forgotten."""
        item = self[place]
        while self.first <= place:
            self._items.popleft()
        return item
