"""How much memory a schedule may use: what a stage needs under any schedule, and what each micro-batch in flight adds.

    limit - fixed - extra  >=  activation sets * activation + in flight * input + waiting messages * message + workspace

The three counts are ``raypipe.planner.memory``'s. ``extra`` is what the measured peak was above this sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction

from raypipe.ir.lines import Lines
from raypipe.ir.plan_table import human_bytes
from raypipe.planner.control.choice import Choice
from raypipe.planner.memory import MemoryModel, StageMemory

__all__ = ["UNKNOWN_IN_FLIGHT", "MemoryBudget", "budgets_of", "fits", "unknown_budgets", "why_not"]

UNKNOWN_IN_FLIGHT = 4
"""Micro-batches per stage, where nobody said how much memory there is: every stage may hold as many as the first one
does in a 1F1B of four times the depth, which hides round trips of at least three times a stage's own time. One that
waits for its W counts as one, though it may hold up to twice the bytes of its activations."""


@dataclass(frozen=True, slots=True)
class MemoryBudget:
    """Of one stage.

    Attributes:
        limit_bytes: what the stage may hold; None for no limit.
        fixed_bytes: weights, gradients, optimizer, buffers, reserve.
        activation_bytes: of one micro-batch in flight.
        message_bytes: of one waiting message in each direction.
        input_bytes: of what came of one micro-batch in flight.
        recompute: the stage runs its forwards again, under any schedule.
        workspace: that operations need while they run: (fixed bytes, bytes per micro-batch), the most of which counts.
        most_in_flight: micro-batches between their F and their B or W that are allowed in any case, of those that
            num_microbatches cuts; None for any number.
        num_microbatches: M that bytes of a micro-batch are of; with more, smaller ones, they shrink.
        extra_bytes: found by measurement on top.
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
        """``most_in_flight`` in micro-batches of this choice, which may be larger or smaller."""
        assert self.most_in_flight is not None
        if self.num_microbatches is None:
            return self.most_in_flight
        return self.most_in_flight * choice.num_microbatches // self.num_microbatches

    def need_bytes(self, choice: Choice, depth: int) -> int:
        """At the fullest moment of a stage with ``depth - 1`` stages behind it."""
        model = replace(choice.memory_model(), recompute=self.recompute)
        resident = model.activation_sets(depth) * self.activation_bytes + model.in_flight(depth) * self.input_bytes
        resident += model.message_slots * self.message_bytes
        share = Fraction(self.num_microbatches or choice.num_microbatches, choice.num_microbatches)
        workspace = max((fixed + share * grows for fixed, grows in self.workspace), default=Fraction(0))
        return self.fixed_bytes + self.extra_bytes + math.ceil(resident * share + max(Fraction(0), workspace))

    def measured(self, choice: Choice, depth: int, peak_bytes: int) -> MemoryBudget:
        """The budget as a measured peak shows it: never more than before."""
        return replace(self, extra_bytes=self.extra_bytes + max(0, peak_bytes - self.need_bytes(choice, depth)))


def budgets_of(
    found: Sequence[StageMemory], model: MemoryModel, limits: Sequence[int | None], workspaces: Sequence[Lines]
) -> tuple[MemoryBudget, ...]:
    """Budgets from a plan's own memory.

    Args:
        found: by stage, of the plan.
        model: that it was made with.
        limits: bytes by stage; None where nobody said, which bounds the micro-batches in flight instead.
        workspaces: by stage, over samples.
    """
    unknown = unknown_budgets(len(found))
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
        for m, limit, free, lines in zip(found, limits, unknown, workspaces, strict=True)
    )


def unknown_budgets(num_stages: int) -> tuple[MemoryBudget, ...]:
    """Budgets where neither bytes nor limits are known."""
    return tuple(MemoryBudget(most_in_flight=UNKNOWN_IN_FLIGHT * num_stages) for _ in range(num_stages))


def why_not(choice: Choice, budgets: Sequence[MemoryBudget]) -> str:
    """The first stage on which a choice does not fit, with the numbers; "" where it fits on all."""
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
    """Whether every stage has enough memory for a choice."""
    return not why_not(choice, budgets)
