"""The trainer's side of a run on Ray: connect to a cluster, and a connection to the driver, see starting.py."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import ray
from ray.exceptions import (
    ActorDiedError,
    ActorUnavailableError,
    AuthenticationError,
    GetTimeoutError,
    RayActorError,
    RayError,
    RayTaskError,
)

from raypipe.config.ray import gpu_share
from raypipe.engine.cuda_device import why_not
from raypipe.errors import ConfigError, PlanError, StageError
from raypipe.ir.timeline import Timeline
from raypipe.runtime.driver.driver import driver_name
from raypipe.runtime.driver.knock import found_at, knock
from raypipe.runtime.run.journal import News
from raypipe.runtime.run.status import RunStatus
from raypipe.runtime.workers.places import NAMESPACE, PREFIX, is_driver, release_orphans

__all__ = ["NAMESPACE", "RayConnection", "connected", "find_run"]

CONTROL_TIMEOUT_S = 30.0
ANSWER_S = 5.0
"""A driver that is silent for longer is told about, and waited for."""

# Standard error stays free for the progress line; Ray writes its logs into its session folder.
_QUIET: dict[str, Any] = {"namespace": NAMESPACE, "logging_level": "ERROR", "log_to_driver": False}


@contextlib.contextmanager
def connected(num_workers: int, resources: Mapping[str, float], *, detached: bool = False) -> Iterator[None]:
    """Inside, Ray runs: the caller's connection, the cluster that RAY_ADDRESS names, or one of our own.

    A detached run needs one that outlives this process, so none of our own.

    Raises:
        ConfigError: there is none.
    Our own has as many logical CPUs as there are workers (the driver takes none), or what they ask for, and ends
    with the context.
    Ray protects it with a token, as it does for every cluster that it starts in a process.
    """
    if ray.is_initialized():
        yield
        return
    if address := os.environ.get("RAY_ADDRESS"):
        _join(address)
    elif detached:
        raise ConfigError(
            "detached=True needs a cluster that outlives this process, and RAY_ADDRESS names none. Start one with "
            "`ray start --head` and set RAY_ADDRESS=auto, or leave detached out."
        )
    else:
        # Ray's workers are otherwise so nice that every daemon of its own goes before a stage.
        ray.init(
            address="local",
            num_cpus=max(num_workers, math.ceil(num_workers * resources.get("CPU", 1))),
            resources={name: n * num_workers for name, n in resources.items() if name not in ("CPU", "GPU")},
            include_dashboard=False,
            _system_config={"worker_niceness": 0},
            **_QUIET,
        )
    try:
        _check_gpus(num_workers * gpu_share(resources))
        yield
    finally:
        ray.shutdown()


def _check_gpus(wanted: float) -> None:
    """Refuse GPUs that a machine does not have, where no node can join: others are waited for in their places."""
    there = ray.cluster_resources().get("GPU", 0.0) if wanted and not os.environ.get("RAY_ADDRESS") else wanted
    if wanted > there:
        why = f" {why_not()}" if why_not() else ""
        raise ConfigError(
            f"ScalingConfig(use_gpu=True): the workers want {wanted:g} GPUs, and Ray finds {there:g} on this "
            f"machine.{why} Give a share of one, as in resources_per_worker={{'GPU': 0.5}}, fewer num_workers, "
            "use_gpu=False, or a cluster that has them (RAY_ADDRESS)."
        )


def _join(address: str) -> None:
    """Connect to a cluster that is there.

    Raises:
        ConfigError: none is.
    """
    try:
        knock(address)
        ray.init(address=address, **_QUIET)
    except AuthenticationError:
        with contextlib.suppress(ConnectionError):
            address = found_at(address)
        why = "it lets nobody in without its token, and takes none from here"
        cure = "Set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH to a copy of its token, or RAY_ADDRESS to a cluster of"
        raise ConfigError(f"No Ray cluster at {address}: {why}. {cure} yours; raypipe doctor looks closer.") from None
    except (ConnectionError, RuntimeError, ValueError) as error:
        why = " ".join(str(error).split()).rstrip(".")
        raise ConfigError(
            f"No Ray cluster at {address}: {why}. Set RAY_ADDRESS to one that runs; raypipe doctor looks closer."
        ) from None


class _Question(NamedTuple):
    """What the driver was asked for: news of records ``since``, and since when by this process's clock."""

    since: int
    ref: Any
    since_s: float


class RayConnection:
    """A connection to the driver actor of one run.

    Args:
        owner: this process started the run and ends the driver with ``close``; others only listen.
        call: the owner's reference to the driver's long call.
        path: of the run's folder, where it is known before the driver has answered.
    """

    def __init__(self, driver: Any, name: str, *, owner: bool, call: Any = None, path: str = "") -> None:
        self._driver: Any = driver
        self._call: Any = call
        self._name = name
        self._owner = owner
        self._asked: _Question | None = None
        self._ended = False
        self._wish = ""  # why the run shall end, where somebody wants that
        self._status = RunStatus(name=name, path=path, state="starting")

    def news(self, since: int, wait_s: float) -> News:
        """See Journal. A driver that does not answer in time is waited for as long as Ray knows of its process.

        Nothing is new then, and the status says for how long it has been silent.

        Raises:
            StageError: the driver is gone.
        """
        if self._asked is None or self._asked.since != since:
            self._asked = _Question(since, self._driver.news.remote(since, wait_s), time.monotonic())
        try:
            if not ray.wait([self._asked.ref], timeout=wait_s + ANSWER_S)[0]:
                return self._no_news()
            asked, self._asked = self._asked, None
            news: News = ray.get(asked.ref)
        except RayActorError as error:
            if not self._comes_back(error):
                raise self._gone(error) from None
            self._asked = asked._replace(ref=self._driver.news.remote(since, wait_s))
            return self._no_news()
        self._status, self._ended = news.status, news.ended
        if self._wish and news.status.state in ("starting", "running"):  # it knows nothing of the wish
            self._driver.stop.remote(self._wish)
        if not news.ended:
            self.check()
        return news

    def _no_news(self) -> News:
        assert self._asked is not None
        silent_s = time.monotonic() - self._asked.since_s
        message = (
            f"the driver has not answered for {silent_s:.0f} s; Ray says that its process lives, so it is waited for"
        )
        return News([], dataclasses.replace(self._status, message=message), None, None, self._asked.since)

    def _comes_back(self, error: BaseException | None) -> bool:
        """Whether Ray cannot reach the driver at the moment, but has not given it up.

        Calls under way when a drained node goes fail with ActorDiedError although Ray starts their actor again: what
        counts is whether that still has its name. Ray is asked for all names, for one alone it remembers.
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
            "the run again under the same name; it goes on where its stages stand if they live, else from its newest "
            "checkpoint."
        )

    def check(self) -> None:
        """Raise what kept the driver from running at all: a function of the user's that it cannot import, say."""
        if self._call is not None and ray.wait([self._call], timeout=0)[0]:
            call, self._call = self._call, None
            try:
                ray.get(call)
            except RayTaskError as error:
                raise StageError(f"The driver of run {self._name!r} could not begin: {error}") from None
            except RayActorError:  # it died, and Ray has started it again: it has just answered
                pass

    def part_before(self, step: int) -> bytes | None:
        """The newest part of metrics.parquet with steps below ``step``; None where there is none."""
        found: bytes | None = self._ask(self._there.part_before.remote(step))
        return found

    def stop(self, reason: str) -> None:
        """Have the run end; a driver that is killed before it has is told again once Ray has started it again."""
        self._wish = reason
        try:
            self._ask(self._driver.stop.remote(reason))
        except StageError as error:
            if not self._comes_back(error.__cause__):
                raise

    def checkpoint(self) -> None:
        self._ask(self._there.checkpoint.remote())

    def resize(self, num_stages: int, timeout_s: float, num_replicas: int | tuple[int, ...] | None = None) -> None:
        try:
            asked = self._there.resize.remote(num_stages, timeout_s, num_replicas)
            self._ask(asked, timeout_s + CONTROL_TIMEOUT_S)
        except RayTaskError as error:
            if isinstance(error.cause, PlanError):
                raise error.cause from None
            raise
        except StageError as error:
            if not self._comes_back(error.__cause__):
                raise
            raise PlanError(
                f"The driver of run {self._name!r} died during the resize, and Ray starts it again: the run goes on "
                "with the stages that it had or was to have, as its status says. Ask again if need be."
            ) from None

    def predicted(self) -> Timeline | None:
        return self._ask(self._there.predicted.remote())

    @property
    def _there(self) -> Any:
        """The driver.

        Raises:
            StageError: the run is over, and its driver with it.
        """
        if self._driver is None:
            raise StageError(
                f"Run {self._name!r} is over. What is left of it lies in its folder; raypipe.Result.from_path reads it."
            )
        return self._driver

    def close(self) -> None:
        """Let go of the driver; its owner ends it, and with it whatever of the run is left.

        A driver whose run has ended has ended its stages too. Others of this name are none of its own: it has refused
        to go on with them.
        """
        if self._owner and self._driver is not None:
            with contextlib.suppress(RayError):
                ray.kill(self._driver, no_restart=True)
                if not self._ended:
                    release_orphans(driver_name(self._name))
        self._driver = self._call = None

    def _ask(self, ref: Any, timeout_s: float | None = None) -> Any:
        try:
            return ray.get(ref, timeout=CONTROL_TIMEOUT_S if timeout_s is None else timeout_s)
        except GetTimeoutError:
            raise StageError(
                f"The driver of run {self._name!r} has not answered, though Ray says that its process lives: it is "
                "stopped, or its machine is busy. It will do what was asked once it goes on."
            ) from None
        except RayActorError as error:
            raise StageError(f"The driver of run {self._name!r} is gone: {str(error).splitlines()[0]}") from error


def find_run(name: str) -> RayConnection:
    """A connection to a run that is on the cluster; connects to the one that RAY_ADDRESS names where nobody has.

    Raises:
        ConfigError: no cluster, or no run of this name on it; says which there are.
    """
    if not ray.is_initialized():
        _join(os.environ.get("RAY_ADDRESS", "auto"))
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
