"""Where a run begins: after its newest good checkpoint, if what is there is the same run; or where its stages stand."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from raypipe.engine.checkpoint import MANIFEST, Checkpoint, FreshOptions, check_position, find_checkpoint, newest_step
from raypipe.engine.rundir import RunFolder
from raypipe.engine.storage import Place
from raypipe.errors import CheckpointError
from raypipe.ir.report import StepRecord
from raypipe.planner.segments import Position
from raypipe.runtime.run.ordering import Known
from raypipe.runtime.run.same_run import Change, Settings, fresh_after, goes_on, write_settings
from raypipe.runtime.run.spec import Outcome, RunSpec
from raypipe.runtime.run.takeover import Done

__all__ = ["Beginning", "Standpoint", "beginning", "left_at", "refuse_another_run", "stopped_at"]


class Beginning(NamedTuple):
    """What to restore, None for nothing; which saved options do not count; what settings.json will say of changes."""

    checkpoint: Checkpoint | None
    fresh: FreshOptions = FreshOptions()  # noqa: RUF100  (immutable)
    changes: tuple[Change, ...] = ()

    def keep(self, spec: RunSpec) -> None:
        """Write settings.json, once the stages are where the checkpoint was saved."""
        write_settings(spec.place, spec.settings, self.changes, spec.num_steps)


def stopped_at(spec: RunSpec, reason: str) -> Outcome:
    """Of a run that was stopped before it had workers."""
    newest = find_checkpoint(spec.place)[0]
    if newest is None:
        return Outcome((), "", 0, reason)
    return Outcome((), str(spec.place / newest.folder), newest.manifest.step, reason)


def beginning(spec: RunSpec, folder: RunFolder) -> Beginning:
    """Look for the newest good checkpoint of this run.

    Raises:
        ConfigError: the folder is that of another run; one line for each difference.
        CheckpointError: there are checkpoints and none can be used.
    """
    found, refused = find_checkpoint(spec.place)
    for name, reason in refused:
        if spec.place.exists(f"{name}/{MANIFEST}"):
            folder.event("refuse checkpoint", reason, name=name)
        else:
            folder.event("unfinished checkpoint", "its save was not completed, so it does not count", name=name)
    if found is None:
        # A save that was cut short left nothing to go back to; damage is for somebody to look at.
        damaged = [(name, reason) for name, reason in refused if spec.place.exists(f"{name}/{MANIFEST}")]
        if damaged:
            raise CheckpointError(
                f"No checkpoint of run {spec.name!r} can be used: {damaged[0][1]} To begin anew, give the run "
                "another name or delete its checkpoints."
            )
        return Beginning(None)
    done = found.manifest.step
    changes = goes_on(spec.place, spec.name, spec.settings, done=done, num_steps=spec.num_steps, resume=spec.resume)
    check_position(
        found.manifest,
        seed=spec.seed,
        minibatch_size=spec.minibatch_size,
        microbatch_size=spec.microbatch_size,
        num_samples=spec.num_samples["train"],
    )
    for change in changes:
        if change.step == done and spec.resume:
            for line in change.lines:
                folder.event("change", line, step=done)
    return Beginning(found, fresh_after(changes, done), changes)


class Standpoint(NamedTuple):
    """Where the loop of a driver that is gone stood before the first of the steps that are told once more.

    Attributes:
        position: then.
        early: what it knew when it ordered the first of these steps.
        known: what it knew when it ordered the last of them.
    """

    position: Position
    early: Known
    known: Known

    def skipped(self, records: Iterable[StepRecord]) -> int:
        """Steps before ``position`` that were not finite, of those that count.

        Args:
            records: of the last steps before.
        """
        later = (record for record in records if self.early.step <= record.step < self.position.step)
        return self.early.skipped + sum(record.skipped for record in later)


def left_at(taken: Sequence[Done]) -> Standpoint:
    """Of a run whose stages were taken over.

    Args:
        taken: what they have done that may not be in the run's folder yet, at least one order.
    """
    first, last = (taken[at].order.memo for at in (0, -1))
    return Standpoint(first.before, first.known, last.known)


def refuse_another_run(place: Place, name: str, settings: Settings, num_steps: int, resume: bool | None) -> None:
    """The same refusal before anything is started; checksums are left to ``beginning``.

    Raises:
        ConfigError: the folder is that of another run; one line for each difference.
    """
    done = newest_step(place)
    if done is not None:
        goes_on(place, name, settings, done=done, num_steps=num_steps, resume=resume)
