"""A plan for whoever carries it out, with what its making knows besides."""

from __future__ import annotations

from dataclasses import dataclass

from raypipe.ir.plan import Plan
from raypipe.planner.control import MemoryBudget

__all__ = ["Planned"]


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
