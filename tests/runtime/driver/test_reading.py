"""Training on a real ray.data.Dataset: the losses of the same rows in a list, and no wait for CPUs that stages hold."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from ray.train import ScalingConfig

from raypipe.data.stream_source import StreamSource
from raypipe.errors import ConfigError
from raypipe.runtime.driver.ray_cluster import refuse_without_cpus
from tests.runs.test_given_data import fit_of_streams as fit
from tests.runs.test_given_data import trainer_of_streams as trainer
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

ROWS = 40


class Listed(torch.utils.data.IterableDataset[Any]):
    """The rows of the dataset, in its order."""

    def __iter__(self) -> Any:
        draws = np.random.default_rng(0)
        for number in range(ROWS):
            yield draws.standard_normal(3, dtype=np.float32), np.int64(number % 3)


@pytest.fixture(scope="module")
def dataset(local_ray: None) -> Any:
    """In four blocks, which tasks of Ray change before they are read, so that they have something to do."""
    import ray.data

    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = [{"x": x / 2, "y": y} for x, y in Listed()]
    return ray.data.from_items(rows, override_num_blocks=4).map(lambda row: {"x": row["x"] * 2, "y": row["y"]})


def executing() -> list[str]:
    """Threads of executions of ray.data, which would start Ray again if they were left to the end of the process."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("StreamingExecutor")]


def losses(result: Any) -> list[float]:
    return [record.loss for record in result.records]


def test_losses_are_those_of_the_same_rows_and_a_run_goes_on(dataset: Any, tmp_path: Path) -> None:
    """Three passes over the rows; the second submission begins in the middle of the second one."""
    whole = fit(tmp_path, "listed", Listed(), 12)
    fit(tmp_path, "parts", dataset, 8)
    assert losses(fit(tmp_path, "parts", dataset, 12)) == losses(whole)
    wait_until(lambda: not executing())


def test_stages_on_ray_read_it_beside_each_other(cluster: None, dataset: Any, tmp_path: Path) -> None:
    whole = fit(tmp_path, "listed", Listed(), 6)
    made = trainer(tmp_path, "run", dataset, scaling_config=ScalingConfig(num_workers=2))
    assert losses(made.fit(num_steps=6, progress=False)) == losses(whole)


def test_stages_that_take_every_cpu_are_refused_with_the_numbers(cluster: None, dataset: Any, tmp_path: Path) -> None:
    wide = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 2})
    made = trainer(tmp_path, "run", dataset, scaling_config=wide)
    wanted = (
        r"train_data is a ray\.data\.Dataset.*2 workers of 2 CPU each leave none of the cluster's 4.*5 CPUs or more"
    )
    with pytest.raises(ConfigError, match=wanted):
        made.fit(num_steps=1, progress=False)
    sources = {"train": StreamSource(dataset, seed=0)}
    for workers, share in (((2, 4), 1.0), ((4, 4), 1.0), ((3, 3), 1.2)):
        with pytest.raises(ConfigError, match="a step would wait for ever"):
            refuse_without_cpus(sources, workers, {"CPU": share})
    refuse_without_cpus(sources, (4, 4), {"CPU": 0.75})
    refuse_without_cpus(sources, (5, 5), {"CPU": 1.0})  # it waits for nodes
    refuse_without_cpus({"train": StreamSource(Listed(), seed=0)}, (4, 4), {"CPU": 1.0})
    assert ray.cluster_resources()["CPU"] == 4.0
