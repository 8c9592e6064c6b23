"""Row of a worker, divided into mini-batches and bound to the calls that run its actions, once for all its segments.

    row      0F0 0F1 0B0 0B1 0REDUCE_GRAD1 0REDUCE_NORM1 0STEP1
    bound    (0F0, forward) (0F1, forward) (0B0, backward) ...

A row repeats in every segment of its kind, so that the executor binds it once and then only calls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from raypipe.engine.device.device import Mark
from raypipe.engine.reduction import last_backwards
from raypipe.ir.schedule import Action, Op, Row

Run = Callable[[Action, Mark], None]
"""Function that runs an action, given a mark in the computing stream after the actions before it."""


class BoundAction(NamedTuple):
    """Action of a row, and what belongs to it.

    Attributes:
        local: the action, its micro-batch counted from the first one of the segment.
        run: runs the action.
        closes: micro-batch of the REDUCE_GRAD before which this is the stage's last backward; None for other actions.
        sends: True if the action only sends, which takes no time of the computing stream.
    """

    local: Action
    run: Run
    closes: int | None
    sends: bool


def bound_parts(
    row: Row, per_minibatch: int, num_minibatches: int, num_stages: int, run_of: Callable[[Action], Run]
) -> list[list[BoundAction]]:
    """Bind the actions of a row, divided into one part for each of ``num_minibatches`` mini-batches.

    In a continuous schedule a worker may have more or fewer parts: stages without a backward may step before others, or
    begin a mini-batch that does not end in the segment. The last parts are then merged, or empty ones appended.

    Args:
        per_minibatch: number of micro-batches in a mini-batch.
        num_stages: number of stages of the worker, each of which steps in every part.
        run_of: returns the function that runs an action.
    """
    parts = _split_row(row, per_minibatch, num_stages)
    last = num_minibatches - 1
    parts += [[]] * (num_minibatches - len(parts))
    merged = [*parts[:last], [action for part in parts[last:] for action in part]]
    return [_bound(part, run_of) for part in merged]


def _bound(part: Sequence[Action], run_of: Callable[[Action], Run]) -> list[BoundAction]:
    closing = last_backwards(part)
    return [
        BoundAction(action, run_of(action), closing.get(place), action.op in (Op.SEND_F, Op.SEND_B))
        for place, action in enumerate(part)
    ]


def _split_row(row: Row, per_minibatch: int, num_stages: int) -> list[list[Action]]:
    """Split a row after each mini-batch, at the STEP of the last stage; an evaluation, without STEP, is one part."""
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
