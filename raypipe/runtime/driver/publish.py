"""What a run shows to Prometheus, by way of Ray: the table of ``raypipe.metrics``, filled from reports and events.

It runs in the driver, once per step, never in a stage. Ray collects the values every few seconds on each node's
metrics port, so what there is one series of for every stage or link is set at most once a second. Ray 2.60
forgets a gauge after about twice that time, so that all are set again every few seconds, also those of a run that
stands still.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean

from ray.util.metrics import Counter, Gauge, Histogram

from raypipe.ir.links import LinkEstimate
from raypipe.ir.report import StepRecord, StepReport
from raypipe.ir.schedule import Homes
from raypipe.metrics import METRICS, Kind, Metric, link_name, metric
from raypipe.planner.control import ControllerDecision
from raypipe.runtime.run.journal import Journal
from raypipe.runtime.run.meter import Meter
from raypipe.runtime.run.spec import PlanInForce
from raypipe.runtime.workers.roster import Member

__all__ = ["DETAILS_EVERY_S", "Published", "Publisher", "resident_bytes"]

DETAILS_EVERY_S = 1.0
"""Seconds, on the stages' clock, between two updates of the series by stage and by link."""
REPEAT_S = 2.5


class Publisher:
    """Publishes the metrics of one run.

    Args:
        run: value of the tag "run".
        homes: workers that hold each stage in the first plan; ``resized`` tells of another.
    """

    def __init__(self, run: str, homes: Homes) -> None:
        self._metrics = {found.name: _make(found) for found in METRICS}
        self._run = {"run": run}
        self._detailed_s = -math.inf
        self._standing: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}  # gauges, by name and tags
        self.resized(homes)

    def resized(self, homes: Homes) -> None:
        """The pipeline has these stages from now on; those of stages and links before are not shown any more."""
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
        """A step has ended on all stages."""
        self._set("raypipe_step_seconds", record.seconds, self._run)
        self._set("raypipe_samples_per_second", record.samples_per_s, self._run)
        if record.tokens:
            self._set("raypipe_tokens_per_second", record.tokens_per_s, self._run)
            self._set("raypipe_tokens_total", record.tokens, self._run)
        if record.goodput:  # it is not known of steps that were taken over
            self._set("raypipe_goodput", record.goodput, self._run)
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
        """Something else has happened, or is known now: count it, set it, or observe it, whichever the table says.

        Args:
            name: as in the table; ``raypipe_`` and ``_total`` may be left out.
            value: by how much a counter grows; the value of a gauge; one observation of a histogram.
            tags: all that the table lists, but for "run".

        Raises:
            KeyError: the table has no such metric.
            ValueError: a tag is missing, or the metric does not have it.
        """
        found = metric(name)
        if {"run", *tags} != set(found.tags):
            wanted = ", ".join(tag for tag in found.tags if tag != "run") or "none"
            raise ValueError(f"{found.name} was given the tags {', '.join(tags) or 'none'}: give {wanted}.")
        self._set(found.name, value, {**self._run, **{tag: str(content) for tag, content in tags.items()}})

    def repeat(self) -> None:
        """Set all gauges once more, as they are; from any thread."""
        for (name, tags), value in list(self._standing.items()):
            gauge = self._metrics[name]
            assert isinstance(gauge, Gauge)
            gauge.set(value, tags=dict(tags))

    def _stage(self, reports: Sequence[StepReport], seconds: float) -> None:
        """Of all replicas of one stage."""
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
        if not math.isfinite(value):  # merge_reports says NaN for what no stage has told
            return
        found = self._metrics[name]
        if isinstance(found, Gauge):
            self._standing[name, tuple(tags.items())] = value
            found.set(value, tags=tags)
        elif isinstance(found, Histogram):
            found.observe(value, tags=tags)
        elif value > 0:
            found.inc(value, tags=tags)


class Published:
    """A journal whose steps Prometheus sees too, until ``close``.

    Args:
        plan: in force, for what is known before its first step.
        max_failures: that the run may survive; -1 is no limit.
        resident_bytes: memory of each worker's process, by the worker's number.
        meter: counts what the run costs, and is closed by whoever made it; None where its workers have no price.
    """

    def __init__(
        self,
        journal: Journal,
        publisher: Publisher,
        plan: PlanInForce,
        max_failures: int = 0,
        resident_bytes: Callable[[], Mapping[int, int]] = dict,
        meter: Meter | None = None,
    ) -> None:
        self._journal = journal
        self._publisher = publisher
        self._resident_bytes, self._peaks = resident_bytes, dict[int, int]()
        self._meter = meter
        self._closed = threading.Event()
        publisher.event("running")
        publisher.event("last_step_timestamp_seconds", time.time())  # a first step that never ends counts from here
        if max_failures >= 0:
            publisher.event("failures_allowed", max_failures)
        self.planned(plan)
        self.resumed, self.tell, self.alert = journal.resumed, journal.tell, journal.alert
        self.evaluated = journal.evaluated
        self._thread = threading.Thread(target=self._repeat, name="raypipe metrics", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """The run has ended, though its process may live on."""
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
            for stage, found in enumerate(predicted.stages):
                publisher.event("predicted_memory_bytes", found.memory_bytes, stage=stage)

    def counted(self, metric: str, value: float = 1.0) -> None:
        self._publisher.event(metric, value)

    def step(self, record: StepRecord, reports: Sequence[StepReport]) -> None:
        self._journal.step(record, reports)
        self._publisher.step(record, reports)

    def estimated(self, links: Sequence[LinkEstimate]) -> None:
        for found in links:
            ends = (found.hop, found.hop + 1) if found.forward else (found.hop + 1, found.hop)
            link = link_name(*ends)
            self._publisher.event("link_message_seconds", found.transfer_s, link=link)
            self._publisher.event("link_bandwidth_bytes_per_second", found.bandwidth_bytes_s, link=link)

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
            self._journal.tell(cost=cost)

    def _memory(self) -> None:
        held = self._resident_bytes()
        for worker, found in held.items():
            self._peaks[worker] = max(found, self._peaks.get(worker, 0))
        for stage, workers in enumerate(self._homes):
            if found := max(held.get(worker, 0) for worker in workers):
                self._publisher.event("resident_memory_bytes", found, stage=stage)
                peak = max(self._peaks.get(worker, 0) for worker in workers)
                self._publisher.event("peak_memory_bytes", peak, stage=stage)


def resident_bytes(members: Sequence[Member]) -> dict[int, int]:
    """Memory of the process of each worker, by its number, as it said last."""
    return {m.worker: m.pulse.resident_bytes for m in members if m.worker is not None and m.pulse is not None}


def _by_stage(reports: Sequence[StepReport]) -> list[list[StepReport]]:
    found: dict[int, list[StepReport]] = {}
    for report in reports:
        found.setdefault(report.stage, []).append(report)
    return list(found.values())


def _make(found: Metric) -> Gauge | Counter | Histogram:
    described = f"{found.meaning} Unit: {found.unit}."
    match found.kind:
        case Kind.GAUGE:
            return Gauge(found.name, described, tag_keys=found.tags)
        case Kind.COUNTER:
            return Counter(found.name, described, tag_keys=found.tags)
        case Kind.HISTOGRAM:
            return Histogram(found.name, described, list(found.boundaries), tag_keys=found.tags)
