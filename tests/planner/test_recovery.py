"""Where a run can go back to, for any distribution of copies; and who alone goes back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.planner.recovery import Copy, Log, Lost, Replay, StepTimes, lacking, newest_common, replay_or_why_not

STEPS = st.sets(st.integers(0, 6), max_size=3)


def test_all_go_back_to_the_newest_step_that_every_stage_has() -> None:
    copies = [Copy("a", 0, (20, 21)), Copy("a", 1, (20,)), Copy("b", 1, (18, 20)), Copy("b", 2, (19, 20, 21))]
    step, by_stage = newest_common(copies, 3, range(100)) or (None, {})
    assert step == 20
    assert [by_stage[stage][0].holder for stage in range(3)] == ["a", "a", "b"]  # the first that has it
    assert all(len(of_stage) == 1 for of_stage in by_stage.values())


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
    assert all(copy in copies and copy.stage == stage and step in copy.steps for stage, (copy,) in by_stage.items())


def pieces(*, without: str = "") -> list[Copy]:
    """Stage 0 on workers a, b and c, which share out the state of their optimizer; d has stage 1 and holds slices."""
    own = [
        copy
        for at, holder in enumerate("abc")
        for copy in (Copy(holder, 0, (20, 21), 0, 3), Copy(holder, 0, (20, 21), 1 + at, 3))
    ]
    own.append(Copy("d", 1, (20, 21)))
    held = [Copy("d", 0, (20,), 1, 3), Copy("d", 0, (20,), 2, 3), Copy("a", 0, (20,), 3, 3), Copy("b", 1, (20,))]
    return [copy for copy in (*own, *held) if copy.holder not in without]


@pytest.mark.parametrize(
    ("lost", "step", "holders"),
    [
        ("", 21, ["aabc", "d"]),
        ("a", 20, ["bdbc", "d"]),
        ("b", 20, ["aadc", "d"]),
        ("c", 20, ["aaba", "d"]),
        ("d", 20, ["aabc", "b"]),
        ("ab", 20, ["cddc", "d"]),
    ],
)
def test_all_pieces_of_a_stage_are_needed_wherever_they_are(lost: str, step: int, holders: list[str]) -> None:
    """Two of one stage were lost with the slices of both held elsewhere."""
    at, by_stage = newest_common(pieces(without=lost), 2, range(100)) or (None, {})
    assert at == step
    assert ["".join(copy.holder for copy in by_stage[stage]) for stage in range(2)] == holders
    assert [[copy.piece for copy in by_stage[stage]] for stage in range(2)] == [[0, 1, 2, 3], [0]]
    assert lacking(pieces(without=lost), 2) == ""


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ("ac", "nobody that is left has the slices of replica 2 of stage 0"),
        ("ad", "nobody that is left has the slices of replica 0 of stage 0"),
        ("bd", "nobody that is left has the slices of replica 1 of stage 0"),
        ("abc", "nobody that is left has the state of stage 0"),
        ("abcd", "nobody that is left has the state of stage 0"),
    ],
)
def test_without_a_piece_there_is_no_step(lost: str, words: str) -> None:
    assert newest_common(pieces(without=lost), 2, range(100)) is None
    assert lacking(pieces(without=lost), 2) == words


BESIDE = {0: {1}, 1: {0, 2}, 2: {1, 3}, 3: {2}}


def lost(worker: int, *copies: int) -> dict[int, Lost]:
    return {worker: Lost(frozenset(BESIDE[worker]), copies)}


def logs(*workers: int, begin: int = 20, end: int = 27) -> dict[int, Log]:
    """Each has sent 100 MB to each of its neighbours in every step."""
    return {at: Log(range(begin, end), dict.fromkeys(BESIDE[at], 100_000_000 * (end - begin))) for at in workers}


TIMES = StepTimes(1.0, {1: 0.4, 2: 0.7, 3: 0.1})


@pytest.mark.parametrize(
    ("who", "logged", "times", "found"),
    [
        # The newest copy that is not newer than the others: 2 x 600 MB at 200 MB/s, and 6 steps of the pipeline.
        (lost(1, 14, 21, 28), logs(0, 2, 3), StepTimes(2.0, {1: 0.4}), Replay(27, {1: 21}, 6.0, 12.0)),
        (lost(3, 21), logs(0, 1, 2), TIMES, Replay(27, {3: 21}, 3.0, 6.0)),
        (lost(3, 21), logs(0, 1, 2), StepTimes(1.0, {3: 0.9}), Replay(27, {3: 21}, 5.4, 6.0)),
        (lost(3, 21), logs(0, 1, 2), StepTimes(1.0, {3: 1.3}), Replay(27, {3: 21}, 6.0, 6.0)),
        (lost(1, 27), logs(0, 2, 3), TIMES, Replay(27, {1: 27}, 0.0, 6.0)),
        ({}, logs(0, 1, 2, 3), TIMES, Replay(27, {}, 0.0, 6.0)),  # only a link broke
        ({}, {}, StepTimes(), Replay(27, {}, 0.0, 0.0)),
        (lost(1, 21), logs(0, 2, 3), StepTimes(), Replay(27, {1: 21}, 6.0, 0.0)),  # nothing was measured yet
        # Two that have nothing to do with each other come back side by side.
        ({**lost(0, 21), **lost(2, 21)}, logs(1, 3), StepTimes(3.0, {0: 1.0, 2: 0.5}),
         Replay(27, {0: 21, 2: 21}, 9.0, 18.0)),
        ({**lost(1, 21), **lost(2, 21)}, logs(0, 3), TIMES,
         "workers 1 and 2, which exchange messages, were lost together"),
        (lost(1), logs(0, 2, 3), TIMES, "nobody has a copy of what worker 1 held"),
        (lost(1, 28), logs(0, 2, 3), TIMES, "nobody has a copy of what worker 1 held"),
        (lost(1, 14), logs(0, 2, 3), TIMES,
         "worker 1 would need what worker 0 sent in steps 14 to 26, and the log there has steps 20 to 26"),
        (lost(1, 21), {**logs(0), **logs(2, end=26)}, TIMES,
         "worker 1 would need what worker 2 sent in steps 21 to 26, and the log there has steps 20 to 25"),
        (lost(1, 21), {**logs(0), **logs(2, begin=0, end=0)}, TIMES,
         "worker 1 would need what worker 2 sent in steps 21 to 26, and the log there has no step"),
        (lost(1, 21), logs(0, 2, 3), StepTimes(0.5), "replaying would take 6.00 s, and the steps of all 3.00 s"),
    ],
)  # fmt: skip
def test_who_was_lost_is_replayed_where_everything_is_there_and_it_is_quicker(
    who: dict[int, Lost], logged: dict[int, Log], times: StepTimes, found: Replay | str
) -> None:
    answer = replay_or_why_not(27, who, logged, 21, times)
    if isinstance(found, str):
        assert answer == found
        return
    assert isinstance(answer, Replay)
    assert answer[:2] == found[:2]
    assert answer[2:] == pytest.approx(found[2:])


def test_where_nobody_could_go_back_but_to_the_beginning_all_steps_would_be_done_again() -> None:
    found = replay_or_why_not(27, lost(1, 21), logs(0, 2, 3), None, TIMES)
    assert isinstance(found, Replay)
    assert found.redone_s == 27.0
