"""Schedules: rows of actions per worker, and the rule for the dependencies between actions.

An action reads ``2F0``: stage, operation, micro-batch. The same text is the file format, the log
format, the label in traces and the notation of the tests (torch.distributed.pipelining uses it too).

For REDUCE_GRAD, REDUCE_NORM and STEP the number is the *last* micro-batch of the update, so that
``0STEP7`` is the optimizer step that consumes the gradients of every micro-batch up to 7.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Any, NamedTuple, overload

from raypipe.errors import ScheduleError

EVALUATION = 1 << 40
"""Micro-batch numbers of evaluations start here, so that their messages never meet those of training."""


class Op(StrEnum):
    """Operations of a worker."""

    F = "F"
    B = "B"
    I = "I"  # noqa: E741  (the field's letter for the input half of a backward)
    W = "W"
    SEND_F = "SEND_F"
    RECV_F = "RECV_F"
    SEND_B = "SEND_B"
    RECV_B = "RECV_B"
    REDUCE_GRAD = "REDUCE_GRAD"
    REDUCE_NORM = "REDUCE_NORM"
    STEP = "STEP"


COMPUTE = frozenset({Op.F, Op.B, Op.I, Op.W})


class Action(NamedTuple):
    """One instruction: ``stage`` does ``op`` for ``microbatch``."""

    stage: int
    op: Op
    microbatch: int

    def __str__(self) -> str:
        return f"{self.stage}{self.op.value}{self.microbatch}"

    @property
    def label(self) -> str:
        """Short text for a message: "2F0", or "2F0 of the evaluations"."""
        return f"{self.stage}{self.op.value}{_number(self.microbatch)}"

    @property
    def words(self) -> str:
        """Long text for a message: "2F0 (micro-batch 0)", or "2F0 (micro-batch 0 of the evaluations)"."""
        number = self.microbatch - EVALUATION if self.microbatch >= EVALUATION else self.microbatch
        return f"{self.stage}{self.op.value}{number} ({microbatch_words(self.microbatch)})"

    def shifted(self, microbatches: int) -> Action:
        """Return this action for the micro-batch that comes ``microbatches`` later."""
        return Action(self.stage, self.op, self.microbatch + microbatches)


def microbatch_words(microbatch: int) -> str:
    """Name a micro-batch in a message: "micro-batch 3", or "micro-batch 3 of the evaluations", counted over the run."""
    return f"micro-batch {_number(microbatch)}"


def _number(microbatch: int) -> str:
    return f"{microbatch - EVALUATION} of the evaluations" if microbatch >= EVALUATION else str(microbatch)


_ACTION = re.compile(r"(\d+)(REDUCE_GRAD|REDUCE_NORM|STEP|SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d+)")


def parse_action(text: str) -> Action:
    """Parse an action; the inverse of ``str(action)``.

    Raises:
        ScheduleError: the text is not an action.
    """
    match = _ACTION.fullmatch(text.strip())
    if match is None:
        raise ScheduleError(f"{text!r} is not an action: write stage, operation, micro-batch, as in 2F0.")
    return Action(int(match[1]), Op(match[2]), int(match[3]))


OPS = tuple(Op)
OP_CODE = {op: code for code, op in enumerate(OPS)}

# What _make does, without a Python frame for each of a million tuples.
_new_action = partial(tuple.__new__, Action)


class PackedRow(Sequence[Action]):
    """Actions of one worker as arrays; immutable, and equal to a tuple of the same actions.

    Args:
        stage, microbatch: by action, arrays of type "i".
        op: by action, indices into ``OPS``, an array of type "b".
    """

    __slots__ = ("microbatch", "op", "stage")

    def __init__(self, stage: array[int], op: array[int], microbatch: array[int]) -> None:
        self.stage = stage
        self.op = op
        self.microbatch = microbatch

    def __len__(self) -> int:
        return len(self.op)

    def __iter__(self) -> Iterator[Action]:
        return map(_new_action, zip(self.stage, map(OPS.__getitem__, self.op), self.microbatch, strict=True))

    @overload
    def __getitem__(self, index: int) -> Action: ...

    @overload
    def __getitem__(self, index: slice) -> PackedRow: ...

    def __getitem__(self, index: int | slice) -> Action | PackedRow:
        if isinstance(index, slice):
            return PackedRow(self.stage[index], self.op[index], self.microbatch[index])
        return Action(self.stage[index], OPS[self.op[index]], self.microbatch[index])

    def __eq__(self, other: object) -> bool:
        if isinstance(other, PackedRow):
            return (self.op, self.stage, self.microbatch) == (other.op, other.stage, other.microbatch)
        if isinstance(other, tuple):
            return len(self) == len(other) and all(mine == theirs for mine, theirs in zip(self, other, strict=True))
        return NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(self))

    def __repr__(self) -> str:
        shown = " ".join(map(str, self[:8]))
        return f"<{len(self)} actions: {shown}{' ...' if len(self) > 8 else ''}>"


Row = Sequence[Action]
"""A tuple of actions, or the same as arrays: PackedRow."""

Homes = tuple[tuple[int, ...], ...]
"""Workers of each stage (its replicas, in order), by stage. The first one is the leader: it saves and evaluates."""

OF_UPDATES = frozenset({Op.REDUCE_GRAD, Op.REDUCE_NORM, Op.STEP})
"""Operations at the end of an update; every replica of a stage has them in its row."""


def single_homes(placement: Iterable[int]) -> Homes:
    """Return homes with one worker per stage: ``placement[stage]``."""
    return tuple((worker,) for worker in placement)


def groups_in(homes: Homes) -> Homes:
    """Return the distinct groups of replicas: one per stage, or fewer if workers hold several stages."""
    return tuple(sorted(set(homes)))


@dataclass(frozen=True, slots=True)
class Wiring:
    """Placement and update rules that determine the dependencies between actions.

    Gradients are accumulated in lanes (partial sums). A micro-batch belongs to one lane, and a lane to one replica of
    every stage. So the result does not depend on the number of replicas.

    Attributes:
        homes: workers that hold each stage, by stage index.
        split_backward: the schedule uses I and W instead of B.
        update_interval: micro-batches per optimizer step (M for a synchronous schedule).
        first_trainable: lowest stage with a trainable parameter; stages below it have no backward.
        norm_per_stage: REDUCE_NORM takes the norm of its own stage and waits for no other.
        lanes: number of lanes, at least the largest number of replicas; micro-batches are assigned to lanes in turn.
        intervals: by stage, micro-batches per optimizer step, if they differ between stages; each divides
            update_interval, and every stage computes a norm of its own. Empty if all have update_interval.
        frozen_alone: True if stages below ``first_trainable`` neither enter the norm of other stages nor wait for it.
            Schedules without a flush need this, because other stages wait for forwards of the next update from them.

    Raises:
        ScheduleError: a stage has no worker, or the same worker twice; stages of one worker have different workers;
            there are fewer lanes than replicas; intervals do not divide update_interval.
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
                    f"Stage {stage} has {len(workers)} replicas, but lanes={self.lanes} assigns its micro-batches "
                    f"to {self.lanes} only: set at least {len(workers)} lanes."
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
        """Return the micro-batches per optimizer step of a stage."""
        return self.intervals[stage] if self.intervals else self.update_interval

    def normed_with(self, stage: int) -> Sequence[int]:
        """Return the stages whose gradients enter the norm of this stage's update."""
        if self.norm_per_stage or (self.frozen_alone and stage < self.first_trainable):
            return (stage,)
        return range(self.first_trainable if self.frozen_alone else 0, self.num_stages)

    def alone(self, worker: int) -> bool:
        """Return True if each stage of this worker computes a norm of its own."""
        learning = self.homes[self.first_trainable :]
        return self.norm_per_stage or (self.frozen_alone and not any(worker in workers for workers in learning))

    @property
    def placement(self) -> tuple[int, ...]:
        """Leader of each stage's replicas, by stage."""
        return tuple(workers[0] for workers in self.homes)

    @property
    def replicas(self) -> tuple[int, ...]:
        """Number of workers by stage."""
        return tuple(map(len, self.homes))

    @property
    def replicated(self) -> bool:
        """True if any stage has several workers."""
        return any(len(workers) > 1 for workers in self.homes)

    @property
    def num_workers(self) -> int:
        return 1 + max(worker for workers in self.homes for worker in workers)

    @property
    def by_lane(self) -> tuple[tuple[int, ...], ...]:
        """Table [stage][lane] of the worker that runs the stage for micro-batches of the lane; see ``worker_of``."""
        return tuple(tuple(self.worker_of(s, lane) for lane in range(self.lanes)) for s in range(self.num_stages))

    def worker_of(self, stage: int, microbatch: int) -> int:
        """Return the worker that runs ``stage`` for this micro-batch."""
        workers, lane = self.homes[stage], int(self.lane_of(microbatch))
        return workers[lane % len(workers)]

    def lane_of(self, microbatch: Any) -> Any:
        """Return the lane of a micro-batch, or elementwise of an array."""
        return lane_of(microbatch, self.update_interval, self.lanes)

    def crosses(self, stage: int, microbatch: int) -> bool:
        """Return True if stage and stage + 1 run on different workers for this micro-batch."""
        return stage + 1 < self.num_stages and self.worker_of(stage, microbatch) != self.worker_of(
            stage + 1, microbatch
        )


def lane_of(microbatch: Any, update_interval: int, lanes: int) -> Any:
    """Return the lane (partial gradient sum) of a micro-batch; for an array, the lane of each element.

    The micro-batches of an update are assigned to lanes 0, 1, ... in turn. If an update has fewer micro-batches than
    lanes, they are counted from the beginning of the run instead of the update.
    """
    return (microbatch % update_interval if update_interval >= lanes else microbatch) % lanes


def in_lane_order(microbatch: int, update_interval: int, lanes: int) -> bool:
    """Return True if the update of this micro-batch has at most one micro-batch in each lane, in ascending lanes.

    In that case summing micro-batches in their order equals summing lanes in their order.
    """
    first = 0 if update_interval >= lanes else microbatch // update_interval * update_interval % lanes
    return first + update_interval <= lanes


def dependencies(action: Action, wiring: Wiring) -> Sequence[Action]:
    """Return the actions that must end before ``action`` may start.

    Lowering, validation, simulation and the tests all call this function. The order within a worker's row is an
    additional constraint.

        F  <- RECV_F <- SEND_F <- F of the stage before       (or directly, on the same worker)
        B  <- F, and RECV_B <- SEND_B <- B of the stage after
        W  <- I;   REDUCE_GRAD <- every B (or W) of the update;   REDUCE_NORM <- REDUCE_GRAD of all
        stages, or of its own if norms are per stage (``normed_with``);   STEP <- REDUCE_NORM

    REDUCE_GRAD, REDUCE_NORM and STEP are in the row of every replica. REDUCE_GRAD waits for backwards on all replicas
    of its stage. An action that depends on one of these three waits for it in its own row. If its own row does not have
    it, the action waits for it in every row that does.

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
            count = wiring.interval_of(stage)
            return _packed(array("i", (stage,)) * count, last, array("i", range(first, microbatch + 1)))
        case Op.REDUCE_NORM:
            stages = wiring.normed_with(stage)
            return _packed(array("i", stages), Op.REDUCE_GRAD, array("i", (microbatch,)) * len(stages))
        case Op.STEP:
            return (Action(stage, Op.REDUCE_NORM, microbatch),)


def _packed(stages: array[int], op: Op, microbatches: array[int]) -> PackedRow:
    """Return the actions (stages[i], op, microbatches[i]) as a PackedRow, because there may be thousands."""
    return PackedRow(stages, array("b", (OP_CODE[op],)) * len(stages), microbatches)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Schedule: the order of actions on each worker, from one flush (empty pipeline) to the next.

    Micro-batches are counted from 0 after the flush.

    A synchronous step has only a ``body``. In an asynchronous schedule a prologue fills the pipeline, the body repeats,
    and the epilogue drains it. The micro-batch numbers in the rows of each part are increased by:

        prologue   0
        body       i * stride, for i = 0, 1, ... repeats - 1
        epilogue   repeats * stride

    Attributes:
        kind: name with numbers, as ``ScheduleSpec.name``: ``kfkb k=2``.
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
        """Return all actions of one worker in order: the prologue, ``repeats`` times the body, and the epilogue.

        Micro-batch numbers are increased as the class describes, so that they are counted through the whole row.
        """
        parts = list(self._parts(worker, repeats))
        if len(parts) == 1 and not parts[0][1]:
            return tuple(parts[0][0])
        return tuple(a.shifted(shift) if shift else a for row, shift in parts for a in row)

    def rows(self, repeats: int = 1) -> tuple[tuple[Action, ...], ...]:
        """Return all rows, by worker, with ``repeats`` times the body."""
        return tuple(self.row(w, repeats) for w in range(self.num_workers))

    def num_microbatches(self, repeats: int = 1) -> int:
        """Count the micro-batches from one flush to the next, with ``repeats`` times the body."""
        parts = (part for worker in range(self.num_workers) for part in self._parts(worker, repeats))
        return 1 + max((a.microbatch + shift for row, shift in parts for a in row if a.op is Op.F), default=-1)

    def _repr_html_(self) -> str:
        """Draw the schedule; F, I and W are one unit wide, B two. The body of an asynchronous one is drawn twice."""
        from raypipe.viz.timeline_svg import schedule_svg

        rows = self.rows(2 if self.prologue else 1)
        return schedule_svg(rows, lambda action: dependencies(action, self.wiring), self.kind)

    def _parts(self, worker: int, repeats: int) -> Iterator[tuple[Row, int]]:
        """Yield the parts of one worker's row as (row, shift of its micro-batch numbers)."""
        if self.prologue:
            yield self.prologue[worker], 0
        for i in range(repeats):
            yield self.body[worker], i * self.stride
        if self.epilogue:
            yield self.epilogue[worker], repeats * self.stride
