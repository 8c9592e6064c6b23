"""Where a run can go back to, for any distribution of copies."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from raypipe.planner.recovery import Copy, newest_common

STEPS = st.sets(st.integers(0, 6), max_size=3)


def test_all_go_back_to_the_newest_step_that_every_stage_has() -> None:
    copies = [Copy("a", 0, (20, 21)), Copy("a", 1, (20,)), Copy("b", 1, (18, 20)), Copy("b", 2, (19, 20, 21))]
    step, by_stage = newest_common(copies, 3, range(100)) or (None, {})
    assert step == 20
    assert [by_stage[stage].holder for stage in range(3)] == ["a", "a", "b"]  # the first that has it


def test_a_step_that_the_run_does_not_know_is_none_to_go_back_to() -> None:
    copies = [Copy("a", 0, (3, 6)), Copy("b", 1, (3, 6))]
    assert (newest_common(copies, 2, (0, 3)) or (None,))[0] == 3
    assert newest_common(copies, 2, (9,)) is None


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2), STEPS), max_size=8), STEPS, st.integers(0, 3))
def test_the_answer_can_be_carried_out_and_is_the_newest(
    held: list[tuple[int, int, set[int]]], known: set[int], num_stages: int
) -> None:
    copies = [Copy(holder, stage, tuple(steps)) for holder, stage, steps in held]
    reachable = {
        step
        for step in known
        if num_stages and all(any(c.stage == s and step in c.steps for c in copies) for s in range(num_stages))
    }
    found = newest_common(copies, num_stages, known)
    if found is None:
        assert not reachable
        return
    step, by_stage = found
    assert step == max(reachable)
    assert sorted(by_stage) == list(range(num_stages))
    assert all(copy in copies and copy.stage == stage and step in copy.steps for stage, copy in by_stage.items())
