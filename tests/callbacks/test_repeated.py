"""What loggers do with steps that come twice, requests that fail, and a second run, in front of a client in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from raypipe.callbacks import MLflow, RunEnd, RunStart, TensorBoard, WandB
from raypipe.ir.report import StepRecord
from tests.callbacks.test_loggers import scalars_of

pytestmark = pytest.mark.engine


def start(folder: Path, step: int = 0) -> RunStart:
    return RunStart("run", str(folder), step, 20, {}, "")


def record(step: int, loss: float = 0.5) -> StepRecord:
    return StepRecord(step, 8, loss, 1.0, 0.25, 0.1, 0.0, 2)


class WandbRun:
    """Keeps what is logged."""

    def __init__(self) -> None:
        self.logged: list[tuple[int, dict[str, float]]] = []

    def log(self, numbers: dict[str, float], step: int) -> None:
        self.logged.append((step, numbers))


class MLflowServer:
    """Refuses as many requests as it is told to."""

    def __init__(self) -> None:
        self.refuses = 0
        self.steps: list[int] = []
        self.states: list[str] = []

    def log_batch(self, run_id: str, metrics: list[Any]) -> None:
        if self.refuses:
            self.refuses -= 1
            raise ConnectionError("no server")
        self.steps += [found.step for found in metrics if found.key == "loss"]

    def set_terminated(self, run_id: str, state: str) -> None:
        self.states.append(state)


def test_weights_and_biases_logs_an_evaluation_at_its_step_and_nothing_twice() -> None:
    made, made_run = WandB(every_steps=10), WandbRun()
    made._run = made_run
    for step in (0, 10, 5, 10, 20):
        made.on_step(record(step))
        if step == 10:
            made.on_eval(20, {"eval_loss": 0.25})
    assert [step for step, _ in made_run.logged] == [0, 10, 19, 20]
    assert made_run.logged[2] == (19, {"eval/loss": 0.25})


def test_weights_and_biases_begins_anew_with_every_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    made_run = WandbRun()
    monkeypatch.setattr(wandb, "init", lambda **_: made_run)
    made = WandB()
    for _ in range(2):
        made.on_start(start(tmp_path))
        made.on_step(record(0))
    assert [step for step, _ in made_run.logged] == [0, 0]


def test_tensorboard_keeps_the_evaluation_before_a_run_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    made = TensorBoard()
    made.on_start(start(tmp_path))
    for step, loss in ((0, 0.5), (1, 0.25), (0, 7.0), (2, 0.125)):
        made.on_step(record(step, loss))
    made.on_eval(3, {"eval_loss": 0.75})
    made.on_end(RunEnd(3, ""))
    assert scalars_of(tmp_path / "tensorboard", "step/loss") == {0: 0.5, 1: 0.25, 2: 0.125}
    assert scalars_of(tmp_path / "tensorboard", "eval/loss") == {2: 0.75}  # a run goes on at 3, and purges from there


def test_mlflow_sends_again_what_was_refused_and_always_ends_its_run() -> None:
    pytest.importorskip("mlflow")
    made, server = MLflow(), MLflowServer()
    made._client = server
    server.refuses = 1
    with pytest.raises(ConnectionError):
        made.on_step(record(0))
    for step in (1, 0, 1, 2):
        made.on_step(record(step))
    made.on_end(RunEnd(3, ""))
    assert (server.steps, server.states) == ([0, 1, 2], ["FINISHED"])
    made.on_step(record(3))
    server.refuses = 9
    with pytest.raises(ConnectionError):
        made.on_end(RunEnd(4, "", error="lost"))
    assert server.states == ["FINISHED", "FAILED"]
