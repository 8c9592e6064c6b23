"""Checkpoints on the driver's side: when one is due, and how it is completed while training continues.

An order is a command to the stages to run one or several steps; ``save_to`` names the checkpoint to save after them.

    loop     order 99 (save_to=step_0000100) ... order 100 ... order 101
    stages            snapshot, write in the background
    driver                      wait for the entries of all stages, write the manifest, delete surplus checkpoints,
                                add the results of an evaluation

A checkpoint that cannot be written causes an alert, and the run continues. Only a failure of the last checkpoint ends
the run with an error.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict

from raypipe.engine.io.checkpoint import (
    MANIFEST,
    checkpoint_name,
    commit,
    discard,
    files_folder,
    make_manifest,
    newest_step,
    prune,
    score,
)
from raypipe.errors import CheckpointError, LeaseError, RaypipeError, StageLostError
from raypipe.planner.segments import Position
from raypipe.run.lease import Lease
from raypipe.run.reporting import Reporter
from raypipe.run.spec import AnyFleet, RunSpec

AUTO_INTERVAL_S = 600.0
"""Seconds between checkpoints if no interval in steps is configured."""

LOST_WAIT_S = 10.0
"""Maximum seconds to wait for a checkpoint after a worker was lost, because a hung worker never completes it."""


class Checkpoints:
    """Checkpoints of one run: schedule, completion in the background, pruning.

    Args:
        fleet: stages that write the checkpoints.
        reporter: receives events and alerts.
        lease: lease that must be held to commit a checkpoint; None if no other process can access the folder.

    Attributes:
        latest, latest_step: path and step of the newest complete checkpoint; "" and 0 without a checkpoint.
    """

    def __init__(self, spec: RunSpec, fleet: AnyFleet, reporter: Reporter, lease: Lease | None = None) -> None:
        self._spec, self._place, self._policy = spec, spec.place, spec.checkpoints
        self._fleet, self._reporter, self._lease = fleet, reporter, lease
        self._begun_s = time.monotonic()
        self._pool = _pool()
        self._last: tuple[int, Future[None]] | None = None  # newest completion and its step
        self._times_forgotten = 0
        self._discarding = threading.Lock()
        self._failures = 0  # since the last success
        self._scored = 0  # step of the checkpoint that has its evaluation
        self.latest, self.latest_step = "", 0

    def find(self) -> int:
        """Find the newest checkpoint in the run's folder, and return its step; 0 if the folder has no checkpoint."""
        self.latest_step = newest_step(self._place) or 0
        self.latest = str(self._place / checkpoint_name(self.latest_step)) if self.latest_step else ""
        return self.latest_step

    def due(self, step: int) -> bool:
        """Return True if a checkpoint is due after ``step`` steps."""
        return self.due_at(step) or self.overdue

    def due_at(self, step: int) -> bool:
        """Return True if an interval in steps is configured and ``step`` is a multiple of it."""
        return self._policy.interval_steps is not None and step % self._policy.interval_steps == 0

    @property
    def overdue(self) -> bool:
        """True without an interval in steps, once AUTO_INTERVAL_S seconds have passed since the last ``begin``."""
        return self._policy.interval_steps is None and time.monotonic() - self._begun_s >= AUTO_INTERVAL_S

    @property
    def busy(self) -> bool:
        """True while the newest checkpoint is being completed."""
        return self._last is not None and not self._last[1].done()

    def begin(self, step: int) -> str:
        """Return the folder in which the stages must save the state after ``step`` steps.

        Restarts the interval of ``overdue``.
        """
        self._begun_s = time.monotonic()
        return self._files(step)

    def complete(self, end: Position, metrics: Mapping[str, float], *, scored: bool = False) -> None:
        """Start the completion of a checkpoint in the background: wait for the files of all stages, then commit it.

        Args:
            end: position of the run when the state was saved.
            metrics: numbers for the manifest, such as the loss.
            scored: True if ``metrics`` has the results of an evaluation.
        """
        self._last = end.step, self._pool.submit(self._complete, end, dict(metrics), self._times_forgotten)
        self._scored = end.step if scored else 0

    def score(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add the results of an evaluation to the manifest of the checkpoint of ``step``, unless it already has them.

        The manifest is changed in the background, after the checkpoint was committed.
        """
        if self._scored != step:
            self._scored = step
            self._pool.submit(self._score, step, dict(metrics))

    def finish(self, step: int) -> None:
        """Wait until no checkpoint is being completed; failures of checkpoints of earlier steps are ignored.

        Raises:
            CheckpointError: the checkpoint of ``step`` could not be written.
        """
        self._pool.shutdown(wait=True)
        if self._last is not None and self._last[0] == step:
            self._last[1].result()

    def settle(self, error: Exception) -> None:
        """Wait for the checkpoint that is being written, before the run ends with an error.

        Args:
            error: error of the run; after a StageLostError the wait is limited to LOST_WAIT_S seconds.
        """
        if self._last is not None:
            wait([self._last[1]], LOST_WAIT_S if isinstance(error, StageLostError) else None)

    def forget_after(self, step: int) -> bool:
        """Cancel checkpoints that are not complete, because the run resumes from ``step``.

        Returns:
            True if the caller must request the newest cancelled checkpoint again: it was saved by request or by the
            clock, so the interval in steps does not save it again.
        """
        dropped = self._last is not None and self.busy and not self.due_at(self._last[0])
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._discarding:  # the same step may be saved again from now on
            self._pool, self._times_forgotten = _pool(), self._times_forgotten + 1
        if self._last is not None and (self._last[0] > step or not self._last[1].done() or self._last[1].cancelled()):
            self._last = None
        return dropped

    def close(self) -> None:
        """Cancel completions that have not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _files(self, step: int) -> str:
        below = files_folder(self._lease.held.generation) if self._lease is not None else ""
        return f"{checkpoint_name(step)}/{below}" if below else checkpoint_name(step)

    def _completing(self) -> contextlib.AbstractContextManager[None]:
        """Return a context for a write that only the holder of the lease may make; see ``Lease.completing``."""
        return contextlib.nullcontext() if self._lease is None else self._lease.completing()

    def _complete(self, end: Position, metrics: Mapping[str, float], times_forgotten: int) -> None:
        begin_s, step, spec = time.monotonic(), end.step, self._spec
        folder = checkpoint_name(step)
        try:
            manifest = make_manifest(
                self._fleet.entries(self._files(step)),
                asdict(end),
                spec.sample_order,
                spec.aliases,
                metrics,
                **({} if self._lease is None else self._lease.signature()),
            )
            if times_forgotten != self._times_forgotten:  # it was cancelled meanwhile, and may be saved again
                return
            with self._completing():
                commit(self._place, folder, manifest)
            self.latest, self.latest_step = str(self._place / folder), step
            self._publish_success(step, time.monotonic() - begin_s)
            self._prune()
        except (LeaseError, StageLostError):  # the loop notices both, and saves again after a recovery
            raise
        except Exception as error:
            self._failures += 1
            self._discard(step, times_forgotten)
            reason = _described(error)
            self._reporter.event("checkpoint failed", reason, step=step)
            message = f"The checkpoint after {step} steps was not saved: {reason}"
            self._reporter.watcher.update(checkpoint_error=message)
            self._reporter.watcher.alert("checkpoint failed", f"{message} Training goes on.", step, self._failures)
            raise

    def _publish_success(self, step: int, took_s: float) -> None:
        reporter, failures = self._reporter, self._failures
        reporter.log("checkpoint", f"{step} steps", step=step, seconds=round(took_s, 3))
        reporter.watcher.update(checkpoint=self.latest, checkpoint_error="")
        if failures:
            message = f"Checkpoints are saved again, after {failures} that were not."
            reporter.watcher.alert("checkpoints again", message)
        reporter.callbacks.checkpoint(step, self.latest)
        self._failures = 0

    def _discard(self, step: int, times_forgotten: int) -> None:
        """Remove the files of a failed checkpoint if this process holds the lease; errors are ignored.

        Args:
            times_forgotten: number of calls of ``forget_after`` before the checkpoint began. Nothing is removed if
                there were more calls since, because the run may be saving the same step again.
        """
        with self._discarding, contextlib.suppress(CheckpointError, LeaseError):
            if times_forgotten == self._times_forgotten:
                with self._completing():
                    discard(self._place, checkpoint_name(step), self._files(step))

    def _score(self, step: int, metrics: Mapping[str, float]) -> None:
        folder = self._place / checkpoint_name(step)
        try:
            if not folder.exists(MANIFEST):  # it could not be written
                return
            with self._completing():
                if score(folder, metrics):
                    self._prune()
        except LeaseError:  # the loop notices it
            return
        except Exception as error:  # noqa: BLE001  (an alert; the checkpoint has all that a run resumes from)
            message = f"It lacks its evaluation: {_described(error)}"
            self._reporter.event("checkpoint failed", message, step=step)
            self._reporter.watcher.alert("checkpoint without its evaluation", message, step)

    def _prune(self) -> None:
        policy = self._policy
        for name in prune(self._place, policy.num_to_keep, policy.score_attribute, policy.score_order):
            self._reporter.event("delete checkpoint", f"num_to_keep is {policy.num_to_keep}", name=name)


def _described(error: Exception) -> str:
    return str(error) if isinstance(error, RaypipeError) else f"{type(error).__name__}: {error}"


def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="raypipe-checkpoint")
