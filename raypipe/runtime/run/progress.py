"""Where a run stands: what both the loop, which goes on, and changes of its stages, which go back, read and write."""

from __future__ import annotations

from raypipe.engine.storage import Place
from raypipe.planner.segments import Position
from raypipe.runtime.run.goodput import Goodput
from raypipe.runtime.run.marks import Marks
from raypipe.runtime.run.recovery import Recovered

__all__ = ["Progress"]


class Progress:
    """Of one submission of a run.

    Args:
        place: the run's folder.

    Attributes:
        at: position after the last step that every stage has finished.
        skipped: steps of this submission that were not finite.
        empty: whether the pipeline runs nothing of the steps to come.
        end_s: when the last step ended; None where the next one is not measured from there.
        saved, completed: steps after which a snapshot was taken last, and given a manifest.
        marks: of the copies in memory.
        copied: all stages have a copy of what they begin with.
        goodput: of this submission.
    """

    def __init__(self, place: Place) -> None:
        self.at = Position()
        self.skipped = 0
        self.empty = True
        self.end_s: float | None = None
        self.saved = self.completed = 0
        self.marks = Marks(place)
        self.copied = False
        self.goodput = Goodput()

    def mark(self) -> None:
        """Every stage keeps a copy of its state in memory: what the run is to know when it goes back there."""
        self.marks.add(self.at, self.skipped)

    def go_back(self, back: Recovered) -> None:
        """The stages have the state of this or an earlier step: forget what came after it."""
        if back.position is not None:
            self.at, self.skipped = back.position, 0
        else:
            self.at, self.skipped = self.marks[back.step]
        self.marks.forget_after(self.at.step)
        self.goodput.go_back(self.at.step)
        self.empty, self.end_s, self.copied = True, None, False
