"""The trainer's side of a run on Ray: connect or start, hand over, follow, and leave nothing behind."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from raypipe.errors import ConfigError, RaypipeError, StageError
from raypipe.ir.report import StepRecord
from raypipe.runtime.driver import DriverActor, driver_name
from raypipe.runtime.loop import Outcome, RunSpec
from raypipe.runtime.packing import pack
from raypipe.runtime.worker import StageSetup

__all__ = ["NAMESPACE", "connected", "run_on_ray"]

NAMESPACE = "raypipe"
POLL_S = 0.5


@contextlib.contextmanager
def connected(num_stages: int, resources: Mapping[str, float]) -> Iterator[None]:
    """Inside, Ray runs: the caller's connection, the cluster that RAY_ADDRESS names, or one of our own.

    Our own has as many logical CPUs as there are stages (the driver takes none), or what they ask for, and ends
    with the context.
    Ray protects it with a token, as it does for every cluster that it starts in a process.
    """
    if ray.is_initialized():
        yield
        return
    # Standard error stays free for the progress line; Ray writes its logs into its session folder.
    quiet: dict[str, Any] = {"namespace": NAMESPACE, "logging_level": "ERROR", "log_to_driver": False}
    if os.environ.get("RAY_ADDRESS"):
        ray.init(**quiet)
    else:
        # Ray's workers are otherwise so nice that every daemon of its own goes before a stage.
        ray.init(
            address="local",
            num_cpus=max(num_stages, math.ceil(num_stages * resources.get("CPU", 1))),
            resources={name: n * num_stages for name, n in resources.items() if name not in ("CPU", "GPU")},
            include_dashboard=False,
            _system_config={"worker_niceness": 0},
            **quiet,
        )
    try:
        yield
    finally:
        ray.shutdown()


def run_on_ray(
    spec: RunSpec,
    setups: Sequence[StageSetup],
    tensors: Mapping[str, Any],
    resources: Mapping[str, float],
    on_record: Callable[[StepRecord], None],
    on_start: Callable[[Any], None] = lambda driver: None,
) -> Outcome:
    """Start the driver, follow it to the end.

    Args:
        tensors: the user's parameters and buffers by name; each stage gets its own through the object store.
        resources: of one worker.
        on_record: called with every step's record, in order.
        on_start: called with the driver's handle before training starts.

    Raises:
        RaypipeError: the root cause of a failure.
    """
    states = [
        ray.put(pack(tensors, (*setup.programs[i].parameters, *setup.programs[i].buffers)))
        for i, setup in enumerate(setups)
    ]
    try:
        driver = DriverActor.options(name=driver_name(spec.name), namespace=NAMESPACE).remote()
    except ValueError as error:
        raise ConfigError(
            f"A run named {spec.name!r} is already on this cluster ({error}). Choose another RunConfig(name=...), "
            "or wait for it."
        ) from error
    seen = 0
    try:
        # States travel inside a list, so that Ray passes the references on and not the tensors.
        finished = driver.run.remote(spec, setups, states, dict(resources))
        on_start(driver)
        while True:
            for record in ray.get(driver.poll.remote(seen, POLL_S)):
                on_record(record)
                seen += 1
            done, _ = ray.wait([finished], timeout=0)
            if done:
                for record in ray.get(driver.poll.remote(seen, 0.0)):
                    on_record(record)
                    seen += 1
                return ray.get(finished)
    except RayTaskError as error:
        if isinstance(error.cause, RaypipeError):
            raise error.cause from None
        raise StageError(f"The driver failed: {error}") from None
    except RayActorError as error:
        raise StageError(f"The driver of run {spec.name!r} died, and its stages with it: {error}") from None
    finally:
        with contextlib.suppress(RayError):
            ray.kill(driver, no_restart=True)
        # Handles kept alive by a traceback would speak to an actor of the next session, whose ids repeat.
        driver = finished = None
