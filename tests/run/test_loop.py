"""The loop in threads: what happens while a run changes its stages, recovers, is stopped, fails or ends."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest

from raypipe.engine.io.checkpoint import checkpoint_name, find_checkpoint
from raypipe.engine.io.storage import Place
from raypipe.engine.local import LocalFleet
from raypipe.errors import CheckpointError, StageError, StageLostError
from raypipe.ir.report import Reports
from raypipe.ir.segment import Order
from raypipe.planner.segments import Position
from raypipe.report.run_facts import timelines_of
from raypipe.run import checkpoints
from raypipe.run.journal import Journal
from raypipe.run.loop import LoopSetup, run_loop
from raypipe.run.plans.blueprint import assemble
from raypipe.run.requests import Requests
from raypipe.run.transitions import Change, Move, Recovered
from tests.exactness import unequal
from tests.run.loops import Acts, Transitions, looped
from tests.run.plans.test_planning import trainer
from tests.run.test_calls import Listens
from tests.run.test_lost_between_steps import Losing
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("shared_captures")]

STEPS, ACTS_AFTER, SAVES_EVERY = 24, 11, 4
Act = Callable[[Requests], object]
Entries = Callable[[str], list[dict[str, Any]]]


class Stays(Transitions):
    """Transitions of threads, which stay the same; the calls are recorded, and ``during`` is called in each move."""

    def __init__(self, fleet: LocalFleet, during: Callable[[], object]) -> None:
        self._fleet, self._during = fleet, during
        self.changes: list[str] = []

    def carry_out(self, change: Change, step: int) -> Recovered:
        assert isinstance(change, Move)
        self.changes.append(f"move from {', '.join(change.nodes)}")
        self._during()
        return self._made(step)

    def roll_back(self, steps: Collection[int]) -> Recovered:
        self.changes.append("recover")
        return self._made(max(steps))

    def _made(self, step: int) -> Recovered:
        self._fleet._halted = False  # as when stages are configured anew
        return Recovered(step, "the stages themselves")


class Ran(NamedTuple):
    """End of a run, and its transitions."""

    step: int
    stopped: str
    changes: list[str]


def leave(requests: Requests) -> None:
    requests.leave({"node"})


def ran(
    folder: Path,
    during: Act = lambda requests: None,
    after: Mapping[int, Act] | None = None,
    entries: Callable[[Requests, Entries, str], list[dict[str, Any]]] | None = None,
) -> Ran:
    """Train with a node that is about to be removed.

    Args:
        during: called while the stages move.
        after: called after so many steps, instead of the request to leave the node.
        entries: replaces the fleet's method, which it receives.
    """
    requests, made = Requests(), list[Stays]()

    def recovery(fleet: LocalFleet) -> Stays:
        if entries is not None:
            fleet.entries = partial(entries, requests, fleet.entries)  # type: ignore[method-assign]
        made.append(Stays(fleet, lambda: during(requests)))
        return made[0]

    journal = Acts(requests, {ACTS_AFTER: leave} if after is None else after)
    run = trainer(folder, "run", "noisy", verify="off")
    outcome = looped(run, STEPS, recovery=recovery, journal=journal, requests=requests)
    return Ran(outcome.step, outcome.stopped, made[0].changes)


def recorded(folder: Path) -> int:
    """Count the steps in the run's records."""
    return int(pq.read_table(folder / "run" / "metrics.parquet").num_rows)


def test_a_run_that_is_stopped_while_its_stages_move_stops(tmp_path: Path) -> None:
    """The fleet that was halted for it has been configured anew."""
    assert ran(tmp_path, lambda requests: requests.stop("enough")) == (ACTS_AFTER, "enough", ["move from node"])


def test_a_node_is_left_again_after_a_failure_during_the_move(tmp_path: Path) -> None:
    lost = iter([True, False])

    def during(requests: Requests) -> None:
        if next(lost):
            raise StageLostError("Stage 1 died")

    assert ran(tmp_path, during) == (STEPS, "", ["move from node", "recover", "move from node"])


def test_a_requested_checkpoint_is_saved_again_if_stages_change_meanwhile(tmp_path: Path) -> None:
    """The first one is never completed: it was that of other workers."""
    folders, moves, again = list[str](), list[str](), threading.Event()

    def entries(requests: Requests, written: Entries, folder: str) -> list[dict[str, Any]]:
        folders.append(folder)
        if len(folders) > 1:
            again.set()
            return written(folder)
        leave(requests)
        assert again.wait(60.0)
        raise CheckpointError("the stages were configured anew meanwhile")

    after: dict[int, Act] = {
        ACTS_AFTER: Requests.checkpoint,
        ACTS_AFTER + 3: lambda requests: wait_until(lambda: requests.wants_change or bool(moves)),
    }
    run = ran(tmp_path, lambda requests: moves.append("moved"), after, entries)
    assert (run.step, run.changes) == (STEPS, ["move from node"])
    steps = [int(folder.rpartition("step_")[2]) for folder in folders]
    assert (steps[0], steps[2:]) == (ACTS_AFTER + 1, [STEPS])
    assert steps[0] < steps[1] <= ACTS_AFTER + 4


@pytest.mark.parametrize("stops", [False, True])
def test_a_driver_hands_over_after_its_stages_moved_and_never_if_it_is_to_stop(stops: bool, tmp_path: Path) -> None:
    """Its records are written by then."""
    moves, went = list[str](), list[tuple[int, int]]()

    def act(requests: Requests) -> None:
        if stops:
            requests.stop("enough")
        requests.hand_over(lambda: went.append((len(moves), recorded(tmp_path))))
        if not stops:
            leave(requests)

    run = ran(tmp_path, lambda requests: moves.append("moved"), {ACTS_AFTER: act})
    if stops:
        assert (run.stopped, went) == ("enough", [])
    else:
        assert (run.step, went) == (STEPS, [(1, ACTS_AFTER + 1)])


def traced(folder: Path) -> set[int]:
    """Return the micro-batches, counted over the run, of the measured timeline in its folder."""
    lines = [line for line in timelines_of(Place.of(folder / "run")) if line.source == "measured"]
    return {span.action.microbatch for line in lines for span in line.spans}


def test_the_timeline_is_of_the_last_workers_and_partition(tmp_path: Path) -> None:
    late = STEPS - 6
    for name, moves in (("alone", {}), ("early", {4: leave}), ("late", {late: leave})):
        assert ran(tmp_path / name, after=moves).changes == ["move from node"] * len(moves)
    assert traced(tmp_path / "alone") == traced(tmp_path / "early"), "of the middle of the run"
    assert min(traced(tmp_path / "late")) > max(traced(tmp_path / "alone")), "traced again after the move"
    run = ran(tmp_path / "stopped", lambda requests: requests.stop("enough"), {late: leave})
    assert (run.step, traced(tmp_path / "stopped")) == (late, set())


class NothingThere(Transitions):
    """Transitions that find no stage on a node that is about to be removed."""

    def __init__(self, fleet: LocalFleet, moves: list[int]) -> None:
        self._fleet, self._moves = fleet, moves

    def carry_out(self, change: Change, step: int) -> None:
        assert isinstance(change, Move)
        assert set(change.nodes) == {"node"}
        self._moves.append(step)
        self._fleet._halted = False


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_node_is_left_between_steps_and_no_bit_changes(schedule: str, tmp_path: Path) -> None:
    """An asynchronous run leaves it at step 40, after which all stages keep a copy and drain for it."""
    steps, moves, requests = 50, list[int](), Requests()
    journal = Acts(requests, {23: leave})
    made = trainer(tmp_path, "run", "noisy", schedule=schedule, verify="off")
    looped(made, steps, recovery=lambda fleet: NothingThere(fleet, moves), journal=journal, requests=requests)
    (step,) = moves
    assert step in ([40] if schedule == "2bw" else range(23, 31))
    alone = Journal("run", "")
    made = trainer(tmp_path, "alone", "noisy", schedule=schedule, verify="off")
    looped(made, steps, recovery=lambda fleet: Stays(fleet, lambda: None), journal=alone)
    records, expected = (
        [(record.step, record.loss, record.grad_norm) for record in found.news(0, 0.0).records]
        for found in (journal, alone)
    )
    assert records == expected


class Followed(LocalFleet):
    """Fleet whose last worker ends a step of an asynchronous schedule after the first one has begun the next step."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.followed: list[bool] = []
        begun = [threading.Event() for _ in range(STEPS)]
        first, last = self.executors[0].run, self.executors[-1].run

        def begin(order: Order, *row: Any, **alone: Any) -> Reports:
            begun[order.segment.first_step].set()
            return first(order, *row, **alone)

        def end(order: Order, *row: Any, **alone: Any) -> Reports:
            reports = last(order, *row, **alone)
            if not order.segment.phase.ends_empty:
                self.followed.append(begun[order.segment.first_step + 1].wait(timeout=60))
            return reports

        self.executors[0].run, self.executors[-1].run = begin, end  # type: ignore[method-assign]


def test_a_worker_begins_an_asynchronous_step_while_others_are_in_the_one_before(tmp_path: Path) -> None:
    fleets = list[Followed]()

    def fleet(*given: Any) -> Followed:
        fleets.append(Followed(*given))
        return fleets[0]

    looped(trainer(tmp_path, "run", "noisy", schedule="2bw", verify="off"), STEPS, fleet)
    assert fleets[0].followed
    assert all(fleets[0].followed)


class Lost(LocalFleet):
    """Fleet whose workers are lost after some steps, and cannot be used any more."""

    lost = False

    def run(self, *arguments: Any, **options: Any) -> Iterator[Any]:
        assert not self.lost
        for done, reports in enumerate(super().run(*arguments, **options), start=1):
            yield reports
            if done == SAVES_EVERY + 1:
                self.lost = True
                raise StageLostError("Stage 1 died")

    def spans(self) -> list[Any]:
        return []

    def save(self, folder: str) -> None:
        assert not self.lost
        super().save(folder)


class Waits(Transitions):
    """Rollback that waits for workers until the run is stopped."""

    def __init__(self, place: Place, requests: Requests) -> None:
        self._place, self._requests = place, requests

    def roll_back(self, steps: Any) -> Recovered:
        wait_until(lambda: find_checkpoint(self._place)[0] is not None, 60.0)
        self._requests.stop("enough")
        newest = find_checkpoint(self._place)[0]
        assert newest is not None
        return Recovered(newest.manifest.step, newest.folder, Position(**newest.manifest.position), stopped=True)


def test_a_run_that_is_stopped_while_it_waits_for_workers_ends_at_its_newest_checkpoint(tmp_path: Path) -> None:
    requests, place = Requests(), Place.of(tmp_path / "run")
    made = trainer(tmp_path, "run", "noisy", verify="off", checkpoint_interval_steps=SAVES_EVERY)
    outcome = looped(made, 100, Lost, recovery=lambda fleet: Waits(place, requests), requests=requests)
    assert (outcome.step, outcome.stopped) == (SAVES_EVERY, "enough")
    assert outcome.checkpoint.endswith(checkpoint_name(SAVES_EVERY))
    assert '"fail"' not in (tmp_path / "run" / "events.jsonl").read_text()


class FailsWhileItSaves(LocalFleet):
    """Fleet that fails while a checkpoint is written, whose files are complete some time after that."""

    error: Exception
    writes_s = 0.0

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.failed, self.ended = threading.Event(), threading.Event()

    def run(self, *arguments: Any, **options: Any) -> Any:
        for done, reports in enumerate(super().run(*arguments, **options), start=1):
            yield reports
            if done == SAVES_EVERY + 1:
                self.failed.set()
                raise self.error

    def entries(self, folder: str) -> list[dict[str, Any]]:
        assert self.failed.wait(60.0)
        self.ended.wait(self.writes_s)
        return super().entries(folder)


@pytest.mark.parametrize(
    ("error", "writes_s"),
    [(StageError("the optimizer fails"), 0.3), (StageLostError("died"), 0.3), (StageLostError("silent"), 60.0)],
)
def test_a_checkpoint_that_is_being_written_when_a_run_fails_is_completed_unless_its_stages_hang(
    error: Exception, writes_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, fleets = writes_s > 1.0, list[FailsWhileItSaves]()
    if hangs:
        monkeypatch.setattr(checkpoints, "LOST_WAIT_S", 0.2)

    def made(*arguments: Any) -> FailsWhileItSaves:
        fleets.append(FailsWhileItSaves(*arguments))
        fleets[0].error, fleets[0].writes_s = error, writes_s
        return fleets[0]

    try:
        with pytest.raises(type(error)):
            looped(trainer(tmp_path, "run", "noisy", verify="off", checkpoint_interval_steps=SAVES_EVERY), 100, made)
        newest = find_checkpoint(Place.of(tmp_path / "run"))[0]
    finally:
        fleets[0].ended.set()
    # Stages that live save the last completed step too, in which this fleet has failed after its end.
    last = SAVES_EVERY if isinstance(error, StageLostError) else SAVES_EVERY + 1
    assert (None if newest is None else newest.folder) == (None if hangs else checkpoint_name(last))
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert hangs or events.index('"fail"') < events.index('"checkpoint"')


class Killed(BaseException):
    """The driver's process ends."""


def kill(requests: Requests) -> None:
    raise Killed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "pipeline", "why"),
    [
        ("noisy", {}, ""),
        ("buffers", {"num_stages": 3, "on_nonfinite": "skip"}, "and 1 of 2 workers with it"),
        ("noisy", {"schedule": "2bw", "verify": "off"}, "and 1 of 2 workers with it"),
    ],
)
def test_a_loop_adopts_the_stages_of_another_driver_and_no_bit_changes(
    name: str, pipeline: dict[str, Any], why: str, tmp_path: Path
) -> None:
    """All roll back, here to a checkpoint; only stages that were lost count as a failure."""
    steps, pipeline = 14, {"checkpoint_interval_steps": 3, **pipeline}  # at which an asynchronous schedule drains
    made = trainer(tmp_path, "run", name, **pipeline)
    job = made._prepared()
    blueprint = made._blueprint(job, steps, local=True)
    assembled, spec = assemble(blueprint, job.planned), replace(blueprint.spec, max_failures=1)
    fleet = Losing((blueprint.setup, assembled.setup, job.tensors), spec.place, "", back=True)
    lost = StageLostError(f"the driver was lost, {why}") if why else StageError("the driver was lost")
    requests, journal = Requests(), Journal("run", "")
    try:
        with pytest.raises(Killed):
            run_loop(LoopSetup(fleet, spec, assembled, Acts(requests, {9: kill}), requests))  # type: ignore[arg-type]
        run_loop(LoopSetup(fleet, spec, assembled, journal, Requests(), recovery=fleet, lost=lost))  # type: ignore[arg-type]
    finally:
        fleet.stop()
    assert fleet.failures == (1 if why else 0)
    alone = trainer(tmp_path, "alone", name, **pipeline).fit(steps, local=True, progress=False)
    rows = pq.read_table(tmp_path / "run" / "metrics.parquet").to_pylist()
    assert [(row["step"], row["loss"]) for row in rows] == [(r.step, r.loss) for r in alone.records]
    assert [record.step for record in journal.news(0, 0.0).records] == list(range(steps))
    assert unequal(tmp_path / "run", alone.checkpoint) == []


class FailsToEnd(Requests):
    """Requests that cannot be closed."""

    def end(self) -> None:
        super().end()
        raise OSError("not closed")


def test_callbacks_receive_the_end_although_another_part_fails_to_end(tmp_path: Path) -> None:
    listens = Listens()
    made = trainer(tmp_path, "run", "noisy")
    made._callbacks = (listens,)
    with pytest.raises(OSError, match="not closed"):
        looped(made, 2, requests=FailsToEnd())
    assert listens.told[-1] == ("end", 2, "")


class LostAtTheEnd(LocalFleet):
    """Fleet that loses a stage after its last step and the checkpoint of it."""

    def spans(self) -> Any:
        raise StageLostError("Stage 1 died")


def test_a_run_whose_steps_are_done_ends_well_although_a_stage_is_lost_then(tmp_path: Path) -> None:
    journal = Journal("run", "")
    outcome = looped(trainer(tmp_path, "run", "noisy", verify="off"), STEPS, LostAtTheEnd, journal=journal)
    assert (outcome.step, outcome.stopped) == (STEPS, "")
    assert find_checkpoint(Place.of(tmp_path / "run"))[0] is not None
    assert [(alert.kind, alert.last_step) for alert in journal.alerts] == [("timeline", STEPS)]
    assert "Stage 1 died" in journal.alerts[0].message
