"""Inputs of a report, read from a run's folder; missing or damaged files are left out and named."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from raypipe.engine.io.run_files import METRICS, parts_of, read_events, records_of, table_read
from raypipe.engine.io.storage import Place
from raypipe.errors import CheckpointError, ConfigError, PlanError
from raypipe.ir.plan import Plan
from raypipe.ir.report import StepRecord
from raypipe.ir.schedule import parse_action
from raypipe.ir.timeline import Span, Timeline
from raypipe.run.spending import COST_FILE

MOST_RECORDS = 1_000_000


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Content of a run's folder.

    Attributes:
        events: lines of events.jsonl, oldest first.
        records: metrics of each step, oldest first.
        plan: last plan of the run; None if it cannot be read.
        timelines: predicted and measured timeline of one step.
        config: text of config.yaml; "" if the file is missing.
        cost: cost of all submissions so far; None if workers have no price.
        missing: one sentence for each missing or damaged file.
    """

    name: str
    folder: str
    events: list[dict[str, Any]]
    records: list[StepRecord]
    plan: Plan | None = None
    timelines: list[Timeline] = field(default_factory=list)
    config: str = ""
    cost: float | None = None
    missing: tuple[str, ...] = ()

    def events_of(self, *decisions: str) -> list[dict[str, Any]]:
        """Return the events whose field "decision" is one of ``decisions``."""
        return [event for event in self.events if event["decision"] in decisions]


def read_run(folder: Place) -> RunFacts:
    """Read the files of a run's folder; missing or damaged files are named in ``RunFacts.missing``.

    Raises:
        ConfigError: ``folder`` is not the folder of a run.
    """
    missing: list[str] = []
    try:
        events = [event for event in read_events(folder) if "time" in event]
    except CheckpointError as error:
        raise ConfigError(f"{folder} is no folder of a run: {error}") from error
    plan, timelines, config = None, list[Timeline](), ""
    try:
        plan = Plan.from_json(folder.read_bytes("plan.json").decode(errors="replace"))
    except (CheckpointError, PlanError) as error:
        missing.append(f"no plan: {error}")
    try:
        timelines = timelines_of(folder)
    except CheckpointError:
        missing.append("no timeline: a run writes it after its last step")
    if folder.exists("config.yaml"):
        config = folder.read_bytes("config.yaml").decode(errors="replace")
    records, cost = _records(folder, missing), _cost(folder, missing)
    return RunFacts(folder.name, str(folder), events, records, plan, timelines, config, cost, tuple(missing))


def timelines_of(folder: Place) -> list[Timeline]:
    """Read the timelines of a run from timeline/spans.parquet, in the order of the file.

    Raises:
        CheckpointError: the file is missing or unreadable.
    """
    spans: dict[str, list[Span]] = {}
    try:
        table = pq.read_table(pa.BufferReader(folder.read_bytes("timeline/spans.parquet")))
    except pa.ArrowException as error:
        raise CheckpointError(f"{folder / 'timeline/spans.parquet'} cannot be read: {error}") from error
    for row in table.to_pylist():
        span = Span(row["worker"], parse_action(row["action"]), row["start_s"], row["end_s"])
        spans.setdefault(row["source"], []).append(span)
    return [Timeline(tuple(listed), source, name=folder.name) for source, listed in spans.items()]


def _cost(folder: Place, missing: list[str]) -> float | None:
    if not folder.exists(COST_FILE):
        return None
    try:
        return float(json.loads(folder.read_bytes(COST_FILE))["cost"])
    except (CheckpointError, KeyError, TypeError, ValueError) as error:
        missing.append(f"no cost: {COST_FILE} cannot be read ({error!r})")
        return None


def _records(folder: Place, missing: list[str]) -> list[StepRecord]:
    names = [METRICS] if folder.size_bytes(METRICS) is not None else [part.name for part in parts_of(folder)]
    records: list[StepRecord] = []
    for name in names:
        try:
            records += records_of(table_read(folder.read_bytes(name), str(folder / name)))
        except CheckpointError as error:
            missing.append(str(error))
        if len(records) > MOST_RECORDS:
            missing.append(f"metrics after step {records[-1].step}: a report takes {MOST_RECORDS:,} steps")
            break
    if not records:
        missing.append("no metrics: none of a step have been written yet")
    return records
