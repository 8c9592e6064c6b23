"""What a failure for want of memory leads to, with a recovery that has no other plan."""

from __future__ import annotations

from typing import Any

import pytest

from raypipe.errors import PlanError, RanOut, StageError, StageLostError
from raypipe.runtime.run.changing import Changing

pytestmark = pytest.mark.engine


class Told:
    """Whatever the loop is made of, as far as a failure for want of memory needs it."""

    def __init__(self) -> None:
        self.told: list[str] = []
        self.spec = self.ordering = self.requests = self
        self.max_failures = -1

    def tell(self, decision: str, reason: str, **numbers: Any) -> None:
        self.told.append(decision)


class NoOtherPlan:
    """Of a run whose stages cannot be cut again."""

    replanning = groups = replays = None

    def lighten(self, ran_out: RanOut) -> None:
        raise PlanError("there is no plan that needs less")


class At:
    class at:  # noqa: N801
        step = 7


@pytest.mark.parametrize("kind", [StageLostError, StageError])
def test_a_process_that_was_ended_for_memory_is_replaced_where_there_is_no_other_plan(kind: type[StageError]) -> None:
    """An exception of its own would come again."""
    parts = Told()
    changing = Changing(parts, At(), NoOtherPlan())  # type: ignore[arg-type]
    error = kind("Stage 1 died")
    error.ran_out = RanOut(1, 1 << 30)
    if kind is StageLostError:
        changing._lighten(error)
        assert parts.told == ["warning"]
    else:
        with pytest.raises(StageError, match=r"The run ends: there is no plan that needs less"):
            changing._lighten(error)
        assert parts.told == ["give up"]
