"""Replicas on Ray actors that share out the state of their optimizer: the bits of threads that hold it whole."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from raypipe.errors import PlanError, StageError
from raypipe.runtime.workers.fleet import Fleet
from tests.exactness import same_bits
from tests.runs.test_replicas import told, trainer
from tests.runs.test_sharded_optimizer import SHARDED, wide
from tests.runtime.on_fleet import start_on
from tests.runtime.workers.test_recovery import events
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.usefixtures("shared_captures")]

LANED: dict[str, Any] = {"num_lanes": 6, "num_microbatches": 6, "minibatch_size": 12, "max_grad_norm": 0.1}
MOST, WAIT_S = 1_000_000, 300.0


def test_equal_to_threads_without_replicas(fleet: Fleet, tmp_path: Path) -> None:
    """Each run goes on from the slices that another number of replicas saved, the last one with whole states."""
    trainer(tmp_path, "one", wide(), **LANED).fit(num_steps=8, local=True, progress=False)
    ways = ({"num_replicas": [2, 1]}, {"num_replicas": [1, 2]}, {"num_replicas": [3, 1]})
    for steps, how in zip((2, 4, 6), ways, strict=True):
        start_on(fleet, trainer(tmp_path, "many", wide(), **LANED, **how, **SHARDED), steps).wait()
    start_on(fleet, trainer(tmp_path, "many", wide(), **LANED, num_replicas=[2, 2]), 8).wait()
    (rows, one), (others, many) = told(tmp_path / "one"), told(tmp_path / "many")
    assert rows == others
    assert all(same_bits(tensor, many[name]) for name, tensor in one.items())


def test_a_run_whose_replica_is_lost_goes_on_from_its_checkpoint_with_another_number(
    local_ray: None, tmp_path: Path
) -> None:
    """It says who was lost, and it refuses to change its workers before, for nobody else has their slices."""
    handle = trainer(tmp_path, "run", wide(), **LANED, num_replicas=[2, 1], **SHARDED).start(MOST)
    wait_until(lambda: handle.status().step > 2, WAIT_S)
    with pytest.raises(PlanError, match="shard_optimizer=True: each replica has a part of the optimizer's state"):
        handle.resize(2, num_replicas=[1, 2])
    assert len(events(tmp_path / "run", "resize refused")) == 1
    saved = Path(handle.checkpoint(timeout_s=WAIT_S))
    os.kill(handle.status().stages[1]["process"], signal.SIGKILL)
    with pytest.raises(StageError, match="Replica 1 of stage 0 died"):
        handle.wait(timeout_s=WAIT_S)
    steps = json.loads((saved / "manifest.json").read_text())["step"] + 3
    for name, how in (("run", {"num_replicas": [1, 3], **SHARDED}), ("alone", {})):
        trainer(tmp_path, name, wide(), **LANED, **how).fit(steps, local=True, progress=False)
    (_, found), (rows, wanted) = told(tmp_path / "run"), told(tmp_path / "alone")
    assert len(rows) == steps
    assert [name for name in wanted if not same_bits(found[name], wanted[name])] == []
