"""Actions, the one dependency rule, and schedules: a pipeline step as a program.

For REDUCE_GRAD, REDUCE_NORM and STEP the number is the *last* micro-batch of the update, so that
``0STEP7`` is the optimizer step that consumes the gradients of every micro-batch up to 7.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from raypipe.errors import ScheduleError
from raypipe.ir.action import COMPUTE, Action, Op, parse_action
from raypipe.ir.packed import OP_CODE, PackedRow

__all__ = [
    "COMPUTE", "OF_UPDATES", "Action", "Homes", "Op", "Row", "Schedule", "Wiring", "dependencies", "groups_in",
    "in_lane_order", "lane_of", "parse_action", "single_homes",
]  # fmt: skip


Row = Sequence[Action]
"""A tuple of actions, or the same as arrays: ``raypipe.ir.packed.PackedRow``."""

Homes = tuple[tuple[int, ...], ...]
"""By stage, the workers that hold it: its replicas, in their order. The first one leads: it saves and evaluates."""

OF_UPDATES = frozenset({Op.REDUCE_GRAD, Op.REDUCE_NORM, Op.STEP})
"""What every replica of a stage does at the end of an update, so that it stands in as many rows."""


def single_homes(placement: Iterable[int]) -> Homes:
    """One worker for each stage: that of ``placement``, by stage."""
    return tuple((worker,) for worker in placement)


def groups_in(homes: Homes) -> Homes:
    """Workers that are replicas of each other, by group, in their order: a group for each stage, or fewer."""
    return tuple(sorted(set(homes)))


@dataclass(frozen=True, slots=True)
class Wiring:
    """What decides who waits for whom, apart from the order of the rows.

    A micro-batch belongs to a lane, and a lane to one replica of every stage, so that gradients which are summed up
    by lane come out the same however many replicas there are.

    Attributes:
        homes: workers that hold each stage, by stage index.
        split_backward: the schedule uses I and W instead of B.
        update_interval: micro-batches per optimizer step (M for a synchronous schedule).
        first_trainable: lowest stage with a trainable parameter; the ones below have no backward.
        norm_per_stage: REDUCE_NORM takes the norm of its own stage and waits for no other.
        lanes: into how many micro-batches are dealt out in turn, at least one for each replica of a stage.
        intervals: micro-batches per optimizer step by stage, where stages step more often than every update_interval,
            a multiple of each; empty where they do not. Each then takes the norm of its own.
        frozen_alone: stages below ``first_trainable`` take no part in the norm of the others. Where steps follow each
            other without a flush, those behind need their forwards of the next update before they end this one.

    Raises:
        ScheduleError: a stage has no worker, or one twice; a worker shares some of its stages with others but not all;
            there are fewer lanes than replicas; intervals are no parts of update_interval.
    """

    homes: Homes
    update_interval: int
    split_backward: bool = False
    first_trainable: int = 0
    norm_per_stage: bool = False
    lanes: int = 1
    intervals: tuple[int, ...] = ()
    frozen_alone: bool = False

    def __post_init__(self) -> None:
        if self.lanes < 1:
            raise ScheduleError(f"lanes={self.lanes}: micro-batches need at least one.")
        if self.intervals and not (
            self.norm_per_stage
            and len(self.intervals) == len(self.homes)
            and all(interval > 0 and self.update_interval % interval == 0 for interval in self.intervals)
        ):
            raise ScheduleError(
                f"intervals={self.intervals} with update_interval={self.update_interval}: give each stage a part of "
                "it, and let it take its own norm."
            )
        together: dict[int, tuple[int, ...]] = {}
        for stage, workers in enumerate(self.homes):
            listed = ", ".join(map(str, workers)) or "none"
            if not workers or len(set(workers)) < len(workers):
                raise ScheduleError(f"Stage {stage} is placed on workers {listed}: give it one or more, each once.")
            if len(workers) > self.lanes:
                raise ScheduleError(
                    f"Stage {stage} has {len(workers)} replicas, but lanes={self.lanes} deals its micro-batches out to "
                    f"{self.lanes} only: set at least {len(workers)} lanes."
                )
            for worker in workers:
                if together.setdefault(worker, workers) != workers:
                    raise ScheduleError(
                        f"Stage {stage} is placed on workers {listed}, and another stage of worker {worker} on "
                        f"{', '.join(map(str, together[worker]))}: stages of one worker have the same workers."
                    )

    @property
    def num_stages(self) -> int:
        return len(self.homes)

    def interval_of(self, stage: int) -> int:
        """Micro-batches per optimizer step of a stage."""
        return self.intervals[stage] if self.intervals else self.update_interval

    def normed_with(self, stage: int) -> Sequence[int]:
        """Stages whose gradients the norm of this one's update is taken of."""
        if self.norm_per_stage or (self.frozen_alone and stage < self.first_trainable):
            return (stage,)
        return range(self.first_trainable if self.frozen_alone else 0, self.num_stages)

    def alone(self, worker: int) -> bool:
        """Whether each stage of this worker takes a norm of its own."""
        learning = self.homes[self.first_trainable :]
        return self.norm_per_stage or (self.frozen_alone and not any(worker in workers for workers in learning))

    @property
    def placement(self) -> tuple[int, ...]:
        """The worker of each stage that leads its replicas: the only one, where it has one."""
        return tuple(workers[0] for workers in self.homes)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Workers by stage."""
        return tuple(map(len, self.homes))

    @property
    def replicated(self) -> bool:
        """Whether any stage has several workers."""
        return any(len(workers) > 1 for workers in self.homes)

    @property
    def num_workers(self) -> int:
        return 1 + max(worker for workers in self.homes for worker in workers)

    @property
    def by_lane(self) -> tuple[tuple[int, ...], ...]:
        """``worker_of`` as a table: by stage, the worker of each lane."""
        return tuple(tuple(self.worker_of(s, lane) for lane in range(self.lanes)) for s in range(self.num_stages))

    def worker_of(self, stage: int, microbatch: int) -> int:
        """Who runs the stage for this micro-batch."""
        workers, lane = self.homes[stage], int(self.lane_of(microbatch))
        return workers[lane % len(workers)]

    def lane_of(self, microbatch: Any) -> Any:
        """The lane of a micro-batch, or by element those of an array of them."""
        return lane_of(microbatch, self.update_interval, self.lanes)

    def crosses(self, stage: int, microbatch: int) -> bool:
        """Whether stage and stage + 1 sit on different workers for it, so that a link joins them."""
        return stage + 1 < self.num_stages and self.worker_of(stage, microbatch) != self.worker_of(
            stage + 1, microbatch
        )


def lane_of(microbatch: Any, update_interval: int, lanes: int) -> Any:
    """The lane of a micro-batch, or by element those of an array of them: the one rule of planner and engine.

    They are counted within their update, so that every update is dealt out alike; from the beginning where updates
    are smaller than that.
    """
    return (microbatch % update_interval if update_interval >= lanes else microbatch) % lanes


def in_lane_order(microbatch: int, update_interval: int, lanes: int) -> bool:
    """Whether the micro-batches of this one's update come lane after lane, each in one of its own.

    Then summing up micro-batches as they come is summing up lanes in their order.
    """
    first = 0 if update_interval >= lanes else microbatch // update_interval * update_interval % lanes
    return first + update_interval <= lanes


def dependencies(action: Action, wiring: Wiring) -> Sequence[Action]:
    """Actions that must have ended before ``action`` may start: the one rule of the whole project.

    Lowering, validation, simulation and the tests call it; nobody restates it. The order within
    a worker's row comes on top.

        F  <- RECV_F <- SEND_F <- F of the stage before       (or directly, on the same worker)
        B  <- F, and RECV_B <- SEND_B <- B of the stage after
        W  <- I;   REDUCE_GRAD <- every B (or W) of the update;   REDUCE_NORM <- REDUCE_GRAD of all
        stages, or of its own where norms are per stage (``normed_with``);   STEP <- REDUCE_NORM

    What ends an update stands in the row of every replica. So REDUCE_GRAD waits for backwards on all replicas of its
    stage, and one that is waited for is that of the own row or, if it has none, those of all rows that do.

    The model leaves out that the holders of a shared parameter exchange gradients in REDUCE_GRAD.
    """
    stage, op, microbatch = action
    backward = Op.I if wiring.split_backward else Op.B
    match op:
        case Op.F:
            if stage == 0:
                return ()
            crossing = wiring.crosses(stage - 1, microbatch)
            return (Action(stage, Op.RECV_F, microbatch) if crossing else Action(stage - 1, Op.F, microbatch),)
        case Op.RECV_F:
            return (Action(stage - 1, Op.SEND_F, microbatch),)
        case Op.SEND_F:
            return (Action(stage, Op.F, microbatch),)
        case Op.B | Op.I:
            own = Action(stage, Op.F, microbatch)
            if stage + 1 == wiring.num_stages:
                return (own,)
            if wiring.crosses(stage, microbatch):
                return (own, Action(stage, Op.RECV_B, microbatch))
            return (own, Action(stage + 1, backward, microbatch))
        case Op.RECV_B:
            return (Action(stage + 1, Op.SEND_B, microbatch),)
        case Op.SEND_B:
            return (Action(stage, backward, microbatch),)
        case Op.W:
            return (Action(stage, Op.I, microbatch),)
        case Op.REDUCE_GRAD:
            if stage < wiring.first_trainable:
                return ()
            last = Op.W if wiring.split_backward else Op.B
            first = microbatch - wiring.interval_of(stage) + 1
            return _of_all(stage, last, range(first, microbatch + 1))
        case Op.REDUCE_NORM:
            return tuple(Action(s, Op.REDUCE_GRAD, microbatch) for s in wiring.normed_with(stage))
        case Op.STEP:
            return (Action(stage, Op.REDUCE_NORM, microbatch),)


def _of_all(stage: int, op: Op, microbatches: range) -> PackedRow:
    """One action for each micro-batch; an update may have thousands, so they are not made one by one."""
    count = len(microbatches)
    return PackedRow(array("i", (stage,)) * count, array("b", (OP_CODE[op],)) * count, array("i", microbatches))


@dataclass(frozen=True, slots=True)
class Schedule:
    """Who does what in which order, from one flush to the next, in micro-batches counted from 0.

    A synchronous step has only a ``body``. An asynchronous schedule is the same type with more in
    it: a prologue fills the pipeline, the body repeats, the epilogue drains it.

        prologue   base 0
        body       base i * stride, for i = 0, 1, ... repeats - 1
        epilogue   base repeats * stride

    Attributes:
        kind: name and numbers for people, as ``ScheduleSpec.name``: ``kfkb k=2``.
        wiring: see Wiring.
        body: one row of actions per worker.
        stride: micro-batches that one repetition of the body consumes.
        prologue, epilogue: rows like body; empty for synchronous schedules.
    """

    kind: str
    wiring: Wiring
    body: tuple[Row, ...]
    stride: int
    prologue: tuple[Row, ...] = ()
    epilogue: tuple[Row, ...] = ()

    @property
    def num_workers(self) -> int:
        return len(self.body)

    @property
    def num_stages(self) -> int:
        return self.wiring.num_stages

    def row(self, worker: int, repeats: int = 1) -> tuple[Action, ...]:
        """The whole row of one worker with the body repeated: what the worker carries out."""
        parts = list(self._parts(worker, repeats))
        if len(parts) == 1 and not parts[0][1]:
            return tuple(parts[0][0])
        return tuple(a.shifted(shift) if shift else a for row, shift in parts for a in row)

    def rows(self, repeats: int = 1) -> tuple[tuple[Action, ...], ...]:
        """Every worker's row, in worker order."""
        return tuple(self.row(w, repeats) for w in range(self.num_workers))

    def num_microbatches(self, repeats: int = 1) -> int:
        """Micro-batches from one flush to the next."""
        parts = (part for worker in range(self.num_workers) for part in self._parts(worker, repeats))
        return 1 + max((a.microbatch + shift for row, shift in parts for a in row if a.op is Op.F), default=-1)

    def _repr_html_(self) -> str:
        """In slots: F takes one, B two, I and W one each; of an asynchronous schedule, with its body twice."""
        from raypipe.ir.pictures.schedule import schedule_svg

        rows = self.rows(2 if self.prologue else 1)
        return schedule_svg(rows, lambda action: dependencies(action, self.wiring), self.kind)

    def _parts(self, worker: int, repeats: int) -> Iterator[tuple[Row, int]]:
        """What one worker's row is put together from, each with how far its micro-batches are shifted."""
        if self.prologue:
            yield self.prologue[worker], 0
        for i in range(repeats):
            yield self.body[worker], i * self.stride
        if self.epilogue:
            yield self.epilogue[worker], repeats * self.stride
