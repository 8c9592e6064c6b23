"""How much memory the stages have left, corrected by what they were measured to hold at their fullest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from raypipe.ir.links import StageSample
from raypipe.planner.control.choice import Choice
from raypipe.planner.control.memory_budget import MemoryBudget

__all__ = ["PeakMemory"]


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Budgets as measured so far.

    Attributes:
        budgets: by stage; a measured peak makes one smaller for good.
        fullest_bytes: by stage, the most that any choice so far was expected to need; empty before the first step.
    """

    budgets: tuple[MemoryBudget, ...]
    fullest_bytes: tuple[int, ...] = ()

    def after(self, choice: Choice, samples: Iterable[StageSample]) -> PeakMemory:
        """After one more step with ``choice``.

        A process reports the highest peak of its life. That belongs to the fullest choice that has run, so it says
        something new only while the fullest one runs.
        """
        depths = range(len(self.budgets), 0, -1)
        needs = tuple(budget.need_bytes(choice, depth) for budget, depth in zip(self.budgets, depths, strict=True))
        budgets = list(self.budgets)
        for sample in samples:
            stage, peak_bytes = sample.stage, sample.peak_bytes
            if peak_bytes is not None and (not self.fullest_bytes or needs[stage] >= self.fullest_bytes[stage]):
                budgets[stage] = budgets[stage].measured(choice, depths[stage], peak_bytes)
        fullest = tuple(max(pair) for pair in zip(needs, self.fullest_bytes or needs, strict=True))
        return PeakMemory(tuple(budgets), fullest)

    def with_extra(self, extra_bytes: Sequence[int]) -> PeakMemory:
        """The same, with each stage's budget made smaller by what an earlier process found."""
        pairs = zip(self.budgets, extra_bytes, strict=True)
        return replace(self, budgets=tuple(replace(budget, extra_bytes=extra) for budget, extra in pairs))
