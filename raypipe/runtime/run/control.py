"""The controller of a run's schedule, as the loop sees it: told of steps, asked for the settings of the next order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from raypipe.engine.rundir import RunFolder
from raypipe.ir.report import StepReport
from raypipe.planner.control import ControllerConfig, ControllerDecision
from raypipe.runtime.run.controller_thread import ActiveSettings, ControllerThread, step_done
from raypipe.runtime.run.spec import Watcher

__all__ = ["Control"]

STATE_FILE = "controller.json"


class Control:
    """A controller where the plan has one; without one, every order runs with the plan's own settings.

    Args:
        make: called with its configuration and the state that an earlier submission left, "" for none.
        folder: where that state is kept.
        watcher: told of what links are found to be.
        decided: told of decisions.
        try_to: makes a write that training does not need.
    """

    def __init__(
        self,
        make: Callable[[ControllerConfig, str], ControllerThread],
        folder: RunFolder,
        watcher: Watcher,
        decided: Callable[[ControllerDecision], None],
        try_to: Callable[[Callable[[], None]], object],
    ) -> None:
        self._make = make
        self._folder = folder
        self._watcher, self._decided = watcher, decided
        self._try_to = try_to
        self._config: ControllerConfig | None = None
        self._thread: ControllerThread | None = None

    @property
    def runs(self) -> bool:
        """Whether there is one, so that steps are to be measured."""
        return self._thread is not None

    @property
    def settings(self) -> ActiveSettings:
        """What the next order runs with."""
        return self._thread.setting if self._thread is not None else ActiveSettings()

    def begin(self, config: ControllerConfig | None, *, resumed: bool) -> None:
        """Start it; where an earlier one stood, if the run has been trained before.

        Args:
            config: None where it is to turn nothing.
        """
        self._config = config
        if config is None:
            return
        known = resumed and self._folder.place.exists(STATE_FILE)
        state = self._folder.place.read_bytes(STATE_FILE).decode(errors="replace") if known else ""
        self._thread = self._make(config, state)

    def end(self) -> None:
        """End it, once; what it has decided is told, and what it knows stays in the run's folder."""
        thread = self._thread
        if thread is not None:
            thread.close()
            self._hear(thread)
            self._keep(thread)
            self._thread = None

    def told(self, seconds: float, of_step: Sequence[StepReport], setting: ActiveSettings, *, counts: bool) -> None:
        """A step is over: tell the controller, and hear what it has decided meanwhile.

        Args:
            counts: whether the step's seconds say anything of the next.
        """
        for report in of_step:
            if report.damaged:
                why = (
                    f"{report.damaged} messages came to stage {report.stage} with changed bits and were asked for again"
                )
                tell = partial(self._folder.event, "damage", why, step=report.step, messages=report.damaged)
                self._try_to(tell)
        if self._thread is not None:
            self._thread.told(step_done(seconds, setting, of_step, counts=counts))
            self._hear(self._thread)

    def _hear(self, thread: ControllerThread) -> None:
        """Tell everybody of what was decided; a change is kept at once, for the driver may die."""
        if estimates := thread.take_estimates():
            self._watcher.estimated(estimates)
        decisions = thread.decisions()
        for found in decisions:
            numbers = found.numbers
            if found.choice is not None and self._config is not None:
                numbers = {**numbers, "choice": self._config.name(found.choice)}
            self._try_to(partial(self._folder.event, found.verdict, found.reason, step=found.step, **numbers))
            self._decided(found)
        if any(found.choice is not None for found in decisions):
            self._keep(thread)
        if complaint := thread.take_complaint():
            self._try_to(partial(self._folder.event, "controller", complaint))

    def _keep(self, thread: ControllerThread) -> None:
        self._try_to(lambda: self._folder.place.write_bytes(STATE_FILE, thread.state.encode()))
