"""Ray cluster of a run: connects to a cluster or starts a local one, and checks its CPUs and GPUs.

Stages keep their CPUs for the whole run, so that Ray's tasks that read a ray.data.Dataset need additional CPUs:

cluster of 3 CPUs   [ stage 0 ][ stage 1 ][ task that reads ]
cluster of 2 CPUs   [ stage 0 ][ stage 1 ]                       the task would wait for ever: ConfigError
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
from collections.abc import Iterator, Mapping
from typing import Any

import ray
from ray.exceptions import AuthenticationError

from raypipe.config.ray import gpu_share
from raypipe.data.stream_source import StreamSource
from raypipe.engine.device.cuda_device import why_not
from raypipe.errors import ConfigError
from raypipe.runtime.driver.ray_ping import cluster_address, ping_cluster
from raypipe.runtime.fleet.missing_resources import has_autoscaler
from raypipe.runtime.worker.places import NAMESPACE

OF_A_TASK = 1.0
"""CPUs that a task of ray.data requests by default."""


def refuse_without_cpus(sources: Mapping[str, Any], workers: tuple[int, int], resources: Mapping[str, float]) -> None:
    """Raise ConfigError if the stages of a run would leave no CPU to the tasks that read its data.

    Clusters with an autoscaler pass, because it adds nodes for the tasks too. Clusters that are too small even for the
    fewest workers also pass: such a run waits for more nodes anyway.

    Args:
        sources: the run's data sources, by name ("train", "eval").
        workers: smallest and largest number of workers of the run.
        resources: resources of one worker.

    Raises:
        ConfigError: the message has the cluster's CPUs, and the CPUs that the stages take.
    """
    read = [mode for mode, source in sources.items() if isinstance(source, StreamSource) and source.read_by_tasks]
    cpus, (least, most) = ray.cluster_resources().get("CPU", 0.0), (n * resources.get("CPU", 1.0) for n in workers)
    if not read or not least <= cpus < most + OF_A_TASK or has_autoscaler():
        return
    raise ConfigError(
        f"{read[0]}_data is a ray.data.Dataset, which tasks of Ray read, each on a CPU beside those of the stages; but "
        f"up to {workers[1]} workers of {resources.get('CPU', 1.0):g} CPU each leave none of the cluster's {cpus:g}, "
        f"and a step would wait for ever. Give the cluster {most + OF_A_TASK:g} CPUs or more (on one machine: "
        "ray.init(num_cpus=...) before the dataset is made), or take fewer num_workers, or a share of a CPU for each: "
        "ScalingConfig(resources_per_worker={'CPU': 0.5})."
    )


# Standard error stays free for the progress line; Ray writes its logs into its session folder.
QUIET: dict[str, Any] = {"namespace": NAMESPACE, "logging_level": "ERROR", "log_to_driver": False}


@contextlib.contextmanager
def connected(num_workers: int, resources: Mapping[str, float], *, detached: bool = False) -> Iterator[None]:
    """Connect this process to Ray inside the context.

    A connection that the caller has is used. Without one, the cluster at RAY_ADDRESS is joined. If RAY_ADDRESS is not
    set, a local cluster is started, and ends with the context. The local cluster has one logical CPU for each worker,
    or more if workers request more; the driver needs no CPU.

    Args:
        num_workers: number of workers of the run.
        resources: resources of one worker.
        detached: True if the run outlives this process, so that a local cluster is refused.

    Raises:
        ConfigError: there is no such cluster, or a local one has too few GPUs.
    """
    if ray.is_initialized():
        yield
        return
    if address := os.environ.get("RAY_ADDRESS"):
        join_cluster(address)
    elif detached:
        raise ConfigError(
            "detached=True needs a cluster that outlives this process, and RAY_ADDRESS names none. Start one with "
            "`ray start --head` and set RAY_ADDRESS=auto, or leave detached out."
        )
    else:
        with _warnings_left_to_this_process(), _hang_up_blocked():
            # By default, Ray's workers have a niceness that gives Ray's own daemons precedence over stages.
            ray.init(
                address="local",
                num_cpus=max(num_workers, math.ceil(num_workers * resources.get("CPU", 1))),
                resources={name: n * num_workers for name, n in resources.items() if name not in ("CPU", "GPU")},
                include_dashboard=False,
                _system_config={"worker_niceness": 0},
                **QUIET,
            )
    try:
        _check_gpus(num_workers * gpu_share(resources))
        yield
    finally:
        ray.shutdown()


@contextlib.contextmanager
def _warnings_left_to_this_process() -> Iterator[None]:
    """Remove PYTHONWARNINGS from the environment inside the context if it has "error".

    Ray's daemons are started inside the context. They import modules that warn, and would end with an error.
    """
    warnings = os.environ.get("PYTHONWARNINGS", "")
    if "error" not in warnings:
        yield
        return
    del os.environ["PYTHONWARNINGS"]
    try:
        yield
    finally:
        os.environ["PYTHONWARNINGS"] = warnings


@contextlib.contextmanager
def _hang_up_blocked() -> Iterator[None]:
    """Block SIGHUP inside the context; processes that are started there inherit the block, and keep it.

    When the terminal is closed, the kernel sends SIGHUP to this process's group, which includes Ray's daemons (GCS and
    raylet). The stages need these daemons to save their state. Ray protects them from SIGINT in the same way.
    """
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def _check_gpus(wanted: float) -> None:
    """Raise ConfigError if a local cluster has fewer than ``wanted`` GPUs.

    With RAY_ADDRESS set, every cluster passes, because nodes may join.
    """
    there = ray.cluster_resources().get("GPU", 0.0) if wanted and not os.environ.get("RAY_ADDRESS") else wanted
    if wanted > there:
        why = f" {why_not()}" if why_not() else ""
        raise ConfigError(
            f"ScalingConfig(use_gpu=True): the workers want {wanted:g} GPUs, and Ray finds {there:g} on this "
            f"machine.{why} Give a share of one, as in resources_per_worker={{'GPU': 0.5}}, fewer num_workers, "
            "use_gpu=False, or a cluster that has them (RAY_ADDRESS)."
        )


def join_cluster(address: str) -> None:
    """Connect to an existing cluster.

    Raises:
        ConfigError: no cluster answers at this address, or it rejects this process's token.
    """
    try:
        ping_cluster(address)
        ray.init(address=address, **QUIET)
    except AuthenticationError:
        with contextlib.suppress(ConnectionError):
            address = cluster_address(address)
        why = "it requires a token, and accepts none from here"
        cure = "Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to a copy of its token, or RAY_ADDRESS to a cluster of"
        raise ConfigError(f"No Ray cluster at {address}: {why}. {cure} yours; raypipe doctor looks closer.") from None
    except (ConnectionError, RuntimeError, ValueError) as error:
        why = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"No Ray cluster at {address}: {why}. Set RAY_ADDRESS to one that runs; raypipe doctor looks closer."
        ) from None
