"""Ray Tune over pipelines: trials are runs, and one that is stopped early leaves no actor, no place, no CPU taken."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ray import tune

import raypipe
from raypipe.errors import ConfigError
from tests.prepare.test_resume import trainer, unhurried

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

SHORT, LONG = 6, 5000


def sgd(rate: float) -> Any:
    return lambda named: torch.optim.SGD(named, lr=rate)


def test_a_sweep_stops_one_run_early_and_leaves_nothing(cluster: None, tmp_path: Path) -> None:
    """One trial has an end of its own, the other one would train for minutes."""

    def make(config: dict[str, Any], name: str) -> raypipe.PipelineTrainer:
        optimizer = unhurried if config["stopped"] else sgd(config["rate"])
        more = {"optimizer": optimizer, "lr_scheduler": None, "run_config": named(name)}
        return trainer("cnn", tmp_path, name, 2, **more)

    def named(name: str) -> Any:
        return SimpleNamespace(name=name, storage_path=str(tmp_path / "runs"))

    def stop(trial: str, result: dict[str, Any]) -> bool:
        return bool(result["config"]["stopped"] or result["step"] >= SHORT)

    found = tune.Tuner(
        raypipe.tune.trainable(make, LONG, report_interval_steps=SHORT),
        param_space={"rate": 1e-2, "stopped": tune.grid_search([False, True])},
        tune_config=tune.TuneConfig(metric="loss", mode="min", max_concurrent_trials=1),
        run_config=tune.RunConfig(name="sweep", storage_path=str(tmp_path / "tune"), stop=stop, verbose=0),
    ).fit()
    assert found.errors == []
    plain = trainer("cnn", tmp_path, "plain", 2, optimizer=sgd(1e-2), lr_scheduler=None)
    losses = plain.fit(num_steps=SHORT, local=True, progress=False).metrics_dataframe.loss
    for one in found:
        metrics = one.metrics
        assert metrics is not None
        assert SHORT <= metrics["step"] < LONG
        run = Path(metrics["path"])
        assert run.parent == tmp_path / "runs"
        # It ended in order, with a checkpoint of the step that it was stopped after.
        (saved,) = run.glob("checkpoints/step_*/manifest.json")
        assert int(saved.parent.name.removeprefix("step_")) >= metrics["step"]
    first = next(one for one in found if one.config == {"rate": 1e-2, "stopped": False})
    table = raypipe_table(first.metrics["path"])
    assert list(table.loss[:SHORT]) == list(losses)
    assert first.metrics["loss"] == pytest.approx(sum(table.loss[: first.metrics["step"]]) / first.metrics["step"])


def raypipe_table(path: str) -> Any:
    import pyarrow.parquet as pq

    return pq.read_table(f"{path}/metrics.parquet").to_pandas()


@pytest.mark.parametrize("numbers", [(0, 1), (5, 0), (5, 2.5)])
def test_impossible_numbers_are_refused_by_name(numbers: tuple[Any, Any]) -> None:
    name = "num_steps" if numbers[0] == 0 else "report_interval_steps"
    with pytest.raises(ConfigError, match=f"{name}="):
        raypipe.tune.trainable(lambda config, name: None, *numbers)
