"""What a failure for want of memory leads to, with a recovery that has no other plan; and one while all go back."""

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
        self.spec = self.ordering = self.requests = self.watcher = self
        self.max_failures, self.lease = -1, None

    def tell(self, decision: str = "", reason: str = "", **numbers: Any) -> None:
        if decision:
            self.told.append(decision)

    def counted(self, metric: str) -> None:
        """Nobody looks."""


class NoOtherPlan:
    """Of a run whose stages cannot be cut again."""

    replanning = groups = replays = None
    failures = 0

    def lighten(self, ran_out: RanOut) -> None:
        raise PlanError("there is no plan that needs less")


class At:
    class at:  # noqa: N801
        step = 7

    class marks:  # noqa: N801
        steps = (5,)


class Enough(Exception):  # noqa: N818
    """The test has seen what it wanted."""


class LosesAnother:
    """Of a run that can replay nobody, and loses another worker whenever all go back."""

    replanning = groups = None
    failures = 0

    def __init__(self) -> None:
        self.replays, self.asked = self, list[str]()
        self.why_not = "stages have replicas"

    def complete(self, step: int) -> None:
        self.asked.append("complete")

    def recover(self, steps: tuple[int, ...]) -> None:
        self.asked.append("recover")
        if len(self.asked) == 3:
            raise Enough
        raise StageLostError("Stage 0 died")


def test_once_some_have_gone_back_nobody_is_taken_to_be_where_the_run_was() -> None:
    recovery = LosesAnother()
    with pytest.raises(Enough):
        Changing(Told(), At(), recovery).survive(StageLostError("Stage 1 died"), lambda news: None)  # type: ignore[arg-type]
    assert recovery.asked == ["complete", "recover", "recover"]


def test_failures_that_a_driver_before_has_survived_count() -> None:
    recovery, told = LosesAnother(), Told()
    recovery.failures, told.max_failures = 1, 2
    with pytest.raises(StageError, match=r"it is failure 3 of this run, and FailureConfig\(max_failures=2\) ends it"):
        Changing(told, At(), recovery).survive(StageLostError("Stage 1 died"), lambda news: None)  # type: ignore[arg-type]
    assert (recovery.failures, recovery.asked) == (2, ["complete", "recover"])


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
