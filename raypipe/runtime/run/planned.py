"""A plan for whoever carries it out, with what its making knows besides; and the size that people asked for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from raypipe.ir.plan import Plan
from raypipe.planner.control import MemoryBudget
from raypipe.planner.tune import Request

__all__ = ["Asked", "Planned"]


@dataclass(frozen=True, slots=True)
class Planned:
    """A plan, and what its planner knows beside it.

    Attributes:
        budgets: memory that is left to the schedule, by stage.
        microbatch_seconds: as in planner.control.ControllerConfig, where their number may change; else empty.
    """

    plan: Plan
    budgets: tuple[MemoryBudget, ...]
    microbatch_seconds: tuple[tuple[int, float], ...] = ()


class Asked(NamedTuple):
    """Stages that somebody asked for with ``handle.resize``, the workers that the plan for them uses, and by stage."""

    num_stages: int
    workers: int
    replicas: tuple[int, ...] = ()

    def of(self, request: Request) -> Request:
        """What a run asks of the planner of which this was asked."""
        return replace(request, num_stages=self.num_stages, split_points=(), replicas=self.replicas or 1)
