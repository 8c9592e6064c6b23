"""States of the controller (Measure, Confirm, Trial and Quiet), and the knowledge that all four share.

                  +-------- KEEP --------+
                  v                      |
    start ---> Measure ---- WAIT ---> Confirm
                ^   ^                    |
                |   |                 SWITCH
              DRIFT |                    v
             or time+---- PAID, OPEN - Trial
                |                        |
              Quiet <------ UNDO --------+

    Measure --WAIT--> Confirm     a search found a better choice
    Confirm --KEEP--> Measure     the search after the next step found no better choice
    Confirm --SWITCH--> Trial     that search found one again: the driver runs it from the next flush on
    Trial --PAID--> Measure       steps are quicker than before
    Trial --OPEN--> Measure       the links changed meanwhile, so the switch cannot be judged
    Trial --UNDO--> Quiet         steps are not quicker: the previous choice is requested
    Quiet --DRIFT--> Measure      a link or a stage changed, so another switch may pay now
    Quiet --time--> Measure       the quiet time is over, or the current choice no longer fits into memory
    Confirm --SWITCH--> Measure   the current choice needs too much memory: a switch without a trial

From Measure such a switch leads back to Measure. So does the first switch of a run, without codecs, if either half of
the messages of its first step shows the gain: those steps are no measure for a trial, and the next step is searched
again. If step numbers go back, as after a rollback to a checkpoint, any
state is followed by Measure.

``state_to_dict`` and ``state_from_dict`` keep the state for a restarted driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from raypipe.planner.controller.events import Choice, StepDone
from raypipe.planner.controller.measured import UncompressedTimes
from raypipe.planner.controller.memory_budget import MemoryBudget, PeakMemory

FEWEST = 4
"""Fewest steps after a switch before it is judged."""
RECENT = 8
"""Most steps before a switch that the steps after it are compared with."""
MOST = 16
"""Steps after a switch from which on it is judged even if noise is large."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of step times before and after a switch.

    Attributes:
        before, after: choice before and after the switch.
        predicted_gain: relative gain; 0.1 means that a step before the switch takes 1.1 times as long as one after it.
        before_s: seconds of the last steps before the switch, since the last change of the links.
        links_s: seconds of a message before the switch, by hop and direction, without codecs.
        after_s: seconds of the steps after the switch, without the first, in which the pipeline changed.
        began: number of the first step with ``after``; None before that.
    """

    before: Choice
    after: Choice
    predicted_gain: float
    before_s: tuple[float, ...]
    links_s: tuple[float, ...] = ()
    after_s: tuple[float, ...] = ()
    began: int | None = None

    def with_step(self, step: int, seconds: float, counts: bool) -> Comparison:
        """Add one step that ran with the new choice.

        Args:
            counts: False if its seconds are not comparable.
        """
        if self.began is None:
            return replace(self, began=step)
        return replace(self, after_s=(*self.after_s, seconds)) if counts else self

    def with_earlier(self, done: StepDone, since: int) -> Comparison:
        """Add a step that ran with the earlier choice after the switch was requested.

        Args:
            since: step of the last change of the links, 0 if unknown; if it is this step, earlier steps are dropped.
        """
        if done.choice != self.before or not done.counts:
            return self
        before_s = () if since == done.step else self.before_s
        return replace(self, before_s=(*before_s, done.seconds)[-RECENT:])

    @property
    def same_messages(self) -> bool:
        """True if messages have the same bytes on the wire before and after the switch."""
        before, after = self.before, self.after
        codecs = (before.forward_codecs, before.backward_codecs) == (after.forward_codecs, after.backward_codecs)
        return codecs and before.num_microbatches == after.num_microbatches

    @property
    def achieved_gain(self) -> float:
        """Relative gain by the medians of both sides; 0 if one side has no steps."""
        if not self.before_s or not self.after_s:
            return 0.0
        return typical_s(self.before_s) / typical_s(self.after_s) - 1.0

    def paid(self, min_gain: float) -> bool | None:
        """Return True if the switch paid, False if not; None while steps are too few or too noisy to judge it.

        A switch pays if steps are quicker by ``min_gain``, or by a quarter of the predicted gain if that is less. A
        switch from lossy codecs to none pays too if steps are slower by at most ``min_gain``: codecs that gain no more
        are not worth the precision that they cost. After MOST steps noise no longer delays the answer. If there are no
        steps before the switch to compare with, it counts as paid.

        Args:
            min_gain: relative gain in speed: 0.05 for 5 %.
        """
        if len(self.after_s) < FEWEST:
            return None
        if not self.before_s:
            return True
        drops_codecs = self.before.lossy and not self.after.lossy
        wanted = -min_gain if drops_codecs else min(min_gain, self.predicted_gain / 4)
        margin = self.achieved_gain - wanted
        doubt = (uncertainty_s(self.before_s) + uncertainty_s(self.after_s)) / typical_s(self.after_s)
        if abs(margin) < doubt and len(self.after_s) < MOST:
            return None
        return margin >= 0


def typical_s(seconds: Sequence[float]) -> float:
    """Compute the median, which a single slow step does not move."""
    return median(seconds) if seconds else 0.0


def uncertainty_s(seconds: Sequence[float]) -> float:
    """Estimate one standard error of the median, from the median deviation; 0 for fewer than two values."""
    if len(seconds) < 2:
        return 0.0
    middle = median(seconds)
    spread_s = 1.4826 * median(abs(s - middle) for s in seconds)
    return float(1.2533 * spread_s / len(seconds) ** 0.5)


@dataclass(frozen=True, slots=True)
class Known:
    """Knowledge that the controller keeps in every state; the Observer has the measurements themselves.

    Attributes:
        wanted: the choice that was requested last.
        memory: budgets of the stages, corrected by measured peaks.
        uncompressed: seconds of messages before they were compressed.
        recent: (step, seconds) of the last comparable steps with the present choice, since the last change of links.
        step: number of the last step; -1 before the first.
        steps: number of steps since the run began or rolled back to a checkpoint.
        search_at: step of the next search, unless a change of links or stages causes an earlier one.
        news_searches: steps within the last retune interval after which such a change caused a search.
        failed: number of switches undone since the last one that paid.
        searched_s: seconds of a step at the last search; 0 before it.
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
    searched_s: float = 0.0

    @property
    def recent_s(self) -> tuple[float, ...]:
        """Seconds of the recent steps."""
        return tuple(seconds for _, seconds in self.recent)

    @property
    def opens(self) -> bool:
        """True before the first search since the run began or rolled back to a checkpoint."""
        return self.searched_s == 0

    def slowed(self, share: float) -> bool:
        """Return True if each of the last two steps was slower than steps at the last search by more than ``share``."""
        last_s = self.recent_s[-2:]
        return len(last_s) == 2 and self.searched_s > 0 and min(last_s) > self.searched_s * (1 + share)

    def rewound(self) -> Known:
        """Return the knowledge that is still valid after a rollback to an earlier step."""
        return replace(self, uncompressed=UncompressedTimes(), recent=(), steps=0, news_searches=(), searched_s=0.0)


@dataclass(frozen=True, slots=True)
class Measure:
    """Normal state: search for better settings after a change of links or stages, and at intervals."""

    known: Known


@dataclass(frozen=True, slots=True)
class Confirm:
    """State after a search that found a better choice: search again after the next step."""

    known: Known


@dataclass(frozen=True, slots=True)
class Trial:
    """State after a switch: compare the steps after it with those before."""

    known: Known
    comparison: Comparison


@dataclass(frozen=True, slots=True)
class Quiet:
    """State after a switch that was undone: request no other switch for a while.

    Attributes:
        since: step after which the switch was undone.
        until: step after which the state ends, and a search follows.
        links_s: ``Comparison.links_s`` of the switch that was undone.
        drifted: last step that showed a change, perhaps one that the switch back caused; None if no step did.
    """

    known: Known
    since: int
    until: int
    links_s: tuple[float, ...] = ()
    drifted: int | None = None


State = Measure | Confirm | Trial | Quiet


def state_to_dict(state: State) -> dict[str, Any]:
    """Convert the part of a state that a later driver can use to JSON values.

    Measurements are left out, because that driver measures links and stages anew. A switch on trial is left out too:
    that driver begins with the choice before the switch.
    """
    known = state.known
    return {
        "wanted": (state.comparison.before if isinstance(state, Trial) else known.wanted).to_dict(),
        "extra_bytes": [budget.extra_bytes for budget in known.memory.budgets],
        "fullest_bytes": known.memory.fullest_bytes,
        "uncompressed": [known.uncompressed.seconds, known.uncompressed.num_microbatches, known.uncompressed.until],
        "failed": known.failed,
    }


def state_from_dict(values: dict[str, Any], budgets: tuple[MemoryBudget, ...]) -> State:
    """Read what ``state_to_dict`` wrote.

    Args:
        budgets: budgets of the run, without measurements.

    Raises:
        KeyError, TypeError, ValueError: ``values`` is not such a state.
    """
    seconds, count, until = values["uncompressed"]
    return Measure(
        Known(
            Choice.from_dict(values["wanted"]),
            PeakMemory(budgets, tuple(values["fullest_bytes"])).with_extra(values["extra_bytes"]),
            UncompressedTimes(tuple(seconds), count, until),
            failed=int(values["failed"]),
        )
    )
