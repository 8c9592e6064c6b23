"""What is ordered of the stages next: segments in turn, and what each of them is to leave behind.

position --next_segment--> segment --+-- a checkpoint is due ------> save_to
                                     +-- a copy is due ------------> keep_copy
                                     +-- the traced step ----------> keep_spans
                                     +-- the controller's settings -> spec, codecs
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

from raypipe.ir.segment import Segment
from raypipe.ir.work_order import Order
from raypipe.planner.segments import Position, draining_segment, flowing_segments, next_segment
from raypipe.runtime.run.checkpoints import Checkpoints
from raypipe.runtime.run.control import Control
from raypipe.runtime.run.controller_thread import ActiveSettings
from raypipe.runtime.run.copy_times import CopyTimes
from raypipe.runtime.run.requests import Requests
from raypipe.runtime.run.spec import PlanInForce, RunSpec

__all__ = ["Known", "Memo", "Ordered", "Ordering"]


PATIENCE_S = 10.0
"""Of the 30 s that most clouds leave."""
SETTLED_STEPS = 10
"""After a change of the stages; the steps right behind it are not like the others."""


class Ordered(NamedTuple):
    """A segment that was ordered.

    Attributes:
        after: the position after it.
        setting: what it runs with.
        counts: false for a step whose seconds say nothing of the next: the first, and those with a checkpoint.
        saves: every stage writes a checkpoint of the state after it.
        copies: every stage keeps a copy of that state in memory.
        once: it saves because somebody asked, or for the clock: another order of this step would not.
        traced: every worker keeps the spans of its actions.
    """

    segment: Segment
    after: Position
    setting: ActiveSettings = ActiveSettings()
    counts: bool = True
    saves: bool = False
    copies: bool = False
    once: bool = False
    traced: bool = False


class Known(NamedTuple):
    """What the loop knows when it orders something.

    Attributes:
        step: up to which all steps are done.
        skipped: those of them that were not finite, since the run went back to a checkpoint last.
        evaluated: micro-batches that evaluations have used up.
        written: steps whose records are in the run's folder.
    """

    step: int = 0
    skipped: int = 0
    evaluated: int = 0
    written: int = 0


class Memo(NamedTuple):
    """What a driver that takes the stages over is to know of an order that trains; ``before`` is the position then."""

    ordered: Ordered
    before: Position
    known: Known


class Ordering:
    """Makes orders from a position on, and remembers those that have not been carried out.

    Attributes:
        plan: in force.
        traced_step: the step whose actions are noted one by one.
        traced: the workers that there are now have done it.
        measures: stages tell how long they took, also where there is no controller to hear it.
        copy_times: when copies of state are taken.
        known: by the loop, which keeps it up to date.

    Args:
        pauses_after: (step, saves=whether a checkpoint is saved there) -> whether no order may follow that step,
            because an evaluation does.
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
        self._asked = False  # for a checkpoint that has not been ordered
        self._once_empty = False  # for one as soon as the pipeline runs empty for a copy
        self._calm = False  # whether the step that is ordered next is like the one before
        self.traced_step, self.traced, self.measures = 0, False, False
        self.copy_times = CopyTimes(spec.copy_interval_steps)
        self.known = Known()

    @property
    def patience_s(self) -> float:
        """How long a change may wait for the next copy: elsewhere an asynchronous run does not run empty but for it."""
        return PATIENCE_S if self.plan.flow is not None and self._spec.copy_interval_steps else 0.0

    def remember(self, ordered: Ordered) -> None:
        """An earlier driver ordered this; what was to be saved then is not this one's."""
        self._ordered[ordered.segment.first_step] = ordered._replace(saves=False)

    def save_and_copy_no_more(self) -> None:
        """What was ordered was not carried out by all: what it was to save or to copy is not there."""
        self._save_what_was_ordered()
        self._ordered = {step: ordered._replace(saves=False, copies=False) for step, ordered in self._ordered.items()}

    def taken(self, step: int) -> Ordered:
        """The segment that begins with this step; it has been carried out."""
        ordered = self._ordered.pop(step)
        self.traced = self.traced or ordered.traced
        return ordered

    def trace(self, began_at: int) -> None:
        """Have a step in the middle of the run traced, which begins here."""
        last = self._spec.num_steps - 1
        self.traced, self.traced_step = False, min(last, began_at + max(2, (last + 1 - began_at) // 2))

    def save_soon(self) -> None:
        """A checkpoint is due; of an asynchronous run beside its next copy, for to run empty elsewhere changes it."""
        if self.plan.flow is None:
            self._asked = True
        else:
            self._once_empty = True

    def forget(self, step: int, skipped: int) -> None:
        """What was ordered will not be carried out; the run goes back to this step, so many before it were skipped."""
        self._save_what_was_ordered()
        self._ordered.clear()
        if self.traced or self.traced_step < step:  # with the cut and by the workers before: some may be gone
            self.traced, self.traced_step = False, min(self._spec.num_steps - 1, step + SETTLED_STEPS)
        self.learn(step=step, skipped=skipped, written=min(step, self.known.written))

    def _save_what_was_ordered(self) -> None:
        if any(ordered.saves and ordered.once for ordered in self._ordered.values()):
            self.save_soon()

    def learn(self, **changes: int) -> None:
        """The loop knows more; see Known."""
        self.known = self.known._replace(**changes)

    def orders(self, at: Position, *, empty: bool = True) -> Iterator[Order]:
        """Train from here to the end of the run, to a step after which there is an evaluation, or to another cut.

        Args:
            empty: whether the pipeline runs nothing of the steps to come.
        """
        self._calm = False
        before = at
        for segment, after, setting in self._segments(at, empty=empty):
            self._asked = self._asked or self._requests.take_checkpoint()
            ends_empty = segment.phase.ends_empty
            empties = ends_empty and self._empties_after(after.step)
            asked = self._asked or (empties and self._once_empty)
            saves = ends_empty and (after.step == self._spec.num_steps or self._checkpoints.due(after.step) or asked)
            copies = empties and self.copy_times.due(after.step)
            once = saves and after.step < self._spec.num_steps and not self._checkpoints.due_at(after.step)
            if saves:
                self._asked = self._once_empty = False
            if copies:
                self.copy_times.ordered(after.step)
            traced = segment.first_step <= self.traced_step < after.step
            calm = not saves and not traced
            ordered = Ordered(segment, after, setting, self._calm and calm, saves, copies, once, traced)
            self._calm = calm
            yield self._order(ordered, before)
            before = after
            if (ends_empty and self._pauses_after(after.step, saves=saves)) or (
                empties and self._requests.wants_change
            ):
                return

    def draining(self, at: Position) -> Order:
        """What completes the mini-batches that are under way, where a halt left some."""
        assert self.plan.flow is not None, "only an asynchronous schedule ends with micro-batches under way"
        spec = self._spec
        segment = draining_segment(self.plan.flow, spec.minibatch_size, spec.microbatch_size, at)
        segment = replace(segment, generation=self.plan.plan.generation)
        return self._order(Ordered(segment, at.after(segment, spec.num_samples["train"])), at)

    def _order(self, ordered: Ordered, before: Position) -> Order:
        segment, after, setting, *_ = ordered
        self._ordered[segment.first_step] = ordered
        return Order(
            segment,
            keep_spans=ordered.traced,
            save_to=self._checkpoints.begin(after.step) if ordered.saves else "",
            measure=self._control.runs or self.measures,
            codecs=setting.codecs,
            keep_copy=ordered.copies,
            written=self.known.written,
            memo=Memo(ordered, before, self.known),
        )

    def _empties_after(self, step: int) -> bool:
        """Whether the pipeline is empty there by itself, or is to run empty for a copy."""
        return self.plan.flow is None or self.copy_times.empties(step)

    def _empty_after(self, step: int) -> bool:
        """Whether an asynchronous schedule is to run empty there."""
        saves = self._checkpoints.due_at(step)
        return saves or self._empties_after(step) or self._pauses_after(step, saves=saves)

    def _segments(self, at: Position, *, empty: bool) -> Iterator[tuple[Segment, Position, ActiveSettings]]:
        """What comes next, the position after it, and what it runs with: the controller's word of that moment."""
        spec, generation = self._spec, self.plan.plan.generation
        if self.plan.flow is not None:
            flowing = flowing_segments(
                self.plan.flow,
                spec.num_samples["train"],
                spec.minibatch_size,
                spec.microbatch_size,
                spec.num_steps,
                at,
                flowing=not empty,
                empty_after=self._empty_after,
                empty_soon=lambda: self._asked or self._requests.wants_checkpoint or self._checkpoints.overdue,
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
