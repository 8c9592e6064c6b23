"""TensorBoard: curves of a run, in event files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raypipe.callbacks.base import Callback, Event, Newest, RunEnd, RunStart, absolute, check_every, needed, scalars
from raypipe.ir.report import StepRecord

__all__ = ["TensorBoard"]


@dataclass
class TensorBoard(Callback):
    """Writes event files for ``tensorboard --logdir FOLDER``.

    Attributes:
        folder: where they go; None for ``tensorboard`` in the run's folder, where that is on a file system.
        every_steps: of so many steps one is written.
    """

    folder: str | None = None
    every_steps: int = 1
    _writer: Any = field(default=None, init=False, repr=False)
    _steps: Newest = field(default_factory=Newest, init=False, repr=False)
    _evaluations: Newest = field(default_factory=Newest, init=False, repr=False)

    def __post_init__(self) -> None:
        self.folder = absolute(self.folder)
        check_every("TensorBoard", self.every_steps)

    def check(self) -> None:
        """Raises: ConfigError: what it writes with is not installed."""
        needed("tensorboardX", "raypipe[tensorboard]", "TensorBoard()")

    def on_start(self, run: RunStart) -> None:
        self._steps, self._evaluations = Newest(), Newest()  # a second fit may use the same object
        made = needed("tensorboardX", "raypipe[tensorboard]", "TensorBoard()")
        # What an earlier submission wrote of steps that are repeated is not shown twice.
        self._writer = made.SummaryWriter(
            self.folder or f"{run.path}/tensorboard", purge_step=run.step, filename_suffix=f".{run.step}"
        )
        self._writer.add_text("config", f"```\n{run.config}\n```", run.step)

    def on_step(self, record: StepRecord) -> None:
        if record.step % self.every_steps == 0 and self._steps.passed_by(record.step):
            # One event for all of them: an add_scalar for each took four times as long.
            summary = needed("tensorboardX.proto.summary_pb2", "raypipe[tensorboard]", "TensorBoard()").Summary
            values = [summary.Value(tag=f"step/{name}", simple_value=value) for name, value in scalars(record).items()]
            self._writer.file_writer.add_summary(summary(value=values), record.step)

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        # Of the last step before it: what is at ``step`` goes when a run goes on from there.
        if self._evaluations.passed_by(step):
            for name, value in metrics.items():
                self._writer.add_scalar(f"eval/{name.removeprefix('eval_')}", value, max(0, step - 1))

    def on_recovery(self, event: Event) -> None:
        self._writer.add_text("events", f"{event.decision}: {event.reason}", event.step)

    on_decision = on_recovery

    def on_end(self, end: RunEnd) -> None:
        self._writer.close()
