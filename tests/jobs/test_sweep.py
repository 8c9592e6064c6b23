"""What a sweep of learning rates trains and tells, without Ray Tune (tests/api/test_tune_on_ray.py has that)."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from jobs.train import sweep

FEW = ["--rates", "1e-2", "1e-3", "--width", "4", "--depth", "1", "--interval", "1"]


def test_a_trial_trains_at_its_rate_and_from_the_same_weights(tmp_path: Path) -> None:
    asked = sweep.parse([*FEW, "--storage", str(tmp_path)])
    assert asked.rates == [1e-2, 1e-3]
    make = sweep.trainers(asked)
    done = {
        rate: make({"rate": rate}, f"rate-{rate:g}").fit(num_steps=2, local=True, progress=False)
        for rate in asked.rates
    }
    fast, slow = (found.records for found in done.values())
    assert fast[0].loss == slow[0].loss
    assert fast[1].loss != slow[1].loss
    assert [records[0].lr for records in (fast, slow)] == asked.rates
    assert [Path(found.path) for found in done.values()] == [tmp_path / "rate-0.01", tmp_path / "rate-0.001"]


def test_a_trial_in_a_line() -> None:
    ended = SimpleNamespace(metrics={"step": 4, "loss": 2.0, "eval_loss": 2.5}, config={"rate": 0.01}, error=None)
    stopped = SimpleNamespace(metrics={"step": 2, "loss": 3.0}, config={"rate": 1e-4}, error=None)
    failed = SimpleNamespace(metrics=None, config=None, error=RuntimeError("first line\nthe cause"))
    assert sweep.row_of(ended) == ("0.01", 4, 2.0, 2.5, "trained to the end")
    assert sweep.row_of(stopped) == ("0.0001", 2, 3.0, "--", "stopped early")
    assert sweep.row_of(failed) == ("nan", "--", "--", "--", "failed: the cause")
