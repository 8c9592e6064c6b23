"""Actions, the one dependency rule, and schedules: a pipeline step as a program.

An action reads ``2F0``: stage, operation, micro-batch. The same text is the file format, the log
format, the label in traces and the notation of the tests (torch.distributed.pipelining uses it too).

For REDUCE_GRAD, REDUCE_NORM and STEP the number is the *last* micro-batch of the update, so that
``0STEP7`` is the optimizer step that consumes the gradients of every micro-batch up to 7.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from raypipe.errors import ScheduleError

__all__ = ["COMPUTE", "Action", "Op", "Row", "Schedule", "Wiring", "dependencies", "parse_action"]


class Op(StrEnum):
    """What a worker can be told to do."""

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

    def shifted(self, microbatches: int) -> Action:
        """The same action, ``microbatches`` later."""
        return Action(self.stage, self.op, self.microbatch + microbatches)


Row = tuple[Action, ...]

_ACTION = re.compile(r"(\d+)(REDUCE_GRAD|REDUCE_NORM|STEP|SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d+)")


def parse_action(text: str) -> Action:
    """Inverse of ``str(action)``.

    Raises:
        ScheduleError: the text is not an action.
    """
    match = _ACTION.fullmatch(text.strip())
    if match is None:
        raise ScheduleError(f"{text!r} is not an action: write stage, operation, micro-batch, as in 2F0.")
    return Action(int(match[1]), Op(match[2]), int(match[3]))


@dataclass(frozen=True, slots=True)
class Wiring:
    """What decides who waits for whom, apart from the order of the rows.

    Attributes:
        placement: worker that holds each stage, by stage index.
        split_backward: the schedule uses I and W instead of B.
        update_interval: micro-batches per optimizer step (M for a synchronous schedule).
        first_trainable: lowest stage with a trainable parameter; the ones below have no backward.
    """

    placement: tuple[int, ...]
    update_interval: int
    split_backward: bool = False
    first_trainable: int = 0

    @property
    def num_stages(self) -> int:
        return len(self.placement)

    def crosses(self, stage: int) -> bool:
        """Whether stage and stage + 1 sit on different workers, so that a link joins them."""
        return stage + 1 < self.num_stages and self.placement[stage] != self.placement[stage + 1]


def dependencies(action: Action, wiring: Wiring) -> tuple[Action, ...]:
    """Actions that must have ended before ``action`` may start: the one rule of the whole project.

    Lowering, validation, simulation and the tests call it; nobody restates it. The order within
    a worker's row comes on top.

        F  <- RECV_F <- SEND_F <- F of the stage before       (or directly, on the same worker)
        B  <- F, and RECV_B <- SEND_B <- B of the stage after
        W  <- I;   REDUCE_GRAD <- every B (or W) of the update;   REDUCE_NORM <- REDUCE_GRAD of all
        stages;   STEP <- REDUCE_NORM

    The model leaves out that the holders of a shared parameter exchange gradients in REDUCE_GRAD.
    """
    stage, op, microbatch = action
    backward = Op.I if wiring.split_backward else Op.B
    match op:
        case Op.F:
            if stage == 0:
                return ()
            crossing = wiring.crosses(stage - 1)
            return (Action(stage, Op.RECV_F, microbatch) if crossing else Action(stage - 1, Op.F, microbatch),)
        case Op.RECV_F:
            return (Action(stage - 1, Op.SEND_F, microbatch),)
        case Op.SEND_F:
            return (Action(stage, Op.F, microbatch),)
        case Op.B | Op.I:
            own = Action(stage, Op.F, microbatch)
            if stage + 1 == wiring.num_stages:
                return (own,)
            if wiring.crosses(stage):
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
            first = microbatch - wiring.update_interval + 1
            return tuple(Action(stage, last, m) for m in range(first, microbatch + 1))
        case Op.REDUCE_NORM:
            return tuple(Action(s, Op.REDUCE_GRAD, microbatch) for s in range(wiring.num_stages))
        case Op.STEP:
            return (Action(stage, Op.REDUCE_NORM, microbatch),)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Who does what in which order, from one flush to the next, in micro-batches counted from 0.

    A synchronous step has only a ``body``. An asynchronous schedule is the same type with more in
    it: a prologue fills the pipeline, the body repeats, the epilogue drains it.

        prologue   base 0
        body       base i * stride, for i = 0, 1, ... repeats - 1
        epilogue   base repeats * stride

    Attributes:
        kind: name and parameters for people, as ``kfkb(k=2)``.
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

    def row(self, worker: int, repeats: int = 1) -> Row:
        """The whole row of one worker with the body repeated: what the worker carries out."""
        actions = list(self.prologue[worker]) if self.prologue else []
        for i in range(repeats):
            actions += [a.shifted(i * self.stride) for a in self.body[worker]]
        if self.epilogue:
            actions += [a.shifted(repeats * self.stride) for a in self.epilogue[worker]]
        return tuple(actions)

    def rows(self, repeats: int = 1) -> tuple[Row, ...]:
        """Every worker's row, in worker order."""
        return tuple(self.row(w, repeats) for w in range(self.num_workers))

    def num_microbatches(self, repeats: int = 1) -> int:
        """Micro-batches from one flush to the next."""
        return 1 + max((a.microbatch for row in self.rows(repeats) for a in row if a.op is Op.F), default=-1)
