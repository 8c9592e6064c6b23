"""Which failure is told: here, that a process was ended because there was no memory left."""

from __future__ import annotations

import time
from typing import Any

import pytest
import ray
from ray.exceptions import RayActorError

from raypipe.errors import RanOut, StageLostError
from raypipe.planner.liveness import Finding
from raypipe.runtime.workers.root_cause import root_cause

pytestmark = pytest.mark.ray


class _Works:
    def work(self) -> None:
        time.sleep(600.0)


def test_whose_memory_was_not_enough_is_known_of_a_killed_process(local_ray: None) -> None:
    actor: Any = ray.remote(num_cpus=0)(_Works).remote()
    ref = actor.work.remote()
    ray.kill(actor)
    with pytest.raises(RayActorError):
        ray.get(ref, timeout=60.0)
    found = root_cause({ref: 1}, ["Stage 0", "Stage 1"], 3, lambda worker, said: Finding("died", True, "ended", 0.1, 5))
    assert isinstance(found, StageLostError)
    assert found.ran_out == RanOut(1, 5)
    found = root_cause({ref: 1}, ["Stage 0", "Stage 1"], 3, lambda worker, said: Finding("died", True, "ended", 0.1))
    assert found.ran_out is None
