"""A checkpoint that is being written when a run fails still counts, unless its stages cannot complete it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from raypipe.engine.checkpoint import checkpoint_name, find_checkpoint
from raypipe.engine.local import LocalFleet
from raypipe.engine.storage import Place
from raypipe.errors import StageError, StageLostError
from raypipe.runtime.run import checkpoints
from raypipe.runtime.run.blueprint import assemble
from raypipe.runtime.run.journal import Journal
from raypipe.runtime.run.loop import run_loop
from raypipe.runtime.run.requests import Requests
from tests.runtime.run.test_planning import trainer

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("shared_captures")]

SAVED_AT, FAILS_AFTER, WAIT_S = 2, 3, 60.0


class FailsWhileItSaves(LocalFleet):
    """The files of its checkpoint are complete some time after it has failed; those of a hung one never."""

    error: Exception
    writes_s = 0.0

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.failed, self.ended = threading.Event(), threading.Event()

    def run(self, *given: Any, **options: Any) -> Any:
        for done, reports in enumerate(super().run(*given, **options), start=1):
            yield reports
            if done == FAILS_AFTER:
                self.failed.set()
                raise self.error

    def entries(self, folder: str) -> list[dict[str, Any]]:
        assert self.failed.wait(WAIT_S)
        self.ended.wait(self.writes_s)
        return super().entries(folder)


@pytest.fixture
def failing(tmp_path: Path) -> Callable[[Exception, float], tuple[str | None, Path]]:
    """(error, seconds of writing) -> the newest checkpoint that a run leaves which fails with it, and its folder."""

    def fail(error: Exception, writes_s: float) -> tuple[str | None, Path]:
        made = trainer(tmp_path, "run", "noisy", verify="off", checkpoint_interval_steps=SAVED_AT)
        job = made._prepared()
        blueprint = made._blueprint(job, 100, local=True)
        setup = assemble(blueprint, job.planned)
        fleet = FailsWhileItSaves(setup.run, setup.setup, job.tensors)
        fleet.error, fleet.writes_s = error, writes_s
        try:
            with pytest.raises(type(error)):
                run_loop(fleet, blueprint.spec, setup.plan, Journal("run", ""), Requests())
            found = find_checkpoint(Place.of(str(tmp_path / "run")))[0]
        finally:
            fleet.ended.set()
            fleet.stop()
        return None if found is None else found.folder, tmp_path / "run"

    return fail


@pytest.mark.parametrize("error", [StageError("stage 1: the optimizer fails"), StageLostError("Stage 1 died")])
def test_what_is_being_written_when_a_run_fails_is_completed(error: Exception, failing: Any) -> None:
    found, folder = failing(error, 0.3)
    assert found == checkpoint_name(SAVED_AT)
    events = (folder / "events.jsonl").read_text()
    assert events.index('"fail"') < events.index('"checkpoint"')


def test_of_workers_that_are_lost_nobody_waits_for_long(failing: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "LOST_WAIT_S", 0.2)
    found, _ = failing(StageLostError("Stage 1 is silent"), WAIT_S)
    assert found is None
