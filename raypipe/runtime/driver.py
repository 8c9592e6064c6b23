"""DriverActor: owns the stages of one run and feeds them plans and segments. No tensor ever passes through it.

    trainer --run(spec, setups, states)--> DriverActor --segments--> StageActors
            --poll(since) --------------->     |       <--reports---
            <-- records, outcome ---------     |        (under 10 KB per step)

It is named ``raypipe/<run>``. The stages belong to it and die with it; it belongs to the trainer.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from raypipe.ir.report import StepRecord
from raypipe.runtime.fleet import Fleet
from raypipe.runtime.loop import Outcome, RunSpec, run_loop
from raypipe.runtime.worker import StageSetup

__all__ = ["DriverActor", "driver_name"]


def driver_name(run: str) -> str:
    """The name under which Ray knows the driver of a run."""
    return f"raypipe/{run}"


class _DriverActor:
    def __init__(self) -> None:
        self._records: list[StepRecord] = []
        self._grown = threading.Condition()
        self._members: list[dict[str, Any]] = []

    def run(
        self, spec: RunSpec, setups: Sequence[StageSetup], states: Sequence[Any], resources: Mapping[str, float]
    ) -> Outcome:
        """The whole run in one call. ``states`` are references, which only the stages resolve.

        Raises:
            RaypipeError: the root cause; no stage is left.
        """
        fleet = Fleet(len(setups), resources)
        self._members = fleet.members
        try:
            fleet.configure(setups, states)
            return run_loop(fleet, spec, self._keep)
        finally:
            fleet.stop()

    def _keep(self, record: StepRecord) -> None:
        with self._grown:
            self._records.append(record)
            self._grown.notify_all()

    @ray.method(concurrency_group="control")
    def poll(self, since: int, wait_s: float) -> list[StepRecord]:
        """Records number ``since`` and later; waits up to ``wait_s`` for the first of them."""
        with self._grown:
            self._grown.wait_for(lambda: len(self._records) > since, timeout=wait_s)
            return self._records[since:]

    @ray.method(concurrency_group="control")
    def members(self) -> list[dict[str, Any]]:
        """Host and process id of every stage."""
        return self._members


DriverActor = ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={"control": 4})(_DriverActor)
