"""The alerts as a table: what is wrong, how Prometheus notices, and what to do.

Each but one holds for runs that train: ``ray_raypipe_running`` is 0 once a run has ended, and its series are gone soon
after. They are gone too where a driver is lost, which its stages tell.
A fault that fires each of them, and what must not, is in ``tests/dashboards/alerts_test.yaml`` for promtool.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ALERTS", "Alert"]


class Alert(NamedTuple):
    """One rule: what is measured, and the limit that it is held against.

    Attributes:
        measure: in PromQL, for every run or link of a run; its value is what the summary tells.
        limit: a comparison and what with; further conditions may follow.
        lasting: for so long, before anybody is told.
        summary: a sentence, with the labels and the value in Prometheus' own templates.
        cure: what to look at.
        runs: which of them it is about.
        needs: what has to happen before there is anything to measure; "" where it is there from the first steps.
    """

    name: str
    severity: str
    measure: str
    limit: str
    lasting: str
    summary: str
    cure: str
    needs: str = ""
    runs: str = "and on (run) (max by (run) (ray_raypipe_running) == 1)"

    @property
    def expression(self) -> str:
        """True for the runs, or links of runs, that are in trouble."""
        return f"{self.measure} {self.limit} {self.runs}"


def _of(name: str, by: str = "run", offset: str = "") -> str:
    return f"max by ({by}) (ray_raypipe_{name}{offset})"


_MESSAGE = _of("link_message_seconds", "run, link")
_FAILURES = _of("failures_total")

ALERTS = (
    Alert(
        "RaypipeStepStalled",
        "critical",
        f"time() - {_of('last_step_timestamp_seconds')}",
        f"> clamp_min(10 * ({_of('step_seconds')} or {_of('predicted_step_seconds')}), 60)",
        "1m",
        "Run {{ $labels.run }} has finished no step for {{ $value | humanizeDuration }}.",
        "Ask `raypipe status {{ $labels.run }}` what it waits for: workers, storage, or a stage.",
    ),
    Alert(
        "RaypipeDriverLost",
        "critical",
        "max by (run) (max_over_time(ray_raypipe_driver_silence_fraction[2m]))",
        "> 0.5",
        "0m",
        "Stages of run {{ $labels.run }} have not heard its driver for {{ $value | humanizePercentage }} of"
        " driver_grace_s.",
        "Submitted again by its name, the run goes on with what these stages hold; once driver_grace_s is over they"
        " end, and it goes on from its newest checkpoint.",
        "a driver that is lost",
        f"unless on (run) {_of('running')}",
    ),
    Alert(
        "RaypipeBubbleTooHigh",
        "warning",
        f"max by (run) (avg_over_time(ray_raypipe_bubble_fraction[5m])) - {_of('predicted_bubble_fraction')}",
        "> 0.15",
        "5m",
        "Workers of run {{ $labels.run }} are idle for {{ $value | humanizePercentage }} of the time above the plan.",
        "The board of links says whether stages wait for messages; the overview, whether one stage computes longer.",
    ),
    Alert(
        "RaypipeLinkDegraded",
        "warning",
        _MESSAGE,
        "> 2 * max by (run, link) (quantile_over_time(0.1, ray_raypipe_link_message_seconds[1h]))"
        f" and {_MESSAGE} * on (run) group_left {_of('num_microbatches')}"
        f" > on (run) group_left 0.05 * {_of('step_seconds')}",
        "2m",
        "A message on link {{ $labels.link }} of run {{ $labels.run }} takes {{ $value | humanizeDuration }}, over"
        " twice what it took before.",
        "Look for traffic of others between these two nodes with `raypipe probe`; codecs send less.",
    ),
    Alert(
        "RaypipeFailureBudget",
        "critical",
        _FAILURES,
        f">= 0.75 * {_of('failures_allowed')}",
        "0m",
        "Run {{ $labels.run }} has had {{ $value }} failures, and one beyond FailureConfig(max_failures) ends it.",
        "events.jsonl in the run's folder says what failed; submitted again, the run goes on and counts from 0.",
        "a failure",
    ),
    Alert(
        "RaypipeFailingOften",
        "warning",
        f"{_FAILURES} - ({_of('failures_total', offset=' offset 1h')} or 0 * {_FAILURES})",
        ">= 3",
        "0m",
        "Run {{ $labels.run }} has had {{ $value }} failures within an hour.",
        "events.jsonl in the run's folder says what failed, and on which node.",
        "a failure",
    ),
)  # fmt: skip
