"""Runs whose number of workers may change: they wait, begin with fewer, grow, shrink, and end with the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.train import ScalingConfig
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from raypipe import PipelineTrainer
from raypipe.api.handle import RunHandle
from tests.runtime.fleet.test_recovery import ENDLESS, as_undisturbed, events, reached, stopped, surviving
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]


def growing(
    folder: Path, run: str, workers: tuple[int, int], max_failures: int = 0, interval_s: float = 0.0, **pipeline: Any
) -> PipelineTrainer:
    made = surviving(folder, run, "noisy", max_failures, **{"num_stages": workers[1], **pipeline})
    made._scaling = ScalingConfig(num_workers=workers, elastic_resize_monitor_interval_s=interval_s)
    return made


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


@pytest.mark.parametrize(
    ("given", "alone"),
    [({}, {"num_stages": 3}), ({"num_stages": 2, "num_replicas": [2, 1]}, {"num_lanes": 2})],
    ids=["stages", "replicas"],
)
def test_a_run_begins_with_what_there_is_and_grows_when_more_comes(
    cluster: None, tmp_path: Path, given: dict[str, Any], alone: dict[str, Any]
) -> None:
    with somebody_else(2) as other:
        handle = growing(tmp_path, "grows", (2, 3), **given).start(ENDLESS)
        reached(handle, 5)
        first = handle.status().stages
        assert len(first) == 2
        assert places_of("grows") == ["CREATED", "CREATED", "PENDING"]  # which an autoscaler would see
        remove_placement_group(other)
        wait_until(has_stages(handle, 3))
        grown = handle.status().stages
        reached(handle, handle.status().step + 5)
        steps, checkpoint = stopped(handle)
    assert {one["process"] for one in first} < {one["process"] for one in grown}
    (resize,) = events(tmp_path / "grows", "resize")
    assert resize["reason"] == "1 more worker came"
    assert as_undisturbed(tmp_path, checkpoint, "noisy", steps, **alone) == []


def test_a_run_grows_no_further_than_somebody_asked_for(cluster: None, tmp_path: Path) -> None:
    handle = growing(tmp_path, "asked", (1, 4)).start(ENDLESS)
    reached(handle, 5)
    assert len(handle.status().stages) == 4
    handle.resize(2)
    reached(handle, handle.status().step + 200)
    assert len(handle.status().stages) == 2
    assert places_of("asked") == ["CREATED", "CREATED"]
    stopped(handle)
    assert [line["num_stages"] for line in events(tmp_path / "asked", "resize")] == [2]
