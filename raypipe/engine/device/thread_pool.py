"""Thread pool: persistent threads, each with a queue of its own.

A new thread for every step takes up to a third of a small step: torch keeps memory, library handles and generators per
thread, and creates them again in each new one.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Generic, TypeVar

_T = TypeVar("_T")
_Task = tuple[Callable[[], _T], "SimpleQueue[_T]"]
"""A call to run in a thread, and the queue that gets its result."""


class ThreadPool(Generic[_T]):
    """Pool of ``size`` threads, started on first use, and ended by ``close`` or by garbage collection of the pool."""

    def __init__(self, name: str, size: int) -> None:
        self._name = name
        self._queues: list[SimpleQueue[_Task[_T] | None]] = [SimpleQueue() for _ in range(size)]
        self._begun = False
        self._end = weakref.finalize(self, _end, self._queues)  # the threads do not hold the pool

    def submit(self, calls: Sequence[Callable[[], _T]]) -> SimpleQueue[_T]:
        """Queue one call per thread, to run after the earlier calls of the thread; calls must not raise.

        Returns:
            queue that gets the results, in the order in which the calls end. A thread drops the call before it puts the
            result, so that the memory of the call is free by then.
        """
        if not self._begun:
            self._begun = True
            for index, own in enumerate(self._queues):
                threading.Thread(target=_work, args=(own,), name=f"{self._name} {index}", daemon=True).start()
        results: SimpleQueue[_T] = SimpleQueue()
        for own, call in zip(self._queues, calls, strict=True):
            own.put((call, results))
        return results

    def close(self) -> None:
        """End each thread after its queued calls. Safe to call twice."""
        self._end()


def _work(tasks: SimpleQueue[_Task[_T] | None]) -> None:
    while (task := tasks.get()) is not None:
        call, results = task
        result = call()
        del task, call  # frees what the call refers to before the result is published
        results.put(result)
        del results, result


def _end(tasks: Sequence[SimpleQueue[_Task[_T] | None]]) -> None:
    for own in tasks:
        own.put(None)
