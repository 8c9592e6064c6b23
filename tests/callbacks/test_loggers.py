"""TensorBoard, MLflow and Weights & Biases are given a whole run, and what they wrote is read back."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from raypipe import PipelineTrainer
from raypipe.callbacks import MLflow, TensorBoard, WandB
from raypipe.errors import ConfigError
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
        with pytest.raises(ConfigError, match=r"pip install 'raypipe\["):
            trained(tmp_path, callback)
