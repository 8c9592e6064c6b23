"""What a run shows to Prometheus, by way of Ray: the table of ``raypipe.metrics``, filled from reports and events.

It runs in the driver, once per step, never in a stage. Ray collects the values every few seconds on each node's
metrics port, so what there is one series of for every stage or link is set at most once a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ray.util.metrics import Counter, Gauge, Histogram

from raypipe.ir.report import StepRecord, StepReport
from raypipe.ir.schedule import Homes
from raypipe.metrics import METRICS, Kind, Metric, link_name, metric
from raypipe.planner.control import ControllerDecision
from raypipe.runtime.run.journal import Journal
from raypipe.runtime.run.spec import PlanInForce

__all__ = ["DETAILS_EVERY_S", "Published", "Publisher"]

DETAILS_EVERY_S = 1.0
"""Seconds, on the stages' clock, between two updates of the series by stage and by link."""


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
        self.resized(homes)

    def resized(self, homes: Homes) -> None:
        """The pipeline has these stages from now on."""
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
        self._set("raypipe_loss", record.loss, self._run)
        self._set("raypipe_grad_norm", record.grad_norm, self._run)
        self._set("raypipe_bubble_fraction", record.bubble_fraction, self._run)
        if record.skipped:
            self.event("skipped_steps")
        now_s = max((report.end_s for report in reports), default=-math.inf)
        if now_s - self._detailed_s >= DETAILS_EVERY_S:
            self._detailed_s = now_s
            for report in reports:
                self._stage(report, record.seconds)

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

    def _stage(self, report: StepReport, seconds: float) -> None:
        tags = self._stages[report.stage]
        self._set("raypipe_stage_busy_seconds", report.busy_s, tags)
        self._set("raypipe_link_wait_seconds", report.wait_s, tags)
        self._set("raypipe_weight_versions", report.weight_versions, tags)
        for link, sent, plain in zip(
            self._links[report.stage], report.sent_bytes, report.uncompressed_bytes, strict=True
        ):
            if link is not None and seconds > 0:
                self._set("raypipe_link_bytes_per_second", sent / seconds, link)
                self._set("raypipe_codec_ratio", plain / sent if sent else 1.0, link)

    def _set(self, name: str, value: float, tags: dict[str, str]) -> None:
        if not math.isfinite(value):  # merge_reports says NaN for what no stage has told
            return
        found = self._metrics[name]
        if isinstance(found, Gauge):
            found.set(value, tags=tags)
        elif isinstance(found, Histogram):
            found.observe(value, tags=tags)
        elif value > 0:
            found.inc(value, tags=tags)


class Published:
    """A journal whose steps Prometheus sees too.

    Args:
        plan: in force, for what is known before its first step.
    """

    def __init__(self, journal: Journal, publisher: Publisher, plan: PlanInForce) -> None:
        self._journal = journal
        self._publisher = publisher
        publisher.event("predicted_step_seconds", plan.predicted_step_s)
        publisher.event("generation", plan.plan.generation)
        if plan.retune is not None:
            publisher.event("group_size", plan.retune.choice.spec.group_size)
        self.resumed, self.tell, self.alert = journal.resumed, journal.tell, journal.alert

    def planned(self, plan: PlanInForce) -> None:
        self._publisher.resized(plan.plan.schedule.wiring.homes)
        self._publisher.event("predicted_step_seconds", plan.predicted_step_s)
        self._publisher.event("generation", plan.plan.generation)

    def counted(self, metric: str, value: float = 1.0) -> None:
        self._publisher.event(metric, value)

    def step(self, record: StepRecord, reports: Sequence[StepReport]) -> None:
        self._journal.step(record, reports)
        self._publisher.step(record, reports)

    def decided(self, decision: ControllerDecision) -> None:
        self._journal.decided(decision)
        if decision.choice is not None:
            self._publisher.event("retunes")
            self._publisher.event("group_size", decision.choice.spec.group_size)


def _make(found: Metric) -> Gauge | Counter | Histogram:
    described = f"{found.meaning} Unit: {found.unit}."
    match found.kind:
        case Kind.GAUGE:
            return Gauge(found.name, described, tag_keys=found.tags)
        case Kind.COUNTER:
            return Counter(found.name, described, tag_keys=found.tags)
        case Kind.HISTOGRAM:
            return Histogram(found.name, described, list(found.boundaries), tag_keys=found.tags)
