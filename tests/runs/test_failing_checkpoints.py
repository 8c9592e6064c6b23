"""Checkpoints and callbacks that fail are alerts, which no quick step takes back; what failed leaves no files."""

from __future__ import annotations

import contextlib
import io
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import Dataset
from typer.testing import CliRunner

from raypipe import Callback, Result, load_state_dict
from raypipe.api.handle import RunHandle
from raypipe.cli import app
from raypipe.engine.io.storage import Place, PlaceError
from raypipe.engine.local import LocalFleet
from raypipe.errors import CheckpointError, DataError, StageError
from raypipe.ir.report import StepRecord
from raypipe.progress import RunProgress
from raypipe.report.page import report_html
from raypipe.report.run_facts import read_run
from raypipe.run.checkpoints import Checkpoints
from raypipe.run.journal import Journal
from raypipe.run.reporting import Reporter
from raypipe.run.spec import CheckpointPolicy
from raypipe.run.status import Alert
from tests.exactness import same_bits
from tests.run.loops import looped
from tests.run.plans.test_planning import trainer
from tests.trainers import adamw, trainer_of
from tests.waiting import wait_until

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("shared_captures")]


def alerts(handle: RunHandle) -> dict[str, Alert]:
    return {alert.kind: alert for alert in handle.status().alerts}


class Fails(Callback):
    def on_step(self, record: StepRecord) -> None:
        raise ValueError(f"step {record.step} is not liked")


def test_a_place_that_is_blocked_is_told_and_so_is_its_coming_back(tmp_path: Path) -> None:
    handle = trainer(tmp_path, "run", "mlp", 0.02, checkpoint_interval_steps=8).start(10**6, local=True)
    wait_until(lambda: handle.status().step > 0)
    blocked = tmp_path / "run" / "checkpoints"
    blocked.write_text("no folder")
    wait_until(lambda: "after 16 steps" in handle.status().checkpoint_error)
    told = alerts(handle)["checkpoint failed"]
    assert (told.first_step, told.in_a_row) == (8, told.count)
    assert "The checkpoint after " in told.message
    assert told.message.endswith("Training goes on.")
    with pytest.raises(CheckpointError, match=r"The checkpoint after \d+ steps was not saved: "):
        handle.checkpoint(timeout_s=60.0)
    blocked.unlink()
    wait_until(lambda: "checkpoints again" in alerts(handle))
    assert handle.status().checkpoint_error == ""
    assert handle.checkpoint(timeout_s=60.0)
    handle.stop()
    result = handle.wait(timeout_s=60.0)
    assert Path(result.checkpoint).is_dir()
    assert result.alerts == handle.status().alerts
    shutil.rmtree(blocked)


def fails_for_many_quick_steps(folder: Path, *, local: bool) -> None:
    """Train 1,000 steps whose callback always fails, and whose checkpoints fail but for the first ones and the last."""
    made = trainer(folder, "run", "mlp", checkpoint_interval_steps=1, verify="off")
    made._callbacks = (Fails(),)
    blocked, stream = folder / "run" / "checkpoints", io.StringIO()
    handle = made.start(num_steps=1000, local=local)
    wait_until(blocked.exists)
    while not blocked.is_file():  # the run may be making it at this moment
        with contextlib.suppress(OSError):
            shutil.rmtree(blocked, ignore_errors=True)
            blocked.write_text("no folder")
    wait_until(lambda: handle.status().step >= 900, 300.0)  # a client that looks seldom
    first = alerts(handle)
    assert first.keys() == {"checkpoint failed", "callback Fails.on_step"}
    assert all(alert.count > 100 and alert.in_a_row == alert.count for alert in first.values())
    blocked.unlink()
    result = handle.wait(timeout_s=240.0, on_news=RunProgress([], stream))
    found = {alert.kind: alert for alert in result.alerts}
    assert (found["callback Fails.on_step"].count, found["callback Fails.on_step"].last_step) == (1000, 1000)
    assert "ValueError: step 999 is not liked." in found["callback Fails.on_step"].message
    assert found["checkpoint failed"].count >= first["checkpoint failed"].count
    assert found["checkpoints again"].count == 1
    for alert in result.alerts:
        lines = [line for line in stream.getvalue().splitlines() if line.startswith(f"run: {alert.kind} ")]
        assert len(lines) <= 2, "at once, and the rest at the end"
        assert lines or alert.count == 1
    assert Result.from_path(folder / "run").alerts == result.alerts, "for those who come later"


@pytest.mark.slow
def test_alerts_of_quick_steps_are_not_lost(tmp_path: Path) -> None:
    fails_for_many_quick_steps(tmp_path, local=True)
    told = CliRunner().invoke(app, ["status", str(tmp_path / "run")]).stdout
    assert "run: finished" in told
    assert "  callback Fails.on_step 1000 times in a row, after steps 1 to 1000; last: The callback" in told
    assert "callback Fails.on_step" in report_html(read_run(Place.of(tmp_path / "run")), "finished")


def folders(run: Path) -> set[str]:
    return {str(path.relative_to(run)) for path in (run / "checkpoints").glob("*/**/*")}


@pytest.mark.parametrize("generation", [1, 2])
def test_what_a_failed_checkpoint_has_written_goes_and_nothing_else(tmp_path: Path, generation: int) -> None:
    """One stage cannot write its file: what the other one has written would lie there for ever."""
    run = tmp_path / "run"
    made = partial(trainer, tmp_path, "run", "mlp", 0.0, checkpoint_interval_steps=4, verify="off")
    if generation == 2:
        made().fit(num_steps=4, local=True, progress=False)
    kept = folders(run) if run.exists() else set()
    below = "" if generation == 1 else "/generation_2"
    blocked = run / f"checkpoints/step_0000008{below}/stage_1.safetensors"
    blocked.mkdir(parents=True)
    other = run / "checkpoints/step_0000008/generation_9/stage_0.safetensors"
    if generation == 2:
        other.parent.mkdir()
        other.write_text("of another one")
    result = made().fit(num_steps=12, local=True, progress=False)
    assert [alert.kind for alert in result.alerts] == ["checkpoint failed", "checkpoints again"]
    assert kept <= folders(run)
    assert other.exists() == (generation == 2)
    assert not blocked.parent.exists() if generation == 2 else not (run / "checkpoints/step_0000008").exists()
    assert result.checkpoint.endswith("step_0000012")


class BreaksOnce(LocalFleet):
    """Fleet that fails in a way that nobody expects while the first checkpoint is written."""

    def entries(self, folder: str) -> list[dict[str, Any]]:
        if folder.endswith("step_0000004"):
            raise KeyError("stage 1")
        return super().entries(folder)


def test_an_error_that_nobody_expects_is_an_alert_too(tmp_path: Path) -> None:
    journal = Journal("run", "")
    made = trainer(tmp_path, "run", "mlp", checkpoint_interval_steps=4, verify="off")
    assert looped(made, 12, BreaksOnce, journal=journal).checkpoint.endswith("step_0000012")
    assert [alert.kind for alert in journal.alerts] == ["checkpoint failed", "checkpoints again"]
    assert "after 4 steps was not saved: KeyError: 'stage 1' Training goes on." in journal.alerts[0].message


class Broken:
    """A place of which nothing can be known."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def __truediv__(self, name: str) -> Broken:
        return self

    def exists(self, name: str) -> bool:
        raise self._error

    def append_bytes(self, name: str, data: bytes) -> None:
        raise PlaceError("it is away")


@pytest.mark.parametrize("error", [PlaceError("it is away"), ValueError("odd")])
def test_an_evaluation_that_a_checkpoint_lacks_is_an_alert(error: Exception) -> None:
    spec: Any = SimpleNamespace(place=Broken(error), checkpoints=CheckpointPolicy(), callbacks=())
    journal: Any = Journal("run", "")
    kept = Checkpoints(spec, SimpleNamespace(), Reporter(spec, journal))  # type: ignore[arg-type]
    kept.score(4, {"eval_loss": 0.5})
    kept.finish(0)
    told = {alert.kind: alert for alert in journal.alerts}
    assert str(error) in told["checkpoint without its evaluation"].message
    assert told["checkpoint without its evaluation"].first_step == 4


class SomeBad(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Dataset in which one item cannot be read while the file ``bad`` exists."""

    def __init__(self, bad: Path) -> None:
        self.bad = bad

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if index == 40 and self.bad.exists():
            raise OSError("no such image")
        return torch.full((3,), index / 64), torch.tensor(index % 3)


def without_norm() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))


def fails_at_a_bad_sample(folder: Path, model: Callable[[], nn.Module], schedule: str) -> Result:
    """Train a run whose data fails in its first epoch, then to its end after the data has been mended."""
    data = SomeBad(folder / "bad")

    def fit(name: str) -> Result:
        made = trainer_of(model(), folder, name, optimizer=adamw, train_data=data, schedule=schedule)
        return made.fit(num_steps=12, local=True, progress=False)

    data.bad.touch()
    with pytest.raises(DataError, match="no such image"):
        fit("run")
    failed = Result.from_path(folder / "run")
    data.bad.unlink()
    whole, mended = load_state_dict(fit("whole").checkpoint), load_state_dict(fit("run").checkpoint)
    assert all(same_bits(mended[name], value) for name, value in whole.items())
    return failed


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_sample_that_cannot_be_read_costs_no_step(schedule: str, tmp_path: Path) -> None:
    failed = fails_at_a_bad_sample(tmp_path, without_norm, schedule)
    assert failed.checkpoint.endswith(f"step_{len(failed.records):07}")
    assert failed.records


def ends_at(step: int) -> float:
    if step == 6:
        raise IndexError("the schedule has 6 steps")
    return 1.0


def test_a_step_that_fails_after_it_changed_parameters_is_not_saved(tmp_path: Path) -> None:
    """A scheduler fails after the optimizer: the state is no longer that after the step before."""
    made = trainer_of(
        without_norm(), tmp_path, train_data=SomeBad(tmp_path / "bad"),
        lr_scheduler=partial(torch.optim.lr_scheduler.LambdaLR, lr_lambda=ends_at),
    )  # fmt: skip
    with pytest.raises(StageError, match="the schedule has 6 steps"):
        made.fit(num_steps=12, local=True, progress=False)
    failed = Result.from_path(tmp_path / "run")
    assert failed.records
    assert not failed.checkpoint
