"""Step reports of stages, step records of the run, and the list of the newest records: numbers only, no tensors.

as objects    StepRecord(step=7, loss=0.31, ...)     450 bytes each, mostly for the boxed numbers
in columns    step   5    6    7                     120 bytes
              loss   0.4  0.3  0.31
"""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple, overload

from raypipe.errors import DataError
from raypipe.ir.communication import MessageTimes, StageSample
from raypipe.ir.timeline import Span

Averages = tuple[tuple[float, float], ...]
"""(value, number of items averaged) for each part of a loss."""
Numbers = tuple[tuple[str, float], ...]
"""(name, value) pairs; a tuple, so that records are comparable and hashable."""


@dataclass(frozen=True, slots=True)
class Norms:
    """Gradient norms of a stage's parameters.

    Attributes:
        places: indices of the parameters in model.parameters() order.
        norms: norm of each parameter.
        dtype: torch name of the dtype that they were computed in.
    """

    places: tuple[int, ...]
    norms: tuple[float, ...]
    dtype: str


class CopyReport(NamedTuple):
    """Report on the newest in-memory copy of a stage's state.

    The copy is on another worker, or on the stage's own if no other worker may hold it.

    Attributes:
        step: step after which the copy was made.
        copied_s: seconds of copying.
        sent_s: seconds from the first byte sent to the last.
    """

    step: int
    copied_s: float
    sent_s: float


@dataclass(frozen=True, slots=True)
class StepReport:
    """Report of one stage on one mini-batch.

    Norms are "per stage" if every stage clips its gradients by their own norm, without waiting for the other stages.

    Attributes:
        stage: the reporting stage.
        step: optimizer step, counted from 0 over the run; in evaluation, index of the batch.
        samples: samples of the mini-batch.
        loss: loss of the mini-batch after loss_reduction. Every stage reports it; but in evaluation, and if norms are
            per stage, only the last one does, and others report None.
        grad_norm: gradient norm of the whole model before clipping; None in evaluation and if norms are per stage.
        stage_grad_norm: gradient norm of this stage before clipping; None unless norms are per stage.
        norms: gradient norm of each parameter, if norms are per stage in a synchronous step; those of all stages give
            the norm of the model.
        start_s, end_s: begin and end of the step, on the host's monotonic clock.
        busy_s: seconds in F, B, I and W.
        wait_s: seconds waiting for messages.
        sent_bytes: bytes sent to the next stage and to the previous one, after any codec.
        uncompressed_bytes: sent_bytes before the codec.
        peak_in_flight: most micro-batches whose activations were held at once.
        weight_versions: copies of the weights that the stage holds.
        spans: every action (monotonic clock), if requested by ``Order.keep_spans``.
        sample: median seconds of the stage's actions, if requested by ``Order.measure``.
        messages: sizes and time stamps of received messages, if requested by ``Order.measure``.
        worker: number of the stage's worker; None if it equals the stage's number.
        averages: each part of an evaluation's loss with the items that it averages over (samples, valid labels); empty
            on all stages but the last.
        skipped: loss or gradient was not finite, and no stage took the step.
        copying: the worker copied its state or sent a copy meanwhile, so that its times are not representative.
        copied: the newest complete in-memory copy of this stage's state, if any.
        lr: learning rate of the stage's first parameter group; None if the stage has no parameters or took no step.
        metrics: metrics by name, at the end of an evaluation, on the last stage.
        tokens: tokens of the mini-batch, if the stage reads token ids; see engine/stage/feed.py.
        exchanged_bytes: bytes sent to other replicas of the stage, mostly gradient sums.
        remark: the input value that made an evaluation loss NaN or infinite; "" if every value is finite.
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
    lr: float | None = None
    metrics: Numbers = ()
    tokens: int = 0
    exchanged_bytes: int = 0
    remark: str = ""


Reports = Callable[[], list[list[StepReport]]]
"""Function that waits for a segment's values, and returns the reports of each stage of a worker by mini-batch."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """Record of one step of the whole pipeline: a line of the progress display, a row of metrics.parquet.

    Attributes:
        step: index of the step, from 0; progress, status and checkpoints count completed steps, from 1.
        samples, loss, grad_norm: see StepReport.
        seconds: from the end of the previous step to the end of this one.
        bubble_fraction: share of worker time without computation; if steps overlap, correct on average only.
        link_bytes_per_s: bytes over all links and both directions, per second.
        peak_in_flight: maximum over the stages.
        schedule: name of the schedule, as ``ScheduleSpec.name``.
        skipped: True if loss or gradient norm was not finite, so that no stage updated its parameters.
        lr: learning rate of the first parameter group in this step; None if the optimizer computes it itself, as
            Adafactor with lr=None; 0 in runs of older releases.
        tokens: token ids of the mini-batch, padding included; 0 if the data has none.
        goodput: share of the time since the stages were ready that was spent on new steps: pauses and repeated steps
            count as lost; 0 if unknown.
        evaluation: eval_loss and the metrics, as eval_<name>, if an evaluation followed the step.
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
    lr: float | None = 0.0
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
        """Names of the fields that are 0 because they are unknown; displays leave them out."""
        return (*(() if self.tokens else ("tokens", "tokens_per_s")), *(() if self.goodput else ("goodput",)))


def mean_loss(averages: Sequence[Averages], *, sums: bool) -> float:
    """Combine the losses of many mini-batches into one.

    Args:
        averages: by mini-batch, (value, number of items) of each part of its loss.
        sums: True to add the losses, False to average each part weighted by its items.

    Raises:
        DataError: no item counts in the loss.
    """
    total = 0.0
    for part in zip(*averages, strict=True):
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
    """Merge the reports of all stages on one step into one record.

    Args:
        previous_end_s: end of the previous step; None for the first step of a run.
        total: computes the model's gradient norm from the stages' Norms, as torch does; None ignores Norms.
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
        lr=next((r.lr for r in reports if r.lr is not None), None),
        # Every replica of a stage counts its own micro-batches.
        tokens=max(sum(r.tokens for r in reports if r.stage == stage) for stage in {r.stage for r in reports}),
    )


_CODES = {"int": "q", "float": "d", "bool": "b"}
_FIELDS = {field.name: str(field.type) for field in fields(StepRecord)}
_SPARE = 8
"""Records are dropped an eighth of ``most`` at a time, because all that are kept move in memory each time."""


class KeptRecords(Sequence[StepRecord]):
    """Newest records of a growing list, stored in columns. Items are created on access; a slice is a KeptRecords too.

    Args:
        records: initial records.
        most: number of records that are always kept; up to an eighth more may be. None keeps all.

    Attributes:
        first: index of the oldest kept record in the whole list.
    """

    def __init__(self, records: Iterable[StepRecord] = (), most: int | None = None) -> None:
        self._columns: dict[str, Any] = {
            name: array(_CODES[kind]) if kind in _CODES else [] for name, kind in _FIELDS.items()
        }
        self._most = most
        self.first = 0
        self.extend(records)

    @property
    def end(self) -> int:
        """Number of records that were ever added, including dropped ones; index of the next record."""
        return self.first + len(self)

    def append(self, record: StepRecord) -> None:
        for name, column in self._columns.items():
            value = getattr(record, name)
            # Records that came from another process bring a text each, of the few that there are.
            column.append(sys.intern(value) if _FIELDS[name] == "str" else value)
        if self._most is not None and len(self) > self._most + self._most // _SPARE:
            self.forget(len(self) - self._most)

    def extend(self, records: Iterable[StepRecord]) -> None:
        for record in records:
            self.append(record)

    def pop(self) -> StepRecord:
        """Remove and return the newest record."""
        record = self[-1]
        for column in self._columns.values():
            column.pop()
        return record

    def forget(self, count: int) -> None:
        """Drop the ``count`` oldest records."""
        self.first += min(count, len(self))
        for column in self._columns.values():
            del column[:count]

    def clear(self) -> None:
        """Drop all records."""
        self.forget(len(self))

    def since(self, place: int) -> list[StepRecord]:
        """Return the kept records from index ``place`` of the whole list on."""
        return list(self[max(0, place - self.first) :])

    def column(self, name: str) -> Sequence[Any]:
        """Return one field of all records, not copied: an array of numbers or bools, else a list."""
        return self._columns[name]  # type: ignore[no-any-return]

    def __len__(self) -> int:
        return len(self._columns["step"])

    @overload
    def __getitem__(self, place: int) -> StepRecord: ...

    @overload
    def __getitem__(self, place: slice) -> KeptRecords: ...

    def __getitem__(self, place: int | slice) -> StepRecord | KeptRecords:
        columns = {name: column[place] for name, column in self._columns.items()}
        if isinstance(place, slice):
            records = KeptRecords()
            records._columns = columns
            return records
        columns = {name: bool(value) if _FIELDS[name] == "bool" else value for name, value in columns.items()}
        return StepRecord(**columns)

    def __repr__(self) -> str:
        return f"<{len(self)} records>"
