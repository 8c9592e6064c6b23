"""The four states of the controller, and what it remembers in all of them.

                  +-------- KEEP --------+
                  v                      |
    start ---> Measure ---- WAIT ---> Confirm
                ^   ^                    |
                |   |                 SWITCH
              DRIFT |                    v
             or time+---- PAID, OPEN - Trial
                |                        |
              Quiet <------ UNDO --------+

    Measure --WAIT--> Confirm     a search found something better
    Confirm --KEEP--> Measure     the search after the next step did not
    Confirm --SWITCH--> Trial     it did again: the driver runs it from the next flush on
    Trial --PAID--> Measure       steps are quicker than before
    Trial --OPEN--> Measure       the links changed meanwhile, so nobody can tell
    Trial --UNDO--> Quiet         steps are not quicker: back to what ran before
    Quiet --DRIFT--> Measure      a link or a stage changed: what did not pay may pay now
    Quiet --time--> Measure       the quiet time is over, or a stage has less memory left than was known
    Confirm --SWITCH--> Measure   what runs needs more memory than there is: the switch is no matter of seconds

From Measure such a switch leads back to Measure. Step numbers that go back, as after a checkpoint was restored, lead
from anywhere to Measure.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from raypipe.planner.control.choice import Choice
from raypipe.planner.control.comparison import Comparison
from raypipe.planner.control.peaks import PeakMemory
from raypipe.planner.control.uncompressed import UncompressedTimes

__all__ = ["Confirm", "Known", "Measure", "Quiet", "State", "Trial"]


@dataclass(frozen=True, slots=True)
class Known:
    """What the controller remembers whatever state it is in. The measurements themselves are the Observer's.

    Attributes:
        wanted: the choice that was asked for last.
        memory: budgets of the stages, as measured.
        uncompressed: what messages took before they were compressed.
        recent: (step, seconds) of the last steps that count with the present choice, since the links changed last.
        step: the last one; -1 before the first.
        steps: heard of, since the run began or its numbers went back to a checkpoint's.
        search_at: step of the next search, if no news causes an earlier one.
        news_searches: steps within the last interval in which news caused a search.
        failed: switches taken back since the last one that paid.
    """

    wanted: Choice
    memory: PeakMemory
    uncompressed: UncompressedTimes = field(default_factory=UncompressedTimes)
    recent: tuple[tuple[int, float], ...] = ()
    step: int = -1
    steps: int = 0
    search_at: int = 0
    news_searches: tuple[int, ...] = ()
    failed: int = 0

    @property
    def recent_s(self) -> tuple[float, ...]:
        """Seconds of the recent steps."""
        return tuple(seconds for _, seconds in self.recent)

    def rewound(self) -> Known:
        """After step numbers went back: what belongs to later steps is forgotten."""
        return replace(self, uncompressed=UncompressedTimes(), recent=(), steps=0, news_searches=())


@dataclass(frozen=True, slots=True)
class Measure:
    """Nothing is under way: search when something is new, and now and then."""

    known: Known


@dataclass(frozen=True, slots=True)
class Confirm:
    """A search found something better, for the first time: search again after the next step."""

    known: Known


@dataclass(frozen=True, slots=True)
class Trial:
    """A switch was asked for: compare the steps after it with those before."""

    known: Known
    comparison: Comparison


@dataclass(frozen=True, slots=True)
class Quiet:
    """A switch was taken back: ask for none.

    Attributes:
        since: step in which it was taken back.
        until: step from which on it searches again.
    """

    known: Known
    since: int
    until: int


State = Measure | Confirm | Trial | Quiet
