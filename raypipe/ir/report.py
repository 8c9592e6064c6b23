"""What a stage says about a step: a few numbers, never a tensor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from raypipe.errors import DataError
from raypipe.ir.links import MessageTimes, StageSample
from raypipe.ir.timeline import Span

__all__ = ["Averages", "CopyReport", "Norms", "Numbers", "StepRecord", "StepReport", "mean_loss", "merge_reports"]

Averages = tuple[tuple[float, float], ...]
"""(loss, items that it averages over) of each part of a loss."""
Numbers = tuple[tuple[str, float], ...]
"""By name; a tuple, so that records that hold it compare and hash."""


@dataclass(frozen=True, slots=True)
class Norms:
    """Gradient norms of a stage's parameters.

    Attributes:
        places: of the parameters among all of the model's, in the user's order.
        norms: one each.
        dtype: that they were computed in, by its name in torch.
    """

    places: tuple[int, ...]
    norms: tuple[float, ...]
    dtype: str


class CopyReport(NamedTuple):
    """A copy of a stage's state in memory that another worker holds, or this one where nobody else is to.

    Attributes:
        step: after which it was taken.
        copied_s: that copying took.
        sent_s: from the first byte on its way to the last.
    """

    step: int
    copied_s: float
    sent_s: float


@dataclass(frozen=True, slots=True)
class StepReport:
    """One mini-batch on one stage.

    Attributes:
        stage: who reports.
        step: optimizer step, counted from 0 over the run; for evaluation, the batch.
        samples: in the mini-batch.
        loss: of the mini-batch, after loss_reduction; the same on every stage (None on all but the last
            in evaluation and where stages take norms alone).
        grad_norm: over the whole model, before clipping; None in evaluation and where stages take norms alone.
        stage_grad_norm: over this stage, where they do.
        norms: of its parameters, where stages take norms alone in a synchronous step: together they make grad_norm.
        start_s, end_s: on the host's monotonic clock.
        busy_s: in F, B, I and W.
        wait_s: waiting for messages.
        sent_bytes: handed to the next stage and to the one before, as they travel.
        uncompressed_bytes: the same without a codec.
        peak_in_flight: most micro-batches whose activations were held at once.
        weight_versions: copies of the weights that the stage holds.
        spans: every action, where asked for (monotonic clock).
        sample, messages: how long actions and messages took, where asked for.
        worker: that holds the stage; None for one of its own.
        averages: of each part of an evaluation's loss, with the items that it averages over (samples, valid labels);
            none on all stages but the last.
        skipped: it was not finite, and no stage took the step.
        copying: the worker copied its state or sent a copy meanwhile, so that the times are no measurement.
        copied: the newest whole copy of this stage that its holder has, if any.
        damaged: activations and gradients that came damaged and were asked for again, or others before them.
        lr: learning rate that the stage's first parameter group stepped with; None where nothing learns or steps.
        metrics: by name, at the end of an evaluation, of the last stage.
        tokens: of the mini-batch, where the stage reads token ids; see engine/token_count.py.
        exchanged_bytes: handed to other replicas of the stage, most of them sums of gradients.
        remark: what in the data made the loss of an evaluation no number; empty where it is one, or the data is well.
    """

    stage: int
    step: int
    samples: int
    loss: float | None
    grad_norm: float | None
    start_s: float
    end_s: float
    busy_s: float
    wait_s: float
    sent_bytes: tuple[int, int]
    peak_in_flight: int
    stage_grad_norm: float | None = None
    weight_versions: int = 1
    uncompressed_bytes: tuple[int, int] = (0, 0)
    spans: tuple[Span, ...] = ()
    sample: StageSample | None = None
    messages: tuple[MessageTimes, ...] = ()
    worker: int | None = None
    norms: Norms | None = None
    averages: Averages = ()
    skipped: bool = False
    copying: bool = False
    copied: CopyReport | None = None
    damaged: int = 0
    lr: float | None = None
    metrics: Numbers = ()
    tokens: int = 0
    exchanged_bytes: int = 0
    remark: str = ""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of the whole pipeline: a line of the progress display, a row of metrics.parquet.

    Attributes:
        step, samples, loss, grad_norm: as in StepReport.
        seconds: from the end of the step before to the end of this one.
        bubble_fraction: share of worker time without computation; where steps overlap, right in the mean over some.
        link_bytes_per_s: bytes over all links and both directions, per second.
        peak_in_flight: largest of any stage.
        schedule: that it ran with, in words.
        skipped: loss or gradient norm was not finite, and no stage took the step.
        lr: learning rate of the first parameter group, as this step took it; 0 in runs of older releases.
        tokens: token ids of the mini-batch, padding included; 0 where its data has none.
        goodput: share of the time since the stages were ready in which the run got further, with pauses and steps that
            were done again counted as lost; 0 where it is not known.
        evaluation: eval_loss and the metrics, as eval_<name>, where an evaluation followed the step.
    """

    step: int
    samples: int
    loss: float
    grad_norm: float
    seconds: float
    bubble_fraction: float
    link_bytes_per_s: float
    peak_in_flight: int
    schedule: str = ""
    skipped: bool = False
    lr: float = 0.0
    tokens: int = 0
    goodput: float = 0.0
    evaluation: Numbers = ()

    @property
    def samples_per_s(self) -> float:
        return self.samples / self.seconds if self.seconds else 0.0

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    @property
    def unknown(self) -> tuple[str, ...]:
        """Names of the numbers that are 0 because they are not known: they are not shown."""
        return (*(() if self.tokens else ("tokens", "tokens_per_s")), *(() if self.goodput else ("goodput",)))


def mean_loss(found: Sequence[Averages], *, sums: bool) -> float:
    """The loss over many mini-batches.

    Args:
        found: of each mini-batch.
        sums: the losses add up; else each part weighs as much as its items.

    Raises:
        DataError: nothing in the data counts.
    """
    total = 0.0
    for part in zip(*found, strict=True):
        counting = [(loss, items) for loss, items in part if items]
        if not counting:
            raise DataError("The data has no target that counts, so its loss is an average over nothing.")
        if sums:
            total += sum(loss for loss, _ in counting)
        else:
            total += sum(loss * items for loss, items in counting) / sum(items for _, items in counting)
    return total


def merge_reports(
    reports: Sequence[StepReport],
    previous_end_s: float | None,
    total: Callable[[Sequence[Norms]], float] | None = None,
) -> StepRecord:
    """One record from the reports of all stages on one step.

    Args:
        previous_end_s: when the step before ended; None for the first step of a run.
        total: what torch makes of all parameters' norms.
    """
    begin_s = min(r.start_s for r in reports) if previous_end_s is None else previous_end_s
    seconds = max(max(r.end_s for r in reports) - begin_s, 1e-9)
    workers = {r.stage if r.worker is None else r.worker for r in reports}
    loss = next((r.loss for r in reversed(reports) if r.loss is not None), math.nan)
    norm = next((r.grad_norm for r in reports if r.grad_norm is not None), None)
    parts = [r.norms for r in reports if r.norms is not None]
    if parts and total is not None:
        norm = total(parts)
    if norm is None:
        norms = {r.stage: r.stage_grad_norm for r in reports if r.stage_grad_norm is not None}  # replicas have the same
        norm = math.hypot(*norms.values()) if norms else math.nan
    return StepRecord(
        step=reports[0].step,
        samples=reports[0].samples,
        loss=loss,
        grad_norm=norm,
        seconds=seconds,
        bubble_fraction=max(0.0, 1.0 - sum(r.busy_s for r in reports) / (seconds * len(workers))),
        link_bytes_per_s=sum(sum(r.sent_bytes) + r.exchanged_bytes for r in reports) / seconds,
        peak_in_flight=max(r.peak_in_flight for r in reports),
        skipped=any(r.skipped for r in reports),
        lr=next((r.lr for r in reports if r.lr is not None), 0.0),
        # Every replica of a stage counts its own micro-batches.
        tokens=max(sum(r.tokens for r in reports if r.stage == stage) for stage in {r.stage for r in reports}),
    )
