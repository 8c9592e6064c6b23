"""What a stage actor inherits so that another driver can take it over: who it obeys, what it was ordered, its run.

    driver of term 4   --charter()-----> what the run is: nothing is changed by asking
                       --stand(4)------> from now on it obeys this driver; what it was ordered, and did
                       --ended(run)----> it has completed what it was given

See runtime/run/takeover.py for what a driver makes of it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import ray
import torch

from raypipe.engine.setup import RunSetup
from raypipe.errors import RaypipeError
from raypipe.ir.report import StepReport
from raypipe.runtime.run.takeover import Standing
from raypipe.runtime.run.window import Window
from raypipe.runtime.workers.fence import Fence
from raypipe.runtime.workers.ledger import Ledger
from raypipe.runtime.workers.order_gate import OrderGate
from raypipe.runtime.workers.packing import StoredTensors, stored

__all__ = ["KEPT_REPORTS", "REPORTS_WAIT_S", "TakeoverActor"]

REPORTS_WAIT_S = 10.0
KEPT_REPORTS = 1024
"""Segments whose reports can be asked for, which is many more than a driver lags behind."""


class TakeoverActor:
    """Where the work of an actor stands. It needs the concurrency group "control"."""

    def __init__(self) -> None:
        self._fence = Fence()
        self._ledger = Ledger()
        self._setup: RunSetup | None = None
        self._charter = b""
        self._initial: dict[str, torch.Tensor] = {}
        self._worker: int | None = None
        self._generation = self._links = -1  # of the plan, and of its links
        self._inflow = OrderGate()
        self._grown = threading.Condition()
        self._done: Window[list[list[StepReport]]] = Window(KEPT_REPORTS)
        self._run = self._over = -1  # numbers of the run that began last, and that ended last
        self._failure: RaypipeError | None = None  # that ended it

    @ray.method(concurrency_group="control")
    def obeys(self, term: int) -> bool:
        """Whether this driver is the newest that has ordered anything here."""
        return self._fence.admits(term)

    @ray.method(concurrency_group="control")
    def term(self) -> int:
        """Of the newest driver that has ordered anything here."""
        return self._fence.term

    @ray.method(concurrency_group="control")
    def stand(self, term: int) -> Standing:
        """Obey this driver from now on; where the stage stands."""
        with self._fence.passing(term):
            run = max(self._run, self._ledger.run)
            works, limit = self._run == run, self._inflow.limit(run)
            return Standing(self._worker, self._generation, self._links, run, works, limit, self._ledger.entries())

    @ray.method(concurrency_group="control")
    def reports(self, run: int, since: int, wait_s: float = REPORTS_WAIT_S) -> list[list[list[StepReport]]]:
        """Of the segments number ``since`` and later of ``work(run)``, by stage; waits a while for the first."""
        with self._grown:
            # A question about a run that is over is answered at once: waiting ones would fill the control group.
            self._grown.wait_for(
                lambda: self._over >= run or (self._run == run and self._done.end > since), timeout=wait_s
            )
            return self._done.since(since) if self._run == run else []

    @ray.method(concurrency_group="control")
    def ended(self, run: int, wait_s: float = REPORTS_WAIT_S) -> int | None:
        """None once ``work(run)`` has ended, else how many orders it has carried out; waits a while for the end.

        Raises:
            RaypipeError: what ended it.
        """
        with self._grown:
            if not self._grown.wait_for(lambda: self._over >= run, timeout=wait_s):
                return self._done.end
            if self._over == run and self._failure is not None:
                raise self._failure
            return None

    def keep_charter(self, term: int, charter: bytes, tensors: StoredTensors, names: Sequence[str]) -> None:
        """Keep what another driver would need to go on with this run.

        Args:
            charter: of the run, pickled by its driver.
            names: what it may need of ``tensors``: those that no checkpoint holds.
        """
        self._fence.check(term)
        self._charter, self._initial = charter, dict(tensors.read(names))

    @ray.method(concurrency_group="control")
    def charter(self) -> tuple[bytes, RunSetup | None, StoredTensors]:
        """What ``keep_charter`` was given, and what the worker knows of the run."""
        return self._charter, self._setup, stored(self._initial)
