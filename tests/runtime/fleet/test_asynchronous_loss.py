"""A replica of an asynchronous run is killed: another one takes its place, and all go back to a copy.

Weights have ages there, so that nobody goes on without it, as replicas of a synchronous run do. The bits are those of a
run in threads that survives failures too: both run empty for copies at the same steps.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from ray.train import ScalingConfig

from raypipe import load_state_dict
from tests.runtime.fleet.test_recovery import events, kill, reached, surviving

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("shared_captures")]

STEPS, WAIT_S = 400, 120.0


def told(folder: Path, run: str) -> Any:
    """Records that do not depend on time."""
    return pq.read_table(folder / run / "metrics.parquet", columns=["step", "loss", "grad_norm", "lr"])


@pytest.mark.parametrize("correction", ["none", "predict"])
def test_all_go_back_to_a_copy_and_no_bit_changes(correction: str, local_ray: None, tmp_path: Path) -> None:
    """One of two replicas is lost, then the stage that has none."""
    pipeline: dict[str, Any] = {"schedule": "pipedream", "num_replicas": [2, 1], "verify": "off"}
    pipeline["stale_correction"] = correction
    made = surviving(tmp_path, "lost", "noisy", **pipeline)
    made._scaling = ScalingConfig(num_workers=3)
    handle = made.start(STEPS)
    for count, worker in enumerate((0, 2), 1):
        reached(handle, 30 * (2 * count - 1))
        before = [stage["process"] for stage in handle.status().stages]
        kill(handle, worker)
        reached(handle, 60 * count)
        after = [stage["process"] for stage in handle.status().stages]
        assert [old == new for old, new in zip(before, after, strict=True)] == [at != worker for at in range(3)]
    result = handle.wait(timeout_s=WAIT_S)
    alone = surviving(tmp_path, "alone", "noisy", **pipeline).fit(STEPS, local=True, progress=False)
    found, wanted = load_state_dict(result.checkpoint), load_state_dict(alone.checkpoint)
    assert [key for key in wanted if not torch.equal(found[key], wanted[key])] == []
    assert told(tmp_path, "lost").equals(told(tmp_path, "alone"))
    recoveries = events(tmp_path / "lost", "recovery")
    assert [one["replaced"] for one in recoveries] == [["Replica 0 of stage 0"], ["Stage 1"]]
    for recovery in recoveries:
        assert (recovery["kind"], recovery["reason"]) == ("roll back", "from copies in memory"), recovery
        assert 0 < recovery["redone_steps"] < 40, "a copy is taken at most every 20 steps"
