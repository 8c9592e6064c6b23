"""Processors for data that tasks of Ray read: those of a ray.data.Dataset run beside the stages, on the cluster's CPUs.

cluster   [ stage 0 ][ stage 1 ][ task that reads ]      stages keep their CPUs for the whole run
cluster   [ stage 0 ][ stage 1 ]                         the tasks wait for ever, and the first step with them
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray

from raypipe.engine.data.stream_source import StreamSource
from raypipe.errors import ConfigError

__all__ = ["refuse_without_cpus"]

OF_A_TASK = 1.0
"""CPUs that a task of ray.data asks for where nobody says otherwise."""


def refuse_without_cpus(sources: Mapping[str, Any], workers: tuple[int, int], resources: Mapping[str, float]) -> None:
    """Refuse a run whose stages leave no CPU to the tasks that read its data.

    A cluster that has no room for the fewest stages waits for nodes, and is not refused.

    Args:
        sources: of the run, by name.
        workers: the fewest and the most that it may have.
        resources: of one worker.

    Raises:
        ConfigError: says how many CPUs there are, and how many the stages take.
    """
    read = [mode for mode, source in sources.items() if isinstance(source, StreamSource) and source.read_by_tasks]
    cpus, (least, most) = ray.cluster_resources().get("CPU", 0.0), (n * resources.get("CPU", 1.0) for n in workers)
    if not read or not least <= cpus < most + OF_A_TASK:
        return
    raise ConfigError(
        f"{read[0]}_data is a ray.data.Dataset, which tasks of Ray read, each on a CPU beside those of the stages; but "
        f"up to {workers[1]} workers of {resources.get('CPU', 1.0):g} CPU each leave none of the cluster's {cpus:g}, "
        f"and a step would wait for ever. Give the cluster {most + OF_A_TASK:g} CPUs or more (on one machine: "
        "ray.init(num_cpus=...) before the dataset is made), or take fewer num_workers, or a share of a CPU for each: "
        "ScalingConfig(resources_per_worker={'CPU': 0.5})."
    )
