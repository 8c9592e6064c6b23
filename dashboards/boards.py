"""The boards as a table: what each panel shows, why, and which metrics of ``raypipe.metrics`` answer it.

    METRICS --metric_query()--> Query --> Panel --> Board --generate.py--> Grafana's JSON
                                                       +--render.py-----> a picture, from a real Prometheus

One series of Prometheus is one line: values are the largest over the labels that Ray adds, such as the process, because
a driver that is started again leaves the series of the one before for a while.
"""

from __future__ import annotations

from typing import NamedTuple

from raypipe.metrics import exported_name, metric

__all__ = ["BOARDS", "Board", "Panel", "Query", "metric_query"]

CHOSEN = '{run=~"$run"}'
"""The runs that are chosen at the top of the board."""


class Query(NamedTuple):
    """An expression in PromQL, and the name of its lines, with labels in double braces."""

    expression: str
    legend: str


class Panel(NamedTuple):
    """One picture of a board.

    Attributes:
        unit: Grafana's name of it.
        meaning: what to read in it, and what to do.
        stat: one number instead of lines over time.
        width: of 24.
        needs: what has to happen before there is anything to see; "" where it is there from the first step.
    """

    title: str
    unit: str
    queries: tuple[Query, ...]
    meaning: str
    stat: bool = False
    width: int = 12
    needs: str = ""


class Board(NamedTuple):
    """A page of panels."""

    uid: str
    title: str
    meaning: str
    panels: tuple[Panel, ...]


def metric_query(name: str, word: str = "") -> Query:
    """A line for every run, and stage or link where the metric has one: its newest value.

    Args:
        word: what to call it where a panel has several.
    """
    found = metric(name)
    names = {"run": "{{run}}", "stage": "stage {{stage}}", "link": "link {{link}}"}
    legend = " ".join([*(names[tag] for tag in found.tags), *([word] if word else [])])
    return Query(f"max by ({', '.join(found.tags)}) ({exported_name(found)}{CHOSEN})", legend)


def _number(title: str, unit: str, query: Query, meaning: str, needs: str = "") -> Panel:
    return Panel(title, unit, (query,), meaning, stat=True, width=4, needs=needs)


_STEPS = (metric_query("step_seconds", "measured"), metric_query("predicted_step_seconds", "predicted"))
_MILLION = Query(
    f"max by (run) (ray_raypipe_cost_per_hour{CHOSEN}) / 0.0036"
    f" / max by (run) (ray_raypipe_samples_per_second{CHOSEN})",
    "{{run}}",
)
_PRICE = "PipelineConfig(worker_price_per_hour)"
_SINCE = Query(f"min by (run) (time() - ray_raypipe_last_step_timestamp_seconds{CHOSEN})", "{{run}}")
_SIZE = (metric_query("num_workers", "workers"), metric_query("num_stages", "stages"))
_BUCKETS = f"sum by (run, le) (ray_raypipe_recovery_seconds_bucket{CHOSEN})"

OVERVIEW = Board(
    "raypipe-overview",
    "raypipe: overview",
    "Whether a run trains, how fast, and how far from its plan.",
    (
        _number("Steps", "short", metric_query("steps"), "Steps done by this driver, those done again included."),
        _number("Last step ended", "s", _SINCE, "Seconds ago. Much more than a step: RaypipeStepStalled tells."),
        _number("Step", "s", metric_query("step_seconds"), "Seconds of the last step."),
        _number("Samples per second", "short", metric_query("samples_per_second"), "Of the last step."),
        _number("Idle", "percentunit", metric_query("bubble_fraction"), "Share of worker time without computation."),
        _number("Skipped steps", "short", metric_query("skipped_steps"), "Their loss or norm was not finite.",
                "a step that is skipped"),
        Panel("Loss", "short", (metric_query("loss"),), "Of the last mini-batch, after loss_reduction."),
        Panel("Gradient norm", "short", (metric_query("grad_norm"),), "Of the whole model, before clipping."),
        Panel("Step", "s", _STEPS,
              "Where measured stays above predicted, a stage or a link is slower than the plan knew."),
        Panel("Idle share", "percentunit",
              (metric_query("bubble_fraction", "measured"), metric_query("predicted_bubble_fraction", "predicted")),
              "The bubble: workers that wait. Far above predicted: see the board of links."),
        Panel("Samples per second", "short", (metric_query("samples_per_second"),), "Of the last step."),
        Panel("Tokens per second", "short", (metric_query("tokens_per_second"),), "Padding included.",
              needs="data with token ids"),
        Panel("Learning rate", "short", (metric_query("learning_rate"),), "Of the first parameter group."),
        Panel("Goodput", "percentunit", (metric_query("goodput"),),
              "Time in which the run got further. Pauses, recoveries and steps done again lower it."),
        Panel("Computing per step", "s", (metric_query("stage_busy_seconds"),),
              "Stages that differ much are cut badly, or one worker has become slow."),
        Panel("Cost", "short", (metric_query("cost"), metric_query("cost_per_hour", "an hour")),
              "In the currency of worker_price_per_hour, with interruptions and earlier submissions.", needs=_PRICE),
        Panel("Cost of a million samples", "short", (_MILLION,), "At the price and the speed of the moment.",
              needs=_PRICE),
    ),
)  # fmt: skip

LINKS = Board(
    "raypipe-links",
    "raypipe: links and Ada-Grouper",
    "What travels between stages, what the links can carry, and what the controller does about it.",
    (
        Panel("Sent", "Bps", (metric_query("link_bytes_per_second"),), "Boundary tensors as they travel, one way."),
        Panel("Bandwidth, estimated", "Bps", (metric_query("link_bandwidth_bytes_per_second"),),
              "What the link can carry, from the times of messages. Sent close to it: the link is full.",
              needs="a link on which messages meet"),
        Panel("A message, estimated", "s", (metric_query("link_message_seconds"),),
              "An uncompressed boundary message on an idle link. Doubled for minutes: see RaypipeLinkDegraded.",
              needs="a controller, which retune_interval_steps=0 turns off"),
        Panel("Waiting for messages", "s", (metric_query("link_wait_seconds"),),
              "Seconds of the last step that a stage stood still."),
        Panel("Compression", "short", (metric_query("codec_ratio"),), "Bytes before the codec over bytes on the link."),
        Panel("Group size and micro-batches", "short",
              (metric_query("group_size", "k"), metric_query("num_microbatches", "micro-batches")),
              "k of kFkB and the number of micro-batches, as they are turned."),
        Panel("Retunes", "short", (metric_query("retunes"),), "Times the controller changed the plan.",
              needs="a controller that finds something better"),
        Panel("Step", "s", _STEPS,
              "Whether a change paid."),
    ),
)  # fmt: skip

_HAPPENS = "a failure that is survived"

ELASTICITY = Board(
    "raypipe-elasticity",
    "raypipe: failures and size",
    "Failures, what they cost, and how many workers the run has.",
    (
        _number("Workers", "short", metric_query("num_workers"), "That hold stages."),
        _number("Stages", "short", metric_query("num_stages"), "Of the plan."),
        _number("Failures", "short", metric_query("failures"), "Since this driver began.", _HAPPENS),
        _number("Failures allowed", "short", metric_query("failures_allowed"), "FailureConfig(max_failures).",
                "a limit on failures"),
        _number("Steps done again", "short", metric_query("lost_steps"), "After failures.", "steps that are lost"),
        _number("Plan", "short", metric_query("generation"), "Its generation: counts failures, resizes and cuts."),
        Panel("Workers and stages", "short", _SIZE, "As they come and go."),
        Panel("Failures", "short",
              (metric_query("failures", "noticed"), metric_query("failures_allowed", "allowed")),
              "Close to what is allowed: see RaypipeFailureBudget.", needs=_HAPPENS),
        Panel("Recovery", "s",
              (Query(f"histogram_quantile(0.5, {_BUCKETS})", "{{run}} median"),
               Query(f"histogram_quantile(0.95, {_BUCKETS})", "{{run}} 95 of 100"),
               Query(f"sum by (run) (ray_raypipe_recovery_seconds_sum{CHOSEN})"
                     f" / sum by (run) (ray_raypipe_recovery_seconds_count{CHOSEN})", "{{run}} mean")),
              "From a failure until all stages are ready again.", needs=_HAPPENS),
        Panel("Driver not heard", "percentunit", (metric_query("driver_silence_fraction"),),
              "By stages, in shares of driver_grace_s; at 100% they end. See RaypipeDriverLost.",
              needs="a driver that is lost"),
        Panel("Since the last step", "s", (_SINCE,), "Peaks are recoveries, resizes, checkpoints and evaluations."),
        Panel("Steps done again", "short", (metric_query("lost_steps"),), "By failures.", needs="steps that are lost"),
        Panel("Samples per second", "short", (metric_query("samples_per_second"),), "What is left after a change."),
    ),
)  # fmt: skip

MEMORY = Board(
    "raypipe-memory",
    "raypipe: memory",
    "What the processes of the stages hold, and what the plan knew of it.",
    (
        Panel("Memory of the process", "bytes", (metric_query("resident_memory_bytes"),),
              "As the kernel counts it, with Python, torch and Ray. One that grows and grows leaks."),
        Panel("Most so far", "bytes", (metric_query("peak_memory_bytes"),), "Of the same, seen every few seconds."),
        Panel("Predicted", "bytes", (metric_query("predicted_memory_bytes"),),
              "Of the plan: weights, gradients, optimizer, activations, messages. Libraries are not in it.",
              needs="a plan from a profile"),
        Panel("Weight versions", "short", (metric_query("weight_versions"),),
              "More than one with asynchronous schedules, each as large as the weights."),
        Panel("Micro-batches", "short", (metric_query("num_microbatches"),), "More of them are smaller."),
        Panel("Computing per step", "s", (metric_query("stage_busy_seconds"),), "Recomputation shows here."),
    ),
)  # fmt: skip

BOARDS = (OVERVIEW, LINKS, ELASTICITY, MEMORY)
