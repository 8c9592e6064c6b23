"""Metrics of a run for Prometheus: sets the metrics listed in ``raypipe.metrics`` from reports and events.

Metrics are set in the driver, after every step; none are set in a stage. Ray collects the values every few seconds on
each node's metrics port, so series by stage or link are set at most once a second. Ray 2.60 drops a gauge that was not
set for about two such intervals, so all gauges are set again every REPEAT_S, also while no steps are made.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from ray.util.metrics import Counter, Gauge, Histogram

from raypipe.ir.communication import LinkEstimate
from raypipe.ir.report import StepRecord, StepReport
from raypipe.ir.schedule import Homes
from raypipe.metrics import METRICS, Kind, Metric, link_name, metric
from raypipe.planner.controller import ControllerDecision
from raypipe.run.journal import Journal
from raypipe.run.spec import PlanInForce
from raypipe.run.spending import Meter
from raypipe.run.status import Alert, Stages
from raypipe.runtime.fleet.roster import Member

DETAILS_EVERY_S = 1.0
"""Seconds, on the stages' clock, between two updates of the series by stage and by link."""
REPEAT_S = 2.5


class Publisher:
    """Publisher of one run's metrics.

    Args:
        run: value of the tag "run".
        homes: for each stage, the numbers of its workers in the first plan; ``resized`` sets those of another plan.
    """

    def __init__(self, run: str, homes: Homes) -> None:
        self._metrics = {entry.name: _make(entry) for entry in METRICS}
        self._run = {"run": run}
        self._detailed_s = -math.inf
        self._standing: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}  # gauges, by name and tags
        self.resized(homes)

    def resized(self, homes: Homes) -> None:
        """Set the workers of each stage of a new plan, and stop repeating gauges of stages and links that are gone."""
        self._standing = {key: value for key, value in self._standing.items() if len(key[1]) == 1}
        stages = range(len(homes))
        self._stages = [{**self._run, "stage": str(stage)} for stage in stages]
        # By stage: the link to the next one and the link to the one before, as in StepReport.sent_bytes.
        self._links = [
            tuple(
                {**self._run, "link": link_name(stage, peer)}
                if peer in stages and homes[peer] != homes[stage]
                else None
                for peer in (stage + 1, stage - 1)
            )
            for stage in stages
        ]

    def step(self, record: StepRecord, reports: Sequence[StepReport]) -> None:
        """Publish the metrics of a completed step; update metrics by stage or link at most every DETAILS_EVERY_S."""
        self._set("raypipe_step_seconds", record.seconds, self._run)
        self._set("raypipe_samples_per_second", record.samples_per_s, self._run)
        if record.tokens:
            self._set("raypipe_tokens_per_second", record.tokens_per_s, self._run)
            self._set("raypipe_tokens_total", record.tokens, self._run)
        if record.goodput:  # not known for steps that were taken over
            self._set("raypipe_goodput", record.goodput, self._run)
        if record.lr is not None:
            self._set("raypipe_learning_rate", record.lr, self._run)
        self._set("raypipe_loss", record.loss, self._run)
        self._set("raypipe_grad_norm", record.grad_norm, self._run)
        self._set("raypipe_bubble_fraction", record.bubble_fraction, self._run)
        self._set("raypipe_steps_total", 1.0, self._run)
        self._set("raypipe_samples_total", record.samples, self._run)
        self.event("last_step_timestamp_seconds", time.time())
        if record.skipped:
            self.event("skipped_steps")
        now_s = max((report.end_s for report in reports), default=-math.inf)
        if now_s - self._detailed_s >= DETAILS_EVERY_S:
            self._detailed_s = now_s
            for of_stage in _by_stage(reports):
                self._stage(of_stage, record.seconds)

    def event(self, name: str, value: float = 1.0, **tags: object) -> None:
        """Increment a counter, set a gauge, or add an observation to a histogram.

        Args:
            name: name of the metric in ``raypipe.metrics``; ``raypipe_`` and ``_total`` may be left out.
            value: increment, value or observation, according to the metric's kind.
            tags: values of all the metric's tags except "run".

        Raises:
            KeyError: no metric has this name.
            ValueError: a tag is missing, or the metric has no such tag.
        """
        entry = metric(name)
        if {"run", *tags} != set(entry.tags):
            wanted = ", ".join(tag for tag in entry.tags if tag != "run") or "none"
            raise ValueError(f"{entry.name} was given the tags {', '.join(tags) or 'none'}: give {wanted}.")
        self._set(entry.name, value, {**self._run, **{tag: str(content) for tag, content in tags.items()}})

    def repeat(self) -> None:
        """Set all gauges to their present values again; callable from any thread."""
        for (name, tags), value in list(self._standing.items()):
            gauge = self._metrics[name]
            assert isinstance(gauge, Gauge)
            gauge.set(value, tags=dict(tags))

    def _stage(self, reports: Sequence[StepReport], seconds: float) -> None:
        """Publish the metrics of one stage.

        Args:
            reports: reports of the stage's replicas, at least one.
            seconds: duration of the step.
        """
        stage = reports[0].stage
        tags = self._stages[stage]
        self._set("raypipe_stage_busy_seconds", fmean(report.busy_s for report in reports), tags)
        self._set("raypipe_link_wait_seconds", fmean(report.wait_s for report in reports), tags)
        self._set("raypipe_weight_versions", max(report.weight_versions for report in reports), tags)
        for direction, link in enumerate(self._links[stage]):
            sent = sum(report.sent_bytes[direction] for report in reports)
            plain = sum(report.uncompressed_bytes[direction] for report in reports)
            if link is not None and seconds > 0:
                self._set("raypipe_link_bytes_per_second", sent / seconds, link)
                self._set("raypipe_codec_ratio", plain / sent if sent else 1.0, link)

    def _set(self, name: str, value: float, tags: dict[str, str]) -> None:
        if not math.isfinite(value):  # merge_reports returns NaN for values that no stage reported
            return
        instrument = self._metrics[name]
        if isinstance(instrument, Gauge):
            self._standing[name, tuple(tags.items())] = value
            instrument.set(value, tags=tags)
        elif isinstance(instrument, Histogram):
            instrument.observe(value, tags=tags)
        elif value > 0:
            instrument.inc(value, tags=tags)


class Published:
    """Observer of the training loop (protocol Watcher): forwards all to a Journal, and publishes the run's metrics.

    Args:
        plan: plan in force, for metrics that are known before its first step.
        max_failures: number of failures that the run may survive; -1 for no limit.
        resident_bytes: returns {worker number: (id of the process, its resident bytes)}.
        meter: counts the run's cost, and is closed by its creator; None if workers have no price.
    """

    def __init__(
        self,
        journal: Journal,
        publisher: Publisher,
        plan: PlanInForce,
        max_failures: int = 0,
        resident_bytes: Callable[[], Mapping[int, tuple[str, int]]] = dict,
        meter: Meter | None = None,
    ) -> None:
        self._journal = journal
        self._publisher = publisher
        self._resident_bytes, self._peaks = resident_bytes, dict[str, int]()  # by process
        self._meter = meter
        self._closed = threading.Event()
        publisher.event("running")
        publisher.event("last_step_timestamp_seconds", time.time())  # a first step that never ends counts from here
        if max_failures >= 0:
            publisher.event("failures_allowed", max_failures)
        self.planned(plan)
        self.resumed, self.update, self.alert = journal.resumed, journal.update, journal.alert
        self.evaluated = journal.evaluated
        self._thread = threading.Thread(target=self._repeat, name="raypipe metrics", daemon=True)
        self._thread.start()

    @property
    def alerts(self) -> tuple[Alert, ...]:
        """All alerts since this run was last submitted, oldest first."""
        return self._journal.alerts

    def close(self) -> None:
        """Stop publishing at the end of the run, and set the gauge "running" to 0; the process may live on."""
        self._closed.set()
        self._thread.join()
        self._publisher.event("running", 0.0)
        self._spent()

    def _repeat(self) -> None:
        while not self._closed.wait(REPEAT_S):
            self._memory()
            self._spent()
            self._publisher.repeat()

    def planned(self, plan: PlanInForce) -> None:
        self._journal.planned(plan)
        self._homes = plan.plan.schedule.wiring.homes
        publisher = self._publisher
        publisher.resized(self._homes)
        if plan.predicted_step_s > 0:
            publisher.event("predicted_step_seconds", plan.predicted_step_s)
        publisher.event("generation", plan.plan.generation)
        publisher.event("num_stages", len(self._homes))
        publisher.event("num_workers", plan.plan.schedule.wiring.num_workers)
        publisher.event("num_microbatches", plan.plan.num_microbatches)
        if plan.retune is not None:
            publisher.event("group_size", plan.retune.choice.spec.group_size)
        if (predicted := plan.plan.prediction) is not None:
            publisher.event("predicted_bubble_fraction", predicted.bubble_fraction)
            for stage, prediction in enumerate(predicted.stages):
                publisher.event("predicted_memory_bytes", prediction.memory_bytes, stage=stage)

    def counted(self, metric: str, value: float = 1.0) -> None:
        self._publisher.event(metric, value)

    def step(self, record: StepRecord, reports: Sequence[StepReport], stages: Stages) -> None:
        self._journal.step(record, reports, stages)
        self._publisher.step(record, reports)

    def estimated(self, links: Sequence[LinkEstimate]) -> None:
        for estimate in links:
            ends = (estimate.hop, estimate.hop + 1) if estimate.forward else (estimate.hop + 1, estimate.hop)
            link = link_name(*ends)
            self._publisher.event("link_message_seconds", estimate.transfer_s, link=link)
            self._publisher.event("link_bandwidth_bytes_per_second", estimate.bandwidth_bytes_s, link=link)

    def decided(self, decision: ControllerDecision) -> None:
        self._journal.decided(decision)
        if decision.choice is not None:
            self._publisher.event("retunes")
            self._publisher.event("group_size", decision.choice.spec.group_size)
            self._publisher.event("num_microbatches", decision.choice.num_microbatches)

    def _spent(self) -> None:
        if self._meter is not None:
            cost = self._meter.read().cost
            self._publisher.event("cost", cost)
            self._publisher.event("cost_per_hour", self._meter.per_hour)
            self._journal.update(cost=cost)

    def _memory(self) -> None:
        held = self._resident_bytes()
        # A worker's number goes to another process after a recovery or a resize, which has a peak of its own.
        self._peaks = {process: max(resident, self._peaks.get(process, 0)) for process, resident in held.values()}
        for stage, workers in enumerate(self._homes):
            if there := [held[worker] for worker in workers if worker in held]:
                self._publisher.event("resident_memory_bytes", max(resident for _, resident in there), stage=stage)
                peak = max(self._peaks[process] for process, _ in there)
                self._publisher.event("peak_memory_bytes", peak, stage=stage)


def resident_bytes(members: Sequence[Member]) -> dict[int, tuple[str, int]]:
    """Return {worker number: (node and process id, resident bytes at the last heartbeat)} of the living workers."""
    by_worker = {}
    for m in members:
        if m.worker is not None and m.heartbeat is not None and not m.lost:
            by_worker[m.worker] = (f"{m.facts['node']} {m.facts['process']}", m.heartbeat.resident_bytes)
    return by_worker


def _by_stage(reports: Sequence[StepReport]) -> list[list[StepReport]]:
    by_stage: dict[int, list[StepReport]] = {}
    for report in reports:
        by_stage.setdefault(report.stage, []).append(report)
    return list(by_stage.values())


def _make(entry: Metric) -> Gauge | Counter | Histogram:
    described = f"{entry.meaning} Unit: {entry.unit}."
    match entry.kind:
        case Kind.GAUGE:
            return Gauge(entry.name, described, tag_keys=entry.tags)
        case Kind.COUNTER:
            return Counter(entry.name, described, tag_keys=entry.tags)
        case Kind.HISTOGRAM:
            return Histogram(entry.name, described, list(entry.boundaries), tag_keys=entry.tags)
