"""The training loop in threads, with a recovery, a journal or requests of a test's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from raypipe.engine.local import LocalFleet
from raypipe.ir.report import StepRecord, StepReport
from raypipe.run.journal import Journal
from raypipe.run.loop import LoopSetup, run_loop
from raypipe.run.plans.blueprint import assemble
from raypipe.run.requests import Requests
from raypipe.run.spec import Outcome
from raypipe.run.status import Stages


def looped(
    made: Any,
    num_steps: int,
    make_fleet: Callable[..., Any] = LocalFleet,
    *,
    recovery: Callable[[Any], Any] | None = None,
    journal: Journal | None = None,
    requests: Requests | None = None,
) -> Outcome:
    """Train with the loop alone, in this thread; with a recovery, failures are survived without limit."""
    if recovery is not None:
        made._run = SimpleNamespace(**{**vars(made._run), "failure_config": SimpleNamespace(max_failures=-1)})
    job = made._prepared()
    blueprint = made._blueprint(job, num_steps, local=True)
    setup = assemble(blueprint, job.planned)
    fleet = make_fleet(blueprint.setup, setup.setup, job.tensors)
    watcher, requests = journal or Journal("run", ""), requests or Requests()
    transitions = None if recovery is None else recovery(fleet)
    try:
        return run_loop(LoopSetup(fleet, blueprint.spec, setup, watcher, requests, recovery=transitions))
    finally:
        fleet.stop()


class Acts(Journal):
    """Journal that acts on the run's requests after some steps."""

    def __init__(self, requests: Requests, after: Mapping[int, Callable[[Requests], object]]) -> None:
        super().__init__("run", "")
        self._requests, self._after = requests, after

    def step(self, record: StepRecord, reports: Sequence[StepReport], stages: Stages) -> None:
        super().step(record, reports, stages)
        if acts := self._after.get(record.step + 1):
            acts(self._requests)


class Transitions:
    """Base of fakes: no copies, no other plan, and no step that only some have completed."""

    replanning = None
    failures = 0

    def keep_copy(self, step: int) -> None: ...

    def catch_up(self, step: int) -> Any: ...

    def lighten(self, *arguments: Any) -> Any:
        raise AssertionError("memory is enough")
