"""A run that loses stages again and again: what is told of a step is told with the processes that made the step."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from raypipe.api.handle import RunHandle
from raypipe.run.status import RunStatus
from tests.models import CASES
from tests.runtime.fleet.test_recovery import ENDLESS, kill, reached, stopped, stopped_driver, surviving
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(300), pytest.mark.usefixtures("shared_captures")]

NET = "noisy"
LR, APART = 1e-3, 1e-9
"""The learning rate counts the steps, so that the optimizer knows which one it makes, whichever process it is in."""
STEP_S = 0.1
"""A process has written what it made so long before anything is published of the step."""
UNHEARD = 2
"""Steps that stages make, of those that they were ordered, while their driver is stopped."""


class Signed(torch.optim.SGD):
    """Appends a line for each step: when, which step, the stage's first parameter, and the process."""

    def __init__(self, named: list[tuple[str, torch.nn.Parameter]], file: Path) -> None:
        super().__init__([parameter for _, parameter in named], lr=LR)
        self._first, self._file = named[0][0], file

    def step(self, closure: Any = None) -> Any:
        done = super().step(closure)
        number = round((self.param_groups[0]["lr"] - LR) / APART)
        with self._file.open("a") as out:
            out.write(f"{time.time()} {number} {self._first} {os.getpid()}\n")
        time.sleep(STEP_S)
        return done


def counting(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 + step * APART / LR)


class Made(NamedTuple):
    """One step of one stage."""

    at_s: float
    step: int
    first: str
    process: int


class Seen(NamedTuple):
    """A status, and when the one before it was asked for, and this one was there."""

    since_s: float
    at_s: float
    status: RunStatus

    @property
    def processes(self) -> list[int]:
        return [stage["process"] for stage in self.status.stages]


def lines(file: Path) -> list[Made]:
    """But for those of this process, which tries the optimizers before the run."""
    found = [line.split() for line in file.read_text().splitlines()]
    made = [Made(float(at_s), int(step), first, int(process)) for at_s, step, first, process in found]
    return [one for one in made if one.process != os.getpid()]


class Watching(threading.Thread):
    """Asks for the status again and again until ``done`` is set."""

    def __init__(self, handle: RunHandle) -> None:
        super().__init__(daemon=True)
        self._handle, self.done, self.seen = handle, threading.Event(), list[Seen]()

    def run(self) -> None:
        since_s = time.time()
        while not self.done.wait(0.005):
            asked_s = time.time()
            status = self._handle.status()
            self.seen.append(Seen(since_s, time.time(), status))
            since_s = asked_s


def wrong(seen: list[Seen], made: list[Made]) -> list[Seen]:
    """Those that name other processes than made their step."""
    names = [name for name, _ in CASES[NET].model().named_parameters()]
    stages = sorted({one.first for one in made}, key=names.index)
    newest, found = 0, []
    for one in seen:
        step = one.status.step
        if step == 0 or not one.processes:
            continue
        of_step = [[m for m in made if m.first == first and m.step == step - 1] for first in stages]
        if step > newest:  # it has just been published: with those that made it last, some of them once more
            newest = step
            good = all(
                process in makers_at(of_stage, one) for process, of_stage in zip(one.processes, of_step, strict=True)
            )
        else:  # others may have taken the state of this step over since
            makers = [{m.process for m in made if m.first == f and m.step in (step - 1, step)} for f in stages]
            good = all(process in of_stage for process, of_stage in zip(one.processes, makers, strict=True))
        if not good:
            found.append(one)
    return found


def makers_at(of_stage: list[Made], one: Seen) -> set[int]:
    """Processes that may have been the last to make a step of a stage when it was published."""
    before = [m for m in of_stage if m.at_s <= one.since_s]
    return {m.process for m in [*before[-1:], *(m for m in of_stage if one.since_s < m.at_s <= one.at_s)]}


def losses(handle: RunHandle, folder: Path, file: Path) -> list[Callable[[], None]]:
    """Faults, one after the other."""

    def unheard() -> None:
        """All stages make steps that the driver does not hear of before one of them is killed."""
        with stopped_driver(folder):
            status = handle.last_status
            assert status is not None
            wait_until(lambda: max(one.step for one in lines(file)) >= status.step - 1 + UNHEARD)
            time.sleep(2 * STEP_S)
            os.kill(status.stages[1]["process"], signal.SIGKILL)

    return [unheard, partial(kill, handle, 0), unheard, partial(kill, handle, 2)]


def test_every_status_names_the_processes_that_made_its_step(local_ray: None, tmp_path: Path) -> None:
    file = tmp_path / "made"
    made = surviving(tmp_path, "told", NET, num_stages=3, max_grad_norm=1.0)
    made._arguments = made._arguments._replace(optimizer=partial(Signed, file=file), lr_scheduler=counting)
    handle = made.start(ENDLESS)
    watching = Watching(handle)
    watching.start()
    reached(handle, 4)
    kept: list[list[int]] = []
    for lose in losses(handle, tmp_path / "told", file):
        before = [stage["process"] for stage in handle.status().stages]
        lose()
        wait_until(lambda: [s["process"] for s in handle.status().stages] != before, 120.0)  # noqa: B023
        reached(handle, handle.status().step + 3)
        after = [stage["process"] for stage in handle.status().stages]
        kept.append([at for at, (old, new) in enumerate(zip(before, after, strict=True)) if old == new])
    stopped(handle)
    watching.done.set()
    watching.join(60.0)
    assert kept == [[0, 2], [1, 2], [0, 2], [0, 1]]
    assert [(one.status.step, one.processes) for one in wrong(watching.seen, lines(file))] == []
    assert len({tuple(one.processes) for one in watching.seen if one.status.step}) > 1
