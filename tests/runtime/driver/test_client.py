"""A driver that is stopped or busy is waited for, and one that is dead is told."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
import ray
from ray.core.generated.common_pb2 import ActorDiedErrorContext, NodeDeathInfo
from ray.exceptions import ActorDiedError, ActorUnavailableError

from raypipe.engine.io.storage import Place
from raypipe.errors import StageError
from raypipe.run.journal import News
from raypipe.run.lease import read_lease
from raypipe.run.plans.blueprint import Charter
from raypipe.run.status import RunStatus
from raypipe.runtime.driver import client
from raypipe.runtime.driver.client import start_run
from tests.prepare.test_resume import trainer
from tests.runtime.left_over import ours
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.usefixtures("shared_captures")]

DRAINED = NodeDeathInfo(reason=NodeDeathInfo.AUTOSCALER_DRAIN_PREEMPTED)


def test_a_driver_that_is_stopped_is_waited_for_and_one_that_dies_meanwhile_is_gone(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    handle = trainer("mlp", tmp_path, "run", 2).start(num_steps=10**6)
    wait_until(lambda: handle.status().step > 0)
    held = read_lease(Place.of(tmp_path / "run"))
    assert held is not None
    process = held.holder.pid
    connection = client.find_run(handle.name)
    inferred = ActorDiedError(ActorDiedErrorContext(actor_id=b"0" * 16, node_death_info=DRAINED))
    assert connection._comes_back(inferred), "Ray infers it from a drained node, and starts the driver again elsewhere"
    assert not connection._comes_back(ActorDiedError())
    monkeypatch.setattr(client, "ANSWER_S", 0.5)  # of a driver that is stopped, and not of one that is starting
    monkeypatch.setattr(client, "CONTROL_TIMEOUT_S", 0.5)

    def stop() -> None:
        os.kill(process, signal.SIGSTOP)
        wait_until(lambda: "has not answered for" in handle.status().message)

    stop()
    step = handle.status().step
    assert "its process lives" in handle.status().message
    assert handle.status().state == "running"
    assert handle.path
    with pytest.raises(StageError, match="its process lives"):
        handle.timeline()
    os.kill(process, signal.SIGCONT)
    wait_until(lambda: handle.status().step > step and not handle.status().message)
    stop()
    os.kill(process, signal.SIGKILL)
    with pytest.raises(StageError, match="driver of run 'run' is gone"):
        handle.wait(timeout_s=180)
    wait_until(lambda: not connection._comes_back(inferred))


def test_a_start_that_somebody_gives_up_leaves_nothing_behind(cluster: None, tmp_path: Path) -> None:
    """Ctrl-C while the model is checked, or whatever else goes wrong: the name is free again, and so are the places."""

    def patience_ends() -> None:
        raise KeyboardInterrupt

    made = trainer("mlp", tmp_path, "run", 2)
    job = made._prepared()
    blueprint = made._blueprint(job, 10, local=False)
    with pytest.raises(KeyboardInterrupt):
        start_run(Charter(blueprint, job.planned), job.initial, patience_ends, detached=False)
    wait_until(lambda: f"raypipe/{blueprint.spec.name}" not in ours().drivers, 60.0)


class _Forgets:
    """A driver whose run never ends, and which Ray starts again without what it has heard."""

    def __init__(self) -> None:
        self._heard = ""

    def news(self, since: int, wait_s: float) -> News:
        return News([], RunStatus("run", "", "stopping" if self._heard else "running"), None, None, since)

    def stop(self, reason: str) -> None:
        self._heard = reason

    def heard(self) -> tuple[str, int]:
        return self._heard, os.getpid()


@pytest.mark.parametrize("received", [True, False])
def test_a_stop_outlives_the_driver_that_was_killed(local_ray: None, *, received: bool) -> None:
    """The driver received the request before it was killed, or no driver did."""
    driver = ray.remote(num_cpus=0, max_restarts=-1, max_task_retries=-1 if received else 0)(_Forgets).remote()
    connection = client.RayConnection(driver, "run", owner=False)
    _, process = ray.get(driver.heard.remote(), timeout=60)
    if received:
        connection.stop("enough")
    os.kill(process, signal.SIGKILL)
    if received:
        wait_until(lambda: ray.get(driver.heard.remote(), timeout=60)[1] != process)
    else:
        connection.stop("enough")

    def stopped() -> bool:
        with contextlib.suppress(ActorUnavailableError):
            connection.news(0, 0.0)
            return ray.get(driver.heard.remote(), timeout=60)[0] == "enough"
        return False

    wait_until(stopped)
    ray.kill(driver, no_restart=True)
