"""Client of a run on Ray: starts the driver actor, sends it the run's inputs, and fetches its news."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import ray
import torch
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
)
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from raypipe.engine.io.checkpoint import StateSource
from raypipe.errors import ConfigError, PlanError, RaypipeError, StageError
from raypipe.ir.timeline import Timeline
from raypipe.run.generate_loop import Generation
from raypipe.run.journal import News
from raypipe.run.plans.blueprint import Charter
from raypipe.run.spec import RunSpec
from raypipe.run.status import RunStatus
from raypipe.runtime.driver.driver import DriverActor, driver_name
from raypipe.runtime.driver.driver_failover import Submission
from raypipe.runtime.driver.ray_cluster import join_cluster, refuse_without_cpus
from raypipe.runtime.worker.packing import StoredTensors, stored
from raypipe.runtime.worker.places import NAMESPACE, PREFIX, is_driver, release_abandoned, release_orphans

CONTROL_TIMEOUT_S = 30.0
ANSWER_S = 5.0
"""Seconds beyond the requested wait after which the status reports that the driver does not answer."""


class _Question(NamedTuple):
    """Call of ``DriverActor.news`` that is not answered yet.

    Attributes:
        since: number of the first requested record.
        ref: Ray's reference to the call.
        since_s: ``time.monotonic()`` at which the request was first made.
    """

    since: int
    ref: Any
    since_s: float


class RayConnection:
    """Connection to the driver actor of one run.

    Args:
        driver: handle of the driver actor.
        name: name of the run.
        owner: True if this process started the run and the run is not detached, so that ``close`` ends the driver.
        call: reference to the call of ``DriverActor.run``, in the process that made it; None elsewhere.
        path: the run's folder; "" if unknown before the driver answers.
    """

    def __init__(self, driver: Any, name: str, *, owner: bool, call: Any = None, path: str = "") -> None:
        self._driver: Any = driver
        self._call: Any = call
        self._name = name
        self._owner = owner
        self._question: _Question | None = None
        self._ended = False
        self._stop_reason = ""  # reason of a stop that was requested; "" without one
        self._status = RunStatus(name=name, path=path, state="starting")

    def news(self, since: int, wait_s: float) -> News:
        """Return the records from number ``since`` on, and the run's status; wait up to ``wait_s`` for the first one.

        If the driver does not answer within ANSWER_S more seconds although its process lives, the result has no
        records, and the status has a message with the duration of the silence.

        Raises:
            StageError: the driver is lost and Ray does not restart it, or the driver could not begin.
        """
        if self._question is None or self._question.since != since:
            self._question = _Question(since, self._driver.news.remote(since, wait_s), time.monotonic())
        try:
            if not ray.wait([self._question.ref], timeout=wait_s + ANSWER_S)[0]:
                return self._no_news()
            question, self._question = self._question, None
            news: News = ray.get(question.ref)
        except RayActorError as error:
            if not self._comes_back(error):
                raise self._gone(error) from None
            self._question = question._replace(ref=self._driver.news.remote(since, wait_s))
            return self._no_news()
        self._status, self._ended = news.status, news.ended
        if self._stop_reason and news.status.state in (
            "starting",
            "running",
        ):  # a restarted driver has lost the request
            self._driver.stop.remote(self._stop_reason)
        if not news.ended:
            self.check()
        return news

    def _no_news(self) -> News:
        assert self._question is not None
        silent_s = time.monotonic() - self._question.since_s
        message = (
            f"the driver has not answered for {silent_s:.0f} s; its process lives according to Ray, so it is waited for"
        )
        return News([], dataclasses.replace(self._status, message=message), None, None, self._question.since)

    def _comes_back(self, error: BaseException | None) -> bool:
        """Return True if a call failed with ``error`` although Ray still has the driver, or is restarting the driver.

        When a draining node ends, pending calls fail with ActorDiedError although Ray restarts the actor. The actor's
        name still exists then. To find the name, all names are listed, because Ray caches the lookup of a single name.
        """
        if not isinstance(error, RayActorError):
            return False
        if isinstance(error, ActorUnavailableError):
            return True
        names = [row["name"] for row in ray.util.list_named_actors(all_namespaces=True)] if error.preempted else []
        return driver_name(self._name) in names

    def _gone(self, error: RayActorError) -> StageError:
        if self._owner and isinstance(error, ActorDiedError):
            release_orphans(driver_name(self._name))
        stages = "with it" if self._owner else "wait a while for another one"
        return StageError(
            f"The driver of run {self._name!r} is gone, and its stages {stages}: {str(error).splitlines()[0]} Start "
            "the run again under the same name; it continues from the state of its stages if they live, else from its "
            "newest checkpoint."
        )

    def check(self) -> None:
        """Check that the call of ``DriverActor.run`` has not failed.

        Raises:
            StageError: the driver could not begin, for example because it cannot import a user's function.
        """
        if self._call is not None and ray.wait([self._call], timeout=0)[0]:
            call, self._call = self._call, None
            try:
                ray.get(call)
            except RayTaskError as error:
                raise StageError(f"The driver of run {self._name!r} could not begin: {error}") from None
            except RayActorError:  # it died and was restarted: it has just answered
                pass

    def part_before(self, step: int) -> bytes | None:
        """Return the bytes of the newest part of metrics.parquet with steps below ``step``; None without a part."""
        part: bytes | None = self._answer(self._there.part_before.remote(step))
        return part

    def stop(self, reason: str) -> None:
        """Request that the run stops; if Ray restarts the driver before the stop, ``news`` repeats the request."""
        self._stop_reason = reason
        try:
            self._answer(self._driver.stop.remote(reason))
        except StageError as error:
            if not self._comes_back(error.__cause__):
                raise

    def checkpoint(self) -> None:
        self._answer(self._there.checkpoint.remote())

    def resize(self, num_stages: int, timeout_s: float, num_replicas: int | tuple[int, ...] | None = None) -> None:
        try:
            call = self._there.resize.remote(num_stages, timeout_s, num_replicas)
            self._answer(call, timeout_s + CONTROL_TIMEOUT_S)
        except StageError as error:
            if not self._comes_back(error.__cause__):
                raise
            raise PlanError(
                f"The driver of run {self._name!r} died during the resize, and Ray starts it again: the run "
                "continues with its old stages or the new ones, as its status shows. Resize again if need be."
            ) from None

    def generate(self, generation: Callable[[], Generation], timeout_s: float) -> torch.Tensor:
        tokens: torch.Tensor = self._answer(
            self._there.generate.remote(generation(), timeout_s), timeout_s + CONTROL_TIMEOUT_S
        )
        return tokens

    def predicted(self) -> Timeline | None:
        return self._answer(self._there.predicted.remote())

    @property
    def _there(self) -> Any:
        """Handle of the driver actor.

        Raises:
            StageError: this connection is closed.
        """
        if self._driver is None:
            raise StageError(
                f"Run {self._name!r} is over. Its results are in its folder; raypipe.Result.from_path reads them."
            )
        return self._driver

    def close(self) -> None:
        """Disconnect from the driver; in the owner's process, also end the driver and the stages of a running run.

        After a run's end no stages are ended here: the driver has ended its own, and other stages under this name
        belong to another driver.
        """
        if self._owner and self._driver is not None:
            with contextlib.suppress(RayError):
                ray.kill(self._driver, no_restart=True)
                if not self._ended:
                    release_orphans(driver_name(self._name))
        self._driver = self._call = None

    def _answer(self, ref: Any, timeout_s: float | None = None) -> Any:
        try:
            return ray.get(ref, timeout=CONTROL_TIMEOUT_S if timeout_s is None else timeout_s)
        except GetTimeoutError:
            raise StageError(
                f"The driver of run {self._name!r} has not answered, though its process lives: it is "
                "stopped, or its machine is busy. It handles the request once it resumes."
            ) from None
        except RayTaskError as error:
            if isinstance(error.cause, RaypipeError):
                raise error.cause from None
            raise
        except RayActorError as error:
            raise StageError(f"The driver of run {self._name!r} is gone: {str(error).splitlines()[0]}") from error


def find_run(name: str) -> RayConnection:
    """Connect to the driver of a running run, and first to Ray (at RAY_ADDRESS, else "auto") if not connected yet.

    Raises:
        ConfigError: there is no cluster, or no run of this name on it; the message lists the runs of the cluster.
    """
    if not ray.is_initialized():
        join_cluster(os.environ.get("RAY_ADDRESS", "auto"))
    try:
        driver = ray.get_actor(driver_name(name), namespace=NAMESPACE)
    except ValueError:
        names = [row["name"] for row in ray.util.list_named_actors(all_namespaces=True)]
        runs = sorted(name.removeprefix(PREFIX) for name in names if is_driver(name))
        raise ConfigError(
            f"No run named {name!r} is on this cluster. Running: {', '.join(runs) or 'none'}. How a finished run ended "
            "is in events.jsonl of its folder."
        ) from None
    return RayConnection(driver, name, owner=False)


def start_run(
    charter: Charter,
    initial: Sequence[StateSource],
    check: Callable[[], None],
    *,
    detached: bool,
) -> RayConnection:
    """Start the driver, which starts the stages.

    For a detached run, wait until the driver no longer needs this process.

    Args:
        charter: the driver's inputs, with the first plan.
        initial: sources of the parameters and buffers. Tensors of this process are put into the object store, from
            which each worker reads those of its stages.
        check: raises RaypipeError if the run may not begin. For a detached run it is called before the driver starts,
            else while the driver starts the stages.
        detached: True if the run goes on after the end of this process.

    Raises:
        ConfigError: a run of this name is on the cluster, or its stages would leave no CPU to tasks that read its data.
        RaypipeError: raised by ``check``; nothing is left running.
    """
    blueprint = charter.blueprint
    spec = blueprint.spec
    spares = (spec.num_workers or 0) if spec.max_failures else 0
    workers = spec.workers[:2] if spec.workers else (max(spec.wanted_workers, spares),) * 2
    refuse_without_cpus(blueprint.setup.sources, workers, blueprint.resources)
    if detached:
        check()
    release_abandoned()
    driver = _driver(spec, blueprint.setup.working_folder, detached=detached)
    try:
        call = _begun(driver, charter, initial, detached=detached)
        connection = RayConnection(driver, spec.name, owner=not detached, call=call, path=str(spec.place))
        if not detached:
            check()
        driver.go_on.remote()
        while detached and not _started(driver):
            connection.check()
    except BaseException:
        # Also after Ctrl-C during a slow start: a driver that is left over would block the run's name.
        with contextlib.suppress(RayError):
            ray.kill(driver, no_restart=True)
        release_orphans(driver_name(spec.name))
        raise
    return connection


def _driver(spec: RunSpec, folder: str, *, detached: bool) -> Any:
    """Create the driver actor, preferably on this node.

    Args:
        folder: working directory of the actor, if the actor's node has this folder.

    Raises:
        ConfigError: a run of this name is on the cluster.
    """
    options: dict[str, Any] = {"name": driver_name(spec.name), "namespace": NAMESPACE}
    options["max_restarts"] = spec.max_failures  # each takes the stages over, see runtime/driver/driver_failover.py
    # Ray (2.60) places an actor without resources on any node, even a draining one, and ignores soft affinity for it:
    # so the driver requests one byte of the memory that every node has.
    options["memory"] = 1
    options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=True)
    if detached:
        options["lifetime"] = "detached"
    try:
        return DriverActor.options(**options).remote(spec.name, str(spec.place), detached, folder)
    except ValueError as error:
        raise ConfigError(
            f"A run named {spec.name!r} is on this cluster ({error}). Choose another RunConfig(name=...), follow it "
            f"with raypipe.attach({spec.name!r}), or wait for it."
        ) from error


def _begun(driver: Any, charter: Charter, initial: Sequence[StateSource], *, detached: bool) -> Any:
    """Call ``DriverActor.run`` with the run's inputs; return the reference to this call.

    Raises:
        ConfigError: an object of the run cannot be serialized.
    """
    try:
        return driver.run.remote(Submission(charter, _handed_over(driver, initial, detached)))
    except TypeError as error:  # raypipe.preflight.arguments checks this before, but may miss objects
        lines = [line for line in str(error).splitlines() if any(map(str.isalpha, line))]
        reason = next((line.strip(" !") for line in lines if "FAIL serialization" in line), lines[-1])
        raise ConfigError(
            f"Something of the run cannot be sent to Ray's actors: {reason} Define model, "
            "loss_fn, optimizer and data at module level, without locks, open files or connections in them."
        ) from None


def _started(driver: Any) -> bool:
    """Return True if the driver of a detached run no longer needs this process, so that this process may end.

    The driver waits up to one second until this is so. Returns False after that second, or if the driver does not
    answer within ANSWER_S.
    """
    call = driver.wait_started.remote(1.0)
    return bool(ray.wait([call], timeout=ANSWER_S)[0] and ray.get(call))


def _handed_over(driver: Any, initial: Sequence[StateSource], detached: bool) -> StoredTensors:
    """Put the initial tensors into the object store, where those of a detached run outlive this process.

    An object in the store is freed when the process that put it there ends. So a detached driver copies each object (a
    parcel of several tensors) and owns the copy. Parcels are copied one at a time, so that the store never holds more
    than the model and one parcel.
    """

    def put(packed: Any) -> Any:
        ref = ray.put(packed)
        return ray.get(driver.keep.remote([ref])) if detached else ref

    return stored(initial, put)
