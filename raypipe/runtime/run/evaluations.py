"""When a run is evaluated, what that tells, and whether it ends the run early. It imports no Ray.

    record of step 199    evaluation = (("eval_loss", 0.31), ("eval_accuracy", 0.90))
                          a column each in metrics.parquet; the manifest of a checkpoint of step 200 has them too

An evaluation belongs to the record of the step before it. Whether one is due, and whether the run ends early, follows
from the records alone: a run that goes on repeats no evaluation, leaves none out, and ends where it would have ended.
For that, early stopping counts evaluations at the interval only. Those at the end of a submission, or with a checkpoint
that is wanted by its score, depend on how the run was cut into submissions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from raypipe.config.early_stopping import EarlyStopping
from raypipe.engine.metrics import EVALUATION, MetricsWriter
from raypipe.ir.report import Numbers, StepReport, mean_loss
from raypipe.planner.segments import Position
from raypipe.runtime.run.checkpoints import CheckpointPolicy

__all__ = ["EvaluationPolicy", "Evaluations", "numbers_of", "remark_on"]


@dataclass(frozen=True, slots=True)
class EvaluationPolicy:
    """When a run is evaluated.

    Attributes:
        interval_steps: as PipelineConfig.eval_interval_steps.
        names: of all numbers that an evaluation gives.
        early_stopping: None trains to the end.
    """

    interval_steps: int | None = None
    names: tuple[str, ...] = ("eval_loss",)
    early_stopping: EarlyStopping | None = None


class Evaluations:
    """Of one run.

    Args:
        num_steps: of the run.
        num_samples: of "train" and perhaps "eval".
        metrics: with the records of the steps.
    """

    def __init__(
        self, policy: EvaluationPolicy, checkpoints: CheckpointPolicy, num_steps: int, num_samples: Mapping[str, int],
        metrics: MetricsWriter,
    ) -> None:  # fmt: skip
        self._policy = policy
        self._scores = (checkpoints.score_attribute or "").startswith(EVALUATION)
        self._num_steps = num_steps
        self._any = "eval" in num_samples
        self._metrics = metrics

    def after(self, step: int, *, saves: bool) -> bool:
        """Whether one follows so many steps.

        Args:
            saves: a checkpoint is saved there.
        """
        due = step >= self._num_steps or self._at_interval(step) or (saves and self._scores)
        return self._any and step > 0 and due

    def at(self, position: Position) -> Numbers:
        """What the evaluation there gave; empty where there was none."""
        last = self._metrics.recent[-1:]
        return last[0].evaluation if last and last[0].step == position.step - 1 else ()

    def lacking(self, at: Position, saved: int) -> bool:
        """Whether one belongs there, and was not done.

        Args:
            saved: steps of the last checkpoint.
        """
        return not self.at(at) and self.after(at.step, saves=saved == at.step)

    def verdict(self) -> str:
        """Why the run ends now, before its last step; empty where it goes on."""
        policy = self._policy.early_stopping
        return "" if policy is None else policy.verdict(self._values(policy.metric))

    def _values(self, name: str) -> Iterator[float]:
        for step, numbers in self._metrics.evaluations():
            if self._at_interval(step):
                yield from (value for key, value in numbers if key == name)

    def _at_interval(self, step: int) -> bool:
        interval = self._policy.interval_steps
        return interval is not None and step % interval == 0


def numbers_of(reports: Sequence[Sequence[Sequence[StepReport]]], *, sums: bool) -> Numbers:
    """What an evaluation gives, from the reports on its mini-batches.

    Args:
        sums: the losses add up.

    Raises:
        DataError: nothing in the data counts.
    """
    # Of the last stage's replicas the first one evaluates.
    last = [next(r[0] for r in of_order if r[0].stage == of_order[-1][0].stage) for of_order in reports]
    metrics = tuple((f"eval_{name}", value) for name, value in last[-1].metrics)
    return (("eval_loss", mean_loss([report.averages for report in last], sums=sums)), *metrics)


def remark_on(reports: Sequence[Sequence[Sequence[StepReport]]]) -> str:
    """What in the data made a loss of an evaluation no number, the first that there is; empty where nothing did."""
    remarks = (report.remark for of_order in reports for of_stage in of_order for report in of_stage)
    return next(filter(None, remarks), "")
