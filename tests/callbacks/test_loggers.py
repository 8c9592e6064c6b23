"""TensorBoard, MLflow and Weights & Biases: whole runs that are read back, and repeated steps with a fake client."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from raypipe import PipelineTrainer
from raypipe.callbacks import MLflow, RunEnd, RunStart, TensorBoard, WandB
from raypipe.errors import ConfigError
from raypipe.ir.report import StepRecord
from tests.prepare.test_resume import trainer

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.usefixtures("shared_captures")]


def trained(folder: Path, *callbacks: Any, steps: int = 4) -> Any:
    made: PipelineTrainer = trainer("cnn", folder, "run", 2, callbacks=list(callbacks))
    return made.fit(num_steps=steps, local=True, progress=False)


def warnings_of(folder: Path) -> list[str]:
    lines = (folder / "run/events.jsonl").read_text().splitlines()
    return [line["reason"] for line in map(json.loads, lines) if line["decision"] == "warning"]


def test_tensorboard_has_every_step_once_also_of_a_run_that_goes_on(tmp_path: Path) -> None:
    pytest.importorskip("tensorboardX")
    trained(tmp_path, TensorBoard(), steps=3)
    losses = trained(tmp_path, TensorBoard(), steps=5).metrics_dataframe.loss
    assert warnings_of(tmp_path) == []
    found = scalars_of(tmp_path / "run/tensorboard", "step/loss")
    assert list(found) == [0, 1, 2, 3, 4]
    assert list(found.values()) == pytest.approx(list(losses))


def scalars_of(folder: Path, tag: str) -> dict[int, float]:
    """Read event files without TensorBoard, which few have installed: a length, a checksum, an Event, a checksum."""
    from tensorboardX.proto.event_pb2 import Event

    found: dict[int, float] = {}
    for file in sorted(folder.glob("events.out.tfevents.*")):
        data, place = file.read_bytes(), 0
        while place < len(data):
            size = int.from_bytes(data[place : place + 8], "little")
            event = Event.FromString(data[place + 12 : place + 12 + size])
            for value in event.summary.value:
                if value.tag == tag:
                    found[event.step] = value.simple_value
            place += 16 + size
    return found


def test_mlflow_has_parameters_metrics_and_one_run_for_two_submissions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    uri = (tmp_path / "mlruns").as_uri()
    trained(tmp_path, MLflow(tracking_uri=uri), steps=3)
    losses = trained(tmp_path, MLflow(tracking_uri=uri), steps=5).metrics_dataframe.loss
    assert warnings_of(tmp_path) == []
    client = mlflow.MlflowClient(uri)
    (run,) = client.search_runs([client.get_experiment_by_name("raypipe").experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["lr of group 0"] == "0.01"
    assert {name for name in run.data.tags if name.startswith("raypipe.finish")} == {
        "raypipe.finish.3", "raypipe.finish.5",
    }  # fmt: skip
    history = client.get_metric_history(run.info.run_id, "loss")
    assert [found.step for found in history] == [0, 1, 2, 3, 4]
    assert [found.value for found in history] == pytest.approx(list(losses))


def test_weights_and_biases_writes_a_run_offline(tmp_path: Path) -> None:
    wandb = pytest.importorskip("wandb")
    try:
        trained(tmp_path, WandB(project="raypipe", mode="offline"), steps=3)
    finally:
        wandb.teardown()  # its service is a process, which else stays until this one ends
    assert warnings_of(tmp_path) == []
    (file,) = (tmp_path / "run/wandb").glob("offline-run-*/run-*.wandb")
    written = file.read_bytes()
    assert b"step/loss" in written
    assert b"finish/3" in written
    assert b"lr of group 0" in written


def test_what_is_not_installed_is_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module, callback in (("tensorboardX", TensorBoard()), ("mlflow", MLflow()), ("wandb", WandB())):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(
            ConfigError, match=rf"{type(callback).__name__}\(\) needs {module} .*: pip install 'raypipe\["
        ):
            trained(tmp_path, callback)


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
