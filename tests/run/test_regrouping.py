"""A run of threads that loses a replica: the loop tells of a step that was made, and goes on with those left."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from raypipe.engine.executor import Executor
from raypipe.engine.local import LocalFleet, _with_own_functions
from raypipe.engine.optim.state import StageState
from raypipe.errors import StageLostError
from raypipe.run.journal import Journal
from raypipe.run.loop import LoopSetup, run_loop
from raypipe.run.plans.blueprint import assemble
from raypipe.run.plans.plans import Plans, regroup
from raypipe.run.requests import Requests
from raypipe.run.spec import PlanInForce
from raypipe.run.transitions import Change, Join, Recovered, Regroup, Steps
from tests.exactness import same_bits
from tests.run.loops import Transitions
from tests.run.test_calls import Listens
from tests.runs.test_replicas import told, trainer

pytestmark = [pytest.mark.engine, pytest.mark.usefixtures("shared_captures")]

STEPS, LOST_AFTER, JOINS_AFTER = 9, 4, 6
LOST = 0


class Threads(Transitions):
    """Fleet and its transitions; its threads are replaced over the same states if a replica is lost or joins."""

    def __init__(self, plans: Plans, tensors: Any, requests: Requests) -> None:
        self._plans, self._tensors, self._requests = plans, tensors, requests
        self._now, self._done, self._unheard = LocalFleet(plans._blueprint.setup, plans.made.setup, tensors), 0, [[]]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._now, name)

    def run(self, *given: Any, **options: Any) -> Iterator[Any]:
        for reports in self._now.run(*given, **options):
            training = reports[0][0].grad_norm is not None
            self._done += training
            if training and self._done == LOST_AFTER:
                self._unheard = [of_worker for of_worker in reports if of_worker[0].worker != LOST]
                raise StageLostError("Replica 0 of stage 0 died")
            yield reports
            if training and self._done == JOINS_AFTER:
                self._requests.join()

    def catch_up(self, step: int) -> Steps:
        assert step == LOST_AFTER - 1
        return [self._unheard]

    def carry_out(self, change: Change, step: int) -> Recovered:
        if isinstance(change, Join):
            first, last = (executor.states[0] for executor in self._now.executors)
            return self._over((2, 1), [first, deepcopy(first), last], step)
        assert isinstance(change, Regroup)
        assert step == LOST_AFTER
        states = [executor.states[0] for executor in self._now.executors]
        return self._over((1, 1), [state for worker, state in enumerate(states) if worker != LOST], step)

    def _over(self, counts: tuple[int, int], states: list[StageState], step: int) -> Recovered:
        self._now.stop()
        made = self._plans.made = self._plans.regrouped(counts)
        self._now = LocalFleet(self._plans._blueprint.setup, made.setup, self._tensors)
        self._now.executors = [
            Executor(
                self._plans._blueprint.setup, _own(made, worker), worker, [state], self._now.executors[worker].channels
            )
            for worker, state in enumerate(states)
        ]
        return Recovered(step, "replicas", plan=made)


def _own(made: PlanInForce, worker: int) -> Any:
    return _with_own_functions(made.setup, made.setup.placement(worker))


def test_steps_are_told_once_and_bits_stay(tmp_path: Path) -> None:
    trainer(tmp_path, "alone", num_lanes=2).fit(num_steps=STEPS, local=True, progress=False)
    made = trainer(tmp_path, "run", num_replicas=[2, 1])
    survives = SimpleNamespace(max_failures=-1)
    made._run = SimpleNamespace(name="run", storage_path=str(tmp_path), failure_config=survives)
    job = made._prepared()
    blueprint = made._blueprint(job, STEPS, local=True)
    requests = Requests()
    plans = Plans(blueprint, assemble(blueprint, job.planned))
    fleet, journal = Threads(plans, job.initial, requests), Journal("run", "")
    try:
        spec = replace(blueprint.spec, callbacks=(listens := Listens(),))
        found = run_loop(LoopSetup(fleet, spec, plans.made, journal, requests, recovery=fleet))
    finally:
        fleet.stop()
    assert found.step == STEPS
    (rows, one), (others, _) = told(tmp_path / "alone"), told(tmp_path / "run")
    assert rows == others
    for state in (executor.states[0] for executor in fleet.executors):
        assert all(same_bits(parameter.detach(), one[name]) for name, parameter in state.parameters.items())
    lines = (tmp_path / "run" / "events.jsonl").read_text()
    assert lines.index('"regroup", "reason": "the run goes on with 1-1 workers"') < lines.index('"join"')
    assert '"recovery"' not in lines
    heard = [(what, number, *more) for what, number, *more in listens.told if what in ("recovery", "decision")]
    assert heard == [
        ("recovery", LOST_AFTER - 1, "failure"), ("recovery", LOST_AFTER, "regroup"), ("decision", JOINS_AFTER, "join"),
        ("decision", STEPS, "finish"),
    ]  # fmt: skip
    assert [number for what, number, *_ in listens.told if what == "step"] == list(range(STEPS))


def test_the_controller_of_those_that_are_left_knows_how_many_they_are(tmp_path: Path) -> None:
    made = trainer(tmp_path, "turned", num_replicas=[2, 1], codec_forward="auto")
    job = made._prepared()
    whole = assemble(made._blueprint(job, STEPS, local=False), job.planned)
    assert whole.retune is not None
    assert whole.retune.choice.spec.replicas == (2, 1)
    less = regroup(whole, (1, 1), 1)
    assert less.retune is not None
    assert less.retune.choice.spec == less.plan.spec
    assert less.retune.choice.spec.replicas == (1, 1)
    assert replace(less.retune, choice=whole.retune.choice) == whole.retune
