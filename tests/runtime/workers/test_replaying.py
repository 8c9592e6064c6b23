"""A stage in the middle is killed: another process does its steps again alone, and the others do not go back."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.runtime.workers.test_recovery import as_undisturbed, events, kill, reached, surviving

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("shared_captures")]

STEPS, WAIT_S = 120, 120.0


def test_the_middle_stage_is_replayed_and_nobody_goes_back(local_ray: None, tmp_path: Path) -> None:
    """With a codec, and clipping by the norm of the whole model."""
    told = {"num_stages": 3, "codec_forward": "int8", "codec_backward": "bf16", "max_grad_norm": 0.5}
    handle = surviving(tmp_path, "replayed", "noisy", **told).start(STEPS)
    reached(handle, 30)
    before = [stage["process"] for stage in handle.status().stages]
    kill(handle, 1)
    reached(handle, 60)
    status = handle.status()
    assert status.recovery == "replay", events(tmp_path / "replayed", "recovery")
    result = handle.wait(timeout_s=WAIT_S)
    after = [stage["process"] for stage in status.stages]
    assert [old == new for old, new in zip(before, after, strict=True)] == [True, False, True]
    (recovery,) = events(tmp_path / "replayed", "recovery")
    assert (recovery["kind"], recovery["redone_steps"], recovery["replaced"]) == ("replay", 0, ["Stage 1"])
    assert as_undisturbed(tmp_path, result.checkpoint, "noisy", **told) == []
    columns = ["step", "loss", "grad_norm", "lr"]
    ours, theirs = (pq.read_table(tmp_path / run / "metrics.parquet", columns=columns) for run in ("replayed", "alone"))
    assert ours.num_rows == STEPS
    assert ours.equals(theirs)
