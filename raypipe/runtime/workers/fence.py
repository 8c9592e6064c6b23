"""Fence: a stage takes orders of the newest driver only.

    driver of term 3   --submit(3, ...)--> stage      obeyed
    driver of term 4   --serve(4)--------> stage      takes over
    driver of term 3   --submit(3, ...)--> stage      LeaseError: it was taken for dead, and is not

The term is the generation of the driver's lease on the run's folder: every driver that takes the lease has a higher one
than all before it.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from raypipe.errors import LeaseError

__all__ = ["Fence"]


class Fence:
    """Remembers the highest term that it has seen; safe to call from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._term = -1

    @property
    def term(self) -> int:
        """Of the newest driver that has ordered anything; -1 before."""
        with self._lock:
            return self._term

    def admits(self, term: int) -> bool:
        """Whether no later driver has ordered anything; remembers nothing."""
        with self._lock:
            return term >= self._term

    def check(self, term: int) -> None:
        """Admit the driver of this term, and from now on none of a lower one.

        Raises:
            LeaseError: a later driver has ordered something.
        """
        with self.passing(term):
            pass

    @contextlib.contextmanager
    def passing(self, term: int) -> Iterator[None]:
        """The same, and nobody else passes meanwhile: what is done inside is done before a later driver looks.

        Raises:
            LeaseError: as ``check``.
        """
        with self._lock:
            if term < self._term:
                raise LeaseError(
                    f"The stages obey the driver of generation {self._term}, which took the run over, and no longer "
                    f"that of generation {term}. This one ends; follow the other one."
                )
            self._term = term
            yield
