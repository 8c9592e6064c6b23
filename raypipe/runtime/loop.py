"""The run as a loop over orders: the same for actors and for threads, so it imports no Ray.

newest checkpoint --> where to begin
orders --> fleet --> reports of all stages --> one StepRecord per step --> progress, metrics, run folder
now and then, and at the end: a checkpoint
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from raypipe.engine.checkpoint import MANIFEST, Manifest, check_position, find_checkpoint, make_manifest
from raypipe.engine.rundir import RunFolder
from raypipe.engine.storage import Place
from raypipe.errors import CheckpointError
from raypipe.ir.order import Order
from raypipe.ir.report import StepRecord, StepReport, merge_reports
from raypipe.ir.schedule import Schedule
from raypipe.ir.segment import RowsKey, Segment
from raypipe.ir.timeline import Span, Timeline
from raypipe.planner.segments import (
    Flow,
    Position,
    draining_segment,
    evaluation_segments,
    flowing_segments,
    train_segments,
)
from raypipe.runtime.checkpoints import CheckpointPolicy, Checkpoints
from raypipe.runtime.requests import Requests

__all__ = ["AnyFleet", "Outcome", "RunSpec", "run_loop"]

METRICS_EVERY_S = 30.0
"""metrics.parquet is written anew this often: what a crash costs, against a file that grows with the run."""


class Watcher(Protocol):
    """Who is told how a run goes; see runtime.journal.Journal."""

    def resumed(self, records: Sequence[StepRecord], step: int, checkpoint: str) -> None: ...

    def step(self, record: StepRecord, reports: Sequence[StepReport]) -> None: ...

    def tell(self, **changes: Any) -> None: ...


class AnyFleet(Protocol):
    """Stages that carry out orders: actors or threads."""

    def run(
        self, orders: Iterator[Order], schedules: Callable[[RowsKey], Schedule], *, last: bool = False
    ) -> Iterator[list[list[StepReport]]]: ...

    def halt(self) -> None: ...

    def spans(self) -> Sequence[Span]: ...

    def save(self, folder: str) -> None: ...

    def entries(self, folder: str) -> list[dict[str, Any]]: ...

    def restore(self, folder: str) -> None: ...

    def stop(self) -> None: ...


@dataclass(frozen=True, slots=True)
class RunSpec:
    """What the loop needs to know; small, and without a tensor.

    Attributes:
        name: of the run.
        place: the run's folder.
        plan_json: saved as plan.json.
        config_yaml: saved as config.yaml.
        schedules: lowered rows.
        flow: of an asynchronous schedule; None runs empty after every step.
        num_samples: of "train" and perhaps "eval".
        num_steps: of the whole run, those of earlier submissions included.
        seed: of randomness and of the data's order.
        predicted: the simulated timeline of one step, for the trace.
        predicted_step_s: seconds of one step; of an asynchronous schedule, in the steady state.
        aliases: further names of shared tensors -> the names that they are stored under.
        sums_losses: loss_reduction is "sum".
        checkpoints: when to save, what to keep.
    """

    name: str
    place: Place
    plan_json: str
    config_yaml: str
    schedules: Mapping[RowsKey, Schedule]
    num_samples: Mapping[str, int]
    minibatch_size: int
    microbatch_size: int
    num_steps: int
    seed: int
    predicted: Timeline
    predicted_step_s: float
    aliases: Mapping[str, str]
    sums_losses: bool
    checkpoints: CheckpointPolicy = field(default_factory=CheckpointPolicy)
    flow: Flow | None = None


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended.

    Attributes:
        eval_loss: on eval_data after the last step, None without, or when the run was stopped.
        checkpoint: the last one, empty when a run was stopped before its first step.
        step: optimizer steps done.
        stopped: why the run ended early; empty when it did not.
    """

    eval_loss: float | None
    checkpoint: str
    step: int
    stopped: str = ""


def run_loop(fleet: AnyFleet, spec: RunSpec, watcher: Watcher, requests: Requests) -> Outcome:
    """Begin where the newest checkpoint ends, train, evaluate, save. Metrics are written whatever happens."""
    loop = _Loop(fleet, spec, watcher, requests)
    try:
        outcome = loop.run()
    except BaseException as error:
        reason = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        loop.try_to(lambda: loop.folder.event("fail", reason, step=loop.at.step))
        loop.try_to(lambda: loop.folder.write_metrics(loop.records))
        raise
    finally:
        loop.checkpoints.close()
    loop.folder.write_metrics(loop.records)
    return outcome


class _Loop:
    """One call of run_loop.

    Attributes:
        at: position after the last step that every stage has finished.
        records: of all steps of the run, those of earlier submissions included.
    """

    def __init__(self, fleet: AnyFleet, spec: RunSpec, watcher: Watcher, requests: Requests) -> None:
        self.fleet, self.spec, self.watcher, self.requests = fleet, spec, watcher, requests
        self.folder = RunFolder(spec.place)
        self.records: list[StepRecord] = []
        self.at = Position()
        self.checkpoints = Checkpoints(spec.place, fleet, spec.checkpoints, self._manifest, self._tell)
        # By first step of each segment that was ordered and has not ended: the segment, and the position after it.
        self._ordered: dict[int, tuple[Segment, Position]] = {}
        self._asked = False  # for a checkpoint that has not been ordered
        self._empty = True  # whether the pipeline runs nothing of the steps to come
        self._ends: dict[int, Position] = {}  # where the steps ended after which there is a checkpoint
        self._saving: set[int] = set()
        self._saved = self._completed = 0  # steps after which a snapshot was taken last, and given a manifest
        self._trace_step = 0
        self._end_s: float | None = None
        self._written_s = time.monotonic()
        self._evaluated = 0
        self._complaint = ""  # of the last write that training does not need, where it failed

    def run(self) -> Outcome:
        spec, requests = self.spec, self.requests
        self._resume()
        began_at = self._saved = self._completed = self.at.step
        self._trace_step = min(spec.num_steps - 1, began_at + max(2, (spec.num_steps - began_at) // 2))
        self.folder.write_plan(spec.plan_json)
        self.folder.write_config(spec.config_yaml)
        self.folder.event("start", "fit was called", step=began_at, num_steps=spec.num_steps)
        requests.serve(self.fleet)
        eval_loss: float | None = None
        if began_at >= spec.num_steps:  # nothing is left to do but to say how good it is
            eval_loss = self._evaluate() if self._evaluates_after(began_at) else None
        while self.at.step < spec.num_steps and not requests.stop_reason:
            self._train()
            if self._evaluates_after(self.at.step):
                eval_loss = self._evaluate()
                self._complete(eval_loss)
        if self._saved < self.at.step:  # stopped between two checkpoints
            self.fleet.save(self.checkpoints.begin(self.at.step))
        if self._completed < self.at.step:
            self._complete(None)
        self.checkpoints.finish(self.at.step)
        if self.at.step > began_at:
            measured = Timeline(tuple(self.fleet.spans()), "measured", name=spec.name)
            self.try_to(lambda: self.folder.write_timelines([spec.predicted, measured]))
        stopped = requests.stop_reason if self.at.step < spec.num_steps else ""
        decision, reason = ("stop", stopped) if stopped else ("finish", "all steps done")
        self._tell(decision, reason, step=self.at.step, checkpoint=self.checkpoints.latest)
        return Outcome(eval_loss, self.checkpoints.latest, self.at.step, stopped)

    def _resume(self) -> None:
        """Go back to the newest good checkpoint of this run, if it has one."""
        spec = self.spec
        found, refused = find_checkpoint(spec.place)
        for name, reason in refused:
            self.folder.event("refuse checkpoint", reason, name=name)
        if found is None:
            # A save that was cut short left nothing to go back to; damage is for somebody to look at.
            damaged = [(name, reason) for name, reason in refused if spec.place.exists(f"{name}/{MANIFEST}")]
            if damaged:
                raise CheckpointError(
                    f"No checkpoint of run {spec.name!r} can be used: {damaged[0][1]} To begin anew, give the run "
                    "another name or delete its checkpoints."
                )
            return
        check_position(
            found.manifest,
            seed=spec.seed,
            minibatch_size=spec.minibatch_size,
            microbatch_size=spec.microbatch_size,
            num_samples=spec.num_samples["train"],
        )
        self.fleet.restore(found.folder)
        position = found.manifest.position
        self.at = Position(**position)
        self.records = self.folder.read_metrics(before=self.at.step)
        self.checkpoints.latest = str(spec.place / found.folder)
        self.watcher.resumed(self.records, self.at.step, self.checkpoints.latest)
        self.folder.event("resume", f"from {found.folder}", step=self.at.step)

    def _train(self) -> None:
        """Train to the end, to a stop, or to a checkpoint whose score is an evaluation."""
        self._follow(self.fleet.run(self._orders(), self._schedule))
        if not self._empty:  # stopped in the middle: what is under way is completed
            segment = draining_segment(self._flow(), self.spec.minibatch_size, self.spec.microbatch_size, self.at)
            self._ordered[segment.first_step] = segment, self.at.after(segment, self.spec.num_samples["train"])
            self._follow(self.fleet.run(iter([Order(segment)]), self._schedule, last=True))

    def _follow(self, news: Iterator[list[list[StepReport]]]) -> None:
        for reports in news:
            for of_step in zip(*reports, strict=True):
                record = merge_reports(of_step, self._end_s)
                self._end_s = max(r.end_s for r in of_step)
                self.records.append(record)
                self.watcher.step(record, of_step)
            segment, self.at = self._ordered.pop(self.at.step)
            self._empty = segment.phase.ends_empty
            if self.at.step in self._saving:
                self._saved = self.at.step
                if not self._evaluates_after(self.at.step):
                    self._complete(None)
            if time.monotonic() - self._written_s > METRICS_EVERY_S:
                self._written_s = time.monotonic()
                self.try_to(lambda: self.folder.write_metrics(self.records))

    def _orders(self) -> Iterator[Order]:
        spec = self.spec
        for segment, after in self._segments():
            self._ordered[segment.first_step] = segment, after
            self._asked = self._asked or self.requests.take_checkpoint()
            due = segment.phase.ends_empty and (
                after.step == spec.num_steps or self.checkpoints.due(after.step) or self._asked
            )
            if due:
                self._saving.add(after.step)
                self._asked = False
            save_to = self.checkpoints.begin(after.step) if due else ""
            traced = segment.first_step <= self._trace_step < after.step
            yield Order(segment, keep_spans=traced, save_to=save_to)
            if due and self._evaluates_after(after.step):
                return

    def _segments(self) -> Iterator[tuple[Segment, Position]]:
        spec = self.spec
        sizes = (spec.num_samples["train"], spec.minibatch_size, spec.microbatch_size, spec.num_steps)
        if spec.flow is None:
            return train_segments(*sizes, self.at)
        return flowing_segments(
            spec.flow,
            *sizes,
            self.at,
            empty_after=self.checkpoints.due_at,
            empty_soon=lambda: self._asked or self.requests.wants_checkpoint or self.checkpoints.overdue,
        )

    def _flow(self) -> Flow:
        assert self.spec.flow is not None, "only an asynchronous schedule ends with micro-batches under way"
        return self.spec.flow

    def _evaluates_after(self, step: int) -> bool:
        """Whether an evaluation belongs to the checkpoint of ``step``: at the end, and where it is the score."""
        if "eval" not in self.spec.num_samples or self.requests.stop_reason:
            return False
        return step >= self.spec.num_steps or self.spec.checkpoints.score_attribute == "eval_loss"

    def _complete(self, eval_loss: float | None) -> None:
        self._completed = self.at.step
        self._ends[self.at.step] = self.at
        self.checkpoints.complete(self.at.step, self._metrics(eval_loss))

    def _evaluate(self) -> float | None:
        """Loss over the evaluation samples: each mini-batch's weighs as much as its samples; sums are added up.

        None when the run was stopped meanwhile.
        """
        spec = self.spec
        segments = evaluation_segments(
            spec.num_samples["eval"], spec.minibatch_size, spec.microbatch_size, self._evaluated
        )
        orders = [Order(segment, training=False) for segment in segments]
        self._evaluated += sum(len(order.segment.microbatch_samples) for order in orders)
        total = samples = 0.0
        for reports in self.fleet.run(iter(orders), self._schedule):
            last = reports[-1][0]
            weight = 1 if spec.sums_losses else last.samples
            total += (math.nan if last.loss is None else last.loss) * weight
            samples += last.samples
        if self.requests.stop_reason:
            return None
        return total if spec.sums_losses else total / samples

    def _schedule(self, key: RowsKey) -> Schedule:
        return self.spec.schedules[key]

    def _metrics(self, eval_loss: float | None) -> dict[str, float]:
        last = self.records[-1]
        found = {"loss": last.loss, "grad_norm": last.grad_norm}
        return found if eval_loss is None else {**found, "eval_loss": eval_loss}

    def try_to(self, write: Callable[[], None]) -> None:
        """Write what training does not need: a full disk is told and ends neither the run nor hides why it ended."""
        try:
            write()
        except CheckpointError as error:
            self._complaint = str(error)
            self.watcher.tell(message=self._complaint)
        else:
            if self._complaint:
                self._complaint = ""
                self.watcher.tell(message="")

    def _tell(self, decision: str, reason: str, **numbers: Any) -> None:
        self.try_to(lambda: self.folder.event(decision, reason, **numbers))
        self.watcher.tell(checkpoint=self.checkpoints.latest)

    def _manifest(self, step: int, entries: list[dict[str, Any]], metrics: Mapping[str, float]) -> Manifest:
        spec = self.spec
        return make_manifest(
            step,
            entries,
            position=asdict(self._ends[step]),
            seed=spec.seed,
            minibatch_size=spec.minibatch_size,
            microbatch_size=spec.microbatch_size,
            num_samples=spec.num_samples["train"],
            aliases=spec.aliases,
            metrics=metrics,
        )
