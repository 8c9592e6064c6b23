"""What ``raypipe init`` writes trains as it stands: in threads, to the accuracy that its module promises."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from raypipe.cli import app
from raypipe.starter import model, write

pytestmark = [pytest.mark.ray, pytest.mark.slow]


def test_what_init_writes_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "model", raising=False)
    result = CliRunner().invoke(app, ["train", "run.yaml", "--local"], catch_exceptions=False)
    monkeypatch.delitem(sys.modules, "model")
    assert result.exit_code == 0, result.output
    told = next(line for line in result.stdout.splitlines() if line.startswith("step 300  "))
    assert float(told.split("eval_accuracy ")[1]) > 0.9
    (run,) = (tmp_path / "runs").iterdir()
    assert {"config.yaml", "plan.json", "metrics.parquet", "checkpoints"} <= {path.name for path in run.iterdir()}


def test_a_linear_model_does_not_solve_it() -> None:
    """Least squares on the very points that are asked for."""
    points, arms = model.make_data(4096, seed=0).tensors
    inputs = torch.cat([points, torch.ones(len(points), 1)], 1)
    weights = torch.linalg.lstsq(inputs, torch.nn.functional.one_hot(arms, model.ARMS).float()).solution
    right, count = model.accuracy(inputs @ weights, arms)
    assert 0.4 < right / count < 0.6
