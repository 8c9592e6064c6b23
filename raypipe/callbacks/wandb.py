"""Weights & Biases: a run's curves, its settings and how it ended."""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raypipe.callbacks.base import (
    Callback,
    Event,
    Newest,
    RunEnd,
    RunStart,
    absolute,
    changes_the_run,
    check_every,
    needed,
    scalars,
)
from raypipe.errors import ConfigError
from raypipe.ir.report import StepRecord

__all__ = ["WandB"]


_MODES = ("online", "offline", "disabled")


@dataclass
class WandB(Callback):
    """Logs to Weights & Biases. A run that goes on goes on there, too, under the same id.

    Attributes:
        project, entity: where the run is shown; None for what WANDB_PROJECT and WANDB_ENTITY say.
        mode: "online", "offline" (``wandb sync`` sends it later) or "disabled"; None for WANDB_MODE.
        folder: of its files; None for the run's folder, where that is on a file system.
        every_steps: of so many steps one is logged.
    """

    project: str | None = None
    entity: str | None = None
    mode: str | None = None
    folder: str | None = None
    every_steps: int = 1
    _run: Any = field(default=None, init=False, repr=False)
    _steps: Newest = field(default_factory=Newest, init=False, repr=False)
    _evaluations: Newest = field(default_factory=Newest, init=False, repr=False)

    def __post_init__(self) -> None:
        self.folder = absolute(self.folder)
        check_every("WandB", self.every_steps)
        if self.mode not in (None, *_MODES):
            close = difflib.get_close_matches(str(self.mode), _MODES, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"give one of {', '.join(map(repr, _MODES))}."
            raise ConfigError(f"WandB(mode={self.mode!r}): {hint}")

    def check(self) -> None:
        """Raises: ConfigError: what it logs with is not installed."""
        needed("wandb", "raypipe[wandb]", "WandB()")

    def on_start(self, run: RunStart) -> None:
        self._steps, self._evaluations = Newest(), Newest()  # a second fit may use the same object
        wandb = needed("wandb", "raypipe[wandb]", "WandB()")
        self._run = wandb.init(
            project=self.project,
            entity=self.entity,
            mode=self.mode,
            dir=self.folder or run.path,
            name=run.name,
            id=hashlib.sha256(run.path.encode()).hexdigest()[:16],
            resume="allow" if run.step else None,
            config=dict(run.settings),
            settings=wandb.Settings(console="off", silent=True),
        )

    def on_step(self, record: StepRecord) -> None:
        if record.step % self.every_steps == 0 and self._steps.passed_by(record.step):
            self._run.log({f"step/{name}": value for name, value in scalars(record).items()}, step=record.step)

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        # Of the last step before it, which may be logged already: W&B takes no numbers of an earlier step.
        if self._evaluations.passed_by(step):
            found = {f"eval/{name.removeprefix('eval_')}": value for name, value in metrics.items()}
            self._run.log(found, step=max(0, step - 1))

    def on_checkpoint(self, step: int, path: str) -> None:
        self._run.summary["checkpoint"] = path

    def on_recovery(self, event: Event) -> None:
        self._run.summary[f"{event.decision}/{event.step}"] = event.reason

    def on_decision(self, event: Event) -> None:
        if changes_the_run(event):
            self.on_recovery(event)

    def on_end(self, end: RunEnd) -> None:
        self._run.finish(exit_code=1 if end.error else 0)
