"""The best checkpoint of a run by a number of its manifests, and what is said where there is none."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from raypipe.engine.checkpoint import best_checkpoint, checkpoint_name, prune
from raypipe.engine.storage import Place
from raypipe.errors import CheckpointError, ConfigError
from tests.checkpoints import small_checkpoint

pytestmark = pytest.mark.engine


@pytest.fixture
def run(tmp_path: Path) -> Place:
    found = Place.of(tmp_path)
    for step, accuracy in ((1, 0.5), (2, 0.9), (3, 0.9), (4, math.nan)):
        small_checkpoint(found, step, loss=float(step), eval_accuracy=accuracy)
    small_checkpoint(found, 5, loss=5.0)  # no evaluation there
    return found


@pytest.mark.parametrize(
    ("metric", "mode", "step"),
    [("eval_accuracy", "max", 3), ("eval_accuracy", "min", 1), ("loss", "min", 1), ("loss", "max", 5)],
)
def test_the_best_is_the_newest_of_equal_ones_and_never_one_without_the_number(
    run: Place, metric: str, mode: str, step: int
) -> None:
    assert best_checkpoint(run, metric, mode) == str(run / checkpoint_name(step))


def test_what_is_kept_by_a_score_has_the_best(run: Place) -> None:
    best = best_checkpoint(run, "eval_accuracy", "max")
    prune(run, 1, "eval_accuracy", "max")
    assert best_checkpoint(run, "eval_accuracy", "max") == best


def test_a_checkpoint_that_is_being_saved_is_none(run: Place) -> None:
    (run / checkpoint_name(3)).delete("manifest.json")
    assert best_checkpoint(run, "eval_accuracy", "max") == str(run / checkpoint_name(2))


def test_what_no_checkpoint_has_is_named(run: Place, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has a number 'eval_acuracy': did you mean eval_accuracy\? .* meet, or"):
        best_checkpoint(run, "eval_acuracy", "max")
    with pytest.raises(ConfigError, match=r"'bleu': they have eval_accuracy, loss\."):
        best_checkpoint(run, "bleu", "max")
    with pytest.raises(ConfigError, match=r"mode='best' is not possible: give 'max' or 'min'\."):
        best_checkpoint(run, "loss", "best")
    with pytest.raises(CheckpointError, match="has no complete checkpoint"):
        best_checkpoint(Place.of(tmp_path / "nothing"), "loss", "min")
