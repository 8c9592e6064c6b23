"""Execution of a run in threads of this process: the same loop and journal as with actors, without Ray."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

import torch

from raypipe.engine.io.run_files import part_before
from raypipe.errors import LeaseError, PlanError
from raypipe.ir.timeline import Timeline
from raypipe.run.generate_loop import Generation
from raypipe.run.journal import Journal, News
from raypipe.run.lease import Lease
from raypipe.run.loop import LoopSetup, run_loop
from raypipe.run.plans.blueprint import Blueprint, assemble
from raypipe.run.requests import Requests
from raypipe.run.spec import AnyFleet, Outcome, PlanInForce, Planned
from raypipe.run.stage_changes import IN_THREADS

_CHANGING = threading.Lock()
_RUNNING: dict[int, ThreadConnection] = {}
"""Runs of this process by id, in the order in which they began."""


class ThreadConnection:
    """Connection to a run in a thread of this process.

    Args:
        blueprint: part of the run that does not depend on the plan.
        planned: plan of the run.
        make_fleet: (assembled plan) -> fleet; called in the thread of the run, which also stops the fleet.

    Raises:
        LeaseError: another thread of this process trains this run, and no stop of that thread was requested.
    """

    def __init__(self, blueprint: Blueprint, planned: Planned, make_fleet: Callable[[PlanInForce], AnyFleet]) -> None:
        self._blueprint, self._planned = blueprint, planned
        spec = self._spec = blueprint.spec
        self._make_fleet = make_fleet
        self._journal = Journal(spec.name, str(spec.place))
        self._requests = Requests()
        self._thread = threading.Thread(target=self._run, name=f"raypipe {spec.name}", daemon=True)
        self._begin()

    def _begin(self) -> None:
        with _CHANGING:
            # A run that is stopping releases its lease, for which this one waits.
            going_on = [one for one in _RUNNING.values() if not one._requests.stop_reason]
            if any(one._spec.place == self._spec.place for one in going_on):
                name = self._spec.name
                raise LeaseError(
                    f"The run {name!r} is being trained by process {os.getpid()}, which is this one, in threads of an "
                    f"earlier start(local=True). Stop the earlier run: handle.stop(), or raypipe.attach({name!r})"
                    ".stop() where its handle is lost; or give this run another name or resume=False."
                )
            _RUNNING[id(self)] = self
        self._thread.start()

    def news(self, since: int, wait_s: float) -> News:
        return self._journal.news(since, wait_s)

    def part_before(self, step: int) -> bytes | None:
        """Read the newest part of metrics.parquet with steps below ``step``; None if it is not found."""
        return part_before(self._spec.place, step)

    def stop(self, reason: str) -> None:
        self._journal.stopping(reason)
        self._requests.stop(reason)

    def checkpoint(self) -> None:
        self._requests.checkpoint()

    def resize(self, num_stages: int, timeout_s: float, num_replicas: int | tuple[int, ...] | None = None) -> None:
        raise PlanError(IN_THREADS)

    def generate(self, generation: Callable[[], Generation], timeout_s: float) -> torch.Tensor:
        # Made in the run's thread while the stages wait: a trace switches settings of torch for the whole process.
        return self._requests.generate(generation, timeout_s)

    def predicted(self) -> Timeline | None:
        return self._journal.predicted

    def close(self) -> None:
        """End the run, if it has not ended, and wait for its thread."""
        self._requests.stop("its handle was closed")
        self._thread.join()

    def _run(self) -> None:
        outcome: Outcome | None = None
        failure: BaseException | None = None
        try:
            with Lease.take(self._spec.place, self._spec.name, self._journal.begins) as lease:
                assembled = assemble(self._blueprint, self._planned)
                self._journal.planned(assembled)
                fleet = self._make_fleet(assembled)
                try:
                    self._journal.begins(num_steps=self._spec.num_steps)
                    outcome = run_loop(
                        LoopSetup(fleet, self._spec, assembled, self._journal, self._requests, lease=lease)
                    )
                finally:
                    fleet.stop()
        except BaseException as error:  # noqa: BLE001  (raised again in the thread that waits)
            outcome, failure = None, error
        with _CHANGING:  # before the end is published, since the run may then be started again
            _RUNNING.pop(id(self), None)
        self._requests.end()  # here too: the loop, which ends them, may not have begun
        self._journal.end(outcome, failure)


def running_here(name: str) -> ThreadConnection | None:
    """Return the newest run of this name in threads of this process; None if it is not found."""
    with _CHANGING:
        return next((one for one in reversed(_RUNNING.values()) if one._spec.name == name), None)
