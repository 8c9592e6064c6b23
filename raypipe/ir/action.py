"""Actions: one instruction to one stage, and its text.

An action reads ``2F0``: stage, operation, micro-batch. The same text is the file format, the log
format, the label in traces and the notation of the tests (torch.distributed.pipelining uses it too).
"""

from __future__ import annotations

import re
from enum import StrEnum
from typing import NamedTuple

from raypipe.errors import ScheduleError

__all__ = ["COMPUTE", "EVALUATION", "Action", "Op", "microbatch_words", "parse_action"]

EVALUATION = 1 << 40
"""Micro-batch numbers of evaluations start here, so that their messages never meet those of training."""


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

    @property
    def label(self) -> str:
        """For a message: "2F0", or "2F0 of the evaluations"."""
        return f"{self.stage}{self.op.value}{_number(self.microbatch)}"

    @property
    def words(self) -> str:
        """For a message: "2F0 (micro-batch 0)", or "2F0 (micro-batch 0 of the evaluations)"."""
        number = self.microbatch - EVALUATION if self.microbatch >= EVALUATION else self.microbatch
        return f"{self.stage}{self.op.value}{number} ({microbatch_words(self.microbatch)})"

    def shifted(self, microbatches: int) -> Action:
        """The same action, ``microbatches`` later."""
        return Action(self.stage, self.op, self.microbatch + microbatches)


def microbatch_words(microbatch: int) -> str:
    """For a message: "micro-batch 3", or "micro-batch 3 of the evaluations", which are numbered through the run."""
    return f"micro-batch {_number(microbatch)}"


def _number(microbatch: int) -> str:
    return f"{microbatch - EVALUATION} of the evaluations" if microbatch >= EVALUATION else str(microbatch)


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
