"""Start the driver of a run, and hand over what it needs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.engine.checkpoint import StateSource
from raypipe.errors import ConfigError
from raypipe.runtime.driver.client import ANSWER_S, RayConnection
from raypipe.runtime.driver.driver import DriverActor, driver_name
from raypipe.runtime.driver.reading import refuse_without_cpus
from raypipe.runtime.run.blueprint import Blueprint
from raypipe.runtime.run.spec import RunSpec
from raypipe.runtime.workers.packing import StoredTensors, stored
from raypipe.runtime.workers.places import NAMESPACE, release_abandoned, release_orphans

__all__ = ["start_run"]


def start_run(
    blueprint: Blueprint,
    initial: Sequence[StateSource],
    resources: Mapping[str, float],
    check: Callable[[], None],
    *,
    detached: bool,
) -> RayConnection:
    """Start the driver, which starts the stages. A detached one is returned when it needs nothing more from here.

    Args:
        initial: where the parameters and buffers are. Those of this process go through the object store; each worker
            takes those of its stages, which the driver's plan decides.
        resources: of one worker.
        check: whether the run may begin; works while the stages start. A detached run is checked before that.

    Raises:
        ConfigError: a run of this name is on the cluster.
        RaypipeError: from the check; nothing is left running.
    """
    spec = blueprint.spec
    spares = (spec.num_workers or 0) if spec.max_failures else 0
    workers = spec.workers[:2] if spec.workers else (max(spec.wanted_workers, spares),) * 2
    refuse_without_cpus(blueprint.setup.sources, workers, resources)
    if detached:
        check()
    release_abandoned()
    driver = _driver(spec, detached=detached)
    try:
        call = _begun(driver, blueprint, initial, resources, detached=detached)
        connection = RayConnection(driver, spec.name, owner=not detached, call=call, path=str(spec.place))
        if not detached:
            check()
        driver.go_on.remote()
        while detached and not _started(driver):
            connection.check()
    except BaseException:
        # Also where somebody lost patience with a slow start: a driver that stays behind would block the run's name.
        with contextlib.suppress(RayError):
            ray.kill(driver, no_restart=True)
        release_orphans(driver_name(spec.name))
        raise
    return connection


def _driver(spec: RunSpec, *, detached: bool) -> Any:
    """The actor.

    Raises:
        ConfigError: a run of this name is on the cluster.
    """
    options: dict[str, Any] = {"name": driver_name(spec.name), "namespace": NAMESPACE}
    options["max_restarts"] = spec.max_failures  # each takes the stages over, see runtime/driver/succession.py
    # Ray (2.60) puts an actor that asks for nothing on any node, also on one that is soon taken away, and hears no soft
    # wish of it: so it asks for one byte of the memory that every node has.
    options["memory"] = 1
    options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    if detached:
        options["lifetime"] = "detached"
    try:
        return DriverActor.options(**options).remote(spec.name, str(spec.place), detached)
    except ValueError as error:
        raise ConfigError(
            f"A run named {spec.name!r} is on this cluster ({error}). Choose another RunConfig(name=...), follow it "
            f"with raypipe.attach({spec.name!r}), or wait for it."
        ) from error


def _begun(
    driver: Any, blueprint: Blueprint, initial: Sequence[StateSource], resources: Mapping[str, float], *, detached: bool
) -> Any:
    """The driver's long call.

    Raises:
        ConfigError: something of the run cannot be sent.
    """
    try:
        return driver.run.remote(blueprint, _handed_over(driver, initial, detached), dict(resources))
    except TypeError as error:  # raypipe.prepare.arguments looks for it before, and may have looked past something
        lines = [line for line in str(error).splitlines() if any(map(str.isalpha, line))]
        said = next((line.strip(" !") for line in lines if "FAIL serialization" in line), lines[-1])
        raise ConfigError(
            f"Something of the run cannot be sent to Ray's actors: {said} Define model, "
            "loss_fn, optimizer and data at module level, without locks, open files or connections in them."
        ) from None


def _started(driver: Any) -> bool:
    """Whether a detached driver has all that it needs from here; False where it does not answer soon."""
    asked = driver.wait_started.remote(1.0)
    return bool(ray.wait([asked], timeout=ANSWER_S)[0] and ray.get(asked))


def _handed_over(driver: Any, initial: Sequence[StateSource], detached: bool) -> StoredTensors:
    """The tensors in the object store, where they outlive this process if the run does.

    An object dies with the process that put it there, so a detached driver has each parcel copied by a task and owns
    the copy. That is waited for parcel by parcel: the store never holds more than the model and one parcel.
    """

    def put(packed: Any) -> Any:
        ref = ray.put(packed)
        return ray.get(driver.keep.remote([ref])) if detached else ref

    return stored(initial, put)
