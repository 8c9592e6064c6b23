"""Where a run stands: what both the loop, which goes on, and changes of its stages, which go back, read and write."""

from __future__ import annotations

from raypipe.planner.segments import Position
from raypipe.runtime.run.recovery import Recovered

__all__ = ["Progress"]

MOST_MARKS = 8


class Progress:
    """Of one submission of a run.

    Attributes:
        at: position after the last step that every stage has finished.
        skipped: steps of this submission that were not finite.
        empty: whether the pipeline runs nothing of the steps to come.
        end_s: when the last step ended; None where the next one is not measured from there.
        saved, completed: steps after which a snapshot was taken last, and given a manifest.
        evaluated: step of the last evaluation, -1 before one.
        marks: by step of a copy in memory: where the run stood, and steps skipped until then.
        copied: all stages have a copy of what they begin with.
    """

    def __init__(self) -> None:
        self.at = Position()
        self.skipped = 0
        self.empty = True
        self.end_s: float | None = None
        self.saved = self.completed = 0
        self.evaluated = -1
        self.marks: dict[int, tuple[Position, int]] = {}
        self.copied = False

    def mark(self) -> None:
        """Every stage keeps a copy of its state in memory: what the run is to know when it goes back there."""
        self.marks[self.at.step] = self.at, self.skipped
        for step in sorted(self.marks)[:-MOST_MARKS]:
            del self.marks[step]

    def go_back(self, back: Recovered) -> None:
        """The stages have the state of this or an earlier step: forget what came after it."""
        if back.position is not None:
            self.at, self.skipped = back.position, 0
        else:
            self.at, self.skipped = self.marks[back.step]
        self.marks = {step: mark for step, mark in self.marks.items() if step <= self.at.step}
        self.empty, self.end_s, self.copied, self.evaluated = True, None, False, -1
