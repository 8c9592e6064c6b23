"""Threads that stay: each carries out what it is handed, one call after another, and waits for the next.

A thread that begins anew for every step costs as much as a third of a small one: torch keeps memory, handles of
libraries and generators by thread, and makes them again for each.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Generic, TypeVar

__all__ = ["Crew"]

_T = TypeVar("_T")
_Handed = tuple[Callable[[], _T], "SimpleQueue[_T]"]
"""A call, and where its result goes."""


class Crew(Generic[_T]):
    """So many threads, which begin when they are needed first and end with ``close``, or when nobody holds the crew.

    Args:
        name: of the threads, before their number.
    """

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._handed: list[SimpleQueue[_Handed[_T] | None]] = [SimpleQueue() for _ in range(size)]
        self._begun = False
        self._end = weakref.finalize(self, _end, self._handed)  # the threads do not hold the crew

    def hand(self, calls: Sequence[Callable[[], _T]]) -> SimpleQueue[_T]:
        """Have each thread carry out its own call, which raises nothing, behind those that it was handed before.

        Returns:
            where the results come, each when its thread has let go of the call.
        """
        if not self._begun:
            self._begun = True
            for index, own in enumerate(self._handed):
                threading.Thread(target=_work, args=(own,), name=f"{self._name} {index}", daemon=True).start()
        results: SimpleQueue[_T] = SimpleQueue()
        for own, call in zip(self._handed, calls, strict=True):
            own.put((call, results))
        return results

    def close(self) -> None:
        """The threads end behind what they were handed. Safe to call twice."""
        self._end()


def _work(handed: SimpleQueue[_Handed[_T] | None]) -> None:
    while (one := handed.get()) is not None:
        call, results = one
        found = call()
        del one, call  # and what it refers to, before anybody hears of it
        results.put(found)
        del results, found


def _end(handed: Sequence[SimpleQueue[_Handed[_T] | None]]) -> None:
    for own in handed:
        own.put(None)
