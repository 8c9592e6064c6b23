"""Finished runs in a file beside a benchmark's results, one JSON line each: what was cut off goes on where it was."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Any, Generic, TypeVar

__all__ = ["KeptRuns"]

Found = TypeVar("Found", bound=tuple[Any, ...])


class KeptRuns(Generic[Found]):
    """What runs found, by what they were asked.

    Args:
        path: of the file, which may not exist yet; None keeps nothing. Delete it to begin anew.
        make: builds a result from its fields, which are numbers and strings.
    """

    def __init__(self, path: Path | None, make: Callable[..., Found]) -> None:
        self._path, self._make = path, make
        self._lock = threading.Lock()
        self._known: dict[str, list[Any]] = {}
        self._in_flight: dict[str, Future[Found]] = {}
        if path is not None and path.exists():
            whole, _, cut_off = path.read_text().rpartition("\n")
            if cut_off:
                path.write_text(f"{whole}\n" if whole else "")
            for asked, found in map(json.loads, whole.splitlines()):
                self._known[json.dumps(asked)] = found

    def __len__(self) -> int:
        return len(self._known)

    def submit(self, pool: Executor, run: Callable[..., Found], *asked: Any) -> Future[Found]:
        """``run(*asked)`` in the pool, or what it found before, or will have found."""
        key = json.dumps(asked)
        if key in self._known:
            done: Future[Found] = Future()
            done.set_result(self._make(*self._known[key]))
            return done
        if key in self._in_flight:
            return self._in_flight[key]
        future = self._in_flight[key] = pool.submit(run, *asked)
        future.add_done_callback(lambda ended: self._keep(asked, ended))
        return future

    def _keep(self, asked: tuple[Any, ...], ended: Future[Any]) -> None:
        if self._path is None or ended.cancelled() or ended.exception() is not None:
            return
        with self._lock, self._path.open("a") as file:
            file.write(json.dumps([asked, ended.result()]) + "\n")
