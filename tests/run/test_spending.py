"""What a run costs: every hour of every worker, over recoveries and submissions, and nothing in between."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from raypipe.engine.io.storage import Place
from raypipe.errors import LeaseError
from raypipe.run.spending import COST_FILE, KEEP_EVERY_S, Meter, Spent

pytestmark = pytest.mark.engine

HOUR_S = 3600.0


class Cluster:
    """A clock and a number of workers that a test sets."""

    def __init__(self) -> None:
        self.now_s, self.workers = 1000.0, 2

    def meter(self, folder: Path, price: float = 3.0, *, held: bool = False) -> Meter:
        return Meter(Place.of(folder), price, lambda: self.workers, held=held, clock=lambda: self.now_s)


def test_every_hour_of_every_worker_counts(tmp_path: Path) -> None:
    on = Cluster()
    meter = on.meter(tmp_path)
    assert meter.read() == Spent(0.0, 0.0)
    on.now_s += HOUR_S
    assert meter.read() == Spent(6.0, 2.0)
    on.workers = 4  # two have come at some time of this hour
    on.now_s += HOUR_S
    assert meter.read() == Spent(15.0, 5.0)
    assert meter.per_hour == 12.0
    on.workers = 0  # the run waits for workers
    meter.read()
    on.now_s += 10 * HOUR_S
    assert meter.read() == Spent(15.0, 5.0)


def test_the_next_submission_goes_on_and_the_time_between_costs_nothing(tmp_path: Path) -> None:
    on = Cluster()
    meter = on.meter(tmp_path)
    on.now_s += HOUR_S
    meter.close()
    on.now_s += 5 * HOUR_S
    later = on.meter(tmp_path, price=1.0)  # another price from now on
    on.now_s += HOUR_S
    assert later.read() == Spent(8.0, 4.0)
    (line,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert (line["decision"], line["cost"], line["worker_hours"]) == ("cost", 6.0, 2.0)
    assert "2 hours of workers at 3 each" in line["reason"]


def test_workers_that_wait_for_the_next_driver_are_paid(tmp_path: Path) -> None:
    on = Cluster()
    meter = on.meter(tmp_path)
    on.now_s += HOUR_S
    meter.read()  # the driver dies after this
    on.now_s += HOUR_S
    assert on.meter(tmp_path, held=True).read() == Spent(12.0, 4.0)


def test_the_sum_is_kept_now_and_then(tmp_path: Path) -> None:
    on = Cluster()
    meter = on.meter(tmp_path)
    on.now_s += KEEP_EVERY_S / 2
    meter.read()
    assert not (tmp_path / COST_FILE).exists()
    on.now_s += KEEP_EVERY_S / 2
    spent = meter.read()
    assert json.loads((tmp_path / COST_FILE).read_text())["cost"] == spent.cost > 0


@pytest.mark.parametrize("text", ["", "[]", '{"cost": "much"}', "\x00"])
def test_a_file_that_cannot_be_read_begins_anew(tmp_path: Path, text: str) -> None:
    (tmp_path / COST_FILE).write_text(text)
    on = Cluster()
    assert on.meter(tmp_path, held=True).read() == Spent(0.0, 0.0)


def test_a_clock_that_is_set_back_takes_nothing_back(tmp_path: Path) -> None:
    on = Cluster()
    meter = on.meter(tmp_path)
    on.now_s -= HOUR_S
    assert meter.read() == Spent(0.0, 0.0)


def test_who_has_lost_the_run_writes_nothing(tmp_path: Path) -> None:
    @contextmanager
    def lost() -> Iterator[None]:
        raise LeaseError("taken over")
        yield

    on = Cluster()
    meter = Meter(Place.of(tmp_path), 3.0, lambda: 2, guard=lost, clock=lambda: on.now_s)
    on.now_s += HOUR_S
    assert meter.read().cost == 6.0
    meter.close()
    assert list(tmp_path.iterdir()) == []
