"""Failures that a run survives, and recoveries that fail."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from raypipe.errors import (
    CheckpointError,
    LeaseError,
    LinkError,
    PlanError,
    RanOut,
    RaypipeError,
    StageError,
    StageLostError,
)
from raypipe.run.stage_changes import MOST_LIGHTER, MOST_LOST, Changing, Failures

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("most", "error", "survivable"),
    [
        (0, StageLostError("Stage 1 died"), False),
        (1, StageLostError("Stage 1 died"), True),
        (-1, LinkError("stage 0 <-> stage 1"), True),
        (-1, StageError("Step 3: the loss is nan"), True),
        (-1, CheckpointError("full"), False),
        (-1, LeaseError("taken over"), False),
    ],
)
def test_what_is_survived(most: int, error: RaypipeError, survivable: bool) -> None:
    assert Failures(most).survivable(error) is survivable


def test_as_many_as_were_asked_for() -> None:
    failures = Failures(2)
    assert [bool(failures.counted(StageLostError("Stage 1 died"), step)) for step in (3, 9, 11)] == [False, False, True]
    unlimited = Failures(-1)
    assert not any(unlimited.counted(StageLostError("Stage 1 died"), step) for step in range(100))


def test_the_users_own_mistake_is_tried_once_more() -> None:
    failures = Failures(-1)
    assert failures.counted(StageError("Step 3: the loss is nan, 0x7f1"), 3) == ""
    assert "came again after 3 steps" in failures.counted(StageError("Step 3: the loss is nan, 0x7f2"), 3)
    assert failures.counted(StageError("Step 4: the loss is nan"), 4) == ""  # the run got further
    assert failures.counted(StageError("another mistake"), 4) == ""


def test_a_mistake_whose_words_differ_is_the_same_one_and_ends_the_run() -> None:
    """Objects in an exception are told with their addresses; other words come to an end too."""
    failures = Failures(-1)
    assert failures.counted(StageError("Stage 1 failed in 1F3: <Net object at 0x7fa3b0>"), 3) == ""
    assert "came again" in failures.counted(StageError("Stage 1 failed in 1F3: <Net object at 0xdeadbe>"), 3)
    failures = Failures(-1)
    names = [chr(ord("a") + number) for number in range(25)]
    said = [failures.counted(StageError(f"Stage 1 failed in 1F3: file {name}{name}"), 3) for name in names]
    assert said.index("21 failures came after 3 steps, and the run got no further between them") == 20
    assert failures.counted(StageError("Stage 1 failed in 1F3: file a"), 4) == ""


def test_a_mistake_that_is_heard_of_a_step_earlier_is_the_same_one() -> None:
    """The driver may not have heard of the last step when all went back."""
    failures = Failures(-1)
    assert failures.counted(StageError("Stage 1 failed in 1F3: no"), 8) == ""
    assert "came again" in failures.counted(StageError("Stage 1 failed in 1F3: no"), 7)
    # On the way back to where it was, a run may lose as many processes as it likes.
    lost = [failures.counted(StageLostError("Stage 1 died"), step) for step in (100, *range(50, 90, 2))]
    assert not any(lost)


def test_a_process_that_is_lost_again_and_again_ends_the_run_at_last() -> None:
    failures = Failures(-1)
    found = [failures.counted(StageLostError("Stage 1 died"), 7) for _ in range(MOST_LOST + 2)]
    assert found[:-1] == [""] * (MOST_LOST + 1)
    assert "7 times in a row" in found[-1]


def test_memory_that_runs_out_again_ends_the_run_after_a_few_lighter_plans() -> None:
    failures, error = Failures(-1), StageError("Stage 1 ran out of memory in 1F3, with 400.0 MiB in use: ...")
    error.ran_out = RanOut(1, 400 << 20)
    found = [failures.counted(error, 7) for _ in range(MOST_LIGHTER + 2)]
    assert found[:-1] == [""] * (MOST_LIGHTER + 1)
    assert "in a row" in found[-1]


class Parts:
    """Parts of the loop that a recovery uses before it rolls back."""

    lease = control = metrics = checkpoints = None

    def __init__(self, recovery: Any, max_failures: int = -1) -> None:
        self.events: list[str] = []
        self.spec = self.ordering = self.requests = self.reporter = self.watcher = self
        self.max_failures, self.recovery = max_failures, recovery
        self.progress = SimpleNamespace(at=SimpleNamespace(step=7), copies=SimpleNamespace(steps=(5,)))

    def event(self, decision: str, reason: str, **numbers: Any) -> None:
        self.events.append(decision)

    def update(self, **changes: Any) -> None:
        """Ignore the status."""

    def counted(self, metric: str) -> None:
        """Ignore metrics."""

    def changing(self) -> Changing:
        """Make what is tested, of these parts."""
        return Changing(**{field.name: getattr(self, field.name) for field in fields(Changing)})


class NoOtherPlan:
    """Of a run whose stages cannot be cut again."""

    replanning = None
    failures = 0

    def lighten(self, ran_out: RanOut) -> None:
        raise PlanError("there is no plan that needs less")


class Enough(Exception):  # noqa: N818
    """The test has seen what it wanted."""


class LosesAnother:
    """Recovery of a run that cannot be regrouped, and loses another worker each time all go back."""

    replanning = None
    failures = 0

    def __init__(self) -> None:
        self.calls = list[str]()

    def catch_up(self, step: int) -> None:
        self.calls.append("complete")

    def roll_back(self, steps: Collection[int]) -> None:
        self.calls.append("recover")
        if len(self.calls) == 3:
            raise Enough
        raise StageLostError("Stage 0 died")


def test_once_some_have_gone_back_nobody_is_taken_to_be_where_the_run_was() -> None:
    recovery = LosesAnother()
    with pytest.raises(Enough):
        Parts(recovery).changing().recover(StageLostError("Stage 1 died"), lambda news: None)
    assert recovery.calls == ["complete", "recover", "recover"]


def test_failures_that_a_driver_before_has_survived_count() -> None:
    recovery = LosesAnother()
    recovery.failures = 1
    with pytest.raises(StageError, match=r"it is failure 3 of this run, and FailureConfig\(max_failures=2\) ends it"):
        Parts(recovery, 2).changing().recover(StageLostError("Stage 1 died"), lambda news: None)
    assert (recovery.failures, recovery.calls) == (2, ["complete", "recover"])


def test_a_process_that_was_ended_for_memory_is_replaced_where_there_is_no_other_plan() -> None:
    """An exception of its own would come again, and ends the run (tests/run/plans/test_memory_limits.py)."""
    recovery = NoOtherPlan()
    parts = Parts(recovery)
    error = StageLostError("Stage 1 died")
    error.ran_out = RanOut(1, 1 << 30)
    parts.changing()._use_less_memory(error, recovery)
    assert parts.events == ["warning"]
