"""A run one of whose workers becomes slow: its layers move to the others, and no bit of the result changes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from ray.train import FailureConfig

from jobs.lib.slow_layers import slow_down, trainer_of_layers
from raypipe import PipelineTrainer, load_state_dict
from raypipe.ir.plan import Plan
from tests.exactness import same_bits
from tests.runtime.fleet.test_recovery import events, reached

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

LAYERS, LAYER_S, MICROBATCHES = 8, 0.004, 4
STEPS = 140
WAIT_S = 120.0


def trainer(slow: Path, runs: Path, name: str, seconds: float = LAYER_S, max_failures: int = -1) -> PipelineTrainer:
    return trainer_of_layers(
        LAYERS, seconds, slow, runs, name, FailureConfig(max_failures=max_failures),
        num_stages=2, minibatch_size=8, num_microbatches=MICROBATCHES, partitioner="prefix_sum", schedule="1f1b",
    )  # fmt: skip


def test_a_slow_worker_gives_layers_away(local_ray: None, tmp_path: Path) -> None:
    made = trainer(tmp_path, tmp_path, "slow")
    before = made.plan().partition.stages[0].stop
    handle = made.start(STEPS)
    reached(handle, 20)
    processes = [stage["process"] for stage in handle.status().stages]
    slow_down(tmp_path, processes[0], 3.0)
    deadline_s = time.monotonic() + WAIT_S
    while not events(tmp_path / "slow", "replan"):
        assert time.monotonic() < deadline_s, handle.status()
        time.sleep(0.05)
    assert [stage["process"] for stage in handle.status().stages] == processes
    result = handle.wait(timeout_s=WAIT_S)
    replan = events(tmp_path / "slow", "replan")[0]
    assert replan["cuts"][0] < before
    assert replan["predicted_gain"] > 0.03
    assert replan["speeds"][0] < replan["speeds"][1]
    assert replan["seconds"] >= replan["move_s"]
    plan = Plan.from_json((tmp_path / "slow" / "plan.json").read_text())
    assert (plan.generation >= 1, plan.num_microbatches) == (True, MICROBATCHES)
    assert any(what == "cut" and "times as long as before" in why for what, why in plan.reasons)
    alone = trainer(tmp_path, tmp_path, "alone", seconds=0.0).fit(STEPS, local=True, progress=False)
    found, wanted = load_state_dict(result.checkpoint), load_state_dict(alone.checkpoint)
    assert [key for key in wanted if not same_bits(found[key], wanted[key])] == []
