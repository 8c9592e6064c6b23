"""Nodes that go are left between two steps; of an asynchronous run at one after which it is empty anyway."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raypipe.engine.local import LocalFleet
from raypipe.ir.report import StepRecord, StepReport
from raypipe.runtime.run.blueprint import assemble
from raypipe.runtime.run.journal import Journal
from raypipe.runtime.run.loop import run_loop
from raypipe.runtime.run.requests import Requests
from tests.runtime.run.test_planning import trainer

pytestmark = [pytest.mark.engine, pytest.mark.slow]

STEPS, TOLD_AFTER = 50, 23


class Tells(Journal):
    """Says after a step that a node goes."""

    def __init__(self, requests: Requests) -> None:
        super().__init__("run", "")
        self._requests = requests

    def step(self, record: StepRecord, reports: Sequence[StepReport]) -> None:
        super().step(record, reports)
        if record.step + 1 == TOLD_AFTER:
            self._requests.leave({"node"})


class Moves:
    """A Recoverer that finds no stage on such a node; the step at which it was asked is noted."""

    replanning = groups = replays = None
    failures = 0

    def __init__(self, fleet: LocalFleet) -> None:
        self._fleet = fleet
        self.asked: list[tuple[frozenset[str], int]] = []

    def keep_copy(self, step: int) -> None: ...

    def recover(self, *given: Any) -> Any:
        raise AssertionError("nothing fails here")

    lighten = resize = take = recover

    def move(self, nodes: Collection[str], step: int) -> None:
        self.asked.append((frozenset(nodes), step))
        self._fleet._halted = False


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_node_is_left_and_no_bit_changes(schedule: str, tmp_path: Path) -> None:
    def made(run: str) -> Any:
        found = trainer(tmp_path, run, "noisy", schedule=schedule, verify="off")
        survives = SimpleNamespace(max_failures=-1)
        found._run = SimpleNamespace(name=run, storage_path=str(tmp_path), failure_config=survives)
        return found

    run = made("run")
    job = run._prepared()
    blueprint = run._blueprint(job, STEPS, local=True)
    setup = assemble(blueprint, job.planned)
    fleet, requests = LocalFleet(setup.run, setup.setup, job.tensors), Requests()
    moves, told = Moves(fleet), Tells(requests)
    try:
        run_loop(fleet, blueprint.spec, setup.plan, told, requests, recovery=moves)
    finally:
        fleet.stop()
    ((nodes, step),) = moves.asked
    assert nodes == {"node"}
    if schedule == "2bw":
        assert step == 40, "after which all stages keep a copy, and run empty for it"
    else:
        assert TOLD_AFTER <= step < TOLD_AFTER + 8
    alone = made("alone").fit(STEPS, local=True, progress=False)
    found = [(record.step, record.loss, record.grad_norm) for record in told.news(0, 0.0).records]
    assert found == [(record.step, record.loss, record.grad_norm) for record in alone.records]
