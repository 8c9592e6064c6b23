"""What a callback is, as the parts without torch and Ray know it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from raypipe.callbacks import MLflow, TensorBoard, WandB
from raypipe.callbacks.base import Event, absolute, changes_the_run, scalars
from raypipe.errors import ConfigError
from raypipe.ir.report import StepRecord


def test_only_finite_numbers_of_a_step_are_told() -> None:
    found = scalars(StepRecord(3, 8, math.nan, 1.0, 0.25, 0.1, 64.0, 2, schedule="1f1b"))
    assert "loss" not in found
    assert "schedule" not in found
    assert "step" not in found
    assert (found["grad_norm"], found["samples_per_s"], found["peak_in_flight"]) == (1.0, 32.0, 2.0)


def test_what_is_not_known_is_not_told_as_0() -> None:
    """Data without tokens, and a goodput that nobody could tell."""
    record = StepRecord(3, 8, 0.5, 1.0, 0.25, 0.1, 64.0, 2)
    assert not {"tokens", "tokens_per_s", "goodput"} & set(scalars(record))
    known = scalars(replace(record, tokens=64, goodput=0.75))
    assert (known["tokens"], known["tokens_per_s"], known["goodput"]) == (64.0, 256.0, 0.75)


def test_loggers_are_not_flooded_with_decisions_that_change_nothing() -> None:
    told = ["switch", "undo", "resize", "replan", "finish", "checkpoint failed", "warning"]
    silent = ["keep", "wait", "drift", "paid", "open", "delete checkpoint"]
    assert [one for one in [*told, *silent] if changes_the_run(Event(3, one, "why", {}))] == told


@pytest.mark.parametrize("logger", [MLflow, TensorBoard, WandB])
@pytest.mark.parametrize("every_steps", [0, 2.5, "10", True])
def test_a_logger_logs_one_of_so_many_steps(logger: Any, every_steps: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        logger(every_steps=every_steps)
    assert str(caught.value) == f"{logger.__name__}(every_steps={every_steps!r}): give an integer of at least 1."
    assert logger(every_steps=10).every_steps == 10


def test_a_mode_that_wandb_does_not_have_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"WandB\(mode='offlin'\): did you mean 'offline'\?"):
        WandB(mode="offlin")
    with pytest.raises(ConfigError, match=r"WandB\(mode=3\): give one of 'online', 'offline', 'disabled'\."):
        WandB(mode=3)  # type: ignore[arg-type]


def test_a_folder_is_the_same_in_another_working_directory() -> None:
    assert absolute("runs/tb") == str(Path("runs/tb").absolute())
    assert absolute("s3://bucket/tb") == "s3://bucket/tb"
    assert absolute(None) is None
