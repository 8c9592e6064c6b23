"""Metrics for Prometheus in one table, from which publisher, dashboards and documents are generated.

Ray prefixes every name with ``ray_``. A number that was not measured is not published.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Type of a metric in Prometheus."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


RUN = ("run",)
STAGE = ("run", "stage")
LINK = ("run", "link")


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric of the table.

    Attributes:
        name: name without Ray's prefix ``ray_``; counters end in ``_total``.
        kind: gauge, counter or histogram.
        unit: unit of the value; "1" for a count or a ratio.
        tags: labels of a series: "run", and "stage" or "link" if there is one series for each of them.
        meaning: a sentence for documents and dashboards.
        source: field of StepRecord or StepReport that is published; "" for metrics that are computed otherwise.
        boundaries: boundaries of a histogram's buckets, in its unit.
    """

    name: str
    kind: Kind
    unit: str
    tags: tuple[str, ...]
    meaning: str
    source: str = ""
    boundaries: tuple[float, ...] = ()


def _gauge(name: str, unit: str, tags: tuple[str, ...], meaning: str, source: str = "") -> Metric:
    return Metric(f"raypipe_{name}", Kind.GAUGE, unit, tags, meaning, source)


def _counter(name: str, meaning: str) -> Metric:
    return Metric(f"raypipe_{name}_total", Kind.COUNTER, "1", RUN, meaning)


_SECONDS = (0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0)

METRICS: tuple[Metric, ...] = (
    _gauge("step_seconds", "s", RUN, "From the end of the step before to its own end.", "StepRecord.seconds"),
    _gauge("samples_per_second", "1/s", RUN, "Samples of the last step over its seconds.", "StepRecord.samples_per_s"),
    _gauge("tokens_per_second", "1/s", RUN, "Token ids of the last step over its seconds.", "StepRecord.tokens_per_s"),
    _gauge("goodput", "1", RUN, "Share of the time since the stages were ready in which the run got further.",
           "StepRecord.goodput"),
    _gauge("learning_rate", "1", RUN, "Of the first parameter group, as the last step took it.", "StepRecord.lr"),
    _gauge("loss", "1", RUN, "Loss of the last mini-batch, after loss_reduction.", "StepRecord.loss"),
    _gauge("grad_norm", "1", RUN, "Gradient norm of the whole model, before clipping.", "StepRecord.grad_norm"),
    _gauge("bubble_fraction", "1", RUN, "Share of worker time without computation.", "StepRecord.bubble_fraction"),
    _counter("steps", "Optimizer steps done, those that had to be done again included."),
    _counter("samples", "Samples of these steps."),
    _counter("tokens", "Token ids of these steps, padding included."),
    _gauge("last_step_timestamp_seconds", "s", RUN, "When the last step ended, in seconds since 1970."),
    _gauge("running", "1", RUN, "1 while the run trains, 0 once it has ended."),
    _gauge("driver_silence_fraction", "1", RUN,
           "Share of driver_grace_s without contact to the driver; published by a stage, from a quarter on."),
    _gauge("stage_busy_seconds", "s", STAGE, "Seconds of the last step in F, B, I and W; of replicas, on average.",
           "StepReport.busy_s"),
    _gauge("link_bytes_per_second", "B/s", LINK, "What one stage sent another in the last step, over its seconds.",
           "StepReport.sent_bytes"),
    _gauge("link_wait_seconds", "s", STAGE, "Seconds of the last step in waits for messages, replicas on average.",
           "StepReport.wait_s"),
    _gauge("link_message_seconds", "s", LINK, "An uncompressed boundary message on an idle link, as estimated."),
    _gauge("link_bandwidth_bytes_per_second", "B/s", LINK, "What the link can carry, as estimated from messages."),
    _gauge("codec_ratio", "1", LINK, "Bytes before the codec over bytes on the link."),
    _gauge("group_size", "1", RUN, "k of kFkB in the plan that runs."),
    _gauge("num_microbatches", "1", RUN, "Micro-batches per optimizer step."),
    _gauge("weight_versions", "1", STAGE, "Weight versions that the stage holds."),
    _gauge("resident_memory_bytes", "B", STAGE, "Memory of the process that holds the stage; of replicas, the most."),
    _gauge("peak_memory_bytes", "B", STAGE, "Most memory that this process was seen with."),
    _gauge("predicted_memory_bytes", "B", STAGE, "What the plan predicts for the stage, libraries not included."),
    _gauge("predicted_step_seconds", "s", RUN, "The step that the plan predicts."),
    _gauge("predicted_bubble_fraction", "1", RUN, "The bubble_fraction that the plan predicts."),
    _gauge("num_stages", "1", RUN, "Stages of the plan."),
    _gauge("num_workers", "1", RUN, "Workers that hold them; spares not included."),
    _counter("retunes", "Times the controller changed the plan of the run."),
    _counter("failures", "Failures of stages, links and nodes that the run noticed."),
    _gauge("failures_allowed", "1", RUN, "FailureConfig(max_failures), where that is a limit."),
    Metric("raypipe_recovery_seconds", Kind.HISTOGRAM, "s", RUN,
           "From a failure that was noticed until all stages are ready again.", boundaries=_SECONDS),
    _counter("lost_steps", "Optimizer steps that had to be done again after a failure."),
    _counter("skipped_steps", "Optimizer steps left out because loss or gradient norm was not finite."),
    _gauge("cost", "1", RUN, "What the run has cost so far, in the currency of worker_price_per_hour."),
    _gauge("cost_per_hour", "1", RUN, "What the workers that it holds cost, spares included."),
    _gauge("generation", "1", RUN, "Generation of the plan; it counts re-plans."),
)  # fmt: skip
"""All metrics, in the order of the documents."""

_BY_NAME = {metric.name: metric for metric in METRICS}


def metric(name: str) -> Metric:
    """Return a metric by its name, with or without the prefix ``raypipe_`` and the suffix ``_total``.

    Raises:
        KeyError: unknown name; the message lists all.
    """
    for full in (name, f"raypipe_{name}", f"raypipe_{name}_total"):
        if full in _BY_NAME:
            return _BY_NAME[full]
    raise KeyError(f"There is no metric {name!r}: raypipe.metrics.METRICS has {', '.join(_BY_NAME)}.")


def exported_name(metric: Metric) -> str:
    """Return the name in Prometheus, to which the series of a histogram append ``_bucket``, ``_sum`` or ``_count``."""
    return f"ray_{metric.name}"


def link_name(sender: int, receiver: int) -> str:
    """Format the value of the tag "link", which is one direction between two stages: "0->1"."""
    return f"{sender}->{receiver}"
