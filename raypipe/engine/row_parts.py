"""A row in parts, one for each mini-batch of a segment.

0F0 0F1 0B0 0B1 ... 0STEP1 | 0F2 0F3 0B2 0B3 ... 0STEP3
"""

from __future__ import annotations

from raypipe.ir.schedule import Action, Op, Row

__all__ = ["as_many", "split_row"]


def split_row(row: Row, per_minibatch: int, num_stages: int) -> list[list[Action]]:
    """A row in parts that end with a mini-batch's last STEP (an evaluation has none: one part), one report for each.

    Args:
        num_stages: of the worker, each of which steps.
    """
    parts: list[list[Action]] = []
    part: list[Action] = []
    stepped = 0
    for action in row:
        part.append(action)
        if action.op is Op.STEP and (action.microbatch + 1) % per_minibatch == 0:
            stepped += 1
            if stepped == num_stages:
                parts.append(part)
                part, stepped = [], 0
    return [*parts, part] if part else parts


def as_many(parts: list[list[Action]], count: int) -> list[list[Action]]:
    """The same actions in as many parts as mini-batches end in the segment.

    Stages without a backward have done with a micro-batch after its forward. Where a continuous schedule has them run
    ahead, they step before the others do, or have begun a mini-batch that does not end here.
    """
    kept = parts[: count - 1]
    kept += [[action for part in parts[count - 1 :] for action in part]] if len(parts) >= count else parts[count - 1 :]
    return kept + [[]] * (count - len(kept))
