"""Members of a run: requests, waits, spares and losses, with places of this process."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from raypipe.config.ray import WorkerRange
from raypipe.engine.worker_progress import WorkerProgress
from raypipe.errors import LeaseError, PlanError, StageLostError
from raypipe.ir.schedule import Action, Op
from raypipe.ir.timeline import Span, Timeline
from raypipe.planner.state_sources import Layout, Transition
from raypipe.run.requests import Requests, Resize
from raypipe.runtime.fleet import growth, roster
from raypipe.runtime.fleet.fleet import Fleet
from raypipe.runtime.fleet.growth import Growth, Spares
from raypipe.runtime.fleet.recovery import Recovery
from raypipe.runtime.fleet.roster import Member, Roster, Terms
from raypipe.runtime.fleet.waiting import Waiting
from raypipe.runtime.nodes.preemption import DrainWatch, Notice, NoticeKind
from raypipe.runtime.worker.orders import Fence
from raypipe.runtime.worker.worker import _StageActor
from tests.waiting import wait_until

pytestmark = pytest.mark.ray


def planned(workers: int) -> Any:
    raise AssertionError("a run that has not begun needs no other plan")


def growth_on(
    places: Any, requests: Requests, told: list[tuple[str, str]], check: Callable[[], None] = lambda: None
) -> Growth:
    """Of a run of 2 to 4 workers whose plan for the most of them uses all."""
    in_use = getattr(places, "members", [])
    fleet: Any = SimpleNamespace(places=places, in_use=in_use, recovering=False, rehearse_spares=lambda: None)
    event = lambda decision, reason, **numbers: told.append((decision, reason))  # noqa: E731
    waiting = Waiting(fleet, requests, lambda line: None, event, None, check)
    return Growth(fleet, WorkerRange(2, 4, 0.0), 4, requests, waiting, event, survives=False)


class Places(Roster):
    """All places come at once, and processes start when ``go`` is set; ``asked`` are the numbers of all places."""

    def __init__(self, count: int) -> None:
        self.go, self.begun, self.asked = threading.Event(), threading.Event(), list[int]()
        self.go.set()
        super().__init__(count, Terms({"CPU": 1}))
        self.go.clear()
        self.begun.clear()

    def _request(self, count: int) -> dict[int, Any]:
        numbers = range(self._started, self._started + max(0, count))
        self._started += len(numbers)
        self.asked += numbers
        return dict.fromkeys(numbers)

    def _start(self, places: Mapping[int, Any]) -> list[Member]:
        self.begun.set()
        assert self.go.wait(60)
        return [Member(number=number, facts={"node": f"node {number}"}) for number in places]


@pytest.fixture
def all_come(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every place that is asked for is there."""
    monkeypatch.setattr("raypipe.runtime.fleet.roster.created", dict)
    monkeypatch.setattr("raypipe.runtime.fleet.waiting.created", dict)
    monkeypatch.setattr("raypipe.runtime.fleet.roster.wait_for", lambda *given: None)
    monkeypatch.setattr("raypipe.runtime.fleet.roster.release", lambda places: None)


def test_workers_that_are_starting_are_not_asked_for_again(all_come: None) -> None:
    places = Places(1)
    places.ask_for(2)
    starting = threading.Thread(target=places.start_granted)
    starting.start()
    assert places.begun.wait(60)
    places.ask_for(2)
    assert (places.starting, places.living, places.waiting) == (1, 1, {})
    growing = threading.Thread(target=places.grow, args=(2,))
    growing.start()
    places.go.set()
    starting.join(60)
    growing.join(60)
    assert (places.starting, places.living, places.asked) == (0, 2, [0, 1])


@pytest.mark.usefixtures("all_come", "often")
@pytest.mark.parametrize(("seconds_left", "leaves"), [(60.0, {"node 1"}), (None, {"node 1"}), (-1.0, set())])
def test_others_are_asked_for_in_place_of_those_that_are_about_to_go(
    seconds_left: float | None, leaves: set[str]
) -> None:
    """And once they are there the node is left again, for a move may have been refused for want of them."""
    places, requests = Places(4), Requests()
    places.go.set()
    growth = growth_on(places, requests, [])
    starting: Any = SimpleNamespace(state="starting")
    going = {"node 1": None if seconds_left is None else time.time() + seconds_left, "node 7": None}
    growth.serve(planned, 0.0, lambda: starting, lambda: going)
    wait_until(lambda: places.living == 5, 60.0)
    if leaves:
        wait_until(lambda: requests.wants_change, 60.0)
    growth.close()
    assert requests.take_leaving() == leaves
    assert places.asked == [0, 1, 2, 3, 4]


class Fails:
    """Raises these errors, one a call, and then an answer is given for ever."""

    def __init__(self, errors: list[Exception], answer: Any) -> None:
        self._errors, self._answer, self.went_on = errors, answer, threading.Event()

    def __call__(self, *given: Any) -> Any:
        if self._errors:
            raise self._errors.pop(0)
        self.went_on.set()
        return self._answer


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads look many times a second."""
    for name in ("growth.EVERY_S", "growth.AGAIN_S", "waiting.POLL_S", "waiting.SETTLE_S"):
        monkeypatch.setattr(f"raypipe.runtime.fleet.{name}", 0.01)
    monkeypatch.setattr("raypipe.runtime.nodes.preemption.DRAINS_EVERY_S", 0.01)


@pytest.mark.usefixtures("often")
def test_growth_goes_on_after_an_error_that_nobody_expects() -> None:
    told: list[tuple[str, str]] = []
    asks = Fails([KeyError("state"), KeyError("state"), ConnectionError("away")], None)
    growth = growth_on(SimpleNamespace(ask_for=asks, staying=dict.fromkeys, start_granted=lambda: 0), Requests(), told)
    starting: Any = SimpleNamespace(state="starting")
    growth.serve(planned, 0.0, lambda: starting, dict)
    try:
        assert asks.went_on.wait(60)
    finally:
        growth.close()
    assert [reason for _, reason in told] == ["The run could not grow: 'state'", "The run could not grow: away"]


@pytest.mark.usefixtures("often", "all_come")
def test_a_wait_for_workers_outlasts_the_head_of_ray() -> None:
    asks = Fails([ConnectionError("away"), RuntimeError("away")], None)
    places = SimpleNamespace(ask_for=asks, living=4, starting=0, waiting={}, start_granted=lambda: 0)
    assert growth_on(places, Requests(), []).wait() == 4


@pytest.mark.usefixtures("often")
def test_nodes_are_watched_after_an_error_that_nobody_expects() -> None:
    told, notice = [], Notice(NoticeKind.PAUSES, None, "somebody: soon")
    announced = Fails([KeyError("node"), KeyError("node")], {"node": [notice]})
    watch = DrainWatch(lambda: {"node"}, announced, lambda nodes: None, lambda *of, **numbers: told.append(of))
    try:
        wait_until(lambda: ("notice", "somebody: soon: the machine pauses") in told, 60.0)
    finally:
        watch.close()
    assert [decision for decision, reason in told if "KeyError" in reason] == ["warning"]


@pytest.mark.usefixtures("often", "all_come")
def test_who_lost_the_run_does_not_wait_for_workers_any_more() -> None:
    places = SimpleNamespace(ask_for=lambda count, going: None, living=0, starting=0, waiting={}, needs={})
    growth = growth_on(places, Requests(), [], Fails([LeaseError("taken over")], None))
    with pytest.raises(LeaseError):
        growth.wait()


def test_who_is_lost_while_others_are_forgotten_is_ended_the_next_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its place is given back then; it was kept for ever."""
    members = [Member(number=number, lost=number == 0) for number in range(3)]
    ended: list[int] = []

    def end(member: Member) -> None:
        ended.append(member.number)
        members[2].lost = True  # as the watch does, whenever it notices

    monkeypatch.setattr(roster, "end_member", end)
    terms = Terms({"CPU": 1})
    made = Roster(0, terms, members)
    made.drop_lost()
    assert (ended, [member.number for member in made.members]) == ([0], [1, 2])
    made.drop_lost()
    assert (ended, [member.number for member in made.members]) == ([0, 2], [1])


class Recovers:
    """A fleet of one worker that waits for its replacement, which is no affair of the thread that starts spares."""

    def __init__(self) -> None:
        self.places, self.spares, self.looks, self.rehearsed = self, list[int](), 0, False
        self.living, self.closed, self.waits = 1, False, True

    @property
    def recovering(self) -> bool:
        self.looks += 1
        return self.waits

    def ask_for(self, count: int) -> None:
        assert not self.waits

    def start_granted(self) -> int:
        assert not self.waits
        self.living += 1
        return 1

    def rehearse_spares(self) -> None:
        self.rehearsed = True


def test_a_spare_is_started_once_the_run_trains_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The imports of its process took the core that the replacement needed."""
    monkeypatch.setattr(growth, "POLL_S", 0.01)
    fleet, told = Recovers(), list[str]()
    made = Spares(fleet, 2, lambda decision, reason: told.append(decision))  # type: ignore[arg-type]
    made.refill()
    wait_until(lambda: fleet.looks >= 3)
    assert (fleet.living, told) == (1, [])
    fleet.waits = False
    wait_until(lambda: told == ["spare"])
    assert (fleet.living, fleet.rehearsed) == (2, True)


def test_a_worker_that_was_being_given_another_state_is_at_no_step() -> None:
    """As when a driver is killed while all go back: the next one must not take the worker for where it was."""
    actor = object.__new__(_StageActor)
    actor._fence = Fence()
    executor: Any = SimpleNamespace(progress=WorkerProgress(7))
    actor._executor, actor._generation = executor, 3
    assert actor.reached(0) == WorkerProgress(7)
    actor._begin_load(())
    assert actor.reached(0).overlapping
    assert actor._generation == -1, "which no plan has: it is not taken over where it stands either"
    fresh = object.__new__(_StageActor)
    fresh._fence, fresh._executor = Fence(), None
    fresh._begin_load(())
    assert fresh.reached(0) == WorkerProgress(), "a spare that joins has the state of the others' step"


class Counted:
    """A fleet of so many workers, of which some are lost; the others are all at one step."""

    def __init__(self, workers: int, lost: frozenset[int]) -> None:
        self.in_use, self.lost = [None] * workers, lost
        self.facts, self.moved_bytes = (), 0

    def settle(self) -> None:
        """All have ended their work."""

    def reached(self) -> list[WorkerProgress]:
        return [WorkerProgress(7) for worker in range(len(self.in_use)) if worker not in self.lost]

    def come_to(self, step: int, totals: Any) -> dict[int, Any]:
        return {}

    def undelivered_reports(self, count: int, last: Any) -> list[Any]:
        return [[] for _ in range(count)]

    def copies(self) -> list[Any]:
        return []

    def replace_lost(self, count: int) -> tuple[str, ...]:
        return ()


def recovery_of(fleet: Any) -> Recovery:
    """Of a run whose plan in force has two stages with two workers each."""
    recovery = object.__new__(Recovery)
    setup = SimpleNamespace(homes=((0, 1), (2, 3)), num_workers=4, lanes=2)
    wiring = SimpleNamespace(norm_per_stage=False)
    plan = SimpleNamespace(schedule=SimpleNamespace(wiring=wiring))
    made = SimpleNamespace(setup=setup, flow=None, predicted=None, plan=plan)
    recovery._fleet, recovery._shards, recovery._plans = fleet, False, SimpleNamespace(made=made)  # type: ignore[assignment]
    return recovery


@pytest.mark.parametrize(("workers", "lost"), [(3, {2}), (3, {0}), (3, {1}), (5, {4}), (5, {0})])
def test_workers_with_the_numbers_of_another_plan_all_go_back(workers: int, lost: set[int]) -> None:
    """A regrouping that failed has numbered them anew: worker 2 is the second one of stage 1, and not the first."""
    assert recovery_of(Counted(4, frozenset({2}))).catch_up(7) == []
    assert recovery_of(Counted(workers, frozenset(lost))).catch_up(7) is None


def test_the_longest_action_is_that_of_the_plan_in_force() -> None:
    """As after a resize from many stages to one, whose worker would count as slow or stuck."""
    fleet, watch = object.__new__(Fleet), SimpleNamespace(planned_s=0.0)
    fleet.watch, fleet.configure = watch, lambda *given: None  # type: ignore[assignment, method-assign]
    recovery = recovery_of(fleet)
    recovery._blueprint = SimpleNamespace(setup=None)  # type: ignore[assignment]
    for ends_s, expected_s in (((0.0, 1.0, 3.0), 2.0), ((0.0, 8.0), 8.0), (None, 8.0), ((0.0, 0.5), 0.5)):
        spans = tuple(Span(0, Action(0, Op.F, 0), a, b) for a, b in itertools.pairwise(ends_s or ()))
        predicted = None if ends_s is None else Timeline(spans, "simulated")
        made: Any = SimpleNamespace(setup=None, predicted=predicted)
        recovery._apply(made, Transition(Layout(0, ()), (), {}, None), ())
        assert (recovery._plans.made, watch.planned_s) == (made, expected_s)


def test_a_plan_whose_change_failed_after_the_workers_had_it_is_reported_by_the_next_recovery() -> None:
    """Another worker dies before the charter is stored: the loop would order steps of the plan before."""
    fleet = Counted(4, frozenset())
    recovery = recovery_of(fleet)
    before: Any = recovery._plans.made
    recovery._reported, recovery._lighter, recovery._growth = before, None, None
    recovery._spares = SimpleNamespace(refill=lambda: None)  # type: ignore[assignment]

    def restored(made: Any, copies: Any) -> tuple[int, str, None]:
        recovery._plans.made = made
        return 5, "copies in memory", None

    charters = iter([None, StageLostError("Stage 0 died"), None, None])

    def stored(made: Any) -> None:
        if (error := next(charters)) is not None:
            raise error

    recovery._restore, recovery._keep_charter = restored, stored  # type: ignore[method-assign]
    assert recovery.roll_back(()).plan is None
    lighter: Any = SimpleNamespace(**vars(before))
    recovery._lighter = lighter
    with pytest.raises(StageLostError):
        recovery.roll_back(())
    assert recovery.roll_back(()).plan is lighter
    assert recovery.roll_back(()).plan is None, "it is told once"


def test_a_withdrawn_resize_is_refused_and_the_halted_fleet_goes_on() -> None:
    fleet, went_on = Counted(4, frozenset()), list[int]()
    fleet.accept_orders = lambda: went_on.append(1)  # type: ignore[attr-defined]
    resize = Resize(3)
    resize.withdrawn = "its caller waits no longer"
    with pytest.raises(PlanError, match="its caller waits no longer"):
        recovery_of(fleet).carry_out(resize, 7)
    assert went_on == [1]
