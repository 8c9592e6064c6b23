"""What one ``Fleet.run`` has sent and heard so far."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from raypipe.ir.report import StepReport
from raypipe.runtime.run.window import Window

__all__ = ["Flight"]


@dataclass(slots=True)
class Flight:
    """One ``Fleet.run``: its number, the long calls, the polls under way (with their workers), what came so far."""

    run: int
    works: dict[Any, int]
    polls: dict[Any, int]
    received: list[Window[list[list[StepReport]]]]
    last: bool = False
    """It completes what a halt left under way, so that no other halt may cut it short."""
    limit: float = math.inf
    """Segments after which the stages end: a number once the run was halted."""

    @property
    def complete(self) -> int:
        """Segments that every worker has reported."""
        return min(reports.end for reports in self.received)
