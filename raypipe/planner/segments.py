"""Segments of a run, and the rows of actions that workers carry out for them.

synchronous     one segment per mini-batch
asynchronous    fill, steady, steady, ..., drain; drained at the end of an epoch, before a checkpoint, and at the end

A run can resume after a segment at whose end the pipeline is empty.

``rows_for`` is the single path from a plan and a RowsKey to rows:

evaluation                             forwards only, on the first replica of every stage
synchronous                            the plan's spec, or the key's, for the key's number of micro-batches
asynchronous, empty at both ends       the key's number of mini-batches of the plan's schedule
asynchronous, a phase of it            fill, steady or drain
asynchronous, a smaller mini-batch     1f1b, by itself
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from raypipe.errors import PlanError, ScheduleError
from raypipe.ir.plan import Plan
from raypipe.ir.schedule import EVALUATION, Action, Op, Schedule, Wiring, single_homes
from raypipe.ir.segment import Phase, RowsKey, Segment
from raypipe.planner.schedule import schedule_of
from raypipe.planner.schedule.asynchronous import finite, minibatches_to_drain, part
from raypipe.planner.schedule.lower import lowered_and_checked
from raypipe.planner.schedule.sync import in_rounds


@dataclass(frozen=True, slots=True)
class Position:
    """Position of a run between two steps.

    Attributes:
        step: number of optimizer steps done; with an asynchronous schedule, of mini-batches.
        microbatch: number of micro-batches done.
        epoch, offset: the next sample is number ``offset`` of this epoch's order.
        updates: number of updates of the parameters, deferred ones included.
    """

    step: int = 0
    microbatch: int = 0
    epoch: int = 0
    offset: int = 0
    updates: int = 0

    def after(self, segment: Segment, num_samples: int) -> Position:
        """Return the position after ``segment``, which begins here."""
        count, microbatches = segment.num_minibatches, len(segment.microbatch_samples)
        end = self.offset + count * segment.minibatch_samples
        wrapped = end >= num_samples
        return Position(
            self.step + count,
            self.microbatch + count * microbatches,
            self.epoch + wrapped,
            0 if wrapped else end,
            self.updates + count * microbatches // segment.interval,
        )


@dataclass(frozen=True, slots=True)
class Flow:
    """Sizes in an asynchronous schedule, in which mini-batches follow each other without a flush.

    Attributes:
        interval: micro-batches per update.
        num_to_drain: number of mini-batches that a drain completes; at least 1.
        minibatch_size, microbatch_size: samples of each.
    """

    interval: int
    num_to_drain: int
    minibatch_size: int
    microbatch_size: int


def num_steps_of(num_epochs: int, num_samples: int, minibatch_size: int) -> int:
    """Return the number of optimizer steps in ``num_epochs`` epochs; an epoch's last mini-batch may be smaller."""
    return num_epochs * math.ceil(num_samples / minibatch_size)


def _sizes(samples: int, microbatch_size: int) -> tuple[int, ...]:
    full, rest = divmod(samples, microbatch_size)
    return (microbatch_size,) * full + ((rest,) if rest else ())


def next_segment(num_samples: int, minibatch_size: int, microbatch_size: int, at: Position) -> tuple[Segment, Position]:
    """Return the synchronous step that begins at ``at``, and the position after it; mini-batches do not span epochs.

    The short mini-batch at the end of an epoch runs the same kind of schedule with fewer micro-batches.

    Args:
        num_samples: samples of one epoch.
    """
    sizes = _sizes(min(minibatch_size, num_samples - at.offset), microbatch_size)
    segment = Segment(at.step, at.microbatch, at.epoch, at.offset, sizes)
    return segment, at.after(segment, num_samples)


def train_segments(
    num_samples: int, minibatch_size: int, microbatch_size: int, num_steps: int, start: Position | None = None
) -> Iterator[tuple[Segment, Position]]:
    """Yield synchronous steps, one segment each, with the position after it; see ``next_segment``.

    Args:
        num_steps: steps of the whole run, including those before ``start``.
    """
    at = start or Position()
    while at.step < num_steps:
        segment, at = next_segment(num_samples, minibatch_size, microbatch_size, at)
        yield segment, at


def flowing_segments(
    flow: Flow,
    num_samples: int,
    num_steps: int,
    start: Position,
    *,
    flowing: bool = False,
    empty_after: Callable[[int], bool],
    empty_soon: Callable[[], bool],
) -> Iterator[tuple[Segment, Position]]:
    """Yield segments like ``train_segments``, for a schedule that does not flush between mini-batches.

    A mini-batch that is smaller than the others runs by itself, with one update.

    Args:
        flowing: True if mini-batches are under way at the start.
        empty_after: returns True if the pipeline must be empty after so many steps of the run.
        empty_soon: called before each segment; returns True if the pipeline has to drain as soon as possible.
    """
    at = start
    while at.step < num_steps:
        full = min((num_samples - at.offset) // flow.minibatch_size, num_steps - at.step)
        if not full:
            rest = _sizes(num_samples - at.offset, flow.microbatch_size)
            segment = Segment(at.step, at.microbatch, at.epoch, at.offset, rest)
        else:
            until = next((n for n in range(1, full) if empty_after(at.step + n)), full)
            count, phase = _next_phase(flow.num_to_drain, until, flowing, soon=empty_soon())
            segment = _flowing(flow, at, count, phase)
        flowing = not segment.phase.ends_empty
        at = at.after(segment, num_samples)
        yield segment, at


def draining_segment(flow: Flow, at: Position) -> Segment:
    """Return the segment that drains the pipeline, to follow a segment that leaves micro-batches in flight."""
    return _flowing(flow, at, flow.num_to_drain, Phase.DRAIN)


def _next_phase(num_to_drain: int, until: int, flowing: bool, *, soon: bool) -> tuple[int, Phase]:
    """Choose the next segment of an asynchronous schedule; return (number of its mini-batches, its phase).

    Args:
        num_to_drain: number of mini-batches that a drain completes.
        until: mini-batches from here to the next point at which the pipeline must be empty; at least 1.
        flowing: True if the pipeline is not empty now.
        soon: True if the pipeline has to drain as soon as possible, before ``until``.
    """
    if flowing:
        return (num_to_drain, Phase.DRAIN) if soon or until <= num_to_drain else (1, Phase.STEADY)
    if until <= num_to_drain:
        return until, Phase.WHOLE
    return (1, Phase.WHOLE) if soon else (1, Phase.FILL)


def _flowing(flow: Flow, at: Position, count: int, phase: Phase) -> Segment:
    sizes = _sizes(flow.minibatch_size, flow.microbatch_size)
    return Segment(at.step, at.microbatch, at.epoch, at.offset, sizes, count, phase, flow.interval)


def evaluation_segments(
    num_samples: int, minibatch_size: int, microbatch_size: int, first: int = 0
) -> Iterator[Segment]:
    """Yield segments of an evaluation, which contain all samples once, in order.

    Args:
        first: number of micro-batches in earlier evaluations of this run.
    """
    microbatch = EVALUATION + first
    for index, offset in enumerate(range(0, num_samples, minibatch_size)):
        sizes = _sizes(min(minibatch_size, num_samples - offset), microbatch_size)
        yield Segment(index, microbatch, 0, offset, sizes)
        microbatch += len(sizes)


def rows_for(plan: Plan, key: RowsKey) -> Schedule:
    """Return the lowered and checked rows of a segment.

    Raises:
        PlanError: the plan was saved by a release that did not save its schedule's spec.
        ScheduleError: the key's spec cannot work on the plan's stages.
    """
    wiring = plan.schedule.wiring
    if not key.training:
        return forward_only(wiring.placement, key.num_microbatches, wiring.num_workers)
    if key.phase is not Phase.WHOLE:
        return part(lowered_and_checked(plan.schedule), key.phase)
    if key.update_interval is not None:
        return lowered_and_checked(finite(plan.schedule, key.num_minibatches))
    spec = key.spec or plan.spec
    if spec is None:
        raise PlanError(
            f"The plan has no spec of its schedule {plan.schedule.kind!r}, because an earlier release saved it: make "
            "the plan again."
        )
    if not spec.of_kind.synchronous:
        spec = spec.as_kind("1f1b")
    return lowered_and_checked(schedule_of(spec.with_microbatches(key.num_microbatches), wiring.num_stages))


def flow_of(plan: Plan) -> Flow | None:
    """Return the sizes of a plan with an asynchronous schedule, for its segments; None for a synchronous one."""
    interval = plan.weights.interval
    if interval is None:
        return None
    drained = minibatches_to_drain(plan.num_microbatches, plan.weights.ahead)
    return Flow(interval, drained, plan.minibatch_size, plan.microbatch_size)


def flowing_keys(plan: Plan) -> tuple[RowsKey, ...]:
    """List the keys of the rows of all segments of an asynchronous schedule; empty for a synchronous one."""
    flow = flow_of(plan)
    if flow is None:
        return ()
    count, drained, interval = plan.num_microbatches, flow.num_to_drain, flow.interval
    wholes = [RowsKey(count, n, update_interval=interval) for n in range(1, drained + 1)]
    completed = ((Phase.FILL, 1), (Phase.STEADY, 1), (Phase.DRAIN, drained))
    return (*wholes, *(RowsKey(count, done, phase, update_interval=interval) for phase, done in completed))


def forward_only(placement: Sequence[int], num_microbatches: int, num_workers: int | None = None) -> Schedule:
    """Build the lowered rows of an evaluation, for any placement of the stages.

    placement=(0, 1), M=2
    0: 0F0 0SEND_F0 0F1 0SEND_F1
    1: 1RECV_F0 1F0 1RECV_F1 1F1

    Micro-batches are divided into rounds of about 2 P, where P is the number of workers. A worker with several stages
    never waits while a forward is ready. It prefers forwards of the earliest round, and among them the earliest stage.
    So the pipeline stays full even if a message takes as long as a forward, and the first stage is at most a few rounds
    ahead of the last stage on its worker.

    With equal stages and free links, M >= P micro-batches take M * v + P - 1 forwards if the stages visit the workers v
    times in the same sequence, and 2 * (M + P - 1) if they visit them in a V (to the last worker and back). Neither can
    be less: the last worker begins after P - 1 forwards of other workers, and runs all of its own; in a V, P - 1
    forwards of other workers follow.

    Args:
        placement: worker of each stage, by stage.
        num_microbatches: M.
        num_workers: number of rows; workers without a stage get empty ones. None if every worker has a stage.

    Raises:
        ScheduleError: no stage, or no micro-batch.
    """
    if not placement or num_microbatches < 1:
        raise ScheduleError(
            f"An evaluation of {num_microbatches} micro-batches on {len(placement)} stages does nothing: "
            "it needs at least one of each."
        )
    wiring = Wiring(single_homes(placement), update_interval=num_microbatches)
    rows = tuple(tuple(_with_messages(row, wiring)) for row in _orders(wiring, num_microbatches))
    rows += ((),) * ((num_workers or 0) - len(rows))
    return Schedule("forward", wiring, rows, stride=num_microbatches)


def _orders(wiring: Wiring, num_microbatches: int) -> list[list[Action]]:
    """List the forwards of each worker in the order of a simulation slot by slot, which cannot deadlock.

    In the simulation stages are equal, and a message takes one slot. If messages took no time, every forward would come
    directly after the forward that it waits for, and any latency of real links would delay every round.
    """
    placement, num_stages = wiring.placement, wiring.num_stages
    held = [[s for s, worker in enumerate(placement) if worker == w] for w in range(1 + max(placement))]
    round_of = [
        number for number, part in enumerate(in_rounds(num_microbatches, 2 * len(set(placement)))) for _ in part
    ]
    orders: list[list[Action]] = [[] for _ in held]
    done = [0] * num_stages
    before = done
    while done[-1] < num_microbatches:
        there = [num_microbatches] + [
            (before if wiring.crosses(s, done[s + 1]) else done)[s] for s in range(num_stages - 1)
        ]
        ready = ([s for s in stages if done[s] < there[s]] for stages in held)
        turns = [min(stages, key=lambda s: (round_of[done[s]], s)) for stages in ready if stages]
        before = done.copy()
        for stage in turns:
            orders[placement[stage]].append(Action(stage, Op.F, done[stage]))
            done[stage] += 1
    return orders


def _with_messages(row: Sequence[Action], wiring: Wiring) -> list[Action]:
    actions = []
    for action in row:
        stage, _, microbatch = action
        if stage and wiring.crosses(stage - 1, microbatch):
            actions.append(Action(stage, Op.RECV_F, microbatch))
        actions.append(action)
        if wiring.crosses(stage, microbatch):
            actions.append(Action(stage, Op.SEND_F, microbatch))
    return actions
