"""Where a run stood when its stages copied their state: without it, a copy is of no use to whoever goes back to it.

copy of step 40   position: epoch 1, sample 128, ...   steps skipped before it: 0

It is in the run's folder too, for a driver that finds some stages lost together with the driver before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from typing import NamedTuple

from raypipe.engine.storage import Place
from raypipe.errors import CheckpointError
from raypipe.planner.segments import Position

__all__ = ["Mark", "Marks"]

FILE = "copies.json"
MOST_MARKS = 8
MOST_BYTES = 1 << 16


class Mark(NamedTuple):
    """What a run knew when all its stages had done the same steps; ``skipped`` of them were not finite."""

    position: Position
    skipped: int


class Marks:
    """The newest ones of one run.

    Args:
        place: the run's folder.
    """

    def __init__(self, place: Place) -> None:
        self._place = place
        self._by_step: dict[int, Mark] = {}

    @property
    def steps(self) -> list[int]:
        """Oldest first."""
        return sorted(self._by_step)

    def __getitem__(self, step: int) -> Mark:
        return self._by_step[step]

    def __iter__(self) -> Iterator[int]:
        return iter(self.steps)

    def add(self, position: Position, skipped: int) -> None:
        """Every stage has a copy of its state there, or soon will."""
        self._by_step[position.step] = Mark(position, skipped)
        for step in self.steps[:-MOST_MARKS]:
            del self._by_step[step]

    def forget_after(self, step: int) -> None:
        """The run goes back to this step."""
        self._by_step = {at: mark for at, mark in self._by_step.items() if at <= step}

    def write(self) -> None:
        """For another driver; the records of the steps before should be in the folder by then.

        Raises:
            CheckpointError: the place is full, forbidden or unreachable.
        """
        told = [{"position": asdict(mark.position), "skipped": mark.skipped} for mark in self._by_step.values()]
        self._place.write_bytes(FILE, json.dumps(told).encode())

    def read(self) -> None:
        """Those that an earlier driver wrote; none where there is no such file, or a damaged one."""
        try:
            found = json.loads(self._place.read_bytes(FILE, MOST_BYTES)) if self._place.exists(FILE) else []
            marks = [Mark(Position(**one["position"]), int(one["skipped"])) for one in found]
        except (CheckpointError, ValueError, KeyError, TypeError):
            marks = []
        for mark in marks:
            self.add(*mark)
