"""Laws of transitions: members live, and the state that they take is the newest that all of them can have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raypipe.errors import PlanError
from raypipe.ir.schedule import single_homes
from raypipe.planner.state_sources import (
    Copy,
    Layout,
    Living,
    Transition,
    lacking,
    members_by_number,
    plan_transition,
)

LINE = Layout(0, single_homes(range(3)))


def copy(holder: str, stage: int, *steps: int, generation: int = 0, num_stages: int = 3) -> Copy:
    return Copy(holder, generation, num_stages, stage, steps)


def torn(*workers: int | None) -> list[Living]:
    """Members after a failure: no state is of a known step, and no link works."""
    return [Living(at, worker, linked=False) for at, worker in enumerate(workers)]


def at(step: int, *workers: int | None) -> list[Living]:
    """Members between two steps."""
    return [Living(place, worker, None if worker is None else step) for place, worker in enumerate(workers)]


def holders(found: Transition | None, worker: int) -> str:
    assert found is not None
    return "".join(one.holder for one in found.sources[worker])


@pytest.mark.parametrize(("saved", "step"), [(None, 20), (19, 20), (20, 20), (21, None)])
def test_a_newer_checkpoint_counts(saved: int | None, step: int | None) -> None:
    copies = [copy("a", stage, 20) for stage in range(3)]
    found = plan_transition(LINE, LINE, torn(0, 1, 2), copies, saved)
    assert found is not None
    assert (found.step, found.members) == (step, (0, 1, 2))
    assert bool(found.sources) == (step is not None)


def test_nothing_changes_if_all_are_where_they_were() -> None:
    assert plan_transition(LINE, LINE, at(7, 0, 1, 2, None), []) is None
    broken = [member._replace(linked=False) for member in at(7, 0, 1, 2)]
    assert plan_transition(LINE, LINE, broken, []) == Transition(LINE, (0, 1, 2), {}, 7), "only links are new"


def test_a_worker_that_leaves_is_read_and_the_others_keep_their_state() -> None:
    living = at(7, 0, 1, 2, None)
    living[1] = living[1]._replace(stays=False)
    found = plan_transition(LINE, LINE, living, [copy(name, stage, 7) for stage, name in enumerate("abc")])
    assert found is not None
    assert (found.step, found.members, list(found.sources)) == (7, (0, 3, 2), [1])
    assert holders(found, 1) == "b"


REPLICAS, ONE_LESS = Layout(0, ((0, 1), (2, 3))), Layout(0, ((0,), (1, 2)))


def test_replicas_go_on_where_they_are_without_a_lost_one() -> None:
    living = [member._replace(linked=False) for member in at(7, 0, 2, 3)]
    assert plan_transition(REPLICAS, ONE_LESS, living, []) == Transition(ONE_LESS, (0, 1, 2), {}, 7)


def test_a_spare_takes_the_state_of_a_replica() -> None:
    found = plan_transition(ONE_LESS, REPLICAS, at(7, 0, 1, 2, None), [copy("a", 0, 7, num_stages=2)])
    assert found is not None
    assert (found.step, found.members, list(found.sources)) == (7, (0, 3, 1, 2), [1])
    assert holders(found, 1) == "a"


def test_numbers_are_kept_as_long_as_spares_fill_the_gaps() -> None:
    living = [Living(at, worker) for at, worker in enumerate((2, None, 0, 1))]
    assert [member.position for member in members_by_number(living, 3)] == [2, 3, 0]
    del living[3]
    assert [member.position for member in members_by_number(living, 3)] == [2, 1, 0]
    assert [member.position for member in members_by_number(living, 2)] == [2, 1]
    del living[1]
    assert [member.position for member in members_by_number(living, 2)] == [2, 0], "no spare is left: they move up"
    with pytest.raises(PlanError, match="needs 3 workers, but only 2"):
        members_by_number(living, 3)


def pieces(*, without: str = "") -> list[Copy]:
    """Stage 0 on workers a, b and c, which share out the state of their optimizer; d has stage 1 and holds slices."""
    own = [
        one
        for place, holder in enumerate("abc")
        for one in (Copy(holder, 0, 2, 0, (20, 21), 0, 3), Copy(holder, 0, 2, 0, (20, 21), 1 + place, 3))
    ]
    held = [Copy("d", 0, 2, 0, (20,), 1, 3), Copy("d", 0, 2, 0, (20,), 2, 3), Copy("a", 0, 2, 0, (20,), 3, 3)]
    found = [*own, copy("d", 1, 20, 21, num_stages=2), *held, copy("b", 1, 20, num_stages=2)]
    return [one for one in found if one.holder not in without]


SHARED = Layout(0, ((0, 1, 2), (3,)))


@pytest.mark.parametrize(
    ("lost", "step", "of_stages"),
    [
        ("", 21, ["aabc", "d"]),
        ("a", 20, ["bdbc", "d"]),
        ("b", 20, ["aadc", "d"]),
        ("c", 20, ["aaba", "d"]),
        ("d", 20, ["aabc", "b"]),
        ("ab", 20, ["cddc", "d"]),
    ],
)
def test_all_pieces_of_a_stage_are_needed_wherever_they_are(lost: str, step: int, of_stages: list[str]) -> None:
    """Two of one stage were lost with the slices of both held elsewhere."""
    found = plan_transition(SHARED, SHARED, torn(0, 1, 2, 3), pieces(without=lost))
    assert found is not None
    assert found.step == step
    assert [holders(found, worker) for worker in (0, 3)] == of_stages
    assert [one.piece for one in found.sources[0]] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("lost", "words"),
    [
        ("ac", "no worker has a copy of the slices of replica 2 of stage 0"),
        ("ad", "no worker has a copy of the slices of replica 0 of stage 0"),
        ("abc", "no worker has a copy of the state of stage 0"),
        ("abcd", "no worker has copies"),
    ],
)
def test_without_a_piece_there_is_no_step(lost: str, words: str) -> None:
    found = plan_transition(SHARED, SHARED, torn(0, 1, 2, 3), pieces(without=lost))
    assert found is not None
    assert found.step is None
    assert lacking(pieces(without=lost)) == words


STEPS = st.sets(st.integers(0, 5), max_size=3).map(lambda steps: tuple(sorted(steps)))
COPIES = st.lists(
    st.builds(copy, st.sampled_from("abc"), st.integers(0, 2), generation=st.integers(0, 1)).flatmap(
        lambda one: STEPS.map(lambda steps: one._replace(steps=steps))
    ),
    max_size=9,
)
LIVING = st.lists(
    st.tuples(st.sampled_from([None, 0, 1, 2]), st.none() | st.integers(0, 5), st.booleans()), max_size=6
).map(
    lambda found: [
        Living(
            place,
            None if worker in [w for w, *_ in found[:place]] else worker,
            step if worker is not None else None,
            stays,
        )
        for place, (worker, step, stays) in enumerate(found)
    ]
)
LAYOUTS = st.sampled_from([LINE, Layout(1, single_homes(range(2))), Layout(1, single_homes(range(3))), REPLICAS])


@given(LAYOUTS, LAYOUTS, LIVING, COPIES, st.none() | st.integers(0, 6))
def test_laws(current: Layout, wanted: Layout, living: list[Living], copies: list[Copy], saved: int | None) -> None:
    staying = {member.position: member for member in living if member.stays}
    if len(staying) < wanted.num_workers:
        with pytest.raises(PlanError, match="workers, but only"):
            plan_transition(current, wanted, living, copies, saved)
        return
    found = plan_transition(current, wanted, living, copies, saved)
    if found is None:
        assert current == wanted
        assert {m.worker for m in staying.values()} >= set(range(wanted.num_workers))
        return
    assert len(set(found.members)) == len(found.members) == wanted.num_workers
    assert set(found.members) <= staying.keys(), "members are living, and stay"
    if found.step is None:
        assert found.sources == {}
        return
    assert saved is None or saved <= found.step, "no transition goes back behind the newest checkpoint"
    for worker, place in enumerate(found.members):
        if worker not in found.sources:
            member = staying[place]
            assert member.step == found.step, "who keeps its state has that of the step"
            assert member.worker is not None
            assert current.generation == wanted.generation
            assert current.stages_of(member.worker) == wanted.stages_of(worker)
            continue
        sources = found.sources[worker]
        assert all(one in copies and found.step in one.steps for one in sources)
        (generation,) = {one.generation for one in sources}
        stages = {one.stage for one in sources}
        of_all = stages == set(range(sources[0].num_stages))
        assert of_all or (generation == wanted.generation and stages == set(wanted.stages_of(worker)))


@given(LIVING, COPIES)
def test_no_newer_step_is_in_copies_of_all_stages(living: list[Living], copies: list[Copy]) -> None:
    stopped = [member._replace(step=None, linked=False, stays=True) for member in living]
    if len(stopped) < 3:
        return
    found = plan_transition(LINE, LINE, stopped, copies)
    assert found is not None
    whole = [
        step
        for step in range(6)
        for generation in (0, 1)
        if all(any(c.stage == s and c.generation == generation and step in c.steps for c in copies) for s in range(3))
    ]
    assert found.step == max(whole, default=None)
