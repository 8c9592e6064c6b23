"""Result.from_path: a run's folder says what ``fit`` returned, also of a run that failed or has not ended."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import raypipe
from raypipe.errors import ConfigError, RaypipeError
from tests.models import CASES
from tests.prepare.test_resume import broken_adamw, trainer

pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.usefixtures("shared_captures")]


def test_the_folder_says_what_fit_returned(tmp_path: Path) -> None:
    made = trainer("cnn", tmp_path, "run", 2, eval_data=CASES["cnn"].data(16))
    result = made.fit(num_steps=4, local=True, progress=False)
    found = raypipe.Result.from_path(tmp_path / "run")
    assert found.records == result.records
    assert found.metrics == result.metrics
    assert "eval_loss" in found.metrics
    assert (found.checkpoint, found.path) == (result.checkpoint, result.path)
    assert (found.stopped, found.error) == ("", None)
    assert found.metrics_dataframe.equals(result.metrics_dataframe)
    assert found.get_best_checkpoint("loss", "min") == result.checkpoint


def test_the_last_evaluation_counts_though_steps_followed(tmp_path: Path) -> None:
    more: dict[str, Any] = {"eval_data": CASES["cnn"].data(16)}
    trainer("cnn", tmp_path, "run", 2, **more).fit(num_steps=2, local=True, progress=False)
    before = raypipe.Result.from_path(tmp_path / "run").metrics["eval_loss"]
    handle = trainer("cnn", tmp_path, "run", 2, resume=True).start(num_steps=5, local=True)
    handle.wait(timeout_s=120)
    found = raypipe.Result.from_path(tmp_path / "run")
    assert (found.metrics["step"], found.metrics["eval_loss"]) == (5, before)


def test_a_run_that_failed_says_why(tmp_path: Path) -> None:
    with pytest.raises(RaypipeError):
        trainer("cnn", tmp_path, "run", 1, optimizer=broken_adamw).fit(num_steps=4, local=True, progress=False)
    found = raypipe.Result.from_path(tmp_path / "run")
    assert "the optimizer is broken" in str(found.error)
    assert (len(found.records), found.checkpoint, found.stopped) == (2, "", "")


def test_a_folder_without_an_end_and_one_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "begun").mkdir()
    (tmp_path / "begun/events.jsonl").write_text('{"time": 1.0, "decision": "start", "reason": "fit was called"}\n')
    found = raypipe.Result.from_path(tmp_path / "begun")
    assert (found.stopped, found.metrics, len(found.records)) == ("the run has not ended, it is unknown", {}, 0)
    with pytest.raises(ConfigError, match=r"is no folder of a run: it has no events\.jsonl"):
        raypipe.Result.from_path(tmp_path / "nothing")
