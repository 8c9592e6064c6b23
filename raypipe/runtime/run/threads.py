"""A run in threads of this process: the same loop and the same journal, without Ray."""

from __future__ import annotations

import threading
from collections.abc import Callable

from raypipe.engine.metrics import part_before
from raypipe.ir.timeline import Timeline
from raypipe.runtime.run.blueprint import Assembled, Blueprint, assemble
from raypipe.runtime.run.journal import Journal, News
from raypipe.runtime.run.lease import Lease
from raypipe.runtime.run.loop import run_loop
from raypipe.runtime.run.planned import Planned
from raypipe.runtime.run.requests import Requests
from raypipe.runtime.run.spec import AnyFleet

__all__ = ["ThreadConnection"]


class ThreadConnection:
    """Carries out a plan in a thread, and answers for it.

    Args:
        make_fleet: called in that thread with what was assembled; the fleet is stopped there too.
    """

    def __init__(self, blueprint: Blueprint, planned: Planned, make_fleet: Callable[[Assembled], AnyFleet]) -> None:
        self._blueprint, self._planned = blueprint, planned
        self._predicted: Timeline | None = None
        spec = self._spec = blueprint.spec
        self._make_fleet = make_fleet
        self._journal = Journal(spec.name, str(spec.place))
        self._requests = Requests()
        self._thread = threading.Thread(target=self._run, name=f"raypipe {spec.name}", daemon=True)
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
        self._requests.resize(num_stages, timeout_s, num_replicas=num_replicas)

    def predicted(self) -> Timeline | None:
        return self._predicted

    def close(self) -> None:
        """End the run, if it goes on, and wait for its thread."""
        self._requests.stop("its handle was closed")
        self._thread.join()

    def _run(self) -> None:
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
            self._journal.end(outcome, None)
        except BaseException as error:  # noqa: BLE001  (raised again by whoever waits)
            self._journal.end(None, error)
