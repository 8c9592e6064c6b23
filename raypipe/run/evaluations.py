"""Evaluations of a run: when they are due, how stages run them, their results, and early stopping.

    record of step 199    evaluation = (("eval_loss", 0.31), ("eval_accuracy", 0.90))
                          one column per number in metrics.parquet; also in the manifest of a checkpoint of step 200

The results are kept in the record of the step before the evaluation. These records alone decide if an evaluation is
due, and if the run ends early. So a resumed run repeats or omits no evaluation, and it ends at the same step as without
the interruption. Early stopping therefore counts only the evaluations at the configured interval: others, at the end of
a submission (one call of fit) or for a scored checkpoint, depend on how the run was divided into submissions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from raypipe.capture import giving
from raypipe.engine.io.run_files import EVALUATION, MetricsWriter
from raypipe.engine.stage.stage import StageProgram
from raypipe.ir.report import Numbers, StepReport, mean_loss
from raypipe.ir.segment import Order
from raypipe.planner.segments import Position, evaluation_segments
from raypipe.run.spec import AnyFleet, PlanInForce, RunSpec


class Evaluations:
    """Schedule and results of a run's evaluations.

    Args:
        metrics: records of the run's steps, with the results of earlier evaluations.
    """

    def __init__(self, spec: RunSpec, metrics: MetricsWriter) -> None:
        self._policy, self._num_steps, self._metrics = spec.evaluations, spec.num_steps, metrics
        self._scores = (spec.checkpoints.score_attribute or "").startswith(EVALUATION)
        self._spec, self._any = spec, "eval" in spec.num_samples
        self._microbatches = 0  # of all evaluations so far

    def after(self, step: int, *, saves: bool) -> bool:
        """Return True if an evaluation is due after ``step`` steps; ``saves`` is True if a checkpoint is saved then."""
        due = step >= self._num_steps or self._at_interval(step) or (saves and self._scores)
        return self._any and step > 0 and due

    def make(self, fleet: AnyFleet, plan: PlanInForce, halted: Callable[[], bool]) -> tuple[Numbers, str] | None:
        """Evaluate all samples of eval_data on the stages; return None if the evaluation was interrupted.

        Args:
            halted: returns True if the stages were halted, for example by a stop.

        Returns:
            (results by name, remark). The remark is "" if every loss is finite.
        """
        spec = self._spec
        orders = evaluation_orders(
            spec.num_samples["eval"],
            spec.minibatch_size,
            spec.microbatch_size,
            self._microbatches,
            generation=plan.plan.generation,
        )
        self._microbatches += sum(len(order.segment.microbatch_samples) for order in orders)
        reports = list(fleet.run(iter(orders), plan.rows))
        if halted() or len(reports) < len(orders):
            return None
        return numbers_of(reports, sums=spec.sums_losses), remark_on(reports)

    def at(self, position: Position) -> Numbers:
        """Return the evaluation results in the newest step's record, if that step ends at ``position``; else ()."""
        last = self._metrics.recent[-1:]
        return last[0].evaluation if last and last[0].step == position.step - 1 else ()

    def lacking(self, at: Position, saved: int) -> bool:
        """Return True if an evaluation is due at position ``at`` and was not made.

        Args:
            saved: step of the newest checkpoint.
        """
        return not self.at(at) and self.after(at.step, saves=saved == at.step)

    def verdict(self) -> str:
        """Return the reason why early stopping ends the run now; "" if the run continues."""
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
    """Compute eval_loss and metrics from an evaluation's reports.

    Args:
        reports: indexed by order, by worker, by step of the order.
        sums: True to add the losses of mini-batches instead of averaging them.

    Raises:
        DataError: no item of the evaluation data counts in the loss.
    """
    # Only the first replica of the last stage evaluates.
    last = [next(r[0] for r in of_order if r[0].stage == of_order[-1][0].stage) for of_order in reports]
    metrics = tuple((f"eval_{name}", value) for name, value in last[-1].metrics)
    return (("eval_loss", mean_loss([report.averages for report in last], sums=sums)), *metrics)


def remark_on(reports: Sequence[Sequence[Sequence[StepReport]]]) -> str:
    """Describe the first input value that made an evaluation loss NaN or infinite; "" if every loss is finite."""
    remarks = (report.remark for of_order in reports for of_stage in of_order for report in of_stage)
    return next(filter(None, remarks), "")


def evaluation_orders(
    num_samples: int, minibatch_size: int, microbatch_size: int, first: int = 0, *, generation: int = 0
) -> list[Order]:
    """Create the orders (commands to the stages) that evaluate all samples once, in sequence, forward only.

    Args:
        minibatch_size, microbatch_size: in samples.
        first: number of the first micro-batch: the number of micro-batches in all earlier evaluations of the run.
        generation: number of the plan that the workers run.
    """
    segments = evaluation_segments(num_samples, minibatch_size, microbatch_size, first)
    return [Order(replace(segment, generation=generation), training=False) for segment in segments]


class Outputs(Protocol):
    """Protocol of a receiver of the last stage's outputs."""

    @property
    def give(self) -> Callable[[Any], torch.Tensor]:
        """Function (output) -> scalar tensor; the last stage calls it with the output of each micro-batch, in order."""

    def take(self) -> list[Any]:
        """Return all outputs that were received, by micro-batch."""

    def close(self) -> None:
        """Release the outputs, and actors that hold them."""


class ListOutputs:
    """Receiver of outputs from stages in this process."""

    def __init__(self) -> None:
        self._outputs: list[Any] = []

    def give(self, output: Any) -> torch.Tensor:
        self._outputs.append(output)
        return torch.zeros(())

    def take(self) -> list[Any]:
        return self._outputs

    def close(self) -> None:
        self._outputs = []


def with_outputs(programs: tuple[StageProgram, ...], outputs: Outputs) -> tuple[StageProgram, ...]:
    """Replace the last stage's program: the new one passes its output to ``outputs`` instead of computing a loss."""
    return (*programs[:-1], giving(programs[-1], outputs.give))
