"""A run in threads whose steps are published: what is shown before the first step, between steps, after the last."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from raypipe.engine.local import LocalFleet
from raypipe.ir.report import StepReport, merge_reports
from raypipe.run.journal import Journal
from raypipe.run.loop import LoopSetup, run_loop
from raypipe.run.plans.blueprint import assemble
from raypipe.run.requests import Requests
from raypipe.run.spending import Meter
from raypipe.runtime.driver import publish
from raypipe.runtime.driver.publish import Published, Publisher
from tests.prepare.test_resume import trainer
from tests.runs.test_replicas import trainer as replicated
from tests.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.usefixtures("shared_captures")]

RUN = {"run": "published"}


class Told(Publisher):
    """Keeps in mind what Ray is told, with the gauges as they stand."""

    def __init__(self, *given: Any) -> None:
        self.repeats = 0
        super().__init__(*given)

    def repeat(self) -> None:
        super().repeat()
        self.repeats += 1

    def gauge(self, name: str, **tags: str) -> float | None:
        return self._standing.get((f"raypipe_{name}", tuple({**RUN, **tags}.items())))


def test_replicas_of_a_stage_are_shown_as_one(tmp_path: Path) -> None:
    """What they send is added up, without what they exchange; seconds are the mean."""
    told = Told("published", ((0, 1), (2,)))
    sent = [(1000, 0), (500, 0), (0, 300)]
    reports = [
        StepReport(
            stage, 0, 8, 2.5, 1.5, 0.0, 1.0, 0.25 * (place + 1), 0.125, sent[place], 1,
            uncompressed_bytes=(2 * sent[place][0], sent[place][1]), worker=place, exchanged_bytes=7000,
        )
        for place, stage in enumerate((0, 0, 1))
    ]  # fmt: skip
    record = merge_reports(reports, 0.5)
    told.step(record, reports)
    assert record.link_bytes_per_s == (1800 + 3 * 7000) / 0.5
    assert [told.gauge("stage_busy_seconds", stage=stage) for stage in "01"] == [0.375, 0.75]
    assert told.gauge("link_bytes_per_second", link="0->1") == 1500 / 0.5
    assert told.gauge("link_bytes_per_second", link="1->0") == 300 / 0.5
    assert told.gauge("codec_ratio", link="0->1") == 2.0
    made = replicated(tmp_path, "two", num_replicas=[2, 1])
    job = made._prepared()
    plan = assemble(made._blueprint(job, 3, local=True), job.planned)
    published = Published(Journal("two", str(tmp_path)), told, plan, 0, lambda: held)
    held = {0: ("a", 1000), 1: ("b", 3000), 2: ("c", 2000)}
    published.close()
    published._memory()
    assert [told.gauge("peak_memory_bytes", stage=stage) for stage in "01"] == [3000.0, 2000.0]
    held |= {1: ("d", 500), 2: ("c", 1500)}  # another process has the place of worker 1, and a peak of its own
    published._memory()
    assert [told.gauge("peak_memory_bytes", stage=stage) for stage in "01"] == [1000.0, 2000.0]


def test_a_run_from_before_its_first_step_until_it_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publish, "REPEAT_S", 0.05)
    made = trainer("mlp", tmp_path, "published", 2)
    job = made._prepared()
    blueprint = made._blueprint(job, 3, local=True)
    spec, assembled = blueprint.spec, assemble(blueprint, job.planned)
    homes = assembled.plan.schedule.wiring.homes
    journal, told = Journal(spec.name, str(spec.place)), Told("published", homes)
    hours = iter(range(1000, 10**9, 3600))
    meter = Meter(spec.place, 1.5, lambda: 2, clock=lambda: float(next(hours)))
    published = Published(journal, told, assembled, 3, lambda: {0: ("a", 1000), 1: ("b", 2000)}, meter)
    begun_s = told.gauge("last_step_timestamp_seconds")
    assert begun_s == pytest.approx(time.time(), abs=60)
    assert (told.gauge("running"), told.gauge("failures_allowed")) == (1.0, 3.0)
    assert (told.gauge("num_stages"), told.gauge("num_workers")) == (2.0, 2.0)
    assert told.gauge("num_microbatches") == assembled.plan.num_microbatches

    fleet = LocalFleet(blueprint.setup, assembled.setup, job.tensors)
    try:
        run_loop(LoopSetup(fleet, spec, assembled, published, Requests()))
    finally:
        fleet.stop()
    wait_until(lambda: told.repeats >= 2 and told.gauge("cost") is not None)
    published.close()
    meter.close()

    assert (told.gauge("last_step_timestamp_seconds") or 0.0) > begun_s
    assert told.gauge("running") == 0.0
    assert [told.gauge("resident_memory_bytes", stage=stage) for stage in "01"] == [1000.0, 2000.0]
    assert [told.gauge("peak_memory_bytes", stage=stage) for stage in "01"] == [1000.0, 2000.0]
    assert told.gauge("cost_per_hour") == 3.0
    cost = json.loads((tmp_path / "published" / "cost.json").read_text())["cost"]
    assert 0 < (told.gauge("cost") or 0.0) <= cost
    assert journal.status.cost == told.gauge("cost")
    repeats = told.repeats
    time.sleep(0.2)
    assert told.repeats == repeats


def test_stages_that_are_gone_are_not_repeated() -> None:
    told = Told("published", ((0,), (1,), (2,)))
    told.event("weight_versions", 1, stage=2)
    told.event("codec_ratio", 1, link="1->2")
    told.event("loss", 2.5)
    told.resized(((0,), (1,)))
    assert told.gauge("weight_versions", stage="2") is None
    assert told.gauge("codec_ratio", link="1->2") is None
    assert told.gauge("loss") == 2.5
