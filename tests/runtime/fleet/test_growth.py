"""Runs whose number of workers may change: they wait, begin with fewer, grow, shrink, and end with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from ray.train import ScalingConfig
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from raypipe.api.handle import RunHandle
from tests.runtime.fleet.test_recovery import ENDLESS, as_undisturbed, events, reached, stopped, surviving
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]


@contextmanager
def somebody_else(cpus: float) -> Iterator[PlacementGroup]:
    """Has so many CPUs of the cluster."""
    group = placement_group([{"CPU": cpus}])
    assert group.wait(60)
    try:
        yield group
    finally:
        remove_placement_group(group)


def has_stages(handle: RunHandle, count: int) -> Callable[[], bool]:
    return lambda: len(handle.status().stages) == count


def places_of(run: str) -> list[str]:
    """States of the places that a run has or waits for."""
    rows = ray.util.placement_group_table().values()
    return sorted(row["state"] for row in rows if f"/{run}/" in row["name"] and row["state"] != "REMOVED")


def test_a_run_begins_with_what_there_is_and_grows_when_more_comes(cluster: None, tmp_path: Path) -> None:
    """And no further than somebody asks for; replicas: tests/runtime/driver/test_sharded_optimizer.py."""
    with somebody_else(2) as other:
        made = surviving(tmp_path, "grows", "noisy", 0, num_stages=3)
        made._scaling = ScalingConfig(num_workers=(2, 3), elastic_resize_monitor_interval_s=0.0)
        handle = made.start(ENDLESS)
        reached(handle, 5)
        first = handle.status().stages
        assert len(first) == 2
        # An autoscaler would see the place that is pending.
        wait_until(lambda: places_of("grows") == ["CREATED", "CREATED", "PENDING"])
        remove_placement_group(other)
        wait_until(has_stages(handle, 3))
        grown = handle.status().stages
        reached(handle, handle.status().step + 5)
        handle.resize(2)
        reached(handle, handle.status().step + 200)
        assert len(handle.status().stages) == 2
        wait_until(lambda: places_of("grows") == ["CREATED", "CREATED"])
        steps, checkpoint = stopped(handle)
    assert {one["process"] for one in first} < {one["process"] for one in grown}
    grew, shrank = events(tmp_path / "grows", "resize")
    assert (grew["reason"], shrank["num_stages"]) == ("1 more worker came", 2)
    assert as_undisturbed(tmp_path, checkpoint, "noisy", steps) == []
