"""The controller beside the loop: told of every step, asked before every order.

    loop: reports of a step --> told() --> [queue] --> thread: Controller.handle, which may simulate for seconds
    loop: next order        <-- setting                    |
    loop: events, metrics   <-- decisions() <--------------+

The loop never waits for it: until it has decided, the pipeline goes on as it is. A setting exchanges rows of actions
and codecs; processes, links and weights stay.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from raypipe.errors import PlanError
from raypipe.ir.links import LinkEstimate, LinkSample, StageSample
from raypipe.ir.report import StepReport
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.control import Choice, Controller, ControllerConfig, ControllerDecision, StepDone
from raypipe.planner.search.routes import routes_of

__all__ = ["ActiveSettings", "ControllerThread", "step_done"]

END_TIMEOUT_S = 1.0
ESTIMATES_EVERY_S = 1.0
"""Making them takes time, and people look at them less often."""


class ActiveSettings(NamedTuple):
    """What an order runs with.

    Attributes:
        choice: None where nothing is ever turned.
        name: of the choice, for people.
        num_microbatches: of a whole mini-batch; None for the plan's.
        spec, codecs: as in Segment and Order.
    """

    choice: Choice | None = None
    name: str = ""
    num_microbatches: int | None = None
    spec: ScheduleSpec | None = None
    codecs: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())


class _Machine(Protocol):
    """A Controller, or a script that stands in for it."""

    @property
    def wanted(self) -> Choice: ...

    def handle(self, event: StepDone) -> list[ControllerDecision]: ...

    def estimates(self) -> tuple[LinkEstimate, ...]: ...

    def to_json(self) -> str: ...


class ControllerThread:
    """Runs the controller in a thread of its own.

    Args:
        setup: of the run.
        state: what ``state`` said when an earlier submission of the run ended; "" for a new run.
        machine: instead of the controller.
    """

    def __init__(self, setup: ControllerConfig, state: str = "", machine: _Machine | None = None) -> None:
        self._setup = setup
        self._complaint = ""
        self._estimates: tuple[LinkEstimate, ...] = ()
        self._estimated_s = time.monotonic()
        if machine is None:
            machine = Controller(setup)
            if state:
                try:
                    machine = Controller.from_json(setup, state)
                except PlanError as error:
                    self._complaint = str(error)
        self._machine = machine
        self._state = machine.to_json()
        self._setting = self._setting_of(machine.wanted)
        self._events: SimpleQueue[StepDone | None] = SimpleQueue()
        self._decided: SimpleQueue[ControllerDecision] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="raypipe controller", daemon=True)
        self._thread.start()

    @property
    def setting(self) -> ActiveSettings:
        """What the next order runs with."""
        return self._setting

    def told(self, event: StepDone) -> None:
        """A step is over."""
        self._events.put(event)

    def decisions(self) -> list[ControllerDecision]:
        """What was decided since the last call."""
        found = []
        while not self._decided.empty():
            found.append(self._decided.get())
        return found

    def take_estimates(self) -> tuple[LinkEstimate, ...]:
        """What is known of the links, where that is newer than what the last call got."""
        found, self._estimates = self._estimates, ()
        return found

    def take_complaint(self) -> str:
        """What went wrong with the controller, once; training does not need it."""
        complaint, self._complaint = self._complaint, ""
        return complaint

    @property
    def state(self) -> str:
        """For a later submission of this run: the controller after its last change, once closed after all events."""
        return self._state

    def close(self) -> None:
        """End the thread; one that simulates is not waited for."""
        self._events.put(None)
        self._thread.join(END_TIMEOUT_S)
        if not self._thread.is_alive():
            self._state = self._machine.to_json()

    def _work(self) -> None:
        try:
            while (event := self._events.get()) is not None:
                for decision in self._machine.handle(event):
                    if decision.choice is not None:
                        self._setting = self._setting_of(decision.choice)
                        self._state = self._machine.to_json()
                    self._decided.put(decision)
                if time.monotonic() - self._estimated_s >= ESTIMATES_EVERY_S:
                    self._estimates, self._estimated_s = self._machine.estimates(), time.monotonic()
        except Exception as error:  # noqa: BLE001  (told to people; the run goes on as it is)
            self._complaint = f"The controller failed and turns nothing any more: {error!r}"

    def _setting_of(self, choice: Choice) -> ActiveSettings:
        setup = self._setup
        # A direction that the controller may not turn stays as it was configured.
        forward = choice.forward_codecs if setup.forward_codecs else ()
        backward = choice.backward_codecs if setup.backward_codecs else ()
        spec = None if choice.spec == setup.choice.spec else choice.spec
        count = None if choice.num_microbatches == setup.choice.num_microbatches else choice.num_microbatches
        return ActiveSettings(choice, setup.name(choice), count, spec, (forward, backward))


def step_done(seconds: float, setting: ActiveSettings, reports: Sequence[StepReport], *, counts: bool) -> StepDone:
    """The controller's event, from what the stages report; nothing is measured while a copy of state is under way.

    Args:
        seconds: from the end of the step before to its own end.
        reports: of all workers.
        counts: see StepDone.
    """
    assert setting.choice is not None
    step = reports[0].step
    if any(report.copying for report in reports):
        return StepDone(step, seconds, setting.choice, (), (), counts=False)
    turned, count = setting.codecs, setting.choice.num_microbatches
    routes = routes_of(setting.choice.spec, 1 + max(report.stage for report in reports))
    stages: list[StageSample] = []
    messages: list[LinkSample] = []
    for report in reports:
        worker = report.stage if report.worker is None else report.worker
        if report.sample is not None:
            stages.append(report.sample._replace(replica=routes.homes[report.stage].index(worker)))
        for times in report.messages:
            # A codec that is never turned is part of the link: what counts are the bytes on the wire.
            whole = turned[0 if times.forward else 1]
            found = times.samples(step, routes.microbatches_of(worker, count))
            messages.extend(sample if whole else sample._replace(raw_bytes=0) for sample in found)
    return StepDone(step, seconds, setting.choice, tuple(stages), tuple(messages), counts)
