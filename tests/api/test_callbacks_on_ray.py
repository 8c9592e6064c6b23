"""Callbacks of a run on Ray: called in its driver, and Ray Train's alike."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.train

from raypipe import Callback
from tests.prepare.test_resume import trainer
from tests.runs.test_failing_checkpoints import fails_for_many_quick_steps

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("shared_captures")]


class Diary(Callback):
    """Writes a line for everything, with the process that it is called in."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def write(self, what: str, step: int, more: Any = None) -> None:
        with Path(self.path).open("a", encoding="utf-8") as file:
            file.write(json.dumps([what, step, more, os.getpid()]) + "\n")

    def on_start(self, run: Any) -> None:
        self.write("start", run.step, run.num_steps)

    def on_step(self, record: Any) -> None:
        self.write("step", record.step)

    def on_checkpoint(self, step: int, path: str) -> None:
        self.write("checkpoint", step, path)

    def on_recovery(self, event: Any) -> None:
        self.write("recovery", event.step, event.decision)

    def on_end(self, end: Any) -> None:
        self.write("end", end.step, end.error)


class Reported(ray.train.UserCallback):
    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
        line = [run_context.get_run_config().name, metrics[0]["step"], checkpoint and checkpoint.path]
        with Path(self.path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")

    def after_exception(self, run_context: Any, worker_exceptions: Any) -> None:
        with Path(self.path).open("a", encoding="utf-8") as file:
            file.write(json.dumps(["failure", None, str(worker_exceptions[0])]) + "\n")


def lines_of(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_the_driver_calls_them_and_ray_train_s_alike(cluster: None, tmp_path: Path) -> None:
    diary, reports, steps = tmp_path / "diary", tmp_path / "reports", 6
    run = ray.train.RunConfig(name="run", storage_path=str(tmp_path), callbacks=[Reported(reports)])
    made = trainer("cnn", tmp_path, "run", 2, run_config=run, callbacks=[Diary(diary)])
    result = made.fit(num_steps=steps, progress=False)
    found = lines_of(diary)
    (driver,) = {process for *_, process in found}
    assert driver != os.getpid()
    assert [line[:3] for line in found] == [
        ["start", 0, steps], *(["step", step, None] for step in range(steps)),
        ["checkpoint", steps, result.checkpoint], ["end", steps, ""],
    ]  # fmt: skip
    assert lines_of(reports)[:steps] == [["run", step + 1, None] for step in range(steps)]
    assert lines_of(reports)[-1] == ["run", steps, result.checkpoint]


def test_one_that_cannot_travel_is_refused_by_name(tmp_path: Path) -> None:
    diary: Any = Diary(tmp_path / "diary")
    diary.lock = __import__("threading").Lock()
    with pytest.raises(Exception, match="callbacks"):
        trainer("cnn", tmp_path, "run", 2, callbacks=[diary]).start(num_steps=2)


def test_alerts_of_quick_steps_are_not_lost(cluster: None, tmp_path: Path) -> None:
    fails_for_many_quick_steps(tmp_path, local=False)
