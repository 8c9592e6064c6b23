"""Orders of a run, the commands to the stages. Each has a segment (one or several mini-batches), settings, and what
stages save, copy or trace.

position --next_segment--> segment --+-- a checkpoint is due ------> save_to
                                     +-- a copy is due ------------> keep_copy
                                     +-- the traced step ----------> keep_spans
                                     +-- the controller's settings -> spec, codecs
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from statistics import median
from typing import NamedTuple

from raypipe.ir.report import StepReport
from raypipe.ir.segment import Order, Segment
from raypipe.planner.copy_interval import MOST_STEPS, CopyCosts, copy_interval
from raypipe.planner.segments import Position, draining_segment, flowing_segments, next_segment
from raypipe.run.checkpoints import Checkpoints
from raypipe.run.controller_thread import ActiveSettings, Control
from raypipe.run.requests import Requests
from raypipe.run.spec import PlanInForce, RunSpec

WINDOW_STEPS, WINDOW_COPIES = 16, 9
GROWTH = 2
"""Maximum factor by which the interval between copies grows from one copy to the next."""
NEW_MEMORY_COPIES = 3
"""Number of first copies with unusual cost: they allocate memory, and before the first step they are smaller."""
AGAIN_STEPS = 32
"""Steps after which a copy that was not reported as arrived, and is not being sent, counts as failed."""


class CopyTimes:
    """Schedule of a run's in-memory copies of parameters and optimizer state, which recoveries load.

    Args:
        least_steps: minimum number of steps between two copies; None makes no copies.

    Attributes:
        interval: steps between two copies, chosen from the measured cost of a copy; 0 until the cost is known.
    """

    def __init__(self, least_steps: int | None) -> None:
        self._least_steps = least_steps
        self._at = 0  # step of the newest copy that was ordered
        self._arrived, self._under_way = True, False
        self._into_new_memory = NEW_MEMORY_COPIES  # number of them still to come
        self.interval = 0
        self._calm_s: deque[float] = deque(maxlen=WINDOW_STEPS)  # of steps without a copy
        self._copying_s: list[float] = []  # of steps during the newest copy
        self._costs_s: deque[float] = deque(maxlen=WINDOW_COPIES)

    def empties(self, step: int) -> bool:
        """Return True if an asynchronous pipeline has to drain after ``step`` steps, so that a copy can be made."""
        return self._least_steps is not None and step % self._least_steps == 0

    def due(self, step: int) -> bool:
        """Return True if a copy of parameters and optimizer state is to be made after ``step`` steps."""
        if self._least_steps is None:
            return False
        since = step - self._at
        failed = since >= AGAIN_STEPS and not self._under_way
        return since >= max(self._least_steps, self.interval) and (self._arrived or failed)

    def ordered(self, step: int) -> None:
        """Record that a copy after ``step`` steps was requested.

        ``step`` may be lower than before, after a rollback.
        """
        self._at, self._arrived, self._copying_s = step, False, []

    def soon(self) -> None:
        """Make a copy due after the next step, regardless of the previous copy; called when the workers changed."""
        self._at, self._arrived, self._copying_s = -MOST_STEPS, True, []
        self._into_new_memory = NEW_MEMORY_COPIES

    def on_step(self, seconds: float, of_step: Sequence[StepReport]) -> None:
        """Update the interval, and record if the copy has arrived, from a step's duration and all workers' reports."""
        if self._least_steps is None:
            return
        self._under_way = any(report.copying for report in of_step)
        (self._copying_s if self._under_way else self._calm_s).append(seconds)
        copied = [report.copied for report in of_step if report.copied is not None]
        if self._arrived or len(copied) < len(of_step) or any(copy.step != self._at for copy in copied):
            return
        self._arrived = True
        first, self._into_new_memory = self._into_new_memory > 0, max(0, self._into_new_memory - 1)
        if self._calm_s:
            step_s, sent_s = median(self._calm_s), max(copy.sent_s for copy in copied)
            if first:
                self.interval = self.interval or copy_interval(CopyCosts(step_s, 0.0, sent_s))
                return
            # Some costs are negative if step times vary: clipping them would make the median too high.
            self._costs_s.append(sum(self._copying_s) - len(self._copying_s) * step_s)
            copying = CopyCosts(step_s, max(copy.copied_s for copy in copied), sent_s)
            cost_s = max(median(self._costs_s), copying.cost_s)
            wanted = copy_interval(copying._replace(cost_s=cost_s))
            self.interval = max(copy_interval(copying), min(GROWTH * self.interval, wanted))


PATIENCE_S = 10.0
"""Maximum seconds that a move may wait for the next copy: a third of the 30 s notice of most clouds."""
SETTLED_STEPS = 10
"""Steps between a change of the stages and the traced step, because the first steps are not representative."""


class Ordered(NamedTuple):
    """Segment (one or several mini-batches) that was sent to the stages in an order, and what the order requests.

    Attributes:
        after: data position of the run after the segment.
        setting: settings with which the segment runs.
        counts: False if the duration is not representative: for the first order of a sequence, for an order with a
            checkpoint or a trace, and for the order after it.
        saves: True if every stage writes a checkpoint of the state after the segment.
        copies: True if every stage copies that state to memory.
        once: True if the checkpoint was requested or due by the clock, so that repeating the step would not save it.
        traced: True if every worker records the start and end of its actions.
    """

    segment: Segment
    after: Position
    setting: ActiveSettings = ActiveSettings()
    counts: bool = True
    saves: bool = False
    copies: bool = False
    once: bool = False
    traced: bool = False


class Ordering:
    """Source of the run's orders; keeps the orders that were issued and are not completed.

    Args:
        pauses_after: (step, saves=...) -> True if an evaluation follows that step, so that orders must end there;
            ``saves`` is True if a checkpoint is saved there.

    Attributes:
        plan: plan in force.
        traced_step: step in which every worker records the start and end of its actions.
        traced: True if the current workers have completed this step.
        copy_times: schedule of in-memory copies.
    """

    def __init__(
        self,
        spec: RunSpec,
        plan: PlanInForce,
        checkpoints: Checkpoints,
        control: Control,
        requests: Requests,
        pauses_after: Callable[..., bool],
    ) -> None:
        self._spec, self.plan = spec, plan
        self._checkpoints, self._control, self._requests = checkpoints, control, requests
        self._pauses_after = pauses_after
        self._ordered: dict[int, Ordered] = {}  # by first step
        self._save_requested = False  # a checkpoint was requested and has not been ordered
        self._save_when_empty = False  # one was requested for when the pipeline drains for a copy
        self._steady = False  # the last order had neither a checkpoint nor a trace
        self.traced_step, self.traced = 0, False
        self.copy_times = CopyTimes(spec.copy_interval_steps)

    @property
    def patience_s(self) -> float:
        """Seconds that a move may wait for the next copy, for which an asynchronous pipeline drains; 0 for others."""
        return PATIENCE_S if self.plan.flow is not None and self._spec.copy_interval_steps else 0.0

    def cancel_pending_saves(self) -> None:
        """Drop the saves and copies of orders that not all stages have completed.

        A dropped checkpoint that the interval in steps would not repeat is requested again.
        """
        self._save_what_was_ordered()
        self._ordered = {step: ordered._replace(saves=False, copies=False) for step, ordered in self._ordered.items()}

    def take(self, step: int) -> Ordered:
        """Remove and return the completed order that begins with ``step``."""
        ordered = self._ordered.pop(step)
        self.traced = self.traced or ordered.traced
        return ordered

    def trace(self, began_at: int) -> None:
        """Choose the step to trace: in the middle between ``began_at`` and the end of the run."""
        last = self._spec.num_steps - 1
        self.traced, self.traced_step = False, min(last, began_at + max(2, (last + 1 - began_at) // 2))

    def save_soon(self) -> None:
        """Request a checkpoint; an asynchronous run saves it when it drains for a copy.

        A drain of its own would change the results.
        """
        if self.plan.flow is None:
            self._save_requested = True
        else:
            self._save_when_empty = True

    def forget(self, step: int) -> None:
        """Drop outstanding orders, because the run resumes from ``step``.

        Dropped checkpoints that the interval in steps would not repeat are requested again. Another step is traced if
        the chosen step was traced by earlier workers or is before ``step``.
        """
        self._save_what_was_ordered()
        self._ordered.clear()
        if self.traced or self.traced_step < step:  # by earlier stages or workers, some of which may be gone
            self.traced, self.traced_step = False, min(self._spec.num_steps - 1, step + SETTLED_STEPS)

    def _save_what_was_ordered(self) -> None:
        if any(ordered.saves and ordered.once for ordered in self._ordered.values()):
            self.save_soon()

    def orders(self, at: Position, *, empty: bool = True) -> Iterator[Order]:
        """Yield orders up to the end of the run, the next evaluation, generation or change of the stages.

        Args:
            at: position of the run, where the first order begins.
            empty: True if the pipeline holds no micro-batches of later steps.
        """
        self._steady = False
        for segment, after, setting in self._segments(at, empty=empty):
            self._save_requested = self._save_requested or self._requests.take_checkpoint()
            ends_empty = segment.phase.ends_empty
            empties = ends_empty and self._empties_after(after.step)
            requested = self._save_requested or (empties and self._save_when_empty)
            saves = ends_empty and (
                after.step == self._spec.num_steps or self._checkpoints.due(after.step) or requested
            )
            copies = empties and self.copy_times.due(after.step)
            once = saves and after.step < self._spec.num_steps and not self._checkpoints.due_at(after.step)
            if saves:
                self._save_requested = self._save_when_empty = False
            if copies:
                self.copy_times.ordered(after.step)
            traced = segment.first_step <= self.traced_step < after.step
            steady = not saves and not traced
            ordered = Ordered(segment, after, setting, self._steady and steady, saves, copies, once, traced)
            self._steady = steady
            yield self._order(ordered)
            pauses = self._requests.wants_text or self._pauses_after(after.step, saves=saves)
            if (ends_empty and pauses) or (empties and self._requests.wants_change):
                return

    def draining(self, at: Position) -> Order:
        """Make the order that completes the mini-batches in the pipeline after a halt at position ``at``."""
        assert self.plan.flow is not None, "only an asynchronous schedule ends with micro-batches under way"
        spec = self._spec
        segment = draining_segment(self.plan.flow, at)
        segment = replace(segment, generation=self.plan.plan.generation)
        return self._order(Ordered(segment, at.after(segment, spec.num_samples["train"])))

    def _order(self, ordered: Ordered) -> Order:
        segment, after, setting, *_ = ordered
        self._ordered[segment.first_step] = ordered
        return Order(
            segment,
            keep_spans=ordered.traced,
            save_to=self._checkpoints.begin(after.step) if ordered.saves else "",
            measure=self._control.runs,
            codecs=setting.codecs,
            keep_copy=ordered.copies,
        )

    def _empties_after(self, step: int) -> bool:
        """Return True if the pipeline is empty after ``step``: always if synchronous, else if it drains for a copy."""
        return self.plan.flow is None or self.copy_times.empties(step)

    def _empty_after(self, step: int) -> bool:
        """Return True if an asynchronous schedule must drain after ``step``: for a checkpoint, copy or evaluation."""
        saves = self._checkpoints.due_at(step)
        return saves or self._empties_after(step) or self._pauses_after(step, saves=saves)

    def _segments(self, at: Position, *, empty: bool) -> Iterator[tuple[Segment, Position, ActiveSettings]]:
        """Yield (next segment, position after it, the controller's settings then), for the arguments of ``orders``."""
        spec, generation = self._spec, self.plan.plan.generation
        if self.plan.flow is not None:
            flowing = flowing_segments(
                self.plan.flow,
                spec.num_samples["train"],
                spec.num_steps,
                at,
                flowing=not empty,
                empty_after=self._empty_after,
                empty_soon=lambda: self._save_requested or self._requests.wants_drain or self._checkpoints.overdue,
            )
            for segment, after in flowing:
                yield replace(segment, generation=generation), after, ActiveSettings()
            return
        while at.step < spec.num_steps and not self._requests.has_offer:
            setting = self._control.settings
            count = setting.num_microbatches
            size = spec.microbatch_size if count is None else math.ceil(spec.minibatch_size / count)
            segment, at = next_segment(spec.num_samples["train"], spec.minibatch_size, size, at)
            yield replace(segment, generation=generation, spec=setting.spec), at, setting
