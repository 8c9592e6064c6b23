"""Controller of a run: a thread that processes the reports of every step, and chooses the settings of later orders.

An order is a request to the stages to run one training step or a few.

    loop: reports of a step --> Control.on_step --> [queue] --> thread: Controller.handle, maybe for seconds
    loop: next order        <-- Control.settings <-- setting       |    Replanning.search, maybe for seconds
    loop: events, metrics   <-- take_news <------------------------+             |
    loop: between two steps <-- Requests.take_offer <-- offer of another cut ----+

The loop waits for the thread after the first step only (``Control.open``): later the pipeline continues unchanged until
the thread has decided. A new setting replaces the sequence of each worker's actions and the codecs; processes, links
and weights stay. Another cut moves layers, and is offered to the loop.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from queue import SimpleQueue
from statistics import median
from typing import NamedTuple, Protocol

from raypipe.errors import PlanError
from raypipe.ir.communication import LinkEstimate, LinkSample, StageSample
from raypipe.ir.plan import Plan
from raypipe.ir.report import StepRecord, StepReport
from raypipe.ir.schedule_spec import ScheduleSpec
from raypipe.planner.controller import Choice, Controller, ControllerConfig, ControllerDecision, StepDone, Verdict
from raypipe.planner.repartition import Offer
from raypipe.planner.replay import routes_of
from raypipe.run.plans.replanning import Replanning
from raypipe.run.reporting import Reporter
from raypipe.run.spec import PlanInForce

END_TIMEOUT_S = 1.0
OPENING_TIMEOUT_S = 0.5
"""Most seconds that a run waits after its first step for the controller's first decision."""
ALIKE_TOKENS, ALIKE_STEPS = 0.25, 32
"""Largest fraction by which the tokens of a step may differ from the median of the newest ALIKE_STEPS steps.

A step with another number is padded to another length, and is not passed to the controller: its seconds would look like
a change of links or stages.
"""
ESTIMATES_EVERY_S = 1.0
"""Minimum seconds between two estimates of link speeds: they take time, and clients read them less often."""
STATE_FILE = "controller.json"
SAVED = (Verdict.SWITCH, Verdict.PAID, Verdict.OPEN, Verdict.UNDO)
"""Decisions after which the state is saved: a switch counts for a restarted driver once its trial has ended."""


class ActiveSettings(NamedTuple):
    """Settings with which an order (one training step or a few) runs.

    Attributes:
        choice: settings that the controller has chosen; None without a controller.
        name: name of the choice, for records.
        num_microbatches: micro-batches of a whole mini-batch; None for the number in the plan.
        spec: schedule, as in Segment; None for the plan's schedule.
        codecs: codecs of forward and backward messages, as in Order.
    """

    choice: Choice | None = None
    name: str = ""
    num_microbatches: int | None = None
    spec: ScheduleSpec | None = None
    codecs: tuple[tuple[str, ...], tuple[str, ...]] = ((), ())


class _Machine(Protocol):
    """Protocol of planner.controller.Controller, and of scripted controllers in tests."""

    @property
    def wanted(self) -> Choice: ...

    def handle(self, event: StepDone) -> list[ControllerDecision]: ...

    def estimates(self) -> tuple[LinkEstimate, ...]: ...

    def to_json(self) -> str: ...


class ControllerThread:
    """Thread that runs the controller of schedules and codecs, and searches for other cuts of the model into stages.

    Args:
        setup: configuration of the controller; None if no schedule or codec may change.
        state: last value of the attribute ``state`` in the run's previous submission (call of fit); "" for a new run.
        machine: controller to run; None to make one from ``setup`` and ``state``.

    Attributes:
        setting: settings of the next order.
        state: state of the controller as JSON, for a later submission; updated by decisions in SAVED and ``close``.
        opened: event that is set once the first step has been handled.
    """

    def __init__(self, setup: ControllerConfig | None, state: str = "", machine: _Machine | None = None) -> None:
        self._setup = setup
        self._news: SimpleQueue[ControllerDecision | tuple[LinkEstimate, ...] | str] = SimpleQueue()
        self._estimated_s = time.monotonic()
        if machine is None and setup is not None:
            machine = Controller(setup)
            if state:
                try:
                    machine = Controller.from_json(setup, state)
                except PlanError as error:
                    self._news.put(str(error))
        self.opened = threading.Event()
        self._machine = machine
        self.state, self.setting = "", ActiveSettings()
        if machine is not None:
            self.state, self.setting = machine.to_json(), self._setting_of(machine.wanted)
        self._tasks: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="raypipe controller", daemon=True)
        self._thread.start()

    def on_step(self, event: StepDone) -> None:
        """Queue a completed step for the controller, and return at once."""
        self.do(partial(self._handle, event))

    def do(self, task: Callable[[], None]) -> None:
        """Queue a task for the thread, such as a search for another cut, and return at once."""
        self._tasks.put(task)

    def take_news(self) -> list[ControllerDecision | tuple[LinkEstimate, ...] | str]:
        """Return what the thread has produced since the last call, in order.

        Returns:
            Decisions, tuples of link estimates, and strings: error messages of the controller.
        """
        news = []
        while not self._news.empty():
            news.append(self._news.get())
        return news

    def close(self) -> None:
        """End the thread, and wait END_TIMEOUT_S seconds at most for a search that it runs."""
        self._tasks.put(None)
        self._thread.join(END_TIMEOUT_S)
        if not self._thread.is_alive() and self._machine is not None:
            self.state = self._machine.to_json()

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                task()
            except Exception as error:  # noqa: BLE001  (reported; the run continues unchanged)
                self._news.put(f"The search for another cut failed: {error!r}")

    def _handle(self, event: StepDone) -> None:
        if self._machine is None:  # it has failed
            return
        try:
            for decision in self._machine.handle(event):
                if decision.choice is not None:
                    self.setting = self._setting_of(decision.choice)
                if decision.verdict in SAVED:
                    self.state = self._machine.to_json()
                self._news.put(decision)
            self.opened.set()
            if time.monotonic() - self._estimated_s >= ESTIMATES_EVERY_S:
                self._news.put(self._machine.estimates())
                self._estimated_s = time.monotonic()
        except Exception as error:  # noqa: BLE001  (as above)
            self._machine = None
            self._news.put(f"The controller failed, and changes no settings any more: {error!r}")
            self.opened.set()

    def _setting_of(self, choice: Choice) -> ActiveSettings:
        setup = self._setup
        assert setup is not None, "only a controller chooses"
        # A direction that the controller may not change keeps its configured codec.
        forward = choice.forward_codecs if setup.forward_codecs else ()
        backward = choice.backward_codecs if setup.backward_codecs else ()
        spec = None if choice.spec == setup.choice.spec else choice.spec
        count = None if choice.num_microbatches == setup.choice.num_microbatches else choice.num_microbatches
        return ActiveSettings(choice, setup.name(choice), count, spec, (forward, backward))


class Control:
    """Interface of the loop to the run's controller. Without a controller, orders run with the plan's own settings.

    Args:
        make: (configuration, state) -> started controller thread; an earlier submission saved the state, or it is "".
        reporter: publishes decisions and estimates; the controller's state is saved in its folder.
        replanning: detector of stages that need another cut; None if the cut is fixed.
    """

    def __init__(
        self,
        make: Callable[[ControllerConfig, str], ControllerThread],
        reporter: Reporter,
        replanning: Replanning | None = None,
    ) -> None:
        self._make, self._reporter, self._replanning = make, reporter, replanning
        self._config: ControllerConfig | None = None
        self._opens = False
        self._tokens: deque[int] = deque(maxlen=ALIKE_STEPS)
        self._thread: ControllerThread | None = None

    @property
    def runs(self) -> bool:
        """True if a controller runs, so that stages must measure their steps."""
        return self._thread is not None

    @property
    def opens(self) -> bool:
        """True from the start of a controller by ``begin`` until the first step is completed.

        The first step should run alone, because the controller has not measured any link yet. The next orders can then
        be issued with the settings for which ``open`` waits.
        """
        return self._opens

    def open(self) -> None:
        """Wait up to OPENING_TIMEOUT_S seconds until the controller has handled its first step; publish its decisions.

        Decisions that come later are published after the next step. Does nothing without a controller, or if the first
        step was not completed.
        """
        if self._thread is not None and not self._opens:  # else that step was halted before it began
            self._thread.opened.wait(OPENING_TIMEOUT_S)
            self._publish(self._thread)

    @property
    def settings(self) -> ActiveSettings:
        """Settings of the next order."""
        return self._thread.setting if self._thread is not None else ActiveSettings()

    def begin(self, made: PlanInForce, *, resumed: bool) -> None:
        """Start the controller for the plan ``made``, if that plan permits changes of schedule, codecs or cut.

        Args:
            resumed: True to continue from the controller's state in the run's folder, if there is one.
        """
        config, place = made.retune, self._reporter.folder.place
        self._config = config
        if self._replanning is not None:
            self._replanning.begin(made.plan)
        if config is not None:
            known = resumed and place.exists(STATE_FILE)
            self._opens = True
            self._thread = self._make(config, place.read_bytes(STATE_FILE).decode(errors="replace") if known else "")
        elif self._replanning is not None and self._replanning.measures:
            self._thread = ControllerThread(None)

    def workers_replaced(self, plan: Plan) -> None:
        """Measure the stages anew, because other workers run them under the same plan."""
        if self._replanning is not None:
            self._replanning.begin(plan)

    def cut_taken(self, offer: Offer, plan: Plan, pause_s: float, step: int) -> None:
        """Record that stages run the cut of ``offer`` since ``step``, after ``pause_s`` seconds without training."""
        assert self._replanning is not None, "it made the offer"
        self._replanning.taken(offer, plan, pause_s, step)

    def end(self) -> None:
        """Stop the controller, publish its last decisions, save its state in the run's folder. Safe to call twice."""
        if self._thread is not None:
            self._thread.close()
            self._publish(self._thread)
            self._save(self._thread)
            self._thread, self._opens = None, False

    def on_step(
        self, record: StepRecord, of_step: Sequence[StepReport], setting: ActiveSettings, *, counts: bool
    ) -> None:
        """Pass a completed step to the controller, and publish what it has decided since the last step.

        Args:
            record: record of the step.
            of_step: reports of all workers on the step.
            setting: settings with which the step ran.
            counts: False if the step's duration is not representative, for example because a checkpoint was saved.
        """
        self._opens = False
        if self._thread is None:
            return
        self._tokens.append(record.tokens)
        usual = median(self._tokens)
        alike = abs(record.tokens - usual) <= ALIKE_TOKENS * usual
        if setting.choice is not None:
            self._thread.on_step(step_done(record.seconds, setting, of_step, counts=counts, alike=alike))
        if self._replanning is not None and alike:
            query = self._replanning.on_step(record.step, record.seconds, of_step, setting.spec)
            if query is not None:
                self._thread.do(partial(self._replanning.search, query))
        self._publish(self._thread)

    def _publish(self, thread: ControllerThread) -> None:
        """Write the thread's new decisions and estimates to the run's log, its watcher and the user's callbacks.

        After a decision in ``SAVED``, the controller's state is saved in the run's folder at once, so that a restarted
        driver can continue from it.
        """
        reporter, changed = self._reporter, False
        for news in thread.take_news():
            if isinstance(news, str):
                reporter.log("controller", news)
            elif isinstance(news, ControllerDecision):
                names = (
                    {} if news.choice is None or self._config is None else {"choice": self._config.name(news.choice)}
                )
                reporter.log(news.verdict, news.reason, step=news.step, **{**news.numbers, **names})
                reporter.watcher.decided(news)
                reporter.callbacks.event(news.verdict, news.reason, {**news.numbers, "step": news.step})
                changed = changed or news.verdict in SAVED
            else:
                reporter.watcher.estimated(news)
        if changed:
            self._save(thread)

    def _save(self, thread: ControllerThread) -> None:
        place = self._reporter.folder.place
        if self._config is not None:
            self._reporter.try_to(lambda: place.write_bytes(STATE_FILE, thread.state.encode()))


def step_done(
    seconds: float, setting: ActiveSettings, reports: Sequence[StepReport], *, counts: bool, alike: bool = True
) -> StepDone:
    """Build the controller's event for a step.

    The event has no measurements of stages and links if a copy of a stage's state was sent during the step, or if
    ``alike`` is False.

    Args:
        seconds: duration, from the end of the previous step to the end of this one.
        setting: settings with which the step ran; its choice is not None.
        reports: reports of all workers on the step.
        counts: False if ``seconds`` are not representative, for example because a checkpoint was saved.
        alike: False if the mini-batch is padded to another length than most mini-batches.
    """
    assert setting.choice is not None
    step = reports[0].step
    if not alike or any(report.copying for report in reports):
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
            # A codec that is never changed is part of the link: only the bytes on the wire count.
            whole = turned[0 if times.forward else 1]
            samples = times.samples(step, routes.microbatches_of(worker, count))
            messages.extend(sample if whole else sample._replace(raw_bytes=0) for sample in samples)
    return StepDone(step, seconds, setting.choice, tuple(stages), tuple(messages), counts)
