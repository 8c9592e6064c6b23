"""``raypipe export``: of a checkpoint, of a run's newest or best one, by folder, name and URI."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from typer.testing import CliRunner

import raypipe
from raypipe.cli import app
from raypipe.engine.io.storage import Place
from raypipe.errors import ConfigError
from tests.checkpoints import small_checkpoint
from tests.exactness import same_bits

pytestmark = pytest.mark.engine


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run in the usual place, whose second of three checkpoints has the highest accuracy."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "ray_results" / "lm"
    for step, accuracy in ((1, 0.5), (2, 0.9), (3, 0.7)):
        small_checkpoint(Place.of(folder), step, scale=step, eval_accuracy=accuracy)
    (folder / "events.jsonl").touch()
    return folder


@pytest.mark.parametrize(
    ("options", "step"),
    [([], 3), (["--best", "eval_accuracy", "--mode", "max"], 2), (["--best", "eval_accuracy", "--mode", "min"], 1)],
)
@pytest.mark.parametrize("given", ["{run}", "lm", "file://{run}"])
def test_the_newest_or_the_best_by_folder_name_or_uri(run: Path, given: str, options: list[str], step: int) -> None:
    command = ["export", given.format(run=run), "-o", "out/model.safetensors", *options]
    done = CliRunner().invoke(app, command, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    assert ("the best by eval_accuracy is " in done.output) == bool(options)
    found, wanted = load_file("out/model.safetensors"), raypipe.load_state_dict(run / f"checkpoints/step_{step:07d}")
    assert found.keys() == wanted.keys()
    assert all(same_bits(found[name], wanted[name]) for name in wanted)


def test_a_metric_comes_with_its_direction(run: Path) -> None:
    for options in (["--best", "eval_accuracy"], ["--mode", "max"]):
        done = CliRunner().invoke(app, ["export", "lm", "-o", "x", *options])
        assert done.exit_code == 2
        assert "belong together, as in --best eval_loss --mode min" in " ".join(done.output.replace("│", "").split())
    with pytest.raises(ConfigError, match="did you mean eval_accuracy"):
        CliRunner().invoke(
            app, ["export", "lm", "-o", "x", "--best", "accuracy", "--mode", "max"], catch_exceptions=False
        )
