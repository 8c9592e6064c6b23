"""A trainer's run on workers that are there already: what a driver actor does, in a thread of the test."""

from __future__ import annotations

from typing import Any

from raypipe.api.handle import RunHandle
from raypipe.api.trainer import PipelineTrainer
from raypipe.run.spec import PlanInForce
from raypipe.run.threads import ThreadConnection
from raypipe.runtime.fleet.fleet import Fleet
from raypipe.runtime.worker.packing import stored

__all__ = ["start_on"]


class _Lent:
    """A fleet that goes on when the run ends."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fleet, name)

    def stop(self) -> None:
        pass


def start_on(fleet: Fleet, trainer: PipelineTrainer, num_steps: int) -> RunHandle:
    """Like ``trainer.start(num_steps)``, without a process that starts."""
    job = trainer._prepared()
    blueprint = trainer._blueprint(job, num_steps, local=False)

    def lent(made: PlanInForce) -> Any:
        fleet.configure(blueprint.setup, made.setup, [stored(job.initial)])
        return _Lent(fleet)

    return RunHandle(blueprint.spec.name, ThreadConnection(blueprint, job.planned, lent))
