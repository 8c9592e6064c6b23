"""The controller: told of every step, it says what to run from the next flush on.

    StepDone --> Observer.add --> transition.after(state, what is heard, setup) --> new state, decisions
                 estimates of       states.py has the four states
                 links, stages

The shell keeps the two things that last from step to step: the measurements and the state. Same events give the same
decisions, also when both went through JSON in between.
"""

from __future__ import annotations

import json

from raypipe.errors import PlanError
from raypipe.ir.links import LinkEstimate
from raypipe.planner.control.choice import Choice
from raypipe.planner.control.config import ControllerConfig
from raypipe.planner.control.events import ControllerDecision, StepDone
from raypipe.planner.control.observer import Observer
from raypipe.planner.control.peaks import PeakMemory
from raypipe.planner.control.saved import state_from_dict, state_to_dict
from raypipe.planner.control.states import Known, Measure, State
from raypipe.planner.control.transition import Heard, after
from raypipe.planner.search.routes import routes_of

__all__ = ["Controller"]

FORMAT = 2
"""Of the saved state; counts up when a release can no longer read what the one before has written."""


class Controller:
    """Tell it of every step; do what it says at the next flush.

    Args:
        setup: of the run.
    """

    def __init__(self, setup: ControllerConfig) -> None:
        self.setup = setup
        routes = routes_of(setup.choice.spec, len(setup.budgets))
        self._observer = Observer(routes, setup.choice.num_microbatches, setup.link_drift_threshold)
        self._state: State = Measure(Known(setup.choice, PeakMemory(setup.budgets)))

    @property
    def state(self) -> State:
        """One of the four, see ``states``."""
        return self._state

    @property
    def wanted(self) -> Choice:
        """What the run should use: what a driver that comes back begins with."""
        return self._state.known.wanted

    def estimates(self) -> tuple[LinkEstimate, ...]:
        """Of every hop and direction, for metrics and people."""
        return self._observer.estimates()

    def handle(self, event: StepDone) -> list[ControllerDecision]:
        """Take in one step.

        Returns:
            what was decided, in order. Where a decision has a ``choice``, that is to be run from the next flush.
        """
        heard = Heard(event, self._observer.add(event), self._observer.measured)
        self._state, decisions = after(self._state, heard, self.setup)
        return decisions

    def to_json(self) -> str:
        """State and measurements, for a driver that comes back."""
        parts = {"observer": self._observer.to_dict(), "state": state_to_dict(self._state)}
        return json.dumps({"format": FORMAT, "setup": self.setup.identity, **parts})

    @classmethod
    def from_json(cls, setup: ControllerConfig, text: str) -> Controller:
        """The controller that wrote ``text``, in a run with the same setup.

        Raises:
            PlanError: the text is no such state, or another release has written it. A new controller measures anew.
        """
        try:
            found = json.loads(text)
            if found.get("format") != FORMAT:
                raise ValueError("another release of raypipe has written it")
            if found["setup"] != setup.identity:
                raise ValueError("it was written by a run with other stages, limits or settings")
            controller = cls(setup)
            controller._observer.load(found["observer"])
            controller._state = state_from_dict(found["state"], setup.budgets)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PlanError(
                f"The saved state of the controller cannot be used by a run of {len(setup.budgets)} stages ({error}): "
                "begin without it, and the links are measured anew."
            ) from None
        return controller
