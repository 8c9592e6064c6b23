"""Position of a run: data position, goodput, and positions of in-memory copies.

The loop advances the position, and recoveries and other changes of the stages roll it back; both share one Progress.

Goodput: share of a run's wall time in steps that were neither skipped nor rolled back.

    wall time   | step | step | failure, recovery | step | evaluation | step |
    counts        yes    no                          yes                 yes      the second step was rolled back and
                                                                                  repeated by the third

Copy positions: every stage copies its parameters and optimizer state to memory at intervals. To resume from such a copy
a run needs its data position, which is also written to the run's folder, for the next driver.

    copy of step 40   position: epoch 1, sample 128, ...   number of skipped steps before it: 0
"""

from __future__ import annotations

import json
import time
from array import array
from collections.abc import Callable
from dataclasses import asdict
from typing import NamedTuple

from raypipe.engine.io.storage import Place
from raypipe.errors import CheckpointError
from raypipe.ir.report import StepRecord
from raypipe.planner.segments import Position


class Goodput:
    """Goodput of one submission: share of its wall time in steps that were neither skipped nor rolled back.

    Args:
        clock: returns the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun_s: float | None = None
        self._first = 0
        self._sums = array("d", [0.0])  # seconds of the steps from the first on, added up

    def begin(self, step: int) -> None:
        """Start measuring, when the stages are ready and the run has done ``step`` steps."""
        self._begun_s, self._first, self._sums = self._clock(), step, array("d", [0.0])

    def done(self, record: StepRecord) -> float:
        """Add a step and return the goodput so far, from 0 to 1; 0 if it is unknown."""
        if self._begun_s is None:
            return 0.0
        self._sums.append(self._sums[-1] + (0.0 if record.skipped else record.seconds))
        wall_s = self._clock() - self._begun_s
        return min(1.0, self._sums[-1] / wall_s) if wall_s > 0 else 0.0

    def roll_back(self, step: int) -> None:
        """Drop the durations of the steps after ``step``, because the run rolls back to ``step``."""
        del self._sums[max(1, 1 + step - self._first) :]
        self._first = min(self._first, step)


COPIES_FILE = "copies.json"
MOST_COPIES = 8
MOST_BYTES = 1 << 16


class CopyPosition(NamedTuple):
    """Data position of an in-memory copy of the state, and the value of ``Progress.skipped`` at that position."""

    position: Position
    skipped: int


class CopyPositions:
    """Data positions of a run's newest in-memory copies, at most MOST_COPIES; ``write`` saves them to its folder."""

    def __init__(self, place: Place) -> None:
        self._place = place
        self._by_step: dict[int, CopyPosition] = {}

    @property
    def steps(self) -> list[int]:
        """Steps of the copies, oldest first."""
        return sorted(self._by_step)

    def __getitem__(self, step: int) -> CopyPosition:
        return self._by_step[step]

    def add(self, position: Position, skipped: int) -> None:
        """Add the ``CopyPosition`` of a copy that every stage has or is making; keep only the newest MOST_COPIES."""
        self._by_step[position.step] = CopyPosition(position, skipped)
        for step in self.steps[:-MOST_COPIES]:
            del self._by_step[step]

    def forget_after(self, step: int) -> None:
        """Drop the positions of copies made after step ``step``, because the run rolls back to that step."""
        self._by_step = {at: position for at, position in self._by_step.items() if at <= step}

    def write(self) -> None:
        """Write the positions to the run's folder, for the next driver.

        The caller must first write the records of all steps before these positions.

        Raises:
            CheckpointError: the storage is full, forbidden or unreachable.
        """
        rows = [{"position": asdict(position), "skipped": skipped} for position, skipped in self._by_step.values()]
        self._place.write_bytes(COPIES_FILE, json.dumps(rows).encode())

    def read(self) -> None:
        """Add the positions that an earlier driver has written; no effect if the file is missing or damaged."""
        try:
            rows = (
                json.loads(self._place.read_bytes(COPIES_FILE, MOST_BYTES)) if self._place.exists(COPIES_FILE) else []
            )
            positions = [(Position(**row["position"]), int(row["skipped"])) for row in rows]
        except (CheckpointError, ValueError, KeyError, TypeError):
            return
        for position, skipped in positions:
            self.add(position, skipped)


class Progress:
    """Progress of one submission of a run.

    Args:
        place: the run's folder.

    Attributes:
        at: position in the data after the last step that every stage has finished.
        skipped: number of steps since the loaded checkpoint that were skipped for a non-finite loss or gradient.
        empty: True if the pipeline holds no micro-batches of later steps.
        end_s: end of the last step, in seconds; None if the next step's duration is not measured from there.
        saved: step of the newest checkpoint that the stages were requested to write.
        completed: step of the newest checkpoint whose completion (writing its manifest) was started.
        copies: positions of the in-memory copies of the state.
        copied: True if all stages have copied the state with which they began or to which they rolled back.
        goodput: goodput of this submission.
    """

    def __init__(self, place: Place) -> None:
        self.at = Position()
        self.skipped = 0
        self.empty = True
        self.end_s: float | None = None
        self.saved = self.completed = 0
        self.copies = CopyPositions(place)
        self.copied = False
        self.goodput = Goodput()

    def mark(self) -> None:
        """Add the current data position to ``copies``; called when every stage has copied its state to memory."""
        self.copies.add(self.at, self.skipped)

    def roll_back(self, step: int, position: Position | None) -> None:
        """Roll back to the step whose state the stages have loaded, and drop copies and goodput of later steps.

        Args:
            position: position in the loaded checkpoint; None if the stages loaded in-memory copies.
        """
        self.at, self.skipped = self.copies[step] if position is None else (position, 0)
        self.copies.forget_after(self.at.step)
        self.goodput.roll_back(self.at.step)
        self.empty, self.end_s, self.copied = True, None, False
