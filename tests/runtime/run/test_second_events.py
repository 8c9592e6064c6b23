"""What comes while a run is changing its stages, or recovers: a wish to stop, a loss, a node that goes; in threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest

from raypipe.engine.local import LocalFleet
from raypipe.engine.storage import Place
from raypipe.errors import CheckpointError, StageLostError
from raypipe.ir.report import StepRecord, StepReport
from raypipe.report.read import timelines_of
from raypipe.runtime.run.blueprint import assemble
from raypipe.runtime.run.journal import Journal
from raypipe.runtime.run.loop import run_loop
from raypipe.runtime.run.recovery import Recovered
from raypipe.runtime.run.requests import Requests
from tests.runtime.run.test_planning import trainer
from tests.waiting import wait_until

pytestmark = pytest.mark.engine

STEPS, TOLD_AFTER = 24, 11
Does = Callable[[Requests], None]
Entries = Callable[[str], list[dict[str, Any]]]


class Tells(Journal):
    """Does something after some steps."""

    def __init__(self, requests: Requests, after: Mapping[int, Does]) -> None:
        super().__init__("run", "")
        self._requests, self._after = requests, after

    def step(self, record: StepRecord, reports: Sequence[StepReport]) -> None:
        super().step(record, reports)
        if does := self._after.get(record.step + 1):
            does(self._requests)


class Stays:
    """A Recoverer of threads, which stay where they are: what it was asked is noted, and ``during`` comes meanwhile."""

    replanning = groups = replays = None
    failures = 0

    def __init__(self, fleet: LocalFleet, during: Callable[[], None]) -> None:
        self._fleet, self._during = fleet, during
        self.asked: list[str] = []

    def keep_copy(self, step: int) -> None: ...

    def move(self, nodes: Collection[str], step: int) -> Recovered:
        self.asked.append(f"move from {', '.join(nodes)}")
        self._during()
        return self._back(step)

    def recover(self, steps: Collection[int]) -> Recovered:
        self.asked.append("recover")
        return self._back(max(steps))

    lighten = resize = take = recover

    def _back(self, step: int) -> Recovered:
        self._fleet._halted = False  # as when stages are configured anew
        return Recovered(step, "the stages themselves")


class Ran(NamedTuple):
    """What became of a run, and what its Recoverer was asked."""

    step: int
    stopped: str
    asked: list[str]


def leave(requests: Requests) -> None:
    requests.leave({"node"})


def ran(
    folder: Path,
    during: Does = lambda requests: None,
    after: Mapping[int, Does] | None = None,
    entries: Callable[[Requests, Entries, str], list[dict[str, Any]]] | None = None,
) -> Ran:
    """A run of threads that is asked to leave a node.

    Args:
        during: comes while it leaves.
        after: what comes after how many steps, instead of the wish to leave.
        entries: instead of what waits for the stages' parts of a checkpoint, which it is given.
    """
    made = trainer(folder, "run", "noisy", verify="off")
    survives = SimpleNamespace(max_failures=-1)
    made._run = SimpleNamespace(name="run", storage_path=str(folder), failure_config=survives)
    job = made._prepared()
    blueprint = made._blueprint(job, STEPS, local=True)
    setup = assemble(blueprint, job.planned)
    fleet, requests = LocalFleet(setup.run, setup.setup, job.tensors), Requests()
    if entries is not None:
        fleet.entries = partial(entries, requests, fleet.entries)  # type: ignore[method-assign]
    recovery = Stays(fleet, lambda: during(requests))
    told = Tells(requests, {TOLD_AFTER: leave} if after is None else after)
    try:
        found = run_loop(fleet, blueprint.spec, setup.plan, told, requests, recovery=recovery)
    finally:
        fleet.stop()
    return Ran(found.step, found.stopped, recovery.asked)


def test_a_run_stops_that_is_asked_to_while_its_stages_move(tmp_path: Path) -> None:
    """The fleet that was halted for it has been configured anew."""
    found = ran(tmp_path, lambda requests: requests.stop("asked for"))
    assert found.stopped == "asked for"
    assert found.step == TOLD_AFTER


def test_a_node_that_goes_is_left_after_a_failure_while_it_was_left(tmp_path: Path) -> None:
    lost = iter([True, False])

    def during(requests: Requests) -> None:
        if next(lost):
            raise StageLostError("Stage 1 died")

    found = ran(tmp_path, during)
    assert found == (STEPS, "", ["move from node", "recover", "move from node"])


def test_a_checkpoint_that_was_asked_for_is_taken_again_when_stages_are_changed_meanwhile(tmp_path: Path) -> None:
    """Nobody completes the first one: it was that of other workers."""
    folders, moves, again = list[str](), list[str](), threading.Event()

    def entries(requests: Requests, written: Entries, folder: str) -> list[dict[str, Any]]:
        folders.append(folder)
        if len(folders) > 1:
            again.set()
            return written(folder)
        leave(requests)
        assert again.wait(60.0)
        raise CheckpointError("the stages were configured anew meanwhile")

    after: dict[int, Does] = {
        TOLD_AFTER: Requests.checkpoint,
        TOLD_AFTER + 3: lambda requests: wait_until(lambda: requests.wants_change or bool(moves)),
    }
    found = ran(tmp_path, lambda requests: moves.append("moved"), after, entries)
    assert (found.step, found.asked) == (STEPS, ["move from node"])
    steps = [int(folder.rpartition("step_")[2]) for folder in folders]
    assert (steps[0], steps[2:]) == (TOLD_AFTER + 1, [STEPS])
    assert steps[0] < steps[1] <= TOLD_AFTER + 4


def recorded(folder: Path) -> int:
    """Steps in the run's records."""
    return int(pq.read_table(folder / "run" / "metrics.parquet").num_rows)


def test_a_driver_leaves_behind_a_step_and_after_its_stages(tmp_path: Path) -> None:
    """Its records are written by then; where nobody ends it, it goes on."""
    moves, went = list[str](), list[tuple[int, int]]()

    def ask(requests: Requests) -> None:
        requests.hand_over(lambda: went.append((len(moves), recorded(tmp_path))))
        leave(requests)

    found = ran(tmp_path, lambda requests: moves.append("moved"), {TOLD_AFTER: ask})
    assert found.step == STEPS
    assert went == [(1, TOLD_AFTER + 1)]


def test_a_driver_that_is_to_stop_goes_nowhere(tmp_path: Path) -> None:
    went: list[str] = []

    def ask(requests: Requests) -> None:
        requests.stop("asked for")
        requests.hand_over(lambda: went.append("gone"))

    found = ran(tmp_path, after={TOLD_AFTER: ask})
    assert (found.stopped, went) == ("asked for", [])


def traced(folder: Path) -> set[int]:
    """Micro-batches, counted over the run, of which its folder has what was measured action by action."""
    found = [one for one in timelines_of(Place.of(folder / "run")) if one.source == "measured"]
    return {span.action.microbatch for one in found for span in one.spans}


def test_the_timeline_is_of_the_workers_and_the_cut_that_there_are_at_the_end(tmp_path: Path) -> None:
    """What a lost worker noted is lost with it, and the others' steps were of another plan."""
    late = STEPS - 6
    for name, moves in (("alone", {}), ("early", {4: leave}), ("late", {late: leave})):
        assert ran(tmp_path / name, after=moves).asked == ["move from node"] * len(moves)
    assert traced(tmp_path / "alone") == traced(tmp_path / "early"), "of the middle of the run"
    assert min(traced(tmp_path / "late")) > max(traced(tmp_path / "alone")), "done again after the move"
    found = ran(tmp_path / "stopped", lambda requests: requests.stop("asked for"), {late: leave})
    assert (found.step, traced(tmp_path / "stopped")) == (late, set())
