"""When the stages of a run are to be cut again: a worker became slower, or faster, for good, and moving layers pays.

    every step --> Replanner.heard: Pace, have the stages' seconds settled? are the workers' speeds others than those
                       | yes                                                 that the cut was made for?
                   Question --answer--> cut_again, pays? --yes--> Offer --> (the run takes it) --> Replanner.taken

The first time that seconds settle they become the profile's: what the stages take on these workers is what they should.
So a worker that was slow from the beginning is taken for layers that are.
"""

from __future__ import annotations

import dataclasses
import math
from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from raypipe.errors import RaypipeError
from raypipe.ir.cluster import Cluster
from raypipe.ir.links import StageSample
from raypipe.ir.plan import Plan
from raypipe.ir.profile import Profile
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.control.pace import Pace
from raypipe.planner.tune.again import CutAgain, calibrated, cut_again, moved, planned_seconds, speeds_of
from raypipe.planner.tune.request import Request
from raypipe.planner.worth import Gain, pays, rest_steps

__all__ = ["Offer", "Question", "Replanner", "answer", "can_be_cut_again"]

FIRST_PAUSE_S = 1.0
"""That a move is taken to last before one was made: about what resizing takes."""
RECENT_STEPS = 8
LOOKED_SHARE = 0.25
"""Of the drift threshold: speeds that differ by no more from those that were looked at last are not looked at again."""


class Question(NamedTuple):
    """Workers have other speeds than those that the cut was made for.

    Attributes:
        plan: in force.
        profile: in which its stages take what they did when all was well.
        line: the workers in the order of the stages.
        spec: of the schedule that the run has now.
        step_s: measured, the optimizer's and all waiting included.
        pause_s: that a move is taken to last.
        why: in words.
    """

    plan: Plan
    profile: Profile
    line: Cluster
    speeds: tuple[float, ...]
    spec: ScheduleSpec
    step_s: float
    steps_left: int
    pause_s: float
    why: str


class Offer(NamedTuple):
    """Another cut that pays, for the plan of this generation."""

    found: CutAgain
    generation: int
    gain: Gain
    why: str

    @property
    def numbers(self) -> dict[str, Any]:
        """For the event."""
        return {
            "predicted_gain": round(self.gain.share, 4),
            "speeds": [round(speed, 3) for speed in self.found.speeds],
            "cuts": list(self.found.decision.partition.cuts),
        }


def can_be_cut_again(plan: Plan) -> bool:
    """Whether it has several stages, each on one worker of its own, and a synchronous schedule."""
    spec, stages = plan.spec, plan.partition.stages
    return len(stages) > 1 and spec is not None and spec.of_kind.turned and all(len(s.devices) == 1 for s in stages)


def answer(request: Request, asked: Question, min_gain: float) -> Offer | None:
    """The best cut for these speeds, where it pays.

    Args:
        request: of a plan with the same stages and micro-batches.
        min_gain: share of a step that is worth a move.
    """
    try:
        found = cut_again(request, asked.profile, asked.plan, asked.spec, asked.line, asked.speeds)
    except RaypipeError:  # no other cut keeps the memory limits
        return None
    rest_s = max(0.0, asked.step_s - found.before_s)  # what the simulation leaves out, with any cut
    gain = Gain(found.before_s + rest_s, found.after_s + rest_s, asked.steps_left, asked.pause_s)
    if found.decision.partition.cuts == asked.plan.partition.cuts or not pays(gain, min_gain):
        return None
    told = dataclasses.replace(found.decision, reasons=(("cut", f"made again, for {asked.why}"),))
    return Offer(found._replace(decision=told), asked.plan.generation, gain, asked.why)


class Replanner:
    """Told of every step; see the module.

    Args:
        profile: that the run was planned with.
        num_steps: of the whole run.
        drift_threshold: by how much workers' speeds must differ from those that the cut was made for, against each
            other, before anybody looks. A worker may become slower bit by bit, so that a look comes to nothing and a
            later one does not.
    """

    def __init__(self, profile: Profile, num_steps: int, drift_threshold: float) -> None:
        self._num_steps, self._drift_threshold = num_steps, drift_threshold
        self._profile, self._calibrated = profile, False
        self._pause_s, self._rest_until = FIRST_PAUSE_S, 0
        self._recent_s: deque[float] = deque(maxlen=RECENT_STEPS)
        self._plan: Plan | None = None

    def begin(self, plan: Plan, line: Cluster) -> None:
        """The stages run this plan from now on, on these workers, in the order of the stages."""
        self._plan, self._line = plan, line
        self._made_for = self._looked = tuple(device.speed for device in line.devices)
        self._planned_s = planned_seconds(self._profile, plan)
        self._pace = Pace(plan.partition.num_stages, self._drift_threshold)
        self._recent_s.clear()

    def taken(self, offer: Offer, plan: Plan, pause_s: float, step: int) -> None:
        """The stages run what was offered; nothing is asked for a while, so that pauses stay a small part."""
        self._pause_s, self._rest_until = pause_s, step + rest_steps(pause_s, offer.gain.after_s)
        self.begin(plan, offer.found.decision.cluster)

    def heard(
        self, step: int, seconds: float, samples: Sequence[StageSample], spec: ScheduleSpec | None = None
    ) -> Question | None:
        """A step is over.

        Args:
            samples: of all stages.
            spec: of the schedule that it ran with; None for the plan's own.
        """
        assert self._plan is not None, "begin() comes first"
        self._recent_s.append(seconds)
        busy_s = self._pace.add(samples)
        if busy_s is None:
            return None
        if not self._calibrated:
            self._profile, self._calibrated = calibrated(self._profile, self._plan, busy_s, self._made_for), True
            self._planned_s = planned_seconds(self._profile, self._plan)
        speeds = speeds_of(self._planned_s, busy_s)
        known = moved(self._looked, speeds) <= LOOKED_SHARE * self._drift_threshold
        if step < self._rest_until or known or moved(self._made_for, speeds) <= self._drift_threshold:
            return None
        why, self._looked = _words(self._made_for, speeds), speeds
        spec = spec or self._plan.spec
        assert spec is not None, "can_be_cut_again"
        left, step_s = self._num_steps - step - 1, median(self._recent_s)
        return Question(self._plan, self._profile, self._line, speeds, spec, step_s, left, self._pause_s, why)


def _words(before: Sequence[float], after: Sequence[float]) -> str:
    """Which stage's worker has changed most against the others; of two, that which has changed more."""
    logs = [math.log(then / now) for then, now in zip(before, after, strict=True)]
    usual = median(logs)
    stage = max(range(len(logs)), key=lambda at: (round(abs(logs[at] - usual), 6), abs(logs[at])))
    own, all_of = math.exp(logs[stage]), math.exp(usual)
    return f"stage {stage} takes {own:.2f} times as long as before, the stages' median {all_of:.2f} times"
