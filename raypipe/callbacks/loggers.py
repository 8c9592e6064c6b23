"""Loggers: TensorBoard, MLflow and Weights & Biases. Each imports its package when the run starts, and not before."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from raypipe.callbacks.base import Callback, Event, RunEnd, RunStart, absolute, changes_the_run, scalars
from raypipe.errors import ConfigError
from raypipe.ir.report import StepRecord


class _Logger(Callback):
    """Base class of loggers. Steps that a recovery repeats are logged only once.

    Attributes:
        every_steps: steps from one logged step to the next.
        needs: package of the logger, and the extra of raypipe that installs it.
    """

    every_steps: int
    needs: ClassVar[tuple[str, str]]

    def __post_init__(self) -> None:
        if type(self.every_steps) is not int or self.every_steps < 1:
            name = type(self).__name__
            raise ConfigError(f"{name}(every_steps={self.every_steps!r}): give an integer of at least 1.")
        self._logged = self._evaluated = -1

    def check(self) -> None:
        """Raise ConfigError if the logger's package is not installed."""
        self._package()

    def _package(self, submodule: str = "") -> Any:
        """Import the package or one of its modules.

        Raises:
            ConfigError: the package is not installed; the message has the command that installs it.
        """
        package, extra = self.needs
        try:
            return importlib.import_module(package + submodule)
        except ImportError as error:
            user = f"{type(self).__name__}()"
            raise ConfigError(f"{user} needs {package} ({error}): pip install 'raypipe[{extra}]'.") from None

    def _log(self, numbers: Mapping[str, float], step: int) -> None:
        """Log numbers of one step."""
        raise NotImplementedError

    def _log_evaluation(self, metrics: Mapping[str, float], step: int) -> None:
        """Log the results of an evaluation at one step."""
        self._log({f"eval/{name.removeprefix('eval_')}": value for name, value in metrics.items()}, step)

    def on_start(self, run: RunStart) -> None:
        self._logged = self._evaluated = -1  # a second fit may use the same object

    def on_step(self, record: StepRecord) -> None:
        if record.step % self.every_steps == 0 and record.step > self._logged:
            self._logged = record.step
            self._log({f"step/{name}": value for name, value in scalars(record).items()}, record.step)

    def on_eval(self, step: int, metrics: Mapping[str, float]) -> None:
        # At the last step before it: TensorBoard purges numbers at ``step`` when a run resumes there, and W&B takes
        # none of an earlier step than the last.
        if step > self._evaluated:
            self._evaluated = step
            self._log_evaluation(metrics, max(0, step - 1))

    def on_decision(self, event: Event) -> None:
        if changes_the_run(event):
            self.on_recovery(event)


@dataclass
class TensorBoard(_Logger):
    """Logger that writes event files for ``tensorboard --logdir FOLDER``.

    Attributes:
        folder: folder of the files; None for ``tensorboard`` in the run's folder, which must be on a file system.
        every_steps: steps from one logged step to the next.
    """

    folder: str | None = None
    every_steps: int = 1
    _writer: Any = field(default=None, init=False, repr=False)
    needs: ClassVar[tuple[str, str]] = ("tensorboardX", "tensorboard")

    def __post_init__(self) -> None:
        self.folder = absolute(self.folder)
        super().__post_init__()

    def on_start(self, run: RunStart) -> None:
        super().on_start(run)
        # purge_step hides steps of an earlier submission that are repeated.
        self._writer = self._package().SummaryWriter(
            self.folder or f"{run.path}/tensorboard", purge_step=run.step, filename_suffix=f".{run.step}"
        )
        self._writer.add_text("config", f"```\n{run.config}\n```", run.step)

    def _log(self, numbers: Mapping[str, float], step: int) -> None:
        # One event for all of them: an add_scalar for each took four times as long.
        summary = self._package(".proto.summary_pb2").Summary
        values = [summary.Value(tag=name, simple_value=value) for name, value in numbers.items()]
        self._writer.file_writer.add_summary(summary(value=values), step)

    def on_recovery(self, event: Event) -> None:
        self._writer.add_text("events", f"{event.decision}: {event.reason}", event.step)

    on_decision = on_recovery

    def on_end(self, end: RunEnd) -> None:
        self._writer.close()


_MODES = ("online", "offline", "disabled")


@dataclass
class WandB(_Logger):
    """Logger to Weights & Biases. A resumed run continues there under the same id.

    Attributes:
        project, entity: project and account that show the run; None for WANDB_PROJECT and WANDB_ENTITY.
        mode: "online", "offline" (``wandb sync`` sends it later) or "disabled"; None for WANDB_MODE.
        folder: folder of its files; None for the run's folder, which must be on a file system.
        every_steps: steps from one logged step to the next.
    """

    project: str | None = None
    entity: str | None = None
    mode: str | None = None
    folder: str | None = None
    every_steps: int = 1
    _run: Any = field(default=None, init=False, repr=False)
    needs: ClassVar[tuple[str, str]] = ("wandb", "wandb")

    def __post_init__(self) -> None:
        self.folder = absolute(self.folder)
        super().__post_init__()
        if self.mode not in (None, *_MODES):
            close = difflib.get_close_matches(str(self.mode), _MODES, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"give one of {', '.join(map(repr, _MODES))}."
            raise ConfigError(f"WandB(mode={self.mode!r}): {hint}")

    def on_start(self, run: RunStart) -> None:
        super().on_start(run)
        wandb = self._package()
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

    def _log(self, numbers: Mapping[str, float], step: int) -> None:
        self._run.log(numbers, step=step)

    def on_checkpoint(self, step: int, path: str) -> None:
        self._run.summary["checkpoint"] = path

    def on_recovery(self, event: Event) -> None:
        self._run.summary[f"{event.decision}/{event.step}"] = event.reason

    def on_end(self, end: RunEnd) -> None:
        self._run.finish(exit_code=1 if end.error else 0)


BATCH_S = 2.0
MOST_METRICS, MOST_PARAMS = 1000, 100
"""MLflow's maximum numbers of metrics and of parameters in one request."""
MOST_WAITING = 100_000
"""Maximum number of metrics kept while the server does not answer; the oldest are dropped first."""
TAG = "raypipe.run"
_NOT_ALLOWED = re.compile(r"[^\w\-. /]")


@dataclass
class MLflow(_Logger):
    """Logger to MLflow, with one request every two seconds instead of one per step.

    A run that resumes continues the same MLflow run, which is found by its tag.

    Attributes:
        experiment: name of the experiment, which is created if it is missing.
        tracking_uri: address of the server; None for MLFLOW_TRACKING_URI of the process that runs the loop.
        every_steps: steps from one logged step to the next.
    """

    experiment: str = "raypipe"
    tracking_uri: str | None = None
    every_steps: int = 1
    _client: Any = field(default=None, init=False, repr=False)
    _run_id: str = field(default="", init=False, repr=False)
    _waiting: list[Any] = field(default_factory=list, init=False, repr=False)
    _sent_s: float = field(default=0.0, init=False, repr=False)
    needs: ClassVar[tuple[str, str]] = ("mlflow", "mlflow")

    def on_start(self, run: RunStart) -> None:
        super().on_start(run)
        self._waiting, self._sent_s = [], 0.0
        mlflow = self._package()
        self._client = mlflow.MlflowClient(self.tracking_uri)
        known = self._client.get_experiment_by_name(self.experiment)
        experiment = self._client.create_experiment(self.experiment) if known is None else known.experiment_id
        tag = run.path.replace("'", "")
        runs = self._client.search_runs([experiment], f"tags.`{TAG}` = '{tag}'", max_results=1)
        if runs and run.step:
            self._run_id = runs[0].info.run_id
            self._client.update_run(self._run_id, "RUNNING")
            return
        self._run_id = self._client.create_run(experiment, run_name=run.name, tags={TAG: tag}).info.run_id
        params = [
            mlflow.entities.Param(_NOT_ALLOWED.sub("_", name), str(value)) for name, value in run.settings.items()
        ]
        for first in range(0, len(params), MOST_PARAMS):
            self._client.log_batch(self._run_id, params=params[first : first + MOST_PARAMS])

    def on_checkpoint(self, step: int, path: str) -> None:
        self._client.set_tag(self._run_id, "raypipe.checkpoint", path)

    def on_recovery(self, event: Event) -> None:
        self._client.set_tag(self._run_id, f"raypipe.{event.decision}.{event.step}".replace(" ", "_"), event.reason)

    def on_end(self, end: RunEnd) -> None:
        state = "FAILED" if end.error else "KILLED" if end.stopped else "FINISHED"
        try:
            self._send()
        finally:
            self._client.set_terminated(self._run_id, state)

    def _log(self, numbers: Mapping[str, float], step: int) -> None:
        """Queue numbers for the next request."""
        now_s = time.time()
        self._waiting += [
            (name.removeprefix("step/"), value, int(now_s * 1000), step) for name, value in numbers.items()
        ]
        del self._waiting[:-MOST_WAITING]
        if now_s - self._sent_s >= BATCH_S:
            self._send()

    def _log_evaluation(self, metrics: Mapping[str, float], step: int) -> None:
        self._log(metrics, step)

    def _send(self) -> None:
        metric = self._package(".entities").Metric
        self._sent_s = time.time()
        while self._waiting:
            self._client.log_batch(self._run_id, metrics=[metric(*values) for values in self._waiting[:MOST_METRICS]])
            del self._waiting[:MOST_METRICS]  # only now: a request that failed is made again
