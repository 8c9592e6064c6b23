"""The table of metrics: names and tags that Prometheus takes, fed from fields that exist."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, fields

import pytest

from raypipe.ir.report import StepRecord, StepReport
from raypipe.metrics import METRICS, Kind, Metric, exported_name, metric

PROMISED = """
step_seconds samples_per_second tokens_per_second goodput learning_rate loss grad_norm bubble_fraction steps_total
samples_total tokens_total last_step_timestamp_seconds running driver_silence_fraction stage_busy_seconds
link_bytes_per_second link_wait_seconds link_message_seconds link_bandwidth_bytes_per_second codec_ratio group_size
num_microbatches weight_versions resident_memory_bytes peak_memory_bytes predicted_memory_bytes predicted_step_seconds
predicted_bubble_fraction num_stages num_workers retunes_total failures_total failures_allowed recovery_seconds
lost_steps_total skipped_steps_total cost cost_per_hour generation
"""


def test_the_table_has_what_is_promised() -> None:
    assert [found.name for found in METRICS] == [f"raypipe_{name}" for name in PROMISED.split()]


@pytest.mark.parametrize("found", METRICS, ids=lambda found: found.name)
def test_a_line_of_the_table(found: Metric) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]*", found.name)
    assert found.name.endswith("_total") == (found.kind is Kind.COUNTER)
    assert found.tags in (("run",), ("run", "stage"), ("run", "link"))
    assert bool(found.boundaries) == (found.kind is Kind.HISTOGRAM)
    assert list(found.boundaries) == sorted(set(found.boundaries))
    assert all(bound > 0 for bound in found.boundaries)
    assert found.meaning.endswith(".")
    assert found.unit in {"s", "B", "B/s", "1/s", "1"}
    for ending, unit in (("_seconds", "s"), ("_bytes", "B"), ("_bytes_per_second", "B/s")):
        assert not found.name.endswith(ending) or found.unit == unit
    assert exported_name(found) == f"ray_{found.name}"
    with pytest.raises(FrozenInstanceError):
        found.name = "other"  # type: ignore[misc]


@pytest.mark.parametrize("found", [found for found in METRICS if found.source], ids=lambda found: found.name)
def test_a_source_exists(found: Metric) -> None:
    """Of the record of the pipeline where there is one series, of the stages' reports where there are several."""
    owner, _, name = found.source.partition(".")
    kind = {"StepRecord": StepRecord, "StepReport": StepReport}[owner]
    assert name in {field.name for field in fields(kind)} | {n for n in vars(kind) if not n.startswith("_")}
    assert (owner == "StepRecord") == (found.tags == ("run",))


def test_a_metric_is_found_by_any_of_its_names() -> None:
    assert metric("retunes") is metric("retunes_total") is metric("raypipe_retunes_total")
    assert metric("loss").source == "StepRecord.loss"
    with pytest.raises(KeyError, match=r"no metric 'los'.*raypipe_loss"):
        metric("los")
