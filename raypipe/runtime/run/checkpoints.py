"""The driver's side of checkpoints: when one is due, completing it while training goes on, and where to begin again.

    loop     order 99 (save_to=step_0000100) ... order 100 ... order 101
    stages            snapshot, write in the background
    here                        wait for all entries, write the manifest, delete surplus ones ... add its evaluation

A checkpoint that cannot be written is told and does not end the run; only the last one does.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from raypipe.engine.checkpoint import (
    MANIFEST,
    Manifest,
    checkpoint_name,
    commit,
    files_folder,
    newest_step,
    prune,
    score,
)
from raypipe.engine.storage import Place
from raypipe.errors import CheckpointError, StageLostError
from raypipe.planner.segments import Position
from raypipe.runtime.run.lease import Lease

__all__ = ["CheckpointPolicy", "Checkpoints", "MakeManifest"]

MakeManifest = Callable[[Position, list[dict[str, Any]], Mapping[str, float]], Manifest]

AUTO_INTERVAL_S = 600.0
"""Without an interval in steps a run saves this often: what a crash may cost, against a copy of the state."""

LOST_WAIT_S = 10.0
"""That a checkpoint may still take when a worker is lost for good: a dead one is noticed at once, a hung one never."""


@dataclass(frozen=True, slots=True)
class CheckpointPolicy:
    """When checkpoints are saved, and which are kept.

    Attributes:
        interval_steps: steps between two; None goes by the clock.
        num_to_keep, score_attribute, score_order: as in ray.train.CheckpointConfig.
    """

    interval_steps: int | None = None
    num_to_keep: int | None = None
    score_attribute: str | None = None
    score_order: Literal["max", "min"] = "max"


class _Writes(Protocol):
    def entries(self, folder: str) -> list[dict[str, Any]]: ...


class Checkpoints:
    """Checkpoints of one run.

    Args:
        place: the run's folder.
        fleet: whose stages write.
        manifest: makes the manifest from where the run stood, the stages' entries and the metrics of the last step.
        tell: (decision, reason, numbers) notes an event.
        lease: without which no checkpoint counts; None where nobody else can know of the folder.
    """

    def __init__(
        self,
        place: Place,
        fleet: _Writes,
        policy: CheckpointPolicy,
        manifest: MakeManifest,
        tell: Callable[..., None],
        lease: Lease | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._place = place
        self._fleet = fleet
        self._policy = policy
        self._manifest = manifest
        self._tell = tell
        self._lease = lease
        self._clock = clock
        self._begun_s = clock()
        self._pool = _pool()
        self._last: tuple[int, Future[None]] | None = None  # the newest that was begun to be completed, and its step
        self._times_forgotten = 0
        self.failures = 0  # since one could be written
        self._scored = 0  # step of the checkpoint that knows its evaluation
        self.latest, self.latest_step = "", 0

    def find(self) -> int:
        """Steps of the newest checkpoint in the run's folder, the latest from now on; 0 where there is none."""
        self.latest_step = newest_step(self._place) or 0
        self.latest = str(self._place / checkpoint_name(self.latest_step)) if self.latest_step else ""
        return self.latest_step

    def due(self, step: int) -> bool:
        """Whether to save after ``step`` steps."""
        return self.due_at(step) or self.overdue

    def due_at(self, step: int) -> bool:
        """Whether the interval, where it is in steps, ends with ``step``: known ahead."""
        return self._policy.interval_steps is not None and step % self._policy.interval_steps == 0

    @property
    def overdue(self) -> bool:
        """Whether the interval, where it goes by the clock, is over."""
        return self._policy.interval_steps is None and self._clock() - self._begun_s >= AUTO_INTERVAL_S

    @property
    def busy(self) -> bool:
        """Whether one waits for its files, or for its manifest."""
        return self._last is not None and not self._last[1].done()

    def begin(self, step: int) -> str:
        """Note that the state after ``step`` steps is being saved; the folder for the order."""
        self._begun_s = self._clock()
        return self._files(step)

    def complete(self, end: Position, metrics: Mapping[str, float], *, scored: bool = False) -> None:
        """Wait in the background for all stages, then make the checkpoint count.

        Args:
            end: where the run stood when it was saved.
            scored: an evaluation's numbers are among the metrics.
        """
        self._last = end.step, self._pool.submit(self._complete, end, dict(metrics), self._times_forgotten)
        self._scored = end.step if scored else 0

    def score(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add what the evaluation after this step gave to its checkpoint, once it counts. In the background too."""
        if self._scored != step:
            self._scored = step
            self._pool.submit(self._score, step, dict(metrics))

    def finish(self, step: int) -> None:
        """Wait for every checkpoint, of which that of ``step`` must be good.

        Raises:
            CheckpointError: it could not be written.
        """
        self._pool.shutdown(wait=True)
        if self._last is not None and self._last[0] == step:
            self._last[1].result()

    def settle(self, error: Exception) -> None:
        """The run ends with an error: what its stages are still writing is completed first, if they can do that."""
        if self._last is not None:
            wait([self._last[1]], LOST_WAIT_S if isinstance(error, StageLostError) else None)

    def forget_after(self, step: int) -> bool:
        """The run goes on from ``step``: what was to be completed is so no more.

        Returns:
            Whether one was that is not due by the interval, and so saved again, or taken anew, without being asked for.
        """
        asked = self._last is not None and self.busy and not self.due_at(self._last[0])
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._pool, self._times_forgotten = _pool(), self._times_forgotten + 1
        if self._last is not None and (self._last[0] > step or not self._last[1].done() or self._last[1].cancelled()):
            self._last = None
        return asked

    def close(self) -> None:
        """Drop what has not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _files(self, step: int) -> str:
        below = files_folder(self._lease.held.generation) if self._lease is not None else ""
        return f"{checkpoint_name(step)}/{below}" if below else checkpoint_name(step)

    def _complete(self, end: Position, metrics: Mapping[str, float], times_forgotten: int) -> None:
        begin_s, step = self._clock(), end.step
        folder = checkpoint_name(step)
        try:
            manifest = self._manifest(end, self._fleet.entries(self._files(step)), metrics)
            if times_forgotten != self._times_forgotten:  # it was under way meanwhile, and is saved again
                return
            with contextlib.nullcontext() if self._lease is None else self._lease.completing():
                commit(self._place, folder, manifest)
            self.latest, self.latest_step = str(self._place / folder), step
            self._tell("checkpoint", f"{step} steps", step=step, seconds=round(self._clock() - begin_s, 3))
            self.failures = 0
            self._prune()
        except CheckpointError as error:
            self.failures += 1
            self._tell("checkpoint failed", str(error), step=step)
            raise

    def _score(self, step: int, metrics: Mapping[str, float]) -> None:
        folder = self._place / checkpoint_name(step)
        if not folder.exists(MANIFEST):  # it could not be written
            return
        try:
            with contextlib.nullcontext() if self._lease is None else self._lease.completing():
                if score(folder, metrics):
                    self._prune()
        except CheckpointError as error:
            self._tell("checkpoint failed", f"It lacks its evaluation: {error}", step=step)

    def _prune(self) -> None:
        policy = self._policy
        for name in prune(self._place, policy.num_to_keep, policy.score_attribute, policy.score_order):
            self._tell("delete checkpoint", f"num_to_keep is {policy.num_to_keep}", name=name)


def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, thread_name_prefix="raypipe-checkpoint")
