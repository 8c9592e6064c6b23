"""A run in threads of this process: the same loop and the same journal, without Ray."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from raypipe.engine.metrics import part_before
from raypipe.errors import LeaseError, PlanError
from raypipe.ir.timeline import Timeline
from raypipe.runtime.run.blueprint import Assembled, Blueprint, assemble
from raypipe.runtime.run.changing import IN_THREADS
from raypipe.runtime.run.journal import Journal, News
from raypipe.runtime.run.lease import Lease
from raypipe.runtime.run.loop import run_loop
from raypipe.runtime.run.planned import Planned
from raypipe.runtime.run.requests import Requests
from raypipe.runtime.run.spec import AnyFleet, Outcome

__all__ = ["ThreadConnection", "running_here"]

_CHANGING = threading.Lock()
_RUNNING: dict[int, ThreadConnection] = {}
"""Of this process, in the order in which they began."""


class ThreadConnection:
    """Carries out a plan in a thread, and answers for it.

    Args:
        make_fleet: called in that thread with what was assembled; the fleet is stopped there too.

    Raises:
        LeaseError: this process trains the run already, and nobody has asked it to stop.
    """

    def __init__(self, blueprint: Blueprint, planned: Planned, make_fleet: Callable[[Assembled], AnyFleet]) -> None:
        self._blueprint, self._planned = blueprint, planned
        self._predicted: Timeline | None = None
        spec = self._spec = blueprint.spec
        self._make_fleet = make_fleet
        self._journal = Journal(spec.name, str(spec.place))
        self._requests = Requests()
        self._thread = threading.Thread(target=self._run, name=f"raypipe {spec.name}", daemon=True)
        self._begin()

    def _begin(self) -> None:
        with _CHANGING:
            # One that was asked to stop gives its lease back, for which this one waits.
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
        """The newest part of metrics.parquet with steps below ``step``; None where there is none."""
        return part_before(self._spec.place, step)

    def stop(self, reason: str) -> None:
        self._journal.stopping(reason)
        self._requests.stop(reason)

    def checkpoint(self) -> None:
        self._requests.checkpoint()

    def resize(self, num_stages: int, timeout_s: float, num_replicas: int | tuple[int, ...] | None = None) -> None:
        raise PlanError(IN_THREADS)

    def predicted(self) -> Timeline | None:
        return self._predicted

    def close(self) -> None:
        """End the run, if it goes on, and wait for its thread."""
        self._requests.stop("its handle was closed")
        self._thread.join()

    def _run(self) -> None:
        outcome: Outcome | None = None
        failure: BaseException | None = None
        try:
            with Lease.take(self._spec.place, self._spec.name, self._journal.begins) as lease:
                made = assemble(self._blueprint, self._planned)
                self._predicted = made.plan.predicted
                fleet = self._make_fleet(made)
                try:
                    self._journal.begins(num_steps=self._spec.num_steps)
                    outcome = run_loop(fleet, self._spec, made.plan, self._journal, self._requests, lease=lease)
                finally:
                    fleet.stop()
        except BaseException as error:  # noqa: BLE001  (raised again by whoever waits)
            outcome, failure = None, error
        with _CHANGING:  # before anybody hears of the end, and perhaps begins it again
            _RUNNING.pop(id(self), None)
        self._journal.end(outcome, failure)


def running_here(name: str) -> ThreadConnection | None:
    """The run of this name that threads of this process train, the one begun last; None where there is none."""
    with _CHANGING:
        return next((one for one in reversed(_RUNNING.values()) if one._spec.name == name), None)
