"""A worker that is lost while others are replaced: nobody is taken for who it is not, and nothing of it is left."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from raypipe.engine.reached import Reached, Scalar
from raypipe.errors import StageLostError
from raypipe.planner.recovery import Replay
from raypipe.runtime.workers import roster
from raypipe.runtime.workers.configuring import Configuring
from raypipe.runtime.workers.granted import granted
from raypipe.runtime.workers.places import Owner
from raypipe.runtime.workers.replaying import Replaying
from raypipe.runtime.workers.replaying_actor import ReplayingActor
from raypipe.runtime.workers.roster import Member, Roster, Terms


def test_who_is_lost_while_others_are_forgotten_is_ended_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place is given back then; it was kept for ever."""
    members = [Member(number=number, lost=number == 0) for number in range(3)]
    ended: list[int] = []

    def end(member: Member) -> None:
        ended.append(member.number)
        members[2].lost = True  # as the watch does, whenever it notices

    monkeypatch.setattr(roster, "end_member", end)
    terms = Terms({"CPU": 1}, "tcp", None, Owner(), 60.0, granted)
    made = Roster(0, terms, members)
    made.drop_lost()
    assert (ended, [member.number for member in made.members]) == ([0], [1, 2])
    made.drop_lost()
    assert (ended, [member.number for member in made.members]) == ([0, 2], [1])


def test_positions_are_of_members_that_live() -> None:
    """They are told apart by what they are, not by what they look like."""
    first, second, third = (Member() for _ in range(3))
    made = Configuring(0, SimpleNamespace(members=[third, first, second]))  # type: ignore[arg-type]
    made.in_use = [first, second]
    assert made.positions() == [1, 2]
    assert made.positions([third]) == [0]
    second.lost = True
    with pytest.raises(StageLostError, match="Another worker was lost"):
        made.positions()


class LosesAPeer:
    """A fleet of three workers: the middle one was lost, and whoever has its messages is lost while it is replayed."""

    def __init__(self) -> None:
        self.links, self.asked = 4, list[str]()
        self.in_use, self.lost, self.ordered, self.facts = [Member() for _ in range(3)], frozenset({1}), True, ()
        self.actors = [None] * 3

    def settle(self) -> None:
        self.asked.append("settle")

    def reached(self) -> list[Reached]:
        """A new process says what one says that has begun no step since it was given its state."""
        return [Reached(7), Reached(), Reached(7)][:: 2 if self.lost else 1]

    def come_to(self, step: int, totals: tuple[Scalar, Scalar] | None) -> dict[int, Any]:
        return {}

    def copies(self) -> list[Any]:
        return []

    def replace_lost(self, count: int) -> tuple[str, ...]:
        self.lost = frozenset()
        return ("Stage 1",)

    def unheard(self, count: int, last: Any, replayed: Any) -> list[Any]:
        return []


def test_a_new_process_is_not_taken_for_one_at_the_step_of_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replay did not come to an end: it has no state, or that of an older step."""
    fleet = LosesAPeer()
    setup = SimpleNamespace(generation=0, num_workers=3, programs=())
    plans: Any = SimpleNamespace(made=SimpleNamespace(setup=setup))
    made = Replaying(fleet, plans, lambda made: None, lambda: None)  # type: ignore[arg-type]

    def lost(*given: Any) -> Any:
        raise StageLostError("What worker 0 had sent to worker 1 cannot be read")

    monkeypatch.setattr(made, "_impossible", lambda made: "")
    monkeypatch.setattr(made, "_decided", lambda *given: Replay(7, {1: 5}, 0.0, 0.0))
    monkeypatch.setattr(made, "_replay", lost)
    with pytest.raises(StageLostError):
        made.complete(7)
    assert made.complete(7) is None
    assert made.why_not == "another worker was lost while one was replayed"
    fleet.links += 1  # all have gone back, and have links again
    monkeypatch.setattr(made, "_decided", lambda *given: Replay(7, {}, 0.0, 0.0))
    assert made.complete(7) == []


def test_a_worker_that_was_being_given_another_state_is_at_no_step() -> None:
    """As when a driver is killed while all go back: the next one must not take the worker for where it was."""
    actor = ReplayingActor()
    executor: Any = SimpleNamespace(reached=Reached(7))
    actor._executor, actor._generation = executor, 3
    assert actor.reached(0) == Reached(7)
    actor._takes(())
    assert actor.reached(0).flows
    assert actor._generation == -1, "which no plan has: it is not taken over where it stands either"
    fresh = ReplayingActor()
    fresh._takes(())
    assert fresh.reached(0) == Reached(), "a spare that joins has the state of the others' step"
