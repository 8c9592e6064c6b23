"""A run that is stopped while its recovery waits for workers ends as one that was stopped, at its newest checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raypipe.engine.checkpoint import find_checkpoint
from raypipe.engine.local import LocalFleet
from raypipe.engine.storage import Place
from raypipe.errors import StageLostError
from raypipe.planner.segments import Position
from raypipe.runtime.run.blueprint import assemble
from raypipe.runtime.run.journal import Journal
from raypipe.runtime.run.loop import run_loop
from raypipe.runtime.run.recovery import Recovered
from raypipe.runtime.run.requests import Requests
from tests.runtime.run.test_planning import trainer
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("shared_captures")]

LOST_AFTER, SAVES_EVERY = 5, 4


class Lost(LocalFleet):
    """Its workers are lost after some steps: nothing can be asked of them any more."""

    lost = False

    def run(self, *given: Any, **options: Any) -> Iterator[Any]:
        assert not self.lost
        for done, reports in enumerate(super().run(*given, **options), start=1):
            yield reports
            if done == LOST_AFTER:
                self.lost = True
                raise StageLostError("Stage 1 died")

    def spans(self) -> list[Any]:
        return []  # of no workers

    def save(self, folder: str) -> None:
        assert not self.lost
        super().save(folder)


class Waits:
    """A Recoverer that waits for workers until the run is stopped."""

    replanning = groups = replays = None
    failures = 0

    def __init__(self, place: Place, requests: Requests) -> None:
        self._place, self._requests, self.lost = place, requests, False

    def keep_copy(self, step: int) -> None:
        assert not self.lost

    def recover(self, steps: Any) -> Recovered:
        self.lost = True
        wait_until(lambda: find_checkpoint(self._place)[0] is not None, 60.0)
        self._requests.stop("enough")
        newest = find_checkpoint(self._place)[0]
        assert newest is not None
        return Recovered(newest.manifest.step, newest.folder, Position(**newest.manifest.position), stopped=True)

    def lighten(self, *given: Any) -> Any:
        raise AssertionError("nothing else is asked for")

    resize = move = take = lighten


def test_a_run_that_is_stopped_while_it_waits_for_workers_has_its_newest_checkpoint(tmp_path: Path) -> None:
    made = trainer(tmp_path, "run", "noisy", verify="off", checkpoint_interval_steps=SAVES_EVERY)
    survives = SimpleNamespace(max_failures=-1)
    made._run = SimpleNamespace(name="run", storage_path=str(tmp_path), failure_config=survives)
    job = made._prepared()
    blueprint = made._blueprint(job, 100, local=True)
    setup = assemble(blueprint, job.planned)
    fleet, requests = Lost(setup.run, setup.setup, job.tensors), Requests()
    waits = Waits(blueprint.spec.place, requests)
    try:
        found = run_loop(fleet, blueprint.spec, setup.plan, Journal("run", ""), requests, recovery=waits)
    finally:
        fleet.stop()
    assert (found.step, found.stopped) == (SAVES_EVERY, "enough")
    assert found.checkpoint.endswith(f"step_{SAVES_EVERY:07d}")
    assert '"fail"' not in (tmp_path / "run" / "events.jsonl").read_text()
