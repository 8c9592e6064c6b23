"""Stages joined by transports other than "tcp": the same bits, and the same ends. And stages that are killed."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from raypipe.engine.io.storage import Place
from raypipe.engine.optim.state import Settings
from raypipe.errors import StageError
from raypipe.runtime.fleet.fleet import Fleet
from raypipe.runtime.fleet.roster import Terms
from tests.exactness import SHAPES, captured, programs, same_bits, train
from tests.mishaps import Nap
from tests.models import CASES, case
from tests.runtime.fleet.test_fleet import (
    LINK_S,
    SOON_S,
    alive,
    configure,
    faulty,
    gone_within,
    pids,
    saved_state,
    sgd,
    steps,
)
from tests.trainers import adamw

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300)]

TRANSPORTS = ("object_store", "collective")


@pytest.fixture(scope="module", params=TRANSPORTS)
def joined(request: pytest.FixtureRequest, local_ray: None) -> Iterator[Fleet]:
    """The last test of each transport kills a stage."""
    made = Fleet(3, Terms({"CPU": 0, "spare": 1}, request.param))
    yield made
    made.stop()


def test_the_same_bits(joined: Fleet, tmp_path: Path) -> None:
    made, cut, shape = captured("unet")[1], programs("unet", 3), SHAPES["even"]
    tensors = {**made.parameters, **made.buffers}
    data = case("unet").data(shape.samples)
    configure(joined, cut, tensors, adamw, data, Settings(0, "mean", 0.5, LINK_S), place=Place.of(tmp_path))
    losses = [of_stages[-1].loss for of_stages in steps(joined, cut, shape, "slack")]
    state = saved_state(joined, tmp_path)
    local = train("unet", 3, shape, "slack", "adamw", max_grad_norm=0.5)
    assert losses == local.losses
    for trained in (local.parameters, local.buffers):
        assert [n for n, tensor in trained.items() if not same_bits(tensor, state[n])] == []


def kill_soon(pid: int) -> list[float]:
    """Kill a process in a moment; when that was, once it was."""
    killed_s: list[float] = []

    def kill() -> None:
        killed_s.append(time.monotonic())
        os.kill(pid, signal.SIGKILL)

    threading.Timer(0.3, kill).start()
    return killed_s


def test_a_killed_stage_is_named(joined: Fleet) -> None:
    stages, tensors = faulty(3, 1, Nap(9, 1.0))
    configure(joined, stages, tensors, sgd, CASES["mlp"].data(40), Settings(0, "mean", None, LINK_S))
    running = steps(joined, stages, SHAPES["even"], "1f1b", count=100_000)
    next(running)
    killed_s = kill_soon(pids(joined)[2])
    with pytest.raises(StageError, match=r"^Stage 2 died"):
        list(running)
    assert time.monotonic() - killed_s[0] < SOON_S
    assert [alive(pid) for pid in pids(joined)] == [True, True, False]


@pytest.mark.last
def test_killed_stages_are_named_and_the_others_go_on(fleet: Fleet) -> None:
    """Over "tcp" a middle, a first and a last stage; survivors make the next pipeline."""
    for num_stages, victim in ((3, 1), (3, 0), (2, 1)):
        stages, tensors = faulty(num_stages, 1, Nap(9, 1.0))
        configure(fleet, stages, tensors, sgd, CASES["mlp"].data(40), Settings(0, "mean", None, LINK_S))
        running = steps(fleet, stages, SHAPES["even"], "1f1b", count=100_000)
        next(running)
        of_stages = [member.facts["process"] for member in fleet.in_use]
        killed_s = kill_soon(of_stages[victim])
        with pytest.raises(StageError, match=rf"^Stage {victim} died"):
            list(running)
        assert time.monotonic() - killed_s[0] < SOON_S
        assert [alive(pid) for pid in of_stages] == [stage != victim for stage in range(num_stages)]
        assert [member.lost for member in fleet.in_use] == [stage == victim for stage in range(num_stages)]
    fleet.stop()
    assert all(gone_within(pid, SOON_S) for pid in pids(fleet))
