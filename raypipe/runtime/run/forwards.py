"""Forwards without training: the loss over an evaluation, and what the last stage returns. It imports no Ray."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Protocol

import torch

from raypipe.engine.capture import giving
from raypipe.engine.stage import StageProgram
from raypipe.ir.report import StepReport
from raypipe.ir.schedule import Schedule
from raypipe.ir.segment import RowsKey
from raypipe.ir.work_order import Order
from raypipe.planner.segments import evaluation_segments
from raypipe.runtime.run.spec import AnyFleet

__all__ = ["ListOutputs", "Outputs", "evaluation_orders", "forwards", "with_outputs"]


def evaluation_orders(
    num_samples: int, minibatch_size: int, microbatch_size: int, first: int = 0, *, generation: int = 0
) -> list[Order]:
    """All samples once, in order, forward only.

    Args:
        first: micro-batches that earlier evaluations of this run used.
        generation: of the plan.
    """
    segments = evaluation_segments(num_samples, minibatch_size, microbatch_size, first)
    return [Order(replace(segment, generation=generation), training=False) for segment in segments]


def forwards(
    fleet: AnyFleet, orders: list[Order], schedule: Callable[[RowsKey], Schedule]
) -> Iterator[list[list[StepReport]]]:
    """Carry them out; of each mini-batch, the reports by stage."""
    yield from fleet.run(iter(orders), schedule)


class Outputs(Protocol):
    """Where the outputs of the last stage go."""

    @property
    def give(self) -> Callable[[Any], torch.Tensor]:
        """(output of a micro-batch) -> a scalar; called on the last stage in the order of the micro-batches."""

    def take(self) -> list[Any]:
        """All that came, by micro-batch."""

    def close(self) -> None:
        """Let go of what it holds."""


class ListOutputs:
    """Outputs of stages in this process."""

    def __init__(self) -> None:
        self._found: list[Any] = []

    def give(self, output: Any) -> torch.Tensor:
        self._found.append(output)
        return torch.zeros(())

    def take(self) -> list[Any]:
        return self._found

    def close(self) -> None:
        self._found = []


def with_outputs(programs: tuple[StageProgram, ...], outputs: Outputs) -> tuple[StageProgram, ...]:
    """The same stages, of which the last one gives its output away instead of computing a loss."""
    return (*programs[:-1], giving(programs[-1], outputs.give))
