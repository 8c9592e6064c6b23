"""Which failures a run survives, and how many."""

from __future__ import annotations

import pytest

from raypipe.errors import CheckpointError, LeaseError, LinkError, RanOut, RaypipeError, StageError, StageLostError
from raypipe.runtime.run.recovery import MOST_LIGHTER, MOST_LOST, Failures


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
