"""Memory budget of a stage: the test whether a choice of the controller (a schedule with codecs) fits into memory.

    limit - fixed - extra  >=  activation sets * activation + in flight * input + waiting messages * message + workspace

The counts are those of ``raypipe.planner.cost.memory``; ``extra`` is the excess of a measured peak over the computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from raypipe.ir.communication import StageSample
from raypipe.ir.graph import Lines
from raypipe.ir.units import human_bytes
from raypipe.planner.controller.events import Choice
from raypipe.planner.cost.memory import MemoryModel, StageMemory

UNKNOWN_IN_FLIGHT = 4
"""Micro-batches in flight that each stage may hold if no memory limit is known, as a multiple of the number of stages.
This hides round trips of at least three times a stage's own time. A micro-batch that waits for its W counts as one,
though it may hold up to twice the bytes of its activations.
"""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Memory budget of one stage: its limit, and the bytes of all that it holds.

    Attributes:
        limit_bytes: most bytes that the stage may hold; None for no limit.
        fixed_bytes: bytes of weights, gradients, optimizer, buffers and reserve.
        activation_bytes: bytes of the activations of one micro-batch in flight.
        message_bytes: bytes of one waiting message in each direction.
        input_bytes: bytes of the received input of one micro-batch in flight.
        recompute: True if the stage recomputes activations.
        workspace: (fixed bytes, bytes per micro-batch) of the temporary memory of operations; the largest sum counts.
        most_in_flight: most micro-batches in flight (after F, before B or W), if a step has ``num_microbatches``; with
            smaller micro-batches more are allowed. None for any number.
        num_microbatches: M for which the bytes of a micro-batch are given; with a larger M they shrink.
        extra_bytes: largest excess of a measured peak over the computed one.
    """

    limit_bytes: int | None = None
    fixed_bytes: int = 0
    activation_bytes: int = 0
    message_bytes: int = 0
    workspace: Lines = ()
    most_in_flight: int | None = None
    num_microbatches: int | None = None
    extra_bytes: int = 0
    input_bytes: int = 0
    recompute: bool = False

    def most_of(self, choice: Choice) -> int:
        """Return ``most_in_flight`` as a number of this choice's micro-batches, which may be larger or smaller.

        ``most_in_flight`` must not be None.
        """
        assert self.most_in_flight is not None
        if self.num_microbatches is None:
            return self.most_in_flight
        return self.most_in_flight * choice.num_microbatches // self.num_microbatches

    def need_bytes(self, choice: Choice, depth: int) -> int:
        """Compute the peak bytes under ``choice`` of a stage with ``depth - 1`` stages after it."""
        model = replace(choice.memory_model(), recompute=self.recompute)
        resident = model.activation_sets(depth) * self.activation_bytes + model.in_flight(depth) * self.input_bytes
        resident += model.message_slots * self.message_bytes
        share = Fraction(self.num_microbatches or choice.num_microbatches, choice.num_microbatches)
        workspace = max((fixed + share * grows for fixed, grows in self.workspace), default=Fraction(0))
        return self.fixed_bytes + self.extra_bytes + math.ceil(resident * share + max(Fraction(0), workspace))

    def measured(self, choice: Choice, depth: int, peak_bytes: int) -> MemoryBudget:
        """Return the budget with ``extra_bytes`` increased as needed: the computed peak becomes at least the measured.

        Args:
            choice, depth: as in ``need_bytes``.
            peak_bytes: measured peak.
        """
        return replace(self, extra_bytes=self.extra_bytes + max(0, peak_bytes - self.need_bytes(choice, depth)))


def budgets_of(
    stages: Sequence[StageMemory], model: MemoryModel, limits: Sequence[int | None], workspaces: Sequence[Lines]
) -> tuple[MemoryBudget, ...]:
    """Build budgets from the memory of a plan.

    Args:
        stages: memory of the plan, by stage.
        model: memory model of the plan.
        limits: limits in bytes, by stage; for None the micro-batches in flight are limited instead.
        workspaces: (fixed bytes, bytes per sample) of the temporary memory of operations, by stage.
    """
    unknown = unknown_budgets(len(stages))
    return tuple(
        MemoryBudget(
            most_in_flight=free.most_in_flight if limit is None else None,
            limit_bytes=limit,
            fixed_bytes=m.lasting_bytes,
            activation_bytes=m.activation_bytes // max(1, m.activation_sets),
            message_bytes=(m.message_bytes - m.in_flight * m.input_bytes) // max(1, model.message_slots),
            input_bytes=m.input_bytes,
            recompute=m.recompute,
            workspace=tuple((fixed, per_sample * model.microbatch_size) for fixed, per_sample in lines),
            num_microbatches=model.spec.num_microbatches,
        )
        for m, limit, free, lines in zip(stages, limits, unknown, workspaces, strict=True)
    )


def unknown_budgets(num_stages: int) -> tuple[MemoryBudget, ...]:
    """Build budgets for stages whose bytes and limits are unknown; they limit micro-batches in flight only."""
    return tuple(MemoryBudget(most_in_flight=UNKNOWN_IN_FLIGHT * num_stages) for _ in range(num_stages))


def why_not(choice: Choice, budgets: Sequence[MemoryBudget]) -> str:
    """Describe the first stage on which a choice does not fit, with the numbers; "" if it fits on all."""
    for stage, budget in enumerate(budgets):
        depth = len(budgets) - stage
        in_flight = choice.memory_model().in_flight(depth)
        if budget.most_in_flight is not None and in_flight > budget.most_of(choice):
            return f"stage {stage} would hold {in_flight} micro-batches, at most {budget.most_of(choice)} are allowed"
        if budget.limit_bytes is not None and (need := budget.need_bytes(choice, depth)) > budget.limit_bytes:
            return (
                f"stage {stage} would hold {in_flight} micro-batches in {human_bytes(need)}, "
                f"its limit is {human_bytes(budget.limit_bytes)}"
            )
    return ""


def fits(choice: Choice, budgets: Sequence[MemoryBudget]) -> bool:
    """Return True if every stage has enough memory for a choice."""
    return not why_not(choice, budgets)


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Budgets, corrected by the peaks that were measured so far.

    Attributes:
        budgets: budgets by stage.
        fullest_bytes: by stage, the most bytes that any choice so far was computed to need; empty before the first
            step.
    """

    budgets: tuple[MemoryBudget, ...]
    fullest_bytes: tuple[int, ...] = ()

    def after(self, choice: Choice, samples: Iterable[StageSample]) -> PeakMemory:
        """Return the budgets after one more step, which ran with ``choice``.

        A process reports its peak since it started, which was reached under the choice with the largest need so far.
        So the peak is used only if no earlier choice needed more than ``choice`` does.
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
        """Return a copy with these ``extra_bytes`` in the stages' budgets, by stage, as measured before a restart."""
        pairs = zip(self.budgets, extra_bytes, strict=True)
        return replace(self, budgets=tuple(replace(budget, extra_bytes=extra) for budget, extra in pairs))
