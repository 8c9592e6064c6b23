"""A trainer's run on workers that are there already: what a driver actor does, in a thread of the test."""

from __future__ import annotations

from typing import Any

import ray

from raypipe.api.handle import RunHandle
from raypipe.api.trainer import PipelineTrainer
from raypipe.runtime.run.threads import ThreadLine
from raypipe.runtime.workers.fleet import Fleet
from raypipe.runtime.workers.packing import pack

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
    spec = trainer._spec(job, num_steps, local=False)
    setups = trainer._setups(job, spec.place)
    states = [ray.put(pack(job.tensors, setup.tensors)) for setup in setups]

    def lent() -> Any:
        fleet.configure(setups, states)
        return _Lent(fleet)

    return RunHandle(spec.name, ThreadLine(spec, lent))
