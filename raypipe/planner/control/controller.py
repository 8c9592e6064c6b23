"""The controller: a state machine without a clock, a thread or a socket.

    StepDone --> measure --> anything new, or time to look?
                                 |
              nothing better <---+---> better by min_gain
                   KEEP          |        first time: WAIT, and look again after the next step
                                 |        second time: SWITCH ------> the driver runs it from the next flush
                                 |                                        |
                                 |              PAID, or UNDO and be quiet for a while, or OPEN
                                 +<---------------------------------------+

Every answer carries its numbers and a sentence. The same events give the same decisions, also after the state went
through JSON in between.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from raypipe.errors import PlanError
from raypipe.ir.links import LinkEstimate
from raypipe.ir.plan_table import human_s
from raypipe.planner.control.choice import Choice
from raypipe.planner.control.drift import News
from raypipe.planner.control.events import Decision, StepDone, Verdict
from raypipe.planner.control.measured import Measured
from raypipe.planner.control.observer import Observer, hop_name
from raypipe.planner.control.room import Room, fits
from raypipe.planner.control.search import EVEN, search
from raypipe.planner.control.setup import Setup
from raypipe.planner.control.trial import Trial, typical_s
from raypipe.planner.control.words import gains, numbers_of, outcome, sentence, why

__all__ = ["Controller"]

RECENT = 8
"""Steps that a change is compared with."""
SETTLE = 1
"""Steps of a run before the first look."""
MEMORY_INTERVALS = 8
"""Usual intervals for which it counts what whole messages took, while they are compressed. A change of the link that
compressed ones show ends it at once; one that they cannot show, because they pass a token bucket anyway, is looked for
by going without the codec that seldom."""
MOST_DOUBLINGS = 4
"""Of the quiet time after switches that did not pay: a change that shows nowhere is looked for at least that often."""
OWN_CHANGE = 6
"""Steps after a switch was taken back in which a change of links is taken for its own: orders are up to three steps
ahead, and a change shows in two."""
FREE_LOOKS = 8
"""Looks in a row that news may cause and that change nothing; every further one has to wait twice as long as the last,
up to the usual interval. On a link that is never the same the controller would search after every step."""


@dataclass(slots=True)
class _State:
    """All that a controller remembers besides its measurements; plain numbers.

    Attributes:
        wanted: what was asked for last.
        seconds: (step, seconds) of the last steps that count with the present choice, since the links changed last.
        waiting: looks in a row that found something better.
        looked: step of the last look, or of the verdict on a switch; None where the next step is looked at anyway.
        quiet_until: step before which no switch is asked for.
        undone_at: step of the last one taken back; far before the run where there was none.
        undone: switches taken back since the last one that paid, going without codecs left out.
        held_bytes: by stage, the most that any choice so far was expected to hold.
        left: what the last switch left, and when; empty where that paid, unless it only went without codecs.
        vain: looks in a row that news caused and that changed nothing.
        rest_until: step before which news causes no further one.
        steps: heard of, since the run began or its numbers went back to a checkpoint's.
        whole_s: by hop and direction, what a message took before it was compressed; 0 where it is not, or nobody knows.
        whole_until: step from which that is forgotten.
        count: M that is measured.
        step: the last one; -1 before the first.
    """

    wanted: Choice
    rooms: tuple[Room, ...]
    seconds: list[tuple[int, float]] = field(default_factory=list)
    trial: Trial | None = None
    steps: int = 0
    waiting: int = 0
    looked: int | None = None
    quiet_until: int = 0
    undone: int = 0
    undone_at: int = -OWN_CHANGE
    held_bytes: list[int] = field(default_factory=list)
    left: tuple[Choice, int] | None = None
    vain: int = 0
    rest_until: int = 0
    count: int = 0
    step: int = -1
    whole_s: list[float] = field(default_factory=list)
    whole_until: int = 0


class Controller:
    """Tell it of every step; do what it says at the next flush.

    Args:
        setup: of the run.
    """

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self._observer = Observer(len(setup.rooms), setup.link_drift_threshold)
        self._state = _State(setup.choice, setup.rooms, count=setup.choice.num_microbatches)

    @property
    def wanted(self) -> Choice:
        """What the run should use: what a driver that comes back begins with."""
        return self._state.wanted

    def estimates(self) -> tuple[LinkEstimate, ...]:
        """Of every hop and direction, for metrics and people."""
        return self._observer.estimates()

    def handle(self, event: StepDone) -> list[Decision]:
        """Take in one step.

        Returns:
            what was decided, in order. Where a decision has a ``choice``, that is to be run from the next flush.
        """
        state, found = self._state, list[Decision]()
        self._follow(event.step)
        if event.choice.num_microbatches != state.count:
            # Other actions and messages than those measured so far; the first step with them is like no other.
            self._observer = Observer(len(self.setup.rooms), self.setup.link_drift_threshold)
            share = state.count / event.choice.num_microbatches
            state.count, state.whole_s = event.choice.num_microbatches, [s * share for s in state.whole_s]
            news, who = News.STEADY, ""
        else:
            news, who = self._observer.add(event.stages, event.messages)
        state.steps += 1
        tight = self._learn_memory(event) and not fits(event.choice, state.rooms)
        if event.choice != state.wanted:  # asked for, and not yet at a flush
            return found
        if state.trial is not None and state.trial.began is None:
            state.seconds.clear()
        elif event.counts:
            state.seconds = [*state.seconds, (event.step, event.seconds)][-RECENT:]
        if event.step >= state.whole_until:
            state.whole_s = []
        elif news is News.CHANGED and state.trial is None:  # after a switch of our own a link looks changed by itself
            state.whole_s = [0.0 if hop_name(p // 2) in who else s for p, s in enumerate(state.whole_s)]
        if news is News.CHANGED:  # which this step and the one before it have shown
            # What did not pay before the change may pay after it, unless our own way back is what has changed.
            if event.step >= state.undone_at + OWN_CHANGE:
                state.quiet_until = event.step
            state.seconds = [pair for pair in state.seconds if pair[0] >= event.step - 1]
            found.append(Decision(event.step, Verdict.DRIFT, sentence(f"{who} changed for good."), {"who": who}))
        if state.trial is not None:
            found.extend(self._judge(event, state.trial, news))
        if state.trial is None and state.wanted == event.choice and (tight or self._due(event, news)):
            found.extend(self._look(event, news, who))
        return found

    def _follow(self, step: int) -> None:
        """Step numbers go back where a run goes on from a checkpoint: what belongs to later ones is forgotten."""
        state = self._state
        if step <= state.step:
            state.seconds, state.trial, state.left, state.looked = [], None, None, None
            state.whole_s = []
            state.steps = state.waiting = state.quiet_until = state.rest_until = 0
            state.undone_at = -OWN_CHANGE
        state.step = step

    def _due(self, event: StepDone, news: News) -> bool:
        state = self._state
        if state.steps <= SETTLE:
            return False
        if event.step < state.quiet_until:
            return False
        if state.waiting or state.looked is None:
            return True
        if news is not News.STEADY and event.step >= state.rest_until:
            return True
        # A run's first steps are slow and alike to nothing: what is seen in few steps is looked at again after as many.
        age = event.step - state.looked
        return age >= min(self.setup.retune_interval_steps, state.steps - age)

    def _judge(self, event: StepDone, trial: Trial, news: News) -> list[Decision]:
        """Whether the last switch paid."""
        state = self._state
        if news is News.CHANGED and trial.began is not None:
            state.trial = None
            reason = (
                f"The links changed while {self.setup.name(trial.after)} was on trial: whether it paid cannot be told."
            )
            return [Decision(event.step, Verdict.OPEN, reason, gains(trial, self.setup.name))]
        state.trial = trial = trial.with_step(event.step, event.seconds, event.counts)
        paid = trial.verdict(self.setup.min_gain)
        if paid is None:
            return []
        state.trial, state.looked = None, event.step
        numbers = gains(trial, self.setup.name)
        text = outcome(trial, self.setup.name)
        if paid:
            if not trial.plainer:  # which may have cost something: who comes back from there soon has tried enough
                # Links are fuller now than when they were measured, and stages had time to settle: look again at once.
                state.undone, state.left, state.looked = 0, None, None
            return [Decision(event.step, Verdict.PAID, sentence(f"{text}."), numbers)]
        state.undone += 1
        quiet = self._be_quiet(event.step)
        state.wanted, state.seconds = trial.before, []
        self._remember(event, trial.before)
        reason = f"{sentence(text)}. It did not pay: back, and no switch for {quiet} steps."
        return [Decision(event.step, Verdict.UNDO, reason, numbers, trial.before)]

    def _look(self, event: StepDone, news: News, who: str) -> list[Decision]:
        """Score the candidates on what is measured now."""
        state, setup = self._state, self.setup
        measured = self._measured(event)
        if measured is None:
            return []
        state.looked = event.step
        found = search(replace(setup.space, rooms=state.rooms), measured, event.choice)
        recent = [seconds for _, seconds in state.seconds]
        if news is News.SUSPECT or not recent:
            recent = [event.seconds]
        # What the model does not explain is there with every candidate.
        rest_s = max(0.0, typical_s(recent) - found.current.seconds)
        gain = (found.current.seconds + rest_s) / (found.best.seconds + rest_s) - 1.0
        numbers = numbers_of(found, measured, gain, typical_s(recent), setup.name)
        best, text = found.best.choice, why(found, gain, who, setup.name)
        if best != event.choice and not fits(event.choice, state.rooms):
            text = f"{setup.name(event.choice)} needs more memory than there is. {text}"
            return self._switch(event, best, None, text, numbers)
        plainer = event.choice.lossy and not best.lossy and found.best.seconds <= found.current.seconds * (1 + EVEN)
        # What is to be quicker must be said to take less than a step takes now, whatever the model says of now.
        odd = found.best.seconds > typical_s(recent) * (1 + setup.min_gain)
        if odd and best != event.choice:
            text = f"{text} Steps are measured to take {human_s(typical_s(recent))}, so it is not believed."
        if best == event.choice or odd or (gain <= setup.min_gain and not plainer):
            state.waiting = 0
            self._rest(event.step, news)
            return [Decision(event.step, Verdict.KEEP, text, numbers)]
        if setup.frozen:
            return [Decision(event.step, Verdict.KEEP, f"Frozen, else it would change. {text}", numbers)]
        state.waiting += 1
        if state.waiting < 2:
            return [Decision(event.step, Verdict.WAIT, f"{text} Once more, and it is done.", numbers)]
        trial = Trial(event.choice, best, gain, tuple(recent))
        return self._switch(event, best, trial, text, numbers)

    def _measured(self, event: StepDone) -> Measured | None:
        measured = self._observer.measured(event.choice.num_microbatches)
        whole_s = self._state.whole_s
        if measured is None or not whole_s:
            return measured
        ratios = tuple(self._ratio(event.choice, place) for place in range(len(whole_s)))
        return replace(measured, whole_s=tuple(whole_s), ratios=ratios)

    def _ratio(self, choice: Choice, place: int) -> float:
        """Of the codec of a hop and direction; 1 for none."""
        space, forward = self.setup.space, place % 2 == 0
        allowed = space.forward_codecs if forward else space.backward_codecs
        return {codec.name: codec.ratio for codec in allowed}.get(choice.codec(place // 2, forward), 1.0)

    def _remember(self, event: StepDone, choice: Choice) -> None:
        """What messages take that ``choice`` will compress and that were whole until now."""
        state, measured = self._state, self._measured(event)
        if measured is None:
            return
        known = state.whole_s or [0.0] * len(measured.links)
        state.whole_s = []
        for place, before_s in enumerate(known):
            codec, new = (one.codec(place // 2, place % 2 == 0) for one in (event.choice, choice))
            newest_s = measured.draws_s(place)[-event.choice.num_microbatches :]
            fresh = codec == "none" and newest_s
            state.whole_s.append(0.0 if new == "none" else median(newest_s) if fresh else before_s)
            if new != "none" and fresh:
                state.whole_until = event.step + MEMORY_INTERVALS * self.setup.retune_interval_steps

    def _went_back(self, step: int, since: int) -> None:
        """There and back within an interval or two is a switch that did not pay, though nobody could tell."""
        state, interval = self._state, self.setup.retune_interval_steps
        if step - since <= 2 * interval:
            state.undone += 1
            self._be_quiet(step)

    def _be_quiet(self, step: int) -> int:
        """Ask for no switch for so many steps, twice as many after each that did not pay, up to a limit."""
        state = self._state
        quiet: int = self.setup.retune_interval_steps * 2 ** min(state.undone, MOST_DOUBLINGS)
        state.undone_at, state.quiet_until = step, step + quiet
        return quiet

    def _rest(self, step: int, news: News) -> None:
        """After a look that changed nothing."""
        state = self._state
        if news is News.STEADY:
            state.vain = state.rest_until = 0
            return
        state.vain += 1
        pause = min(self.setup.retune_interval_steps, 2 ** min(30, max(0, state.vain - FREE_LOOKS)))
        state.rest_until = step + pause

    def _switch(
        self, event: StepDone, choice: Choice, trial: Trial | None, reason: str, numbers: dict[str, Any]
    ) -> list[Decision]:
        state = self._state
        if self.setup.frozen:
            return [Decision(event.step, Verdict.KEEP, f"Frozen, else it would change. {reason}", numbers)]
        if state.left is not None and state.left[0] == choice:
            self._went_back(event.step, state.left[1])
        state.left = event.choice, event.step
        self._remember(event, choice)
        state.wanted, state.trial, state.waiting, state.seconds = choice, trial, 0, []
        state.vain = state.rest_until = 0
        return [Decision(event.step, Verdict.SWITCH, reason, numbers, choice)]

    def _learn_memory(self, event: StepDone) -> bool:
        """Whether a stage holds more than was known.

        A measured peak belongs to the fullest choice so far; only while that one runs does it say anything new.
        """
        state = self._state
        depths = range(len(state.rooms), 0, -1)
        needs = [room.need_bytes(event.choice, depth) for room, depth in zip(state.rooms, depths, strict=True)]
        rooms = list(state.rooms)
        for s in event.stages:
            if s.peak_bytes is not None and (not state.held_bytes or needs[s.stage] >= state.held_bytes[s.stage]):
                rooms[s.stage] = rooms[s.stage].measured(event.choice, len(rooms) - s.stage, s.peak_bytes)
        state.held_bytes = [max(pair) for pair in zip(needs, state.held_bytes or needs, strict=True)]
        before, state.rooms = state.rooms, tuple(rooms)
        return before != state.rooms

    def to_json(self) -> str:
        """The whole state, for a driver that comes back."""
        state = self._state
        return json.dumps(
            {
                "setup": self.setup.identity,
                "observer": self._observer.to_dict(),
                "wanted": state.wanted.to_dict(),
                "extra_bytes": [room.extra_bytes for room in state.rooms],
                "trial": None if state.trial is None else state.trial.to_dict(),
                "left": None if state.left is None else [state.left[0].to_dict(), state.left[1]],
                **{name: getattr(state, name) for name in _PLAIN},
            }
        )

    @classmethod
    def from_json(cls, setup: Setup, text: str) -> Controller:
        """The controller that wrote ``text``, in a run with the same setup.

        Raises:
            PlanError: the text is no such state.
        """
        try:
            found = json.loads(text)
            if found["setup"] != setup.identity:
                raise ValueError("it was written by a run with other stages, limits or settings")
            controller = cls(setup)
            controller._observer.load(found["observer"])
            rooms = tuple(
                replace(room, extra_bytes=extra) for room, extra in zip(setup.rooms, found["extra_bytes"], strict=True)
            )
            trial = None if found["trial"] is None else Trial.from_dict(found["trial"])
            left = None
            if found["left"] is not None:
                left = Choice.from_dict(found["left"][0]), int(found["left"][1])
            plain = {name: found[name] for name in _PLAIN}
            controller._state = _State(Choice.from_dict(found["wanted"]), rooms, trial=trial, left=left, **plain)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PlanError(
                f"This is no state of a controller of {len(setup.rooms)} stages ({error!r}): begin anew without it."
            ) from None
        return controller


_PLAIN = (
    "seconds", "steps", "waiting", "looked", "quiet_until", "undone", "undone_at", "held_bytes", "vain", "rest_until",
    "count", "step", "whole_s", "whole_until",
)  # fmt: skip
