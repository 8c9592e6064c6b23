"""Checkpoints of a run: which are kept, and which is the best."""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raypipe.engine.io.checkpoint import best_checkpoint, checkpoint_name, find_checkpoint, prune
from raypipe.engine.io.storage import Place
from raypipe.errors import CheckpointError, ConfigError
from tests.checkpoints import small_checkpoint

pytestmark = pytest.mark.engine


def steps(run: Place) -> list[int]:
    return [int(entry.name.removeprefix("step_")) for entry in run.list("checkpoints")]


@settings(max_examples=15)
@given(
    losses=st.dictionaries(st.integers(1, 30), st.none() | st.sampled_from([0.1, 0.2, 0.3]), min_size=1, max_size=5),
    num_to_keep=st.none() | st.integers(1, 4),
    order=st.sampled_from(["max", "min"]),
    scored=st.booleans(),
)
@pytest.mark.slow
def test_the_newest_and_the_best_are_kept(
    losses: dict[int, float | None], num_to_keep: int | None, order: Literal["max", "min"], scored: bool
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        run = Place.of(folder)
        for step, loss in sorted(losses.items()):
            small_checkpoint(run, step, **({} if loss is None else {"loss": loss}))
        deleted = prune(run, num_to_keep, "loss" if scored else None, order)
        sign = 1 if order == "max" else -1
        worst_first = sorted(losses, key=lambda s: (-9.0 if losses[s] is None or not scored else sign * losses[s], s))
        keep = set(losses) if num_to_keep is None else {max(losses), *worst_first[-num_to_keep:]}
        assert steps(run) == sorted(keep)
        assert deleted == [checkpoint_name(step) for step in sorted(losses.keys() - keep)]
        checkpoint, refusals = find_checkpoint(run)
        assert checkpoint is not None
        assert (checkpoint.manifest.step, refusals) == (max(losses), ())


@pytest.mark.parametrize("wrong", [0, -1, True, 1.5, "3"])
def test_numbers_that_make_no_sense(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="num_to_keep="):
        prune(Place.of(tmp_path), wrong)
    with pytest.raises(ConfigError, match="checkpoint_score_order='best'"):
        prune(Place.of(tmp_path), 1, "loss", "best")  # type: ignore[arg-type]


def test_what_interrupted_saves_left_goes_once_it_is_old(tmp_path: Path) -> None:
    run = Place.of(tmp_path)
    for step in (1, 2, 4):
        small_checkpoint(run, step)
    (run / checkpoint_name(1)).delete("manifest.json")  # as a deletion that was interrupted leaves it
    run.write_bytes(f"{checkpoint_name(3)}/manifest.json", b"{}")  # damaged: somebody may want to look
    run.write_bytes(f"{checkpoint_name(5)}/stage_0.safetensors", b"")  # being saved
    run.write_bytes("checkpoints/notes.txt", b"mine")
    assert prune(run, 5) == [checkpoint_name(1)]
    assert [entry.name for entry in run.list("checkpoints")] == [
        "notes.txt", "step_0000002", "step_0000003", "step_0000004", "step_0000005",
    ]  # fmt: skip


def test_a_refused_checkpoint_is_set_aside_by_the_next_one(tmp_path: Path) -> None:
    """Otherwise it would pass for the newest, and the good ones would be deleted for its sake."""
    run = Place.of(tmp_path)
    small_checkpoint(run, 2)
    torn = small_checkpoint(run, 5)
    torn.write_bytes("stage_0.safetensors", b"torn")
    checkpoint, refusals = find_checkpoint(run)
    assert checkpoint is not None
    assert (checkpoint.manifest.step, [refusal.name for refusal in refusals]) == (2, [checkpoint_name(5)])
    small_checkpoint(run, 3)
    assert torn.exists("manifest.json.refused")
    assert prune(run, 1) == [checkpoint_name(2)]
    checkpoint, _ = find_checkpoint(run)
    assert checkpoint is not None
    assert checkpoint.manifest.step == 3


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
